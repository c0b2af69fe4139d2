"""A run directory as a report needs it: everything is optional, as a run may have died anywhere, and of bounded size.

Answers to the same validation samples at several evaluations stand side by side; only the beginnings of files are read.
"""

import json
import os
import re
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from toolkit.errors import RunFolderError
from toolkit.messages import printable
from toolkit.report.history import History, json_lines, read_history
from toolkit.secrets import hide, hide_all

SAMPLES, STEPS, LINES, LETTERS = 6, 5, 200, 600
"""Samples and evaluations shown at most; lines of a file that are looked at; letters of a text."""
_TEXTS = ("where", "prompt", "reference", "output")

PAGE = "report.html"
"""The report of a run, in its directory."""


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
    """The answers that are shown."""

    steps: list[int] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    evaluations: int = 0
    """How many have a file of answers."""


def read_answers(folder: Path) -> Answers:
    """Return the answers of the first, the last and some evaluations between."""
    matches = ((re.fullmatch(r"step-(\d+)", path.stem), path) for path in folder.glob("step-*.jsonl"))
    files = {int(match[1]): path for match, path in matches if match}
    every = sorted(files)
    count = min(STEPS, len(every))
    steps = [every[round(place * (len(every) - 1) / max(count - 1, 1))] for place in range(count)]
    asked: dict[tuple[str, str], dict[int, dict[str, Any]]] = {}
    for step in steps:
        for row in _answer_rows(files[step]):
            asked.setdefault((row["where"], row["prompt"]), {}).setdefault(step, row)
    # Those first that were answered most often: a file may have been cut off.
    chosen = sorted(asked.values(), key=lambda by_step: -len(by_step))[:SAMPLES]
    return Answers(steps, [_sample(by_step) for by_step in chosen], len(every))


def _answer_rows(path: Path) -> list[dict[str, Any]]:
    """Return the first rows of a file, their texts cut: not so short that half a secret would be left of one."""
    found = []
    with suppress(OSError):
        for row in islice(json_lines(path), LINES):
            if row is not None and isinstance(row.get("output"), str):
                scores = {name: value for name, value in row.items() if type(value) in (int, float)}
                scores.pop("output_tokens", None)
                texts = {name: str(row.get(name) or "")[: 4 * LETTERS] for name in _TEXTS}
                found.append({**texts, "scores": scores})
    return found


def _sample(by_step: dict[int, dict[str, Any]]) -> Sample:
    first = next(iter(by_step.values()))
    said = {step: _shown_text(row["output"]) for step, row in by_step.items()}
    scores = {step: row["scores"] for step, row in by_step.items()}
    where, prompt, reference = (_shown_text(first[name]) for name in _TEXTS[:3])
    return Sample(where, prompt, reference, said, scores)


def _shown_text(text: str) -> str:
    """Return a text as it may be shown, cut where it is long."""
    whole = printable(hide(text)).strip()
    return whole[:LETTERS] + "…" if len(whole) > LETTERS else whole


_LARGEST_BYTES = 16 << 20
"""Of a file that is read whole."""
_MOST_LINES = 1000
_IS_RUN = ("metrics.jsonl", "config.yaml", "environment.json", "logs/starts.jsonl", "DONE", "FAILED")
"""A folder with one of these is a run's."""
DONE, FAILED, RUNNING, UNFINISHED = "done", "failed", "running", "unfinished"


@dataclass(kw_only=True, slots=True)
class Run:
    """What a run folder holds."""

    folder: Path
    """Absolute."""
    name: str
    """What tells it from the other runs of a report."""
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
    bad_steps: dict[int, str]
    """What went wrong in steps that were left out."""
    answers: Answers
    """To validation samples, over time."""
    collectives: list[dict[str, Any]]
    """What DeepSpeed's log of collectives counted on rank 0, an operation each."""
    samples: list[dict[str, Any]]
    """Answers to the recipe's own questions, at the end."""

    @property
    def status(self) -> str:
        """Return DONE, FAILED, RUNNING (by a process of this machine) or UNFINISHED."""
        if self.summary:
            return DONE
        if self.failure:
            return FAILED
        return RUNNING if _is_worked_on(self.folder) else UNFINISHED

    @property
    def total_steps(self) -> int | None:
        """Return the optimizer steps that the run is to have, None where it is not known."""
        found = self.summary.get("steps") or self.data.get("total_steps") or self.section("train").get("max_steps")
        return int(found) if isinstance(found, (int, float)) and found else None

    @property
    def step(self) -> int:
        """Return the last step that was logged, 0 without one."""
        return int(self.history.training.last("step") or 0)

    def section(self, name: str) -> dict[str, Any]:
        """Return a section of the config, {} without one."""
        found = self.config.get(name)
        return found if isinstance(found, dict) else {}


