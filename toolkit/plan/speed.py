"""How long a step takes, estimated from FLOPs and bytes. No torch.

What is not measured is assumed, and the assumptions are shown beside the estimate. A calibration (`calibrate=true`)
measures on the machine at hand what is assumed here.
"""

from dataclasses import dataclass

from toolkit.config.checks import accumulation
from toolkit.config.optimizers import OPTIMIZERS
from toolkit.config.schema import Device, RunConfig
from toolkit.plan.activations import Rows
from toolkit.plan.flops import Work, causal_pairs, formula, is_countable
from toolkit.plan.machine import Machine
from toolkit.plan.memory import WIDTHS, longest_rows
from toolkit.plan.parameters import Outline
from toolkit.plan.tensor import exchanged, part_of

_UNKNOWN_FLOPS = 100e12
_CPU_FLOPS = 20e9
"""Of one core, without a calibration."""


@dataclass(frozen=True, slots=True)
class Rates:
    """What a machine does per second; measured, or assumed."""

    flops: float
    """Of a rank, in training."""
    link: float
    """Bytes per second that a rank sends to others while it receives as much."""
    memory: float
    """Bytes per second of a rank's memory, for the update of the weights."""
    host: float = 20e9
    """Bytes per second of host memory per rank, for an offloaded update."""
    pcie: float = 20e9
    """Bytes per second between a GPU and the host."""
    gather: float = 0.0
    """Bytes per second of ZeRO 3's weights and gradients, with DeepSpeed's own work for them; 0: as `link`."""
    micro_s: float = 0.0
    """Seconds of a micro-batch that do not grow with it."""
    latency_s: float = 0.0
    """Seconds of a collective that do not grow with it."""
    is_measured: bool = False
    """Whether a calibration measured them."""


