"""No rank outlives its launcher: a launcher that is killed cannot end its ranks, so they look after it themselves.

Killed with -9, DeepSpeed's launcher leaves its ranks training with nobody to stop them, and its front end leaves the
launcher (deepspeed 0.19.8, measured). Ranks import for seconds, and the launcher did before them, so this begins with
a rank's first lines, and a rank finds out too that its launcher has died before that.
"""

import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

from toolkit import children
from toolkit.launch import report
from toolkit.launch.environment import Ranks
from toolkit.messages import tr

CHECK_EVERY_S = 1.0
_LAUNCHERS = ("python", "pypy", "deepspeed", "torchrun", "mpirun", "mpiexec", "orterun", "orted", "prte", "hydra_pmi")
"""How programs begin that start ranks. In a container one of them may be process 1, which otherwise is whoever takes
over what has lost its parent."""
_REAPERS = ("systemd", "containerd-shim", "conmon")
"""Processes that take it over elsewhere, where they asked the kernel for it (PR_SET_CHILD_SUBREAPER)."""


def watch(ranks: Ranks) -> str:
    """From now on this process gets a SIGTERM when its launcher ends, or what started that.

    Args:
        ranks: who this process is; nothing is done for one that no launcher started.

    Returns:
        What to say if one of them has ended already, and this process with it has to; else "".
    """
    if ranks.launcher not in ("deepspeed", "torchrun", "openmpi", "mpich"):
        return ""
    children.end_with_parent()
    parent = os.getppid()
    if is_taken_over(os.getpid(), by_kind=True):
        return _lost(ranks)
    grandparent = 0
    if ranks.launcher == "deepspeed" and "deepspeed.launcher.launch" in _words(parent):
        if is_taken_over(parent, by_kind=False):
            return _lost(ranks)
        grandparent = _stat(parent).parent
    front_end = report.front_end()
    threading.Thread(target=_look, args=(parent, grandparent, front_end), name="orphan-watch", daemon=True).start()
    return ""


def is_taken_over(pid: int, by_kind: bool) -> bool:
    """Return whether a process has lost the one that started it, and process 1, or a reaper, has taken it over.

    Args:
        pid: the process.
        by_kind: what it is that takes over tells: no rank is started by anything but a launcher. Else their sessions
            tell, as DeepSpeed's launcher may be a service, or what a container runs: then it leads its session, or is
            in that of its parent.
    """
    parent = _stat(pid).parent
    name = _name(parent)
    if parent != 1 and not name.startswith(_REAPERS):
        return False
    words = _words(parent)
    if not words or Path(words[0]).name.startswith(_LAUNCHERS) or name.startswith(_LAUNCHERS):
        return False
    session = _stat(pid).session
    return by_kind or session not in (pid, _stat(parent).session)


def _lost(ranks: Ranks) -> str:
    return tr(
        "rank {rank} ends: what started it ({launcher}) has been killed. Start the run again with the same command.",
        rank=ranks.rank,
        launcher=ranks.launcher,
    )


def tie_builds() -> None:
    """Let builds of DeepSpeed's ops end with this process: PyTorch starts ninja, and ninja ends its compilers."""
    from torch.utils import cpp_extension

    vars(cpp_extension)["subprocess"] = _Tied()


class _Tied:
    """The module `subprocess`, whose `run` starts processes that end with this one."""

    def __getattr__(self, name: str) -> Any:
        return getattr(subprocess, name)

    @staticmethod
    def run(*arguments: Any, **options: Any) -> Any:
        """Run a command."""
        return children.run(*arguments, **options)


def _look(parent: int, grandparent: int, front_end: int) -> None:
    """Wait until one of them is gone; 0 for what there is not. The front end is `toolkit launch`."""
    while (
        os.getppid() == parent
        and (grandparent <= 1 or _stat(parent).parent == grandparent)
        and (not front_end or _stat(front_end).state not in ("", "Z"))
    ):
        time.sleep(CHECK_EVERY_S)
    os.kill(os.getpid(), signal.SIGTERM)


class _Stat(NamedTuple):
    """What the system knows of a process; empty and 0 of one that is gone."""

    state: str = ""
    parent: int = 0
    session: int = 0


def _stat(pid: int) -> _Stat:
    try:
        # After the name, which stands in brackets and may hold anything: state, parent, group, session.
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return _Stat(fields[0], int(fields[1]), int(fields[3]))
    except (OSError, ValueError, IndexError):
        return _Stat()


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _words(pid: int) -> list[str]:
    """Return a process's command line; [] where it is gone or another user's."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
    except OSError:
        return []
