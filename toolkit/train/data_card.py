"""data.json: what a run learns from, in numbers, for its report; the data themselves stay where they are."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from toolkit.data.store import TokenizedCache
from toolkit.secrets import hide_all
from toolkit.train.prepared import Prepared

FILE = "data.json"
_BINS = 40


def record(folder: Path, prepared: Prepared, total_steps: int, steps_per_epoch: int, epoch_rows: int) -> None:
    """Write data.json. For rank 0 only; a disk that is full is told by what a run cannot do without.

    Args:
        folder: the run folder.
        prepared: the stores.
        total_steps: optimizer steps of the run.
        steps_per_epoch: optimizer steps per pass over the training data.
        epoch_rows: rows of such a pass.
    """
    report = prepared.report
    splits = {"train": prepared.train, "validation": prepared.validation}
    card = {
        "total_steps": total_steps,
        "steps_per_epoch": steps_per_epoch,
        "packing": prepared.packing.value,
        "rows_per_epoch": epoch_rows,
        "rows_read": report.rows_read,
        "dropped": report.dropped,
        "truncated": report.truncated,
        "split": report.split,
        "duplicates": {"training": report.repeated, "validation": report.leaked},
        "sources": report.sources,
        "splits": {name: _split(store) for name, store in splits.items() if store is not None},
    }
    text = json.dumps(hide_all(card), indent=2, ensure_ascii=False) + "\n"
    with suppress(OSError):
        (folder / FILE).write_text(text, encoding="utf-8", errors="backslashreplace")


def _split(store: TokenizedCache) -> dict[str, Any]:
    """Return counts and a histogram of lengths; bin i holds lengths of more than edges[i], up to edges[i + 1]."""
    lengths = store.lengths()
    longest = int(lengths.max(initial=1))
    width = -(-longest // _BINS)
    edges = np.arange(0, longest + width, width)
    counts, _ = np.histogram(lengths, edges + 1)  # NumPy's bins begin with their edge, these end with it
    return {
        "fingerprint": store.fingerprint,
        "samples": len(store),
        "tokens": store.num_tokens,
        "trained_tokens": store.num_trained_tokens,
        "shortest": int(lengths.min(initial=longest)),
        "median": int(np.median(lengths)) if len(lengths) else 0,
        "longest": longest,
        "edges": edges.tolist(),
        "counts": counts.tolist(),
    }
