"""One layout of a run, and the memory and time that it takes, as numbers and as a table. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from toolkit.config.rule_tables import has_bf16_states
from toolkit.config.schema import Device, RunConfig
from toolkit.messages import listed, read_table, tr, translated
from toolkit.plan.machine import GIB, Machine
from toolkit.plan.memory import Parts, RankMemory, plan_host, plan_rank
from toolkit.plan.outline import Outline
from toolkit.plan.speed import Rates, StepTime, step_time
from toolkit.terminal import text_table


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
    fits = memory.peak(memory.worst) <= machine.usable_bytes and host_peak <= (machine.host_bytes or host_peak)
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


def memory_table(layout: Layout) -> list[str]:
    """Return the bytes of one rank by kind and phase, in GiB."""
    lines = bytes_table(tr("GiB per rank"), layout.memory.device)
    if peaks := layout.memory.stages:
        shown = ", ".join(gib(peak) for peak in peaks)
        lines.append(tr("The largest stage of the pipeline; all of them: {peaks} GiB.", peaks=shown))
    return lines


def bytes_table(title: str, phases: Mapping[str, Parts]) -> list[str]:
    """Return bytes by kind and phase as a table, in GiB."""
    words = kind_names()
    kinds = [kind for kind in words if any(parts.get(kind) for parts in phases.values())]
    rows = [[words[kind], *(gib(parts.get(kind, 0)) for parts in phases.values())] for kind in kinds]
    rows.append([tr("together"), *(gib(sum(parts.values())) for parts in phases.values())])
    return text_table([title, *(words[phase] for phase in phases)], rows, indent="")


_kinds = cache(partial(read_table, "plan/kinds.yaml"))


def kind_names() -> dict[str, str]:
    """Return phase or kind of memory -> its name in the user's language."""
    return {kind: translated(text) for kind, text in _kinds().items()}


def gib(size: float) -> str:
    """Return bytes in GiB with three significant digits, or four decimals below 0.1."""
    value = size / GIB
    if 0 < value < 0.1:
        return f"{value:.4f}"
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"
