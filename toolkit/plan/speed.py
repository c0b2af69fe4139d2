"""Estimates the time of a step from FLOPs and bytes. No torch.

Rates are those that calibration.py has measured and cached on this machine, else assumed ones, which are shown with the
estimate.
"""

import json
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from toolkit.config import mesh, objective, rule_tables, schema
from toolkit.plan import lookup
from toolkit.plan.flops import Work, causal_pairs, formula, is_countable
from toolkit.plan.machine import Machine
from toolkit.plan.memory import WIDTHS, longest_rows
from toolkit.plan.outline import Outline, rank_part, zero_groups

_UNKNOWN_FLOPS = 100e12
_CPU_FLOPS = 20e9
"""FLOP/s of a CPU core without a calibration."""
_BF16_ADAM_BYTES = 190
"""Bytes that engine/bf16_adam.py's operations, which are not fused, read and write for a parameter, in float32."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Speeds of a rank, measured or assumed."""

    flops: float
    """FLOP/s of a rank in training."""
    link: float
    """Bytes per second that a rank sends to the next one while it receives as much from the one before it."""
    memory: float
    """Bytes per second of a rank's memory, for the update of the weights."""
    host: float = 20e9
    """Bytes per second of host memory per rank, for an offloaded update."""
    pcie: float = 20e9
    """Bytes per second between a GPU and the host."""
    gather: float = 0.0
    """Bytes per second of ZeRO 3's gathering and reduction, with DeepSpeed's overhead; 0: as `link`."""
    micro_s: float = 0.0
    """Constant seconds of a micro-batch."""
    latency_s: float = 0.0
    """Constant seconds of a collective."""
    node_link: float = 0.0
    """As `link` between ranks of a node, if there are several nodes; then `link` is between nodes."""
    is_measured: bool = False


