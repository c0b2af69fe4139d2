"""Results of measurements, kept in files that are lists: what was measured before stays."""

import json
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from toolkit import children
from toolkit.errors import ConfigError
from toolkit.messages import tr
from toolkit.plan.machine import own_memory
from toolkit.train.run_folder import environment


def earlier(output: str) -> list[object]:
    """Return what a file of results holds; before hours of measuring, not after.

    Args:
        output: the file; "" or one that is not there holds nothing.

    Raises:
        ConfigError: it is something else.
    """
    if not output or not Path(output).exists():
        return []
    try:
        found = json.loads(Path(output).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        found = None
    if not isinstance(found, list):
        raise ConfigError(tr("output = {file} is not a list of results. Choose another file.", file=output))
    return found


def keep(
    output: str, before: list[object], command: Sequence[str], found: dict[str, Any], world_size: int
) -> dict[str, Any]:
    """Return a result with where it comes from, and write it behind those before; "" writes nothing.

    Args:
        output: the file.
        before: of `earlier`.
        command: the words that were typed.
        found: the figures.
        world_size: number of ranks.
    """
    known = {**environment(world_size), "machine": _machine()}
    result = {"command": shlex.join(command), **found, "environment": known}
    if output:
        Path(output).write_text(json.dumps([*before, result], indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return result


def _machine() -> dict[str, object]:
    """Return the processor, the memory and the GPUs. Linux only."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    smi = shutil.which("nvidia-smi")
    gpus = ""
    if smi:
        command = [smi, "--query-gpu=name,memory.total", "--format=csv,noheader"]
        gpus = children.run(command, capture_output=True, text=True, timeout=60).stdout
    return {
        "processor": next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), ""),
        "memory_bytes": own_memory(),
        "gpus": gpus.splitlines(),
    }
