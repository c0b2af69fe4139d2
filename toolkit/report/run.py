"""Reads a run directory for reports: every file is optional, as a run may have died anywhere; memory is bounded.

metrics.jsonl is read once into groups of rows, which keep mean, extremes and last value, so that a lone spike is seen.
"""

import math
import os
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import psutil
from numpy.typing import NDArray

from toolkit.config import files
from toolkit.disk import json_lines, open_regular_file
from toolkit.messages import ConfigError, RunFolderError, parsed_json, printable
from toolkit.secrets import hide, hide_all

T = TypeVar("T")

LIMIT = 400
"""Fewest groups of a curve, once there are as many rows; it has at most twice as many."""
MOST_EVENTS = 200
_CHUNK = 512
COUNTERS = ("skipped_steps", "bad_steps", "rewinds")
"""Figures that only grow; each increase is an event."""
NAMES = (
    *("step", *COUNTERS, "slowest_rank", "padding_fraction", "step_s", "time", "epoch", "loss", "lr", "grad_norm"),
    *("loss_scale", "tokens_per_s", "rank_tokens_per_s", "trained_tokens", "total_tokens", "mfu", "mfu_matmul"),
    *("samples_per_s", "samples", "distill/kl", "kl", "expert_load_max", "router_entropy", "expert_dropped"),
    *("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies"),
    *("data_wait_s", "fastest_rank_s", "median_rank_s", "slowest_rank_s", "communication_fraction"),
    *("host_memory_peak_bytes", "device_memory_peak_bytes", "planned_memory_bytes"),
)
"""Figures of a training row that a report shows; `step` is the first."""
_COLUMN = {name: column for column, name in enumerate(NAMES)}
_STEP, _COUNTS = 0, slice(1, 1 + len(COUNTERS))
"""Columns of the step and of COUNTERS."""
_NONFINITE = ("nan", "inf", "-inf")


def digits(value: float) -> str:
    """Return a measured number with three significant digits."""
    rounded = float(f"{value:.3g}")
    return f"{rounded:,.0f}" if abs(rounded) >= 100 else f"{rounded:#.3g}".removesuffix(".")


class Figure(NamedTuple):
    """A figure's values over a group of rows, without rows that lack it."""

    mean: float
    least: float
    most: float
    last: float


@dataclass(slots=True)
class Curve:
    """Rows of metrics in groups of `width`, so that memory is bounded: at 2 x LIMIT groups, two become one."""

    width: int = 1
    """Rows in a group; the last one may have fewer."""
    rows: int = 0
    _groups: list[NDArray[np.float64]] = field(default_factory=list)
    """As `_summary` returns them, [5, names] each."""
    _open_group: NDArray[np.float64] | None = None
    """Summary of the group that is being filled, and how many rows it has."""
    _open_rows: int = 0

    def add(self, values: NDArray[np.float64]) -> None:
        """Add rows, [rows, names] with the columns of NAMES, to the groups; numbers that are not finite are ignored."""
        self.rows += len(values)
        while len(values):
            part, values = np.split(values, [min(self.width - self._open_rows, len(values))])
            group = _summary(part)
            self._open_group = group if self._open_group is None else _merged_summary(self._open_group, group)
            self._open_rows += len(part)
            if self._open_rows == self.width:
                self.finish()

    def finish(self) -> None:
        """Close the group that is being filled; halve the number of groups when there are too many."""
        if self._open_group is None:
            return
        self._groups.append(self._open_group)
        self._open_group, self._open_rows = None, 0
        if len(self._groups) == 2 * LIMIT:
            pairs = zip(self._groups[::2], self._groups[1::2], strict=True)
            self._groups = [_merged_summary(first, second) for first, second in pairs]
            self.width *= 2

    def series(self, name: str) -> list[tuple[int, Figure]]:
        """Return (last step of the group, figure) for each group of rows in which the figure `name` occurs."""
        column, step = _COLUMN[name], _COLUMN["step"]
        points = []
        for counts, sums, least, most, last in self._groups:  # see `_summary`
            if counts[column] and counts[step]:
                mean = sums[column] / counts[column]
                figure = Figure(mean, float(least[column]), float(most[column]), float(last[column]))
                points.append((int(last[step]), figure))
        return points

    def last(self, name: str) -> float | None:
        """Return the last value of a figure, None where there is none."""
        points = self.series(name)
        return points[-1][1].last if points else None

    def most(self, name: str) -> float | None:
        """Return the highest value of a figure, None where there is none."""
        return max((figure.most for _, figure in self.series(name)), default=None)


