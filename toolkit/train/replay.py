"""A step of a run done again (`toolkit replay`): which checkpoint it begins at, and what is shown of it."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from toolkit.checkpoint import directory
from toolkit.config import files
from toolkit.distributed import watchdog
from toolkit.launch.environment import Ranks
from toolkit.messages import ConfigError, say, tr
from toolkit.terminal import text_table
from toolkit.train import bad_steps, deadline, run_dir
from toolkit.train.loop import TrainLoop
from toolkit.train.step import Samples, StepResult
from toolkit.train.trainer import Trainer

_SHOWN = 20
"""Micro-batches of the step that are printed; the file has all."""


def replay_words(run: Path, step: int, ranks: Ranks) -> list[str]:
    """Return the overrides of a run that does the steps of another one up to `step` again: the same config, from its
    newest checkpoint before that step, in a directory of its own. ConfigError where that cannot be the same.
    """
    files.check_directory(run)
    if not (run / "config.yaml").is_file():
        raise ConfigError("{folder} is no run directory: it has no config.yaml.", folder=run)
    checkpoints = directory.published_checkpoints(run / "checkpoints")
    checkpoint = next((path for path in checkpoints if directory.step_of(path) < step), None)
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


def replay(trainer: Trainer, step: int, recorded: Path) -> Path:
    """Do the steps from a run's start to one again, and show that one beside what the run recorded of it in its
    metrics.jsonl; return the run directory, which holds its samples. A collective.
    """
    return trainer.work_in_group(lambda: _replay_in_group(trainer, step, recorded))


def _replay_in_group(trainer: Trainer, step: int, recorded: Path) -> Path:
    """Do the steps up to `step` in the process group, and print how they compare with the file `recorded`."""
    trainer.build()
    run, task = trainer.run, trainer.task
    try:
        if step > run.total_steps:
            raise ConfigError("step = {step}: the run has {total} steps.", step=step, total=run.total_steps)
        loop = TrainLoop(task, run, trainer.measure_baseline(), trainer.progress)
        results = _do_steps(loop, step, deadline.recorded(recorded.parent))
    finally:
        trainer.progress.close()
        run.watchdog.stop()
    file = run.folder / f"step-{step}.jsonl"
    lines = step_lines(file, step, results, recorded, lambda: task.samples_at(loop.step_position))
    if run.ranks.rank == 0:
        say("\n".join(lines))
        run_dir.mark_done(run.folder, {"replayed_step": step, "loss": results[-1].loss})
    run_dir.release_run_dir()
    return run.folder


def _do_steps(loop: TrainLoop, step: int, ends: Mapping[int, int]) -> list[StepResult]:
    """Do the steps up to one, without logging, evaluating and saving; return what each did. `ends`: of a run with a
    deadline, the step to end with, by the step in which that was decided.
    """
    end = max((decision for decision in ends.items() if decision[0] <= loop.step), default=(0, loop.total_steps))[1]
    loop.end_at(end)
    loop.engine.train()
    loop.progress.start()
    results = []
    while loop.step < step:
        results.append(loop.compute_step()[0])
        loop.end_at(end := ends.get(loop.step, end))
        loop.guard.check()
    loop.watchdog.enter(watchdog.END, loop.step)
    return results


def step_lines(
    file: Path, step: int, results: Sequence[StepResult], recorded: Path, samples: Callable[[], Samples]
) -> list[str]:
    """Write the samples of the last of some steps with their losses; return what is printed. A collective. `recorded`:
    metrics.jsonl of the run whose steps these are.
    """
    last = results[-1]
    head = {"step": step, "what": "replay", "text": f"loss {last.loss}, gradient norm {last.grad_norm}"}
    sample_rows, reason = bad_steps.record_samples(file, head, last, samples)
    micro_batches = dict.fromkeys((row["rank"], row["micro_batch"], row["loss"]) for row in sample_rows)
    rows = [[str(rank), str(number), f"{loss:.6f}"] for rank, number, loss in micro_batches]
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
    row = next((row for row in rows if int(row["step"]) >= step), None)
    before = max((int(row["step"]) for row in rows if int(row["step"]) < step), default=0)
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