def read_run(path: Path) -> Run:
    """Read a run directory; a RunFolderError if it is none, or cannot be read."""
    folder = path.absolute()
    if not any((folder / name).is_file() for name in _IS_RUN):
        raise RunFolderError(
            "{folder} is no folder of a run: it has none of {files}. Give the folder that run.dir and run.name "
            "make, such as runs/NAME.",
            folder=path,
            files=", ".join(_IS_RUN),
        )
    try:
        history = read_history(folder / "metrics.jsonl")
    except OSError as error:
        raise RunFolderError(
            "{file} cannot be read: {reason}.", file=folder / "metrics.jsonl", reason=error.strerror or error
        ) from error
    return Run(
        folder=folder,
        name=folder.name,
        history=history,
        config=_latest(folder, "config.yaml"),
        environment=_latest(folder, "environment.json"),
        plan=_mapping(folder / "plan.json"),
        data=_mapping(folder / "data.json"),
        summary=_mapping(folder / "DONE"),
        failure=_text(folder / "FAILED").strip(),
        starts=_lines(folder / "logs" / "starts.jsonl"),
        bad_steps=_bad_steps(folder),
        answers=read_answers(folder / "evaluations"),
        collectives=_operations(folder / "collectives.json"),
        samples=_lines(folder / "samples.jsonl"),
    )


def distinct_names(runs: list[Run]) -> None:
    """Give runs of the same name as much of their paths as tells them apart."""
    for run in runs:
        parts = run.folder.parts
        others = [other.folder.parts for other in runs if other.folder != run.folder]
        length = 1
        while any(parts[-length:] == other[-length:] for other in others):
            length += 1
        run.name = printable("/".join(parts[-length:]))


def _text(path: Path) -> str:
    """Return a small text file as it may be shown; "" if there is none."""
    with suppress(OSError):
        if path.is_file():
            with path.open("rb") as file:
                return file.read(_LARGEST_BYTES).decode("utf-8", errors="replace")
    return ""


def _latest(folder: Path, name: str) -> dict[str, Any]:
    """Return a file of the newest session; a run that was started again and died at once has moved it to logs/."""
    kept = (folder / "logs").glob(f"{Path(name).stem}*{Path(name).suffix}")
    return next((found for path in [folder / name, *sorted(kept, key=_age)] if (found := _mapping(path))), {})


def _age(path: Path) -> float:
    with suppress(OSError):
        return -path.stat().st_mtime
    return 0.0


def _mapping(path: Path) -> dict[str, Any]:
    """Return what a file of JSON or YAML holds, its secrets hidden; {} if that is no mapping."""
    found: object = {}
    with suppress(ValueError, RecursionError, yaml.YAMLError):
        text = _text(path)
        found = yaml.safe_load(text) if path.suffix == ".yaml" else json.loads(text or "{}")
    return dict(hide_all(found)) if isinstance(found, dict) else {}


def _lines(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    with suppress(OSError):
        found.extend(islice((row for row in json_lines(path) if row is not None), _MOST_LINES))
    return list(hide_all(found))


def _operations(path: Path) -> list[dict[str, Any]]:
    found = _mapping(path).get("operations")
    return [one for one in found[:_MOST_LINES] if isinstance(one, dict)] if isinstance(found, list) else []


def _bad_steps(folder: Path) -> dict[int, str]:
    """Return the text of each step that has a file of its samples; of very many the first."""
    found: dict[int, str] = {}
    for path in sorted((folder / "logs").glob("bad-step-*.jsonl"))[:_MOST_LINES]:
        with suppress(OSError, TypeError, ValueError):
            head = next(json_lines(path), None) or {}
            found[int(head["step"])] = str(head["text"])
    return found


def _is_worked_on(folder: Path) -> bool:
    """Whether the process that holds the run's lock is one of this machine, and there."""
    lock = _mapping(folder / "run.lock")
    pid = lock.get("pid")
    if lock.get("host") != socket.gethostname() or not isinstance(pid, int) or pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except OSError as error:
        return not isinstance(error, ProcessLookupError)
    return True
    return True


def runs_of(folder: Path) -> list[Path]:
    """Return the directories of a sweep's runs that have metrics, by their names."""
    return sorted(path.parent for path in folder.glob("*/metrics.jsonl") if path.stat().st_size)


def expand_sweeps(paths: Sequence[Path]) -> list[Path]:
    """Return run directories, a sweep's replaced by those of its runs; a RunFolderError if none has metrics yet."""
    found: list[Path] = []
    for path in paths:
        runs = runs_of(path) if (path / "sweep.json").is_file() else [path]
        if not runs:
            raise RunFolderError("{folder}: no run of this sweep has metrics yet.", folder=path)
        found += runs
    return found
