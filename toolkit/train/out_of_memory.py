"""The error for a run that is out of memory before step 1: what it took, what was planned, and what helps."""

import socket

from toolkit.config import mesh
from toolkit.config.devices import device_here
from toolkit.config.schema import Device, RunConfig, TuningMethod
from toolkit.distributed.process_group import rank, world_size
from toolkit.engine.memory import shown
from toolkit.messages import OutOfMemory, tr
from toolkit.plan.summary import memory_table
from toolkit.train.dry_run import RunPlan


def explained(
    cfg: RunConfig,
    doing: str,
    measured: tuple[int, int, int],
    plan: RunPlan | None,
    sections: tuple[str, ...],
    error: Exception,
) -> OutOfMemory:
    """Return the error for a run that is out of memory, with overrides that help.

    Args:
        measured: bytes before what was done, at most until it failed, and those that may be used (0: unknown).
        sections: beginnings of the overrides that are told.
    """
    before, highest, limit = measured
    lines = [
        tr(
            "out of memory before the first step, on rank {rank} ({host}): {doing}.",
            rank=rank(),
            host=socket.gethostname(),
            doing=doing,
        ),
        tr(
            "  measured: {before} before it, {peak} at most until it failed, {limit} may be used.",
            before=shown(before),
            peak=shown(highest),
            limit=shown(limit) if limit else "?",
        ),
        *(memory_table(plan.layout) if plan else []),
        tr("  reason: {reason}", reason=(str(error) or type(error).__name__).splitlines()[0]),
        tr("What helps, the cheapest first; each can be pasted behind the command:"),
        *(f"  {override}" for override in remedies(cfg, world_size()) if override.startswith(sections)),
    ]
    return OutOfMemory("\n".join(lines))


def remedies(cfg: RunConfig, world_size: int) -> list[str]:
    """Return overrides with which a run takes less memory than with `cfg`, the one that costs least speed first."""
    overrides = []
    micro, zero = mesh.micro_rows(cfg), cfg.zero
    smaller = [rows for rows in mesh.micro_sizes(cfg, world_size) if rows < micro]
    if smaller:
        overrides.append(f"batch.micro_per_gpu={smaller[-1]}")
    recompute = cfg.train.activation_checkpointing
    if not recompute.enabled:
        overrides.append("train.activation_checkpointing.enabled=true")
    if smaller[:-1]:  # the next smaller one, above, is not 1 already
        overrides.append("batch.micro_per_gpu=1")
    if recompute.enabled and not recompute.cpu_checkpointing and device_here() != "cpu":
        overrides.append("train.activation_checkpointing.cpu_checkpointing=true")
    max_stage = cfg.tuning.max_stage
    if world_size > 1:  # not stage 1, which saves less than stage 2
        overrides += [f"zero=stage{stage}" for stage in range(max(zero.stage + 1, 2), max_stage + 1)]
    if zero.offload_optimizer.device is Device.none:  # conf/zero/ has these of stages 2 and 3
        overrides.append(f"zero=stage{max(zero.stage, 2)}_offload")
    if zero.offload_param.device is Device.none and max_stage == 3:
        overrides.append("zero=stage3_offload")
    if cfg.tuning.method is TuningMethod.full:
        from toolkit.plan.search import with_bf16_states

        overrides += ["precision.optimizer_states=bf16"] if with_bf16_states(cfg) else []
        overrides.append("tuning=lora")
    return [*dict.fromkeys(overrides), f"data.max_length={cfg.data.max_length // 2}"]
