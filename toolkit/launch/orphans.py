"""Ranks that end with their launcher.

DeepSpeed's launcher, killed with -9, leaves its ranks training (deepspeed 0.19.8, launch.py, measured). So each rank
watches its launcher from its first lines on, and finds out too whether it died before that: this file imports nothing
that takes long.
"""

import os
import signal
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from toolkit import children
from toolkit.launch import allocator
from toolkit.launch.ancestors import LAUNCHERS, NODE_LAUNCHER
from toolkit.launch.environment import MPI_LAUNCHERS, Ranks, front_end
from toolkit.messages import tr

CHECK_EVERY_S = 1.0
_WATCH = "orphan-watch"
_PREFIXES = ("python", "pypy", *LAUNCHERS)
"""How programs begin that start ranks. In a container one of them may be process 1, which otherwise is whoever takes
over what has lost its parent."""
_REAPERS = ("systemd", "containerd-shim", "conmon")
"""Processes that take it over elsewhere, where they asked the kernel for it (PR_SET_CHILD_SUBREAPER)."""


def exit_with_launcher(ranks: Ranks) -> str:
    """Let this rank get a SIGTERM when its launcher, or what started that, ends. Return "", or if one of them has ended
    already the message with which the rank must end at once. Without a launcher, and in a second call, do nothing.
    """
    is_watched = any(thread.name == _WATCH for thread in threading.enumerate())
    if is_watched or ranks.launcher not in ("deepspeed", "torchrun", *MPI_LAUNCHERS):
        return ""
    children.end_with_parent()
    pids, is_lost = _launchers_above(ranks.launcher)
    if is_lost:
        return tr(
            "rank {rank} ends: what started it ({launcher}) has been killed. Start the run again with the same "
            "command.",
            rank=ranks.rank,
            launcher=ranks.launcher,
        )
    allocator.share_one_arena(os.environ)
    threading.Thread(target=_watch, args=(pids,), name=_WATCH, daemon=True).start()
    return ""


def _launchers_above(kind: str) -> tuple[list[int], bool]:
    """Return the ids of `toolkit launch`, of this rank's launcher and of what started that, as far as they are on this
    machine; and whether one of the last two has ended already. `kind`: as in `Ranks.launcher`.
    """
    pids, is_lost = list(filter(None, [front_end()])), False
    with suppress(OSError, psutil.Error):
        rank = psutil.Process()
        if launcher := rank.parent():
            pids.append(launcher.pid)
        is_lost = is_orphaned(rank, is_rank=True)
        if launcher and not is_lost and kind == "deepspeed" and NODE_LAUNCHER in launcher.cmdline():
            if starter := launcher.parent():
                pids.append(starter.pid)
            is_lost = is_orphaned(launcher, is_rank=False)
    return pids, is_lost


def _watch(pids: Sequence[int]) -> None:
    """Wait until one of these processes has ended; then end this one."""
    with suppress(psutil.NoSuchProcess):
        while all(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids):
            time.sleep(CHECK_EVERY_S)
    os.kill(os.getpid(), signal.SIGTERM)


def is_orphaned(process: psutil.Process, is_rank: bool) -> bool:
    """Return whether the parent of a process has ended, so that process 1, or a reaper, has become its parent.
    Not if that is a launcher itself (_PREFIXES), as in a container. `is_rank`: of a rank any other such parent is
    proof, as nothing else starts ranks; process 1 may have started another process on purpose.
    """
    parent = process.parent()
    if parent is None or (parent.pid != 1 and not parent.name().startswith(_REAPERS)):
        return False
    words = parent.cmdline()
    if not words or any(name.startswith(_PREFIXES) for name in (parent.name(), Path(words[0]).name)):
        return False
    if is_rank:
        return True
    # A service or a container's program, which was started on purpose, leads its session, or is in its parent's.
    session = os.getsid(process.pid)
    return session not in (process.pid, os.getsid(parent.pid))
