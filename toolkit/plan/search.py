"""All ways to lay a run out on some machines, which fit, and which of them is the cheapest. No torch."""

from collections.abc import Collection, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import product

from toolkit.config.mesh import micro_sizes
from toolkit.config.rule_tables import INCOMPATIBLE, INCOMPATIBLE_OF_MODELS, OPTIMIZERS, READ_WHEN, REQUIRES, expand
from toolkit.config.schema import Device, RunConfig, get_value
from toolkit.messages import tr
from toolkit.plan.machine import Machine
from toolkit.plan.memory import HostMemory, RankMemory, plan_host, plan_rank
from toolkit.plan.parameters import Outline
from toolkit.plan.speed import Rates, StepTime, step_time

LAYOUTS = (
    *((stage, Device.none, Device.none) for stage in (0, 1, 2, 3)),
    *((stage, Device.cpu, Device.none) for stage in (1, 2, 3)),
    (3, Device.cpu, Device.cpu),
)
"""ZeRO stage, where the optimizer's states are, where the parameters are. Never NVMe: it needs a directory."""
MOST_MICRO = 64
_BEYOND = (
    "zero.zero_hpz_partition_size",
    "zero.zero_quantized_weights",
    "zero.zero_quantized_gradients",
    "zero.offload_optimizer.super_offload",
    "zero.zenflow.enabled",
)
"""What goes beyond ZeRO's stages: switched off where it does not go with a choice."""
_CHOSEN = (
    "zero.stage",
    "zero.offload_optimizer.device",
    "zero.offload_param.device",
    *_BEYOND,
    "zero.overlap_comm",
    "optim.torch",
    "train.activation_checkpointing.enabled",
    "batch.micro_per_gpu",
)


@dataclass(frozen=True, slots=True)
class Layout:
    """One layout of a run, and what it needs."""

    cfg: RunConfig
    memory: RankMemory
    host: HostMemory
    time: StepTime
    usable_bytes: int
    fits: bool

    @property
    def name(self) -> str:
        """The layout in a few letters."""
        zero = self.cfg.zero
        words = [f"ZeRO {zero.stage}"]
        if zero.offload_optimizer.device is not Device.none:
            words.append(tr("optimizer states on {device}", device=zero.offload_optimizer.device.value))
        if zero.offload_param.device is not Device.none:
            words.append(tr("weights on {device}", device=zero.offload_param.device.value))
        if self.cfg.train.activation_checkpointing.enabled:
            words.append(tr("activation checkpointing"))
        return ", ".join(words)


def evaluate_layout(outline: Outline, cfg: RunConfig, machine: Machine, rates: Rates) -> Layout:
    """Return the plan of one config. Raises ConfigError where its batch cannot be divided."""
    memory = plan_rank(outline, cfg, machine.world_size, machine.on_cpu)
    host = plan_host(outline, cfg, machine, memory)
    peak = memory.peak(memory.worst)
    fits = peak <= machine.usable_bytes and (not machine.host_bytes or host.peak <= machine.host_bytes)
    return Layout(cfg, memory, host, step_time(outline, cfg, machine, rates), machine.usable_bytes, fits)


def layouts(outline: Outline, cfg: RunConfig, machine: Machine, rates: Rates) -> Iterator[Layout]:
    """Yield every way that keeps the global batch: stages, offloading, activation checkpointing, micro-batches."""
    sizes = [size for size in micro_sizes(cfg, machine.world_size) if size <= MOST_MICRO]
    for (stage, optimizer, parameters), recomputes, micro in product(LAYOUTS, (False, True), sizes):
        other = with_layout(cfg, stage, optimizer, parameters, recomputes, micro)
        if not _is_contradictory(other):
            yield evaluate_layout(outline, other, machine, rates)


def _is_contradictory(cfg: RunConfig, keys: Collection[str] = ()) -> bool:
    """Whether config/rule_tables.py rejects a config; with `keys` whether it rejects these or they are not read."""
    broken = {rule.key for rule in (*INCOMPATIBLE, *INCOMPATIBLE_OF_MODELS) if rule.broken(cfg)}
    broken |= {row.key for row in REQUIRES if row.is_on(cfg) and not all(met(cfg) for met in row.needs.values())}
    if not keys:
        return bool(broken)
    unread = {key for row in READ_WHEN if not row.is_read(cfg) for key in expand(row.keys)}
    return not (broken | unread).isdisjoint(keys)


def cheapest(found: Sequence[Layout]) -> Layout | None:
    """Return the fastest that fits; of equally fast ones (2 %) the simplest that leaves 5 % of the memory free."""
    fitting = [layout for layout in found if layout.fits]
    if not fitting:
        return None
    best = min(layout.time.seconds for layout in fitting)
    fast = [layout for layout in fitting if layout.time.seconds <= 1.02 * best]
    roomy = (layout for layout in fast if layout.memory.peak(layout.memory.worst) <= 0.95 * layout.usable_bytes)
    return next(roomy, None) or min(fast, key=lambda layout: layout.memory.peak(layout.memory.worst))


def with_layout(
    cfg: RunConfig, stage: int, optimizer: Device, parameters: Device, recomputes: bool, micro: int
) -> RunConfig:
    """Return a copy with other choices."""
    other = deepcopy(cfg)
    other.zero.stage = stage
    other.zero.offload_optimizer.device, other.zero.offload_param.device = optimizer, parameters
    if optimizer is not Device.none and OPTIMIZERS[cfg.optim.name].is_adam and cfg.optim.torch is True:
        other.optim.torch = False
    if stage == 0:
        other.zero.overlap_comm = False
    other.train.activation_checkpointing.enabled = recomputes
    other.batch.micro_per_gpu = micro
    for key in _BEYOND:
        if get_value(other, key) and _is_contradictory(other, [key]):
            section, _, name = key.rpartition(".")
            setattr(get_value(other, section), name, get_value(RunConfig(), key))
    return other


def overrides(before: RunConfig, after: RunConfig) -> list[str]:
    """Return the arguments that change one layout of a config to another."""
    words = []
    for key in _CHOSEN:
        old, new = get_value(before, key), get_value(after, key)
        if old != new:
            words.append(f"{key}={new.value if isinstance(new, Device) else str(new).lower()}")
    return words
