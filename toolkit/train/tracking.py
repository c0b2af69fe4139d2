"""What a run hands to its trackers, and the report that it makes of itself in a process of its own."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from toolkit import children
from toolkit.config.load import to_dict, to_plain
from toolkit.config.schema import RunConfig, leaves
from toolkit.messages import Stopped, current_language, say, tr, warn
from toolkit.report.run import PAGE
from toolkit.track.backends import ANSWERS, FAILED, FINISHED, SAMPLES, STOPPED
from toolkit.track.metrics import is_evaluation, metric_values
from toolkit.track.queue import Trackers
from toolkit.train.task import FitResult, RunContext

PATIENCE_S = 60.0
"""Seconds that the end of a run waits for its report."""
_LONGEST_S = 600
"""Seconds after which a report ends itself, whoever started it, and whether that is still there or not."""
_LOG = "report.log"
_CODE = (
    "import os, signal, sys; os.nice(10); signal.alarm(int(sys.argv[1]))\n"
    "from toolkit.cli import main; sys.exit(main(sys.argv[2:]))"
)


class AutomaticReport:
    """Makes RUN/report.html during a run and at its end, which waits for it; `environ` is no rank's. Rank 0 only."""

    def __init__(self, folder: Path, environ: Mapping[str, str], patience_s: float = PATIENCE_S) -> None:
        self.folder, self.environ, self.patience_s = folder, environ, patience_s
        self._process: subprocess.Popen[bytes] | None = None

    def begin(self) -> None:
        """Begin to make it, unless the one before is not ready yet."""
        if self._process is None or self._process.poll() is not None:
            with suppress(OSError):  # reported at the end, if it is so then too
                self._process = self._start()

    def finish(self) -> None:
        """Make it a last time, and say where it is; or that it could not be made, and how to make it."""
        reason = ""
        try:
            self._end()
            self._process = self._start()
            if code := self._process.wait(self.patience_s):
                text = (self.folder / "logs" / _LOG).read_text(encoding="utf-8", errors="replace")
                lines = [line for line in text.splitlines() if line.strip()]
                reason = lines[-1] if lines else tr("exit code {code}", code=code)
        except subprocess.TimeoutExpired:
            reason = tr("it is not ready after {seconds} s", seconds=f"{self.patience_s:g}")
        except OSError as error:
            reason = error.strerror or str(error)
        finally:
            self._end()
        if not reason:
            say("The report: {file}", file=self.folder / PAGE)
            return
        warn(
            "the report could not be made: {reason}. The run itself is complete; to make the report:  toolkit report "
            "{folder}",
            reason=reason.rstrip("."),
            folder=self.folder,
        )

    def _start(self) -> subprocess.Popen[bytes]:
        package = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(filter(None, (package, self.environ.get("PYTHONPATH", ""))))
        words = ["report", str(self.folder), f"language={current_language()}"]
        with open(self.folder / "logs" / _LOG, "wb") as log:
            return children.start(
                [sys.executable, "-c", _CODE, str(_LONGEST_S), *words],
                env={**self.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def _end(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()


def trackers_of(cfg: RunConfig) -> Trackers:
    """Return a run's trackers, not yet begun. It waits for them, while ranks wait in a collective, for a quarter of
    `distributed.timeout_s` at most; the report may take half of it.
    """
    return Trackers(min(cfg.track.patience_s, cfg.distributed.timeout_s / 4))


@contextmanager
def tracking(run: RunContext, data: Mapping[str, Any]) -> Iterator[None]:
    """Begin the trackers on rank 0, with config, `data`, commit and versions as hyperparameters; tell them the end."""
    trackers = run.trackers
    if run.ranks.rank == 0 and run.cfg.track.enabled:
        track, environment = to_plain(run.cfg.track), json.loads((run.folder / "environment.json").read_text("utf-8"))
        hyperparameters = {
            **dict(leaves(to_dict(run.cfg))),
            **{f"data_summary.{key}": value for key, value in leaves(dict(data))},
            **{f"environment.{key}": value for key, value in leaves(environment)},
            "commit": environment["commit"],
        }
        settings = {name: track[name] for name in run.cfg.track.enabled}
        trackers.begin(run.folder, settings, hyperparameters, run.start.step)
    try:
        yield
    except BaseException as error:
        trackers.end(STOPPED if isinstance(error, Stopped) else FAILED)
        raise
    trackers.end(FINISHED)


def log_answers(run: RunContext, step: int) -> None:
    """Hand on what the model answered at an evaluation: the lines of a file."""
    if not run.trackers.is_on:
        return
    # The file may be cut off: a disk that is full has been reported, and is no reason to end a run.
    with (
        suppress(OSError, ValueError),
        (run.folder / "evaluations" / f"step-{step}.jsonl").open(encoding="utf-8") as lines,
    ):
        run.trackers.answers(step, ANSWERS, [json.loads(line) for line in lines])


def log_summary(run: RunContext, result: FitResult, samples: list[dict[str, str]]) -> None:
    """Hand on the last answers (samples.jsonl), and figures of the whole run as transformers has them."""
    if not run.trackers.is_on:
        return
    seconds = max(result.steps_s, 1e-9)
    values = {
        "train_runtime": result.steps_s,
        "train_steps_per_second": result.steps / seconds,
        "train_samples_per_second": result.steps * run.cfg.batch.global_size / seconds,
        "train_loss": _mean_loss(run),
    }
    run.trackers.answers(run.total_steps, SAMPLES, samples)
    run.trackers.summary(run.total_steps, values)


def _mean_loss(run: RunContext) -> float:
    """Return the mean over the trained tokens (or samples) of the run, from metrics.jsonl."""
    total = tokens = before = 0.0
    with suppress(OSError, ValueError, KeyError), (run.folder / "metrics.jsonl").open(encoding="utf-8") as lines:
        for line in lines:
            row = metric_values(json.loads(line))
            if is_evaluation(row):
                continue
            count = row["trained_tokens"] if "trained_tokens" in row else row["samples"]
            since, before = count - before, count
            if math.isfinite(row["loss"]):
                total += row["loss"] * since
                tokens += since
    return total / tokens if tokens else math.nan
