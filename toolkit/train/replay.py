"""A step of a run computed again (`toolkit replay`): from which checkpoint, and what is printed and written of it."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from toolkit.checkpoint import directory, intact
from toolkit.config import files
from toolkit.distributed import watchdog
from toolkit.launch.environment import Ranks
from toolkit.messages import ConfigError, say, tr
from toolkit.tables import text_table
from toolkit.train import bad_steps, deadline, run_dir, run_lock
from toolkit.train.loop import TrainLoop
from toolkit.train.step import Samples, StepResult
from toolkit.train.trainer import Trainer

_MOST_PRINTED = 20
"""Micro-batches of the step that are printed; the file has all."""


def replay_overrides(run: Path, step: int, ranks: Ranks) -> list[str]:
    """Return the command-line overrides of a run that repeats `run` up to `step`: the same config, from its newest
    checkpoint before that step, in a directory of its own. ConfigError if `ranks` are not as many as saved it.
    """
    files.check_directory(run)
    if not (run / "config.yaml").is_file():
        raise ConfigError("{folder} is no run directory: it has no config.yaml.", folder=run)
    checkpoints = directory.published_checkpoints(run / "checkpoints")
    checkpoint = next((path for path in checkpoints if directory.step_of(path) < step), None)
    if checkpoint is not None:
        saved_world_size = intact.read_run_state(checkpoint).world_size
        if saved_world_size != ranks.world_size:
            raise ConfigError(
                "{checkpoint} was saved by {before} ranks, and here are {now}, which round differently. Start as many: "
                "deepspeed --num_gpus {before} --module toolkit replay {run} step={step}",
                checkpoint=checkpoint,
                before=saved_world_size,
                now=ranks.world_size,
                run=run,
                step=step,
            )
    no_saves = ("checkpoint.every=0", "checkpoint.minutes=0", "checkpoint.at_end=false", "checkpoint.export=false")
    steps_alone = ("train.rehearse=false", "report.enabled=false", "track=jsonl", "plan.auto=false")
    no_stops = ("train.on_bad_step=skip", "run.max_restarts=0", "run.deadline=")
    return [
        f"recipe={run / 'config.yaml'}",
        f"run.dir={run / 'replays' / f'step-{step}'}",
        "run.name=",
        f"resume={checkpoint or run_dir.NEVER}",
        *no_saves,
        *steps_alone,
        *no_stops,
        "deepspeed_json=",  # what the JSON said is in the config
    ]


def replay(trainer: Trainer, step: int, metrics_file: Path) -> Path:
    """Train up to `step` and print that step beside what the original run recorded in its `metrics_file`
    (metrics.jsonl); return the replay's run directory, which holds the step's samples. A collective.
    """
    with trainer.in_process_group():
        return _replay_in_group(trainer, step, metrics_file)


def _replay_in_group(trainer: Trainer, step: int, metrics_file: Path) -> Path:
    """Do what `replay` says, with the process group initialized."""
    trainer.build()
    run, task = trainer.run, trainer.task
    try:
        if step > run.total_steps:
            raise ConfigError("step = {step}: the run has {total} steps.", step=step, total=run.total_steps)
        loop = TrainLoop(task, run, trainer.measure_baseline(), trainer.progress)
        results = _train_up_to(loop, step, deadline.recorded_last_steps(metrics_file.parent))
    finally:
        trainer.progress.close()
        run.watchdog.stop()
    file = run.folder / f"step-{step}.jsonl"
    lines = step_lines(file, step, results, metrics_file, lambda: task.describe_samples_at(loop.step_position))
    if run.ranks.rank == 0:
        say("\n".join(lines))
        run_dir.mark_done(run.folder, {"replayed_step": step, "loss": results[-1].loss})
    run_lock.release_run_dir()
    return run.folder


def _train_up_to(loop: TrainLoop, step: int, last_steps: Mapping[int, int]) -> list[StepResult]:
    """Train up to and including `step`, without logging, evaluating and saving; return each step's result.
    `last_steps`: if the original run had a deadline, its decisions: step at which one was taken -> the run's last step.
    The learning-rate schedule ends with the last step, so they are taken again at the same steps.
    """
    decided_before = [decided_at for decided_at in last_steps if decided_at <= loop.step]
    last_step = last_steps[max(decided_before)] if decided_before else loop.total_steps
    loop.end_at(last_step)
    loop.engine.train()
    loop.progress.start()
    results = []
    while loop.step < step:
        results.append(loop.compute_step()[0])
        last_step = last_steps.get(loop.step, last_step)
        loop.end_at(last_step)
        loop.guard.check()
    loop.watchdog.enter(watchdog.END, loop.step)
    return results


def step_lines(
    file: Path, step: int, results: Sequence[StepResult], metrics_file: Path, samples: Callable[[], Samples]
) -> list[str]:
    """Write the samples and losses of `step`, the last of `results`, to `file`; return the lines to print: its loss,
    the comparison with the original run's `metrics_file`, a table of micro-batches. A collective.
    """
    last = results[-1]
    head = {"step": step, "what": "replay", "text": f"loss {last.loss}, gradient norm {last.grad_norm}"}
    sample_rows, reason = bad_steps.record_samples(file, head, last, samples)
    micro_batches = dict.fromkeys((row["rank"], row["micro_batch"], row["loss"]) for row in sample_rows)
    rows = [[str(rank), str(number), f"{loss:.6f}"] for rank, number, loss in micro_batches]
    lines = [
        tr("Step {step}: loss {loss}, gradient norm {norm}.", step=step, loss=last.loss, norm=last.grad_norm),
        _compare_loss(step, results, metrics_file),
        *text_table([tr("rank"), tr("micro-batch"), tr("loss")], rows[:_MOST_PRINTED]),
    ]
    if reason:
        return [*lines, tr("{file} cannot be written: {reason}.", file=file, reason=reason)]
    return [*lines, tr("Its samples, the highest loss first:  toolkit show {file}", file=file)]


def _compare_loss(step: int, results: Sequence[StepResult], metrics_file: Path) -> str:
    """Return a sentence on whether the replayed loss equals the one that metrics.jsonl has for `step`. A row's loss is
    the mean over the steps since the row before, so the same mean is taken of `results`, which end with `step`.
    """
    losses = {int(row["step"]): row["loss"] for row in run_dir.read_rows(metrics_file) if "loss" in row}
    before = max((row_step for row_step in losses if row_step < step), default=0)
    num_steps = step - before
    if step not in losses or num_steps > len(results):
        return tr("metrics.jsonl has no row that ends with this step and begins after the checkpoint.")
    finite = [result for result in results[-num_steps:] if math.isfinite(result.loss)]
    if not finite:
        return tr(
            "No loss of steps {first} to {last} is finite: there is no mean to compare.", first=before + 1, last=step
        )
    mean = sum(result.loss * result.counts.losses for result in finite) / sum(result.counts.losses for result in finite)
    if mean == losses[step]:
        return tr("The loss of steps {first} to {last} equals that in metrics.jsonl.", first=before + 1, last=step)
    return tr(
        "The loss of steps {first} to {last} is {mean}, and {loss} in metrics.jsonl: not the same computation. Compare "
        "environment.json of the two runs.",
        first=before + 1,
        last=step,
        mean=mean,
        loss=losses[step],
    )
