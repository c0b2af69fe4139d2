"""The loop: steps, and when to log, evaluate, save and stop. What one step does stands in step.py."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from deepspeed import DeepSpeedEngine

from toolkit.config.schema import RunConfig
from toolkit.distributed import signals
from toolkit.distributed.process_group import rank, world_size
from toolkit.errors import Diverged, Stopped
from toolkit.messages import tr
from toolkit.track.metrics import append_row
from toolkit.track.progress import Progress
from toolkit.train import checkpoint
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
    """Evaluates on all ranks and returns `eval_loss`, `eval_perplexity`, `eval_tokens`; None without "
    "validation data."""


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
        Stopped: a signal came; a checkpoint was saved at the step boundary that all ranks agreed on.
        Diverged: the loss is no number, or too many steps in a row were skipped.
    """
    cfg, engine = job.cfg, job.engine
    outcome, meter = Outcome(), Meter(engine)
    skips = SkipWatch(engine, cfg.train.max_skipped_steps)
    engine.train()
    if job.evaluate and cfg.evaluate.at_start:
        _evaluate(job, outcome, progress, step=0)
        meter = Meter(engine)
    signals.defer()
    for step in range(1, job.total_steps + 1):
        lr = float(engine.get_lr()[0])
        window = list(islice(job.batches, job.accumulation))
        result = train_step(engine, window, world_size())
        meter.add(result)
        skips.check(step)
        progress.advance()
        last = step == job.total_steps
        save = result.stop_requested or _due(step, cfg.checkpoint.every) or (last and cfg.checkpoint.at_end)
        evaluate = job.evaluate is not None and (_due(step, cfg.evaluate.every) or last) and not result.stop_requested
        if save or evaluate or last or step == 1 or step % cfg.train.log_every == 0:
            _log(job, meter, outcome, progress, step, lr)
        meter.pause()
        if evaluate:
            _evaluate(job, outcome, progress, step)
        if save:
            _save(job, meter, outcome, step)
        meter.resume()
        if result.stop_requested:
            raise _stopped(job, outcome, step)
    signals.act_at_once()
    outcome.trained_tokens, outcome.skipped_steps = (
        meter.trained_tokens_so_far,
        engine.skipped_steps,
    )
    return outcome


class SkipWatch:
    """Counts skipped steps in a row: DeepSpeed alone would go on for ever and exit 0 (measured on 0.19.8)."""

    def __init__(self, engine: DeepSpeedEngine, most: int) -> None:
        """Start.

        Args:
            engine: whose `skipped_steps` is watched.
            most: skipped steps in a row that end the run.
        """
        self.engine, self.most = engine, most
        self.seen = engine.skipped_steps
        self.in_a_row = 0

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


def _save(job: Job, meter: Meter, outcome: Outcome, step: int) -> None:
    state: dict[str, object] = {
        "step": step,
        "trained_tokens": meter.trained_tokens_so_far,
        "seed": job.cfg.run.seed,
    }
    outcome.checkpoint = checkpoint.save(job.engine, job.folder / "checkpoints", step, state, job.cfg.checkpoint.keep)


def _stopped(job: Job, outcome: Outcome, step: int) -> Stopped:
    return Stopped(
        tr(
            "stopped by {signal} after step {step} of {total}, as all ranks agreed. Saved: {checkpoint}. "
            "There is no DONE marker: the run is unfinished.",
            signal=signals.received() or tr("a signal to another rank"),
            step=step,
            total=job.total_steps,
            checkpoint=outcome.checkpoint,
        )
    )
