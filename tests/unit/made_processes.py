"""Made-up processes in the place of those that psutil finds above this one."""

import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest


def make_processes(
    monkeypatch: pytest.MonkeyPatch, *lines: list[str], folder: Path | None = None, ages_s: Sequence[float] = ()
) -> None:
    """Let this process have the first of these command lines, and be started by the next one, and so on."""
    process: Any = None
    for place, line in reversed(list(enumerate(lines))):
        created = psutil.boot_time() + time.clock_gettime(time.CLOCK_BOOTTIME) - dict(enumerate(ages_s)).get(place, 0)
        process = SimpleNamespace(
            parent=lambda above=process: above,
            cmdline=lambda line=line: line,
            cwd=lambda: str(folder),
            create_time=lambda created=created: created,
        )
    monkeypatch.setattr(psutil, "Process", lambda: process)
