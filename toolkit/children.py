"""The only place that starts processes: none but a run of `toolkit board` outlives the one that started it, however
that ends.

Linux sends a child a signal when the thread that started it ends (PR_SET_PDEATHSIG), so `start` belongs on a thread
that lasts. This file, run as a program, asks for the signal and then becomes the command: subprocess's `preexec_fn`
would run Python between fork and exec, where a thread of PyTorch that held a lock of the interpreter at the fork stops
it for good (CPython issue 112275, seen in 3.11.7). A launcher does not hand the signal on to what it starts:
`start_tree` puts subreaper.py between, which leaves nothing behind of what is below it.
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
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:  # imported where they are used: this file is run for each child
    from concurrent.futures import Future, ProcessPoolExecutor

_PR_SET_PDEATHSIG = 1
_AHEAD = 2
"""Items that `in_order` hands to each process before it waits for the oldest result."""

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
_function: Callable[..., Any] | None = None
"""What this worker process calls."""


def run(command: Sequence[str], **options: Any) -> "subprocess.CompletedProcess[Any]":
    """Run a command that ends with this process, and wait for it; options as of `subprocess.run`."""
    return subprocess.run(_tied_to_this(command, options), **{"check": False, **options})  # noqa: S603


def start(command: Sequence[str], *, ends_with_input: bool = False, **options: Any) -> "subprocess.Popen[Any]":
    """Start a command that is ended with this process; options as of `subprocess.Popen`. `ends_with_input`: it gets no
    signal: it ends by itself when its standard input, a pipe from this process, is closed, and needs time for that.
    """
    return subprocess.Popen(command if ends_with_input else _tied_to_this(command, options), **options)  # noqa: S603


def start_tree(command: Sequence[str], **options: Any) -> "subprocess.Popen[Any]":
    """Start a command that starts others, such as a launcher; its exit code is the one that is returned."""
    subreaper = [sys.executable, "-I", "-S", str(Path(__file__).resolve().with_name("subreaper.py"))]
    _check_program(command, options)
    return start([*subreaper, *command], **options)


def start_detached(command: Sequence[str], **options: Any) -> "subprocess.Popen[Any]":
    """Start a command that continues when this process, or its terminal, ends."""
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, **options)  # noqa: S603


def _tied_to_this(command: Sequence[str], options: dict[str, Any]) -> list[str]:
    """Return the command line by which this file becomes a command. `options` are those of `subprocess.Popen`. With
    -I and -S Python reads no settings of the user's and no installed packages: the file needs neither.
    """
    _check_program(command, options)
    return [sys.executable, "-I", "-S", str(Path(__file__).resolve()), str(os.getpid()), *command]


def _check_program(command: Sequence[str], options: dict[str, Any]) -> None:
    """Raise subprocess's own error if there is no such program."""
    if not shutil.which(command[0], path=(options.get("env") or os.environ).get("PATH")):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), command[0])


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
    """Prepare a worker process: keep the function that `call_function` calls; tokenizers shall use one thread."""
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
    started = context.Process(target=_tied, args=(os.getpid(), function, *arguments))
    started.start()
    return started


def _tied(parent: int, function: Callable[..., None] | None, *arguments: Any) -> None:
    """Call a function, if there is one, in a process that ends with the process `parent`."""
    end_with(parent)
    if function is not None:
        function(*arguments)


def ending_with_this(module: str, name: str) -> Callable[..., None]:
    """Return a target for a process that this one will start: it calls the function `name` of a module, and the process
    ends with this one. The function is looked up in the new process only: here the result may stand in its place, as
    engine/deepspeed_patches.py does.
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


if __name__ == "__main__":
    end_with(int(sys.argv[1]))
    try:
        os.execvp(sys.argv[2], sys.argv[2:])  # noqa: S606
    except OSError as error:
        sys.exit(f"{sys.argv[2]}: {error.strerror}")
