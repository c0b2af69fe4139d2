"""The folder of one run: chosen once, by rank 0; never a folder that holds something."""

import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from toolkit import children
from toolkit.config.schema import RunConfig
from toolkit.disk import check_no_symlinks, unused_path
from toolkit.errors import CheckpointError, RunFolderError
from toolkit.messages import joined, tr
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


def create(cfg: RunConfig) -> Path:
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
            tr(
                "the run folder {folder} exists already and is not touched. Choose another run.name, or move it away.",
                folder=error.filename,
            )
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
        tr(
            "cannot make a run folder below {folder}: {reason}. Set run.dir to a folder that you may write to.",
            folder=parent,
            reason=error.strerror,
        )
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


def record_start(
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
    known = {**environment(len(hosts)), "hosts": list(hosts), "device": device}
    _write(folder / "config.yaml", config_yaml)
    for name, values in (("ds_config", ds_config), ("environment", known)):
        text = json.dumps(hide_all(values), indent=2) + "\n"
        _write(folder / f"{name}.json", text)


def environment(world_size: int) -> dict[str, object]:
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
        raise CheckpointError(
            tr("cannot write {file}: {reason}.", file=file, reason=error.strerror or error)
        ) from error


def profiled(values: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return DeepSpeed's JSON whose flops profiler writes into a run folder, where the config names no file."""
    if "flops_profiler" not in values:
        return values
    return {**values, "flops_profiler": {"output_file": str(folder / "flops.txt"), **values["flops_profiler"]}}
