"""The schedules that DeepSpeed has no equal of: inverse_sqrt, polynomial and wsd, as transformers computes them (5.23,
optimization.py), but for the first rate of the warm-up, which is 0 there.
"""

import math

from toolkit.config import schema
from toolkit.engine.ds_config import ratio_of_steps, warmup_start_ratio

_TIMESCALE = 10_000
"""Timescale (steps) of inverse_sqrt without warm-up, as in transformers."""


def share_of_peak(schedule: schema.ScheduleConfig, step: float, total_steps: int, warmup_steps: int) -> float:
    """Return the learning rate after `step` steps, as a share of the peak, of inverse_sqrt, polynomial or wsd."""
    floor = schedule.min_lr_ratio
    if step < warmup_steps:
        lowest = warmup_start_ratio(schedule, warmup_steps)
        return lowest + (1.0 - lowest) * step / warmup_steps
    if schedule.name is schema.ScheduleName.inverse_sqrt:
        timescale = schedule.timescale or warmup_steps or _TIMESCALE
        return 1.0 / math.sqrt((step + timescale - warmup_steps) / timescale)
    if schedule.name is schema.ScheduleName.polynomial:
        left = 1.0 - (step - warmup_steps) / max(1, total_steps - warmup_steps)
        return floor + (1.0 - floor) * max(0.0, left) ** schedule.power
    plateau_end = decay_begin(schedule, total_steps, warmup_steps)
    if step < plateau_end:
        return 1.0
    if step >= total_steps:
        return floor
    progress = (step - plateau_end) / (total_steps - plateau_end)
    left_of_decay = {  # falls from 1 to 0
        schema.Decay.linear: 1.0 - progress,
        schema.Decay.cosine: (1.0 + math.cos(math.pi * progress)) / 2,
        schema.Decay.sqrt: 1.0 - math.sqrt(progress),
    }
    return floor + (1.0 - floor) * left_of_decay[schedule.decay_type]


def decay_begin(schedule: schema.ScheduleConfig, total_steps: int, warmup_steps: int) -> int:
    """Return the step at which the rate of wsd begins to decay, after warm-up and plateau."""
    decay_steps = schedule.decay_steps or ratio_of_steps(schedule.decay_ratio, total_steps)
    return max(warmup_steps, total_steps - decay_steps)
