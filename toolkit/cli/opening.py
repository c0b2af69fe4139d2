"""From a config to a run that can begin: what it computes is decided and written down, and its engine is there."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from deepspeed import DeepSpeedEngine
from deepspeed.accelerator import get_accelerator

from toolkit.checkpoint import directory
from toolkit.checkpoint.directory import RunState
from toolkit.cli.building import build_engine
from toolkit.cli.planning import choose
from toolkit.cli.rehearsal import told
from toolkit.config.load import to_yaml
from toolkit.config.mesh import accumulation, micro_sizes, with_micro_batch
from toolkit.config.schema import AUTO, Packing, RunConfig
from toolkit.distributed.process_group import on_rank0
from toolkit.engine.ds_config import DsConfig, build_ds_config, warmup_steps
from toolkit.engine.memory import PeakMemory, limit_bytes, shown
from toolkit.errors import ConfigError
from toolkit.launch.environment import Ranks
from toolkit.messages import say, tr
from toolkit.train import data_card, micro_batch, run_folder
from toolkit.train.batches import epoch_rows, epoch_steps, rows_per_step
from toolkit.train.guard import Guard
from toolkit.train.prepared import Prepared, prepare_with
from toolkit.train.resume import Origin, identity, starting_state
from toolkit.train.run_length import Epoch, warnings


@dataclass(frozen=True, kw_only=True, slots=True)
class Opened:
    """A run before its first step."""

    cfg: RunConfig
    """Its config."""
    prepared: Prepared
    """Tokenizer, stores and plans."""
    total_steps: int
    """Optimizer steps of the whole run."""
    ds: DsConfig
    """What DeepSpeed receives."""
    start: RunState
    """Where it begins."""
    engine: DeepSpeedEngine
    """The engine."""
    guard: Guard
    """Judges the engine's steps."""


def open_run(cfg: RunConfig, prepared: Prepared, ranks: Ranks, origin: Origin, hosts: Sequence[str]) -> Opened:
    """Decide what is still open in a run's config, write down what it is, and build its engine. A collective.

    Args:
        cfg: checked config.
        prepared: tokenizer, stores and plans; for micro-batches of one row where their size is to be found.
        ranks: who this process is.
        origin: run folder, and what the run goes on from.
        hosts: of the ranks.
    """
    built: tuple[DeepSpeedEngine, Guard] | None = None
    is_open = cfg.plan.auto or cfg.batch.micro_per_gpu == AUTO
    if cfg.plan.auto:
        cfg = choose(cfg, prepared, ranks, torch.device(get_accelerator().current_device_name()), origin)
    elif is_open:
        rows = on_rank0(lambda: _rows_before(cfg, ranks, origin))
        if not rows:
            rows, built = _find_rows(with_micro_batch(cfg), prepared, ranks, origin)
        cfg = with_micro_batch(cfg, rows)
    if is_open and prepared.packing is Packing.grouped:  # its rows are micro-batches
        prepared = prepare_with(cfg, prepared.encoder, lambda line: None)
    total_steps = _total_steps(cfg, prepared)
    if ranks.rank == 0:
        for line in warnings(cfg, _epoch(cfg, prepared), total_steps, ranks.world_size):
            say(line)
    ds = build_ds_config(cfg, ranks.world_size, total_steps)
    config_yaml = to_yaml(cfg)
    start = on_rank0(lambda: starting_state(cfg, identity(prepared), ranks, origin, say))
    device = torch.cuda.get_device_name() if get_accelerator().device_name() == "cuda" else ""
    on_rank0(lambda: run_folder.record_start(origin.folder, config_yaml, ds.values, hosts, device))
    steps, rows_of_epoch = epoch_steps(cfg, prepared), epoch_rows(cfg, prepared)
    on_rank0(lambda: data_card.record(origin.folder, prepared, total_steps, steps, rows_of_epoch))
    if built is None:
        built = _build(cfg, prepared, ranks, origin)
    else:
        micro_batch.use(built[0], cfg)
        built[0].lr_scheduler.set_length(total_steps, warmup_steps(cfg, total_steps))
    engine, guard = built
    return Opened(cfg=cfg, prepared=prepared, total_steps=total_steps, ds=ds, start=start, engine=engine, guard=guard)


def _epoch(cfg: RunConfig, prepared: Prepared) -> Epoch:
    members = prepared.train_plan.members
    return Epoch(
        samples=len(prepared.train) if members is None else len(members),
        sequences=epoch_rows(cfg, prepared),
        per_step=rows_per_step(cfg, prepared.packing)[0],
    )


def _total_steps(cfg: RunConfig, prepared: Prepared) -> int:
    steps = epoch_steps(cfg, prepared)
    return cfg.train.max_steps or cfg.train.epochs * steps


def _build(cfg: RunConfig, prepared: Prepared, ranks: Ranks, origin: Origin) -> tuple[DeepSpeedEngine, Guard]:
    total_steps = _total_steps(cfg, prepared)
    ds = build_ds_config(cfg, ranks.world_size, total_steps)
    engine = build_engine(cfg, prepared, ds, total_steps, origin)
    return engine, Guard(engine, cfg.train)


def _rows_before(cfg: RunConfig, ranks: Ranks, origin: Origin) -> int:
    """Return the micro-batch that the run began with; 0 if it begins now, or so many ranks cannot have that one."""
    if origin.checkpoint is None:
        return 0
    rows = int(directory.read_run_state(origin.checkpoint).config["batch"]["micro_per_gpu"])
    return rows if rows in micro_sizes(cfg, ranks.world_size) else 0


def _find_rows(
    cfg: RunConfig, prepared: Prepared, ranks: Ranks, origin: Origin
) -> tuple[int, tuple[DeepSpeedEngine, Guard]]:
    """Return the largest micro-batch that fits, and the engine by which that was found. A collective.

    Raises:
        ConfigError: nothing says how much memory there is.
        OutOfMemory: not even one row fits.
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
    engine, guard = _build(cfg, prepared, ranks, origin)
    with PeakMemory(engine.device) as memory:
        with told(cfg, ranks, tr("looking for batch.micro_per_gpu with one row"), memory, limit, None):
            rows = micro_batch.find(engine, guard, cfg, prepared, memory, limit)
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
