"""The engine of a training session: the model, what tuning adds to it, optimizer and schedule."""

import gc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from deepspeed import DeepSpeedEngine
from transformers import PreTrainedModel

from toolkit.config.mesh import mesh_of
from toolkit.config.schema import Init, Packing, RunConfig, ScheduleName, TuningMethod
from toolkit.distributed.process_group import on_rank0, rank, world_size
from toolkit.engine.build import initialize_engine, use_tf32
from toolkit.engine.ds_config import DsConfig, warmup_steps
from toolkit.errors import ConfigError
from toolkit.export.huggingface import write_folder
from toolkit.messages import say, tr
from toolkit.models.adapters import RUN_BASE, apply_tuning, check_base, read_base
from toolkit.models.attention import check_isolation
from toolkit.models.directory import sequence_parallel_unsupported
from toolkit.models.kernels import apply_liger, tile_mlp
from toolkit.models.load import TORCH_DTYPES, create_model
from toolkit.models.loss import LossHead, LossPath, loss_head
from toolkit.models.pipeline import (
    PipelineStage,
    broadcast_from_last,
    forward_logits,
    is_pipeline,
    stage_model,
    stage_parameters,
)
from toolkit.models.regularization import TokenDropping, add_neftune
from toolkit.models.router_loss import router_loss
from toolkit.models.save import MODEL_DIR, describe
from toolkit.models.sequence import check_sequence_parallel
from toolkit.terminal import phase
from toolkit.train import run_folder
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
    packed, parts, stages = prepared.packing is Packing.packed, cfg.parallel.sequence, cfg.parallel.pipeline
    use_tf32(cfg.precision)
    model = _loaded(cfg, prepared, ds)
    without_liger = apply_liger(model, cfg.kernels)
    model.loss_head, model.router_loss = LossHead(cfg.kernels.loss), router_loss(model, cfg)
    if cfg.tuning.method is not TuningMethod.full:
        base = _base_folder(cfg, prepared, model, origin.folder)
        apply_tuning(model, cfg.tuning, base, prepared.tokenizer, cfg.run.seed, ds.values)
        if origin.checkpoint and (known := read_base(origin.checkpoint / MODEL_DIR)):
            check_base(known, model.tuned.base, origin.checkpoint)
    if cfg.kernels.mlp_pieces > 1:
        tile_mlp(model, cfg.kernels.mlp_pieces)
    if cfg.train.neftune_alpha:
        add_neftune(model, cfg.train.neftune_alpha)
    if cfg.train.random_ltd.steps:
        place = mesh_of(cfg, world_size(), rank())
        model.token_dropping = TokenDropping(model, cfg.train.random_ltd, cfg.run.seed, place.data_rank)
    make_schedule = schedule_maker(cfg, total_steps)
    with phase(tr("Building the engine (the first time DeepSpeed compiles its ops: minutes)"), speaks=rank() == 0):
        module = PipelineStage(model, stages, TORCH_DTYPES[cfg.precision.dtype]) if stages > 1 else model
        settings = run_folder.profiled(ds.values, origin.folder)
        recompute = cfg.train.activation_checkpointing
        engine = initialize_engine(module, settings, recompute, make_schedule, cfg.compile, cfg.optim)
    # What building leaves behind refers to itself, and would keep the memory of weights until Python looks for it.
    gc.collect()
    of_model = engine, len(prepared.tokenizer), engine.device, cfg.model.name or cfg.model.path
    if packed:
        check_isolation(*of_model, partial(forward_logits, engine, pick=_few) if is_pipeline(engine) else None)
    if parts > 1:
        check_sequence_parallel(*of_model, packed)
    in_use = _in_use(engine, cfg, without_liger)
    if rank() == 0:
        say(in_use)
        if model.router_loss is not None:
            say(
                tr(
                    "Routers: the mean of {count} layers' load-balancing losses x {coefficient} is added to the loss "
                    "(model.router_loss).",
                    count=model.router_loss.num_layers,
                    coefficient=model.router_loss.coefficient,
                )
            )
    return engine


def _loaded(cfg: RunConfig, prepared: Prepared, ds: DsConfig) -> PreTrainedModel:
    """Return the model that is trained; with pipeline stages with the weights of this rank's stage alone."""
    packed, parts = prepared.packing is Packing.packed, cfg.parallel.sequence
    if parts > 1 and (reason := sequence_parallel_unsupported(cfg.model, cfg.data.max_length)):
        raise ConfigError(tr("parallel.sequence = {ranks} cannot be: {reason}.", ranks=parts, reason=reason))
    stages, dtype = cfg.parallel.pipeline, cfg.precision.dtype
    stage = mesh_of(cfg, world_size(), rank()).stage
    own = partial(stage_parameters, num_stages=stages, stage=stage) if stages > 1 else None
    return create_model(cfg.model, dtype, prepared.tokenizer, cfg.run.seed, ds.values, packed, parts, own)


def _few(logits: torch.Tensor) -> torch.Tensor:
    """Return the logits of some of the vocabulary, which tell as much."""
    return logits[..., :1024]


def schedule_maker(cfg: RunConfig, total_steps: int) -> Callable[[torch.optim.Optimizer], Any]:
    """Return what makes the learning-rate schedule of an optimizer.

    Raises:
        ConfigError: the run is too short for its schedule.
    """
    warmup, decay = warmup_steps(cfg, total_steps), cfg.schedule.decay_steps
    if cfg.schedule.name is ScheduleName.wsd and warmup + decay > total_steps:
        raise ConfigError(
            tr(
                "schedule.warmup_steps = {warmup} and schedule.decay_steps = {decay} are more together than the "
                "{steps} steps of this run.",
                warmup=warmup,
                decay=decay,
                steps=total_steps,
            )
        )
    return lambda optimizer: Schedule(optimizer, cfg.schedule, cfg.optim.lr, total_steps, warmup)


def _in_use(engine: DeepSpeedEngine, cfg: RunConfig, without_liger: str) -> str:
    """Return a line about what computes this run. A collective."""
    model = stage_model(engine.module)
    ways = {
        LossPath.losses: tr("fused with the output layer ({kernel})", kernel=model.loss_head.name),
        LossPath.picked: tr("from the logits of trained tokens"),
        LossPath.all_logits: tr("from all logits"),
    }
    way = broadcast_from_last(engine, lambda: loss_head(model).path(model if is_pipeline(engine) else engine))
    optimizer = engine.basic_optimizer
    is_fused = isinstance(optimizer, torch.optim.Adam) and optimizer.defaults["fused"]
    backend = cfg.compile.backend + (" + DeepCompile" if cfg.compile.deepcompile else "")
    return tr(
        "Attention: {attention}. Loss: {loss}. Liger layers: {liger}. Compiled: {compiled}. Optimizer: {optimizer}.",
        attention=model.config._attn_implementation,
        loss=ways[way],
        liger=tr("no, {reason}", reason=without_liger) if without_liger else tr("yes"),
        compiled=tr("yes, {backend}", backend=backend) if cfg.compile.enabled else tr("no"),
        optimizer=type(optimizer).__name__ + (" (PyTorch, fused)" if is_fused else ""),
    )


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
