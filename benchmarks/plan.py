"""The plan of a rank's memory and time beside what they are: the same config, on the longest rows that it allows."""

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from deepspeed import DeepSpeedEngine
from deepspeed.accelerator import get_accelerator

from toolkit.config.mesh import Mesh, accumulation
from toolkit.config.schema import RunConfig
from toolkit.distributed.process_group import barrier, gather
from toolkit.engine.memory import PeakMemory
from toolkit.extras.calibration import longest_batch
from toolkit.launch.environment import Ranks
from toolkit.models.loss import token_losses
from toolkit.plan.lookup import outline_of
from toolkit.plan.machine import Machine
from toolkit.plan.memory import plan_rank
from toolkit.plan.speed import Rates, step_time
from toolkit.sample_types import Batch
from toolkit.tasks.language import LanguageTask
from toolkit.train.step import StepGuard, train_step

_STEPS = 2
_TIMED_STEPS = 3


def compare(
    cfg: RunConfig, build: Callable[[], DeepSpeedEngine], ranks: Ranks, device: torch.device, rates: Rates | None = None
) -> dict[str, Any]:
    """Build an engine, train a few steps, evaluate. A collective.

    Returns:
        By phase, bytes of the rank that needs most: `planned_bytes` and `measured_bytes`; `memory_ratio` of the two in
        a step; with rates `step_s`, median seconds of some steps, `planned_step_s` and `time_ratio`.
    """
    measured: dict[str, int] = {}
    world_size = ranks.world_size
    gc.collect()
    with PeakMemory(device, only_new=True) as memory:
        before = memory.restart()
        engine = build()
        measured["load"] = memory.peak() - before
        outline = outline_of(cfg, engine.module.config.vocab_size)
        batch = longest_batch(cfg, outline, engine.module)
        guard, task = StepGuard(engine, cfg.train), LanguageTask()

        def window() -> list[Batch]:
            return [dict(batch) for _ in range(accumulation(cfg, world_size))]

        engine.train()
        for _ in range(_STEPS):
            memory.restart()
            train_step(engine, task, window(), Mesh(world_size=world_size), guard)
            guard.check()
            measured["step"] = memory.peak() - before
        memory.restart()
        engine.eval()
        token_losses(engine, batch)
        measured["evaluation"] = memory.peak() - before
    times: dict[str, float] = {}
    if rates:
        engine.train()
        seconds = []
        for _ in range(_TIMED_STEPS):
            barrier()
            started = time.perf_counter()
            train_step(engine, task, window(), Mesh(world_size=world_size), guard)
            barrier()
            seconds.append(time.perf_counter() - started)
        estimate, measured_s = step_time(outline, cfg, _machine(ranks), rates).seconds, statistics.median(seconds)
        times = {"step_s": measured_s, "planned_step_s": estimate, "time_ratio": estimate / measured_s}
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
        **times,
    }


def _machine(ranks: Ranks) -> Machine:
    local = ranks.local_world_size or ranks.world_size
    return Machine(local, 0, None, ranks.world_size // local, on_cpu=get_accelerator().device_name() == "cpu")
