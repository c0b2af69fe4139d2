"""Make a folder once, however many processes ask for it at the same moment.

A file lock beside the folder elects one builder; the others wait for it and use what it made. It works before any
process group exists, so a build of hours can make no collective time out, and it needs no torch. The kernel drops
the lock of a process that dies, so a killed builder blocks nobody.
"""

import errno
import fcntl
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from toolkit.errors import DataError
from toolkit.messages import tr

NOTICE_AFTER_S = 5.0
_POLL_S = 0.1


def build_once(
    target: Path,
    build: Callable[[Path], None],
    is_complete: Callable[[Path], bool],
    say: Callable[[str], None],
) -> bool:
    """Make `target` with `build`, unless it is complete or another process is making it.

    The folder is built under a temporary name, flushed to disk and renamed: under its own name it is whole or absent.

    Args:
        target: the folder to make; the lock file is `target` with the suffix `.lock`.
        build: fills the empty folder it is given.
        is_complete: whether a folder found at `target` can be used; one that cannot is replaced.
        say: receives the message shown while waiting for another process.

    Returns:
        True if this process built the folder, False if it was there or another process built it.

    Raises:
        DataError: the folder cannot be written, or the disk is full.
    """
    if is_complete(target):
        return False
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.with_name(target.name + ".lock"), say):
            if is_complete(target):
                return False
            _remove_leftovers(target)
            _build_and_rename(target, build)
            return True
    except OSError as error:
        raise _explained(error, target.parent) from error


def _build_and_rename(target: Path, build: Callable[[Path], None]) -> None:
    """Build under a temporary name beside `target`, flush, rename."""
    building = Path(tempfile.mkdtemp(prefix=target.name + ".tmp-", dir=target.parent))
    try:
        build(building)
        # mkdtemp makes the folder private; other users of a shared cache must be able to read it.
        building.chmod(0o777 & ~_umask())
        for path in [*building.rglob("*"), building]:
            _flush(path)
        building.rename(target)
        _flush(target.parent)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _remove_leftovers(target: Path) -> None:
    """Remove what killed builders left (only the holder of the lock may call this) and an unusable `target`."""
    for leftover in target.parent.glob(target.name + ".tmp-*"):
        shutil.rmtree(leftover)
    if target.exists():
        shutil.rmtree(target)


@contextmanager
def _locked(path: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock file, which names its holder; never deleted, as deleting it would let two processes in."""
    with open(path, "a+", encoding="utf-8") as file:
        _wait_for_lock(file, say)
        file.truncate(0)
        file.write(f"{os.getpid()} {socket.gethostname()}\n")
        file.flush()
        yield


def _wait_for_lock(file: IO[str], say: Callable[[str], None]) -> None:
    started, told = time.monotonic(), False
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            pass
        if not told and time.monotonic() - started > NOTICE_AFTER_S:
            told = True
            file.seek(0)
            pid, _, host = file.read().strip().partition(" ")
            say(
                tr(
                    "Waiting for process {pid} on {host}, which is preparing {folder}.",
                    pid=pid or "?",
                    host=host or "?",
                    folder=file.name.removesuffix(".lock"),
                )
            )
        time.sleep(_POLL_S)


def _flush(path: Path) -> None:
    """Write a file's or a folder's content through to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _explained(error: OSError, folder: Path) -> DataError:
    """Return the message for a folder that cannot be written."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DataError(
            tr(
                "No space left while writing below '{folder}'. Free some, or choose another folder with "
                "prepare.dir=FOLDER.",
                folder=folder,
            )
        )
    return DataError(
        tr(
            "Cannot write below '{folder}': {reason}. Choose another folder with prepare.dir=FOLDER.",
            folder=folder,
            reason=error.strerror or error,
        )
    )
