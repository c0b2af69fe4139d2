"""No rank outlives its launcher: a launcher that is killed cannot end its ranks, so they look after it themselves.

Killed with -9, DeepSpeed's launcher leaves its ranks training with nobody to stop them, and its front end leaves the
launcher (deepspeed 0.19.8, measured).
"""

import ctypes
import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil

from toolkit.launch import report
from toolkit.launch.environment import Ranks

CHECK_EVERY_S = 1.0
_PR_SET_PDEATHSIG = 1


def watch(ranks: Ranks) -> None:
    """From now on this process gets a SIGTERM when its launcher ends, or what started that.

    Args:
        ranks: who this process is; nothing is done for one that no launcher started.
    """
    if ranks.launcher not in ("deepspeed", "torchrun", "openmpi", "mpich"):
        return
    end_with_parent()
    parent = os.getppid()
    grandparent = _parent_of(parent) if ranks.launcher == "deepspeed" else 0
    front_end = report.front_end()
    threading.Thread(target=_look, args=(parent, grandparent, front_end), name="orphan-watch", daemon=True).start()


def end_with_parent() -> None:
    """Let the system send this process a SIGTERM when its parent ends. Linux alone has it."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _look(parent: int, grandparent: int, front_end: int) -> None:
    """Wait until one of them is gone; 0 for what there is not. The front end is `toolkit launch`."""
    while (
        os.getppid() == parent
        and (grandparent <= 1 or _parent_of(parent) == grandparent)
        and (not front_end or _is_running(front_end))
    ):
        time.sleep(CHECK_EVERY_S)
    os.kill(os.getpid(), signal.SIGTERM)


def _is_running(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def _parent_of(pid: int) -> int:
    """Return the parent of a process, 0 if it is gone."""
    try:
        # After the name, which stands in brackets and may hold anything: state, parent.
        return int(
            Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[1]
        )
    except (OSError, ValueError, IndexError):
        return 0
