"""metrics.jsonl as curves of bounded length, read once from beginning to end, however many rows it has.

Rows are put together, as many in each group as it takes to have few groups; of each group and each figure the mean, the
extremes and the last value are kept, so that a single spike among ten million rows is still seen.
"""

import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

LIMIT = 400
"""Groups that a curve has at least, once there are as many rows; at most twice as many."""
MOST_EVENTS = 200
LONGEST_LINE = 1 << 20
"""Bytes: no row of a run is as long, so more is another file's."""
_CHUNK = 512
COUNTERS = ("skipped_steps", "bad_steps", "rewinds")
"""Figures that only grow; where one does, something happened."""
NAMES = (
    *("step", *COUNTERS, "slowest_rank", "padding_fraction", "step_s", "time", "epoch", "loss", "lr", "grad_norm"),
    *("loss_scale", "tokens_per_s", "rank_tokens_per_s", "trained_tokens", "total_tokens", "mfu", "mfu_matmul"),
    *("samples_per_s", "samples"),
    *("data_wait_s", "fastest_rank_s", "median_rank_s", "slowest_rank_s", "communication_fraction"),
    *("host_memory_peak_bytes", "device_memory_peak_bytes", "planned_memory_bytes"),
)
"""Figures of a training row that a report shows; `step` is the first."""
_PLACE = {name: place for place, name in enumerate(NAMES)}
_NO_NUMBER = ("nan", "inf", "-inf")


class Figure(NamedTuple):
    """One figure over the rows of a group, those left out that have none."""

    mean: float
    least: float
    most: float
    last: float


@dataclass(slots=True)
class Curve:
    """Training rows, put together as they come."""

    width: int = 1
    """Rows in a group; the last one may have fewer."""
    rows: int = 0
    _groups: list[NDArray[np.float64]] = field(default_factory=list)
    _open: NDArray[np.float64] | None = None
    _in_open: int = 0

    def add(self, values: NDArray[np.float64]) -> None:
        """Take rows, [rows, names]; only finite numbers count."""
        self.rows += len(values)
        while len(values):
            part, values = np.split(values, [min(self.width - self._in_open, len(values))])
            found = _reduced(part)
            self._open = found if self._open is None else _joined(self._open, found)
            self._in_open += len(part)
            if self._in_open == self.width:
                self.finish()

    def finish(self) -> None:
        """Close the group that is begun."""
        if self._open is None:
            return
        self._groups.append(self._open)
        self._open, self._in_open = None, 0
        if len(self._groups) == 2 * LIMIT:
            pairs = zip(self._groups[::2], self._groups[1::2], strict=True)
            self._groups = [_joined(first, second) for first, second in pairs]
            self.width *= 2

    def series(self, name: str) -> list[tuple[int, Figure]]:
        """Return the last step of each group that has a figure, and the figure."""
        place = _PLACE[name]
        return [
            (int(group[4, 0]), Figure(group[1, place] / group[0, place], *map(float, group[2:, place])))
            for group in self._groups
            if group[0, place] and group[0, 0]
        ]

    def last(self, name: str) -> float | None:
        """Return the last value of a figure, None where there is none."""
        found = self.series(name)
        return found[-1][1].last if found else None

    def most(self, name: str) -> float | None:
        """Return the highest value of a figure, None where there is none."""
        return max((figure.most for _, figure in self.series(name)), default=None)


