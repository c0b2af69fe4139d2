"""A program that runs a command which starts others, and leaves no process of it behind, whoever was the parent.

children.py starts it, by the path of this file: it imports nothing of the package.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

_PR_SET_CHILD_SUBREAPER = 36
_GRACE_S = 5.0
_POLL_S = 0.05


def _run(command: Sequence[str]) -> int:
    """Run a command and return its exit code, or 128 + the signal that ended it or asked this process to end. When it
    has ended, or this process is asked to, all processes that are left below are ended.

    As a subreaper this process becomes the parent of those below whose own parent has ended, so that none gets away.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    signals: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        signals.append(number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, note)
    # By way of children.py the command gets a signal even if this process is killed.
    tie = [sys.executable, "-I", "-S", str(Path(__file__).resolve().with_name("children.py")), str(os.getpid())]
    child = subprocess.Popen([*tie, *command])  # noqa: S603
    while child.poll() is None and not signals:
        time.sleep(_POLL_S)
    _end_all(child)
    if signals:
        return 128 + signals[0]
    return child.returncode if child.returncode >= 0 else 128 - child.returncode  # as shells have it: -9 is 137


def _end_all(child: "subprocess.Popen[Any]") -> None:
    """Ask all processes below this one to end, then kill those that do not within _GRACE_S, until none is left: the
    children of those that end become children of this process. `child`: the one that it has started itself.
    """
    deadline, number = time.monotonic() + _GRACE_S, signal.SIGTERM
    signalled: set[int] = set()  # each gets SIGTERM once
    while True:
        child.poll()
        left = _below(os.getpid())
        if not left:
            return
        if time.monotonic() > deadline:
            number, signalled = signal.SIGKILL, set()  # to all that are left, in each round
        for pid in left - signalled:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        signalled |= left
        for pid in left - {child.pid}:  # so that ended ones disappear; `child.poll` does it for the child
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(_POLL_S)


def _below(root: int) -> set[int]:
    """Return the ids of all processes below `root`, those included that have ended but not been waited for."""
    parents = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with suppress(OSError, IndexError, ValueError):
                # "pid (name) state parent …", where the name may hold anything.
                text = (folder / "stat").read_text(encoding="utf-8", errors="replace")
                parents[int(folder.name)] = int(text.rpartition(")")[2].split()[1])
    below: set[int] = set()
    while new := {pid for pid, parent in parents.items() if parent in {root, *below}} - below:
        below |= new
    return below


if __name__ == "__main__":
    sys.exit(_run(sys.argv[1:]))
