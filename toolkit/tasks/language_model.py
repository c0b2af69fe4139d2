"""The model that a recipe trains, made of the one in its directory, and what is checked of its engine."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from deepspeed import DeepSpeedEngine
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from toolkit.config.mesh import mesh_of
from toolkit.config.schema import Fp8, Init, RunConfig, TuningMethod
from toolkit.data import loader
from toolkit.distributed import process_group
from toolkit.engine import build, ds_config
from toolkit.messages import say, tr
from toolkit.models import layers, load, loss, probe, save, stages, structure
from toolkit.plan.tuning_targets import tuning_of
from toolkit.tasks import language_data
from toolkit.train import run_dir

if TYPE_CHECKING:
    from toolkit.models.router_loss import Routers


def adapt(
    model: PreTrainedModel,
    cfg: RunConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    base: Path,
    ds_config: dict[str, Any] | None = None,
) -> None:
    """Change a model into the one that a recipe trains; where parameters are partitioned, a collective. `base`: see
    `base_model.base_of`; ConfigError or ModelError for what this model cannot do.
    """
    model.loss_head, model.routers = loss.LossHead(cfg.kernels.loss), None
    wanted = (cfg.model.router_loss, cfg.model.router_bias_rate, cfg.model.expert_capacity)
    if structure.routers_in(model) or max(wanted) > 0:
        from toolkit.models.router_loss import routers_of

        model.routers = routers_of(model, cfg)
    if cfg.tuning.method is not TuningMethod.full or structure.towers(model):
        from toolkit.models import fine_tuning

        fine_tuning.apply_tuning(model, tuning_of(cfg), base, tokenizer, cfg.run.seed, ds_config)
    if cfg.kernels.mlp_pieces > 1:
        layers.tile_mlp(model, cfg.kernels.mlp_pieces)
    if cfg.precision.fp8 is not Fp8.none:
        from toolkit.layouts import fp8

        fp8.convert(model, cfg.precision.fp8, cfg.compile.enabled)
    if cfg.train.neftune_alpha:
        layers.add_neftune(model, cfg.train.neftune_alpha)


def build_model(
    cfg: RunConfig, data: language_data.LanguageData, ds: ds_config.DsConfig, source: run_dir.RunSource
) -> torch.nn.Module:
    """Load the model, freeze as `tuning` says; of a pipeline, return this rank's stage as DeepSpeed's engine takes it.
    ModelError or ConfigError for what this model cannot do. A collective.
    """
    build.use_tf32(cfg.precision)
    model = _load(cfg, data, ds)
    model.without_liger = layers.apply_liger(model, cfg.kernels)
    base = _base_folder(cfg, data, model, source.folder)
    adapt(model, cfg, data.tokenizer, base, ds.values)
    if hasattr(model, "tuned"):
        _check_tuned(model, cfg, base, source)
    if cfg.parallel.pipeline == 1:
        return model
    from toolkit.layouts.pipeline import PipelineStage

    return PipelineStage(model, cfg.parallel.pipeline, load.TORCH_DTYPES[cfg.precision.dtype], cfg.parallel.tensor)


def check_engine(engine: DeepSpeedEngine, cfg: RunConfig, data: language_data.LanguageData) -> None:
    """Check that samples are computed as if alone, and say what computes, balances and freezes the model. A collective
    that raises ModelError.
    """
    _check_attention(engine, cfg, data)
    say(_in_use(engine, cfg))
    model = stages.stage_model(engine.module)
    if model.routers is not None:
        _tell_routers(model.routers)
    if cfg.model.init is Init.pretrained:
        from toolkit.models import trainable

        trainable.tell_towers(model)
        trainable.tell_untested(model)


def _load(cfg: RunConfig, data: language_data.LanguageData, ds: ds_config.DsConfig) -> PreTrainedModel:
    """Return the model of a recipe's directory, of divided ones this rank's part. A collective."""
    mesh = mesh_of(cfg, process_group.world_size(), process_group.rank())
    head, part_of, ready = language_data.head_of(cfg, data), None, None
    if cfg.parallel.pipeline > 1:
        from toolkit.layouts.pipeline import stage_parameters

        part_of = partial(stage_parameters, num_stages=cfg.parallel.pipeline, stage=mesh.stage, tuning=cfg.tuning)
        part_of = partial(part_of, num_scores=len(head.labels)) if head else part_of
    elif mesh.expert > 1:
        from toolkit.layouts.experts import divide

        part_of = partial(divide, ranks=mesh.expert)
    if cfg.precision.fp8 is not Fp8.none:
        from toolkit.layouts import fp8

        fp8.check_device(cfg.precision.fp8)
    if cfg.tuning.method is TuningMethod.qlora:
        from toolkit.models.lora import quantize_layer

        ready = quantize_layer  # each layer as soon as it is read: a model in 16 bits need not fit into host memory
    packed, dtype = data.layout is not loader.Layout.alone, cfg.precision.dtype
    parts = cfg.parallel.sequence
    model = load.create_model(
        cfg.model, dtype, data.tokenizer, cfg.run.seed, ds.values, packed, parts, part_of, head, ready
    )
    load.tell_extra(model)  # which a head would have taken the place of
    return model


def _check_attention(engine: DeepSpeedEngine, cfg: RunConfig, data: language_data.LanguageData) -> None:
    """See that samples of a packed row, and parts of a row on several ranks, are computed as if alone. A collective."""
    packed, parts = data.layout is not loader.Layout.alone, cfg.parallel.sequence
    forward = None
    if stages.is_pipeline(engine):  # the logits of some of the vocabulary tell as much
        forward = partial(stages.forward_logits, engine, pick=lambda logits: logits[..., :1024])
    elif cfg.task.has_head:
        from toolkit.models.classifier import token_scores

        forward = partial(token_scores, engine)
    of_model = engine, len(data.tokenizer), engine.device, cfg.model.name or cfg.model.path
    if packed:
        remedy = "data.share_prefixes=false" if cfg.preference.is_paired else "data.packing=grouped"
        from toolkit.models.isolation import check_isolation

        check_isolation(*of_model, forward, data.shares_prefixes, remedy)
    if parts > 1:
        from toolkit.layouts.sequence import check_sequence_parallel

        check_sequence_parallel(*of_model, forward, packed, data.shares_prefixes)


def _check_tuned(model: PreTrainedModel, cfg: RunConfig, base: Path, source: run_dir.RunSource) -> None:
    """Reject another base than a checkpoint's; warn of an adapter that cannot be merged later. A collective."""
    from toolkit.models import base_model

    tuned = model.tuned
    if source.checkpoint and (trained_base := base_model.read_base(source.checkpoint / save.MODEL_DIR)):
        base_model.check_base(trained_base, tuned.base, source.checkpoint)
    if cfg.tuning.method in (TuningMethod.lora, TuningMethod.qlora):
        from toolkit.export import merge

        name = cfg.tuning.adapter or tr("the adapter of this run")
        part = merge.TunedPart(name, tuned.settings, None, base, {}, tuned.head)
        process_group.on_rank0(lambda: merge.tell_unmergeable(part))


