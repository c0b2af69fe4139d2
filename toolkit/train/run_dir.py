"""The run directory: chosen, locked and resumed by rank 0; its settings, starts (logs/starts.jsonl) and end (DONE)."""

import hashlib
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from toolkit import children, disk, secrets
from toolkit.checkpoint import directory
from toolkit.config import load, paths
from toolkit.config.schema import RunConfig
from toolkit.distributed import watchdog
from toolkit.launch import ancestors, environment
from toolkit.messages import CheckpointError, ConfigError, RepeatedDeath, RunFolderError, clauses, joined, say
from toolkit.train import run_lock

NEVER, AUTO, MUST = "never", "auto", "must"
STOP = "stop"
"""A file by which a run is stopped where no signal can be sent."""
_LOOK_EVERY_S = 1.0
"""Seconds between two checks for it, as the run directory may be on a file server."""
STARTS = "starts.jsonl"
RECORDED_PACKAGES = (
    *("torch", "deepspeed", "transformers", "peft", "tokenizers"),
    *("hydra-core", "omegaconf", "numpy", "safetensors"),
)


@dataclass(frozen=True, slots=True)
class RunSource:
    """Where a run works and what it resumes from."""

    folder: Path
    checkpoint: Path | None
    """Verified; None starts over."""


@dataclass(frozen=True, slots=True)
class _LockedRunDir:
    """A run directory that this process has locked."""

    folder: Path
    checkpoint: Path | None
    """That `resume` names."""
    is_new: bool


def choose_run_dir(cfg: RunConfig) -> RunSource:
    """Choose the run directory, make or lock it, put aside what an unfinished start left in it, and record the start;
    return it with the checkpoint to resume from. Raises RunFolderError (finished, in use, cannot be made),
    RepeatedDeath, CheckpointError (nothing to resume), ConfigError (`resume`). For rank 0 only.
    """
    locked = _create_or_lock(cfg)
    folder, checkpoint = locked.folder, locked.checkpoint
    if locked.is_new:
        record_start(folder, directory.read_run_state(checkpoint).step if checkpoint else 0, _config_digest(cfg))
        return RunSource(folder, checkpoint)
    if checkpoint is None:
        checkpoint = resumable_checkpoint(folder, must_exist=cfg.resume == MUST)
    directory.discard_unfinished(folder / "checkpoints")
    _prepare_to_resume(folder, checkpoint, _config_digest(cfg))
    return RunSource(folder, checkpoint)


def _create_or_lock(cfg: RunConfig) -> _LockedRunDir:
    """Lock the existing directory that `run.name` or `resume` means, or make and lock a new one."""
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
        has_saved = bool(directory.published_checkpoints(named / "checkpoints"))
        return _LockedRunDir(named, None if has_saved else _resolve_checkpoint(Path(cfg.resume)), is_new=False)
    checkpoint = _resolve_checkpoint(Path(cfg.resume)) if is_path else None
    if checkpoint is not None:
        resumes = checkpoint.parent.parent == named
    else:  # a directory that is no run is an error
        is_run = named is not None and any((named / name).exists() for name in (run_lock.LOCK, "config.yaml"))
        resumes = is_run and cfg.resume != NEVER
    if named is not None and resumes:
        _lock_to_resume(named)
        return _LockedRunDir(named, checkpoint, is_new=False)
    if cfg.resume == MUST:
        raise CheckpointError(
            "resume = must, but there is no run {folder}. Check run.name and run.dir.", folder=named or cfg.run.dir
        )
    folder = create_run_dir(cfg)
    run_lock.lock_run_dir(folder)
    return _LockedRunDir(folder, checkpoint, is_new=True)


def _was_started_with(folder: Path, cfg: RunConfig) -> bool:
    """Whether the last start of a run had this config: the same command, and nothing edited in its recipe."""
    starts = read_rows(folder / "logs" / STARTS, OSError)
    return bool(starts) and starts[-1].get("config") == _config_digest(cfg)


def _config_digest(cfg: RunConfig) -> str:
    """Return 16 hexadecimal digits that identify a config, for starts.jsonl."""
    return hashlib.sha256(load.to_yaml(cfg).encode()).hexdigest()[:16]


