"""The loop: steps, and when to log, evaluate, save and stop. What one step does stands in step.py."""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

from deepspeed import DeepSpeedEngine

from toolkit.checkpoint.run_state import RunState
from toolkit.config.schema import RunConfig
from toolkit.data.sampler import Position
from toolkit.distributed import signals
from toolkit.distributed.process_group import rank, world_size
from toolkit.distributed.watchdog import STEP, Watchdog
from toolkit.errors import CheckpointError, Diverged, Stopped
from toolkit.messages import tr
from toolkit.track.metrics import append_row
from toolkit.track.progress import Progress
from toolkit.train.checkpoint import Saver
from toolkit.train.meter import Meter
from toolkit.train.step import Batch, train_step


@dataclass(kw_only=True, slots=True)
class Job:
    """Everything that the loop needs, made by the cli."""

    cfg: RunConfig
    """The run's config."""
    engine: DeepSpeedEngine
    """The engine."""
    batches: Iterator[Batch]
    """This rank's micro-batches, `accumulation` of them per step, without end."""
    accumulation: int
    """Micro-batches of one rank per step."""
    steps_per_epoch: int
    """Optimizer steps per pass over the training data."""
    total_steps: int
    """Optimizer steps of the run."""
    folder: Path
    """The run folder."""
    evaluate: Callable[[], dict[str, float]] | None
    """Evaluates on all ranks: `eval_loss`, `eval_perplexity`, `eval_tokens`; None without validation data."""
    saver: Saver
    """Saves checkpoints."""
    start: RunState
    """Where the run begins, and what is the same in all its checkpoints."""
    position_after: Callable[[Position], Position]
    """Returns the place in the training data after the step that begins at a place."""
    watchdog: Watchdog
    """Notices what does not come to an end."""


@dataclass(kw_only=True, slots=True)
class Outcome:
    """What the loop achieved."""

    first_loss: float = math.nan
    """Training loss of the first step, nats per token."""
    last_loss: float = math.nan
    """Training loss since the last log line but one."""
    evaluations: list[dict[str, float]] = field(default_factory=list)
    """Each evaluation with its step."""
    trained_tokens: int = 0
    """Trained tokens in all."""
    skipped_steps: int = 0
    """Steps whose update was skipped for overflow."""
    checkpoint: Path | None = None
    """The last checkpoint."""


def train(job: Job, progress: Progress) -> Outcome:
    """Train. A collective; returns the same on every rank.

    Raises:
        Stopped: a signal came, or a file `stop`; a checkpoint was saved at the step boundary that all ranks agreed on.
        Diverged: the loss is no number, or too many steps in a row were skipped.
        CheckpointError: the last checkpoint cannot be saved.
    """
    cfg, engine, start = job.cfg, job.engine, job.start
    outcome = Outcome(evaluations=list(start.evaluations), checkpoint=job.saver.newest)
    outcome.first_loss = math.nan if start.first_loss is None else start.first_loss
    outcome.last_loss = math.nan if start.last_loss is None else start.last_loss
    meter = Meter(engine, start.trained_tokens)
    skips = SkipWatch(engine, cfg.train.max_skipped_steps, start.skips_in_a_row)
    place, stop_file = Position(start.epoch, start.row), StopFile(job.folder)
    engine.train()
    if job.evaluate and cfg.evaluate.at_start and not start.step:
        _evaluate(job, outcome, progress, step=0)
        meter = Meter(engine)
    signals.defer()
    for step in range(start.step + 1, job.total_steps + 1):
        lr = float(engine.get_lr()[0])
        window = list(islice(job.batches, job.accumulation))
        votes = (bool(signals.received()) or stop_file.is_there(), job.saver.is_proven())
        job.watchdog.enter(STEP, step, f"rows x tokens: {[tuple(batch['input_ids'].shape) for batch in window]}")
        result = train_step(engine, window, world_size(), votes)
        place = job.position_after(place)
        meter.add(result)
        skips.check(step)
        progress.advance()
        if result.votes[1] == world_size():
            _publish(job, meter, outcome)
        stops, last = result.votes[0] > 0, step == job.total_steps
        save = stops or _due(step, cfg.checkpoint.every) or (last and cfg.checkpoint.at_end) or _again(job, step)
        evaluate = job.evaluate is not None and (_due(step, cfg.evaluate.every) or last) and not stops
        if save or evaluate or last or step == 1 or step % cfg.train.log_every == 0:
            _log(job, meter, outcome, progress, step, lr)
        meter.pause()
        if evaluate:
            job.watchdog.enter("evaluation", step)
            _evaluate(job, outcome, progress, step)
        if save or last:
            job.watchdog.enter("checkpoint", step)
        if save:
            state = _state(job, meter, outcome, place, step, skips.in_a_row)
            job.saver.begin(state)
        if (stops and save) or last:
            job.saver.finish()
            outcome.checkpoint = job.saver.newest
            if save and job.saver.failed:
                raise CheckpointError(tr("the last checkpoint could not be saved; the reason is told above."))
        meter.resume()
        if stops:
            raise _stopped(job, outcome, step, stop_file)
    job.watchdog.enter("", job.total_steps)
    signals.act_at_once()
    outcome.trained_tokens, outcome.skipped_steps = meter.trained_tokens_so_far, engine.skipped_steps
    return outcome


