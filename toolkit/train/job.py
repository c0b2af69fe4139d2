"""What the loop needs, and what it achieves."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deepspeed import DeepSpeedEngine

from toolkit.checkpoint.directory import RunState
from toolkit.config.schema import RunConfig
from toolkit.data.sampler import Position
from toolkit.distributed.watchdog import Watchdog
from toolkit.track.trackers import Trackers
from toolkit.train import bad_steps
from toolkit.train.account import Account
from toolkit.train.checkpoint import Saver
from toolkit.train.guard import Guard
from toolkit.train.step import LANGUAGE, Objective


@dataclass(kw_only=True, slots=True)
class Job:
    """Everything that the loop needs, made by the cli."""

    cfg: RunConfig
    """The run's config."""
    engine: DeepSpeedEngine
    """The engine."""
    batches_from: Callable[[Position, int], Iterator[Any]]
    """Returns this rank's micro-batches from a place on, `accumulation` of them for each of so many steps."""
    accumulation: int
    """Micro-batches of one rank per step."""
    steps_per_epoch: int
    """Optimizer steps per pass over the training data."""
    total_steps: int
    """Optimizer steps of the run."""
    folder: Path
    """The run folder."""
    evaluate: Callable[[int, Callable[[], None]], dict[str, float]] | None
    """Evaluates on all ranks after a step, calling back now and then: `eval_loss`, `eval_perplexity`, `eval_tokens`,
    `eval_` and the name of each metric; None without validation data."""
    saver: Saver
    """Saves checkpoints."""
    start: RunState
    """Where the run begins, and what is the same in all its checkpoints."""
    position_after: Callable[[Position], Position]
    """Returns the place in the training data after the step that begins at a place."""
    figures_at: Callable[[Position], dict[str, float]]
    """Returns what metrics.jsonl says of how the step that begins at a place takes its rows."""
    samples_at: Callable[[Position], bad_steps.Samples]
    """Returns the samples of the step that begins at a place, to be shown."""
    go_back: Callable[[Path], RunState]
    """Puts engine, random generators and metrics into the state of a checkpoint of this run. A collective."""
    watchdog: Watchdog
    """Notices what does not come to an end."""
    account: Account
    """What speed and memory are compared with."""
    guard: Guard
    """Judges every step."""
    trackers: Trackers
    """Get what metrics.jsonl gets."""
    begin_report: Callable[[], None]
    """Begins to make a report of the run, on rank 0 only; costs no time."""
    objective: Objective = LANGUAGE
    """What each step sums up and counts."""


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
    total_tokens: int = 0
    """Tokens in all, without padding."""
    skipped_steps: int = 0
    """Steps without an update: gradients overflowed, or the step went wrong."""
    bad_steps: int = 0
    """Steps whose numbers went wrong."""
    rewinds: int = 0
    """Times that the run went back to a checkpoint for them."""
    steps: int = 0
    """Steps that this session did, those done again after a rewind included."""
    steps_s: float = 0.0
    """Seconds that they took: without evaluation, saving and what comes before the first."""
    checkpoint: Path | None = None
    """The last checkpoint."""
    state: RunState = field(default_factory=RunState)
    """Of the run's end."""
