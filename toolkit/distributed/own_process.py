"""Work in a process of its own, beside the ranks."""

import os
import sys
from pathlib import Path

from toolkit import children

# Nothing of the launch may reach it: it is no rank.
_LAUNCH = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def run_module(module: str, *words: str) -> str:
    """Run a module of this package as a program and wait for it.

    Args:
        module: its dotted name.
        *words: its arguments.

    Returns:
        "" if it succeeded, else the last line that it said.
    """
    command = [sys.executable, "-m", module, *words]
    finished = children.run(command, capture_output=True, text=True, env=environment())
    if not finished.returncode:
        return ""
    lines = [line for line in finished.stderr.splitlines() if line.strip()] or ["?"]
    return lines[-1]


def environment() -> dict[str, str]:
    """Return the environment of such a process."""
    env = {name: value for name, value in os.environ.items() if name not in _LAUNCH}
    here = str(Path(__file__).resolve().parents[2])  # run.py of a checkout serves from any working folder
    env["PYTHONPATH"] = os.pathsep.join([here, *filter(None, [env.get("PYTHONPATH")])])
    return env
