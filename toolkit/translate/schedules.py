"""The Trainer's schedules: `lr_scheduler_type`, its arguments, and the warm-up."""

import json
from typing import Any

from toolkit.config.suggest import did_you_mean
from toolkit.errors import ConfigError
from toolkit.messages import joined, tr
from toolkit.translate.given import Draft, Given, typed

SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
    "cosine_with_min_lr": "cosine",
    "polynomial": "polynomial",
    "inverse_sqrt": "inverse_sqrt",
    "warmup_stable_decay": "wsd",
}
_DECAYS = {"linear": "linear", "cosine": "cosine", "1-sqrt": "sqrt"}
_LR_END = 1e-7
"""Where transformers' polynomial schedule ends (5.23, get_polynomial_decay_schedule_with_warmup)."""


def translate_schedule(given: Given, draft: Draft) -> None:
    """Compute the schedule.

    Raises:
        ConfigError: a value that cannot be.
    """
    name = str(given.get("lr_scheduler_type")).lower()
    stated = ["lr_scheduler_type"] if given.has("lr_scheduler_type") else []
    if name in SCHEDULES:
        draft.put("schedule.name", SCHEDULES[name], *stated)
    else:
        draft.lost["lr_scheduler_type"] = joined(
            tr("there are {names}; the recipe takes cosine", names=", ".join(SCHEDULES)), did_you_mean(name, SCHEDULES)
        )
    warms_up = _warmup(given, draft, name)
    readers = {
        "cosine_with_min_lr": _floor,
        "polynomial": _polynomial,
        "inverse_sqrt": _inverse_sqrt,
        "warmup_stable_decay": _stable,
    }
    if name in readers:
        readers[name](given, draft)
    if not warms_up:
        draft.values.pop("schedule.warmup_min_ratio", None)


def _warmup(given: Given, draft: Draft, name: str) -> bool:
    """Take over the warm-up; return whether there is one."""
    steps, ratio = given.number("warmup_steps"), 0.0
    if given.has("warmup_ratio") and not steps:
        ratio = given.number("warmup_ratio")
    key = "warmup_steps" if steps else "warmup_ratio"
    if not (steps or ratio):
        return False
    if name == "constant":
        draft.lost[key] = tr("lr_scheduler_type = constant does not read it; constant_with_warmup does")
        return False
    if steps >= 1:
        draft.put("schedule.warmup_steps", int(steps), key)
    else:
        draft.put("schedule.warmup_ratio", steps or ratio, key)
    return True


def _arguments(given: Given) -> tuple[dict[str, Any], str]:
    """Return lr_scheduler_kwargs, and how messages name them."""
    place = f"{given.place('lr_scheduler_kwargs')}: lr_scheduler_kwargs"
    values: Any = given.get("lr_scheduler_kwargs") or {}
    if isinstance(values, str):
        try:
            values = json.loads(values)
        except json.JSONDecodeError as error:
            raise ConfigError(tr("{place} is no JSON object: {reason}", place=place, reason=error.msg)) from error
    return (values if isinstance(values, dict) else {}), place


def _floor(given: Given, draft: Draft) -> None:
    """Where a cosine ends: a rate, or a fraction of the peak."""
    values, place = _arguments(given)
    if ("min_lr" in values) == ("min_lr_rate" in values):
        raise ConfigError(tr("{place}: cosine_with_min_lr needs one of min_lr and min_lr_rate.", place=place))
    [name] = {"min_lr", "min_lr_rate"} & values.keys()
    floor = typed(values[name], float, f"{place}.{name}")
    rate = floor if name == "min_lr_rate" else floor / given.number("learning_rate")
    draft.put("schedule.min_lr_ratio", rate, "lr_scheduler_kwargs")


def _polynomial(given: Given, draft: Draft) -> None:
    values, place = _arguments(given)
    stated = ["lr_scheduler_kwargs"] if values else []
    end = typed(values.get("lr_end", _LR_END), float, f"{place}.lr_end")
    draft.put("schedule.min_lr_ratio", end / given.number("learning_rate"), *stated)
    draft.put("schedule.power", typed(values.get("power", 1.0), float, f"{place}.power"), *stated)


def _inverse_sqrt(given: Given, draft: Draft) -> None:
    values, place = _arguments(given)
    if values.get("timescale"):
        steps = typed(values["timescale"], int, f"{place}.timescale")
        draft.put("schedule.timescale", steps, "lr_scheduler_kwargs")


def _stable(given: Given, draft: Draft) -> None:
    """Warm-up, stable, decay; its warm-up begins where its decay ends."""
    values, place = _arguments(given)
    if "num_decay_steps" not in values:
        raise ConfigError(tr("{place}: warmup_stable_decay needs num_decay_steps.", place=place))
    steps = typed(values["num_decay_steps"], int, f"{place}.num_decay_steps")
    draft.put("schedule.decay_steps", steps, "lr_scheduler_kwargs")
    decay, warmup = str(values.get("decay_type", "cosine")), str(values.get("warmup_type", "linear"))
    if decay in _DECAYS and warmup == "linear" and values.get("num_cycles", 0.5) == 0.5:
        draft.put("schedule.decay_type", _DECAYS[decay], "lr_scheduler_kwargs")
    else:
        draft.lost["lr_scheduler_kwargs"] = tr("a linear warm-up, and a decay that is linear, cosine or 1-sqrt")
    floor = typed(values.get("min_lr_ratio", 0.0), float, f"{place}.min_lr_ratio")
    draft.put("schedule.min_lr_ratio", floor, "lr_scheduler_kwargs")
    draft.put("schedule.warmup_min_ratio", floor, "lr_scheduler_kwargs")
