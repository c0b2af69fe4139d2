"""What is tried before the first step, in the order of what it costs; and what is said where it fails."""

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from toolkit.cli.context import AnySession, Session
from toolkit.cli.evaluation import Evaluation
from toolkit.cli.planning import RunPlan
from toolkit.config.mesh import micro_rows, micro_sizes
from toolkit.config.schema import CheckpointConfig, Device, RunConfig, TuningMethod
from toolkit.distributed import process_group
from toolkit.engine.memory import PeakMemory, is_out_of_memory, limit_bytes, shown
from toolkit.errors import OutOfMemory
from toolkit.evaluate.generate import answer, check_length
from toolkit.launch.environment import Ranks
from toolkit.messages import tr
from toolkit.models.adapters import has_adapter
from toolkit.models.pipeline import unwrap_model
from toolkit.track.writable import check_writable
from toolkit.train.checkpoint import Saver
from toolkit.train.job import Job
from toolkit.train.longest import longest_batch
from toolkit.train.rehearse import rehearse_step, unchanged
from toolkit.train.rehearse_disk import check_room, try_checkpoint, try_export


def rehearse(session: Session, job: Job, evaluation: Evaluation | None, plan: RunPlan | None) -> str:
    """Try what the run will do, and leave everything as it was. A collective; returns what is said of it.

    Args:
        session: with its engine in the state in which it begins.
        job: what the loop will do.
        evaluation: None without validation data.
        plan: what memory is expected to be; None where nobody knows.

    Raises:
        OutOfMemory: the run does not fit.
        CheckpointError: checkpoints or export cannot be written, or have no room.
        TrackError: what is measured cannot be written.
        ModelError: the model cannot answer.
    """
    started, step = time.monotonic(), job.start.step
    job.watchdog.enter("rehearsal", step)
    steps = range(step + 1, job.total_steps + 1)
    try_disk(session, job.saver, steps)
    engine, cfg, ranks = session.engine, session.cfg, session.ranks
    batch = longest_batch(cfg, session.prepared, ranks.world_size)
    limit = limit_bytes(engine.device, cfg.plan.max_gpu_gib)
    with unchanged(engine), PeakMemory(engine.device, limit if engine.device.type == "cpu" else 0) as memory:
        with told(cfg, ranks, tr("forward, backward and update of the longest batch"), memory, limit, plan):
            measured = rehearse_step(engine, session.guard, batch, memory, job.accumulation)
        with told(cfg, ranks, tr("an evaluation"), memory, limit, plan):
            _try_evaluation(session, evaluation)
        used = measured.before, memory.highest()
    process_group.on_rank0(session.trackers.wait_begun)
    job.watchdog.enter("", step)
    tried = _tried(cfg, _saves(cfg.checkpoint, steps), evaluation)
    return _summary(used, limit, batch, tried, time.monotonic() - started, plan)


@contextmanager
def told(
    cfg: RunConfig,
    ranks: Ranks,
    doing: str,
    memory: PeakMemory,
    limit: int,
    plan: RunPlan | None,
    sections: tuple[str, ...] = ("",),
) -> Iterator[None]:
    """Say of memory that runs out what it was wanted for, what was measured and planned, and what helps.

    Only what helps in some `sections` of the config, where the others have no effect.
    """
    before = memory.restart()
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        lines = [
            tr(
                "out of memory before the first step, on rank {rank} ({host}): {doing}.",
                rank=ranks.rank,
                host=socket.gethostname(),
                doing=doing,
            ),
            tr(
                "  measured: {before} before it, {peak} at most until it failed, {limit} may be used.",
                before=shown(before),
                peak=shown(memory.highest()),
                limit=shown(limit) if limit else "?",
            ),
            *([plan.lines()] if plan else []),
            tr("  reason: {reason}", reason=(str(error) or type(error).__name__).splitlines()[0]),
            tr("What helps, the cheapest first; each can be pasted behind the command:"),
            *(f"  {word}" for word in remedies(cfg, ranks.world_size) if word.startswith(sections)),
        ]
        raise OutOfMemory("\n".join(lines)) from None


