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

from toolkit.launch.environment import Ranks

CHECK_EVERY_S = 1.0
_PR_SET_PDEATHSIG = 1


def watch(ranks: Ranks) -> None:
    """From now on this process gets a SIGTERM when its launcher ends, or what started that.

    Args:
        ranks: who this process is; nothing is done for one that no launcher started.
    """
    if ranks.launcher not in ("deepspeed", "torchrun"):
        return
    parent = os.getppid()
    with suppress(OSError, AttributeError):  # Linux alone has it; the thread serves everywhere
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    grandparent = _parent_of(parent) if ranks.launcher == "deepspeed" else 0
    threading.Thread(target=_look, args=(parent, grandparent), name="orphan-watch", daemon=True).start()


def _look(parent: int, grandparent: int) -> None:
    while os.getppid() == parent and (grandparent <= 1 or _parent_of(parent) == grandparent):
        time.sleep(CHECK_EVERY_S)
    os.kill(os.getpid(), signal.SIGTERM)


def _parent_of(pid: int) -> int:
    """Return the parent of a process, 0 if it is gone."""
    try:
        # After the name, which stands in brackets and may hold anything: state, parent.
        return int(
            Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[1]
        )
    except (OSError, ValueError, IndexError):
        return 0
