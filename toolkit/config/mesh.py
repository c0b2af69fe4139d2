"""How ranks share the work: which of them compute the same rows, and which hold parts of one model."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from toolkit.config.schema import AUTO, RunConfig
from toolkit.messages import ConfigError, joined, tr


@dataclass(frozen=True, kw_only=True, slots=True)
class Mesh:
    """One rank's position among all. Ranks that work on the same rows are a model's ranks; their numbers are
    consecutive, and among them those of ranks that split matrices.

    Only with pipeline stages the ranks of one *stage* are consecutive, as DeepSpeed numbers them (0.19.8,
    runtime/pipe/topology.py, PipeModelDataParallelTopology).
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
        if self.pipeline > 1:
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


FAMILIES = ("chatglm", "glm", "glm4", "llama", "mistral", "qwen2", "qwen3")
"""`model_type` of the models whose parts, of tensors or of layers, compute what the model does, as a test compares."""


class Split(Enum):
    """How one parameter is divided."""

    rows = "rows"
    """Each rank has some of the rows of a matrix, or numbers of a bias, side by side."""
    pairs = "pairs"
    """Two matrices lie on top of each other, and each rank has rows of both."""
    columns = "columns"
    """Each rank has some of a matrix's columns; what comes out is added up over the ranks."""
    last = "last"
    """Each rank has some of the numbers along the last axis."""


AXES = {Split.columns: 1, Split.last: -1}
"""The axis that is divided, where it is not the first."""

# Of what peft puts in a matrix's place: the matrix itself or a trained copy, and LoRA's factor that has the split side.
# The other factor is whole on every rank; what comes between the two is whole, too, or added up over the ranks.
_IN_ITS_PLACE = r"\.base_layer|\.original_module|\.modules_to_save\.default"
_ROWS = rf"({_IN_ITS_PLACE}|\.lora_B\.default|\.lora_magnitude_vector\.default)?\.(weight|bias)$"
_PATTERNS = {
    Split.rows: rf".*\.(q_proj|k_proj|v_proj|gate_proj|up_proj|query_key_value|dense_h_to_4h){_ROWS}",
    Split.pairs: rf".*\.gate_up_proj{_ROWS}",
    # Their biases are added once, after the sum over the ranks.
    Split.columns: r".*\.(o_proj|down_proj|attention\.dense|dense_4h_to_h)"
    rf"({_IN_ITS_PLACE}|\.lora_A\.default)?\.weight$",
}
EXPERTS = r".*\.experts(\.base_layer)*\.(\w+|lora_A\.\w+\.weight)$"
"""Of all routed experts of a layer, one after another; ranks that divide them have some of them, whole."""
_LORA_OF_EXPERTS = r".*\.experts(\.base_layer)*\.lora_B\.\w+\.weight$"
"""The same, but experts are the last axis."""
_ON_HEADS = r".*\.(q_norm|k_norm)\.weight$"
"""Whole on every rank, but each applies them to its own heads: their gradients are added up."""


def split_of(name: str) -> Split | None:
    """Return how a parameter is split; None for one that every rank has whole."""
    if re.match(EXPERTS, name):
        return Split.rows
    if re.match(_LORA_OF_EXPERTS, name):
        return Split.last
    return next((split for split, pattern in _PATTERNS.items() if re.match(pattern, name)), None)


def part_shape(name: str, shape: tuple[int, ...], size: int, *, back: bool = False) -> tuple[int, ...]:
    """Return the shape of a rank's part of a parameter of this shape, split over `size` ranks; with `back` the shape of
    the whole parameter, of a part's. A parameter that is not split keeps its shape.
    """
    split = split_of(name)
    axis = -1 if split is None else AXES.get(split, 0) % len(shape)
    lengths = (length * size if back else length // size for length in shape)
    return tuple(new if number == axis else old for number, (old, new) in enumerate(zip(shape, lengths, strict=True)))


def partition_config() -> dict[str, Any]:
    """Return how parameters are split as `tensor_parallel.partition_config` of DeepSpeed's AutoTP, which splits nothing
    that is not named here.

    Its own guess (heuristics, or transformers' plan) would gather logits and guess fused matrices from class names
    (deepspeed 0.19.8, engine._apply_autotp_partitioning).
    """
    rows, pairs, columns = _PATTERNS.values()
    return {
        "use_default_specs": False,
        "layer_specs": [
            {"patterns": [rows], "partition_type": "column"},
            {"patterns": [pairs], "partition_type": "column", "shape": [2, -1], "partition_dim": 0},
            {"patterns": [columns], "partition_type": "row"},
            {"patterns": [_ON_HEADS], "partition_type": "skip", "grad_allreduce": True},
        ],
    }


def check_split(config: Mapping[str, Any], size: int) -> None:
    """Raise a ConfigError if a model cannot be split over `size` ranks. `config`: its `heads`, `key_heads` and `inner`
    (feed-forward width), and `model_type` unless that is known to be supported.
    """
    if size == 1:
        return
    kind = config.get("model_type", FAMILIES[0])
    if kind not in FAMILIES:
        raise ConfigError(
            "parallel.tensor = {size}: how the layers of '{kind}' are split is not known here. Known are {known}. "
            "zero=stage3 divides any model.",
            size=size,
            kind=kind,
            known=", ".join(FAMILIES),
        )
    for value, what in (
        (config["heads"], tr("attention heads")),
        (config["key_heads"], tr("heads of keys and values")),
        (config["inner"], tr("numbers in the middle of the feed-forward part")),
    ):
        if value % size:
            raise ConfigError(
                "parallel.tensor = {size} does not divide the model's {count} {what}. Use a number that does.",
                size=size,
                count=value,
                what=what,
            )


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
    """Return the micro-batches into which the global batch can be divided, ascending; [] if there are none."""
    per_rank, rest = divmod(cfg.batch.global_size, mesh_of(cfg, world_size).data_ranks)
    if rest:
        return []
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
    A ConfigError if micro_per_gpu is auto, or if this is no whole number; the message names the nearest sizes.
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
        smaller = "" if size % ranks else tr("Or batch.micro_per_gpu={micro}.", micro=fitting_batch(cfg, world_size)[1])
        raise ConfigError(joined(where + sentence, nearest_multiples(size, unit), smaller))
    return size // unit