def _summary(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Reduce rows [rows, names] to [5, names]: count, sum, least, most and last of each column's finite numbers."""
    is_finite = np.isfinite(values)
    last_finite = len(values) - 1 - np.argmax(is_finite[::-1], axis=0)  # row of each column's last finite number
    last = values[last_finite, np.arange(values.shape[1])]
    sums = np.where(is_finite, values, 0.0).sum(axis=0)
    least, most = np.where(is_finite, values, np.inf).min(axis=0), np.where(is_finite, values, -np.inf).max(axis=0)
    return np.stack([is_finite.sum(axis=0), sums, least, most, last])


def _merged_summary(first: NDArray[np.float64], second: NDArray[np.float64]) -> NDArray[np.float64]:
    """Merge two results of `_summary`, of rows that follow one another, into the one of all these rows."""
    (counts, sums, least, most, last), (counts_2, sums_2, least_2, most_2, last_2) = first, second
    last = np.where(counts_2 > 0, last_2, last)
    return np.stack([counts + counts_2, sums + sums_2, np.minimum(least, least_2), np.maximum(most, most_2), last])


@dataclass(slots=True)
class History:
    """What metrics.jsonl says of a run, in bounded memory."""

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
    """(a name of COUNTERS, or a figure that was NaN or Inf; step; how often), the first MOST_EVENTS."""
    more_events: int = 0
    """Number of events that are not in the list."""
    seconds: float = 0.0
    """Time that steps took, without evaluation and saving."""
    ends_not_finite: bool = False
    """Whether the loss of the last row is NaN or Inf."""
    unreadable: int = 0
    """Number of lines that are no rows, such as one that was cut off."""
    _waiting: list[list[Any]] = field(default_factory=list)
    """Rows not processed yet, each with the values of NAMES: numpy is fast for many at once."""
    _last_values: NDArray[np.float64] = field(default_factory=lambda: np.zeros(len(NAMES)))
    """Last finite value of each of NAMES in the rows that were processed."""
    _stride: int = 1
    _evaluations: int = 0
    """Evaluations read so far, of which every `_stride`th is kept."""
    _newest: dict[str, float] = field(default_factory=dict)

    def add(self, row: dict[str, Any]) -> None:
        """Add a row of metrics.jsonl as it stands in the file."""
        if "eval_loss" in row:
            self._add_evaluation(row)
        elif "step" in row:
            self._waiting.append([row.get(name, math.nan) for name in NAMES])
            if len(self._waiting) == _CHUNK:
                self._process_waiting()
        else:
            self.unreadable += 1

    def finish(self) -> None:
        """Process the rows that wait: no more rows come."""
        self._process_waiting()
        self.training.finish()
        self.events.sort(key=lambda event: event[1])
        if self._newest and self.evaluations[-1] is not self._newest:
            self.evaluations.append(self._newest)

    def _add_evaluation(self, row: dict[str, Any]) -> None:
        """Add an evaluation's finite numbers, of many rows every `_stride`th; note whether it is the best."""
        numbers = {name: number for name, value in row.items() if (number := _finite_number(value)) is not None}
        step = numbers.get("step")
        if step is None:
            self.unreadable += 1
            return
        if (loss := numbers.get("eval_loss")) is None:
            self._add_event("eval_loss", int(step), 1)
        elif self.best is None or loss < self.best[0]:
            self.best = loss, int(step)
        self._newest = numbers
        if self._evaluations % self._stride == 0:
            self.evaluations.append(numbers)
            if len(self.evaluations) == 2 * LIMIT:
                self.evaluations, self._stride = self.evaluations[::2], 2 * self._stride
        self._evaluations += 1

    def _process_waiting(self) -> None:
        """Add the waiting rows that have a finite step to curves, counters and events."""
        rows, self._waiting = self._waiting, []
        values = _as_numbers(rows)
        self.unreadable += len(rows) - len(values)
        if not len(values):
            return
        # A run from another run's checkpoint begins after a step and with that run's counts, which are no events of it.
        if self._last_values[_STEP] and not self.training.rows:
            self._last_values[_COUNTS] = np.nan_to_num(values[0, _COUNTS])
        self._add_events(rows, values)
        # step_s is a mean over the steps since the row before, one at least: after a rewind their numbers go back.
        steps_of_row = np.maximum(np.diff(values[:, _STEP], prepend=self._last_values[_STEP]), 1)
        step_s = np.nan_to_num(values[:, _COLUMN["step_s"]], nan=0.0, posinf=0.0)
        self.seconds += float((step_s * steps_of_row).sum())
        for counter, name, scale in ((self.slowest, "slowest_rank", 1), (self.padding, "padding_fraction", 100)):
            column = values[:, _COLUMN[name]]
            counter.update((column[np.isfinite(column)] * scale).astype(int).tolist())
        if self.first_loss is None:
            losses = values[:, _COLUMN["loss"]]
            self.first_loss = next(iter(losses[np.isfinite(losses)].tolist()), None)
        self.ends_not_finite = rows[-1][_COLUMN["loss"]] in _NONFINITE
        self._last_values = np.where(np.isfinite(values[-1]), values[-1], self._last_values)
        self.training.add(values)

    def _add_events(self, rows: Sequence[list[Any]], values: NDArray[np.float64]) -> None:
        """Add the events (counters that grew, NaN or Inf) of some rows, in the order of their steps.

        Args:
            rows: The values of NAMES as they stand in the file, a list for each row.
            values: The same rows as numbers, [rows, names]; NaN where a value is missing or is not a finite number.
        """
        events = [*self._counter_events(values), *_nonfinite_events(rows, values)]
        for step, name, count in sorted(events):
            self._add_event(name, step, count)

    def _counter_events(self, values: NDArray[np.float64]) -> Iterator[tuple[int, str, int]]:
        """Yield step, name and increase wherever a counter is higher than in the row before."""
        for name in COUNTERS:
            before, counts = self._last_values[_COLUMN[name]], np.nan_to_num(values[:, _COLUMN[name]])
            increases = np.diff(counts, prepend=before)
            for row in np.flatnonzero(increases > 0).tolist():
                yield int(values[row, _STEP]), name, int(increases[row])

    def _add_event(self, name: str, step: int, count: int) -> None:
        """Add an event, or count it if there are MOST_EVENTS already."""
        if len(self.events) < MOST_EVENTS:
            self.events.append((name, step, count))
        else:
            self.more_events += 1


def _nonfinite_events(rows: Sequence[list[Any]], values: NDArray[np.float64]) -> Iterator[tuple[int, str, int]]:
    """Yield step, name and 1 for each loss and gradient norm that the file has as NaN or Inf; a missing one is none."""
    for name in ("loss", "grad_norm"):
        column = _COLUMN[name]
        if np.isfinite(values[:, column]).all():
            continue
        for row in rows:
            step = _finite_number(row[_STEP])
            if step is not None and row[column] in _NONFINITE:
                yield int(step), name, 1


def _as_numbers(rows: Sequence[list[Any]]) -> NDArray[np.float64]:
    """Return those of the rows that have a finite step, as numbers [rows, names]; what is no number becomes NaN."""
    if not rows:
        return np.empty((0, len(NAMES)))
    try:
        values = np.array(rows, dtype=np.float64)
    except (ValueError, TypeError, OverflowError):  # some value is no number
        values = np.array([[_finite_number(value) for value in row] for row in rows], dtype=np.float64)
    return values[np.isfinite(values[:, _STEP])]


def _finite_number(value: object) -> float | None:
    """Return a value as a float if it is a finite number, else None."""
    with suppress(OverflowError):
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
    return None


def read_history(path: Path, from_step: float = 0.0) -> History:
    """Read the metrics.jsonl of a run that began after `from_step`; empty without the file, OSError if unreadable."""
    history = History()
    history._last_values[_STEP] = from_step
    if path.exists():
        for row in json_lines(path):
            if row is None:
                history.unreadable += 1
            else:
                history.add(row)
    history.finish()
    return history


def read_within(seconds: float, read: Callable[[], T], folder: Path) -> T:
    """Return what `read` returns of a directory, or raise RunFolderError after so many seconds. It runs in a daemon
    thread, as a read from a file server that does not answer cannot be ended: the thread is then left behind.
    """
    results: list[T] = []
    problems: list[BaseException] = []

    def run() -> None:
        try:
            results.append(read())
        except BaseException as error:  # handed on to the thread that waits
            problems.append(error)

    thread = threading.Thread(target=run, name=f"reading {folder}", daemon=True)
    thread.start()
    thread.join(seconds)
    if problems:
        raise problems[0]
    if not results:
        raise no_answer(folder, seconds)
    return results[0]


def no_answer(folder: Path, seconds: float) -> RunFolderError:
    """Return the error about a directory that was not read within so many seconds."""
    return RunFolderError(
        "{folder} does not answer for {seconds} s: its disk or file server may be gone.",
        folder=folder,
        seconds=f"{seconds:g}",
    )


SAMPLES, STEPS, LINES, LETTERS = 6, 5, 200, 600
"""Most samples and evaluations shown, lines of a file that are read, and letters of a text."""
_TEXTS = ("where", "prompt", "reference", "output")

EXPERTS = "experts.json"
"""Tokens of each expert between the last two rows of metrics.jsonl, in a run's directory."""
SCORES = "scores"
"""Beginning of the names of files in evaluations/ with a model's scores on benchmarks and checks."""
PAGE = "report.html"
"""The report of a run, in its directory."""


class Sample(NamedTuple):
    """A validation sample, and the model's answers to it after some steps."""

    where: str
    prompt: str
    reference: str
    answers: dict[int, str]
    """The model's answer, by step."""
    scores: dict[int, dict[str, float]]
    """Metrics of the answer by step."""


class Answers(NamedTuple):
    """The answers that a report shows."""

    steps: list[int]
    """Of the evaluations that are shown."""
    samples: list[Sample]
    evaluations: int
    """How many evaluations have a file of answers."""


def read_answers(folder: Path) -> Answers:
    """Return the answers to a few validation samples, of the first, the last and some evaluations between. `folder` has
    a file step-N.jsonl of each evaluation, with a row for each sample.
    """
    matches = ((re.fullmatch(r"step-(\d+)", path.stem), path) for path in folder.glob("step-*.jsonl"))
    files = {int(match[1]): path for match, path in matches if match}
    all_steps = sorted(files)
    last, count = len(all_steps) - 1, min(STEPS, len(all_steps))
    steps = [all_steps[round(index * last / max(count - 1, 1))] for index in range(count)]  # evenly, with both ends
    asked: dict[tuple[str, str], Sample] = {}
    for step in steps:
        with suppress(OSError):
            for row in islice(json_lines(files[step]), LINES):
                if row is not None and isinstance(row.get("output"), str):
                    _add_answer(asked, step, row)
    # Those first that were answered after most of the steps: a file may have been cut off.
    chosen = sorted(asked.values(), key=lambda sample: -len(sample.answers))[:SAMPLES]
    samples = [
        sample._replace(
            where=_shown_text(sample.where), prompt=_shown_text(sample.prompt), reference=_shown_text(sample.reference)
        )
        for sample in chosen
    ]
    return Answers(steps, samples, len(all_steps))


def _add_answer(asked: dict[tuple[str, str], Sample], step: int, row: dict[str, Any]) -> None:
    """Add the answer in a row of step-N.jsonl, and its scores, to the sample of this place and prompt in `asked`."""
    # Cut to bound memory, but not so short that half a secret would be left: `read_answers` hides secrets afterwards.
    where, prompt, reference, output = (str(row.get(name) or "")[: 4 * LETTERS] for name in _TEXTS)
    sample = asked.setdefault((where, prompt), Sample(where, prompt, reference, {}, {}))
    if step not in sample.answers:
        sample.answers[step] = _shown_text(output)
        numbers = {name: value for name, value in row.items() if type(value) in (int, float)}
        sample.scores[step] = {name: numbers[name] for name in numbers if name != "output_tokens"}


def _shown_text(text: str) -> str:
    """Return a text without secrets and control characters, cut to LETTERS."""
    shown = printable(hide(text)).strip()
    return shown[:LETTERS] + "…" if len(shown) > LETTERS else shown


_LARGEST_BYTES = 16 << 20
"""Of a file that is read at once."""
_MOST_LINES = 1000
_MOST_SCORED = 20
"""Evaluations on benchmarks that a report shows, the newest."""
_IS_RUN = ("metrics.jsonl", "config.yaml", "environment.json", "logs/starts.jsonl", "DONE", "FAILED")
"""A directory with one of these files is a run's."""
_DEAD_AFTER_S = 120.0
"""Age of a heartbeat from which on rank 0 counts as dead: it beats once a second, but file servers may lag a minute."""
DONE, FAILED, RUNNING, UNFINISHED = "done", "failed", "running", "unfinished"


@dataclass(kw_only=True, slots=True)
class Run:
    """What a run folder holds."""

    folder: Path
    """Absolute."""
    name: str
    """Unique among the runs of a report."""
    history: History
    config: dict[str, Any]
    environment: dict[str, Any]
    plan: dict[str, Any]
    data: dict[str, Any]
    summary: dict[str, Any]
    """Of the DONE marker."""
    failure: str
    """Of the FAILED marker, "" without one."""
    starts: list[dict[str, Any]]
    """Every start, the oldest first."""
    bad_steps: list[tuple[int, str]]
    """Skipped steps, and what went wrong in each."""
    answers: Answers
    """To validation samples, over time."""
    scores: list[dict[str, Any]]
    """What `toolkit eval PATH tasks=…` has written, the oldest first."""
    collectives: list[dict[str, Any]]
    """Rows of collectives.json, one per operation, counted on rank 0."""
    experts: dict[str, Any]
    """Content of experts.json: tokens of each expert by layer, and the step up to which they are counted."""
    samples: list[dict[str, Any]]
    """Answers to `evaluate.prompts` at the run's end."""

    @property
    def status(self) -> str:
        """Return DONE, FAILED, RUNNING (see `is_worked_on`) or UNFINISHED."""
        if self.summary:
            return DONE
        if self.failure:
            return FAILED
        return RUNNING if is_worked_on(self.folder) else UNFINISHED

    @property
    def total_steps(self) -> int | None:
        """Return the optimizer steps that the run is to have, None where it is not known."""
        steps = self.summary.get("steps") or self.data.get("total_steps") or self.section("train").get("max_steps")
        return int(steps) if isinstance(steps, (int, float)) and steps else None

    @property
    def step(self) -> int:
        """Return the last step that was logged, 0 without one."""
        return int(self.history.training.last("step") or 0)

    @property
    def is_custom(self) -> bool:
        """Whether it trained a custom model (toolkit.custom.train), which has samples instead of tokens."""
        return "program" in self.data

    def section(self, name: str) -> dict[str, Any]:
        """Return a section of the config, {} without one."""
        section = self.config.get(name)
        return section if isinstance(section, dict) else {}


def is_run(folder: Path) -> bool:
    """Whether a directory is a run's; not if it cannot be looked into."""
    return any(os.path.isfile(folder / name) for name in _IS_RUN)


def read_run(path: Path) -> Run:
    """Read a run directory; RunFolderError if it is none, or cannot be read."""
    folder = path.absolute()
    files.check_directory(path, RunFolderError)
    if not is_run(folder):
        raise RunFolderError(
            "{folder} is no directory of a run: it has none of {files}. Give the directory that "
            "run.dir and run.name make, such as runs/NAME.",
            folder=path,
            files=", ".join(_IS_RUN),
        )
    starts = _json_rows(folder / "logs" / "starts.jsonl")
    from_step = _finite_number(starts[0].get("from_step")) if starts else None
    try:
        history = read_history(folder / "metrics.jsonl", from_step or 0.0)
    except OSError as error:
        raise RunFolderError(
            "{file} cannot be read: {reason}.", file=folder / "metrics.jsonl", reason=error.strerror or error
        ) from error
    operations = _mapping(folder / "collectives.json").get("operations")
    listed = operations[:_MOST_LINES] if isinstance(operations, list) else []
    return Run(
        folder=folder,
        name=folder.name,
        history=history,
        config=_newest_mapping(folder, "config.yaml"),
        environment=_newest_mapping(folder, "environment.json"),
        plan=_mapping(folder / "plan.json"),
        data=_mapping(folder / "data.json"),
        summary=_mapping(folder / "DONE"),
        failure=_file_text(folder / "FAILED").strip(),
        starts=starts,
        bad_steps=_bad_steps(folder),
        answers=read_answers(folder / "evaluations"),
        scores=[_mapping(file) for file in sorted((folder / "evaluations").glob(f"{SCORES}-*.json"))[-_MOST_SCORED:]],
        collectives=[operation for operation in listed if isinstance(operation, dict)],
        experts=_mapping(folder / EXPERTS),
        samples=_json_rows(folder / "samples.jsonl"),
    )


def distinct_names(runs: list[Run]) -> None:
    """Set each run's name to as many last parts of its path as tell it from runs of the same name."""
    for run in runs:
        parts = run.folder.parts
        other_paths = [other.folder.parts for other in runs if other.folder != run.folder]
        length = 1
        while any(parts[-length:] == path[-length:] for path in other_paths):
            length += 1
        run.name = printable("/".join(parts[-length:]))


def _file_text(path: Path) -> str:
    """Return the text of a small file; "" if it does not exist or cannot be read."""
    with suppress(OSError), open_regular_file(path) as file:
        return file.read(_LARGEST_BYTES).decode("utf-8", errors="replace")
    return ""


def _newest_mapping(folder: Path, name: str) -> dict[str, Any]:
    """Return the mapping in a run's file `name`, else in the newest of logs/, where a next start moves it; or {}."""
    earlier_files: list[Path] = []
    with suppress(OSError):  # one of them has just been removed
        logs = (folder / "logs").glob(f"{Path(name).stem}*{Path(name).suffix}")
        earlier_files = sorted(logs, key=lambda path: -path.stat().st_mtime)
    contents = (_mapping(path) for path in [folder / name, *earlier_files])
    return next(filter(None, contents), {})  # the first that is not empty


def _mapping(path: Path) -> dict[str, Any]:
    """Return the mapping in a JSON or YAML file, its secrets hidden; {} if there is none."""
    content: object = {}
    text = _file_text(path)
    with suppress(ValueError, ConfigError):
        content = files.parse(text, path.name).values if path.suffix == ".yaml" else parsed_json(text or "{}", nan=True)
    return dict(hide_all(content)) if isinstance(content, dict) else {}


def _json_rows(path: Path) -> list[dict[str, Any]]:
    """Return the first _MOST_LINES rows of a JSONL file, their secrets hidden; [] if it cannot be read."""
    rows: list[dict[str, Any]] = []
    with suppress(OSError):
        rows.extend(islice((row for row in json_lines(path) if row is not None), _MOST_LINES))
    return list(hide_all(rows))


def _bad_steps(folder: Path) -> list[tuple[int, str]]:
    """Return (step, what went wrong) of each step that has a file of its samples, at most MOST_EVENTS."""
    steps = []
    for path in sorted((folder / "logs").glob("bad-step-*.jsonl"))[:MOST_EVENTS]:
        with suppress(OSError, TypeError, ValueError):
            head = next(json_lines(path), None) or {}
            steps.append((int(head["step"]), str(head["text"])))
    return steps


def is_worked_on(folder: Path) -> bool:
    """Whether a process works in a run directory, by the pid in run.lock, or on another host by the heartbeat."""
    lock = _mapping(folder / "run.lock")
    if lock.get("host") == socket.gethostname():
        try:
            begun = psutil.Process(lock["pid"]).create_time()  # seconds since 1970, as of `since` below
            since = datetime.strptime(lock["since"], "%Y-%m-%dT%H:%M:%S%z")
        except (KeyError, TypeError, ValueError, psutil.Error):
            return False
        if begun < since.timestamp() + _DEAD_AFTER_S:
            return True  # a process that began later has only been given the pid of one that is gone
    with suppress(OSError):
        return time.time() - (folder / "logs" / "heartbeat-rank-0.json").stat().st_mtime < _DEAD_AFTER_S
    return False


def runs_of(folder: Path) -> list[Path]:
    """Return the run directories of a sweep that have metrics, sorted by name."""
    return sorted(path.parent for path in folder.glob("*/metrics.jsonl") if path.stat().st_size)


def expand_sweeps(paths: Sequence[Path]) -> list[Path]:
    """Return run directories, a sweep's replaced by those of its runs; RunFolderError if no run of it has metrics."""
    folders: list[Path] = []
    for path in paths:
        runs = runs_of(path) if os.path.isfile(path / "sweep.json") else [path]
        if not runs:
            raise RunFolderError("{folder}: no run of this sweep has metrics yet.", folder=path)
        folders += runs
    return folders
