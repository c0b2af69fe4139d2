"""Our schedules against DeepSpeed's classes and transformers' functions, step by step on a real optimizer."""

import itertools
from typing import Any

import pytest
import torch
from deepspeed.runtime import lr_schedules
from transformers import get_scheduler

from toolkit.config.schema import Decay, RunConfig, ScheduleName, WarmupType
from toolkit.engine.ds_config import build_ds_config, warmup_steps
from toolkit.messages import ConfigError
from toolkit.train.schedule import Schedule, learning_rate, make_schedule

STEPS = 60
TOTAL = 40  # fewer than STEPS, so that the end of each curve and what follows are compared too


def make_config(name: ScheduleName, kind: WarmupType, warmup: int, lowest: float, floor: float) -> RunConfig:
    cfg = RunConfig()
    cfg.optim.lr = 3.7e-4
    cfg.schedule.name, cfg.schedule.warmup_type, cfg.schedule.warmup_steps = name, kind, warmup
    cfg.schedule.warmup_min_ratio, cfg.schedule.min_lr_ratio = lowest, floor
    return cfg


def make_optimizer(lr: float) -> torch.optim.Optimizer:
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))]} for _ in range(2)]
    return torch.optim.AdamW(groups, lr=lr)


def rates(optimizer: torch.optim.Optimizer, scheduler: Any) -> list[float]:
    seen = []
    for _ in range(STEPS):
        seen.append(optimizer.param_groups[1]["lr"])
        optimizer.step()
        scheduler.step()
    return seen


OF_DEEPSPEED = (ScheduleName.constant, ScheduleName.linear, ScheduleName.cosine)
COMBINATIONS = list(
    itertools.product(OF_DEEPSPEED, WarmupType, (1, 2, 7, TOTAL, TOTAL + 5), (-1.0, 0.0, 0.1), (0.0, 0.1))
)


@pytest.mark.parametrize(("name", "kind", "warmup", "lowest", "floor"), COMBINATIONS)
def test_equal_to_deepspeed(name: ScheduleName, kind: WarmupType, warmup: int, lowest: float, floor: float) -> None:
    cfg = make_config(name, kind, warmup, lowest, floor)
    exported = build_ds_config(cfg, 8, TOTAL)
    scheduler = exported.values["scheduler"]
    theirs, ours = make_optimizer(cfg.optim.lr), make_optimizer(cfg.optim.lr)
    expected = rates(theirs, getattr(lr_schedules, scheduler["type"])(theirs, **scheduler["params"]))
    actual = rates(ours, Schedule(ours, cfg.schedule, cfg.optim.lr, TOTAL, warmup))
    if name is ScheduleName.cosine and lowest:  # DeepSpeed's begins at 0 whatever its minimum, and ours says so
        assert expected[0] == 0 < actual[0] == pytest.approx(actual[1])
        assert "takes the first step at a learning rate of 0" in exported.missing[-1]
        expected[0] = actual[0]
    if name is ScheduleName.linear and lowest:  # DeepSpeed's falls to the lowest rate of the warm-up, ours to 0
        least, rises = expected[0], max(2, warmup) + 1
        decay = [cfg.optim.lr * (rate - least) / (cfg.optim.lr - least) for rate in expected[rises:]]
        assert min(expected) == least > 0
        assert actual[rises:] == pytest.approx(decay, rel=1e-12, abs=1e-18)
        assert "WarmupDecayLR ends at the learning rate of its first step" in exported.missing[-1]
        expected[rises:] = actual[rises:]
    assert actual == pytest.approx(expected, rel=1e-15, abs=0)


@pytest.mark.parametrize("warmup", [0, 1, 2, 9])
@pytest.mark.parametrize("kind", WarmupType)
@pytest.mark.parametrize("name", ScheduleName)
def test_every_update_before_the_last_changes_the_weights(name: ScheduleName, kind: WarmupType, warmup: int) -> None:
    cfg = RunConfig()
    cfg.schedule.name, cfg.schedule.warmup_type = name, kind
    curve = [learning_rate(cfg.schedule, 1.0, done, TOTAL, warmup) for done in range(TOTAL)]
    assert min(curve[:-1]) > 0
    if warmup:
        assert curve[0] == 1 / max(2, warmup)


@pytest.mark.parametrize("warmup", [0, 1, 2, 9])
@pytest.mark.parametrize("lowest", [-1.0, 0.0, 0.5])
@pytest.mark.parametrize("name", [ScheduleName.linear, ScheduleName.cosine, ScheduleName.polynomial, ScheduleName.wsd])
def test_a_decay_ends_at_zero(name: ScheduleName, lowest: float, warmup: int) -> None:
    """Wherever its warm-up begins; DeepSpeed's delay of its three is two steps at most."""
    cfg = make_config(name, WarmupType.linear, warmup, lowest, 0.0)
    assert learning_rate(cfg.schedule, 1.0, TOTAL + 1, TOTAL, warmup) == pytest.approx(0.0, abs=1e-12)


