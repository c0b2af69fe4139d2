"""The run directory: chosen and claimed by rank 0, its settings, its starts (logs/starts.jsonl) and its end (DONE)."""

import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from toolkit import children
from toolkit.checkpoint import directory
from toolkit.config.schema import RunConfig
from toolkit.disk import check_no_symlinks, unused_path
from toolkit.distributed import watchdog
from toolkit.errors import CheckpointError, ConfigError, RepeatedDeath, RunFolderError
from toolkit.launch import deepspeed, rank_status
from toolkit.launch.deepspeed import typed_command
from toolkit.launch.environment import detect
from toolkit.messages import joined, say
from toolkit.report.history import json_lines
from toolkit.secrets import hide_all
from toolkit.train import folder_lock

RECORDED_PACKAGES = (
    "torch",
    "deepspeed",
    "transformers",
    "peft",
    "tokenizers",
    "hydra-core",
    "omegaconf",
    "numpy",
    "safetensors",
)


def create_run_dir(cfg: RunConfig) -> Path:
    """Make the run folder and return its absolute path. For rank 0 only.

    Raises:
        RunFolderError: the named folder exists and holds something, or the place is not writable, or not this user's to
            write to.
    """
    check_no_symlinks(Path(cfg.run.dir).absolute(), RunFolderError, [cfg.run.name] if cfg.run.name else [])
    parent = make_parent(cfg)
    try:
        if cfg.run.name:
            folder = parent / cfg.run.name
            folder.mkdir(exist_ok=_is_bare(folder))
        else:
            folder = _make_dated(parent, Path(cfg.recipe).stem or "run")
        (folder / "logs").mkdir(exist_ok=True)
    except FileExistsError as error:
        raise RunFolderError(
            "the run folder {folder} exists already and is not touched. Choose another run.name, or move it away.",
            folder=error.filename,
        ) from error
    except OSError as error:
        raise _refused(parent, error) from error
    return folder


def _is_bare(folder: Path) -> bool:
    """Whether a folder holds nothing, or as much as a start leaves that died before it had locked it."""
    return folder.is_dir() and all(
        path.name == "logs" and path.is_dir() and not any(path.iterdir()) for path in folder.iterdir()
    )


def rescue(folder: Path) -> Path:
    """Make a folder next to a run folder that was removed, for what can still be saved. For rank 0 only.

    Raises:
        RunFolderError: it cannot be made.
    """
    place = unused_path(folder.with_name(f"{folder.name}.rescued"))
    try:
        (place / "logs").mkdir(parents=True)
    except OSError as error:
        raise RunFolderError(joined(folder_lock.lost_text(folder), str(_refused(place.parent, error)))) from error
    return place


def make_parent(cfg: RunConfig) -> Path:
    """Make the folder that holds the run folders and return its absolute path.

    Raises:
        RunFolderError: the place is not writable.
    """
    parent = Path(cfg.run.dir).absolute()
    try:
        parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _refused(parent, error) from error
    return parent


def _refused(parent: Path, error: OSError) -> RunFolderError:
    return RunFolderError(
        "cannot make a run folder below {folder}: {reason}. Set run.dir to a folder that you may write to.",
        folder=parent,
        reason=error.strerror,
    )


def _make_dated(parent: Path, recipe: str) -> Path:
    """Make RECIPE-DATE-TIME, with -2, -3, … when runs start in the same second."""
    stamp = f"{recipe}-{time.strftime('%Y%m%d-%H%M%S')}"
    for attempt in range(1, 1000):
        folder = parent / (stamp if attempt == 1 else f"{stamp}-{attempt}")
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        return folder
    raise FileExistsError(17, "File exists", str(parent / stamp))


def write_settings(
    folder: Path, config_yaml: str, ds_config: dict[str, object], hosts: Sequence[str], device: str
) -> None:
    """Write config.yaml, ds_config.json and environment.json, without secrets. For rank 0 only.

    Args:
        folder: the run folder.
        config_yaml: the whole resolved config, of `to_yaml`.
        ds_config: what `deepspeed.initialize` receives.
        hosts: of the ranks.
        device: what the driver calls rank 0's GPU; "" is a processor.

    Raises:
        CheckpointError: one cannot be written.
    """
    known = {**describe_environment(len(hosts)), "hosts": list(hosts), "device": device}
    _write(folder / "config.yaml", config_yaml)
    for name, values in (("ds_config", ds_config), ("environment", known)):
        text = json.dumps(hide_all(values), indent=2) + "\n"
        _write(folder / f"{name}.json", text)


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
    found = {}
    for name in RECORDED_PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def commit() -> str:
    """Return the commit of this toolkit's checkout, with "+changes" when files differ, or "" outside a checkout."""
    git = shutil.which("git")
    if not git:
        return ""
    here = Path(__file__).resolve().parents[2]
    if not (here / "run.py").is_file():
        return ""  # installed from a wheel: a repository around it would be somebody else's
    head, changes = _git(git, here, "rev-parse", "HEAD"), _git(git, here, "status", "--porcelain", "-uno")
    return head + ("+changes" if head and changes else "")


