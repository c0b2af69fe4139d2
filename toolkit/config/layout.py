"""How ranks share the work: which of them compute the same rows, and which hold parts of one model."""

from dataclasses import dataclass

from toolkit.config.schema import RunConfig
from toolkit.errors import ConfigError
from toolkit.messages import tr


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """One rank's place among all. Ranks that work on the same rows are a model's ranks; they lie side by side.

    Only with pipeline stages do the ranks of one *stage* lie side by side, as DeepSpeed numbers them (0.19.8,
    runtime/pipe/topology.py, PipeDataParallelTopology).
    """

    world_size: int
    """Ranks over all machines."""
    rank: int = 0
    """This one."""
    tensor: int = 1
    """Ranks that split each layer's matrices."""
    sequence: int = 1
    """Ranks that split each row's tokens."""
    pipeline: int = 1
    """Ranks that split the layers."""

    @property
    def model_ranks(self) -> int:
        """Ranks that work on the same rows."""
        return self.tensor * self.sequence * self.pipeline

    @property
    def data_ranks(self) -> int:
        """Into how many parts the global batch is divided."""
        return self.world_size // self.model_ranks

    @property
    def data_rank(self) -> int:
        """Which of these parts is this rank's."""
        return self.rank % self.data_ranks if self.pipeline > 1 else self.rank // self.model_ranks

    @property
    def part(self) -> int:
        """Which part of each row's tokens is this rank's, from 0."""
        return self.rank % self.sequence

    @property
    def copies(self) -> int:
        """How many ranks count the same token: what is summed over all ranks is so many times too large."""
        return self.tensor


def model_ranks(cfg: RunConfig) -> int:
    """Return how many ranks share one model: the fewest that a run can have."""
    return cfg.parallel.tensor * cfg.parallel.sequence * cfg.parallel.pipeline


def layout_of(cfg: RunConfig, world_size: int, rank: int = 0) -> Layout:
    """Return a rank's place.

    Args:
        cfg: the run.
        world_size: ranks over all machines.
        rank: which one.

    Raises:
        ConfigError: the ranks cannot be divided so.
    """
    parallel = cfg.parallel
    layout = Layout(
        world_size=world_size,
        rank=rank,
        tensor=parallel.tensor,
        sequence=parallel.sequence,
        pipeline=parallel.pipeline,
    )
    if world_size % layout.model_ranks:
        raise ConfigError(
            tr(
                "{ranks} ranks cannot be divided into groups of {size} (parallel.tensor {tensor} x parallel.sequence "
                "{sequence} x parallel.pipeline {pipeline}). Start on a multiple of {size} ranks.",
                ranks=world_size,
                size=layout.model_ranks,
                tensor=parallel.tensor,
                sequence=parallel.sequence,
                pipeline=parallel.pipeline,
            )
        )
    return layout
