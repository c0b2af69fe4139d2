"""The learning rate over the steps, and whether a run has enough of them to learn. Neither torch nor deepspeed.

Equal to DeepSpeed's WarmupLR, WarmupDecayLR and WarmupCosineLR, so that an exported JSON trains the same, but for a
warm-up that begins above 0 (warmup_min_ratio): DeepSpeed 0.19.8's cosine takes the first step at 0, and its linear one
falls to the warm-up's lowest rate, ours to 0. Those of transformers are in transformers_schedules.py.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Protocol

from toolkit.config import mesh, schema
from toolkit.engine.ds_config import warmup_start_ratio, warmup_steps
from toolkit.messages import ConfigError, clauses, say, tr, warn

_OF_DEEPSPEED = (schema.ScheduleName.constant, schema.ScheduleName.linear, schema.ScheduleName.cosine)
_ENDLESS = (schema.ScheduleName.constant, schema.ScheduleName.inverse_sqrt)
"""Schedules that are the same whatever the number of steps."""
FEWEST_STEPS = 50
"""Optimizer steps below which fine-tuning changes a model little, whatever the learning rate."""
_LOOKED_AT = 1000
"""Steps whose learning rate is checked for 0: only a schedule's first steps can have it before its end."""


class HasGroups(Protocol):
    """An optimizer, as far as a schedule needs it: parameter groups, each with its "lr"."""

    param_groups: list[dict[str, Any]]


def learning_rate(
    schedule: schema.ScheduleConfig, peak: float, done: float, total_steps: int, warmup_steps: int
) -> float:
    """Return the learning rate of the optimizer step that follows `done` steps; steps skipped for overflow are not
    counted. As in DeepSpeed, which counts from -1, the first two warm-up steps are at the lowest rate and warm-up takes
    at least 2 steps. Without warm-up, which DeepSpeed lacks, the schedule starts at the `peak`.
    """
    if schedule.name not in _OF_DEEPSPEED:
        from toolkit.train.transformers_schedules import share_of_peak

        return peak * share_of_peak(schedule, done, total_steps, warmup_steps)
    if warmup_steps == 0:
        return peak * _decay(schedule, done, max(1, total_steps))
    warmup, index = max(2, warmup_steps), done - 1  # `index`: DeepSpeed's number of the step
    is_cosine = schedule.name is schema.ScheduleName.cosine
    lowest = warmup_start_ratio(schedule, warmup_steps)
    if index < 0:
        return lowest * peak
    if index >= warmup:
        if is_cosine:
            return peak * _decay(schedule, index - warmup + 1, max(1, total_steps - warmup))
        if schedule.name is schema.ScheduleName.linear:
            return peak * max(0.0, float(total_steps - index) / float(max(1.0, total_steps - warmup)))
        risen = 1.0  # a constant rate stays at the peak
    elif schedule.warmup_type is schema.WarmupType.log:
        risen = (1.0 / math.log(warmup)) * math.log(index + 1)
    else:
        risen = index / warmup
    # `risen`: share of the way from the lowest rate to the peak. Rounded as by each of DeepSpeed's schedulers.
    if is_cosine:
        return peak * (lowest + risen * (1.0 - lowest))
    return lowest * peak + (peak - lowest * peak) * risen


def _decay(schedule: schema.ScheduleConfig, step: float, length: int) -> float:
    """Return the share of the peak after `step` of `length` steps of linear or cosine decay; 1 for other schedules."""
    progress = min(1.0, step / length)
    if schedule.name is schema.ScheduleName.linear:
        return 1.0 - progress
    if schedule.name is schema.ScheduleName.cosine:
        half = (1 + math.cos(math.pi * progress)) / 2
        return max(0.0, schedule.min_lr_ratio + (1.0 - schedule.min_lr_ratio) * half)
    return 1.0


