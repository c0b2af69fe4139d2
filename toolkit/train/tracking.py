"""What a run sends to its trackers: config and data, rows, answers, and figures of the whole run."""

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

from toolkit.config.dotted_keys import leaves
from toolkit.config.load import to_dict, to_plain
from toolkit.config.objective import data_unit
from toolkit.config.schema import RunConfig
from toolkit.distributed import process_group
from toolkit.messages import Stopped
from toolkit.track import backends, metrics, queue
from toolkit.train import run_dir
from toolkit.train.hooks import Hook

if TYPE_CHECKING:
    from toolkit.train.task import FitResult, RunContext, Task


class Tracking(Hook):
    """A run's trackers, which rank 0 begins. It waits for them, while ranks wait in a collective, for a quarter of
    `distributed.timeout_s` at most; the report may take half of it.
    """

    def __init__(self, cfg: RunConfig) -> None:
        self.trackers = queue.Trackers(min(cfg.track.patience_s, cfg.distributed.timeout_s / 4))

    def at_begin(self, run: "RunContext", task: "Task") -> None:
        """Begin, with config, data, commit and versions as hyperparameters."""
        self.run = run
        if run.ranks.rank:
            return
        track, environment = to_plain(run.cfg.track), json.loads((run.folder / "environment.json").read_text("utf-8"))
        hyperparameters = {
            **dict(leaves(to_dict(run.cfg))),
            **{f"data_summary.{key}": value for key, value in leaves(task.data_summary())},
            **{f"environment.{key}": value for key, value in leaves(environment)},
            "commit": environment["commit"],
        }
        settings = {name: track[name] for name in run.cfg.track.enabled}
        self.trackers.begin(run.folder, settings, hyperparameters, run.start.step)

    def at_dry_run(self) -> None:
        """Wait a while for their answers, so that what is wrong with one is reported before the first step."""
        process_group.on_rank0(self.trackers.wait_begun)

    def at_row(self, row: Mapping[str, object]) -> None:
        """Send a row."""
        self.trackers.row(row)

    def at_rewind(self, step: int) -> None:
        """Let them drop the rows of steps that are done again."""
        self.trackers.back_to(step)

    def at_evaluation(self, step: int, figures: Mapping[str, float], seconds: float) -> None:
        """Send what the model answered: the lines of a file."""
        if "eval_answers" not in figures or not self.trackers.is_on:
            return
        # The file may be cut off: a disk that is full has been reported, and is no reason to end a run.
        with (
            suppress(OSError, ValueError),
            (self.run.folder / "evaluations" / f"step-{step}.jsonl").open(encoding="utf-8") as lines,
        ):
            self.trackers.answers(step, backends.ANSWERS, [json.loads(line) for line in lines])

    def at_end(self, result: "FitResult", samples: list[dict[str, str]]) -> None:
        """Send the last answers (samples.jsonl), and figures of the whole run as transformers has them."""
        if not self.trackers.is_on:
            return
        seconds = max(result.steps_s, 1e-9)
        values = {
            "train_runtime": result.steps_s,
            "train_steps_per_second": result.steps / seconds,
            "train_samples_per_second": result.steps * self.run.cfg.batch.global_size / seconds,
            "train_loss": _mean_loss(self.run),
        }
        self.trackers.answers(result.state.step, backends.SAMPLES, samples)
        self.trackers.summary(result.state.step, values)

    def at_exit(self, error: BaseException | None) -> None:
        """Report how the run has ended: one that was stopped where it was meant to be has finished."""
        if error is None or (isinstance(error, Stopped) and not error.exit_code):
            self.trackers.end(backends.FINISHED)
        else:
            self.trackers.end(backends.STOPPED if isinstance(error, Stopped) else backends.FAILED)


def _mean_loss(run: "RunContext") -> float:
    """Return the mean over the trained tokens (samples, pairs) of the run, from metrics.jsonl."""
    counted, _ = data_unit(run.cfg)
    [begun, *_] = run_dir.read_rows(run.folder / "logs" / run_dir.STARTS, OSError) or [{"from_step": 0}]
    total = tokens = 0.0
    before = None if begun["from_step"] else 0.0
    with suppress(OSError, ValueError, KeyError), (run.folder / "metrics.jsonl").open(encoding="utf-8") as lines:
        for line in lines:
            row = metrics.metric_values(json.loads(line))
            if metrics.is_evaluation(row):
                continue
            count = row["trained_tokens"] if "trained_tokens" in row else row["samples"]
            if before is None:  # another run's checkpoint brought its count along: only the steps of this row are new
                pace = row["trained_tokens_per_s" if "trained_tokens" in row else "samples_per_s"]
                before = count - pace * row["step_s"] * (row["step"] - begun["from_step"])
            since, before = row.get(counted, count - before), count  # pairs are those of a row, the others of the run
            if math.isfinite(row["loss"]):
                total += row["loss"] * since
                tokens += since
    return total / tokens if tokens else math.nan
