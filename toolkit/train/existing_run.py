"""The directory of an earlier run: whether a config means it, whether it can be resumed, from what, where it ended."""

import shlex
import shutil
from pathlib import Path

from toolkit import disk
from toolkit.checkpoint import directory, intact
from toolkit.config import paths
from toolkit.config.schema import RunConfig
from toolkit.distributed import watchdog
from toolkit.launch import environment
from toolkit.messages import CheckpointError, ConfigError, RepeatedDeath, RunFolderError, clauses, joined, say, tr
from toolkit.train import run_lock
from toolkit.train.run_dir import (
    AUTO,
    MUST,
    NEVER,
    STARTS,
    STOP,
    RunSource,
    begin_new,
    config_digest,
    read_rows,
    record_start,
)


def choose(cfg: RunConfig) -> RunSource:
    """Do what `run_dir.choose_run_dir` does if `run.name` or `resume` may mean a directory that is there. In this
    order: the run `run.name` is resumed if this command started it before (a launcher repeats it), or if `resume`
    allows it or names a checkpoint of it; else a new run begins, from the checkpoint that `resume` names, if any.
    """
    named = Path(cfg.run.dir).absolute() / cfg.run.name if cfg.run.name else None
    is_path = cfg.resume not in (NEVER, AUTO, MUST)
    if named is not None and is_path and _was_started_with(named, cfg):
        _lock_to_resume(named)
        say(
            "{folder} has been started by this command before: it is resumed. To start from {path} again, choose "
            "another run.name.",
            folder=named,
            path=cfg.resume,
        )
        if directory.published_checkpoints(named / "checkpoints"):
            return _resume(named, None, cfg)  # from its own newest checkpoint
        return _resume(named, _resolve_checkpoint(Path(cfg.resume)), cfg)  # it has none: from what it began with
    checkpoint = _resolve_checkpoint(Path(cfg.resume)) if is_path else None
    if checkpoint is not None:
        resumes = checkpoint.parent.parent == named  # RUN/checkpoints/step-N
    else:  # `begin_new` rejects a directory that is no run
        is_run = named is not None and any((named / name).exists() for name in (run_lock.LOCK, "config.yaml"))
        resumes = is_run and cfg.resume != NEVER
    if named is not None and resumes:
        _lock_to_resume(named)
        return _resume(named, checkpoint, cfg)
    if cfg.resume == MUST:
        raise CheckpointError(
            "resume = must, but there is no run {folder}. Check run.name and run.dir.", folder=named or cfg.run.dir
        )
    return begin_new(cfg, checkpoint, intact.read_run_state(checkpoint).step if checkpoint else 0)


def _resume(folder: Path, checkpoint: Path | None, cfg: RunConfig) -> RunSource:
    """Record the start in a locked run directory; return it with `checkpoint`, or if None its newest intact one."""
    if checkpoint is None:
        checkpoint = resumable_checkpoint(folder, must_exist=cfg.resume == MUST)
    intact.discard_unfinished(folder / "checkpoints")
    _prepare_to_resume(folder, checkpoint, config_digest(cfg))
    return RunSource(folder, checkpoint)


def _was_started_with(folder: Path, cfg: RunConfig) -> bool:
    """Whether the last start of a run had this config: the same command, and nothing edited in its recipe."""
    starts = read_rows(folder / "logs" / STARTS, OSError)
    return bool(starts) and starts[-1].get("config") == config_digest(cfg)


def resumable_checkpoint(folder: Path, *, must_exist: bool = False) -> Path | None:
    """Return the newest checkpoint of a run directory whose files all match their checksums. If it never saved one,
    return None, or raise CheckpointError with `must_exist`; CheckpointError too if it saved some and none is intact.
    """
    checkpoints = folder / "checkpoints"
    checkpoint = intact.newest_intact(checkpoints)
    were_there = [*directory.published_checkpoints(checkpoints), *checkpoints.glob("*.damaged")]
    if checkpoint is None and (were_there or must_exist):
        raise CheckpointError(
            "{folder} holds no intact checkpoint. To start over, choose another run.name.", folder=checkpoints
        )
    # Without config.yaml no run was stopped here: another process made the directory, and this one got the lock first.
    if checkpoint is None and (folder / "config.yaml").exists():
        say("The run {folder} was stopped before its first checkpoint: it starts over.", folder=folder)
    return checkpoint


def _resolve_checkpoint(path: Path) -> Path:
    """Return the checkpoint that `resume=PATH` means: PATH itself, or the newest intact one of the run directory PATH.
    Raise CheckpointError if it is damaged, ConfigError if there is none.
    """
    path = path.absolute()
    if paths.is_exported(path):
        raise ConfigError(paths.not_resumable(path))
    if (path / directory.MANIFEST).is_file():
        if wrong := intact.manifest_problems(path):
            raise CheckpointError(
                "the checkpoint {folder} is damaged: {reason}.", folder=path, reason=clauses(wrong[:3])
            )
        return path
    checkpoint = intact.newest_intact(path / "checkpoints") if path.is_dir() else None
    if checkpoint is None:
        raise ConfigError(paths.not_resumable(path))
    return checkpoint


