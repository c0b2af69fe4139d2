"""Answers to the same validation samples at several evaluations, side by side. Reads the beginnings of files only."""

import re
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from toolkit.messages import printable
from toolkit.report.rows import json_lines
from toolkit.secrets import hide

SAMPLES, STEPS, LINES, LETTERS = 6, 5, 200, 600
"""Samples and evaluations shown at most; lines of a file that are looked at; letters of a text."""
_TEXTS = ("where", "prompt", "reference", "output")
_NO_SCORE = ("output_tokens",)


@dataclass(slots=True)
class Sample:
    """A question, and what the model said to it after some steps."""

    where: str
    prompt: str
    reference: str
    said: dict[int, str]
    """Answer by step."""
    scores: dict[int, dict[str, float]]
    """Metrics of the answer by step."""


@dataclass(slots=True)
class Answers:
    """Those that are shown."""

    steps: list[int] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    evaluations: int = 0
    """How many have a file of answers."""


def read(folder: Path) -> Answers:
    """Return the answers of the first, the last and some evaluations between.

    Args:
        folder: `evaluations` of a run.
    """
    files = {}
    for path in folder.glob("step-*.jsonl"):
        if found := re.fullmatch(r"step-(\d+)", path.stem):
            files[int(found[1])] = path
    every = sorted(files)
    count = min(STEPS, len(every))
    steps = [every[round(place * (len(every) - 1) / max(count - 1, 1))] for place in range(count)]
    asked: dict[tuple[str, str], dict[int, dict[str, Any]]] = {}
    for step in steps:
        for row in _rows(files[step]):
            asked.setdefault((row["where"], row["prompt"]), {}).setdefault(step, row)
    # Those first that were answered most often: a file may have been cut off.
    chosen = sorted(asked.values(), key=lambda by_step: -len(by_step))[:SAMPLES]
    return Answers(steps, [_sample(by_step) for by_step in chosen], len(every))


def _rows(path: Path) -> list[dict[str, Any]]:
    """Return the first rows of a file, their texts cut: not so short that half a secret would be left of one."""
    found = []
    with suppress(OSError):
        for row in islice(json_lines(path), LINES):
            if row is not None and isinstance(row.get("output"), str):
                texts = {name: str(row.get(name) or "")[: 4 * LETTERS] for name in _TEXTS}
                found.append({**texts, "scores": _scores(row)})
    return found


def _scores(row: dict[str, Any]) -> dict[str, float]:
    kinds = ((name, value) for name, value in row.items() if name not in _NO_SCORE)
    return {name: value for name, value in kinds if isinstance(value, (int, float)) and not isinstance(value, bool)}


def _sample(by_step: dict[int, dict[str, Any]]) -> Sample:
    first = next(iter(by_step.values()))
    return Sample(
        where=_shown(first["where"]),
        prompt=_shown(first["prompt"]),
        reference=_shown(first["reference"]),
        said={step: _shown(row["output"]) for step, row in by_step.items()},
        scores={step: row["scores"] for step, row in by_step.items()},
    )


def _shown(text: str) -> str:
    """Return a text as it may be shown, cut where it is long."""
    whole = printable(hide(text)).strip()
    return whole[:LETTERS] + "…" if len(whole) > LETTERS else whole
