"""All layouts of a run on some machines: which of them fits and is the fastest. No torch."""

import math
from collections.abc import Collection, Iterator, Sequence
from copy import deepcopy
from itertools import product

from toolkit.config import mesh, rule_tables
from toolkit.config.dotted_keys import get_value
from toolkit.config.schema import Device, RunConfig, StateDtype
from toolkit.plan.layouts import Layout, evaluate_layout
from toolkit.plan.machine import Machine
from toolkit.plan.outline import Outline
from toolkit.plan.speed import Rates

LAYOUTS = (
    *((stage, Device.none, Device.none) for stage in (0, 1, 2, 3)),
    *((stage, Device.cpu, Device.none) for stage in (1, 2, 3)),
    (3, Device.cpu, Device.cpu),
)
"""ZeRO stage, where the optimizer's states are, where the parameters are. Never NVMe: it needs a directory."""
MAX_MICRO_BATCH = 64
_OFFLOAD_GAIN = 1.5
"""Factor by which a layout that offloads must be faster, as the speeds of buses and hosts are assumed."""
_AS_FAST = 1.02
"""Factor below which two estimated times are the same."""
BEYOND = (
    "zero.zero_hpz_partition_size",
    "zero.zero_quantized_weights",
    "zero.zero_quantized_gradients",
    "zero.offload_optimizer.super_offload",
    "zero.zenflow.enabled",
)
"""Features beyond ZeRO's stages, which are switched off if they contradict a layout."""
_LAYOUT_KEYS = (
    "parallel.expert",
    "zero.stage",
    "zero.offload_optimizer.device",
    "zero.offload_param.device",
    *BEYOND,
    "precision.optimizer_states",
    "zero.overlap_comm",
    "optim.torch",
    "train.activation_checkpointing.enabled",
    "train.activation_checkpointing.cpu_checkpointing",
    "batch.micro_per_gpu",
)


def layouts(
    outline: Outline, cfg: RunConfig, machine: Machine, rates: Rates, experts: Sequence[int] = ()
) -> Iterator[Layout]:
    """Yield all layouts that keep the global batch: stages, offloading, activation checkpointing, micro-batches, and
    over how many ranks experts are divided, of `experts` or of all that is possible.
    """
    sizes = [size for size in mesh.micro_sizes(cfg, machine.world_size) if size <= MAX_MICRO_BATCH]
    experts = experts or expert_sizes(outline, machine.world_size)
    for expert, (stage, optimizer, parameters), recomputes, micro in product(experts, LAYOUTS, (False, True), sizes):
        candidate = with_layout(cfg, stage, optimizer, parameters, recomputes, micro)
        candidate.parallel.expert = expert
        if candidate.zero.zero_hpz_partition_size > machine.ranks:  # a copy across nodes would save no traffic
            candidate.zero.zero_hpz_partition_size = mesh.largest_divisor(machine.world_size, machine.ranks)
        if not _is_contradictory(candidate):
            yield evaluate_layout(outline, candidate, machine, rates)


def expert_sizes(outline: Outline, world_size: int) -> list[int]:
    """Return the numbers of ranks that a model's experts can be divided over; [1] if its FLOPs are not known."""
    most = math.gcd(outline.sizes["experts"] if "chosen" in outline.sizes else 1, world_size)
    return [size for size in range(1, most + 1) if most % size == 0]


def _is_contradictory(cfg: RunConfig, keys: Collection[str] = ()) -> bool:
    """Whether config/rule_tables.py rejects a config; with `keys`, whether one of these is rejected or not read."""
    broken = {rule.key for rule in (*rule_tables.INCOMPATIBLE, *rule_tables.INCOMPATIBLE_OF_MODELS) if rule.broken(cfg)}
    broken |= {
        row.key for row in rule_tables.REQUIRES if row.is_on(cfg) and not all(met(cfg) for met in row.needs.values())
    }
    if not keys:
        return bool(broken)
    unread = {key for row in rule_tables.READ_WHEN if not row.is_read(cfg) for key in rule_tables.expand(row.keys)}
    return not (broken | unread).isdisjoint(keys)


def fastest(layouts: Sequence[Layout], *, tight: bool = False) -> Layout | None:
    """Return the fastest layout that fits and leaves 5 % of the memory free; if none does, or with `tight`, the fastest
    that fits; None if none does. Among those as fast, the first (simplest) is taken. Offloading must be faster by more
    than the speeds of buses and hosts, which are assumed, may be wrong.
    """
    fitting = [layout for layout in layouts if layout.fits]
    if not tight:
        fitting = [layout for layout in fitting if not layout.is_tight] or fitting
    if not fitting:
        return None
    best = min(layout.time.seconds for layout in fitting)
    resident = [layout for layout in fitting if not layout.is_offloaded]
    if resident and (best_resident := min(layout.time.seconds for layout in resident)) <= _OFFLOAD_GAIN * best:
        fitting, best = resident, best_resident
    return next(layout for layout in fitting if layout.time.seconds <= _AS_FAST * best)


def recommended(recipe_layout: Layout, layouts: Sequence[Layout]) -> Layout | None:
    """Return the recipe's own layout if it is as fast as the `fastest`, nearly, and has memory to spare; else that."""
    best = fastest(layouts)
    if best is None or not recipe_layout.fits or recipe_layout.is_tight:
        return best
    return recipe_layout if recipe_layout.time.seconds <= _AS_FAST * best.time.seconds else best


def with_layout(
    cfg: RunConfig, stage: int, optimizer: Device, parameters: Device, recomputes: bool, micro: int
) -> RunConfig:
    """Return a copy of a config with another layout, see `LAYOUTS`; keys that contradict it are changed too."""
    other = deepcopy(cfg)
    other.zero.stage = stage
    other.zero.offload_optimizer.device, other.zero.offload_param.device = optimizer, parameters
    # An offloaded Adam is DeepSpeed's, and without ZeRO nothing reads overlap_comm.
    if optimizer is not Device.none and rule_tables.OPTIMIZERS[cfg.optim.name].is_adam and cfg.optim.torch is True:
        other.optim.torch = False
    if stage == 0:
        other.zero.overlap_comm = False
    other.train.activation_checkpointing.enabled = recomputes
    other.batch.micro_per_gpu = micro
    for key in BEYOND:
        if get_value(other, key) and _is_contradictory(other, [key]):
            section, _, name = key.rpartition(".")
            setattr(get_value(other, section), name, get_value(RunConfig(), key))
    return other


def with_bf16_states(cfg: RunConfig) -> RunConfig | None:
    """Return a copy of a config with the optimizer's states in bf16; None if they are already, or cannot be."""
    other = deepcopy(cfg)
    other.precision.optimizer_states = StateDtype.bf16
    key = "precision.optimizer_states"
    return None if rule_tables.has_bf16_states(cfg) or _is_contradictory(other, [key]) else other


def overrides(before: RunConfig, after: RunConfig) -> list[str]:
    """Return the arguments, such as zero.stage=2, that change one layout of a config to another."""
    arguments = []
    for key in _LAYOUT_KEYS:
        old, new = get_value(before, key), get_value(after, key)
        if old != new:
            arguments.append(f"{key}={getattr(new, 'value', str(new).lower())}")  # an enum's value, or true
    return arguments
