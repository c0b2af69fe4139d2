"""The one call of `deepspeed.initialize`; parameter groups, and optimizers that DeepSpeed cannot make from a name."""

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import PipelineModule
from transformers import PreTrainedModel

from toolkit.config import rule_tables, schema
from toolkit.distributed.process_group import is_expert_part
from toolkit.engine import deepspeed_patches
from toolkit.engine.ds_config import count_sequence_parts, limit_reduce_bucket, tensor_ranks, without_optimizer
from toolkit.messages import ConfigError, tr
from toolkit.plan.outline import layer_of

STAGE = "stage"
"""Attribute of a PipelineModule: the transformers model that computes this rank's stage (toolkit.layouts.pipeline)."""


def initialize_engine(
    model: PreTrainedModel | PipelineModule,
    ds_config: dict[str, Any],
    activation_checkpointing: schema.ActivationCheckpointingConfig,
    make_schedule: Callable[[torch.optim.Optimizer], Any],
    compiling: schema.CompileConfig | None = None,
    optim: schema.OptimConfig | None = None,
) -> deepspeed.DeepSpeedEngine:
    """Build the engine that trains a model (under ZeRO-3 its weights are partitioned already, see models/load.py). A
    collective; ConfigError if DeepSpeed rejects the settings.

    `ds_config` alone decides about partitioning and precision; `optim`, if given, about parameter groups, and about
    optimizers that DeepSpeed does not have by name. `make_schedule` gets the optimizer and returns its learning-rate
    schedule. Without `compiling`, nothing is compiled. The engine's `received_config` is the JSON that DeepSpeed got.
    """
    if activation_checkpointing.enabled:
        from toolkit.engine.recompute import recompute_layers

        stage, own_model = ds_config["zero_optimization"]["stage"], getattr(model, STAGE, model)
        recompute_layers(own_model, activation_checkpointing, compiling or schema.CompileConfig(), stage)
    if isinstance(model, PipelineModule) and "tensor_parallel" in ds_config:
        from toolkit.layouts.tensor import split_stage

        ds_config = split_stage(model, getattr(model, STAGE), ds_config)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if any(map(is_expert_part, trained)):
        from toolkit.layouts import experts

        experts.check_not_alone(trained, ds_config)
        model.expert_groups = experts.ExpertGroups()
    if "zenflow" in ds_config["zero_optimization"]:
        from toolkit.engine.zenflow import patch_zenflow

        patch_zenflow(trained)
    elements = sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in trained)
    received = count_sequence_parts(limit_reduce_bucket(ds_config, elements))
    engine = _initialize(
        model,
        received,
        model_parameters=parameter_groups(model, optim or schema.OptimConfig()),
        optimizer=_optimizer(optim, received) if optim else None,
        mpu=_tensor_groups(model, ds_config),
        lr_scheduler=make_schedule,
    )
    engine.received_config = received
    deepspeed_patches.scale_fp16_loss(engine)
    deepspeed_patches.pass_rate_to_second_optimizers(engine)
    if compiling is not None and compiling.enabled:
        from toolkit.engine.compiling import compile_layers

        try:
            compile_layers(engine, getattr(model, STAGE, model), compiling)
        except (AssertionError, ValueError, RuntimeError) as error:
            raise _rejected_by_deepspeed(error) from error
    return engine


def initialize_untrained(model: PreTrainedModel, ds_config: dict[str, Any]) -> deepspeed.DeepSpeedEngine:
    """Build an engine without an optimizer, for the forward passes of a model that is partitioned already."""
    return _initialize(model, count_sequence_parts(without_optimizer(ds_config)), mpu=_tensor_groups(model, ds_config))


def _initialize(
    model: PreTrainedModel | PipelineModule, ds_config: dict[str, Any], **options: Any
) -> deepspeed.DeepSpeedEngine:
    """Apply the workarounds, call deepspeed.initialize, and check that it left the rotary frequencies unchanged.
    `options`: further arguments of that call. ConfigError if DeepSpeed rejects the settings.
    """
    frequencies = deepspeed_patches.rotary_frequencies(getattr(model, STAGE, model))
    deepspeed_patches.patch_norm_masking()
    deepspeed_patches.end_optimizer_processes_with_rank()
    if ds_config["zero_optimization"]["stage"] == 3:
        from toolkit.engine import partitioned

        partitioned.register_parameters_read_across_modules()
    try:
        engine, *_ = deepspeed.initialize(model=model, config=ds_config, dist_init_required=False, **options)
    except (AssertionError, ValueError, NotImplementedError) as error:
        raise _rejected_by_deepspeed(error) from error
    deepspeed_patches.assert_frequencies_unchanged(getattr(engine.module, STAGE, engine.module), frequencies)
    return engine


def _tensor_groups(model: PreTrainedModel | PipelineModule, ds_config: dict[str, Any]) -> ModuleType | None:
    """Return the `mpu` from which DeepSpeed learns the tensor-parallel groups, None if layers are not split."""
    if tensor_ranks(ds_config) == 1:
        return None
    from toolkit.layouts.tensor import tensor_groups

    return tensor_groups(model, ds_config)


