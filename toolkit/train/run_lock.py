"""The lock that keeps other processes out of a run directory.

`run.lock` is locked and the directory itself, as some file servers lock files only; heartbeats restore a deleted lock.
"""

import fcntl
import json
import os
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from toolkit import disk
from toolkit.distributed import watchdog
from toolkit.messages import RunFolderError, tr

LOCK = "run.lock"
_HEARTBEAT_WAIT_S = 3.0
"""Ranks write a heartbeat once a second: one that does not within this time is dead."""
_CHECK_EVERY_S = 1.0


@dataclass(slots=True)
class _Lock:
    """The run directory's lock, held for as long as this process lives: the system releases it with the process."""

    folder: Path
    status: os.stat_result
    files: list[IO[str]]
    """`run.lock`; several if it was deleted and made again."""
    descriptor: int | None
    """Of the directory, None if its file system does not lock directories."""
    checked_at: float = 0.0
    is_lost: bool = False


_lock: _Lock | None = None


def lock_run_dir(folder: Path) -> None:
    """Keep all other processes out of a run directory, or raise RunFolderError if one works in it."""
    global _lock
    file = open(folder / LOCK, "a+", encoding="utf-8")
    file.seek(0)
    owner = file.read().strip()
    is_free, descriptor = True, None
    if not owner:  # a new file; if a user has deleted a running run's, its ranks still write heartbeats
        # Before this process locks it: that run locks it again, and would take our lock for the loss of its directory.
        owner = _rank_still_alive(folder)
        is_free = not owner
    if is_free:
        is_free = disk.lock_or_warn(file, folder)
    if is_free:
        is_free, descriptor = _lock_directory(folder)
    if not is_free:
        file.close()
        raise RunFolderError(
            "another process works in {folder}: {who}. Wait for it, or stop it.", folder=folder, who=owner or "?"
        )
    _write_lock_owner(file)
    release_run_dir()
    _lock = _Lock(folder, folder.stat(), [file], descriptor)


def release_run_dir() -> None:
    """Unlock the run directory that this process has locked, if any: a process may do several runs."""
    global _lock
    if _lock is None:
        return
    for file in _lock.files:
        file.close()
    if _lock.descriptor is not None:
        os.close(_lock.descriptor)
    _lock = None


def is_lost(now: bool = False) -> bool:
    """Whether another process took, moved or removed the locked run directory; checked once a second, or `now`."""
    if _lock is None:
        return False
    if not _lock.is_lost and (now or time.monotonic() >= _lock.checked_at + _CHECK_EVERY_S):
        _lock.checked_at = time.monotonic()
        _lock.is_lost = not _holds_or_relocks(_lock)
    return _lock.is_lost


def check_not_lost(folder: Path) -> None:
    """Raise RunFolderError if a run directory is not the one that was locked any more. For rank 0 only."""
    if is_lost(now=True):
        raise RunFolderError(lost_text(folder))


def lost_text(folder: Path) -> str:
    """Return the error message for a run directory that was removed, moved or replaced during the run."""
    return tr(
        "the run directory {folder} was removed, moved or replaced while the run was training: its metrics, logs and "
        "checkpoints are gone.",
        folder=folder,
    )


def _holds_or_relocks(lock: _Lock) -> bool:
    """Return whether this process still has the run directory that it locked; False if it was removed, replaced or
    taken by another process. If `run.lock` alone was deleted, it is made and locked again.
    """
    path = lock.folder / LOCK
    try:
        if not os.path.samestat(lock.folder.stat(), lock.status):
            return False
        if not path.exists() and not (lock.folder / "config.yaml").exists():
            return False  # emptied: `rm -r` could not remove the directory because a rank wrote into it
        if path.exists() and any(os.path.samestat(os.fstat(held.fileno()), path.stat()) for held in lock.files):
            return True
        file = open(path, "a+", encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:  # a file server that does not answer is no removed directory
        return True
    granted, _ = disk.try_lock(file)
    if not granted:
        file.close()
        return False
    _write_lock_owner(file)
    lock.files.append(file)
    return True


def _write_lock_owner(file: IO[str]) -> None:
    """Write into `run.lock` which process holds it, for the error message of others."""
    owner = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
    file.truncate(0)
    file.write(json.dumps(owner))
    file.flush()


def _lock_directory(folder: Path) -> tuple[bool, int | None]:
    """Lock a directory. Return whether no other process has locked it, and the lock's descriptor; None if it is locked
    by another, or on a file system that does not lock directories, where it counts as free.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        return not isinstance(error, BlockingIOError), None  # NFS locks only what is open for writing
    return True, descriptor


def _rank_still_alive(folder: Path) -> str:
    """Return pid and host (JSON) of a rank whose heartbeat file still changes within some seconds, "" if none does."""
    before = _heartbeats(folder)
    if not before:
        return ""
    time.sleep(_HEARTBEAT_WAIT_S)
    alive = [
        beat for name, beat in _heartbeats(folder).items() if beat.get("beats") != before.get(name, {}).get("beats")
    ]
    return json.dumps({name: alive[0].get(name) for name in ("pid", "host")}) if alive else ""


def _heartbeats(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the heartbeats (pid, host, step, phase, beats) of a run's ranks, by file name."""
    heartbeats = {}
    for path in sorted((folder / "logs").glob(watchdog.heartbeat_file("*"))):
        with suppress(OSError, ValueError):
            heartbeats[path.name] = json.loads(path.read_text(encoding="utf-8"))
    return heartbeats
