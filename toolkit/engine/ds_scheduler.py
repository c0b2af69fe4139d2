"""The learning-rate scheduler in DeepSpeed's JSON. Imports neither torch nor deepspeed."""

import math

from toolkit.config.schema import RunConfig, ScheduleConfig, ScheduleName
from toolkit.engine.ds_optimizer import Sink
from toolkit.messages import tr

SCHEDULERS = {
    ScheduleName.constant: "WarmupLR",
    ScheduleName.linear: "WarmupDecayLR",
    ScheduleName.cosine: "WarmupCosineLR",
}


def warmup_steps(cfg: RunConfig, total_steps: int) -> int:
    """Return the optimizer steps of warm-up: `schedule.warmup_steps`, or `schedule.warmup_ratio` of all, rounded up."""
    if cfg.schedule.warmup_ratio:
        # 0.07 x 100 is 7.000000000000001 in floating point: that is 7 steps, not 8.
        return math.ceil(round(cfg.schedule.warmup_ratio * total_steps, 6))
    return cfg.schedule.warmup_steps


def warmup_lowest(schedule: ScheduleConfig, steps: int) -> float:
    """Return the first learning rate of a warm-up of so many steps as a fraction of the peak."""
    given = schedule.warmup_min_ratio
    return given if given >= 0 else 1.0 / max(2, steps)  # DeepSpeed warms up for 2 steps at least


def write_scheduler(ds: Sink, cfg: RunConfig, total_steps: int | None) -> None:
    """Name DeepSpeed's scheduler that is equal to ours (train/schedule.py), or say what it does otherwise.

    Args:
        ds: gets it.
        cfg: the run.
        total_steps: optimizer steps of the whole run; None where they are not known.
    """
    schedule = cfg.schedule
    if schedule.name not in SCHEDULERS:
        ds.missing.append(
            tr(
                "The scheduler is left out: schedule.name = {name} has no equal in DeepSpeed. A plain "
                "deepspeed.initialize keeps the learning rate constant.",
                name=schedule.name.value,
            )
        )
        return
    constant = schedule.name is ScheduleName.constant
    if total_steps is None and (not constant or schedule.warmup_ratio):
        ds.missing.append(
            tr(
                "The scheduler is left out, because it depends on the number of steps, which comes from the data: "
                "give train.max_steps, or total_steps=N to `toolkit export-config`, to have it in the file."
            )
        )
        return
    steps = warmup_steps(cfg, total_steps or 0)
    if steps == 0:
        if not constant:  # Without warm-up a constant rate needs no scheduler.
            ds.missing.append(
                tr(
                    "The scheduler is left out: schedule.name = {name} without warm-up has no equal in DeepSpeed, "
                    "whose schedulers warm up for at least 2 steps. A plain deepspeed.initialize keeps the learning "
                    "rate constant.",
                    name=schedule.name.value,
                )
            )
        return
    _named_scheduler(ds, cfg, steps, total_steps)


def _named_scheduler(ds: Sink, cfg: RunConfig, steps: int, total_steps: int | None) -> None:
    schedule, params = cfg.schedule, "scheduler.params."
    lowest = warmup_lowest(schedule, steps)
    is_given = schedule.warmup_min_ratio >= 0
    why = f"= schedule.warmup_min_ratio {lowest}" if is_given else f"= 1 / {round(1 / lowest)} steps of warm-up"
    ds.put("scheduler.type", SCHEDULERS[schedule.name], "schedule.name")
    if schedule.name is ScheduleName.cosine:
        ds.put(params + "warmup_min_ratio", lowest, why)
        if lowest:
            ds.missing.append(
                tr(
                    "DeepSpeed's WarmupCosineLR takes the first step at a learning rate of 0, whatever "
                    "warmup_min_ratio is; in a run of the toolkit it is {rate}. All other steps are equal.",
                    rate=f"{lowest * cfg.optim.lr:.3g}",
                )
            )
        ds.put(params + "cos_min_ratio", schedule.min_lr_ratio, "schedule.min_lr_ratio")
    else:
        ds.put(
            params + "warmup_min_lr",
            lowest * cfg.optim.lr,
            f"{why} x optim.lr {cfg.optim.lr}",
        )
        ds.put(params + "warmup_max_lr", cfg.optim.lr, "optim.lr")
    if schedule.name is ScheduleName.linear and lowest:
        ds.missing.append(
            tr(
                "DeepSpeed's WarmupDecayLR ends at the learning rate of its first step, {rate}; in a run of the "
                "toolkit the learning rate falls to 0. The steps of the warm-up are equal.",
                rate=f"{lowest * cfg.optim.lr:.3g}",
            )
        )
    ratio = f"= schedule.warmup_ratio {schedule.warmup_ratio} x {total_steps} steps, rounded up"
    ds.put(params + "warmup_num_steps", steps, ratio if schedule.warmup_ratio else "schedule.warmup_steps")
    ds.put(params + "warmup_type", schedule.warmup_type.value, "schedule.warmup_type")
    if schedule.name is not ScheduleName.constant:
        given = total_steps == cfg.train.max_steps
        why = "train.max_steps" if given else f"= train.epochs {cfg.train.epochs} x steps of one pass over the data"
        ds.put(params + "total_num_steps", total_steps, why)
