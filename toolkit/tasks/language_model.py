"""Builds the model that a recipe trains, and checks its engine."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from deepspeed import DeepSpeedEngine
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from toolkit.config import requirements
from toolkit.config.mesh import mesh_of
from toolkit.config.schema import Fp8, Init, KernelsConfig, LossKernel, RunConfig, TuningMethod, When
from toolkit.data import loader
from toolkit.distributed import accelerator, process_group
from toolkit.engine import ds_config
from toolkit.messages import ConfigError, say, tr
from toolkit.models import load, loss, probe, save, stages
from toolkit.models.record import record_of, tuning_state
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
    is_resumed: bool = False,
) -> None:
    """Apply a recipe's changes to a model: loss, routers, fine-tuning method, FP8, NEFTune. A collective if parameters
    are partitioned. `base`: the model's directory; `is_resumed`: a checkpoint is loaded later. ConfigError or
    ModelError for what this model does not support.
    """
    record = record_of(model)
    record.loss_head, record.routers = loss.LossHead(cfg.kernels.loss), None
    router_settings = (cfg.model.router_loss, cfg.model.router_bias_rate, cfg.model.expert_capacity)
    # `_can_record_outputs` (modeling_utils.py of transformers 5.24) names outputs of layers: routers' of experts, too.
    recordable = [getattr(part, "_can_record_outputs", None) or {} for part in model.modules()]
    has_routers = any("router_logits" in outputs for outputs in recordable)
    if has_routers or max(router_settings) > 0:  # of a model without routers `routers_of` rejects the settings
        from toolkit.models.router_loss import routers_of

        record.routers = routers_of(model, cfg)
    trains_a_part = cfg.tuning.method is not TuningMethod.full
    if not trains_a_part and cfg.model.init is Init.pretrained:
        from toolkit.models import trainable

        trains_a_part = bool(trainable.untrained_prefixes(model))
    if trains_a_part:
        from toolkit.models import fine_tuning

        fine_tuning.apply_tuning(model, tuning_of(cfg), base, tokenizer, cfg.run.seed, ds_config, is_resumed)
    if cfg.kernels.mlp_pieces > 1:
        from toolkit.models.layers import tile_mlp

        tile_mlp(model, cfg.kernels.mlp_pieces)
    if cfg.precision.fp8 is not Fp8.none:
        from toolkit.layouts import fp8

        fp8.convert(model, cfg.precision.fp8, cfg.compile.enabled)
    if cfg.train.neftune_alpha:
        from toolkit.models.layers import add_neftune

        add_neftune(model, cfg.train.neftune_alpha)


def build_model(
    cfg: RunConfig, data: language_data.LanguageData, ds: ds_config.DsConfig, source: run_dir.RunSource
) -> torch.nn.Module:
    """Load and adapt the model, or a pipeline's stage of it; an error for what it does not support. A collective."""
    accelerator.set_tf32(cfg.precision.tf32)
    model = _load_model(cfg, data, ds)
    record_of(model).without_liger = apply_liger(model, cfg.kernels)
    base = _base_folder(cfg, data, model, source.folder)
    adapt(model, cfg, data.tokenizer, base, ds.values, is_resumed=bool(source.checkpoint))
    if record_of(model).tuned:
        _check_base(model, cfg, base, source)
    if cfg.parallel.pipeline == 1:
        return model
    from toolkit.layouts.pipeline import PipelineStage

    return PipelineStage(model, cfg.parallel.pipeline, load.TORCH_DTYPES[cfg.precision.dtype], cfg.parallel.tensor)


def apply_liger(model: Any, kernels: KernelsConfig) -> str:
    """Replace a model's norms, MLPs and rotary positions by liger's Triton kernels (0.8.5) if `kernels.liger` allows.

    Returns:
        The reason why they were not replaced, "" if they were. ConfigError if they must be and cannot.
    """
    reason = requirements.reason_not_to_use_liger(accelerator.trains_on_cuda())
    if reason and kernels.loss is LossKernel.liger:
        raise ConfigError("kernels.loss = liger: {reason}", reason=reason)
    if kernels.liger is When.never:
        return tr("kernels.liger is never")
    reason = reason or _reason_liger_does_not_know(model.config.model_type)
    if reason and kernels.liger is When.always:
        raise ConfigError("kernels.liger = always: {reason}", reason=reason)
    if reason:
        return reason
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    # Not the loss: the toolkit sums it over the global batch (kernels.loss).
    _apply_liger_kernel_to_instance(model=model, cross_entropy=False, fused_linear_cross_entropy=False)
    from toolkit.models import experts

    experts.restore_expert_interface(model)
    return ""


def _reason_liger_does_not_know(model_type: str) -> str:
    """Return a sentence if liger-kernel does not know a type of models, "" if it does. It learns glm (0.8.5 lacks it),
    whose norms and feed-forward layers are Phi-3's, unlike its rotary positions (transformers 5.24).
    """
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    MODEL_TYPE_TO_APPLY_LIGER_FN.setdefault("glm", partial(MODEL_TYPE_TO_APPLY_LIGER_FN["phi3"], rope=False))
    if model_type in MODEL_TYPE_TO_APPLY_LIGER_FN:
        return ""
    return tr("liger-kernel does not know {kind} models", kind=model_type)


