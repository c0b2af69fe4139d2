"""A sweep's folder: its jobs, their names and states, kept in sweep.json so that the same command goes on."""

import hashlib
import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO

from toolkit.disk import try_lock
from toolkit.errors import DataError, LaunchError
from toolkit.messages import say, tr
from toolkit.secrets import MASK, hide, hide_all

FILE = "sweep.json"
WAITING, RUNNING, DONE, FAILED, DIVERGED, STOPPED = "waiting", "running", "done", "failed", "diverged", "stopped"
_LONGEST_NAME, _LONGEST_VALUE = 60, 20


@dataclass(kw_only=True, slots=True)
class Job:
    """One run of a sweep."""

    name: str
    """Its run.name."""
    words: list[str]
    """What is special about it, without secrets."""
    config: str = ""
    """Digest of its composed config, without name and place."""
    state: str = WAITING
    """waiting, running, done, failed, diverged or stopped."""
    exit_code: int | None = None
    """Of its last launch."""
    started: str = ""
    """When its last launch began."""
    ended: str = ""
    """When its last launch ended."""
    trial: int | None = None
    """Number of the trial of a search."""


@dataclass(kw_only=True, slots=True)
class Sweep:
    """A sweep on disk."""

    folder: Path
    """Holds sweep.json and the run folders."""
    command: str
    """What was typed, without secrets."""
    jobs: list[Job] = field(default_factory=list)
    """In the order in which they run."""

    def save(self) -> None:
        """Write sweep.json, whole or not at all.

        Raises:
            LaunchError: it cannot be written.
        """
        values = {"command": self.command, "jobs": [asdict(job) for job in self.jobs]}
        temporary = self.folder / f".{FILE}.tmp"
        try:
            with open(temporary, "w", encoding="utf-8") as file:
                file.write(json.dumps(hide_all(values), indent=1, ensure_ascii=False) + "\n")
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self.folder / FILE)
        except OSError as error:
            reason = error.strerror or error
            raise LaunchError(tr("cannot write {file}: {reason}.", file=self.folder / FILE, reason=reason)) from error

    def add(self, job: Job) -> Job:
        """Add a job, or return the one of this name that is there already.

        Raises:
            LaunchError: the one that is there has other settings.
        """
        known = next((other for other in self.jobs if other.name == job.name), None)
        if known is None:
            self.jobs.append(job)
            return job
        if known.config != job.config:
            raise LaunchError(
                tr(
                    "{folder}: the run {name} of this sweep began with other settings (the recipe or an override has "
                    "changed since). Choose another sweep=NAME.",
                    folder=self.folder,
                    name=job.name,
                )
            )
        return known

    def run_folder(self, job: Job) -> Path:
        """Return where a job's run is."""
        return self.folder / job.name


@contextmanager
def opened(folder: Path, command: str) -> Iterator[Sweep]:
    """Read a sweep, or begin one, and hold it for this process alone.

    Args:
        folder: of the sweep; made if it is not there.
        command: what was typed, without secrets.

    Raises:
        LaunchError: the folder cannot be made, holds something else, or another process has it.
        DataError: sweep.json is broken.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        is_new = not (folder / FILE).exists()
        if is_new and any(not path.name.startswith(".") for path in folder.iterdir()):
            raise LaunchError(
                tr(
                    "{folder} exists and is no sweep ({file} is missing). Choose another sweep=NAME.",
                    folder=folder,
                    file=FILE,
                )
            )
        lock = open(folder / ".lock", "w", encoding="utf-8")
    except OSError as error:
        raise LaunchError(
            tr("cannot make the sweep's folder {folder}: {reason}.", folder=folder, reason=error.strerror or error)
        ) from error
    with lock:
        _hold(lock, folder)
        yield Sweep(folder=folder, command=command, jobs=_read_jobs(folder))


def _hold(lock: IO[str], folder: Path) -> None:
    """Keep all others out of a sweep's folder for as long as a file in it is open."""
    try:
        is_granted, is_trusted = try_lock(lock)
    except OSError as error:
        raise LaunchError(
            tr("cannot lock the sweep's folder {folder}: {reason}.", folder=folder, reason=error.strerror or error)
        ) from error
    if not is_granted:
        raise LaunchError(tr("another process is running the sweep in {folder}.", folder=folder))
    if not is_trusted:
        say(
            tr(
                "WARNING: the disk of {folder} has no locks: see to it that nobody else runs this sweep.",
                folder=folder,
            )
        )


def _read_jobs(folder: Path) -> list[Job]:
    """Return the jobs of sweep.json, [] without one; a run that has DONE is done, whatever was written last."""
    if not (folder / FILE).exists():
        return []
    try:
        jobs = [Job(**job) for job in json.loads((folder / FILE).read_text(encoding="utf-8"))["jobs"]]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DataError(
            tr("{file} cannot be read: {reason}. Choose another sweep=NAME.", file=folder / FILE, reason=error)
        ) from error
    for job in jobs:
        if (folder / job.name / "DONE").exists():
            job.state = DONE
        elif job.state == DIVERGED and not (folder / job.name).exists():
            job.state = WAITING  # removed, to be run anew
        elif job.state in (RUNNING, DONE):
            job.state = FAILED  # the sweep died beside it, or its DONE was removed
    return jobs


def job_name(words: Sequence[str]) -> str:
    """Return a short, telling folder name: optim.lr=1e-5 zero=stage2 is lr-1e-5_zero-stage2.

    A name that cannot say all of its words gets their digest.
    """
    parts, is_whole = [], True
    for word in words:
        key, _, value = word.lstrip("+").partition("=")
        name = key.rpartition(".")[2]
        shown = str(hide_all({name: hide(value)})[name]).replace(MASK, "hidden")
        if "/" in shown:
            shown = Path(shown.strip("/'\"")).name
        shown = re.sub(r"[^A-Za-z0-9._+-]+", "-", shown).strip("-.")[:_LONGEST_VALUE]
        # With both, a value may look like two words: a=x_b-y, and a=x b=y.
        is_whole = is_whole and shown == value and not {"_", "-"} <= set(value)
        parts.append(f"{name}-{shown}")
    name = "_".join(parts) or "run"
    if is_whole and len(name) <= _LONGEST_NAME:
        return name
    return f"{name[: _LONGEST_NAME - 9]}-{digest(words)}"


def digest(words: Sequence[str]) -> str:
    """Return eight letters for a list of words."""
    return hashlib.sha256("\0".join(words).encode()).hexdigest()[:8]


def now() -> str:
    """Return the time, as sweep.json has it."""
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")
