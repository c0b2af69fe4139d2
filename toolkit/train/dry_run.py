"""The startup dry run: the disk, the longest batch and an evaluation are tried before the first step."""

import os
import shutil
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from toolkit.checkpoint import directory
from toolkit.checkpoint.engine_files import EngineFiles
from toolkit.config.preflight import mlflow_folder
from toolkit.config.schema import CheckpointConfig, RunConfig, TrackConfig
from toolkit.data.sampler import Position
from toolkit.disk import flush
from toolkit.distributed import process_group
from toolkit.distributed.process_group import gather, on_rank0, rank
from toolkit.engine.memory import PeakMemory, limit_bytes, shown
from toolkit.errors import CheckpointError, TrackError
from toolkit.messages import tr
from toolkit.models.adapters import has_adapter
from toolkit.models.pipeline import unwrap_model
from toolkit.train.run_plan import RunPlan
from toolkit.train.task import RunContext, Task
from toolkit.train.trial_step import explain_out_of_memory, restore_after, trial_step


def check_writable(track: TrackConfig, folder: Path) -> None:
    """See whether metrics.jsonl can be written, and what trackers write into folders of the user's choice.

    Of what lies elsewhere the trackers themselves tell, and end nothing. For rank 0 only.

    Args:
        track: the config.
        folder: the run folder.

    Raises:
        TrackError: it cannot.
    """
    _try("run.dir", folder)
    metrics = folder / "metrics.jsonl"
    if metrics.exists():
        try:
            open(metrics, "ab").close()
        except OSError as error:
            raise _refused("run.dir", metrics, error) from error
    if track.tensorboard.enabled and track.tensorboard.dir:
        _try("track.tensorboard.dir", Path(track.tensorboard.dir))
    if track.mlflow.enabled:
        uri = track.mlflow.uri or os.environ.get("MLFLOW_TRACKING_URI", "")
        if uri and (place := mlflow_folder(uri)):
            _try("track.mlflow.uri", place)


def _try(key: str, folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder) as file:
            file.write(b"x")
            file.flush()
    except OSError as error:
        raise _refused(key, folder, error) from error


def _refused(key: str, path: Path, error: OSError) -> TrackError:
    return TrackError(
        "{key}: cannot write to {folder}: {reason}. Choose another place.",
        key=key,
        folder=path,
        reason=error.strerror or error,
    )


_TINY = {"rehearsal": torch.zeros(16)}


def try_checkpoint(folder: Path) -> None:
    """Write a small file into checkpoints/ as checkpoints are written, on every rank, and remove it. A collective.

    Raises:
        CheckpointError: some rank cannot.
    """
    was_there = on_rank0(lambda: folder.is_dir())
    reasons = gather(_reason(lambda: folder.mkdir(exist_ok=True)) if rank() == 0 else "")
    path = folder / f".rehearsal-rank-{rank():05d}.tmp"
    files = EngineFiles()

    def write() -> None:
        files.save(_TINY, str(path))
        if not files.failure:
            flush(path)
            directory.verify_files(path)

    if not any(reasons):
        written = _reason(write) or files.failure
        removed = _reason(lambda: path.unlink(missing_ok=True))
        reasons = gather(written or removed)
    is_left = rank() == 0 and not was_there and folder.is_dir()
    left = gather(_reason(folder.rmdir) if is_left else "")
    reasons = reasons if any(reasons) else left
    reason = next((f"{reason} (rank {number})" for number, reason in enumerate(reasons) if reason), "")
    if reason:
        raise CheckpointError(
            "checkpoints cannot be written to {folder}: {reason}. Set run.dir to a folder that every rank may "
            "write to.",
            folder=folder,
            reason=reason,
        )


def try_export(folder: Path) -> None:
    """Write a small model folder beside where the export will be, and remove it. For rank 0 only.

    Raises:
        CheckpointError: it cannot be written.
    """

    def write() -> None:
        with TemporaryDirectory(prefix=f".{folder.name}.", suffix=".tmp", dir=folder.parent) as parent:
            for name in ("model.safetensors", "config.json"):
                path = Path(parent) / name
                if path.suffix == ".json":
                    path.write_text("{}", encoding="utf-8")
                else:
                    save_file(_TINY, path)
                flush(path)

    if reason := _reason(write):
        raise CheckpointError(
            "cannot write the export to {folder}: {reason}. Set run.dir to a folder that you may write to, or "
            "checkpoint.export=false.",
            folder=folder,
            reason=reason,
        )


