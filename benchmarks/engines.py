"""The engine of a recipe, as a run builds it, for what measures engines without a run."""

from pathlib import Path

from deepspeed import DeepSpeedEngine

from toolkit.config.schema import RunConfig
from toolkit.distributed.process_group import world_size
from toolkit.engine.build import initialize_engine
from toolkit.engine.ds_config import build_ds_config, with_flops_file
from toolkit.tasks.language_data import LanguageData
from toolkit.tasks.language_model import build_model
from toolkit.train.run_dir import RunSource
from toolkit.train.schedule import make_schedule

_STEPS = 1_000_000
"""Of a schedule that is never run to its end."""


def build_engine(cfg: RunConfig, prepared: LanguageData, folder: Path) -> DeepSpeedEngine:
    """Return the engine of a checked config and its data; `folder` takes the engine's own files. A collective."""
    ds = build_ds_config(cfg, world_size(), _STEPS)
    model, values = build_model(cfg, prepared, ds, RunSource(folder, None)), with_flops_file(ds.values, folder)
    recompute, schedule = cfg.train.activation_checkpointing, make_schedule(cfg, _STEPS)
    return initialize_engine(model, values, recompute, schedule, cfg.compile, cfg.optim)