class StopFile:
    """A file `stop` in the run folder, by which a run is stopped by hand where no signal can be sent.

    Args:
        folder: the run folder.
    """

    EVERY_S = 1.0

    def __init__(self, folder: Path) -> None:
        self.path, self.next = folder / "stop", 0.0
        self.found = False

    def is_there(self) -> bool:
        """Whether rank 0 sees the file; asked at most once a second, as the folder may be far away."""
        if rank() == 0 and not self.found and time.monotonic() >= self.next:
            self.next = time.monotonic() + self.EVERY_S
            self.found = self.path.exists()
        return self.found

    def remove(self) -> None:
        """Remove the file once it has been obeyed, or the run could never go on."""
        if self.found:
            self.path.unlink(missing_ok=True)


class SkipWatch:
    """Counts skipped steps in a row: DeepSpeed alone would go on for ever and exit 0 (measured on 0.19.8)."""

    def __init__(self, engine: DeepSpeedEngine, most: int, in_a_row: int = 0) -> None:
        """Start.

        Args:
            engine: whose `skipped_steps` is watched.
            most: skipped steps in a row that end the run.
            in_a_row: those just before.
        """
        self.engine, self.most = engine, most
        self.seen = engine.skipped_steps
        self.in_a_row = in_a_row

    def check(self, step: int) -> None:
        """Look at the step just done.

        Raises:
            Diverged: too many in a row.
        """
        self.in_a_row = self.in_a_row + 1 if self.engine.skipped_steps > self.seen else 0
        self.seen = self.engine.skipped_steps
        if self.in_a_row >= self.most:
            raise Diverged(
                tr(
                    "{count} steps in a row up to step {step} were skipped because gradients overflowed or were no "
                    "numbers: nothing is being learned. Lower optim.lr, or use precision=bf16 or precision=fp32.",
                    count=self.in_a_row,
                    step=step,
                )
            )


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _log(job: Job, meter: Meter, outcome: Outcome, progress: Progress, step: int, lr: float) -> None:
    row = meter.row(step, step / job.steps_per_epoch, lr)
    if rank() == 0:
        append_row(job.folder / "metrics.jsonl", dict(row))
    progress.show(row)
    if math.isnan(outcome.first_loss):
        outcome.first_loss = row["loss"]
    outcome.last_loss = row["loss"]
    # With fp16 and bf16 DeepSpeed skips such a step and SkipWatch counts it; in fp32 the weights are spoilt already.
    if not math.isfinite(row["loss"]) and not (job.engine.fp16_enabled() or job.engine.bfloat16_enabled()):
        raise Diverged(
            tr(
                "the loss became {loss} at or before step {step}. The last checkpoint before it is {checkpoint}. Lower "
                "optim.lr or train.gradient_clipping, or look for broken samples.",
                loss=row["loss"],
                step=step,
                checkpoint=outcome.checkpoint or tr("none"),
            )
        )


def _evaluate(job: Job, outcome: Outcome, progress: Progress, step: int) -> None:
    assert job.evaluate is not None
    row: dict[str, float] = {"step": step, **job.evaluate()}
    outcome.evaluations.append(row)
    if rank() == 0:
        append_row(job.folder / "metrics.jsonl", dict(row))
    progress.say(
        tr(
            "step {step}  validation loss {loss} nats/token, perplexity {perplexity} over {tokens} tokens",
            step=step,
            loss=f"{row['eval_loss']:.4f}",
            perplexity=f"{row['eval_perplexity']:.2f}",
            tokens=f"{int(row['eval_tokens']):,}",
        )
    )


def _again(job: Job, step: int) -> bool:
    """Whether a save that failed is due again: ten times as often as saves are."""
    return job.saver.failed and step % max(1, job.cfg.checkpoint.every // 10) == 0


def _state(job: Job, meter: Meter, outcome: Outcome, place: Position, step: int, skips_in_a_row: int) -> RunState:
    metrics = job.folder / "metrics.jsonl"
    return replace(
        job.start,
        step=step,
        epoch=place.epoch,
        row=place.row,
        trained_tokens=meter.trained_tokens_so_far,
        first_loss=outcome.first_loss,
        last_loss=outcome.last_loss,
        skips_in_a_row=skips_in_a_row,
        evaluations=outcome.evaluations,
        metrics_bytes=metrics.stat().st_size if rank() == 0 else 0,
    )


def _publish(job: Job, meter: Meter, outcome: Outcome) -> None:
    """Publish the checkpoint that all ranks have proven."""
    meter.pause()
    job.saver.finish()
    outcome.checkpoint = job.saver.newest
    meter.resume()


def _stopped(job: Job, outcome: Outcome, step: int, stop_file: StopFile) -> Stopped:
    stop_file.remove()
    return Stopped(
        tr(
            "stopped by {signal} after step {step} of {total}, as all ranks agreed. Saved: {checkpoint}. "
            "There is no DONE marker: the run is unfinished. With a run.name the same command goes on with it.",
            signal=tr("the file 'stop'") if stop_file.found else signals.received() or tr("a signal to another rank"),
            step=step,
            total=job.total_steps,
            checkpoint=outcome.checkpoint,
        )
    )
