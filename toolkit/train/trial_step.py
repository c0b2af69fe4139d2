"""A trial step before the first one that leaves everything as it was: its memory, and the micro-batch that fits."""

import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed import DeepSpeedEngine
from deepspeed.accelerator import get_accelerator

from toolkit.checkpoint import directory, random_state
from toolkit.config.mesh import accumulation, micro_rows, micro_sizes
from toolkit.config.schema import Device, RunConfig, TuningMethod
from toolkit.distributed.process_group import gather, world_size
from toolkit.engine.memory import PeakMemory, is_out_of_memory, limit_bytes, shown
from toolkit.errors import ConfigError, OutOfMemory
from toolkit.launch.environment import Ranks
from toolkit.messages import say, tr
from toolkit.models.pipeline import is_pipeline
from toolkit.train.anomalies import StepGuard
from toolkit.train.run_dir import RunSource
from toolkit.train.run_plan import RunPlan
from toolkit.train.step import train_step
from toolkit.train.task import Task

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
def restore_after(engine: DeepSpeedEngine) -> Iterator[None]:
    """Restore the engine's counters, its loss scale, its module's buffers and the random generators; write no events.

    Weights, optimizer and schedule are not touched by a step whose update is rejected.
    """
    buffers = [buffer.clone() for buffer in engine.module.buffers()]  # the statistics of batch norm
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
        with torch.no_grad():
            for buffer, value in zip(engine.module.buffers(), buffers, strict=True):
                buffer.copy_(value)
        if scaler is not None:
            vars(scaler).update(scale)
        for name, value in counters.items():
            setattr(engine, name, value)