def assumed(machine: Machine, dtype: str) -> Rates:
    """Return the rates that are assumed of a machine: half of a card's datasheet, 80 % of its memory and links.

    Between machines 25 GB/s (200 Gbit/s) per machine are assumed, shared by its GPUs; 5 ms for a micro-batch however
    small, 50 microseconds for a collective however small.
    """
    if machine.on_cpu:
        return Rates(_CPU_FLOPS, 1e9, 5e9, host=5e9, micro_s=0.02, latency_s=1e-3)
    card = machine.card
    # A card without bf16 computes it through others' units, at best as fast as fp32; 0 also stands for not known.
    flops = 0.5 * ((card.flops(dtype) or card.flops("fp32") or _UNKNOWN_FLOPS) if card else _UNKNOWN_FLOPS)
    link = 0.8 * (card.link_bytes_per_s if card else 25e9)
    if machine.nodes > 1:
        link = min(link, 25e9 / machine.ranks)
    return Rates(flops, link, 0.8 * (card.memory_bytes_per_s if card else 1e12), micro_s=0.005, latency_s=5e-5)


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of one optimizer step."""

    compute: float
    """Matrix products."""
    communication: float
    """Gradients and weights between ranks."""
    update: float
    """Weights, and what moves to the host for it."""
    overlapped: bool
    """Whether communication hides behind the computation."""
    tokens: int
    """Tokens of the global batch, rows full."""
    is_known: bool = True
    """Whether the FLOPs are: those of experts are not, and then nothing is computed here."""

    @property
    def seconds(self) -> float:
        """In all."""
        busy = max(self.compute, self.communication) if self.overlapped else self.compute + self.communication
        return busy + self.update

    @property
    def tokens_per_s(self) -> float:
        """Of all ranks."""
        return self.tokens / self.seconds


def step_time(outline: Outline, cfg: RunConfig, machine: Machine, rates: Rates) -> StepTime:
    """Return an estimate for full rows, all of whose tokens are trained.

    Args:
        outline: the model and what is trained in it.
        cfg: checked config.
        machine: what it runs on.
        rates: measured or assumed.
    """
    rows, stages, tensor = longest_rows(outline, cfg), cfg.parallel.pipeline, cfg.parallel.tensor
    weight = WIDTHS[cfg.precision.dtype]
    times, world = (
        accumulation(cfg, machine.world_size),
        machine.world_size // (stages * tensor),
    )  # with equal parameters
    sent, collectives = exchanged(outline, tensor, rows.tokens * outline.sizes["hidden"] * weight)
    outline = part_of(outline, tensor)
    one = Work(rows.tokens, causal_pairs([rows.length] * rows.rows) // rows.parts, rows.tokens)
    cost = formula(outline.shapes, outline.sizes, outline.trained, rows.prefix)
    recomputes = cfg.train.activation_checkpointing.enabled
    flops = cost.hardware_flops(one) if recomputes else cost.model_flops(one)
    is_known, is_split = is_countable(outline.shapes), cfg.zero.stage == 3
    return StepTime(
        # A pipeline's last stage begins when the first has done as many micro-batches as there are stages before it.
        compute=(times + stages - 1) * ((flops / stages / rates.flops if is_known else 0) + rates.micro_s),
        communication=_sent(outline, cfg, world, times) / stages / ((is_split and rates.gather) or rates.link)
        + times * (sent / rates.link + collectives * rates.latency_s)
        + (0 if is_split and rates.gather else _collectives(outline, cfg, world, times) * rates.latency_s)
        + times * _exchanged(outline, rows, weight, recomputes) / rates.link
        + _fetched(outline, cfg, world, times) / rates.pcie,
        update=_update(outline.num_trained // stages, cfg, world, weight, rates),
        overlapped=not machine.on_cpu and (cfg.zero.stage == 3 or cfg.zero.overlap_comm),
        tokens=rows.tokens * times * world,
        is_known=is_known,
    )


def _sent(outline: Outline, cfg: RunConfig, world: int, times: int) -> float:
    """Return the bytes that a rank sends in a step, ring algorithms taken for granted."""
    share, weight = (world - 1) / world, WIDTHS[cfg.precision.dtype]
    trained = weight * outline.num_trained * share  # as many bytes of gradients as of updated weights
    if cfg.zero.stage == 3:
        return times * gathered_bytes(outline.num_parameters, outline.num_trained, weight, world)
    if cfg.zero.stage == 2:
        return times * trained + trained
    return 2 * trained + (trained if cfg.zero.stage == 1 else 0)


def _exchanged(outline: Outline, rows: Rows, weight: int, recomputes: bool) -> float:
    """Return the bytes that a rank sends for a micro-batch whose rows are divided over ranks.

    In each layer queries, keys, values and the result, forward and backward, and once more where layers are recomputed.
    """
    if rows.parts == 1:
        return 0.0
    size = outline.sizes
    keys = size["keys"] * rows.key_copies(size["keys"] // size["head_size"])
    per_token = 2 * (size["heads"] * size["head_size"] + keys) * weight * size["layers"]
    return (3 if recomputes else 2) * rows.tokens * per_token * (rows.parts - 1) / rows.parts


def gathered_bytes(parameters: int, trained: int, weight: int, world_size: int) -> float:
    """Return the bytes that a rank sends for a micro-batch under ZeRO 3.

    Weights travel twice, for the forward and the backward pass, and gradients once, to their owners.

    Args:
        parameters: of the model.
        trained: those of them that are trained.
        weight: bytes of one.
        world_size: ranks.
    """
    return (2 * parameters + trained) * weight * (world_size - 1) / world_size


def _fetched(outline: Outline, cfg: RunConfig, world: int, times: int) -> float:
    """Return the bytes of offloaded weights that a rank brings to its GPU in a step: its part, forward and backward."""
    if cfg.zero.offload_param.device is Device.none:
        return 0.0
    return times * 2 * WIDTHS[cfg.precision.dtype] * outline.num_parameters / world


def _collectives(outline: Outline, cfg: RunConfig, world: int, times: int) -> int:
    """Return how many a step needs, buckets taken for large."""
    if world == 1:
        return 0
    return 3 * outline.sizes["layers"] * times if cfg.zero.stage == 3 else 2 + times


def _update(trained: int, cfg: RunConfig, world: int, weight: int, rates: Rates) -> float:
    part = trained / (world if cfg.zero.stage else 1)
    states = OPTIMIZERS[cfg.optim.name].state_bytes  # read and written, as are weights; gradients are read
    moved = part * (4 + 8 + 2 * states + 2 * weight)
    if cfg.zero.offload_optimizer.device is Device.none:
        return moved / rates.memory
    return moved / rates.host + 2 * part * weight / rates.pcie