class Schedule:
    """The scheduler that DeepSpeed's engine drives: it calls `step()` after each update but not after a skipped one."""

    def __init__(
        self, optimizer: HasGroups, schedule: schema.ScheduleConfig, lr: float, total_steps: int, warmup_steps: int
    ) -> None:
        """Set the first learning rate; groups whose "lr" is not the peak `lr` keep their ratio to it."""
        self.optimizer = optimizer
        self.done = 0
        self.position: float = 0
        """How far the schedule is, in its own steps: as far as `done`, or farther after `fit` has shortened it."""
        self._steps_left: int | None = None
        self._shares = [group["lr"] / lr for group in optimizer.param_groups]
        self.config, self.peak, self.total_steps, self.warmup_steps = schedule, lr, total_steps, warmup_steps
        self.write()

    def set_length(self, total_steps: int, warmup_steps: int) -> None:
        """Change the number of steps of the run and of its warm-up, before the first step."""
        self.total_steps, self.warmup_steps = total_steps, warmup_steps
        self.write()

    def fit(self, steps_left: int | None) -> None:
        """Reach the end of the schedule in `steps_left` further steps; None: in those that it has left. A plateau is
        shortened first, then the decay; a warm-up keeps its steps. The rate stays continuous.
        """
        self._steps_left = steps_left

    def get_lr(self) -> list[float]:
        """Return the learning rate of the next step, once per parameter group."""
        rate = learning_rate(self.config, self.peak, self.position, self.total_steps, self.warmup_steps)
        return [rate * share for share in self._shares]

    def get_last_lr(self) -> list[float]:
        """Return what is in the parameter groups: the rate of the next step."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def step(self) -> None:
        """Advance by one optimizer step."""
        self.done += 1
        self.position += self._stride()
        self.write()

    def _stride(self) -> float:
        """Return by how many of the schedule's steps the step just done advances it: 1, or another number where `fit`
        has changed its length; count that step off `_steps_left`.
        """
        if self._steps_left is None or self.config.name in _ENDLESS:
            return 1
        left, self._steps_left = max(1, self._steps_left), self._steps_left - 1  # `left`: with the step just done
        if self.position < self.warmup_steps and left > self.warmup_steps - self.position:
            return 1  # the warm-up ends in time as it is
        if self.config.name is schema.ScheduleName.wsd:
            from toolkit.train.transformers_schedules import decay_begin

            plateau_end = decay_begin(self.config, self.total_steps, self.warmup_steps)
            if self.position < plateau_end:  # the plateau takes the steps that the decay leaves
                return (plateau_end - self.position) / max(1, left - (self.total_steps - plateau_end))
        return max(0.0, self.total_steps - self.position) / left  # the rest of the schedule, in equal strides

    def state_dict(self) -> dict[str, float]:
        """Return how far the schedule is, in DeepSpeed's form; "position" only if `fit` has changed it."""
        fitted = {} if self.position == self.done else {"position": self.position}
        return {"last_batch_iteration": self.done - 1, **fitted}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue where `state_dict` was taken."""
        self.done = int(state["last_batch_iteration"]) + 1
        self.position = state.get("position", self.done)
        self.write()

    def write(self) -> None:
        """Set each parameter group's "lr" to the rate of the next step."""
        for group, rate in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
            group["lr"] = rate


def make_schedule(cfg: schema.RunConfig, total_steps: int) -> Callable[[HasGroups], Schedule]:
    """Return a function that makes an optimizer's schedule; ConfigError if the run is too short for its warm-up."""
    warmup, decay = warmup_steps(cfg, total_steps), cfg.schedule.decay_steps
    if warmup > total_steps:
        raise ConfigError(
            "schedule.warmup_steps = {warmup} is more than the {steps} steps of this run, which would end while the "
            "learning rate still rises. Lower it, or add schedule.warmup_ratio=0.1 in its place.",
            warmup=warmup,
            steps=total_steps,
        )
    if cfg.schedule.name is schema.ScheduleName.wsd and warmup + decay > total_steps:
        raise ConfigError(
            "schedule.warmup_steps = {warmup} and schedule.decay_steps = {decay} are more together than the "
            "{steps} steps of this run.",
            warmup=warmup,
            decay=decay,
            steps=total_steps,
        )
    return lambda optimizer: Schedule(optimizer, cfg.schedule, cfg.optim.lr, total_steps, warmup)


@dataclass(frozen=True, kw_only=True, slots=True)
class Epoch:
    """One pass over the training data."""

    samples: int
    sequences: int
    """What samples are packed into; samples without packing, micro-batches with data.packing=grouped."""
    per_step: int
    """Sequences of an optimizer step on all ranks."""

    @property
    def steps(self) -> int:
        """Return how many optimizer steps an epoch has."""
        return math.ceil(self.sequences / self.per_step)