def _tell_routers(routers: "Routers") -> None:
    """Report how the experts of a mixture are kept in use."""
    if routers.coefficient:
        say(
            "Routers: the mean of {count} layers' load-balancing losses x {coefficient} is added to the loss "
            "(model.router_loss).",
            count=routers.num_layers,
            coefficient=routers.coefficient,
        )
    if routers.bias_rate:
        say(
            "Routers: after each step the experts' biases in {count} layers move by {rate} towards an equal load "
            "(model.router_bias_rate).",
            count=routers.num_layers,
            rate=routers.bias_rate,
        )


def _in_use(engine: DeepSpeedEngine, cfg: RunConfig) -> str:
    """Return a line about what computes this run. A collective."""
    model = stages.stage_model(engine.module)
    ways = {
        loss.LossPath.losses: tr("fused with the output layer ({kernel})", kernel=model.loss_head.name),
        loss.LossPath.picked: tr("from the logits of trained tokens"),
        loss.LossPath.all_logits: tr("from all logits"),
    }
    computes = model if stages.is_pipeline(engine) else engine
    if probe.is_classifier(model):
        way = tr("from the scores of last tokens")
    else:
        way = ways[stages.broadcast_from_last(engine, lambda: loss.loss_head(model).path(computes))]
    optimizer = engine.basic_optimizer
    is_fused = isinstance(optimizer, torch.optim.Adam) and optimizer.defaults["fused"]
    backend = cfg.compile.backend + (" + DeepCompile" if cfg.compile.deepcompile else "")
    return tr(
        "Attention: {attention}. Loss: {loss}. Liger layers: {liger}. Compiled: {compiled}. Optimizer: {optimizer}.",
        attention=model.config._attn_implementation,
        loss=way,
        liger=tr("no, {reason}", reason=model.without_liger) if model.without_liger else tr("yes"),
        compiled=tr("yes, {backend}", backend=backend) if cfg.compile.enabled else tr("no"),
        optimizer=type(optimizer).__name__ + (" (PyTorch, fused)" if is_fused else ""),
    )


def _base_folder(cfg: RunConfig, data: language_data.LanguageData, model: PreTrainedModel, folder: Path) -> Path:
    """Return the folder of the model as it is before training; a random one is written into the run's."""
    if cfg.model.init is Init.pretrained or cfg.tuning.method is TuningMethod.full:
        return Path(cfg.model.path)
    from toolkit.export.write import write_folder
    from toolkit.models.base_model import RUN_BASE

    base = folder / RUN_BASE

    def write() -> None:
        if not base.exists():
            write_folder(model, save.describe(model, data.encoder), base, "hf", None)

    process_group.on_rank0(write)
    return base