def check_engine(engine: DeepSpeedEngine, cfg: RunConfig, data: language_data.LanguageData) -> None:
    """Raise ModelError if samples of a row influence each other; report how the model computes. A collective."""
    _check_attention(engine, cfg, data)
    say(_describe_computation(engine, cfg))
    model = stages.stage_model(engine.module)
    if routers := record_of(model).routers:
        _report_routers(routers)
    if cfg.model.init is Init.pretrained:
        from toolkit.models import trainable

        trainable.report_frozen_parts(model)
        trainable.report_untested_type(model)


def _load_model(cfg: RunConfig, data: language_data.LanguageData, ds: ds_config.DsConfig) -> PreTrainedModel:
    """Return the recipe's model, or this rank's part of a divided one. A collective."""
    mesh = mesh_of(cfg, process_group.world_size(), process_group.rank())
    head = language_data.head_of(cfg, data)
    part_of = None  # function: empty model -> the tensors that this rank has of it; None: all
    at_layer = None  # function that changes each layer once it is read
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

        at_layer = quantize_layer  # not all at the end: the 16-bit model need not fit into host memory
    packed, dtype = data.layout is not loader.Layout.alone, cfg.precision.dtype
    parts = cfg.parallel.sequence
    model = load.create_model(
        cfg.model, dtype, data.tokenizer, cfg.run.seed, ds.values, packed, parts, part_of, head, at_layer
    )
    load.report_extra_tensors(model)
    return model


def _check_attention(engine: DeepSpeedEngine, cfg: RunConfig, data: language_data.LanguageData) -> None:
    """Raise ModelError if samples of a packed row, or parts of a divided one, give other logits. A collective."""
    packed, parts = data.layout is not loader.Layout.alone, cfg.parallel.sequence
    forward = None  # function that gives logits; None: the model itself does
    if stages.is_pipeline(engine):
        from toolkit.layouts.pipeline import forward_logits

        forward = partial(forward_logits, engine, pick=lambda logits: logits[..., :1024])  # of some tokens: enough
    elif cfg.task.has_head:
        from toolkit.models.classifier import token_scores

        forward = partial(token_scores, engine)
    arguments = engine, len(data.tokenizer), engine.device, cfg.model.name or cfg.model.path
    if packed:
        remedy = "data.share_prefixes=false" if cfg.preference.is_paired else "data.packing=grouped"
        from toolkit.models.isolation import check_isolation

        check_isolation(*arguments, forward, data.shares_prefixes, remedy)
    if parts > 1:
        from toolkit.layouts.sequence import check_sequence_parallel

        check_sequence_parallel(*arguments, forward, packed, data.shares_prefixes)


def _check_base(model: PreTrainedModel, cfg: RunConfig, base: Path, source: run_dir.RunSource) -> None:
    """Raise ModelError if a checkpoint has another base; warn of an unmergeable adapter. A collective."""
    from toolkit.models import base_model

    tuned = tuning_state(model)
    if source.checkpoint and (trained_base := base_model.read_base(source.checkpoint / save.MODEL_DIR)):
        base_model.check_base(trained_base, tuned.base, source.checkpoint)
    if cfg.tuning.method in (TuningMethod.lora, TuningMethod.qlora):
        from toolkit.export import merge

        name = cfg.tuning.adapter or tr("the adapter of this run")
        part = merge.TunedPart(name, tuned.exported.settings, None, base, {}, tuned.head)
        process_group.on_rank0(lambda: merge.tell_unmergeable(part))


def _report_routers(routers: "Routers") -> None:
    """Report how the load of experts is balanced."""
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


def _describe_computation(engine: DeepSpeedEngine, cfg: RunConfig) -> str:
    """Return a line about attention, loss, layers, compilation and optimizer of a run. A collective."""
    model = stages.stage_model(engine.module)
    without_liger = record_of(model).without_liger
    descriptions = {
        loss.LossPath.losses: tr("fused with the output layer ({kernel})", kernel=loss.loss_head(model).name),
        loss.LossPath.picked: tr("from the logits of trained tokens"),
        loss.LossPath.all_logits: tr("from all logits"),
    }
    model_or_engine = model if stages.is_pipeline(engine) else engine
    if probe.is_classifier(model):
        description = tr("from the scores of last tokens")
    else:
        description = descriptions[
            stages.broadcast_from_last(engine, lambda: loss.loss_head(model).path(model_or_engine))
        ]
    optimizer = engine.basic_optimizer
    is_fused = isinstance(optimizer, torch.optim.Adam) and optimizer.defaults["fused"]
    backend = cfg.compile.backend + (" + DeepCompile" if cfg.compile.deepcompile else "")
    return tr(
        "Attention: {attention}. Loss: {loss}. Liger layers: {liger}. Compiled: {compiled}. Optimizer: {optimizer}.",
        attention=model.config._attn_implementation,
        loss=description,
        liger=tr("no, {reason}", reason=without_liger) if without_liger else tr("yes"),
        compiled=tr("yes, {backend}", backend=backend) if cfg.compile.enabled else tr("no"),
        optimizer=type(optimizer).__name__ + (" (PyTorch, fused)" if is_fused else ""),
    )


def _base_folder(cfg: RunConfig, data: language_data.LanguageData, model: PreTrainedModel, folder: Path) -> Path:
    """Return the base model's directory; random weights that an adapter is trained on are written into the run's."""
    if cfg.model.init is Init.pretrained or cfg.tuning.method is TuningMethod.full:
        return Path(cfg.model.path)
    from toolkit.export.write import write_folder
    from toolkit.models.base_model import RUN_BASE

    base = folder / RUN_BASE

    def write() -> None:
        if not base.exists():
            write_folder(model, save.non_weight_files(model, data.encoder), base, "hf", None)

    process_group.on_rank0(write)
    return base
