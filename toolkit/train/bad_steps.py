"""A bad step (NaN, Inf or a spike): its samples in a file, and the checkpoint that the run rewinds to."""

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from toolkit import disk
from toolkit.checkpoint import directory, intact
from toolkit.distributed.process_group import gather, on_rank0
from toolkit.messages import Diverged, tr, warn
from toolkit.train import run_dir
from toolkit.train.checkpointer import Checkpointer
from toolkit.train.resume import resume_from
from toolkit.train.step import Anomaly, AnomalyKind, Samples, StepResult
from toolkit.train.task import RunContext

MOST_REWINDS = 3
"""Times that a run rewinds to one and the same checkpoint."""
_MOST_NAMED = 3
"""Samples that the warning of a bad step names."""


def warn_of_bad_step(
    logs: Path, step: int, anomaly: Anomaly, result: StepResult, samples: Callable[[], Samples]
) -> str:
    """Write a bad step's samples to `logs` and warn; return the warning's first sentence. A collective. The sentence
    names samples of the micro-batch with the highest loss; `samples`: see `record_samples`.
    """
    file = disk.unused_path(logs / f"bad-step-{step}.jsonl")
    head = {"step": step, "what": anomaly.kind.value, "text": anomaly.text()}
    rows, write_reason = record_samples(file, head, result, samples)
    worst = rows[0]
    of_worst = [row for row in rows if (row["rank"], row["micro_batch"]) == (worst["rank"], worst["micro_batch"])]
    named = [row["where"] for row in of_worst]
    what = tr(
        "step {step}: {what}; {which} rank {rank}, micro-batch {micro_batch}: {samples}",
        step=step,
        rank=worst["rank"],
        micro_batch=worst["micro_batch"],
        what=anomaly.text(),
        which=tr("it comes from") if anomaly.kind is AnomalyKind.loss else tr("the highest loss is that of"),
        samples=", ".join(named[:_MOST_NAMED]) + (", …" if len(named) > _MOST_NAMED else ""),
    )
    if write_reason:
        warn(
            "{what}. It did not change the weights. {file} cannot be written ({reason}).",
            what=what,
            file=file,
            reason=write_reason,
        )
    else:
        warn(
            "{what}. It did not change the weights. See the samples of this step:  toolkit show {file}",
            what=what,
            file=file,
        )
    return what


def record_samples(
    file: Path, head: Mapping[str, Any], result: StepResult, samples: Callable[[], Samples]
) -> tuple[list[dict[str, Any]], str]:
    """Write JSON lines to `file`: `head` (with "step"), then a row for each sample of the step, of the micro-batch with
    the highest loss first. Return these rows, and why writing failed, "" if it did not. A collective. `samples`: a
    function that returns the samples of all ranks; called on rank 0 only.
    """
    sums_and_counts = zip(result.micro_losses.tolist(), result.micro_counts, strict=True)
    means = [loss_sum / count if count else 0.0 for loss_sum, count in sums_and_counts]
    losses = gather(means)  # by rank, then by micro-batch

    def write() -> tuple[list[dict[str, Any]], str]:
        rows = [
            {"step": head["step"], "rank": rank, "micro_batch": number, "loss": losses[rank][number], **sample}
            for rank, micro_batches in enumerate(samples())
            for number, micro_batch in enumerate(micro_batches)
            for sample in micro_batch
        ]
        # NaN and Inf first, then the highest loss.
        rows.sort(key=lambda row: row["loss"] if math.isfinite(row["loss"]) else math.inf, reverse=True)
        try:
            with file.open("w", encoding="utf-8") as handle:
                handle.write(json.dumps(head) + "\n")
                for row in rows:
                    loss = row["loss"] if math.isfinite(row["loss"]) else str(row["loss"])  # JSON has no NaN
                    handle.write(json.dumps(row | {"loss": loss}, ensure_ascii=False) + "\n")
        except OSError as error:  # a full disk is reported by what has to be saved
            file.unlink(missing_ok=True)
            return rows, str(error.strerror)
        return rows, ""

    return on_rank0(write)


def stopped_error(checkpointer: Checkpointer, what: str) -> Diverged:
    """Return the error that ends a run with `train.on_bad_step=stop`. `what`: the bad step, for the message."""
    return Diverged(
        "{what}. train.on_bad_step=skip continues without such steps, rewind resumes the last checkpoint and "
        "skips their data. The last checkpoint is {checkpoint}.",
        what=what,
        checkpoint=checkpointer.newest or tr("none"),
    )


def rewind(run: RunContext, current: directory.RunState, rewinds: Counter[Path], what: str) -> directory.RunState:
    """Load the weights and optimizer of a checkpoint, and cut metrics.jsonl to what it held then. A collective.

    Args:
        run: The run.
        current: Its state at the bad step, whose counts of bad steps and rewinds are kept.
        rewinds: Rewinds to each checkpoint so far; counted here.
        what: The bad step, for messages.

    Returns:
        The state to continue from.

    Raises:
        Diverged: If there is no checkpoint, or none that helps.
    """
    checkpoint = _choose_checkpoint(run.checkpointer, rewinds, what)
    saved = intact.read_run_state(checkpoint)
    state = replace(saved, config=run.start.config, bad_steps=current.bad_steps, rewinds=current.rewinds + 1)
    is_of_run = checkpoint.parent.parent == run.folder  # else another run's, from which this one began
    on_rank0(lambda: run_dir.trim_metrics(run.folder, state.metrics_bytes if is_of_run else 0))
    resume_from(run.checkpointer, checkpoint, state, run.ranks, run.cfg)
    return state


def _choose_checkpoint(checkpointer: Checkpointer, rewinds: Counter[Path], what: str) -> Path:
    """Return the checkpoint to go back to, and count it in `rewinds`: the newest one; but if the run has gone back to
    it before, and no good step has followed it, the newest good one, and later ones are moved aside. Diverged if there
    is none, or MOST_REWINDS to it have not helped. `what`: the bad step, for the message. A collective.
    """
    good, checkpoint = checkpointer.good, checkpointer.newest
    was_tried = checkpoint is not None and rewinds[checkpoint] > 0
    if was_tried and good is not None and good != checkpoint:
        checkpoint = good  # the weights of the newest may be the cause
        on_rank0(lambda: intact.move_aside_after(good))
    if checkpoint is None:
        raise Diverged(
            "{what}; there is no checkpoint to go back to: set checkpoint.every or checkpoint.minutes.", what=what
        )
    rewinds[checkpoint] += 1
    if rewinds[checkpoint] > MOST_REWINDS:
        raise Diverged(
            "{what}; rewinding to {checkpoint} did not help ({count} times).",
            what=what,
            checkpoint=checkpoint,
            count=MOST_REWINDS,
        )
    return checkpoint