def check_room(folder: Path, config: CheckpointConfig, saves: int, each_bytes: int, export_bytes: int) -> None:
    """See whether the disk has room for all that will be on it at once. For rank 0 only.

    Args:
        folder: checkpoints/ of the run; need not exist.
        config: how many are kept.
        saves: checkpoints that are still to be saved.
        each_bytes: that one takes at least.
        export_bytes: of the export; 0 without one.

    Raises:
        CheckpointError: it has not.
    """
    # An older one goes only when its successor is whole.
    at_once = min(saves, config.keep + 1) if config.keep else saves
    count = max(at_once - len(directory.published_checkpoints(folder)), min(saves, 1))
    most = count * each_bytes
    if config.max_gib:
        most = min(most, int(config.max_gib * 2**30) + each_bytes)
    needed, free = most + export_bytes, shutil.disk_usage(folder if folder.is_dir() else folder.parent).free
    if needed <= free:
        return
    raise CheckpointError(
        "{folder} has {free} GB free, and this run needs {needed} GB at least: {count} checkpoints of {each} GB "
        "(checkpoint.keep = {keep}, and the next before an older one goes) and an export of {export} GB. Free "
        "some, lower checkpoint.keep, or set run.dir to another disk; train.rehearse=false leaves out this check.",
        folder=folder.parent,
        free=_gb(free),
        needed=_gb(needed),
        count=count,
        each=_gb(each_bytes),
        keep=config.keep,
        export=_gb(export_bytes),
    )


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.3g}"


def _reason(write: Callable[[], object]) -> str:
    """Return why something cannot be written, "" if it can."""
    try:
        write()
    except (OSError, SafetensorError) as error:
        return getattr(error, "strerror", None) or str(error)
    return ""


def dry_run(task: Task, run: RunContext, plan: RunPlan | None) -> str:
    """Try what the run will do, and leave everything as it was. A collective; returns what is said of it.

    Args:
        task: what is learned.
        run: with its engine in the state in which it begins.
        plan: what memory is expected to be; None if it is not known.

    Raises:
        OutOfMemory: if the run does not fit.
        CheckpointError: if checkpoints or export cannot be written, or have no room.
        TrackError: if what is measured cannot be written.
        ModelError: if the model cannot answer.
    """
    began, start, cfg, engine = time.monotonic(), run.start, run.cfg, run.engine
    run.watchdog.enter("rehearsal", start.step)
    steps = range(start.step + 1, run.total_steps + 1)
    check_disk(run, steps)
    limit = limit_bytes(engine.device, cfg.plan.max_gpu_gib)
    with restore_after(engine), PeakMemory(engine.device, limit if engine.device.type == "cpu" else 0) as memory:

        def explained(doing: str) -> AbstractContextManager[None]:
            return explain_out_of_memory(cfg, run.ranks, doing, memory, limit, plan, task.memory_sections)

        with explained(task.trial_title()):
            batch, name = task.longest_batch(Position(start.epoch, start.row))
            measured = trial_step(engine, task, run.guard, batch, memory, run.accumulation)
        with explained(tr("an evaluation")):
            task.check_evaluation(run)
        used = measured.before, memory.highest()
    process_group.on_rank0(run.trackers.wait_begun)
    run.watchdog.enter("", start.step)
    tried = _tried(cfg, _saves(cfg.checkpoint, steps), task.has_validation)
    return _summary(used, limit, f"{name}, {tried}", time.monotonic() - began, plan)


def check_disk(run: RunContext, steps: range) -> None:
    """See whether all that the run writes can be written."""
    cfg, folder, checkpoints = run.cfg, run.folder, run.checkpointer.folder
    process_group.on_rank0(lambda: check_writable(cfg.track, folder))
    try_checkpoint(checkpoints)
    export, each_bytes = folder / "export", run.checkpointer.least_bytes
    export_bytes = _export_bytes(unwrap_model(run.engine.module)) if cfg.checkpoint.export else 0
    saves = _saves(cfg.checkpoint, steps)
    process_group.on_rank0(lambda: try_export(export) if cfg.checkpoint.export else None)
    process_group.on_rank0(lambda: check_room(checkpoints, cfg.checkpoint, saves, each_bytes(), export_bytes))


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


def _tried(cfg: RunConfig, saves: int, evaluates: bool) -> str:
    """Return what the run will do next to the batch, and has been tried."""
    words = [
        tr("an update"),
        tr("a save") if saves else "",
        tr("an export") if cfg.checkpoint.export else "",
        tr("an evaluation") if evaluates or cfg.evaluate.prompts else "",
    ]
    return ", ".join(filter(None, words))


def _summary(used: tuple[int, int], limit: int, tried: str, seconds: float, plan: RunPlan | None) -> str:
    """Return a line about it: `used` are the bytes before the step and at most. A collective."""
    device_bytes = process_group.gather(used)
    peaks = [peak for _, peak in device_bytes]
    most = peaks.index(max(peaks))
    return tr(
        "Rehearsed in {seconds} s: {tried}. Memory: {peak} at most, on rank {rank} ({before} before the step{limit})"
        "{planned}.",
        seconds=f"{seconds:.1f}",
        tried=tried,
        peak=shown(peaks[most]),
        rank=most,
        before=shown(device_bytes[most][0]),
        limit=tr(", of {limit}", limit=shown(limit)) if limit else "",
        planned=tr("; planned for the longest rows: {planned}", planned=shown(plan.tensor_bytes)) if plan else "",
    )