def _rejected_by_deepspeed(error: Exception) -> ConfigError:
    """Return the error about settings that made DeepSpeed raise `error`."""
    return ConfigError("DeepSpeed rejects this configuration: {reason}", reason=str(error) or type(error).__name__)


Groups = list[torch.nn.Parameter] | list[dict[str, Any]]


def parameter_groups(
    model: torch.nn.Module, optim: schema.OptimConfig, copies: Mapping[str, torch.nn.Parameter] | None = None
) -> Groups:
    """Return a model's trained parameters as an optimizer takes them: in groups of equal learning rate and weight decay
    if `optim` asks for such, with divided experts in groups of their own, else as a plain list. The group with the
    highest rate comes first, as logs show its rate. `copies`: parameter's name -> what is returned in its place.
    """
    named = (copies or dict(model.named_parameters())).items()
    trained = {name: parameter for name, parameter in named if parameter.requires_grad}
    parameters = list(trained.values())
    groups = _groups_by_rate(model, optim, trained) if rule_tables.is_grouped(optim) else [{"params": parameters}]
    if any(map(is_expert_part, parameters)):
        from toolkit.layouts.experts import split_off_experts

        return split_off_experts(groups)
    return groups if rule_tables.is_grouped(optim) else parameters


def _groups_by_rate(
    model: torch.nn.Module, optim: schema.OptimConfig, trained: Mapping[str, torch.nn.Parameter]
) -> list[dict[str, Any]]:
    """Return groups of equal learning rate and weight decay, highest rate first, of a model's `trained` parameters."""
    from toolkit.engine.weight_decay import weight_names

    weights = weight_names(model)
    num_layers = 1 + max(map(layer_of, trained), default=-1)  # numbered from 0; -1: in no layer
    groups: dict[tuple[float, bool], list[torch.nn.Parameter]] = {}
    for name, parameter in trained.items():
        is_weight, is_in_layer = name in weights, layer_of(name) >= 0
        decays = {"all": True, "matrices": is_weight, "hidden": is_weight and is_in_layer}[optim.decay.value]
        groups.setdefault((_peak_rate(optim, name, parameter, num_layers), decays), []).append(parameter)
    return [
        {"params": groups[rate, decays], "lr": rate, "weight_decay": optim.weight_decay if decays else 0.0}
        for rate, decays in sorted(groups, reverse=True)
    ]


def _peak_rate(optim: schema.OptimConfig, name: str, parameter: torch.nn.Parameter, num_layers: int) -> float:
    """Return a parameter's peak learning rate, which falls from layer to layer as in ELECTRA (arXiv 2003.10555,
    appendix B) and BEiT.
    """
    is_matrix = len(getattr(parameter, "ds_shape", parameter.shape)) >= 2
    # What DeepSpeed's Muon orthogonalizes (0.19.8, deepspeed/__init__.py, set_optimizer_flags).
    is_muon = is_matrix and not any(word in name.lower() for word in ("embed", "lm_head"))
    rate = optim.adam_lr if optim.adam_lr and not is_muon else optim.lr
    if ".lora_B." in name:
        rate *= optim.lora_plus_ratio
    # Counted from the top: 0 above the last layer, 1 for the last layer, `num_layers` + 1 for embeddings.
    depth = num_layers + 1 if "embed" in name.lower() else 0
    if (layer := layer_of(name)) >= 0:
        depth = num_layers - layer
    return rate * optim.layer_lr_decay**depth


def _optimizer(optim: schema.OptimConfig, ds_config: dict[str, Any]) -> Callable[[Any], torch.optim.Optimizer] | None:
    """Return a function that makes the optimizer of a DeepSpeed JSON; None if DeepSpeed makes it by name."""
    if not ds_config.get("bf16", {}).get("bf16_optimizer_states"):
        return client_optimizer(optim, "offload_optimizer" in ds_config["zero_optimization"])
    from toolkit.engine.bf16_adam import Bf16Adam

    is_decoupled = optim.name is schema.OptimizerName.adamw
    return lambda groups: Bf16Adam(groups, optim.lr, tuple(optim.betas), optim.eps, optim.weight_decay, is_decoupled)


def client_optimizer(optim: schema.OptimConfig, is_offloaded: bool) -> Callable[[Any], torch.optim.Optimizer] | None:
    """Return a function that makes the optimizer from parameters or groups; None if DeepSpeed makes it by name.
    ConfigError for DeepSpeed's Lion on CPU ranks, unless the optimizer `is_offloaded`.
    """
    settings: dict[str, Any] = {"lr": optim.lr, "betas": tuple(optim.betas), "weight_decay": optim.weight_decay}
    if optim.name is schema.OptimizerName.adamw_8bit:
        from bitsandbytes.optim import AdamW8bit

        return lambda groups: AdamW8bit(groups, eps=optim.eps, **settings)
    if rule_tables.is_client(optim):
        from toolkit.engine.lion import Lion

        return lambda groups: Lion(groups, **settings)
    on_cpu = get_accelerator().device_name() == "cpu"
    if optim.name is schema.OptimizerName.lion and on_cpu and not is_offloaded:
        raise ConfigError(tr("optim.name = lion: DeepSpeed has no FusedLion for CPU ranks. Add optim.torch=true."))
    return None
