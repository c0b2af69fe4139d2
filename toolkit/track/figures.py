"""How the figures of a logged step are said, in a line and in the live view."""

import math
from collections.abc import Mapping

from toolkit.messages import tr
from toolkit.plan.machine import GIB

WORTH_TELLING = 0.05
"""Share of time, or of tokens, that is mentioned; the others are left to metrics.jsonl."""


def speed(row: Mapping[str, float]) -> list[str]:
    """Return what a row says of speed.

    Args:
        row: of metrics.jsonl.
    """
    units = ("tokens", "samples")
    parts = [f"{row[f'{unit}_per_s']:,.0f} {unit}/s" for unit in units if f"{unit}_per_s" in row]
    if "mfu" in row:
        parts.append(f"MFU {row['mfu']:.0%}")
    elif row.get("mfu_matmul", math.inf) <= 1:  # more says that the machine was busier when the product was measured
        parts.append(tr("{share} of matmul", share=f"{row['mfu_matmul']:.0%}"))
    if row.get("data_wait_fraction", 0) >= WORTH_TELLING:
        parts.append(tr("waits {share} for data", share=f"{row['data_wait_fraction']:.0%}"))
    if row.get("padding_fraction", 0) >= WORTH_TELLING:
        parts.append(tr("{share} padding", share=f"{row['padding_fraction']:.0%}"))
    if "communication_fraction" in row:
        parts.append(tr("{share} communication", share=f"{row['communication_fraction']:.0%}"))
    return parts


def memory(row: Mapping[str, float]) -> list[str]:
    """Return what a row says of memory, beside the plan where there is one.

    Args:
        row: of metrics.jsonl.
    """
    peak = row.get("device_memory_peak_bytes", row.get("host_memory_peak_bytes"))
    if not peak:
        return []
    if "planned_memory_bytes" not in row:
        return [tr("memory {peak} GiB", peak=f"{peak / GIB:.1f}")]
    planned = row["planned_memory_bytes"] / GIB
    return [tr("memory {peak} of {planned} GiB planned", peak=f"{peak / GIB:.1f}", planned=f"{planned:.1f}")]


def clock(seconds: float) -> str:
    """Return hours:minutes:seconds.

    Args:
        seconds: a span of time.
    """
    whole = int(seconds)
    return f"{whole // 3600}:{whole % 3600 // 60:02d}:{whole % 60:02d}"