def remedies(cfg: RunConfig, world_size: int) -> list[str]:
    """Return overrides that take less memory than a config, the cheapest first."""
    words = []
    micro, zero = micro_rows(cfg), cfg.zero
    smaller = [rows for rows in micro_sizes(cfg, world_size) if rows < micro]
    if smaller:
        words.append(f"batch.micro_per_gpu={smaller[-1]}")
    if not cfg.train.activation_checkpointing.enabled:
        words.append("train.activation_checkpointing.enabled=true")
    if smaller[:-1]:
        words.append("batch.micro_per_gpu=1")
    highest = cfg.tuning.max_stage
    if world_size > 1:
        words += [f"zero=stage{stage}" for stage in range(max(zero.stage + 1, 2), highest + 1)]
    if zero.offload_optimizer.device is Device.none:
        words.append(f"zero=stage{max(zero.stage, 2)}_offload")
    if zero.offload_param.device is Device.none and highest == 3:
        words.append("zero=stage3_offload")
    if cfg.tuning.method is TuningMethod.full:
        words.append("tuning=lora")
    return [*dict.fromkeys(words), f"data.max_length={cfg.data.max_length // 2}"]


def try_disk(session: AnySession, saver: Saver, steps: range) -> None:
    """See whether all that the run writes can be written."""
    cfg, engine, folder = session.cfg, session.engine, session.folder
    process_group.on_rank0(lambda: check_writable(cfg.track, folder))
    try_checkpoint(saver.folder)
    export = folder / "export"
    export_bytes = _export_bytes(unwrap_model(engine.module)) if cfg.checkpoint.export else 0
    saves = _saves(cfg.checkpoint, steps)
    process_group.on_rank0(lambda: try_export(export) if cfg.checkpoint.export else None)
    process_group.on_rank0(lambda: check_room(saver.folder, cfg.checkpoint, saves, saver.least_bytes(), export_bytes))


def _saves(config: CheckpointConfig, steps: range) -> int:
    """Return how many checkpoints the steps will save."""
    due = sum(1 for step in steps if config.every and step % config.every == 0)
    is_last_due = bool(config.every) and steps.stop - 1 >= steps.start and (steps.stop - 1) % config.every == 0
    return due + (config.at_end and not is_last_due)


def _export_bytes(module: torch.nn.Module) -> int:
    """Return the bytes of the weights that are exported: the model's, or what was trained beside it."""
    is_adapter = has_adapter(module)
    exported = [one for one in module.parameters() if one.requires_grad or not is_adapter]
    return sum(getattr(one, "ds_numel", one.numel()) * one.element_size() for one in exported)


def _try_evaluation(session: Session, evaluation: Evaluation | None) -> None:
    cfg, engine = session.cfg.evaluate, session.engine
    if evaluation is not None:
        evaluation.rehearse()
    for prompt in cfg.prompts:
        encoded = session.prepared.encoder.prompt([{"role": "user", "content": prompt}])
        check_length(engine.module, len(encoded), cfg.max_new_tokens)
    if cfg.prompts:
        answer(engine.module, session.prepared.encoder, cfg.prompts[0], min(2, cfg.max_new_tokens), engine.device)


def _tried(cfg: RunConfig, saves: int, evaluation: Evaluation | None) -> str:
    """Return what the run will do beside the batch, and has been tried."""
    words = [
        tr("an update"),
        tr("a save") if saves else "",
        tr("an export") if cfg.checkpoint.export else "",
        tr("an evaluation") if evaluation is not None or cfg.evaluate.prompts else "",
    ]
    return ", ".join(filter(None, words))


def _summary(
    used: tuple[int, int], limit: int, batch: dict[str, torch.Tensor], tried: str, seconds: float, plan: RunPlan | None
) -> str:
    """Return a line about it: `used` are the bytes before the step and at most. A collective."""
    device_bytes = process_group.gather(used)
    peaks = [peak for _, peak in device_bytes]
    most = peaks.index(max(peaks))
    return tr(
        "Rehearsed in {seconds} s: the longest batch ({rows} x {tokens} tokens), {tried}. Memory: {peak} at most, on "
        "rank {rank} ({before} before the step{limit}){planned}.",
        seconds=f"{seconds:.1f}",
        rows=batch["input_ids"].size(0),
        tokens=batch["input_ids"].size(1),
        tried=tried,
        peak=shown(peaks[most]),
        rank=most,
        before=shown(device_bytes[most][0]),
        limit=tr(", of {limit}", limit=shown(limit)) if limit else "",
        planned=tr("; planned for the longest rows: {planned}", planned=shown(plan.tensor_bytes)) if plan else "",
    )
