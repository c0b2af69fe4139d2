"""The one call of `deepspeed.initialize`."""

from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

import cpuinfo
import deepspeed
import torch
from deepspeed.compile.util import is_deepcompile_supported
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.utils import groups
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from toolkit.config.schema import ActivationCheckpointingConfig, CompileConfig, OptimConfig, PrecisionConfig, When
from toolkit.config.tensor import check_split
from toolkit.engine import zenflow
from toolkit.engine.optimizers import client_optimizer, parameter_groups
from toolkit.errors import ConfigError
from toolkit.messages import tr

# 1.2 s each time; for an op of the CPU DeepSpeed 0.19.8 asks twice, to compare with what it was built on.
cpuinfo.get_cpu_info = cache(cpuinfo.get_cpu_info)
# To allocate the optimizer's states, DeepSpeed 0.19.8 updates once with gradients of 0 where fp16 or bf16 runs without
# ZeRO. Adam counts that step, so that its first real update has 0.74 of its size, and weights decay once too often.
# Optimizers allocate their states at the first update anyway.
FP16_Optimizer.initialize_optimizer_states = FP16_UnfusedOptimizer.initialize_optimizer_states = lambda _: None
STAGE = "stage"
"""Attribute of a PipelineModule: the transformers model that computes this rank's stage (toolkit.models.stages)."""


