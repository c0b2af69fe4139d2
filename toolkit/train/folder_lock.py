"""One process per run folder: `run.lock` in it, and a lock on the directory itself, which nobody can delete by mistake.

Some file servers lock files only. There a `run.lock` that was deleted is noticed by the heartbeats of the ranks that
still work in the folder, and put back by the process that holds it.
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

from toolkit.disk import lock_or_warn, try_lock
from toolkit.distributed.watchdog import heartbeat_file
from toolkit.errors import RunFolderError
from toolkit.messages import tr

LOCK = "run.lock"
_LOOK_S = 3.0
"""Ranks count once a second: whoever does not within this time is gone."""
_EVERY_S = 1.0


@dataclass(slots=True)
class _Held:
    """A lock, kept for as long as this process lives: the system releases it with the process."""

    folder: Path
    identity: tuple[int, int]
    """Of the directory: device and inode."""
    files: list[IO[str]]
    """`run.lock`; several if it was deleted and made again."""
    directory: int | None
    """Descriptor of the directory, None if its file system does not lock directories."""
    looked: float = 0.0
    is_lost: bool = False


_held: list[_Held] = []


def take(folder: Path) -> None:
    """Keep all other processes out of a run folder.

    Raises:
        RunFolderError: another process works in it.
    """
    file = open(folder / LOCK, "a+", encoding="utf-8")
    granted = lock_or_warn(file, folder)
    is_free, directory = _lock_directory(folder) if granted else (False, None)
    file.seek(0)
    who = file.read().strip()
    is_new = not who  # so no process has ever held it, or the one that was held has been deleted
    who = who or _who_counts(folder)
    if not is_free or (is_new and who):
        file.close()
        if directory is not None:
            os.close(directory)
        raise RunFolderError(
            "another process works in {folder}: {who}. Wait for it, or stop it.", folder=folder, who=who or "?"
        )
    _sign(file)
    _held.append(_Held(folder, _identity(folder), [file], directory))


def release() -> None:
    """Let go of the run folder, for a process that does several runs."""
    while _held:
        held = _held.pop()
        for file in held.files:
            file.close()
        if held.directory is not None:
            os.close(held.directory)


def is_lost(now: bool = False) -> bool:
    """Whether the run folder was removed, moved or taken by another process since it was locked.

    Args:
        now: look now; otherwise at most once a second, as the folder may be on a file server.
    """
    for held in _held:
        if not held.is_lost and (now or time.monotonic() >= held.looked + _EVERY_S):
            held.looked = time.monotonic()
            held.is_lost = _is_lost(held)
    return any(held.is_lost for held in _held)


def check(folder: Path) -> None:
    """See that a run folder is still the one that was locked, before it is marked as done. For rank 0 only.

    Raises:
        RunFolderError: it is not.
    """
    if is_lost(now=True):
        raise RunFolderError(lost_text(folder))


def lost_text(folder: Path) -> str:
    """Return what is to be said of a run folder that is lost."""
    return tr(
        "the run folder {folder} was removed, moved or replaced while the run was training: its metrics, logs and "
        "checkpoints are not there any more.",
        folder=folder,
    )


def _is_lost(held: _Held) -> bool:
    try:
        if _identity(held.folder) != held.identity:
            return True
        path = held.folder / LOCK
        if not path.exists() and not (held.folder / "config.yaml").exists():
            return True  # emptied: `rm -r` could not remove the directory because a rank wrote into it
        known = {os.fstat(file.fileno()).st_ino for file in held.files}
        if path.exists() and path.stat().st_ino in known:
            return False
        file = open(path, "a+", encoding="utf-8")  # run.lock alone was deleted: lock it again
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:  # a file server that does not answer is no removed directory
        return False
    granted, _ = try_lock(file)
    if not granted:
        file.close()
        return True
    _sign(file)
    held.files.append(file)
    return False


def _sign(file: IO[str]) -> None:
    """Write into run.lock which process holds it."""
    me = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
    file.truncate(0)
    file.write(json.dumps(me))
    file.flush()


def _identity(folder: Path) -> tuple[int, int]:
    found = folder.stat()
    return found.st_dev, found.st_ino


def _lock_directory(folder: Path) -> tuple[bool, int | None]:
    """Return whether no other process holds the directory, and the descriptor that now does."""
    directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(directory)
        return False, None
    except OSError:  # NFS locks only what is open for writing
        os.close(directory)
        return True, None
    return True, directory


def _who_counts(folder: Path) -> str:
    """Return a rank whose heartbeat continues, "" if there is none; takes some seconds if there are heartbeats."""
    before = _heartbeats(folder)
    if not before:
        return ""
    time.sleep(_LOOK_S)
    alive = [
        beat for name, beat in _heartbeats(folder).items() if beat.get("beats") != before.get(name, {}).get("beats")
    ]
    return json.dumps({name: alive[0].get(name) for name in ("pid", "host")}) if alive else ""


def _heartbeats(folder: Path) -> dict[str, dict[str, Any]]:
    found = {}
    for path in sorted((folder / "logs").glob(heartbeat_file("*"))):
        with suppress(OSError, ValueError):
            found[path.name] = json.loads(path.read_text(encoding="utf-8"))
    return found
