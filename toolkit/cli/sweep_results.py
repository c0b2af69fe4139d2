"""What the runs of a sweep came to, read from their metrics.jsonl, and the table of it."""

import math
import statistics
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from toolkit.config.schema import EVAL_LOSS
from toolkit.launch.sweeps import DIVERGED, DONE, FAILED, RUNNING, STOPPED, Job, Sweep
from toolkit.messages import tr
from toolkit.report.history import json_lines
from toolkit.terminal import text_table

_LESS_IS_BETTER = ("loss", "perplexity")


@dataclass(frozen=True, slots=True)
class Result:
    """Numbers of one run; NaN where there are none."""

    loss: float
    """Training loss of the last step in metrics.jsonl."""
    best: float
    """The best value of the metric."""
    tokens_per_s: float
    """Median over the steps in metrics.jsonl."""


def is_less_better(metric: str) -> bool:
    """Whether a smaller value of a name in metrics.jsonl is the better one."""
    return metric.endswith(_LESS_IS_BETTER)


def read_result(folder: Path, metric: str = EVAL_LOSS) -> Result:
    """Read the numbers of a run.

    Args:
        folder: of the run; need not be there.
        metric: whose best value is wanted.
    """
    rows = []
    with suppress(OSError):
        rows = [row for row in json_lines(folder / "metrics.jsonl") if row is not None]
    losses, speeds, values = (
        [float(row[name]) for row in rows if isinstance(row.get(name), (int, float))]
        for name in ("loss", "tokens_per_s", metric)
    )
    numbers = [value for value in values if math.isfinite(value)]
    best = (min if is_less_better(metric) else max)(numbers, default=math.nan)
    return Result(losses[-1] if losses else math.nan, best, statistics.median(speeds) if speeds else math.nan)


def lines(sweep: Sweep, jobs: Sequence[Job], metric: str = EVAL_LOSS) -> list[str]:
    """Return the table of all jobs, and below it the first error of each that failed."""
    heads = (tr("overrides"), tr("state"), tr("exit code"), tr("loss"), tr("best {metric}", metric=metric))
    rows, errors = [], []
    for job in jobs:
        found = read_result(sweep.run_folder(job), metric)
        code = "" if job.exit_code is None else str(job.exit_code)
        speed = _number(found.tokens_per_s, ".0f")
        numbers = (_number(found.loss, ".4f"), _number(found.best, ".4f"), speed)
        rows.append((" ".join(job.words) or job.name, state_name(job.state), code, *numbers, job.name))
        if job.state in (FAILED, DIVERGED) and (reason := _first_error(sweep.run_folder(job))):
            errors.append(f"  {job.name}: {reason}")
    shown = text_table((*heads, tr("tokens/s"), tr("folder")), rows)
    return [*shown, *([tr("Errors:"), *errors] if errors else [])]


def state_name(state: str) -> str:
    """Return a state in the user's language."""
    names = {
        DONE: tr("done"),
        FAILED: tr("failed"),
        DIVERGED: tr("diverged"),
        STOPPED: tr("stopped"),
        RUNNING: tr("running"),
    }
    return names.get(state, tr("waiting"))


def _first_error(folder: Path) -> str:
    """Return what the run's FAILED marker says, its first lines in one."""
    with suppress(OSError):
        text = (folder / "FAILED").read_text(encoding="utf-8", errors="replace")
        return " ".join(text.split())[:200]
    return ""


def _number(value: float, form: str) -> str:
    return "-" if math.isnan(value) else format(value, form)
