"""What a run finds out where its config leaves it open: `plan.auto` the layout, `batch.micro_per_gpu=auto` the rows."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from deepspeed import DeepSpeedEngine
from deepspeed.accelerator import get_accelerator

from toolkit.checkpoint import intact
from toolkit.config import mesh
from toolkit.config.schema import Device, RunConfig
from toolkit.distributed.process_group import gather, on_rank0, world_size
from toolkit.engine.ds_config import DsConfig, warmup_steps
from toolkit.engine.memory import PeakMemory, limit_bytes, shown
from toolkit.launch.environment import Ranks
from toolkit.messages import ConfigError, OutOfMemory, say, tr
from toolkit.plan import layouts, search, speed, summary
from toolkit.plan.lookup import outline_of
from toolkit.train import run_dir
from toolkit.train.dry_run import StepMemory, explain_out_of_memory, restore_after, smallest_machine, trial_step
from toolkit.train.step import StepGuard
from toolkit.train.task import Task

SHARE = 0.92
"""Of the memory that a micro-batch may use: the rest is for fragmentation and communication."""


def choose_layout(
    cfg: RunConfig, vocab_size: int, ranks: Ranks, device: torch.device, source: run_dir.RunSource
) -> RunConfig:
    """Return `cfg` with plan.auto's layout: that of the checkpoint in `source` if as many ranks saved it and its
    micro-batch still divides the global batch, else the fastest that fits; OutOfMemory if none fits. A collective.
    """
    if (checkpoint := source.checkpoint) is not None:
        state = on_rank0(lambda: intact.read_run_state(checkpoint))
        saved = state.config if state.world_size == ranks.world_size else {}  # {} too if another program saved it
        # A changed global batch (`checkpoint.allow_changes`) may not be divisible by the checkpoint's micro-batch.
        if saved and saved["batch"]["micro_per_gpu"] in mesh.micro_sizes(cfg, ranks.world_size):
            return _with_saved_layout(cfg, saved)
    machine = smallest_machine(cfg, ranks, device)

    def fastest_layout() -> layouts.Layout | None:
        outline = outline_of(cfg, vocab_size)
        rates = speed.rates_of(cfg, machine, outline)
        return search.fastest(list(search.layouts(outline, cfg, machine, rates, [cfg.parallel.expert])))

    fastest = on_rank0(fastest_layout)
    if fastest is None:
        raise OutOfMemory(
            "plan.auto: nothing fits on {machine}, of which {usable} GiB are for tensors. See  toolkit plan",
            machine=machine.name,
            usable=summary.gib(machine.usable_bytes),
        )
    overrides = " ".join(search.overrides(cfg, fastest.cfg)) or tr("the recipe as it is")
    say("plan.auto: {words}  ({layout})", words=overrides, layout=fastest.name)
    return fastest.cfg


def _with_saved_layout(cfg: RunConfig, saved: dict[str, Any]) -> RunConfig:
    """Return `cfg` with the layout of a checkpoint's config, `saved`."""
    laid_out = search.with_layout(
        cfg,
        saved["zero"]["stage"],
        Device(saved["zero"]["offload_optimizer"]["device"]),
        Device(saved["zero"]["offload_param"]["device"]),
        saved["train"]["activation_checkpointing"]["enabled"],
        saved["batch"]["micro_per_gpu"],
    )
    hpz_size = laid_out.zero.zero_hpz_partition_size  # the saved one was limited to a node's GPUs
    laid_out.zero.zero_hpz_partition_size = min(hpz_size, saved["zero"].get("zero_hpz_partition_size", hpz_size))
    return laid_out


def micro_batch_before(cfg: RunConfig, ranks: Ranks, source: run_dir.RunSource) -> int:
    """Return the micro-batch (rows) of `source`'s checkpoint; 0 if it has none, or if `cfg` here cannot have it."""
    if source.checkpoint is None:
        return 0
    rows = int(intact.read_run_state(source.checkpoint).config.get("batch", {}).get("micro_per_gpu", 0))
    return rows if rows in mesh.micro_sizes(cfg, ranks.world_size) else 0


def memory_to_fill(cfg: RunConfig) -> int:
    """Return how many bytes of a rank's device `search_micro_batch` may fill; ConfigError on CPUs without a bound."""
    limit = limit_bytes(torch.device(get_accelerator().current_device_name()), cfg.plan.max_gpu_gib)
    if not limit:
        raise ConfigError(
            tr(
                "batch.micro_per_gpu = auto fills the memory of a rank, and CPU ranks have none of their own. Give a "
                "number, or a bound: plan.max_gpu_gib=4."
            )
        )
    return limit