def assumed(machine: Machine, dtype: str) -> Rates:
    """Return assumed rates: half of a datasheet's FLOP/s, 80 % of its memory's and links' bandwidth.
    Between nodes 25 GB/s (200 Gbit/s) per node; at least 5 ms for a micro-batch and 50 microseconds for a collective.
    """
    if machine.on_cpu:
        return Rates(_CPU_FLOPS, 1e9, 5e9, host=5e9, micro_s=0.02, latency_s=1e-3)
    card = machine.card
    flops = 0.5 * ((card and card.flops(dtype)) or _UNKNOWN_FLOPS)
    near = 0.8 * ((card and card.link_bytes_per_s) or 25e9)
    link = min(near, 25e9) if machine.nodes > 1 else near
    memory = 0.8 * ((card and card.memory_bytes_per_s) or 1e12)
    return Rates(flops, link, memory, micro_s=0.005, latency_s=5e-5, node_link=near if machine.nodes > 1 else 0.0)


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
    waits: float = 0.0
    """Seconds of communication that cannot overlap, as the next layer or the gradients' buffers wait for it."""
    is_known: bool = True
    """Whether the model's FLOPs are known; if not, as for some mixtures of experts, `compute` lacks them."""

    @property
    def seconds(self) -> float:
        """Total seconds."""
        if not self.overlapped:
            return self.compute + self.communication + self.update
        return max(self.compute, self.communication - self.waits) + self.waits + self.update

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of all ranks."""
        return self.tokens / self.seconds


def step_time(outline: Outline, cfg: schema.RunConfig, machine: Machine, rates: Rates) -> StepTime:
    """Return an estimate for full rows, all of whose tokens are trained; ring algorithms are assumed."""
    rows, zero, part = longest_rows(outline, cfg), cfg.zero, rank_part(outline, cfg)
    weight, num_micro = WIDTHS[cfg.precision.dtype], mesh.accumulation(cfg, machine.world_size)
    stages = cfg.parallel.pipeline
    world = machine.world_size // (stages * cfg.parallel.tensor)  # ranks with equal parameters
    pairs = causal_pairs([rows.length] * rows.rows) // rows.parts  # of a row, each rank of parallel.sequence has a part
    work = Work(tokens=rows.tokens, pairs=pairs, trained_tokens=rows.tokens)
    cost = formula(part.shapes, part.sizes, part.trained, rows.prefix)
    flops = cost.hardware_flops(work) if cfg.train.activation_checkpointing.enabled else cost.model_flops(work)
    flops += cost.forward.flops(work) * _other_passes(cfg)
    teacher = outline.teacher if objective.has_live_teacher(cfg) else None
    if teacher:
        flops += formula(teacher.shapes, teacher.sizes).forward.flops(work)
    is_known = all(is_countable(model.shapes, model.sizes) for model in (outline, teacher) if model)
    # The last pipeline stage begins after as many micro-batches as there are stages before it.
    compute = (num_micro + stages - 1) * ((flops / stages / rates.flops if is_known else 0) + rates.micro_s)

    updated = sum(trained // stages / (ranks if zero.stage else 1) for _, trained, ranks in zero_groups(part, world))
    # Gradients, as wide as master weights, are read; these, states and weights of the run's precision read and written.
    master, states = rule_tables.state_bytes(cfg)
    moved = updated * (3 * master + 2 * states + 2 * weight + _BF16_ADAM_BYTES * rule_tables.has_bf16_states(cfg))
    is_offloaded = zero.offload_optimizer.device is not schema.Device.none
    communication, waits = _communication(outline, part, cfg, machine, rates)
    return StepTime(
        compute=compute,
        communication=communication,
        waits=waits,
        update=moved / rates.host + 2 * updated * weight / rates.pcie if is_offloaded else moved / rates.memory,
        overlapped=not machine.on_cpu and (_prefetches(outline, zero) if zero.stage == 3 else zero.overlap_comm),
        tokens=rows.tokens * num_micro * world,
        is_known=is_known,
    )


def _prefetches(outline: Outline, zero: schema.ZeroConfig) -> bool:
    """Whether ZeRO-3 prefetches the next layer: not if a layer, such as one with many experts, exceeds
    stage3_max_live_parameters (deepspeed 0.19.8, partitioned_param_coordinator.py, fetch_sub_module).
    """
    return outline.largest_layer(inside=True) <= zero.stage3_max_live_parameters


def _other_passes(cfg: schema.RunConfig) -> int:
    """Return the number of forward passes without gradients of a micro-batch: one of a reference; for KTO one more of
    model and reference, on mismatched answers; and one of a model that is its own teacher.
    """
    passes = 1 if objective.has_reference_in_step(cfg) else 0
    if cfg.preference.loss is schema.PreferenceLoss.kto:
        passes += 1 + passes
    return passes + (1 if objective.has_own_teacher(cfg) else 0)


def _ring(rates: Rates, machine: Machine, span: int, apart: int = 1) -> float:
    """Return the bytes/s that a rank sends in a ring. It links every `apart`th of `span` neighbouring ranks, e.g. ranks
    0, 2, 4, 6 of 8; the other such rings (1, 3, 5, 7) share the link between nodes with it.
    """
    if not rates.node_link or span <= machine.ranks:
        return rates.node_link or rates.link
    return rates.link / min(apart, machine.ranks)


def _all_to_all(rates: Rates, machine: Machine, span: int) -> float:
    """Return the bytes/s that a rank sends in an all-to-all of `span` neighbouring ranks, which share a node's link."""
    if not rates.node_link or span <= machine.ranks:
        return rates.node_link or rates.link
    # A rank has 1 / machine.ranks of its node's link, over which (span - machine.ranks) / span of its bytes go.
    return rates.link / machine.ranks * span / (span - machine.ranks)


