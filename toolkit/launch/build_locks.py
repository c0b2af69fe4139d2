"""Locks that a killed build of DeepSpeed's ops has left: every later run would wait for them for ever, in silence."""

import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from toolkit.config.ops import roots
from toolkit.errors import LaunchError
from toolkit.messages import tr

OPS = ("fused_adam", "cpu_adam", "async_io", "gds", "deepspeed_shm_comm", "deepspeed_ccl_comm", "utils")
"""Names under which DeepSpeed 0.19.8 builds what a run may use."""
YOUNG_S = 120.0
"""Where something was written so recently somebody may be building: here, or on a machine that shares the folder."""


def check(environ: Mapping[str, str], proc: Path = Path("/proc")) -> None:
    """Refuse to start beside a lock that nobody holds.

    PyTorch's builder makes a file `lock` and polls for its end without a limit (torch 2.13, utils/file_baton.py). While
    it works, ninja and the compiler have the build's folder as their working folder.

    Args:
        environ: the environment; TORCH_EXTENSIONS_DIR says where ops are built.
        proc: the process file system (for tests).

    Raises:
        LaunchError: there is such a lock.
    """
    for lock, age_s in stale(environ, proc):
        raise LaunchError(
            tr(
                "{lock} was left {minutes} minutes ago by a build that did not come to its end, and nobody builds "
                "there now on this machine: this run would wait for it for ever. Remove it:  rm {lock}",
                lock=lock,
                minutes=f"{age_s / 60:,.0f}",
            )
        )


def stale(environ: Mapping[str, str], proc: Path = Path("/proc")) -> Iterator[tuple[Path, float]]:
    """Yield the locks that nobody holds, and the seconds since anything happened beside them."""
    for root in roots(environ):
        for lock in (root / name / "lock" for name in OPS):
            try:
                # Another machine may be building in a folder that is shared: then something in it is new.
                age_s = time.time() - max(path.stat().st_mtime for path in (lock, *lock.parent.iterdir()))
            except OSError:  # there is none, or it has just been released
                continue
            if age_s > YOUNG_S and not _is_being_built(lock.parent, proc):
                yield lock, age_s


def _is_being_built(folder: Path, proc: Path) -> bool:
    for process in proc.glob("[0-9]*"):
        try:
            if (process / "cwd").readlink() == folder.resolve():
                return True
        except OSError:  # gone, or somebody else's
            continue
    return False
