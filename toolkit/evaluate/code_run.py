"""Runs code that a model has written, with limits: time, memory, file size and, where Linux allows it, no network and
no further processes. It is no jail: the code reads and deletes what the user may, so it runs by consent only.

This file, run as a program, sets the limits and then becomes the code's interpreter.
"""

import ctypes
import os
import resource
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

TIME_LIMIT_S = 10.0
_MEMORY_BYTES = 2 << 30
_FILE_BYTES = 1 << 20
_NEW_USER, _NEW_NET = 0x10000000, 0x40000000  # CLONE_NEWUSER, CLONE_NEWNET of Linux's sched.h
_PROBE = "--probe"
"""Instead of a file: exit with 0 if there is no network, else with 1."""


def why_failed(program: str, seconds: float = TIME_LIMIT_S) -> str:
    """Run a Python program in an empty directory and environment; return the last line of its output if it fails or is
    not done in time, "" if it succeeds. Nothing that it has started outlives it.
    """
    from toolkit import children
    from toolkit.messages import printable, shortened, tr

    with tempfile.TemporaryDirectory(prefix="check-") as name:
        folder = Path(name)
        (folder / "answer.py").write_text(program, encoding="utf-8", errors="backslashreplace")
        with (folder / "output").open("wb+") as output:
            process = children.start_tree(
                [sys.executable, "-I", "-S", __file__, "answer.py"],  # this file sets limits, then runs that one
                cwd=folder,
                env={"PATH": os.defpath, "HOME": name, "TMPDIR": name, "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code = process.wait(seconds)
            except subprocess.TimeoutExpired:
                return tr("no result within {seconds} s", seconds=f"{seconds:g}")
            finally:
                process.terminate()  # toolkit/subreaper.py, as which `start_tree` runs, ends all that is left below it
                process.wait()
            output.seek(0)
            lines = output.read(_FILE_BYTES).decode("utf-8", "replace").split("\n")
    if code == 0:
        return ""
    last = next((line for line in reversed(lines) if line.strip()), "")
    return printable(shortened(last, 200)) or tr("exit code {code}", code=code)


def has_no_network() -> bool:
    """Whether code that is run here cannot reach the network."""
    from toolkit import children

    return children.run([sys.executable, "-I", "-S", __file__, _PROBE]).returncode == 0


def _leave_network() -> bool:
    """Move this process to a network without devices; False where the system does not allow it. Without root's rights
    that needs a user namespace too, which some systems forbid; then root still may.
    """
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        return libc.unshare(_NEW_USER | _NEW_NET) == 0 or libc.unshare(_NEW_NET) == 0
    return False


def _limit(seconds: float) -> None:
    """Limit this process and what it becomes: `seconds` of processor time, memory, sizes and numbers of files."""
    limits = {
        resource.RLIMIT_CPU: int(seconds) + 1,  # a whole number, and not less than `seconds`
        resource.RLIMIT_AS: _MEMORY_BYTES,
        resource.RLIMIT_FSIZE: _FILE_BYTES,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NPROC: 0,  # no effect for root
    }
    for name, value in limits.items():
        with suppress(ValueError, OSError):
            resource.setrlimit(name, (value, value))


if __name__ == "__main__":
    is_alone = _leave_network()
    if sys.argv[1] == _PROBE:
        sys.exit(not is_alone)
    _limit(TIME_LIMIT_S)
    os.execv(sys.executable, [sys.executable, "-I", "-B", sys.argv[1]])  # noqa: S606
