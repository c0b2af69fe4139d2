"""What a run sends to its trackers (wandb, TensorBoard, …): config, data, metrics, answers, figures of the run."""

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
    """Sends a run's records from rank 0 to the child process that feeds its trackers. Rank 0 waits for them at most a
    quarter of `distributed.timeout_s`, as the other ranks wait in a collective, and the report may take half of it.
    """

    def __init__(self, cfg: RunConfig) -> None:
        self.trackers = queue.Trackers(min(cfg.track.patience_s, cfg.distributed.timeout_s / 4))

    def at_begin(self, run: "RunContext", task: "Task") -> None:
        """Start the trackers on rank 0, with config, data, commit and versions as hyperparameters."""
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
        """Wait for the trackers to answer, so that what is wrong with one is reported before the first step."""
        process_group.on_rank0(self.trackers.wait_begun)

    def at_row(self, row: Mapping[str, object]) -> None:
        """Send a row of metrics.jsonl."""
        self.trackers.row(row)

    def at_rewind(self, step: int) -> None:
        """Let the trackers drop the rows of steps that are repeated."""
        self.trackers.back_to(step)

    def at_evaluation(self, step: int, figures: Mapping[str, float], seconds: float) -> None:
        """Send the model's answers to validation samples, which the evaluation has written to a file."""
        if "eval_answers" not in figures or not self.trackers.is_on:
            return
        # The file may be cut off: a full disk has been reported, and is no reason to end a run.
        with (
            suppress(OSError, ValueError),
            (self.run.folder / "evaluations" / f"step-{step}.jsonl").open(encoding="utf-8") as lines,
        ):
            self.trackers.answers(step, backends.ANSWERS, [json.loads(line) for line in lines])

    def at_end(self, result: "FitResult", answers: list[dict[str, str]]) -> None:
        """Send the answers to `evaluate.prompts`, and figures of the whole run under transformers' names."""
        if not self.trackers.is_on:
            return
        seconds = max(result.steps_s, 1e-9)  # 0 if a checkpoint of the last step was resumed
        values = {
            "train_runtime": result.steps_s,
            "train_steps_per_second": result.steps / seconds,
            "train_samples_per_second": result.steps * self.run.cfg.batch.global_size / seconds,
            "train_loss": _mean_loss(self.run),
        }
        self.trackers.answers(result.state.step, backends.SAMPLES, answers)
        self.trackers.summary(result.state.step, values)

    def at_exit(self, error: BaseException | None) -> None:
        """Send how the run has ended; one that stopped where the config asked for it has finished."""
        if error is None or (isinstance(error, Stopped) and not error.exit_code):
            self.trackers.end(backends.FINISHED)
        else:
            self.trackers.end(backends.STOPPED if isinstance(error, Stopped) else backends.FAILED)


def _mean_loss(run: "RunContext") -> float:
    """Return the mean loss over the trained tokens (or samples, pairs) of the run, from metrics.jsonl; NaN if there is
    no finite one. Each row has the mean loss since the row before, and what that is the mean of: pairs since the row
    before, but tokens or samples since the run's start. A run that began from another run's checkpoint continues that
    one's counts: for its first row they are computed from its speed.
    """
    counted, _ = data_unit(run.cfg)
    starts = run_dir.read_rows(run.folder / "logs" / run_dir.STARTS, OSError)
    first_step = starts[0]["from_step"] if starts else 0  # above 0: that of another run's checkpoint
    loss_sum = weight_sum = 0.0
    count_before = None if first_step else 0.0
    with suppress(OSError, ValueError, KeyError), (run.folder / "metrics.jsonl").open(encoding="utf-8") as lines:
        for line in lines:
            row = metrics.metric_values(json.loads(line))
            if metrics.is_evaluation(row):
                continue
            unit = "trained_tokens" if "trained_tokens" in row else "samples"
            if count_before is None:
                count_before = row[unit] - row[f"{unit}_per_s"] * row["step_s"] * (row["step"] - first_step)
            weight, count_before = row[unit] - count_before, row[unit]
            if counted != unit:
                weight = row.get(counted, weight)
            if math.isfinite(row["loss"]):
                loss_sum += row["loss"] * weight
                weight_sum += weight
    return loss_sum / weight_sum if weight_sum else math.nan