def warn_of_short_run(cfg: schema.RunConfig, epoch: Epoch | None, total_steps: int, world_size: int) -> None:
    """Warn of too few steps to learn much, and of a rate that begins at 0; `epoch` None, `total_steps` 0: not known."""
    is_short = 0 < total_steps < FEWEST_STEPS
    if is_short and epoch and not cfg.train.max_steps:
        _warn_of_few_steps(cfg, epoch, total_steps, world_size)
    elif is_short:
        say("train.max_steps = {steps}: enough to try the recipe out, too few to learn.", steps=total_steps)
    total = total_steps or _LOOKED_AT
    warmup, looked_at = warmup_steps(cfg, total), range(min(total - 1, _LOOKED_AT))
    if count := sum(learning_rate(cfg.schedule, 1.0, done, total, warmup) == 0 for done in looked_at):
        warn(
            "schedule.warmup_min_ratio = {ratio} lets the learning rate begin at 0 (steps without a "
            "change: {count}). Use schedule.warmup_min_ratio=-1, which begins at 1 / steps of the warm-up.",
            ratio=cfg.schedule.warmup_min_ratio,
            count=count,
        )


def _warn_of_few_steps(cfg: schema.RunConfig, epoch: Epoch, total_steps: int, world_size: int) -> None:
    """Warn that the data give too few steps to learn much, and say which overrides make the run longer."""
    samples, sequences = f"{epoch.samples:,}", f"{epoch.sequences:,}"
    data = tr("{samples} samples", samples=samples)
    if epoch.samples != epoch.sequences:
        data = tr("{samples} samples in {sequences} sequences", samples=samples, sequences=sequences)
    longer = _longer_runs(cfg, epoch, world_size)
    ways = [tr("{override} ({steps} steps)", override=override, steps=steps) for override, steps in longer]
    warn(
        "too few optimizer steps to learn much: {steps} ({data}, {per_step} per step, train.epochs={epochs}); {fewest} "
        "or more are usual. Each of these makes the run longer: {ways}",
        steps=total_steps,
        data=data,
        per_step=epoch.per_step,
        epochs=cfg.train.epochs,
        fewest=FEWEST_STEPS,
        ways=clauses(ways),
    )


def _longer_runs(cfg: schema.RunConfig, epoch: Epoch, world_size: int) -> Iterator[tuple[str, int]]:
    """Yield overrides (no packing, smaller batch, more epochs) for runs of about FEWEST_STEPS, and their steps."""
    train, epochs, size = cfg.train, cfg.train.epochs, cfg.batch.global_size
    if cfg.data.packing is not schema.Packing.none and epoch.samples > epoch.sequences:
        unpacked = math.ceil(epoch.samples / size)
        enough = max(epochs, math.ceil(FEWEST_STEPS / unpacked))
        more = f" train.epochs={enough}" if enough > epochs else ""
        yield f"data.packing=none{more}", replace(train, epochs=enough).over_epochs(unpacked)
    # A smaller global batch: a multiple of all data ranks' micro-batches (`rows_at_once`).
    rows_at_once = mesh.micro_rows(mesh.with_micro_batch(cfg)) * mesh.mesh_of(cfg, world_size).data_ranks
    per_row = Fraction(epoch.per_step, size)  # sequences of a row: 1, or 1 / micro-batch with data.packing=grouped
    # An epoch has `needed` steps or more where a step takes less than `bound` sequences: of 98 sequences, for 50 steps,
    # less than 98 / 49 = 2. Fractions, so that the bound is exact.
    needed = math.ceil(FEWEST_STEPS / epochs)
    bound = Fraction(epoch.sequences, needed - 1) if needed > 1 else Fraction(size)
    smaller = min(size - 1, math.ceil(bound / per_row) - 1) // rows_at_once * rows_at_once
    if smaller > 0 and bound > 1:  # with less than one sequence per step no batch is small enough
        steps = math.ceil(epoch.sequences / max(Fraction(1), smaller * per_row))
        yield f"batch.global_size={smaller}", train.over_epochs(steps)
    enough = math.ceil(FEWEST_STEPS / epoch.steps)
    yield f"train.epochs={enough}", epoch.steps * enough
