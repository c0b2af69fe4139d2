"""The plan of a rank's memory and time beside what they are: the same config, on the longest rows that it allows."""

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from deepspeed import DeepSpeedEngine
from deepspeed.accelerator import get_accelerator

from toolkit.config.checks import accumulation
from toolkit.config.schema import Init, RunConfig
from toolkit.distributed.process_group import barrier, gather
from toolkit.engine.memory import PeakMemory
from toolkit.launch.environment import Ranks
from toolkit.models.loss import token_losses
from toolkit.plan.machine import Machine
from toolkit.plan.memory import longest_rows, plan_rank
from toolkit.plan.outline import outline_of
from toolkit.plan.parameters import Outline, shape_of_random, tuned
from toolkit.plan.speed import Rates, step_time
from toolkit.train.guard import Guard
from toolkit.train.step import Batch, train_step

_STEPS = 2
_TIMED_STEPS = 3


def compare(
    cfg: RunConfig, build: Callable[[], DeepSpeedEngine], ranks: Ranks, device: torch.device, rates: Rates | None = None
) -> dict[str, Any]:
    """Build an engine, train a few steps, evaluate. A collective.

    Args:
        cfg: checked config.
        build: makes the engine.
        ranks: who this process is.
        device: of this rank.
        rates: measured ones, to estimate a step's time by.

    Returns:
        By phase, bytes of the rank that needs most: `planned_bytes` and `measured_bytes`; `memory_ratio` of the two in
        a step; `step_s`, median seconds of some steps, and with rates `planned_step_s` and `time_ratio`.
    """
    measured: dict[str, int] = {}
    world_size = ranks.world_size
    gc.collect()
    with PeakMemory(device, only_new=True) as memory:
        before = memory.restart()
        engine = build()
        measured["load"] = memory.peak() - before
        outline = _outline(cfg, engine)
        batch = longest_batch(cfg, outline, engine)
        guard = Guard(engine, cfg.train)
        engine.train()
        for _ in range(_STEPS):
            memory.restart()
            train_step(engine, [dict(batch) for _ in range(accumulation(cfg, world_size))], world_size, guard)
            guard.check()
            measured["step"] = memory.peak() - before
        memory.restart()
        engine.eval()
        token_losses(engine, batch)
        measured["evaluation"] = memory.peak() - before
    engine.train()
    seconds = []
    for _ in range(_TIMED_STEPS):
        barrier()
        started = time.perf_counter()
        train_step(engine, [dict(batch) for _ in range(accumulation(cfg, world_size))], world_size, guard)
        barrier()
        seconds.append(time.perf_counter() - started)
    step_s = statistics.median(seconds)
    estimate = step_time(outline, cfg, _machine(ranks), rates).seconds if rates else None
    plan = plan_rank(outline, cfg, world_size, device.type == "cpu")
    worst = {phase: max(one[phase] for one in gather(measured)) for phase in measured}
    engine.destroy()
    return {
        "parameters": outline.num_parameters,
        "trained_parameters": outline.num_trained,
        "planned_bytes": {phase: plan.peak(phase) for phase in measured},
        "measured_bytes": worst,
        "memory_ratio": plan.peak("step") / worst["step"],
        "planned_parts": plan.device["step"],
        "step_s": step_s,
        **({"planned_step_s": estimate, "time_ratio": estimate / step_s} if estimate else {}),
    }


def longest_batch(cfg: RunConfig, outline: Outline, engine: DeepSpeedEngine) -> Batch:
    """Return the largest micro-batch that a config allows, `[B, S]` on the CPU; every token of it is trained."""
    rows = longest_rows(outline, cfg)
    size = (rows.rows, rows.length)
    ids = torch.full(size, 5)
    if getattr(engine.module, "builds_positions", False):
        ids[:, 1] = engine.module.config.bos_token_id
    return {
        "input_ids": ids,
        "labels": ids.clone(),
        "position_ids": torch.arange(rows.length).repeat(rows.rows, 1),
        "segment_ids": torch.ones(size, dtype=torch.long),
    }


def _machine(ranks: Ranks) -> Machine:
    local = ranks.local_world_size or ranks.world_size
    return Machine(local, 0, None, ranks.world_size // local, on_cpu=get_accelerator().device_name() == "cpu")


def _outline(cfg: RunConfig, engine: DeepSpeedEngine) -> Outline:
    if cfg.model.init is Init.random:  # its vocabulary is its tokenizer's
        return tuned(*shape_of_random(engine.module.config.vocab_size, cfg.model.shape), cfg.tuning)
    return outline_of(cfg, print)
