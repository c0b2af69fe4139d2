"""The learning rate over the steps, numerically equal to DeepSpeed's WarmupLR, WarmupDecayLR and WarmupCosineLR.

Equal on purpose, so that an exported JSON trains the same in plain DeepSpeed. The first update of a run changes the
weights: a warm-up begins above 0 unless schedule.warmup_min_ratio is 0. With such a warm-up two schedulers of
DeepSpeed 0.19.8 differ from ours: its cosine takes the first step at a rate of 0, and its linear one falls to the
lowest rate of the warm-up, where ours falls to 0. What DeepSpeed has no schedule for (polynomial, inverse_sqrt, wsd)
equals transformers' (5.23, optimization.py) with that first rate in the place of its 0.
"""

import math
from collections.abc import Callable
from typing import Any, Protocol

from toolkit.config.schema import (
    Decay,
    RunConfig,
    ScheduleConfig,
    ScheduleName,
    WarmupType,
)
from toolkit.engine.ds_config import warmup_lowest, warmup_steps
from toolkit.errors import ConfigError

_OF_DEEPSPEED = (ScheduleName.constant, ScheduleName.linear, ScheduleName.cosine)
_TIMESCALE = 10_000
"""Of inverse_sqrt without warm-up, as in transformers."""


class HasGroups(Protocol):
    """What is needed of an optimizer."""

    param_groups: list[dict[str, Any]]


def learning_rate(schedule: ScheduleConfig, peak: float, done: int, total_steps: int, warmup_steps: int) -> float:
    """Return the learning rate of the next optimizer step.

    DeepSpeed counts from -1: the first two steps of a warm-up are both taken at its lowest rate, and no warm-up is
    shorter than 2 steps. Without warm-up DeepSpeed has no
    such schedule; ours then starts at the peak and would reach the end of its curve after `total_steps`.

    Args:
        schedule: shape and ratios.
        peak: the peak learning rate.
        done: optimizer steps taken so far; steps skipped for overflow do not count.
        total_steps: steps of the whole run.
        warmup_steps: steps of warm-up, 0 for none.
    """
    if schedule.name not in _OF_DEEPSPEED:
        return peak * _as_transformers(schedule, done, total_steps, warmup_steps)
    if warmup_steps == 0:
        return peak * _decay(schedule, done, max(1, total_steps))
    warmup, index = max(2, warmup_steps), done - 1
    cosine = schedule.name is ScheduleName.cosine
    lowest = warmup_lowest(schedule, warmup_steps)
    if index < 0:
        return lowest * peak
    if index < warmup:
        log = schedule.warmup_type is WarmupType.log
        gamma = (1.0 / math.log(warmup)) * math.log(index + 1) if log else index / warmup
    elif cosine:
        return peak * _decay(schedule, index - warmup + 1, max(1, total_steps - warmup))
    elif schedule.name is ScheduleName.linear:
        return peak * max(0.0, float(total_steps - index) / float(max(1.0, total_steps - warmup)))
    else:
        gamma = 1.0
    if cosine:
        return peak * (lowest + gamma * (1.0 - lowest))
    return lowest * peak + (peak - lowest * peak) * gamma


def _decay(schedule: ScheduleConfig, step: int, length: int) -> float:
    """Return the share of the peak after `step` of `length` steps of decay."""
    progress = min(1.0, step / length)
    if schedule.name is ScheduleName.linear:
        return 1.0 - progress
    if schedule.name is ScheduleName.cosine:
        half = (1 + math.cos(math.pi * progress)) / 2
        return max(0.0, schedule.min_lr_ratio + (1.0 - schedule.min_lr_ratio) * half)
    return 1.0


