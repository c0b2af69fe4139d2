"""The engine of a training session: the model, what tuning adds to it, optimizer and schedule."""

from pathlib import Path
from typing import Any

import torch
from deepspeed import DeepSpeedEngine
from transformers import PreTrainedModel

from toolkit.config.schema import Init, Packing, RunConfig, TuningMethod
from toolkit.distributed.process_group import on_rank0
from toolkit.engine.ds_config import DsConfig, warmup_steps
from toolkit.engine.initialize import initialize
from toolkit.export.folder import write_folder
from toolkit.models.attention import check_isolation
from toolkit.models.build import build_model
from toolkit.models.save import MODEL_DIR, describe
from toolkit.models.tuning.apply import tune
from toolkit.models.tuning.base import RUN_BASE, check_base, read_base
from toolkit.train.prepared import Prepared
from toolkit.train.resume import Origin
from toolkit.train.schedule import Schedule


def build_engine(cfg: RunConfig, prepared: Prepared, ds: DsConfig, total_steps: int, origin: Origin) -> DeepSpeedEngine:
    """Load the model, leave trainable what `tuning` says, and hand it to DeepSpeed. A collective.

    Args:
        cfg: checked config.
        prepared: tokenizer and stores.
        ds: the DeepSpeed dict.
        total_steps: optimizer steps.
        origin: run folder, and what the run goes on from.

    Raises:
        ModelError: the model cannot be loaded, or is not the one that the checkpoint was trained on.
        ConfigError: `tuning` does not fit the model, or DeepSpeed refuses the combination.
    """
    packed = prepared.packing is Packing.packed
    model = build_model(cfg.model, cfg.precision.dtype, prepared.tokenizer, cfg.run.seed, ds.values, packed)
    if cfg.tuning.method is not TuningMethod.full:
        base = _base_folder(cfg, prepared, model, origin.folder)
        tune(model, cfg.tuning, base, prepared.tokenizer, cfg.run.seed, ds.values)
        if origin.checkpoint and (known := read_base(origin.checkpoint / MODEL_DIR)):
            check_base(known, model.tuned.base, origin.checkpoint)
    warmup = warmup_steps(cfg, total_steps)

    def make_schedule(optimizer: torch.optim.Optimizer) -> Any:
        return Schedule(optimizer, cfg.schedule, cfg.optim.lr, total_steps, warmup)

    engine = initialize(model, ds.values, cfg.train.activation_checkpointing, make_schedule)
    if packed:
        check_isolation(engine, len(prepared.tokenizer), engine.device, cfg.model.name or cfg.model.path)
    return engine


def _base_folder(cfg: RunConfig, prepared: Prepared, model: PreTrainedModel, folder: Path) -> Path:
    """Return the folder of the model as it is before training; a random one is written into the run's."""
    if cfg.model.init is Init.pretrained:
        return Path(cfg.model.path)
    base = folder / RUN_BASE

    def write() -> None:
        if not base.exists():
            write_folder(model, describe(model, prepared.encoder), base, "hf", None)

    on_rank0(write)
    return base
