"""What ranks report to `toolkit launch` past their launcher, which drops it: exit code, run directory, first step.

A file of JSON lines in `run.dir`, which all nodes see. Its name is in a variable that begins with PYTHON, as
DeepSpeed's launcher passes nothing else of ours to other nodes (deepspeed 0.19.8, runner.py, EXPORT_ENVS). To an mpirun
it passes values with a space, and others, between quotes that no shell removes (multinode_runner.py, add_export).
"""

import json
import os
import socket
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

VARIABLE = "PYTHON_TOOLKIT_REPORT"
_FRONT_END = "PYTHON_TOOLKIT_LAUNCHED_BY"
"""Host and process of `toolkit launch`: in the environment, as the file is gone with it."""


def create_status_file(folder: Path, restart: int) -> Path:
    """Make the file for one start of the ranks, with who reads it; `restart`: how often they were started before."""
    handle, name = tempfile.mkstemp(prefix=".launch-", suffix=".jsonl", dir=folder)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "restart": restart}) + "\n")
    return Path(name)


def status_variables(file: Path) -> dict[str, str]:
    """Return what `toolkit launch` adds to its ranks' environment."""
    return {VARIABLE: str(file), _FRONT_END: f"{socket.gethostname()}:{os.getpid()}"}


def front_end(environ: Mapping[str, str] = os.environ) -> int:
    """Return the process of the `toolkit launch` on this machine that started this rank; 0 without one."""
    host, _, pid = environ.get(_FRONT_END, "").rpartition(":")
    return int(pid) if host == socket.gethostname() and pid.isdecimal() else 0


def report_status(environ: Mapping[str, str] = os.environ, **facts: Any) -> None:
    """Tell something; nothing happens where no `toolkit launch` listens."""
    with suppress(OSError):  # it is gone with its reader
        handle = os.open(_file(environ), os.O_WRONLY | os.O_APPEND)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(json.dumps(facts) + "\n")


def read_status(environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return what has been told, {} where no `toolkit launch` listens. Of several words on a thing the first counts."""
    found: dict[str, Any] = {}
    with suppress(OSError, ValueError):
        for line in Path(_file(environ)).read_text(encoding="utf-8").splitlines():
            found = {**json.loads(line), **found}
    return found


def _file(environ: Mapping[str, str]) -> str:
    return environ.get(VARIABLE, "").strip('"') or os.devnull
