"""How ranks share the work: which of them compute the same rows, and which hold parts of one model."""

import math
from dataclasses import dataclass, replace

from toolkit.config.schema import AUTO, RunConfig
from toolkit.messages import ConfigError, joined, tr


@dataclass(frozen=True, kw_only=True, slots=True)
class Mesh:
    """One rank's position among all. Ranks that work on the same rows are a model's ranks; their numbers are
    consecutive, and among them those of ranks that split matrices. Only with pipeline stages the ranks of one *stage*
    are consecutive, as DeepSpeed numbers them (0.19.8, runtime/pipe/topology.py, PipeModelDataParallelTopology).
    """

    world_size: int
    """Ranks over all machines."""
    rank: int = 0
    tensor: int = 1
    """Ranks that split each layer's matrices."""
    sequence: int = 1
    """Ranks that split each row's tokens."""
    pipeline: int = 1
    """Ranks that split the layers."""
    expert: int = 1
    """Ranks that share one copy of all experts, whatever rows they work on; their numbers are consecutive."""

    @property
    def model_ranks(self) -> int:
        """Ranks that work on the same rows."""
        return self.tensor * self.sequence * self.pipeline

    @property
    def data_ranks(self) -> int:
        """Number of parts into which the global batch is divided."""
        return self.world_size // self.model_ranks

    @property
    def data_rank(self) -> int:
        """This rank's part of the global batch, from 0."""
        if self.pipeline > 1:  # (stage, data, tensor), the last one changing fastest; never with `sequence`
            return self.rank // self.tensor % self.data_ranks
        return self.rank // self.model_ranks

    @property
    def stage(self) -> int:
        """This rank's pipeline stage."""
        return self.rank // (self.world_size // self.pipeline)

    @property
    def part(self) -> int:
        """Which part of each row's tokens is this rank's, from 0."""
        return self.rank // self.tensor % self.sequence

    @property
    def leader(self) -> int:
        """The first of the ranks that compute the same samples in this stage: values of samples are taken from it, with
        pipeline stages from that of the last one.
        """
        return self.rank - self.rank % (self.tensor * self.sequence)

    @property
    def is_leader(self) -> bool:
        """Whether values of samples are taken from this rank, for those that work on the same rows."""
        return self.rank == self.leader and self.stage == self.pipeline - 1

    @property
    def copies(self) -> int:
        """Number of ranks that count the same token: a sum over all ranks is so many times too large."""
        return self.tensor


def model_ranks(cfg: RunConfig) -> int:
    """Return how many ranks share one model: the fewest that a run can have."""
    return math.lcm(cfg.parallel.tensor * cfg.parallel.sequence * cfg.parallel.pipeline, cfg.parallel.expert)


def mesh_of(cfg: RunConfig, world_size: int, rank: int = 0) -> Mesh:
    """Return a rank's position among all ranks of all nodes; a ConfigError if they cannot be divided so."""
    sizes = {name: getattr(cfg.parallel, name) for name in ("tensor", "sequence", "pipeline", "expert")}
    mesh, fewest = Mesh(world_size=world_size, rank=rank, **sizes), model_ranks(cfg)
    if world_size % fewest:
        raise ConfigError(
            "{ranks} ranks cannot be divided into groups of {size} (parallel.tensor {tensor} x parallel.sequence "
            "{sequence} x parallel.pipeline {pipeline}, parallel.expert {expert}). Start on a multiple of {size} "
            "ranks.",
            ranks=world_size,
            size=fewest,
            **sizes,
        )
    return mesh


def micro_rows(cfg: RunConfig) -> int:
    """Return `batch.micro_per_gpu`; a ConfigError if it is auto, and only training finds the number."""
    if isinstance(cfg.batch.micro_per_gpu, str):
        raise ConfigError(
            "batch.micro_per_gpu = {value} is a number only when training has begun: it is then in config.yaml of "
            "the run. Here give one: batch.micro_per_gpu=1.",
            value=cfg.batch.micro_per_gpu,
        )
    return cfg.batch.micro_per_gpu


def micro_sizes(cfg: RunConfig, world_size: int) -> list[int]:
    """Return the micro-batches that divide a rank's share of the global batch, ascending; [] if it cannot be shared."""
    per_rank, remainder = divmod(cfg.batch.global_size, mesh_of(cfg, world_size).data_ranks)
    if remainder:
        return []
    # The divisors up to the square root; with each comes the one that it is multiplied by.
    smaller = [rows for rows in range(1, math.isqrt(per_rank) + 1) if per_rank % rows == 0]
    return sorted({*smaller, *(per_rank // rows for rows in smaller)})


def largest_divisor(number: int, most: int) -> int:
    """Return the largest divisor that is at most `most`."""
    return max(size for size in range(1, min(number, most) + 1) if number % size == 0)


def with_micro_batch(cfg: RunConfig, rows: int = 1) -> RunConfig:
    """Return a config whose `batch.micro_per_gpu` is a number: `rows` in the place of auto."""
    if cfg.batch.micro_per_gpu != AUTO:
        return cfg
    return replace(cfg, batch=replace(cfg.batch, micro_per_gpu=rows))


def nearest_multiples(size: int, unit: int) -> str:
    """Return the sentence that names the multiples of `unit` next to a global batch."""
    below, above = size // unit * unit, -(-size // unit) * unit
    return tr("Use {below} or {above}.", below=below, above=above) if below else tr("Use {above}.", above=above)


def fitting_batch(cfg: RunConfig, world_size: int) -> tuple[int, int]:
    """Return the global batch and the micro-batch nearest to a config's that its ranks can share: the same global batch
    wherever they can, and no larger micro-batch.
    """
    ranks = mesh_of(cfg, world_size).data_ranks
    per_rank = max(round(cfg.batch.global_size / ranks), 1)
    return per_rank * ranks, largest_divisor(per_rank, micro_rows(cfg))


def accumulation(cfg: RunConfig, world_size: int, where: str = "") -> int:
    """Return micro-batches per rank and step: global_size / (micro_per_gpu x data-parallel ranks).
    A ConfigError if micro_per_gpu is auto, or if this is no whole number; the message begins with `where`, such as
    "recipes/x.yaml:12: ", and names the nearest sizes.
    """
    size, micro = cfg.batch.global_size, micro_rows(cfg)
    ranks = mesh_of(cfg, world_size).data_ranks
    unit = micro * ranks
    if size % unit:
        sentence = tr(
            "batch.global_size = {size} is not a multiple of batch.micro_per_gpu ({micro}).", size=size, micro=micro
        )
        if ranks > 1:
            sentence = tr(
                "batch.global_size = {size} is not a multiple of batch.micro_per_gpu ({micro}) x {ranks} ranks "
                "= {unit}.",
                size=size,
                micro=micro,
                ranks=ranks,
                unit=unit,
            )
        smaller = ""
        if size % ranks == 0:  # with another micro-batch the global batch can stay
            smaller = tr("Or batch.micro_per_gpu={micro}.", micro=fitting_batch(cfg, world_size)[1])
        raise ConfigError(joined(where + sentence, nearest_multiples(size, unit), smaller))
    return size // unit