def trial_step(
    engine: DeepSpeedEngine, task: Task, guard: StepGuard, batch: Any, memory: PeakMemory, num_micro_batches: int
) -> Measured:
    """Do a step whose update is refused. A collective; only within `unchanged`.

    A micro-batch comes twice: gradients of the first are there in the second, and ZeRO-3 fetches ahead what it has
    seen before.

    Args:
        engine: the engine.
        task: what is learned.
        guard: of the engine.
        batch: a micro-batch; of the same shape on every rank.
        memory: entered.
        num_micro_batches: of a step of the engine, in which the two are the last; after 1 each is a step.

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
            train_step(engine, task, window, world_size(), guard)
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


SHARE = 0.92
"""Of the memory that may be used: the rest is for what falls apart in it, and for what communication takes."""


def find_micro_batch(
    engine: DeepSpeedEngine, task: Task, guard: StepGuard, cfg: RunConfig, memory: PeakMemory, room: int
) -> int:
    """Return how many rows a micro-batch may have, the same on every rank. A collective; changes nothing.

    One row cut to half its length, two such rows and a whole row take no more than a run needs at least, and tell what
    grows with the rows and what does not. From there the rows at most double as long as twice as many should fit: what
    is measured grows ever faster, if anything, so that where the last two lead to too much, it is too much.

    Args:
        engine: for micro-batches of one row.
        task: settled with micro-batches of one row.
        guard: of the engine.
        cfg: with micro-batches of one row.
        memory: entered.
        room: bytes that this rank may use.
    """
    times, sizes = accumulation(cfg, world_size()), micro_sizes(cfg, world_size())
    if times == 1:
        return 1

    def measure(rows: int, share: float = 1.0) -> Measured:
        return trial_step(engine, task, guard, task.larger_batch(rows, share), memory, times)

    with restore_after(engine):
        half, two_halves, whole = measure(1, 0.5), measure(2, 0.5), measure(1)
        before, last = (0, 2 * half.forward_backward - two_halves.forward_backward), (1, whole.forward_backward)
        while (rows := min(gather(_next(sizes, before, last, SHARE * room)))) > last[0]:
            found = measure(rows)
            if not all(gather(max(found.forward_backward, found.update) <= SHARE * room)):
                break
            before, last = last, (rows, found.forward_backward)
    get_accelerator().empty_cache()
    return last[0]


def _next(sizes: Sequence[int], before: tuple[int, int], last: tuple[int, int], room: float) -> int:
    """Return the size to be tried after the last, or the last itself if no larger one will fit.

    Args:
        sizes: rows, ascending.
        before: rows, and the bytes that were measured with them.
        last: the same of more rows.
        room: bytes.
    """
    rows, taken = last
    per_row = (taken - before[1]) / (rows - before[0])
    larger = [size for size in sizes if size > rows]
    near = [size for size in larger if size <= 2 * rows] or larger[:1]
    return max((size for size in near if taken + (size - rows) * per_row <= room), default=rows)


def set_micro_batch(engine: DeepSpeedEngine, cfg: RunConfig) -> None:
    """Let an engine, before its first step, have the micro-batches of a config.

    Its optimizers read the number of micro-batches in one place, where gradients are kept in host memory (deepspeed
    0.19.8); its `config` is what checkpoints keep.
    """
    rows, times = micro_rows(cfg), accumulation(cfg, world_size())
    engine.set_train_micro_batch_size(rows)
    # Not by set_train_batch_size, which takes every rank for one with rows of its own.
    engine._config.train_batch_size, engine._config.gradient_accumulation_steps = cfg.batch.global_size, times
    engine.config |= {"train_micro_batch_size_per_gpu": rows, "gradient_accumulation_steps": times}
    if hasattr(engine.optimizer, "gradient_accumulation_steps"):
        engine.optimizer.gradient_accumulation_steps = times


@contextmanager
def explain_out_of_memory(
    cfg: RunConfig,
    ranks: Ranks,
    doing: str,
    memory: PeakMemory,
    limit: int,
    plan: RunPlan | None,
    sections: tuple[str, ...] = ("",),
) -> Iterator[None]:
    """Say of memory that runs out what it was wanted for, what was measured and planned, and what helps.

    Only what helps in some `sections` of the config, where the others have no effect.
    """
    before = memory.restart()
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        lines = [
            tr(
                "out of memory before the first step, on rank {rank} ({host}): {doing}.",
                rank=ranks.rank,
                host=socket.gethostname(),
                doing=doing,
            ),
            tr(
                "  measured: {before} before it, {peak} at most until it failed, {limit} may be used.",
                before=shown(before),
                peak=shown(memory.highest()),
                limit=shown(limit) if limit else "?",
            ),
            *([plan.lines()] if plan else []),
            tr("  reason: {reason}", reason=(str(error) or type(error).__name__).splitlines()[0]),
            tr("What helps, the cheapest first; each can be pasted behind the command:"),
            *(f"  {word}" for word in remedies(cfg, ranks.world_size) if word.startswith(sections)),
        ]
        raise OutOfMemory("\n".join(lines)) from None


def remedies(cfg: RunConfig, world_size: int) -> list[str]:
    """Return overrides that take less memory than a config, the cheapest first."""
    words = []
    micro, zero = micro_rows(cfg), cfg.zero
    smaller = [rows for rows in micro_sizes(cfg, world_size) if rows < micro]
    if smaller:
        words.append(f"batch.micro_per_gpu={smaller[-1]}")
    if not cfg.train.activation_checkpointing.enabled:
        words.append("train.activation_checkpointing.enabled=true")
    if smaller[:-1]:
        words.append("batch.micro_per_gpu=1")
    highest = cfg.tuning.max_stage
    if world_size > 1:
        words += [f"zero=stage{stage}" for stage in range(max(zero.stage + 1, 2), highest + 1)]
    if zero.offload_optimizer.device is Device.none:
        words.append(f"zero=stage{max(zero.stage, 2)}_offload")
    if zero.offload_param.device is Device.none and highest == 3:
        words.append("zero=stage3_offload")
    if cfg.tuning.method is TuningMethod.full:
        words.append("tuning=lora")
    return [*dict.fromkeys(words), f"data.max_length={cfg.data.max_length // 2}"]


def micro_batch_before(cfg: RunConfig, ranks: Ranks, origin: RunSource) -> int:
    """Return the micro-batch that the run began with; 0 if it begins now, or so many ranks cannot have that one."""
    if origin.checkpoint is None:
        return 0
    rows = int(directory.read_run_state(origin.checkpoint).config["batch"]["micro_per_gpu"])
    return rows if rows in micro_sizes(cfg, ranks.world_size) else 0


def search_micro_batch(
    cfg: RunConfig, task: Task, ranks: Ranks, build: Callable[[], tuple[DeepSpeedEngine, StepGuard]]
) -> tuple[int, tuple[DeepSpeedEngine, StepGuard]]:
    """Return the largest micro-batch that fits, and the engine by which that was found. A collective.

    Args:
        cfg: with micro-batches of one row.
        task: settled with it.
        ranks: who this process is.
        build: returns the engine for such micro-batches, and its guard.

    Raises:
        ConfigError: if nothing says how much memory there is.
        OutOfMemory: if not even one row fits.
    """
    device = torch.device(get_accelerator().current_device_name())
    limit = limit_bytes(device, cfg.plan.max_gpu_gib)
    if not limit:
        raise ConfigError(
            tr(
                "batch.micro_per_gpu = auto fills the memory of a rank, and CPU ranks have none of their own. Give a "
                "number, or a bound: plan.max_gpu_gib=4."
            )
        )
    engine, guard = build()
    with PeakMemory(engine.device) as memory:
        with explain_out_of_memory(cfg, ranks, tr("looking for batch.micro_per_gpu with one row"), memory, limit, None):
            rows = find_micro_batch(engine, task, guard, cfg, memory, limit)
        used = memory.highest()
    if ranks.rank == 0:
        say(
            tr(
                "batch.micro_per_gpu = auto: {rows} rows at once on each rank, {times} times per step. Memory while it "
                "was sought: {used} at most, of {limit}.",
                rows=rows,
                times=accumulation(cfg, ranks.world_size) // rows,
                used=shown(used),
                limit=shown(limit),
            )
        )
    return rows, (engine, guard)
