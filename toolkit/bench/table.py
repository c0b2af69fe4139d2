"""Results of `toolkit bench` as a Markdown table."""

from collections.abc import Sequence
from typing import Any

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
    "resume": {
        "fresh_median_s": "fresh run to its first step, s",
        "resumed_median_s": "from a checkpoint, s",
        "ratio": "without reading the files : fresh (goal 1.2)",
    },
}
"""By what was measured, which figures a table shows and what they are called; a dot goes into a part."""


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