def resumable_checkpoint(folder: Path, *, must_exist: bool = False) -> Path | None:
    """Return the newest checkpoint of a run directory whose files all match their checksums. If it never saved one,
    return None, or raise CheckpointError with `must_exist`; CheckpointError too if it saved some and none is intact.
    """
    checkpoints = folder / "checkpoints"
    checkpoint = directory.newest_intact(checkpoints)
    were_there = [*directory.published_checkpoints(checkpoints), *checkpoints.glob("*.damaged")]
    if checkpoint is None and (were_there or must_exist):
        raise CheckpointError(
            "{folder} holds no intact checkpoint. To start over, choose another run.name.", folder=checkpoints
        )
    # Without a config nothing was stopped: another process has just made the directory, and did not get its lock.
    if checkpoint is None and (folder / "config.yaml").exists():
        say("The run {folder} was stopped before its first checkpoint: it starts over.", folder=folder)
    return checkpoint


def _resolve_checkpoint(path: Path) -> Path:
    """Return the checkpoint that `resume=PATH` means: the path itself, or the newest one of a run directory."""
    path = path.absolute()
    if paths.is_exported(path):
        raise ConfigError(paths.not_resumable(path))
    if (path / directory.MANIFEST).is_file():
        if wrong := directory.manifest_problems(path):
            raise CheckpointError(
                "the checkpoint {folder} is damaged: {reason}.", folder=path, reason=clauses(wrong[:3])
            )
        return path
    checkpoint = directory.newest_intact(path / "checkpoints") if path.is_dir() else None
    if checkpoint is None:
        raise ConfigError(paths.not_resumable(path))
    return checkpoint


def _lock_to_resume(folder: Path) -> None:
    """Lock an existing run, unless it has finished; remove a `stop` that was meant for an earlier start of it."""
    disk.check_no_symlinks(folder, RunFolderError)
    if (folder / "DONE").exists():
        raise RunFolderError(
            "the run {folder} has finished already (DONE). For another one choose another run.name; to train its model "
            "further, set model.path={folder}/export as well, or tuning.adapter={folder}/export for an adapter.",
            folder=folder,
        )
    run_lock.lock_run_dir(folder)
    stop = folder / STOP
    # A run that its launcher restarts after a failure obeys it: it was made since the command was typed.
    if stop.exists() and not environment.restart_number():
        stop.unlink(missing_ok=True)
        say("Removed the file {file}, which is older than this start. To stop this run, create it again.", file=stop)


def _prepare_to_resume(folder: Path, checkpoint: Path | None, config_digest: str) -> None:
    """Record the start in an existing run directory, and rename what the resumed run would overwrite, except for what
    `set_aside_settings` renames once nothing prevents it any more.
    """
    try:
        if checkpoint is not None:  # first of all: once the start is noted, the same command takes the newest
            directory.move_aside_after(folder / "checkpoints" / checkpoint.name)
        record_start(folder, directory.read_run_state(checkpoint).step if checkpoint else 0, config_digest)
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


def create_run_dir(cfg: RunConfig) -> Path:
    """Make and return the run directory; RunFolderError if it holds something or cannot be made. For rank 0 only."""
    disk.check_no_symlinks(Path(cfg.run.dir).absolute(), RunFolderError, [cfg.run.name] if cfg.run.name else [])
    parent = make_parent(cfg)
    try:
        if cfg.run.name:
            folder = parent / cfg.run.name
            # Empty logs/ are left by a start that died before it had locked the directory.
            is_bare = folder.is_dir() and all(
                path.name == "logs" and path.is_dir() and not any(path.iterdir()) for path in folder.iterdir()
            )
            folder.mkdir(exist_ok=is_bare)
        else:
            folder = _make_dated(parent, Path(cfg.recipe).stem or "run")
        (folder / "logs").mkdir(exist_ok=True)
    except FileExistsError as error:
        raise RunFolderError(
            "the run directory {folder} already exists and is not touched. Choose another run.name, or move it away.",
            folder=error.filename,
        ) from error
    except OSError as error:
        raise _creation_error(parent, error) from error
    return folder


def make_parent(cfg: RunConfig) -> Path:
    """Make the directory that holds the run directories and return its absolute path."""
    parent = Path(cfg.run.dir).absolute()
    try:
        parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _creation_error(parent, error) from error
    return parent


