"""Results of measurements: appended to files that are lists, and shown as a Markdown table."""

import json
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from toolkit import children, disk
from toolkit.messages import ConfigError, tr
from toolkit.plan.machine import host_memory_bytes
from toolkit.train.run_dir import describe_environment

FIGURES = {
    "step": {
        "ours_steps_per_s": "our loop, steps/s",
        "bare_steps_per_s": "bare DeepSpeed loop, steps/s",
        "ratio_median": "ours : bare, median",
        "ratio_min": "ours : bare, lowest",
        "ratio_max": "ours : bare, highest",
    },
    "data": {
        "prepare_tokens_per_s": "tokens/s",
        "speed_to_encode_batch": "speed : the library's `encode_batch` (goal 0.85)",
        "peak_pss_mib": "memory of all processes, MiB",
        "store_bytes_per_token": "store, bytes per token",
    },
    "memory": {
        "bare.uss_mib": "bare DeepSpeed script, MiB (USS) of each rank",
        "ours.uss_mib": "our run, the same",
        "difference_mib": "largest rank, ours - bare, MiB (goal 150)",
    },
    "checkpoint": {
        "bare_s": "a bare `engine.save_checkpoint` waits, s",
        "ours_s": "ours, s",
        "ours_ratio": "ours : bare (goal 1.2)",
        "asynchronous_ratio": "asynchronous : bare (goal 0.3)",
    },
    "start": {
        "bare_median_s": "bare DeepSpeed script to its first step, s",
        "ours_median_s": "our run, s",
        "ratio": "ours : bare (goal 1.3)",
    },
    "plan": {
        "measured_bytes.step": "memory of a rank in a step, bytes",
        "memory_ratio": "planned : measured (goal 0.9 to 1.1)",
        "step_s": "a step, s",
        "time_ratio": "estimated after calibration : measured (goal 0.7 to 1.3)",
    },
    "trees": {
        "tokens_ratio": "tokens of copies : tokens of trees",
        "copies_s": "an epoch of copies, s",
        "trees_s": "an epoch of trees, s",
        "seconds_ratio": "copies : trees, median",
    },
    "resume": {
        "fresh_median_s": "fresh run to its first step, s",
        "resumed_median_s": "from a checkpoint, s",
        "ratio": "without reading the files : fresh (goal 1.2)",
    },
}
"""By what was measured, which figures a table shows and what they are called; a dot goes into a part."""


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


def append_result(
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
    known = {**describe_environment(world_size), "machine": _machine()}
    result = {"command": shlex.join(command), **found, "environment": known}
    if output:
        text = json.dumps([*before, result], indent=2, ensure_ascii=False) + "\n"
        disk.write_atomically(Path(output), text.encode())
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
        "memory_bytes": host_memory_bytes(),
        "gpus": gpus.splitlines(),
    }


def table(results: Sequence[dict[str, Any]]) -> str:
    """Return a table with a row for each figure.

    Args:
        results: of `toolkit bench`; what has no table (`faults`) is left out.
    """
    lines = ["| measured | figure | |", "| --- | --- | --- |"]
    for result in results:
        for key, name in FIGURES.get(result["measured"], {}).items():
            value: Any = result
            for part in key.split("."):
                value = value[part]
            lines.append(f"| `{result['measured']}` | {name} | {_text(value)} |")
    return "\n".join(lines) + "\n"


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_text, value))
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
