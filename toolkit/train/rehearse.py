"""A step before the first one, on the longest rows, that leaves everything as it was; and what it shows of memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed import DeepSpeedEngine

from toolkit.checkpoint import random_state
from toolkit.distributed.process_group import world_size
from toolkit.engine.memory import PeakMemory
from toolkit.models.pipeline import is_pipeline
from toolkit.train.guard import Guard
from toolkit.train.step import LANGUAGE, Objective, train_step

_COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
_STATES = {"SGD": 1, "Lion": 1, "FusedLion": 1, "DeepSpeedCPULion": 1, "Adafactor": 0, "Adagrad": 0}
"""Numbers per parameter that an optimizer makes at its first step; all others count as Adam."""
_BEFORE_ALL = -2
"""Stands in for the number of the step: DeepSpeed's profiler and its own progress lines wait for theirs."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Bytes of this rank's device."""

    before: int
    """In use before the step: weights, and what else stays."""
    forward_backward: int
    """Most in use while gradients were computed."""
    update: int
    """Most in use at the update; 0 where gradients overflowed and none was due."""


@contextmanager
def unchanged(engine: DeepSpeedEngine) -> Iterator[None]:
    """Put the engine's counters, its loss scale and the random generators back afterwards, and write no events.

    Weights, optimizer and schedule are not touched by a step whose update is refused.
    """
    counters = {name: getattr(engine, name) for name in _COUNTERS}
    scaler = _loss_scaler(engine)
    scale = dict(vars(scaler)) if scaler is not None else {}
    generators, is_monitored = random_state.capture(), engine.monitor.enabled
    engine.monitor.enabled = False
    try:
        yield
    finally:
        engine.monitor.enabled = is_monitored
        random_state.restore_state(generators)
        if scaler is not None:
            vars(scaler).update(scale)
        for name, value in counters.items():
            setattr(engine, name, value)


def rehearse_step(
    engine: DeepSpeedEngine,
    guard: Guard,
    batch: Any,
    memory: PeakMemory,
    num_micro_batches: int,
    objective: Objective = LANGUAGE,
) -> Measured:
    """Do a step whose update is refused. A collective; only within `unchanged`.

    A micro-batch comes twice: gradients of the first are there in the second, and ZeRO-3 fetches ahead what it has
    seen before.

    Args:
        engine: the engine.
        guard: of the engine.
        batch: a micro-batch; of the same shape on every rank.
        memory: entered.
        num_micro_batches: of a step of the engine, in which the two are the last; after 1 each is a step.
        objective: see `train_step`.

    Raises:
        torch.OutOfMemoryError: it does not fit; RuntimeError on CPUs.
    """
    seen: dict[str, int] = {}

    def refuse(grad_norm: float) -> bool:
        """Take the memory of the update just before it, when all gradients are there."""
        seen["forward_backward"] = max(memory.peak(), seen.get("forward_backward", 0))
        memory.restart()
        _take(engine)
        seen["update"] = memory.peak()
        memory.restart()
        return False

    _make_loss_plain(engine)
    engine.train()
    before = memory.restart()
    judge, guard.gate.may_update = guard.gate.may_update, refuse
    try:
        for window in _windows(engine, batch, num_micro_batches):
            engine.global_steps, engine.micro_steps = _BEFORE_ALL, num_micro_batches - len(window)
            train_step(engine, window, world_size(), guard, objective=objective)
    finally:
        guard.gate.may_update = judge
    return Measured(before, max(memory.peak(), seen.get("forward_backward", 0)), seen.get("update", 0))


def _windows(engine: DeepSpeedEngine, batch: Any, num_micro_batches: int) -> list[list[Any]]:
    """Return the micro-batches of each step; a pipeline takes all of a step, of which it holds several at once."""
    if is_pipeline(engine):
        return [[batch] * num_micro_batches]
    return [[batch, batch]] if num_micro_batches > 1 else [[batch], [batch]]


def _loss_scaler(engine: DeepSpeedEngine) -> object | None:
    """Return what holds fp16's loss scale: ZeRO's optimizers have one, DeepSpeed's without ZeRO another."""
    optimizer = engine.optimizer
    return getattr(optimizer, "loss_scaler", None) or getattr(optimizer, "loss_scale_config", None)


def _make_loss_plain(engine: DeepSpeedEngine) -> None:
    """Let no gradient overflow for the sake of a scale that is still to be found."""
    scaler = _loss_scaler(engine)
    for name, value in (("cur_scale", 1.0), ("raise_error_at_min_scale", False)):
        if scaler is not None and name in vars(scaler):
            setattr(scaler, name, value)


def _take(engine: DeepSpeedEngine) -> None:
    """Take, for a moment, the memory that the update takes: an optimizer's states where they are not there yet, a copy.

    The copy is of the largest group's gradients in fp32, or of what Adam computes from them (deepspeed 0.19.8: ZeRO-1
    and 2 flatten a group, ZeRO-3 a tile; PyTorch's Adam needs as much for square roots).
    """
    optimizer = engine.basic_optimizer
    states = _STATES.get(type(optimizer).__name__, 2)
    tiles = getattr(engine.optimizer, "fp32_partitioned_groups_flat", None)  # ZeRO-3 hands over one after the other
    groups = [[tile] for tile in tiles] if tiles else [group["params"] for group in optimizer.param_groups]
    here = [[one for one in group if one.device == engine.device] for group in groups]
    moments = [
        torch.empty_like(one) for group in here for one in group for _ in range(states) if not optimizer.state.get(one)
    ]
    copies = max((sum(one.numel() for one in group) for group in here), default=0)
    moments.append(torch.empty(copies, dtype=torch.float32, device=engine.device))
