"""A function's seconds and the memory of all its processes together. Linux only: it reads /proc."""

import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import psutil

from toolkit.children import workers

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