def search_micro_batch(
    cfg: RunConfig, task: Task, ranks: Ranks, engine: DeepSpeedEngine, guard: StepGuard, limit: int
) -> int:
    """Return the largest batch.micro_per_gpu (rows per rank) with which steps of the engine fit into `limit` bytes on
    every rank. A collective. A row is the longest sequence. Memory grows with rows linearly or faster, so each trial at
    most doubles the rows, as long as the line through the last two measurements fits.
    """
    rows_per_step = mesh.accumulation(cfg, ranks.world_size)  # of each rank: micro-batches have one row in `cfg`
    sizes = mesh.micro_sizes(cfg, ranks.world_size)
    most_rows = 1

    def measure(rows: int, share: float = 1.0) -> StepMemory:
        """Try a step on `rows` rows, each with a `share` of the longest sequence's tokens."""
        doing = tr("looking for batch.micro_per_gpu with {rows} rows", rows=rows)
        with explain_out_of_memory(cfg, doing, memory, limit, None):
            return trial_step(engine, task, guard, task.larger_batch(rows, share), memory, rows_per_step)

    with PeakMemory(engine.device) as memory:
        with restore_after(engine):
            if rows_per_step > 1:  # else there is no second row to compute at once
                half, two_halves, single = measure(1, 0.5), measure(2, 0.5), measure(1)
                # Memory without any row, on the line through one and two rows of half the length: 2 x one - two.
                before = RowsMemory(0, 2 * half.forward_backward - two_halves.forward_backward)
                last = RowsMemory(1, single.forward_backward)
                # All ranks try the rows of the one that has the least room.
                while (rows := min(gather(_next_rows(sizes, before, last, SHARE * limit)))) > last.rows:
                    measured = measure(rows)
                    if not all(gather(max(measured.forward_backward, measured.update) <= SHARE * limit)):
                        break
                    before, last = last, RowsMemory(rows, measured.forward_backward)
                most_rows = last.rows
        used = memory.highest()
    get_accelerator().empty_cache()
    say(
        "batch.micro_per_gpu = auto: {rows} rows at once on each rank, {times} times per step. Memory while it "
        "was sought: {used} at most, of {limit}.",
        rows=most_rows,
        times=rows_per_step // most_rows,
        used=shown(used),
        limit=shown(limit),
    )
    return most_rows


class RowsMemory(NamedTuple):
    """The most bytes in use on this rank in forward and backward passes of micro-batches of so many rows."""

    rows: int
    used_bytes: int


def _next_rows(sizes: Sequence[int], before: RowsMemory, last: RowsMemory, limit_bytes: float) -> int:
    """Return how many rows to try next: the most of `sizes` (ascending) up to double `last.rows`, or if there is none
    the next larger size, that the line through both measurements puts within `limit_bytes`; `last.rows` if none is.
    """
    rows, used_bytes = last
    bytes_per_row = (used_bytes - before.used_bytes) / (rows - before.rows)
    larger = [size for size in sizes if size > rows]
    candidates = [size for size in larger if size <= 2 * rows] or larger[:1]
    fitting = (size for size in candidates if used_bytes + (size - rows) * bytes_per_row <= limit_bytes)
    return max(fitting, default=rows)


def apply_settled(engine: DeepSpeedEngine, cfg: RunConfig, ds: DsConfig, total_steps: int) -> None:
    """Set micro-batch, accumulation and schedule of the settled `cfg` in an engine that was built before they were
    known; only before step 1 (deepspeed 0.19.8). `ds`: DeepSpeed's config for `cfg`.
    """
    rows, accumulation = mesh.micro_rows(cfg), mesh.accumulation(cfg, world_size())
    engine.set_train_micro_batch_size(rows)
    # set_train_batch_size would divide by all ranks, also by those of one model that share their rows.
    engine._config.train_batch_size, engine._config.gradient_accumulation_steps = cfg.batch.global_size, accumulation
    engine.config |= {"train_micro_batch_size_per_gpu": rows, "gradient_accumulation_steps": accumulation}
    if hasattr(engine.optimizer, "gradient_accumulation_steps"):
        engine.optimizer.gradient_accumulation_steps = accumulation
    engine.lr_scheduler.set_length(total_steps, warmup_steps(cfg, total_steps))
    # `received_config`, which becomes ds_config.json, says what trains.
    settled = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "scheduler")
    engine.received_config |= {key: ds.values[key] for key in settled if key in ds.values}