def _creation_error(parent: Path, error: OSError) -> RunFolderError:
    """Return the error for a run directory that cannot be created in `parent`."""
    return RunFolderError(
        "cannot create a run directory in {folder}: {reason}. Set run.dir to a directory that you may write to.",
        folder=parent,
        reason=error.strerror,
    )


def _make_dated(parent: Path, recipe: str) -> Path:
    """Make and return parent/RECIPE-DATE-TIME, with -2, -3, … when runs start in the same second."""
    stamp = f"{recipe}-{time.strftime('%Y%m%d-%H%M%S')}"
    for attempt in range(1, 1000):
        folder = parent / (stamp if attempt == 1 else f"{stamp}-{attempt}")
        with suppress(FileExistsError):
            folder.mkdir()
            return folder
    raise FileExistsError(17, "File exists", str(parent / stamp))


def rescue(folder: Path) -> Path:
    """Make and return FOLDER.rescued, into which a run whose directory was removed saves its state. Rank 0 only."""
    rescued = disk.unused_path(folder.with_name(f"{folder.name}.rescued"))
    try:
        (rescued / "logs").mkdir(parents=True)
    except OSError as error:
        raise RunFolderError(joined(run_lock.lost_text(folder), str(_creation_error(rescued.parent, error)))) from error
    return rescued


def set_aside_settings(folder: Path) -> None:
    """Rename the settings and the export of an earlier start, which a resumed run writes again. Only when its config
    has been accepted: a run that may not be resumed like this stays as it was. For rank 0 only.
    """
    try:
        moves = {name: f"logs/{name}" for name in ("config.yaml", "ds_config.json", "environment.json")}
        for name, other in {**moves, "export": "export.replaced"}.items():
            if (folder / name).exists():
                (folder / name).rename(disk.unused_path(folder / other))
    except OSError as error:
        raise RunFolderError(
            "cannot resume in {folder}: {reason}.", folder=folder, reason=error.strerror or error
        ) from error


def write_settings(
    folder: Path, config_yaml: str, ds_config: dict[str, object], hosts: Sequence[str], device: str
) -> None:
    """Write config.yaml, ds_config.json, environment.json, without secrets. Rank 0 only. `device`: GPU, "" on CPUs."""
    environment = {**describe_environment(len(hosts)), "hosts": list(hosts), "device": device}
    _write(folder / "config.yaml", config_yaml)
    _write(folder / "environment.json", json.dumps(secrets.hide_all(environment), indent=2) + "\n")
    write_ds_config(folder, ds_config)


def write_ds_config(folder: Path, values: dict[str, object]) -> None:
    """Write ds_config.json, without secrets, or raise CheckpointError. For rank 0 only."""
    _write(folder / "ds_config.json", json.dumps(secrets.hide_all(values), indent=2) + "\n")


def new_state(cfg: RunConfig, data: dict[str, str], world_size: int) -> directory.RunState:
    """Return the state of a run before its first step; `data`: the task's `identity`."""
    return directory.RunState(
        world_size=world_size,
        data=data,
        config=json.loads(json.dumps(load.to_dict(cfg))),
        versions=describe_environment(world_size),
    )


def trim_metrics(folder: Path, length: int) -> None:
    """Move metrics.jsonl's rows after `length` bytes, of steps to repeat, to metrics-lost.jsonl. For rank 0 only."""
    path = folder / "metrics.jsonl"
    if not path.exists() or path.stat().st_size <= length:
        return
    content = path.read_bytes()
    with open(folder / "logs" / "metrics-lost.jsonl", "ab") as lost_rows:
        lost_rows.write(content[length:])
    os.truncate(path, length)


