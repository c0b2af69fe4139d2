"""One layout of a run, and the memory and time that it takes. No torch."""

from dataclasses import dataclass
from typing import Any

from toolkit.config.rule_tables import has_bf16_states
from toolkit.config.schema import Device, RunConfig
from toolkit.messages import listed, tr
from toolkit.plan.machine import Machine
from toolkit.plan.memory import Parts, RankMemory, plan_host, plan_rank
from toolkit.plan.outline import Outline
from toolkit.plan.speed import Rates, StepTime, step_time


@dataclass(frozen=True, slots=True)
class Layout:
    """One layout of a run (ZeRO stage, offloading, micro-batch …), with its memory and time."""

    cfg: RunConfig
    memory: RankMemory
    host: dict[str, Parts]
    """Bytes of one node by phase and kind."""
    host_peak: int
    time: StepTime
    usable_bytes: int
    fits: bool

    @property
    def peak(self) -> int:
        """Bytes of a rank in the phase with the highest peak."""
        return self.memory.peak(self.memory.worst)

    @property
    def is_tight(self) -> bool:
        """Whether less than 5 % of the memory stays free, within the plan's error."""
        return self.peak > 0.95 * self.usable_bytes

    @property
    def is_offloaded(self) -> bool:
        """Whether optimizer states or parameters are in host memory."""
        zero = self.cfg.zero
        return {zero.offload_optimizer.device, zero.offload_param.device} != {Device.none}

    @property
    def name(self) -> str:
        """Short name for users."""
        zero = self.cfg.zero
        words = [f"ZeRO {zero.stage}"]
        if has_bf16_states(self.cfg):
            words.append(tr("optimizer states in bf16"))
        if zero.offload_optimizer.device is not Device.none:
            words.append(tr("optimizer states on {device}", device=zero.offload_optimizer.device.value))
        if zero.offload_param.device is not Device.none:
            words.append(tr("weights on {device}", device=zero.offload_param.device.value))
        if (size := self.cfg.parallel.expert) > 1:
            words.append(tr("experts over {size} ranks", size=size))
        if self.cfg.train.activation_checkpointing.enabled:
            words.append(tr("activation checkpointing"))
        return listed(*words)


def evaluate_layout(outline: Outline, cfg: RunConfig, machine: Machine, rates: Rates) -> Layout:
    """Return the plan of one config; ConfigError if its batch cannot be divided over the ranks."""
    memory = plan_rank(outline, cfg, machine.world_size, machine.on_cpu)
    host = plan_host(outline, cfg, machine, memory)
    host_peak = max(sum(parts.values()) for parts in host.values())
    fits_host = machine.host_bytes == 0 or host_peak <= machine.host_bytes  # 0: unknown
    fits = memory.peak(memory.worst) <= machine.usable_bytes and fits_host
    return Layout(cfg, memory, host, host_peak, step_time(outline, cfg, machine, rates), machine.usable_bytes, fits)


def layout_numbers(layout: Layout) -> dict[str, Any]:
    """Return a layout's settings, bytes and seconds, for JSON."""
    cfg, time = layout.cfg, layout.time
    return {
        "expert": cfg.parallel.expert,
        "zero_stage": cfg.zero.stage,
        "zero_hpz_partition_size": cfg.zero.zero_hpz_partition_size,
        "offload_optimizer": cfg.zero.offload_optimizer.device.value,
        "offload_param": cfg.zero.offload_param.device.value,
        "activation_checkpointing": cfg.train.activation_checkpointing.enabled,
        "micro_per_gpu": cfg.batch.micro_per_gpu,
        "device_bytes": layout.memory.device,
        "host_bytes": layout.host,
        "usable_bytes": layout.usable_bytes,
        "step_s": time.seconds if time.is_known else None,
        "tokens_per_s": time.tokens_per_s if time.is_known else None,
        "fits": layout.fits,
    }