def _reduced(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return count, sum, least, most and last of each column, [5, names]."""
    there = np.isfinite(values)
    last = values[len(values) - 1 - np.argmax(there[::-1], axis=0), np.arange(values.shape[1])]
    sums = np.where(there, values, 0.0).sum(axis=0)
    least, most = np.where(there, values, np.inf).min(axis=0), np.where(there, values, -np.inf).max(axis=0)
    return np.stack([there.sum(axis=0), sums, least, most, last])


def _joined(first: NDArray[np.float64], second: NDArray[np.float64]) -> NDArray[np.float64]:
    least, most = np.minimum(first[2], second[2]), np.maximum(first[3], second[3])
    last = np.where(second[0] > 0, second[4], first[4])
    return np.stack([first[0] + second[0], first[1] + second[1], least, most, last])


@dataclass(slots=True)
class History:
    """What metrics.jsonl tells."""

    training: Curve = field(default_factory=Curve)
    evaluations: list[dict[str, float]] = field(default_factory=list)
    """Rows of evaluations; of very many every second, fourth, …, and the last one."""
    best: tuple[float, int] | None = None
    """Lowest validation loss, and its step."""
    first_loss: float | None = None
    slowest: Counter[int] = field(default_factory=Counter)
    """How often each rank was the slowest."""
    padding: Counter[int] = field(default_factory=Counter)
    """How many rows have so many hundredths of padding."""
    events: list[tuple[str, int, int]] = field(default_factory=list)
    """What happened (a name of COUNTERS, or a figure that was no number), step, how often; the first MOST_EVENTS."""
    more_events: int = 0
    """Those that are not in the list."""
    seconds: float = 0.0
    """Time that steps took, without evaluation and saving."""
    unreadable: int = 0
    """Lines that are no rows, such as one that was cut off."""
    _waiting: list[list[Any]] = field(default_factory=list)
    _before: NDArray[np.float64] = field(default_factory=lambda: np.zeros(len(NAMES)))
    _stride: int = 1
    _evaluations: int = 0
    _newest: dict[str, float] = field(default_factory=dict)

    def add(self, row: dict[str, Any]) -> None:
        """Take a row as it stands in the file."""
        if "eval_loss" in row:
            self._add_evaluation(row)
        elif "step" in row:
            self._waiting.append([row.get(name, math.nan) for name in NAMES])
            if len(self._waiting) == _CHUNK:
                self._settle()
        else:
            self.unreadable += 1

    def finish(self) -> None:
        """Take it that no more rows come."""
        self._settle()
        self.training.finish()
        self.events.sort(key=lambda event: event[1])
        if self._newest and self.evaluations[-1] is not self._newest:
            self.evaluations.append(self._newest)

    def _add_evaluation(self, row: dict[str, Any]) -> None:
        found = {name: number for name, value in row.items() if (number := _number(value)) is not None}
        step = found.get("step")
        if step is None:
            self.unreadable += 1
            return
        if (loss := found.get("eval_loss")) is None:
            self._tell("eval_loss", int(step), 1)
        elif self.best is None or loss < self.best[0]:
            self.best = loss, int(step)
        self._newest = found
        if self._evaluations % self._stride == 0:
            self.evaluations.append(found)
            if len(self.evaluations) == 2 * LIMIT:
                self.evaluations, self._stride = self.evaluations[::2], 2 * self._stride
        self._evaluations += 1

    def _settle(self) -> None:
        """Take what waits into account, all at once: rows are many."""
        rows, self._waiting = self._waiting, []
        try:
            values = np.array(rows, dtype=np.float64)
        except (ValueError, TypeError, OverflowError):
            numbers = [[_number(value) for value in row] for row in rows]
            values = np.array(numbers, dtype=np.float64)  # None becomes nan
        if len(values):
            values = values[np.isfinite(values[:, 0])]
        self.unreadable += len(rows) - len(values)
        if not len(values):
            return
        self._find_events(rows, values)
        together = np.vstack([self._before, values])
        step_s = np.nan_to_num(values[:, _PLACE["step_s"]], nan=0.0, posinf=0.0)
        self.seconds += float((step_s * np.maximum(np.diff(together[:, 0]), 1)).sum())
        for counter, name, scale in ((self.slowest, "slowest_rank", 1), (self.padding, "padding_fraction", 100)):
            column = values[:, _PLACE[name]]
            counter.update((column[np.isfinite(column)] * scale).astype(int).tolist())
        if self.first_loss is None:
            losses = values[:, _PLACE["loss"]]
            self.first_loss = next(iter(losses[np.isfinite(losses)].tolist()), None)
        self._before = np.where(np.isfinite(values[-1]), values[-1], self._before)
        self.training.add(values)

    def _find_events(self, rows: Sequence[list[Any]], values: NDArray[np.float64]) -> None:
        found = []
        for name in COUNTERS:
            column = np.concatenate([self._before[_PLACE[name]][None], np.nan_to_num(values[:, _PLACE[name]])])
            for place in np.flatnonzero(np.diff(column) > 0).tolist():
                found.append((int(values[place, 0]), name, int(column[place + 1] - column[place])))
        for name in ("loss", "grad_norm"):
            place = _PLACE[name]
            if not np.isfinite(values[:, place]).all():
                written = [(_number(row[0]), row[place]) for row in rows]
                found += [(int(step), name, 1) for step, value in written if step is not None and value in _NO_NUMBER]
        for step, name, count in sorted(found):
            self._tell(name, step, count)

    def _tell(self, name: str, step: int, count: int) -> None:
        if len(self.events) < MOST_EVENTS:
            self.events.append((name, step, count))
        else:
            self.more_events += 1


def _number(value: object) -> float | None:
    """Return what is a finite number, as rows are written, else None."""
    with suppress(OverflowError):
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
    return None


def read_history(path: Path) -> History:
    """Return what a metrics.jsonl tells, nothing if it does not exist; an OSError if it cannot be read."""
    history = History()
    if path.exists():
        for row in json_lines(path):
            if row is None:
                history.unreadable += 1
            else:
                history.add(row)
    history.finish()
    return history


def json_lines(path: Path) -> Iterator[dict[str, Any] | None]:
    """Yield the objects of a file of JSON lines, one in memory at a time; None for a line that is none."""
    with path.open("rb") as file:
        while line := file.readline(LONGEST_LINE):
            if len(line) == LONGEST_LINE and not line.endswith(b"\n"):
                while (rest := file.readline(LONGEST_LINE)) and not rest.endswith(b"\n"):
                    pass
                yield None
            elif line.strip():
                found = None
                with suppress(ValueError, RecursionError):
                    found = json.loads(line)
                yield found if isinstance(found, dict) else None
