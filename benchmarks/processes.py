"""Processes that are measured: functions, with the memory of all they start, and launches of ranks. Linux only."""

import contextlib
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Generic, NamedTuple, TypeVar

import psutil

from toolkit.children import start_tree, workers
from toolkit.distributed.process_group import remove_shared_memory
from toolkit.launch.environment import free_port
from toolkit.messages import LaunchError, tr

LIMIT_S = 3600.0
"""Of a launch."""
_EVERY_S = 0.25
_Result = TypeVar("_Result")


class Measured(NamedTuple, Generic[_Result]):
    """What a function took."""

    result: _Result
    """What it returned."""
    seconds: float
    """Wall clock."""
    peak_pss: int
    """Most bytes of memory that its processes had at once; memory that several share counts once."""


def measure(call: Callable[..., _Result], *arguments: object) -> Measured[_Result]:
    """Run a function of a module in a new process, and watch that and the ones that it starts.

    The module is imported before the clock starts.
    """
    with workers(1) as pool:
        pid = pool.submit(_imported, call).result()
        started = time.monotonic()
        future = pool.submit(call, *arguments)
        peak = 0
        while not future.done():
            time.sleep(_EVERY_S)
            peak = max(peak, tree_pss(pid))
        return Measured(future.result(), time.monotonic() - started, peak)


def tree_pss(pid: int) -> int:
    """Return the bytes of memory of a process and all that it started, each page divided by those who share it."""
    return sum(_memory(one, "Pss:") for one in [pid, *children(pid)])


def uss(pid: int) -> int:
    """Return the bytes of a process's memory that no other process shares."""
    return _memory(pid, "Private_Clean:", "Private_Dirty:")


def children(pid: int) -> list[int]:
    """Return the processes that a process started, and those that they started."""
    try:
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _imported(call: object) -> int:
    """Return this process; what it starts itself begins as it would in a process that a launcher started."""
    multiprocessing.set_start_method(None, force=True)
    return os.getpid()


def _memory(pid: int, *kinds: str) -> int:
    """Return the sum of some lines of /proc/PID/smaps_rollup in bytes; 0 if the process is gone."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(kinds))


class Launch:
    """A program that runs until it ends by itself, or until the `with` block does.

    Args:
        words: the program and its words, as DeepSpeed's launcher takes them.
        ranks: on this machine.
        launcher: Python module that starts the ranks.
    """

    def __init__(
        self, words: Sequence[str], ranks: int, launcher: Sequence[str] = ("deepspeed.launcher.runner",)
    ) -> None:
        self.num_ranks, self.port = ranks, free_port()
        self.file = tempfile.NamedTemporaryFile()
        options = ["--num_gpus", str(ranks), "--master_port", str(self.port)]
        self.started = time.perf_counter()
        self.process = start_tree(
            [sys.executable, "-m", *launcher, *options, *words], stdout=self.file, stderr=self.file
        )

    def __enter__(self) -> "Launch":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        left = [self.process.pid, *children(self.process.pid)] if self.process.poll() is None else []
        for pid in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                psutil.Process(pid).kill()
        self.process.wait()
        self.file.close()
        for rank in range(self.num_ranks):
            remove_shared_memory(rank, str(self.port))

    def output(self) -> str:
        """Return what the program has printed so far."""
        return Path(self.file.name).read_text(encoding="utf-8", errors="replace")

    def until(self, condition: Callable[[], bool]) -> float:
        """Wait until something is so; return the seconds since the start.

        Raises:
            LaunchError: the program ended before, or has taken an hour.
        """
        while not condition():
            if self.process.poll() is not None or time.perf_counter() - self.started > LIMIT_S:
                raise self._failure()
            time.sleep(0.005)
        return round(time.perf_counter() - self.started, 3)

    def wait(self) -> None:
        """Wait for the program's end.

        Raises:
            LaunchError: it failed.
        """
        self.until(lambda: self.process.poll() is not None)
        if self.process.returncode:
            raise self._failure()

    def ranks(self) -> list[int]:
        """Return the processes of the ranks, in their order."""
        found: dict[int, int] = {}
        for pid in children(self.process.pid):
            with contextlib.suppress(psutil.NoSuchProcess):
                environ = psutil.Process(pid).environ()
                if environ.get("MASTER_PORT") == str(self.port) and "RANK" in environ:
                    found.setdefault(int(environ["RANK"]), pid)  # what a rank starts comes after it
        return [found[rank] for rank in sorted(found)]

    def _failure(self) -> LaunchError:
        last = "\n".join(self.output().splitlines()[-20:])
        return LaunchError(tr("the launch to be measured has failed:\n{output}", output=last))