THEIRS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "polynomial": ({}, {"lr_end": 0.0}),
    "polynomial power": ({"power": 2.0, "min_lr_ratio": 0.1}, {"power": 2.0, "lr_end": 0.1 * 3.7e-4}),
    "inverse_sqrt": ({}, {}),
    "inverse_sqrt timescale": ({"timescale": 9}, {"timescale": 9}),
    "wsd": ({"decay_steps": 12}, {"num_decay_steps": 12, "decay_type": "linear"}),
    "wsd ratio": ({"decay_ratio": 0.3}, {"num_decay_steps": 12, "decay_type": "linear"}),
    "wsd cosine": (
        {"decay_steps": 10, "decay_type": Decay.cosine, "min_lr_ratio": 0.2, "warmup_min_ratio": 0.2},
        {"num_decay_steps": 10, "decay_type": "cosine", "min_lr_ratio": 0.2},
    ),
    "wsd sqrt": ({"decay_steps": 20, "decay_type": Decay.sqrt}, {"num_decay_steps": 20, "decay_type": "1-sqrt"}),
    "constant": ({}, {}),
    "linear": ({}, {}),
    "cosine": ({}, {}),
    "cosine floor": ({"min_lr_ratio": 0.1}, {"min_lr_rate": 0.1}),
}
"""Ours -> what transformers calls the same."""
NAMES = {"wsd": "warmup_stable_decay", "cosine floor": "cosine_with_min_lr", "constant": "constant_with_warmup"}


@pytest.mark.parametrize("warmup", [0, 1, 7])
@pytest.mark.parametrize("case", THEIRS)
def test_equal_to_transformers(case: str, warmup: int) -> None:
    """DeepSpeed's own three are a step behind transformers' in warm-up and after it, and never warm up for 1 step."""
    name = case.split()[0]
    late = ScheduleName[name] in OF_DEEPSPEED and warmup > 0
    if late and (warmup == 1 or name == "cosine"):
        pytest.skip("DeepSpeed's arithmetic differs from transformers' by more than a step")
    ours, theirs = THEIRS[case]
    cfg = make_config(ScheduleName[name], WarmupType.linear, warmup, 0.0, 0.0)
    for key, value in ours.items():
        setattr(cfg.schedule, key, value)
    left, right = make_optimizer(cfg.optim.lr), make_optimizer(cfg.optim.lr)
    kind = NAMES.get(case, NAMES.get(name, name))
    expected = rates(left, get_scheduler(kind, left, warmup, TOTAL, theirs))
    actual = rates(right, Schedule(right, cfg.schedule, cfg.optim.lr, TOTAL, warmup))
    # A cosine beyond its last step rises again in transformers; the polynomial one divides by the steps after warm-up.
    until = TOTAL + 1 if name == "cosine" else STEPS - 1
    if late:
        actual, expected = actual[1:], expected[:-1]
    assert actual[:until] == pytest.approx(expected[:until], rel=1e-12, abs=1e-20)


def test_without_warmup_starts_at_the_peak() -> None:
    cfg = RunConfig()
    for name, last in ((ScheduleName.constant, 1.0), (ScheduleName.linear, 0.1), (ScheduleName.cosine, 0.0244717)):
        cfg.schedule.name = name
        curve = [learning_rate(cfg.schedule, 1.0, done, 10, 0) for done in range(10)]
        assert curve[0] == 1.0
        assert curve[-1] == pytest.approx(last, abs=1e-6)
        assert curve == sorted(curve, reverse=True)


def test_state_continues_and_is_deepspeeds() -> None:
    cfg = make_config(ScheduleName.cosine, WarmupType.linear, 5, 0.0, 0.1)
    whole = rates(optimizer := make_optimizer(1e-3), Schedule(optimizer, cfg.schedule, 1e-3, TOTAL, 5))
    first = Schedule(make_optimizer(1e-3), cfg.schedule, 1e-3, TOTAL, 5)
    for _ in range(13):
        first.step()
    state = first.state_dict()
    second = Schedule(resumed := make_optimizer(1e-3), cfg.schedule, 1e-3, TOTAL, 5)
    second.load_state_dict(state)
    assert second.get_last_lr() == [whole[13]] * 2
    assert rates(resumed, second)[: STEPS - 13] == whole[13:]
    exported = build_ds_config(cfg, 8, TOTAL).values["scheduler"]
    theirs = lr_schedules.WarmupCosineLR(make_optimizer(1e-3), **exported["params"])
    theirs.load_state_dict(state)
    theirs.step()
    assert theirs.get_last_lr()[0] == whole[14]


@pytest.mark.parametrize(("ratio", "total", "steps"), [(0.07, 100, 7), (0.03, 100, 3), (0.031, 100, 4), (0.1, 5, 1)])
def test_warmup_ratio_rounds_up(ratio: float, total: int, steps: int) -> None:
    cfg = RunConfig()
    cfg.schedule.warmup_ratio = ratio
    assert warmup_steps(cfg, total) == steps


def test_a_run_that_is_too_short_for_warm_up_and_decay() -> None:
    """How many steps epochs have is known only when the data are: config checks know train.max_steps alone."""
    cfg = make_config(ScheduleName.wsd, WarmupType.linear, 30, 0.0, 0.0)
    cfg.schedule.decay_steps = 10
    make_schedule(cfg, TOTAL)
    with pytest.raises(ConfigError, match=r"warmup_steps = 30 and .* = 10 are more together than the 39 steps"):
        make_schedule(cfg, TOTAL - 1)


@pytest.mark.parametrize("name", ScheduleName)
def test_a_run_that_is_too_short_for_its_warm_up(name: ScheduleName) -> None:
    cfg = make_config(name, WarmupType.linear, TOTAL, 0.0, 0.0)
    make_schedule(cfg, TOTAL)
    with pytest.raises(ConfigError, match=r"warmup_steps = 40 is more than the 39 steps of this run, which would end"):
        make_schedule(cfg, TOTAL - 1)