def describe_environment(world_size: int) -> dict[str, object]:
    """Return versions, machine and commit; no environment variables, so no secrets."""
    return {
        "python": sys.version.split()[0],
        "platform": f"{platform.system()} {platform.machine()}",
        "processors": os.cpu_count(),
        "world_size": world_size,
        "packages": versions(),
        "commit": commit(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def versions() -> dict[str, str]:
    """Return the versions of the packages that decide what a run computes."""
    installed = dict.fromkeys(RECORDED_PACKAGES, "not installed")
    for name in RECORDED_PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            installed[name] = metadata.version(name)
    return installed


@cache
def commit() -> str:
    """Return the commit of this toolkit's checkout, with "+changes" when files differ, or "" outside a checkout."""
    git, here = shutil.which("git"), Path(__file__).resolve().parents[2]
    if not git or not (here / "run.py").is_file():
        return ""  # installed from a wheel: a repository around it would be somebody else's
    command = [git, "--no-optional-locks", "-C", str(here), "status", "--porcelain=v2", "--branch", "-uno"]
    try:
        status = children.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
    head = re.search(r"^# branch\.oid ([0-9a-f]+)$", status, re.MULTILINE)  # "(initial)" before the first commit
    has_changes = any(not line.startswith("#") for line in status.splitlines())
    return head[1] + ("+changes" if has_changes else "") if head else ""


def mark_done(folder: Path, summary: dict[str, object]) -> None:
    """Write the DONE marker, the only proof that a run has finished. For rank 0 only, last of all."""
    _write(folder / "DONE", json.dumps(summary, indent=2) + "\n")


def _write(file: Path, text: str) -> None:
    """Write a file atomically; CheckpointError if that fails."""
    try:
        disk.write_atomically(file, text.encode())
    except OSError as error:  # the system does not name the file when a disk is full
        raise CheckpointError("cannot write {file}: {reason}.", file=file, reason=error.strerror or error) from error


def record_start(folder: Path, step: int, config_digest: str = "") -> None:
    """Append this start to logs/starts.jsonl, before anything else changes. `step`: that of the checkpoint it resumes
    from, 0 without one. RepeatedDeath if restarts get no further.
    """
    restart = environment.restart_number()
    if restart:
        check_repeated_death(folder, step)
    logs = folder / "logs"
    row = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "from_step": step,
        "config": config_digest,
        "restart": restart,
        "by": "toolkit launch" if environment.read_status() else environment.detect(os.environ).launcher,
        "reached_step": reached_step(folder) if (logs / STARTS).exists() else 0,
        "command": ancestors.typed_command(),
        "world_size": environment.detect(os.environ).world_size,
        "host": socket.gethostname(),
        "commit": commit(),
    }
    logs.mkdir(exist_ok=True)
    with open(logs / STARTS, "a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
    for path in logs.glob(watchdog.heartbeat_file("*")):  # of the ranks that are gone
        path.unlink(missing_ok=True)
    environment.report_status(folder=str(folder))


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
    """Return the step in which a run ended, by its last row of metrics.jsonl and its ranks' heartbeats."""
    logged = max((int(row["step"]) for row in read_rows(folder / "metrics.jsonl", OSError)[-1:]), default=0)
    beats = [row for path in (folder / "logs").glob(watchdog.heartbeat_file("*")) for row in read_rows(path, OSError)]
    beat_step = max((int(beat["step"]) for beat in beats), default=0)
    in_step = (watchdog.STEP, watchdog.DATA)
    # After the logged step a rank evaluated or saved; else the next one had begun, of which nothing is written.
    if beat_step > logged or any(beat["step"] == logged > 0 and beat["phase"] not in in_step for beat in beats):
        return beat_step
    return logged + 1


def read_rows(path: Path, *errors: type[OSError]) -> list[dict[str, Any]]:
    """Return the objects of a JSONL file, but cut-off lines; [] if it is missing or reading raises one of `errors`."""
    with suppress(FileNotFoundError, *errors):
        return [row for row in disk.json_lines(path) if row is not None]
    return []


class StopFile:
    """The file `stop` in a run directory, by which a user ends the run; looked for on rank 0."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / STOP
        self.is_found = False
        self._next_look = 0.0

    def look(self, now: float) -> None:
        """Set `is_found` if the file is there, but look no more than once a second; `now`: as time.monotonic()."""
        if self.is_found or now < self._next_look:
            return
        self._next_look = now + _LOOK_EVERY_S
        with suppress(OSError):  # a file server that does not answer
            self.is_found = self.path.exists()

    def obey(self) -> None:
        """Remove a file that was found, as the run ends: or it could never be resumed."""
        if self.is_found:
            self.path.unlink(missing_ok=True)