def _communication(
    outline: Outline, part: Outline, cfg: schema.RunConfig, machine: Machine, rates: Rates
) -> tuple[float, float]:
    """Return the seconds of a step's communication, and those of them that cannot overlap with computation. `part`: a
    rank's outline. ZeRO 2 reduces the gradients of each micro-batch to all ranks (deepspeed 0.19.8, stage_1_and_2.py,
    average_tensor with `use_multi_rank_bucket_allreduce`), ZeRO 3 to the rank that keeps them.
    """
    zero, stages, weight = cfg.zero, cfg.parallel.pipeline, WIDTHS[cfg.precision.dtype]
    num_micro = mesh.accumulation(cfg, machine.world_size)
    span = machine.world_size // stages  # ranks of a pipeline stage
    world = span // cfg.parallel.tensor  # of these the ranks with equal parameters
    is_measured = zero.stage == 3 and rates.gather > 0  # latencies included
    # Seconds to reduce the gradients of a micro-batch to their owners, and to gather all weights once.
    reduction = gathering = 0.0
    for count, trained, ranks in zero_groups(part, world):
        link = rates.gather if is_measured else _ring(rates, machine, span, span // ranks)
        reduction += weight * trained / stages * (ranks - 1) / ranks / link
        gathering += weight * count / stages * (ranks - 1) / ranks / link
    if zero.stage == 3:
        sent = num_micro * (_gathering_seconds(outline, part, cfg, machine, rates, gathering) + reduction)
    else:
        # An all-reduce takes twice as long as a reduction to the gradients' owners. Stages 1 and 2 also gather the
        # updated weights once per step: as many bytes as their gradients.
        num_reductions = 2 * num_micro if zero.stage == 2 else 2
        sent = (num_reductions + (1 if zero.stage else 0)) * reduction
    if world > 1 and not is_measured:
        collectives = 3 * outline.sizes["layers"] * num_micro if zero.stage == 3 else 2 + num_micro  # large buckets
        sent += collectives * rates.latency_s
    if zero.offload_param.device is not schema.Device.none:  # a rank's part goes to its GPU, forward and backward
        sent += num_micro * 2 * weight * part.num_parameters / world / rates.pcie
    # Without a stream of its own, the reduction of ZeRO 3 holds up the backward pass (deepspeed 0.19.8, stage3.py).
    waits = num_micro * reduction if zero.stage == 3 and not zero.overlap_comm else 0.0
    exchanged = _activation_exchange_s(outline, part, cfg, machine, rates) * num_micro / stages
    return sent + exchanged, waits + exchanged


def _gathering_seconds(
    outline: Outline, part: Outline, cfg: schema.RunConfig, machine: Machine, rates: Rates, once: float
) -> float:
    """Return the seconds in which ZeRO 3 gathers weights for a micro-batch: forward, backward and in other passes,
    `once` each, and the teacher's.
    """
    stages, tensor, weight = cfg.parallel.pipeline, cfg.parallel.tensor, WIDTHS[cfg.precision.dtype]
    seconds = (2 + _other_passes(cfg)) * once
    if outline.teacher and objective.has_live_teacher(cfg):
        span = machine.world_size // stages
        world, link = span // tensor, rates.gather or _ring(rates, machine, span, tensor)
        seconds += weight * outline.teacher.num_parameters / stages * (world - 1) / world / link
    copies = cfg.zero.zero_hpz_partition_size
    if rates.node_link and 1 < copies <= machine.ranks:  # ZeRO++: weights for the backward pass come from the own node
        seconds += weight * part.num_parameters / stages * (copies - 1) / copies / rates.node_link - once
    return seconds


def _activation_exchange_s(
    outline: Outline, part: Outline, cfg: schema.RunConfig, machine: Machine, rates: Rates
) -> float:
    """Return the seconds in which a rank sends activations for a micro-batch: under tensor parallelism for sums, under
    expert parallelism tokens to experts, under sequence parallelism heads. `part`: a rank's outline.
    """
    parallel, rows, weight = cfg.parallel, longest_rows(outline, cfg), WIDTHS[cfg.precision.dtype]
    tensor, recomputes = parallel.tensor, cfg.train.activation_checkpointing.enabled
    if tensor == parallel.expert == rows.parts == 1:
        return 0.0
    from toolkit.plan import division

    states = rows.tokens * outline.sizes["hidden"] * weight
    sums, num_sums = division.tensor_parallel_bytes(outline, tensor, states, recomputes)
    dispatched, num_dispatched = division.expert_parallel_bytes(part, states, recomputes)
    seconds = sums / _ring(rates, machine, tensor) + (num_sums + num_dispatched) * rates.latency_s
    seconds += dispatched / _all_to_all(rates, machine, tensor * parallel.expert)
    if rows.parts > 1:  # queries, keys, values and results, forward, backward, and in what is computed again
        size = part.sizes
        keys = size["keys"] * rows.key_copies(size["keys"] // size["head_size"])
        per_token = 2 * (size["heads"] * size["head_size"] + keys) * weight * size["layers"]
        once = rows.tokens * per_token * (rows.parts - 1) / rows.parts
        seconds += (3 if recomputes else 2) * once / _all_to_all(rates, machine, tensor * rows.parts)
    return seconds


def rates_file(cfg: schema.RunConfig, machine: Machine, outline: Outline) -> Path:
    """Return the file that caches measured rates of this host, for its GPUs, the model, and the length of rows."""
    gpu = machine.card.name if machine.card else ""
    inputs = [
        # By the GPU's name, as a run sees less memory than nvidia-smi.
        "cpu" if machine.on_cpu else gpu or machine.memory_bytes >> 30,
        machine.ranks,
        outline.sizes,
        outline.vocabulary,
        cfg.precision.dtype.value,
        cfg.data.max_length,
    ]
    return lookup.cache_file(cfg, f"rates-{os.uname().nodename}", inputs)


def rates_of(cfg: schema.RunConfig, machine: Machine, outline: Outline) -> Rates:
    """Return the rates that were measured on this machine for this model, else assumed ones."""
    file = rates_file(cfg, machine, outline)
    if machine.nodes == 1 and file.is_file():
        with suppress(ValueError, TypeError, OSError):  # cut off, or of another version: as if it were not there
            return Rates(**json.loads(file.read_text(encoding="utf-8")))
    return assumed(machine, cfg.precision.dtype.value)
