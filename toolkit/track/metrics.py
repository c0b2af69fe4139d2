"""metrics.jsonl: one object per logged step, one per evaluation."""

import json
import math
from pathlib import Path


def append_row(file: Path, row: dict[str, object]) -> None:
    """Append one row. For rank 0 only.

    Numbers that are not finite are written as strings ("nan", "inf"): JSON has no such numbers, and a row that a strict
    reader refuses would hide just the step that matters.

    Args:
        file: metrics.jsonl of the run folder.
        row: names and values.
    """
    clean = {
        key: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in row.items()
    }
    with file.open("a", encoding="utf-8") as handle:
        handle.write(json.dumps(clean, ensure_ascii=False) + "\n")
