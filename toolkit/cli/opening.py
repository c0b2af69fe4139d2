"""From a config to a run that can begin: what it computes is decided and written down, and its engine is there."""

from dataclasses import dataclass

from deepspeed import DeepSpeedEngine

from toolkit.checkpoint.run_state import RunState
from toolkit.cli.building import build_engine
from toolkit.config.load import to_yaml
from toolkit.config.schema import RunConfig
from toolkit.distributed.process_group import on_rank0
from toolkit.engine.ds_config import DsConfig, build_ds_config
from toolkit.launch.environment import Ranks
from toolkit.messages import say
from toolkit.train import run_folder
from toolkit.train.batches import epoch_steps
from toolkit.train.guard import Guard
from toolkit.train.prepared import Prepared
from toolkit.train.resume import Origin, starting_state


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


def open_run(cfg: RunConfig, prepared: Prepared, ranks: Ranks, origin: Origin) -> Opened:
    """Write down what a run is, and build its engine. A collective.

    Args:
        cfg: checked config.
        prepared: tokenizer, stores and plans.
        ranks: who this process is.
        origin: run folder, and what the run goes on from.
    """
    total_steps = _total_steps(cfg, prepared)
    ds = build_ds_config(cfg, ranks.world_size, total_steps)
    config_yaml = to_yaml(cfg)
    start = on_rank0(lambda: starting_state(cfg, prepared, ranks, origin, say))
    on_rank0(lambda: run_folder.record_start(origin.folder, config_yaml, ds.values, ranks.world_size))
    engine = build_engine(cfg, prepared, ds, total_steps, origin)
    return Opened(
        cfg=cfg,
        prepared=prepared,
        total_steps=total_steps,
        ds=ds,
        start=start,
        engine=engine,
        guard=Guard(engine, cfg.train),
    )


def _total_steps(cfg: RunConfig, prepared: Prepared) -> int:
    return cfg.train.max_steps or cfg.train.epochs * epoch_steps(cfg, prepared)
