"""What a tracker is told, whichever it is."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FINISHED, STOPPED, FAILED = "finished", "stopped", "failed"
TRAIN, EVAL, ANSWERS, SAMPLES = "train", "eval", "answers", "samples"
"""Rows of steps and of evaluations, answers to validation samples, answers to `evaluate.prompts`."""

Row = tuple[int, Mapping[str, float]]
"""A step and its figures, under their names in metrics.jsonl."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackedRun:
    """What is to be known of a run before its first row. All texts are without secrets."""

    name: str
    """Of its folder."""
    id: str
    """Of this run and no other; the same when it goes on."""
    folder: Path
    """The run folder."""
    settings: Mapping[str, Any]
    """The tracker's section of `track`."""
    hyperparameters: Mapping[str, Any]
    """Dotted key -> value: the config, the data, the code's commit, the versions."""
    texts: Mapping[str, str]
    """Name of a file -> its text."""
    step: int
    """The step after which this session begins."""


class Backend:
    """A tracker. Whatever it raises is told once and ends nothing; it may take its time."""

    redoes = False
    """Whether rows after a step can be taken back, so that they are written again."""
    most_rows = 1
    """Rows that `write` takes in one go: all of them are written or, if it raises, none."""

    def begin(self, run: TrackedRun) -> None:
        """Begin the run, or go on with it. Called again if it fails."""

    def held(self) -> dict[str, int]:
        """Return the last steps that the tracker itself says it has: TRAIN -> step, EVAL -> step; {} if unknown."""
        return {}

    def take_back(self, step: int) -> None:
        """Forget the rows after a step; only where `redoes`."""

    def write(self, rows: Sequence[Row]) -> None:
        """Write rows, no more than `most_rows`."""
        for step, values in rows:
            self.row(step, values)

    def row(self, step: int, values: Mapping[str, float]) -> None:
        """Write the figures of a step; for `write` where there is but one."""

    def answers(self, step: int, name: str, answers: Sequence[Mapping[str, str]]) -> None:
        """Write ANSWERS or SAMPLES: each has `prompt`, `answer`, and where there is one `reference`."""

    def summary(self, step: int, values: Mapping[str, float]) -> None:
        """Write figures of the whole run, at its last step: here like those of a step, as transformers does."""
        self.write([(step, values)])

    def end(self, status: str) -> None:
        """End the session: FINISHED, STOPPED or FAILED; everything is to be on its way before it returns."""


def as_markdown(answers: Sequence[Mapping[str, str]]) -> str:
    """Return answers as a table."""
    names = [name for name in ("prompt", "answer", "reference") if any(name in answer for answer in answers)]
    lines = [names, ["---"] * len(names)]
    for answer in answers:
        lines.append([answer.get(name, "").replace("|", "\\|").replace("\n", "<br>") for name in names])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
