"""The only place that starts processes: none but a run of `toolkit board` outlives the one that started it, however
that ends.

Linux sends a child a signal when the thread that started it ends (PR_SET_PDEATHSIG), so `start` belongs on a thread
that lasts. This file, run as a program, asks for the signal and then becomes the command: subprocess's `preexec_fn`
would run Python between fork and exec, where a thread of PyTorch that held a lock of the interpreter at the fork stops
it for good (CPython issue 112275, seen in 3.11.7). A launcher does not hand the signal on to what it starts:
`start_tree` puts a keeper between, which takes over whatever loses its parent below it and leaves nothing of it behind.
"""

import ctypes
import errno
import gc
import importlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:  # imported where they are used: this file is run for each child
    from concurrent.futures import Future, ProcessPoolExecutor

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_GRACE_S = 5.0
_POLL_S = 0.05
_AHEAD = 2

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
_function: Callable[..., Any] | None = None
"""What this worker process calls."""


def run(command: Sequence[str], **options: Any) -> "subprocess.CompletedProcess[Any]":
    """Run a command that ends with this process, and wait for it; options as of `subprocess.run`."""
    return subprocess.run(_tied_to_this("tie", command, options), **{"check": False, **options})  # noqa: S603


def start(command: Sequence[str], *, ends_with_input: bool = False, **options: Any) -> "subprocess.Popen[Any]":
    """Start a command that is ended with this process; options as of `subprocess.Popen`.
    `ends_with_input`: it is not, as it ends by itself when its standard input, a pipe from here, does, and needs time.
    """
    return subprocess.Popen(command if ends_with_input else _tied_to_this("tie", command, options), **options)  # noqa: S603


def start_tree(command: Sequence[str], **options: Any) -> "subprocess.Popen[Any]":
    """Start a command that starts others, such as a launcher; its exit code is the one that is returned."""
    return subprocess.Popen(_tied_to_this("keep", command, options), **options)  # noqa: S603


def start_detached(command: Sequence[str], **options: Any) -> "subprocess.Popen[Any]":
    """Start a command that continues when this process, or its terminal, ends."""
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, **options)  # noqa: S603


def _tied_to_this(way: str, command: Sequence[str], options: dict[str, Any]) -> list[str]:
    """Return the command line by which this file runs a command: with `way` "tie" it becomes that, with "keep" it stays
    above it. An error as subprocess's own if there is no such program; `options` are those of `subprocess.Popen`.
    """
    if not shutil.which(command[0], path=(options.get("env") or os.environ).get("PATH")):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), command[0])
    return [sys.executable, "-I", "-S", str(Path(__file__).resolve()), way, str(os.getpid()), *command]


def workers(count: int, begin: Callable[..., None] | None = None, *arguments: Any) -> "ProcessPoolExecutor":
    """Return a pool of new interpreters, each of which calls `begin(*arguments)` first; they end with this process."""
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    context = multiprocessing.get_context("spawn")  # a forked copy of a process that runs threads may hang
    return ProcessPoolExecutor(count, context, initializer=_tied, initargs=(os.getpid(), begin, *arguments))


def in_order(count: int, function: Callable[..., _Result], items: Iterable[_Item]) -> Iterator[tuple[_Item, _Result]]:
    """Yield each item with `function(item)`, in the order of the items, which are taken a few ahead. It is computed
    here if `count` is 1, else in `count` new interpreters.

    Raises:
        BrokenProcessPool: one of them was killed.
    """
    if count == 1:
        yield from ((item, function(item)) for item in items)
        return
    from toolkit.messages import current_language

    executor = workers(count, keep_function, function, current_language())
    waiting: deque[tuple[_Item, Future[_Result]]] = deque()
    try:
        for item in items:
            waiting.append((item, executor.submit(call_function, item)))
            if len(waiting) >= count * _AHEAD:
                oldest, future = waiting.popleft()
                yield oldest, future.result()
        yield from ((item, future.result()) for item, future in waiting)
    finally:
        executor.shutdown(cancel_futures=True)


def keep_function(function: Callable[..., Any], language: str) -> None:
    """Prepare a worker process: keep the function that `call_function` calls, and one thread, as there may be a process
    for every core.
    """
    from toolkit.messages import set_language

    global _function
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    set_language(language)
    _function = function
    gc.freeze()  # of what is imported nothing becomes garbage; looking through it takes a third of a second each time


def call_function(*arguments: Any) -> Any:
    """Call the function of this worker process."""
    assert _function is not None
    return _function(*arguments)


def copied(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a function returns in a fork of this process, whose other threads must not hold locks meanwhile."""
    import multiprocessing

    with multiprocessing.get_context("fork").Pool(1, _tied, (os.getpid(), None)) as pool:
        return pool.apply(function, arguments)


def process(function: Callable[..., None], *arguments: Any) -> Any:
    """Start a function of a module in a new interpreter; return the `multiprocessing.Process`."""
    import multiprocessing

    context = multiprocessing.get_context("spawn")
    made = context.Process(target=_tied, args=(os.getpid(), function, *arguments))
    made.start()
    return made


def _tied(parent: int, function: Callable[..., None] | None, *arguments: Any) -> None:
    """Call a function, if there is one, in a process that ends with the process `parent`."""
    end_with(parent)
    if function is not None:
        function(*arguments)


def ending_with_this(module: str, name: str) -> Callable[..., None]:
    """Return a function for a process that this one is to start: it calls the function `name` of a module there, and
    lets that process end with this one. The name is looked up only there, so that here the result may replace what has
    this name.
    """
    return partial(_tied, os.getpid(), _imported, module, name)


def _imported(module: str, name: str, *arguments: Any) -> None:
    """Call a function by the names of its module and itself."""
    getattr(importlib.import_module(module), name)(*arguments)


def end_with_parent() -> None:
    """Let the system send this process a SIGTERM when its parent ends. Linux alone has it."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def end_with(parent: int) -> None:
    """Let this process get a SIGTERM when its parent ends; end at once if the parent has ended already."""
    end_with_parent()
    if os.getppid() != parent:
        os._exit(1)


def _run_as_subreaper(command: Sequence[str]) -> int:
    """Run a command and return its exit code. When it has ended, or this process is asked to end, end all processes
    that are left below.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    signals: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        signals.append(number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, note)
    child = start(command)
    while child.poll() is None and not signals:
        time.sleep(_POLL_S)
    _end_all(child)
    if signals:
        return 128 + signals[0]
    return child.returncode if child.returncode >= 0 else 128 - child.returncode  # as shells have it: -9 is 137


def _end_all(child: "subprocess.Popen[Any]") -> None:
    """Ask all processes below this one to end, then kill those that do not, until none is left: the children of those
    that end become children of this process.
    """
    until, number = time.monotonic() + _GRACE_S, signal.SIGTERM
    signalled: set[int] = set()
    while True:
        child.poll()
        left = _below(os.getpid())
        if not left:
            return
        if time.monotonic() > until:
            number, signalled = signal.SIGKILL, set()
        for pid in left - signalled:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        signalled |= left
        for pid in left - {child.pid}:
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
    end_with(int(sys.argv[2]))
    if sys.argv[1] == "keep":
        sys.exit(_run_as_subreaper(sys.argv[3:]))
    try:
        os.execvp(sys.argv[3], sys.argv[3:])  # noqa: S606
    except OSError as error:
        sys.exit(f"{sys.argv[3]}: {error.strerror}")
