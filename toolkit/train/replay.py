"""A step of a run done again (`toolkit replay`): which checkpoint it begins at, and what is shown of it."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path

from toolkit.checkpoint import directory
from toolkit.config import files
from toolkit.launch.environment import Ranks
from toolkit.messages import ConfigError, tr
from toolkit.terminal import text_table
from toolkit.train import run_dir, step as steps
from toolkit.train.step import Samples, StepResult

_SHOWN = 20
"""Micro-batches of the step that are printed; the file has all."""


def replay_words(run: Path, step: int, ranks: Ranks) -> list[str]:
    """Return the overrides of a run that does the steps of another one up to `step` again: the same config, from its
    newest checkpoint before that step, in a directory of its own. ConfigError where that cannot be the same.
    """
    files.check_directory(run)
    if not (run / "config.yaml").is_file():
        raise ConfigError("{folder} is no run directory: it has no config.yaml.", folder=run)
    found = directory.published_checkpoints(run / "checkpoints")
    checkpoint = next((path for path in found if directory.step_of(path) < step), None)
    if checkpoint is not None:
        before = directory.read_run_state(checkpoint).world_size
        if before != ranks.world_size:
            raise ConfigError(
                "{checkpoint} was saved by {before} ranks, and here are {now}, which round differently. Start as many: "
                "deepspeed --num_gpus {before} --module toolkit replay {run} step={step}",
                checkpoint=checkpoint,
                before=before,
                now=ranks.world_size,
                run=run,
                step=step,
            )
    unsaved = ("checkpoint.every=0", "checkpoint.minutes=0", "checkpoint.at_end=false")
    once = ("train.rehearse=false", "train.on_bad_step=skip", "report.enabled=false", "track=jsonl", "plan.auto=false")
    settled = ("run.max_restarts=0", "run.deadline=", "deepspeed_json=")  # what a JSON said is in the config
    return [
        f"recipe={run / 'config.yaml'}",
        f"run.dir={run / 'replays' / f'step-{step}'}",
        "run.name=",
        f"resume={checkpoint or run_dir.NEVER}",
        *unsaved,
        "checkpoint.export=false",
        *once,
        *settled,
    ]


def step_lines(
    file: Path, step: int, results: Sequence[StepResult], recorded: Path, samples: Callable[[], Samples]
) -> list[str]:
    """Write the samples of the last of some steps with their losses; return what is printed. A collective. `recorded`:
    metrics.jsonl of the run whose steps these are.
    """
    last = results[-1]
    head = {"step": step, "what": "replay", "text": f"loss {last.loss}, gradient norm {last.grad_norm}"}
    found, reason = steps.record_samples(file, head, last, samples)
    places = dict.fromkeys((row["rank"], row["micro_batch"], row["loss"]) for row in found)
    rows = [[str(rank), str(place), f"{loss:.6f}"] for rank, place, loss in places]
    lines = [
        tr("Step {step}: loss {loss}, gradient norm {norm}.", step=step, loss=last.loss, norm=last.grad_norm),
        _compared(step, results, recorded),
        *text_table([tr("rank"), tr("micro-batch"), tr("loss")], rows[:_SHOWN]),
    ]
    if reason:
        return [*lines, tr("{file} cannot be written: {reason}.", file=file, reason=reason.strip(" ()"))]
    return [*lines, tr("Its samples, the highest loss first:  toolkit show {file}", file=file)]


def _compared(step: int, results: Sequence[StepResult], recorded: Path) -> str:
    """Compare with the row of metrics.jsonl, which is a mean over the steps since the one before it."""
    rows = [row for row in run_dir.read_rows(recorded) if "loss" in row]
    before, row = 0, None
    for one in rows:
        if int(one["step"]) >= step:
            row = one
            break
        before = int(one["step"])
    since = results[len(results) - (step - before) :] if step - before <= len(results) else []
    if row is None or int(row["step"]) != step or not since:
        return tr("metrics.jsonl has no row that ends with this step and begins after the checkpoint.")
    finite = [result for result in since if math.isfinite(result.loss)]
    mean = sum(result.loss * result.count for result in finite) / sum(result.count for result in finite)
    if mean == row["loss"]:
        return tr("The loss of steps {first} to {last} equals that in metrics.jsonl.", first=before + 1, last=step)
    return tr(
        "The loss of steps {first} to {last} is {mean}, and {loss} in metrics.jsonl: not the same computation. Compare "
        "environment.json of the two runs.",
        first=before + 1,
        last=step,
        mean=mean,
        loss=row["loss"],
    )
