"""All ways to lay a run out on some machines, which fit, and which of them is the cheapest. No torch."""

from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass

from toolkit.config.mesh import micro_sizes
from toolkit.config.rule_tables import OPTIMIZERS
from toolkit.config.schema import Device, Dtype, RunConfig, get_value
from toolkit.messages import tr
from toolkit.plan.machine import Machine
from toolkit.plan.memory import HostMemory, RankMemory, plan_host, plan_rank
from toolkit.plan.parameters import Outline
from toolkit.plan.speed import Rates, StepTime, step_time

LAYOUTS = (
    (0, Device.none, Device.none),
    (1, Device.none, Device.none),
    (2, Device.none, Device.none),
    (3, Device.none, Device.none),
    (1, Device.cpu, Device.none),
    (2, Device.cpu, Device.none),
    (3, Device.cpu, Device.none),
    (3, Device.cpu, Device.cpu),
)
"""ZeRO stage, where the optimizer's states are, where the parameters are. NVMe is never chosen: it needs a folder."""
MOST_MICRO = 64


@dataclass(frozen=True, slots=True)
class Layout:
    """One way."""

    cfg: RunConfig
    """The run's config, changed."""
    memory: RankMemory
    """Of a rank."""
    host: HostMemory
    """Of a machine."""
    time: StepTime
    """Of a step."""
    usable_bytes: int
    """Of a rank's device."""
    fits: bool
    """Whether device and host memory are enough."""

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
    for stage, optimizer, parameters in LAYOUTS:
        most = 0 if OPTIMIZERS[cfg.optim.name].needs_whole else cfg.tuning.max_stage
        if stage > most or (stage == 0 and cfg.compile.deepcompile):
            continue  # what config.checks refuses
        if cfg.parallel.pipeline > 1 and (stage > 1 or optimizer is not Device.none or _adds_in_bf16(cfg, stage)):
            continue  # the same
        for recomputes in (False, True):
            for micro in [one for one in micro_sizes(cfg, machine.world_size) if one <= MOST_MICRO]:
                yield evaluate_layout(
                    outline, with_layout(cfg, stage, optimizer, parameters, recomputes, micro), machine, rates
                )


def _adds_in_bf16(cfg: RunConfig, stage: int) -> bool:
    return stage == 0 and cfg.precision.dtype is Dtype.bf16


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
    _leave_out(other)
    other.train.activation_checkpointing.enabled = recomputes
    other.batch.micro_per_gpu = micro
    return other


def _leave_out(cfg: RunConfig) -> None:
    """Switch off what is beyond ZeRO's stages and does not go with the choice; see config/rule_tables.py."""
    zero = cfg.zero
    on_cpu = zero.offload_optimizer.device is Device.cpu
    if zero.stage != 3 or zero.offload_param.device is not Device.none:
        zero.zero_hpz_partition_size = 1
    if zero.stage != 3:
        zero.zero_quantized_weights = zero.zero_quantized_gradients = False
    if zero.stage != 3 or not on_cpu:
        zero.offload_optimizer.super_offload = False
    if zero.stage not in (1, 2) or not on_cpu:
        zero.zenflow.enabled = False


_BEYOND = (
    "zero.zero_hpz_partition_size",
    "zero.zero_quantized_weights",
    "zero.zero_quantized_gradients",
    "zero.offload_optimizer.super_offload",
    "zero.zenflow.enabled",
)


def overrides(before: RunConfig, after: RunConfig) -> list[str]:
    """Return the words that make one config the other."""
    words = [f"zero.stage={after.zero.stage}"] if before.zero.stage != after.zero.stage else []
    for name in ("offload_optimizer", "offload_param"):
        device = getattr(after.zero, name).device
        if getattr(before.zero, name).device is not device:
            words.append(f"zero.{name}.device={device.value}")
    words += [
        f"{key}={str(get_value(after, key)).lower()}"
        for key in _BEYOND
        if get_value(before, key) != get_value(after, key)
    ]
    if before.zero.overlap_comm and not after.zero.overlap_comm:
        words.append("zero.overlap_comm=false")
    if before.optim.torch is True and after.optim.torch is False:
        words.append("optim.torch=false")
    enabled = after.train.activation_checkpointing.enabled
    if before.train.activation_checkpointing.enabled != enabled:
        words.append(f"train.activation_checkpointing.enabled={str(enabled).lower()}")
    if before.batch.micro_per_gpu != after.batch.micro_per_gpu:
        words.append(f"batch.micro_per_gpu={after.batch.micro_per_gpu}")
    return words