def _git(git: str, folder: Path, *words: str) -> str:
    command = [git, "-C", str(folder), *words]
    try:
        found = children.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return found.stdout.strip()


def mark_done(folder: Path, summary: dict[str, object]) -> None:
    """Write the DONE marker, the only proof that a run has finished. For rank 0 only, last of all.

    Raises:
        CheckpointError: it cannot be written.
    """
    _write(folder / "DONE", json.dumps(summary, indent=2) + "\n")


def _write(file: Path, text: str) -> None:
    """Write a file at once or not at all; the system does not name the file when a disk is full."""
    temporary = file.with_name(f"{file.name}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(file)
    except OSError as error:
        raise CheckpointError("cannot write {file}: {reason}.", file=file, reason=error.strerror or error) from error


def with_profile(values: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return DeepSpeed's JSON whose flops profiler writes into a run folder, where the config names no file."""
    if "flops_profiler" not in values:
        return values
    return {**values, "flops_profiler": {"output_file": str(folder / "flops.txt"), **values["flops_profiler"]}}


STARTS = "starts.jsonl"


def record_start(folder: Path, step: int) -> None:
    """Note that a run starts now. For rank 0 only, before anything in the folder is touched.

    Args:
        folder: the run folder.
        step: of the checkpoint that it resumes from; 0 starts over.

    Raises:
        RepeatedDeath: see `check`.
        OSError: it cannot be written.
    """
    restart = deepspeed.restart_number()
    if restart:
        check_repeated_death(folder, step)
    logs = folder / "logs"
    row = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "from_step": step,
        "restart": restart,
        "by": "toolkit launch" if rank_status.read_status() else detect(os.environ).launcher,
        "reached_step": reached_step(folder) if (logs / STARTS).exists() else 0,
        "command": typed_command(),
        "world_size": detect(os.environ).world_size,
        "host": socket.gethostname(),
        "commit": commit(),
    }
    logs.mkdir(exist_ok=True)
    with open(logs / STARTS, "a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
    for path in logs.glob(watchdog.heartbeat_file("*")):  # of the ranks that are gone
        path.unlink(missing_ok=True)
    rank_status.report_status(folder=str(folder))


def check_repeated_death(folder: Path, step: int) -> None:
    """Refuse to start a run again that died twice without a new checkpoint between the two deaths.

    Args:
        folder: the run folder.
        step: of the checkpoint from which it would go on.

    Raises:
        RepeatedDeath: it did, and it would begin where it began the last time.
    """
    rows = _rows(folder / "logs" / STARTS)
    if rows and rows[-1]["restart"] and step <= rows[-1]["from_step"]:
        raise RepeatedDeath(
            "the run {folder} died at step {before} and, started again, at step {now}, without a new checkpoint "
            "in between (the last is of step {step}): another start would end there too. The messages above and "
            "{logs} say why. Once that is mended the same command goes on.",
            folder=folder,
            before=rows[-1]["reached_step"],
            now=reached_step(folder),
            step=step,
            logs=folder / "logs",
        )


def newest_step(folder: Path) -> int:
    """Return the step of a run's newest checkpoint, 0 if there is none; whether it is whole is not looked at."""
    found = directory.published_checkpoints(folder / "checkpoints")
    return directory.step_of(found[0]) if found else 0


def reached_step(folder: Path) -> int:
    """Return the step in which a run ended, as far as it can be told from its rows and its ranks' heartbeats."""
    logged = max((int(row["step"]) for row in _rows(folder / "metrics.jsonl")[-1:]), default=0)
    beats = [row for path in (folder / "logs").glob(watchdog.heartbeat_file("*")) for row in _rows(path)]
    seen = max((int(beat["step"]) for beat in beats), default=0)
    in_step = (watchdog.STEP, watchdog.DATA)
    if seen > logged or any(beat["step"] == logged > 0 and beat["phase"] not in in_step for beat in beats):
        return seen
    return logged + 1


def _rows(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a file of JSON lines, [] if it is not there; a line that was cut off is none."""
    with suppress(OSError):
        return [row for row in json_lines(path) if row is not None]
    return []


NEVER, AUTO, MUST = "never", "auto", "must"


@dataclass(frozen=True, slots=True)
class RunSource:
    """Where a run works and what it goes on from."""

    folder: Path
    """The run folder."""
    checkpoint: Path | None
    """Verified; None begins anew."""


def choose_run_dir(cfg: RunConfig) -> RunSource:
    """Return where to work, with the folder made and locked. For rank 0 only.

    Raises:
        RunFolderError: if the run has finished, another process works in it, or it cannot be made.
        RepeatedDeath: it died twice in one place.
        CheckpointError: there is nothing to go on from although there should be.
        ConfigError: `resume` says something that cannot be.
    """
    named = Path(cfg.run.dir).absolute() / cfg.run.name if cfg.run.name else None
    checkpoint: Path | None
    if cfg.resume not in (NEVER, AUTO, MUST):
        checkpoint = _checkpoint_at(Path(cfg.resume))
        if named is None or checkpoint.parent.parent != named:
            return RunSource(_new(cfg, checkpoint), checkpoint)
        _claim(named)
        directory.discard_unfinished(checkpoint.parent)
        _put_aside(named, checkpoint)
        return RunSource(named, checkpoint)
    is_run = named is not None and any((named / name).exists() for name in (folder_lock.LOCK, "config.yaml"))
    if named is None or not is_run or cfg.resume == NEVER:  # a directory that is no run is an error
        if cfg.resume == MUST:
            raise CheckpointError(
                "resume = must, but there is no run {folder}. Check run.name and run.dir.", folder=named or cfg.run.dir
            )
        return RunSource(_new(cfg, None), None)
    _claim(named)
    checkpoints = named / "checkpoints"
    were_there = bool(directory.published_checkpoints(checkpoints))
    checkpoint = directory.newest_complete(checkpoints)
    directory.discard_unfinished(checkpoints)
    if checkpoint is None and (were_there or cfg.resume == MUST):
        raise CheckpointError(
            "{folder} holds no checkpoint that is whole. To begin anew, choose another run.name.", folder=checkpoints
        )
    _put_aside(named, checkpoint)
    if checkpoint is None:
        say("The run {folder} was stopped before its first checkpoint: it begins anew.", folder=named)
    return RunSource(named, checkpoint)


def _checkpoint_at(path: Path) -> Path:
    """Return the checkpoint that a path means: itself, or the newest of a run."""
    path = path.absolute()
    if any((path / name).is_file() for name in ("config.json", "adapter_config.json")):
        raise ConfigError(
            "resume = {path} is a model or an adapter alone, without what training needs to resume. Query it "
            "(toolkit generate {path}), or start another training from it: model.path={path}, of an adapter "
            "tuning.adapter={path}.",
            path=path,
        )
    if (path / directory.MANIFEST).is_file():
        if wrong := directory.manifest_problems(path):
            raise CheckpointError(
                "the checkpoint {folder} is damaged: {reason}.", folder=path, reason="; ".join(wrong[:3])
            )
        return path
    found = directory.newest_complete(path / "checkpoints") if path.is_dir() else None
    if found is None:
        raise ConfigError(
            "resume = {path} is not auto, must or never, nor a checkpoint or a run directory with one.", path=path
        )
    return found


def _new(cfg: RunConfig, checkpoint: Path | None) -> Path:
    folder = create_run_dir(cfg)
    folder_lock.take(folder)
    record_start(folder, _step(checkpoint))
    return folder


def _step(checkpoint: Path | None) -> int:
    return directory.read_run_state(checkpoint).step if checkpoint else 0


def _claim(folder: Path) -> None:
    """Keep an existing run folder to this process, unless the run has finished, or is not this user's to write to."""
    check_no_symlinks(folder, RunFolderError)
    if (folder / "DONE").exists():
        raise RunFolderError(
            "the run {folder} has finished already (DONE). For another one choose another run.name.", folder=folder
        )
    folder_lock.take(folder)
    remove_stale(folder)


def _put_aside(folder: Path, checkpoint: Path | None) -> None:
    """Make an existing run folder ready for going on: what would be overwritten is put aside."""
    try:
        record_start(folder, _step(checkpoint))
        for name in ("config.yaml", "ds_config.json", "environment.json", "FAILED"):
            if (folder / name).exists():
                (folder / name).rename(unused_path(folder / "logs" / name))
        if (folder / "export").exists():  # of a run that died before it was DONE
            (folder / "export").rename(unused_path(folder / "export.replaced"))
        for path in [*folder.glob(".export.*.tmp"), *folder.glob(".base.*.tmp")]:
            shutil.rmtree(path)
        if checkpoint is not None:
            directory.move_aside_after(checkpoint)
        elif (folder / "base").exists():  # the random model of another config, maybe
            (folder / "base").rename(unused_path(folder / "base.replaced"))
    except OSError as error:
        raise RunFolderError(
            "cannot go on in {folder}: {reason}.", folder=folder, reason=error.strerror or error
        ) from error


STOP = "stop"


def remove_stale(folder: Path) -> None:
    """Remove a stop file that is older than this start; it was meant for an earlier one. For rank 0 only.

    A run that its launcher starts again after a failure obeys it: it was made since the command was typed.
    """
    path = folder / STOP
    if path.exists() and not deepspeed.restart_number():
        path.unlink(missing_ok=True)
        say(
            "Removed the file {file}, which is older than this start. To stop this run, create it again.",
            file=path,
        )
