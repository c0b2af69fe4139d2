"""The only place that starts processes: none of them outlives the one that started it, however that ends.

Linux sends a child a signal when the thread that started it ends (PR_SET_PDEATHSIG), so `start` belongs on a thread
that lasts. A launcher does not hand that on to what it starts: `start_tree` puts a keeper between, this file run as a
program, which takes over whatever loses its parent below it and leaves nothing of it behind.
"""

import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_GRACE_S = 5.0
_POLL_S = 0.05


def run(command: Sequence[str], **options: Any) -> "subprocess.CompletedProcess[Any]":
    """Run a command to its end; options as of `subprocess.run`."""
    return subprocess.run(command, preexec_fn=_tie(), **{"check": False, **options})  # noqa: S603


def start(command: Sequence[str], *, ends_with_input: bool = False, **options: Any) -> "subprocess.Popen[Any]":
    """Start a command.

    `ends_with_input`: it ends by itself as soon as its standard input, a pipe from here, does; it may need time then.
    """
    return subprocess.Popen(command, preexec_fn=None if ends_with_input else _tie(), **options)  # noqa: S603


def start_tree(command: Sequence[str], **options: Any) -> "subprocess.Popen[Any]":
    """Start a command that starts others, such as a launcher; its exit code is the one that is returned."""
    return start([sys.executable, "-I", "-S", str(Path(__file__).resolve()), *command], **options)


def workers(count: int, begin: Callable[..., None] | None = None, *arguments: Any) -> ProcessPoolExecutor:
    """Return a pool of new interpreters, each of which calls `begin` first."""
    context = multiprocessing.get_context("spawn")  # a forked copy of a process that runs threads may hang
    return ProcessPoolExecutor(count, context, initializer=_tied, initargs=(os.getpid(), begin, *arguments))


def process(function: Callable[..., None], *arguments: Any) -> Any:
    """Start a function of a module in a new interpreter; return the `multiprocessing.Process`."""
    context = multiprocessing.get_context("spawn")
    made = context.Process(target=_tied, args=(os.getpid(), function, *arguments))
    made.start()
    return made


def _tied(parent: int, function: Callable[..., None] | None, *arguments: Any) -> None:
    end_with(parent)
    if function is not None:
        function(*arguments)


def end_with_parent() -> None:
    """Let the system send this process a SIGTERM when its parent ends. Linux alone has it."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def end_with(parent: int) -> None:
    """Do that, and end if it has ended already."""
    end_with_parent()
    if os.getppid() != parent:
        os._exit(1)


def _tie() -> Callable[[], None]:
    parent = os.getpid()
    return lambda: end_with(parent)


def _keep(command: Sequence[str]) -> int:
    """Run a command; when it ends, or this process is to, end whatever is left below. Return the exit code."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    asked: list[int] = []

    def ask(number: int, frame: FrameType | None) -> None:
        asked.append(number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, ask)
    child = start(command)
    while child.poll() is None and not asked:
        time.sleep(_POLL_S)
    _end_all(child)
    if asked:
        return 128 + asked[0]
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def _end_all(child: "subprocess.Popen[Any]") -> None:
    """Ask all below to end, and kill what does not; new ones too, as what is killed loses children to this process."""
    until, number = time.monotonic() + _GRACE_S, signal.SIGTERM
    told: set[int] = set()
    while True:
        child.poll()
        left = _below(os.getpid())
        if not left:
            return
        if time.monotonic() > until:
            number, told = signal.SIGKILL, set()
        for pid in left - told:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        told |= left
        for pid in left - {child.pid}:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(_POLL_S)


def _below(root: int) -> set[int]:
    """Return the processes below one, without those that have ended and been noticed."""
    parents = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with suppress(OSError, IndexError, ValueError):
                text = (folder / "stat").read_text(encoding="utf-8", errors="replace")
                parents[int(folder.name)] = int(text.rpartition(")")[2].split()[1])
    found: set[int] = set()
    while new := {pid for pid, parent in parents.items() if parent in {root, *found}} - found:
        found |= new
    return found


if __name__ == "__main__":
    sys.exit(_keep(sys.argv[1:]))
