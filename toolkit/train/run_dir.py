"""The run directory: chosen and locked by rank 0; its settings, starts (logs/starts.jsonl) and end (DONE)."""

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
from toolkit.config import load
from toolkit.config.schema import RunConfig
from toolkit.distributed import watchdog
from toolkit.launch import ancestors, environment
from toolkit.messages import CheckpointError, RunFolderError, joined
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


def choose_run_dir(cfg: RunConfig) -> RunSource:
    """Choose the run directory, make or lock it, put aside what an unfinished start left in it, and record the start;
    return it with the checkpoint to resume from. Raises RunFolderError (finished, in use, cannot be made),
    RepeatedDeath, CheckpointError (nothing to resume), ConfigError (`resume`). For rank 0 only.
    """
    if not cfg.run.name and cfg.resume in (NEVER, AUTO):
        return begin_new(cfg)
    from toolkit.train import existing_run

    return existing_run.choose(cfg)


def check_unfinished(cfg: RunConfig) -> None:
    """Raise RunFolderError if this command would resume a finished run. On any rank, as nodes share its directory."""
    folder = Path(cfg.run.dir).absolute() / cfg.run.name
    if cfg.run.name and cfg.resume in (AUTO, MUST) and os.path.exists(folder / "DONE"):
        from toolkit.train import existing_run

        raise existing_run.finished_error(folder)


def begin_new(cfg: RunConfig, checkpoint: Path | None = None, step: int = 0) -> RunSource:
    """Make and lock a new run directory, whose run starts from another one's checkpoint of that step, or from none."""
    folder = create_run_dir(cfg)
    run_lock.lock_run_dir(folder)
    record_start(folder, step, config_digest(cfg))
    return RunSource(folder, checkpoint)


def config_digest(cfg: RunConfig) -> str:
    """Return 16 hexadecimal digits that identify a config, for starts.jsonl."""
    return hashlib.sha256(load.to_yaml(cfg).encode()).hexdigest()[:16]


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
        new_names = {name: f"logs/{name}" for name in ("config.yaml", "ds_config.json", "environment.json")}
        new_names["export"] = "export.replaced"
        for name, new_name in new_names.items():
            if (folder / name).exists():
                (folder / name).rename(disk.unused_path(folder / new_name))
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
    """Return the content of environment.json: versions, machine and commit; no environment variables, so no secrets."""
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
    """Return the commit of toolkit's checkout, with "+changes" if files differ from it; "" if it is not known."""
    git, checkout = shutil.which("git"), Path(__file__).resolve().parents[2]
    if not git or not (checkout / "run.py").is_file():
        return ""  # installed from a wheel: a repository around it would be somebody else's
    command = [git, "--no-optional-locks", "-C", str(checkout), "status", "--porcelain=v2", "--branch", "-uno"]
    try:
        status = children.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
    head = re.search(r"^# branch\.oid ([0-9a-f]+)$", status, re.MULTILINE)  # "(initial)" before the first commit
    if head is None:
        return ""
    has_changes = any(not line.startswith("#") for line in status.splitlines())
    return f"{head[1]}+changes" if has_changes else head[1]


def mark_done(folder: Path, summary: dict[str, object]) -> None:
    """Write the DONE marker, the only proof that a run has finished. For rank 0 only, last of all."""
    _write(folder / "DONE", json.dumps(summary, indent=2) + "\n")


def _write(file: Path, text: str) -> None:
    """Write a file atomically; CheckpointError if that fails."""
    try:
        disk.write_atomically(file, text.encode())
    except OSError as error:  # the system does not name the file when a disk is full
        raise CheckpointError("cannot write {file}: {reason}.", file=file, reason=error.strerror or error) from error


def record_start(folder: Path, step: int, digest: str = "") -> None:
    """Append this start to logs/starts.jsonl, before anything else changes; then remove the heartbeats of an earlier
    start's ranks, and tell a `toolkit launch` the run directory. `step`: that of the checkpoint it resumes from, 0
    without one; `digest`: the config's. RepeatedDeath if a restart after a failure gets no further than the last.
    """
    restart, logs = environment.restart_number(), folder / "logs"
    reached = 0  # the step in which the earlier start ended
    if (logs / STARTS).exists():
        from toolkit.train import existing_run

        if restart:
            existing_run.check_repeated_death(folder, step)
        reached = existing_run.reached_step(folder)
    row = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "from_step": step,
        "config": digest,
        "restart": restart,
        "by": "toolkit launch" if environment.read_status() else environment.detect(os.environ).launcher,
        "reached_step": reached,
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


def read_rows(path: Path, *errors: type[OSError]) -> list[dict[str, Any]]:
    """Return the objects of a JSONL file, without cut-off lines; [] if it is missing, or if reading raises `errors`."""
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