def _as_transformers(schedule: ScheduleConfig, step: int, total_steps: int, warmup_steps: int) -> float:
    """Return the share of the peak at a step, which counts from 0; the warm-up's first step is at its lowest rate."""
    floor = schedule.min_lr_ratio
    if step < warmup_steps:
        lowest = warmup_lowest(schedule, warmup_steps)
        return lowest + (1.0 - lowest) * step / warmup_steps
    if schedule.name is ScheduleName.inverse_sqrt:
        timescale = schedule.timescale or warmup_steps or _TIMESCALE
        return 1.0 / math.sqrt((step + timescale - warmup_steps) / timescale)
    if schedule.name is ScheduleName.polynomial:
        left = 1.0 - (step - warmup_steps) / max(1, total_steps - warmup_steps)
        return floor + (1.0 - floor) * max(0.0, left) ** schedule.power
    # 0.07 x 100 is 7.000000000000001 in floating point: that is 7 steps, not 8.
    decay_steps = schedule.decay_steps or math.ceil(round(schedule.decay_ratio * total_steps, 6))
    begin = max(warmup_steps, total_steps - decay_steps)
    if step < begin:
        return 1.0
    if step >= total_steps:
        return floor
    progress = (step - begin) / (total_steps - begin)
    falls = {
        Decay.linear: 1.0 - progress,
        Decay.cosine: (1.0 + math.cos(math.pi * progress)) / 2,
        Decay.sqrt: 1.0 - math.sqrt(progress),
    }
    return floor + (1.0 - floor) * falls[schedule.decay_type]


class Schedule:
    """The scheduler that the engine drives.

    `deepspeed.initialize(lr_scheduler=callable)` hands the basic optimizer to the callable. The engine calls `step()`
    after each optimizer step that was applied: when fp16 overflows (or bf16 gradients are no numbers) it counts a
    skipped step and leaves the scheduler alone, so the schedule does not advance. Its state has the name that
    DeepSpeed's own schedulers use, so plain DeepSpeed can continue from our checkpoints.
    """

    def __init__(
        self, optimizer: HasGroups, schedule: ScheduleConfig, lr: float, total_steps: int, warmup_steps: int
    ) -> None:
        """Set the first learning rate.

        Args:
            optimizer: its groups' "lr" is read, for groups that learn slower or faster than the peak, and written.
            schedule: shape and ratios.
            lr: the peak learning rate.
            total_steps: optimizer steps of the whole run.
            warmup_steps: from ds_config.warmup_steps.
        """
        self.optimizer = optimizer
        self.done = 0
        self._shares = [group["lr"] / lr for group in optimizer.param_groups]
        self._shape = (schedule, lr, total_steps, warmup_steps)
        self.write()

    def set_length(self, total_steps: int, warmup_steps: int) -> None:
        """Change the steps of the whole run and of its warm-up, before the first."""
        self._shape = (*self._shape[:2], total_steps, warmup_steps)
        self.write()

    def get_lr(self) -> list[float]:
        """Return the learning rate of the next step, once per parameter group."""
        schedule, lr, total_steps, warmup_steps = self._shape
        rate = learning_rate(schedule, lr, self.done, total_steps, warmup_steps)
        return [rate * share for share in self._shares]

    def get_last_lr(self) -> list[float]:
        """Return what stands in the parameter groups: the rate of the next step."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def step(self) -> None:
        """Go on by one optimizer step."""
        self.done += 1
        self.write()

    def state_dict(self) -> dict[str, int]:
        """Return how far the schedule is."""
        return {"last_batch_iteration": self.done - 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue where `state_dict` was taken."""
        self.done = state["last_batch_iteration"] + 1
        self.write()

    def write(self) -> None:
        """Put the rates of the next step into the groups."""
        for group, rate in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
            group["lr"] = rate


def make_schedule(cfg: RunConfig, total_steps: int) -> Callable[[HasGroups], Schedule]:
    """Return what makes the learning-rate schedule of an optimizer.

    Raises:
        ConfigError: the run is too short for its schedule.
    """
    warmup, decay = warmup_steps(cfg, total_steps), cfg.schedule.decay_steps
    if cfg.schedule.name is ScheduleName.wsd and warmup + decay > total_steps:
        raise ConfigError(
            "schedule.warmup_steps = {warmup} and schedule.decay_steps = {decay} are more together than the "
            "{steps} steps of this run.",
            warmup=warmup,
            decay=decay,
            steps=total_steps,
        )
    return lambda optimizer: Schedule(optimizer, cfg.schedule, cfg.optim.lr, total_steps, warmup)
