"""Make a directory once, however many processes ask for it: a file lock next to it elects one builder, others wait.

It needs no process group, so long builds time no collective out, and no torch. The kernel drops a dead process's lock.
As some network file systems lock per node, or not at all, the holder also signs the lock file with a heartbeat.
"""

import errno
import fcntl
import json
import os
import shutil
import socket
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from toolkit.disk import flush, set_permissions, try_lock
from toolkit.messages import DataError, say, tr

NOTICE_AFTER_S = 5.0
_POLL_S = 0.1
_BEAT_S = 2.0
_SILENT_S = 20.0
"""A heartbeat of another machine that stands still for so long belongs to a process that is gone."""
_CLAIM_S = 0.25
"""Time in which another machine that signs at the same moment is noticed; the later signature counts."""


@contextmanager
def built_once(
    target: Path, is_complete: Callable[[Path], bool], status: Callable[[], str] = str
) -> Iterator[Path | None]:
    """Give an empty temporary directory for the body to fill, which is then flushed and renamed: `target` is whole or
    absent. None if `target` is complete, perhaps once another process has made it. `is_complete`: whether an existing
    one is used, else replaced; `status`: progress for those who wait.
    """
    if is_complete(target):
        yield None
        return
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.with_name(target.name + ".lock"), status):
            if is_complete(target):
                yield None
                return
            # Only the holder of the lock may remove what killed builders left, and an unusable target.
            for leftover in target.parent.glob(target.name + ".tmp-*"):
                shutil.rmtree(leftover)
            if target.exists():
                shutil.rmtree(target)
            with _renamed_to(target, is_complete) as building:
                yield building
    except OSError as error:
        raise explain_lock_error(error, target.parent) from error


@contextmanager
def _renamed_to(target: Path, is_complete: Callable[[Path], bool]) -> Iterator[Path]:
    """Give a temporary directory, which is flushed and renamed to `target` unless the body fails."""
    building = Path(tempfile.mkdtemp(prefix=target.name + ".tmp-", dir=target.parent))
    try:
        yield building
        for path in [*(file for file in building.rglob("*") if not file.is_symlink()), building]:
            set_permissions(path)  # mkdtemp's folder is private; other users of a shared cache must be able to read it
            flush(path)
        try:
            building.rename(target)
        except OSError:
            # On a file system without locks another machine may have finished the same build first.
            if not is_complete(target):
                raise
        flush(target.parent)
    finally:
        shutil.rmtree(building, ignore_errors=True)


@contextmanager
def _locked(path: Path, status: Callable[[], str]) -> Iterator[None]:
    """Hold the lock file, which is never deleted: deleting it would let two processes hold a lock."""
    stop = threading.Event()
    with open(path, "a+", encoding="utf-8") as file:
        signature = _Signature(path, status)
        _wait(file, signature)
        thread = threading.Thread(target=signature.beat, args=(stop,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
            file.truncate(0)


class _Signature:
    """The holder's name in the lock file, with a number that grows as long as the holder lives."""

    def __init__(self, path: Path, status: Callable[[], str]) -> None:
        self.path, self.status = path, status
        self.me = {"pid": os.getpid(), "host": socket.gethostname(), "token": uuid.uuid4().hex}
        self.beats = 0

    def write(self) -> None:
        """Write this process's signature into the lock file."""
        self.beats += 1
        content = json.dumps({**self.me, "beat": self.beats, "doing": self.status()}, ensure_ascii=False)
        with suppress(OSError), open(self.path, "r+", encoding="utf-8") as file:  # a full disk stops the build itself
            file.write(content + "\n")
            file.truncate()

    def read(self) -> dict[str, Any]:
        """Return the file's signature, {} if none; reopened, as network file systems need. A half-written one, which
        another process is writing, becomes a new "beat".
        """
        try:
            text = self.path.read_text(encoding="utf-8")
            value = json.loads(text) if text.strip() else {}
        except OSError:
            return {}
        except ValueError:
            return {"beat": uuid.uuid4().hex}
        return value if isinstance(value, dict) else {}

    def another_lives(self, trusted: bool) -> bool:
        """Whether the signature's process still beats; `trusted`: the lock was granted, so a local holder is gone."""
        holder = self.read()
        if not holder or holder.get("token") == self.me["token"]:
            return False
        if trusted and holder.get("host") == self.me["host"]:
            return False
        deadline = time.monotonic() + _SILENT_S
        while time.monotonic() < deadline:
            time.sleep(_POLL_S)
            now = self.read()
            if not now:
                return False
            if now.get("beat") != holder.get("beat") or now.get("token") != holder.get("token"):
                return True
        return False

    def beat(self, stop: threading.Event) -> None:
        """Renew the signature every few seconds, as a heartbeat that shows others that the holder lives."""
        while not stop.wait(_BEAT_S):
            self.write()


def _wait(file: IO[str], signature: _Signature) -> None:
    """Wait until this process holds the lock: granted, and signed, with no other signature that lives or came after."""
    started, told = time.monotonic(), False
    while True:
        granted, trusted = try_lock(file)
        if granted and not signature.another_lives(trusted):
            signature.write()
            time.sleep(_CLAIM_S)
            if signature.read().get("token", signature.me["token"]) == signature.me["token"]:  # nobody has signed since
                return
        if granted:  # on a file system that locks per node only: another machine's process holds it
            with suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_UN)
        if not told and time.monotonic() - started > NOTICE_AFTER_S:
            told = True
            holder = signature.read()
            waiting = tr(
                "Waiting for process {pid} on {host}, which is preparing {folder}. {doing}",
                pid=holder.get("pid", "?"),
                host=holder.get("host", "?"),
                folder=file.name.removesuffix(".lock"),
                doing=holder.get("doing", ""),
            )
            say(waiting.rstrip())
        time.sleep(_POLL_S)


def explain_lock_error(error: OSError, folder: Path) -> DataError:
    """Return the error to raise if a directory cannot be written or locked."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DataError(
            "No space left while writing below '{folder}'. Free some, or choose another directory with "
            "prepare.dir=FOLDER.",
            folder=folder,
        )
    return DataError(
        "Cannot write below '{folder}': {reason}. Choose another directory with prepare.dir=FOLDER.",
        folder=folder,
        reason=error.strerror or error,
    )