def _lock_to_resume(folder: Path) -> None:
    """Lock an existing run, unless it has finished; remove a `stop` that was meant for an earlier start of it."""
    disk.check_no_symlinks(folder, RunFolderError)
    if (folder / "DONE").exists():
        raise finished_error(folder)
    run_lock.lock_run_dir(folder)
    stop = folder / STOP
    # After a restart by the launcher the file counts: it was made since the command was typed.
    if stop.exists() and not environment.restart_number():
        stop.unlink(missing_ok=True)
        say("Removed the file {file}, which is older than this start. To stop this run, create it again.", file=stop)


def finished_error(folder: Path) -> RunFolderError:
    """Return the error for a command that would resume a finished run."""
    export = folder / "export"
    if not export.is_dir():
        is_saved = bool(directory.published_checkpoints(folder / "checkpoints"))
        command = shlex.join(["toolkit", "export-model", str(folder)])
        advice = tr("Its checkpoints can be exported:  {command}", command=command) if is_saved else ""
        message = tr(
            "the run {folder} has finished already (DONE), without an export. For another one choose another run.name.",
            folder=folder,
        )
        return RunFolderError(joined(message, advice) if advice else message)
    return RunFolderError(
        "the run {folder} has finished already (DONE). For another one choose another run.name; to train its model "
        "further, set {key}={folder}/export as well.",
        folder=folder,
        key="tuning.adapter" if (export / "adapter_config.json").is_file() else "model.path",
    )


def _prepare_to_resume(folder: Path, checkpoint: Path | None, digest: str) -> None:
    """Record the start in an existing run directory, and rename what the resumed run would overwrite, except for what
    `set_aside_settings` renames once nothing prevents it any more. `digest`: of the config, see `config_digest`.
    """
    try:
        if checkpoint is not None:  # before `record_start`: after it the same command would resume from the newest one
            intact.move_aside_after(folder / "checkpoints" / checkpoint.name)
        record_start(folder, intact.read_run_state(checkpoint).step if checkpoint else 0, digest)
        if (folder / "FAILED").exists():
            (folder / "FAILED").rename(disk.unused_path(folder / "logs" / "FAILED"))
        for path in [*folder.glob(".export.*.tmp"), *folder.glob(".base.*.tmp")]:
            shutil.rmtree(path)
        if checkpoint is None and (folder / "base").exists():  # the random model of another config, maybe
            (folder / "base").rename(disk.unused_path(folder / "base.replaced"))
    except OSError as error:
        raise RunFolderError(
            "cannot resume in {folder}: {reason}.", folder=folder, reason=error.strerror or error
        ) from error


def check_repeated_death(folder: Path, step: int) -> None:
    """Raise RepeatedDeath if a run died again and would be resumed from the step where it began the last time."""
    rows = read_rows(folder / "logs" / STARTS, OSError)
    if rows and rows[-1]["restart"] and step <= rows[-1]["from_step"]:
        raise RepeatedDeath(
            "the run {folder} died at step {before} and, started again, at step {now}, without a new checkpoint in "
            "between (the last is of step {step}): another start would end there too. {logs} says why; after that the "
            "same command resumes the run.",
            folder=folder,
            before=rows[-1]["reached_step"],
            now=reached_step(folder),
            step=step,
            logs=folder / "logs",
        )


def newest_step(folder: Path) -> int:
    """Return the step of a run's newest checkpoint, 0 if there is none; its files are not verified."""
    checkpoints = directory.published_checkpoints(folder / "checkpoints")
    return directory.step_of(checkpoints[0]) if checkpoints else 0


def reached_step(folder: Path) -> int:
    """Return the step in which a run ended, by its last row of metrics.jsonl and its ranks' heartbeats. With the row of
    step 5: 7 if a heartbeat names step 7; 5 if a rank was evaluating or saving after step 5; else 6, which had begun.
    Without rows and heartbeats: 1.
    """
    rows = read_rows(folder / "metrics.jsonl", OSError)
    logged = int(rows[-1]["step"]) if rows else 0
    beats = [row for path in (folder / "logs").glob(watchdog.heartbeat_file("*")) for row in read_rows(path, OSError)]
    newest_beat = max((int(beat["step"]) for beat in beats), default=0)
    if newest_beat > logged:  # not every step is logged
        return newest_beat
    in_step = (watchdog.STEP, watchdog.DATA)
    was_after_step = any(beat["step"] == logged and beat["phase"] not in in_step for beat in beats)
    return logged if logged and was_after_step else logged + 1


def what_was_trained(folder: Path, shown: str, step: int) -> str:
    """Return a sentence on what a run has left when its export failed after its last `step`: the export, or how to make
    it later. `shown`: its directory, as messages have it.
    """
    saved = directory.published_checkpoints(folder / "checkpoints")  # the newest first
    steps, export = f"{step:,}", f"{shown}/export"
    if (folder / "export").exists():
        return tr("All {steps} steps are trained, and the export is in {folder}.", steps=steps, folder=export)
    if not saved:
        return tr("All {steps} steps are trained, but no checkpoint was saved (checkpoint.at_end).", steps=steps)
    checkpoint = f"{shown}/checkpoints/{saved[0].name}"
    command = shlex.join(["toolkit", "export-model", checkpoint, f"output={export}"])
    return tr(
        "All {steps} steps are trained, and the checkpoint {checkpoint} is untouched. Export it later:  {command}",
        steps=steps,
        checkpoint=checkpoint,
        command=command,
    )