def use_tf32(precision: PrecisionConfig) -> None:
    """Let this process multiply fp32 matrices in TF32, or not, on GPUs; PyTorch's own default differs by operation."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision.tf32


def initialize(
    model: PreTrainedModel | PipelineModule,
    ds_config: dict[str, Any],
    activation_checkpointing: ActivationCheckpointingConfig,
    make_schedule: Callable[[torch.optim.Optimizer], Any],
    compiling: CompileConfig | None = None,
    optim: OptimConfig | None = None,
) -> deepspeed.DeepSpeedEngine:
    """Build the engine: partitioning and precision come from `ds_config` alone, and so does the optimizer if it can.

    Args:
        model: the model, already partitioned under stage 3; or a pipeline's stage of it.
        ds_config: what ds_config.build_ds_config made.
        activation_checkpointing: which activations are recomputed.
        make_schedule: gets the optimizer, returns the learning-rate schedule.
        compiling: whether and how the model is compiled; None leaves it as it is.
        optim: parameter groups, and an optimizer that `ds_config` cannot name; None: one group.

    Raises:
        ConfigError: DeepSpeed refuses the combination.
    """
    computing = getattr(model, STAGE, model)
    if activation_checkpointing.enabled:
        _checkpoint_activations(computing, activation_checkpointing)
    frequencies = _rotary_frequencies(computing)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    has_zenflow = "zenflow" in ds_config["zero_optimization"]
    if has_zenflow:
        zenflow.prepare(trained)
    try:
        engine, *_ = deepspeed.initialize(
            model=model,
            model_parameters=parameter_groups(model.named_parameters(), optim or OptimConfig()),
            optimizer=client_optimizer(optim, "offload_optimizer" in ds_config["zero_optimization"]) if optim else None,
            config=_fitted(ds_config, trained),
            mpu=_tensor_groups(model, ds_config),
            lr_scheduler=make_schedule,
            dist_init_required=False,
        )
    except (AssertionError, ValueError, NotImplementedError) as error:
        raise _refusal(error) from error
    _assert_frequencies_kept(getattr(engine.module, STAGE, engine.module), frequencies)
    _scale_fp16_loss(engine)
    if has_zenflow:  # which otherwise makes its first update at the peak of the schedule
        engine.optimizer._sync_selective_optimizer_lr()
    if compiling is not None and compiling.enabled:
        _compile(engine, compiling)
    return engine


def initialize_untrained(model: PreTrainedModel, ds_config: dict[str, Any]) -> deepspeed.DeepSpeedEngine:
    """Build an engine that only runs a partitioned model forward: without an optimizer, and what belongs to one.

    Args:
        model: the model, already partitioned under stage 3.
        ds_config: what ds_config.build_ds_config made.

    Raises:
        ConfigError: DeepSpeed refuses the combination.
    """
    values = {name: value for name, value in ds_config.items() if name not in ("optimizer", "scheduler")}
    zero = ds_config["zero_optimization"]
    values["zero_optimization"] = {name: value for name, value in zero.items() if name != "offload_optimizer"}
    frequencies = _rotary_frequencies(model)
    try:
        engine, *_ = deepspeed.initialize(model=model, config=values, dist_init_required=False)
    except (AssertionError, ValueError, NotImplementedError) as error:
        raise _refusal(error) from error
    _assert_frequencies_kept(engine.module, frequencies)
    return engine


def _fitted(ds_config: dict[str, Any], trained: list[torch.nn.Parameter]) -> dict[str, Any]:
    """Leave off of the buffers for gradients what no gradient will ever fill.

    DeepSpeed 0.19.8 allocates reduce_bucket_size whole, 1 GB in bf16 by default, for LoRA's few megabytes too.
    """
    zero = ds_config["zero_optimization"]
    elements = sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in trained)
    if zero.get("reduce_bucket_size", 0) <= elements:
        return ds_config
    return {**ds_config, "zero_optimization": {**zero, "reduce_bucket_size": elements}}


def _tensor_groups(model: PreTrainedModel, ds_config: dict[str, Any]) -> ModuleType | None:
    """Return what knows a rank's place where layers are split over ranks, None elsewhere.

    Without it DeepSpeed 0.19.8 divides the global batch by all ranks (runtime/config.py).

    Raises:
        ConfigError: this model cannot be split so.
    """
    size = ds_config.get("tensor_parallel", {}).get("autotp_size", 1)
    if size == 1:
        return None
    config = model.config
    heads = config.num_attention_heads
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    inner = getattr(config, "intermediate_size", None) or getattr(config, "inner_hidden_size", 0)
    check_split({"model_type": config.model_type, "heads": heads, "key_heads": key_heads, "inner": inner}, size)
    groups._init_tp_mesh_device(size)
    return groups


def _refusal(error: Exception) -> ConfigError:
    return ConfigError(tr("DeepSpeed refuses this configuration: {reason}", reason=str(error) or type(error).__name__))


def _scale_fp16_loss(engine: deepspeed.DeepSpeedEngine) -> None:
    """Without ZeRO, fp16 gradients are divided by a loss scale that DeepSpeed never multiplied the loss by.

    Clipping then has no effect and small gradients are lost (0.19.8, engine.backward; DeepSpeed pull request 8393).
    """
    if engine.fp16_enabled() and not engine.zero_optimization():
        backward = engine.backward
        engine.backward = lambda loss, **options: backward(loss * engine.optimizer.loss_scale, **options)


def _compile(engine: deepspeed.DeepSpeedEngine, config: CompileConfig) -> None:
    """Have the model compiled at its first forward pass.

    Raises:
        ConfigError: there is no such backend or mode, or DeepCompile cannot be had here.
    """
    known = torch.compiler.list_backends(exclude_tags=())
    if config.backend not in known:
        raise ConfigError(
            tr(
                "compile.backend = {backend} is not installed. There are: {known}.",
                backend=config.backend,
                known=", ".join(known),
            )
        )
    if config.deepcompile and not is_deepcompile_supported():
        raise ConfigError(tr("compile.deepcompile = true needs NVIDIA GPUs, and there are none here. Set it to false."))
    dynamic = {When.auto: None, When.always: True, When.never: False}[config.dynamic]
    try:
        engine.compile(config.backend, {"dynamic": dynamic, **({"mode": config.mode} if config.mode else {})})
    except (AssertionError, ValueError, RuntimeError) as error:
        raise _refusal(error) from error


def _checkpoint_activations(model: PreTrainedModel, config: ActivationCheckpointingConfig) -> None:
    """Route the model's layers through DeepSpeed's checkpoint function, so that its settings take effect.

    transformers would use torch's function and leave DeepSpeed's section unread.
    """
    # On CPU ranks the activations are in host memory already, and DeepSpeed 0.19.8 would empty them there: its copy to
    # the CPU is the same tensor (checkpointing.py, get_cpu_activations_for_backward).
    in_host_memory = deepspeed.accelerator.get_accelerator().device_name() == "cpu"
    deepspeed.checkpointing.configure(
        None,
        partition_activations=config.partition_activations,
        contiguous_checkpointing=config.contiguous_memory_optimization,
        num_checkpoints=config.number_checkpoints or None,
        checkpoint_in_cpu=config.cpu_checkpointing and not in_host_memory,
        synchronize=config.synchronize_checkpoint_boundary,
        profile=config.profile,
    )
    if not model.supports_gradient_checkpointing:
        raise ConfigError(
            tr(
                "train.activation_checkpointing.enabled = true, but {architecture} does not support it.",
                architecture=type(model).__name__,
            )
        )
    layers = [part for part in model.modules() if isinstance(part, GradientCheckpointingLayer)]
    reads_more = any(layer._can_checkpoint_with_cache for layer in layers)
    function = _checkpoint_all if reads_more else _checkpoint
    model._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=function)
    trained = (layer for layer in layers if any(parameter.requires_grad for parameter in layer.parameters()))
    first = next(trained, None)
    if first is not None:
        first.register_forward_pre_hook(_want_gradient)


def _want_gradient(_: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
    """Let the first layer that is trained have inputs with a gradient, also where all before it is frozen.

    The layer is computed again from its inputs; from what has no gradient nothing would lead back to its parameters.
    """
    if torch.is_grad_enabled() and not inputs[0].requires_grad:
        inputs[0].requires_grad_()


def _checkpoint(function: Callable[..., Any], *inputs: Any) -> Any:
    """DeepSpeed's checkpoint during training; looked up late, so that tests can count its calls."""
    return deepspeed.checkpointing.checkpoint(function, *inputs)


def _checkpoint_all(function: Callable[..., Any], *inputs: Any) -> Any:
    """The same where a layer reads more than its inputs that has a gradient: a learned prefix.

    Not for trained layers: their pieces under ZeRO-3 are gone when this function's gradients come (deepspeed 0.19.8).
    """
    return deepspeed.checkpointing.non_reentrant_checkpoint(function, *inputs)


def _rotary_frequencies(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer.detach().clone() for name, buffer in model.named_buffers() if name.endswith("inv_freq")}


def _assert_frequencies_kept(model: torch.nn.Module, before: dict[str, torch.Tensor]) -> None:
    """In half precision, positions beyond a few hundred turn into noise; DeepSpeed 0.18.9 cast the frequencies."""
    for name, buffer in _rotary_frequencies(model).items():
        expected = before[name].to(buffer.device)
        if buffer.dtype is not torch.float32 or not torch.equal(buffer, expected):
            raise RuntimeError(f"{name} is {buffer.dtype} after deepspeed.initialize; it must stay as it was, float32")
