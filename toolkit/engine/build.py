"""The one call of `deepspeed.initialize`; parameter groups, and optimizers that DeepSpeed cannot make from a name."""

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from types import ModuleType
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.compile.util import is_deepcompile_supported
from deepspeed.pipe import PipelineModule
from transformers import PreTrainedModel

from toolkit.config import rule_tables, schema
from toolkit.distributed.process_group import is_expert_part
from toolkit.engine import deepspeed_patches
from toolkit.engine.ds_config import count_sequence_parts, limit_reduce_bucket, tensor_ranks, without_optimizer
from toolkit.messages import ConfigError, tr, warn
from toolkit.plan.outline import layer_of

STAGE = "stage"
"""Attribute of a PipelineModule: the transformers model that computes this rank's stage (toolkit.layouts.pipeline)."""


_BUILDERS = {
    "fused_adam": "FusedAdamBuilder",
    "fused_lion": "FusedLionBuilder",
    "cpu_adam": "CPUAdamBuilder",
    "cpu_lion": "CPULionBuilder",
    "async_io": "AsyncIOBuilder",
    "gds": "GDSBuilder",
    "quantizer": "QuantizerBuilder",
    "dc": "DeepCompileBuilder",
}
"""Ops of `native_ops.needed_ops` that engines load -> DeepSpeed's class that builds each (0.19.8, op_builder)."""
STALE_S = 90.0
"""Seconds for which a file that another node has just made may be missing here: NFS caches absence for up to 60 s."""


def load_ops(names: Iterable[str]) -> str:
    """Load DeepSpeed's native ops on this rank, after building those that are not built yet, which takes minutes.

    PyTorch's lock lets one process build while the others poll, so no collective waits for a compiler.

    Returns:
        The name of the first op that cannot be built and the compiler's error; "" if all are loaded.
    """
    deadline = time.monotonic() + STALE_S
    for name in names:
        builder = _BUILDERS.get(name)
        while builder:
            try:
                get_accelerator().create_op_builder(builder).load(verbose=False)
                break
            except Exception as error:  # whatever a missing CUDA toolkit, a compiler or a linker make of it
                if isinstance(error, ImportError) and "No such file" in str(error) and time.monotonic() < deadline:
                    time.sleep(1)
                    continue
                logging.getLogger("DeepSpeed").info("building %s", name, exc_info=True)
                lines = str(error).splitlines() or [type(error).__name__]
                summary = [lines[0], *(line for line in lines[1:] if "error" in line.lower())][:2]
                return f"{name}: {' '.join(line.strip() for line in summary)}"
    return ""


def compiles_layers(
    compiling: schema.CompileConfig, recompute: schema.ActivationCheckpointingConfig, stage: int
) -> bool:
    """Whether torch.compile compiles a model's layers at a ZeRO `stage`.

    It traces PyTorch's checkpoint function, but not DeepSpeed's (0.19.8, checkpointing.py, `lazy_disable`). DeepSpeed's
    is needed for its own settings, and by ZeRO 3 without DeepCompile, whose hooks that gather the weights end each
    graph.
    """
    needs_deepspeed = replace(recompute, enabled=False, number_checkpoints=0) != schema.ActivationCheckpointingConfig()
    is_traced = not needs_deepspeed and (stage < 3 or compiling.deepcompile)
    return compiling.enabled and (not recompute.enabled or is_traced)


def initialize_engine(
    model: PreTrainedModel | PipelineModule,
    ds_config: dict[str, Any],
    activation_checkpointing: schema.ActivationCheckpointingConfig,
    make_schedule: Callable[[torch.optim.Optimizer], Any],
    compiling: schema.CompileConfig | None = None,
    optim: schema.OptimConfig | None = None,
) -> deepspeed.DeepSpeedEngine:
    """Build the engine that trains a model, of which stage 3 has split pretrained weights already (models/load.py).
    A collective; ConfigError if DeepSpeed rejects the settings. `ds_config` alone decides about partitioning and
    precision, and about the optimizer if DeepSpeed has it by name, else `optim`. `make_schedule` gets the optimizer and
    returns its learning-rate schedule. The engine's `received_config` is the JSON that DeepSpeed got.
    """
    if activation_checkpointing.enabled:
        stage = ds_config["zero_optimization"]["stage"]
        _recompute_layers(model, activation_checkpointing, compiling or schema.CompileConfig(), stage)
    if isinstance(model, PipelineModule) and "tensor_parallel" in ds_config:
        from toolkit.layouts.tensor import split_stage

        ds_config = split_stage(model, getattr(model, STAGE), ds_config)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if any(map(is_expert_part, trained)):
        in_bf16 = ds_config.get("bf16", {}).get("enabled") and ds_config["zero_optimization"]["stage"] == 1
        if in_bf16 and all(map(is_expert_part, trained)):
            # BF16_Optimizer fails on the norm of an empty list (0.19.8, runtime/utils.py, get_global_norm_of_tensors).
            raise ConfigError(
                tr(
                    "zero.stage = 1: nothing but divided experts is trained, and DeepSpeed's first stage "
                    "wants something else, too. Use zero=stage2."
                )
            )
        from toolkit.layouts.experts import ExpertGroups

        model.expert_groups = ExpertGroups()
    zero = ds_config["zero_optimization"]
    if "zenflow" in zero:
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
        _compile(engine, compiling)
    return engine


def _compile(engine: deepspeed.DeepSpeedEngine, compiling: schema.CompileConfig) -> None:
    """Compile each layer of the engine's model by itself: layers of a kind share what is compiled, so that 28 take as
    long as one. As one graph, a ChatGLM3-6B was not compiled after 150 s (torch 2.11, one H200).

    Compiled as a whole is what has no layers, what DeepCompile changes, and ZeRO 3, whose hooks end each graph anyway.

    Raises:
        ConfigError: the backend is not installed, or DeepSpeed or PyTorch rejects the settings.
    """
    from toolkit.engine.recompute import outermost_layers

    backends = torch.compiler.list_backends(exclude_tags=())
    if compiling.backend not in backends:
        raise ConfigError(
            "compile.backend = {backend} is not installed. There are: {known}.",
            backend=compiling.backend,
            known=", ".join(backends),
        )
    if compiling.deepcompile and not is_deepcompile_supported():
        raise ConfigError(tr("compile.deepcompile = true needs NVIDIA GPUs, and there are none here. Set it to false."))
    deepspeed_patches.keep_gradients_of_compiled_functions()
    dynamic = {"auto": None, "always": True, "never": False}[compiling.dynamic.value]
    options = {"dynamic": dynamic, **({"mode": compiling.mode} if compiling.mode else {})}
    whole = compiling.deepcompile or engine.zero_optimization_stage() == 3
    layers = [] if whole else outermost_layers(getattr(engine.module, STAGE, engine.module))
    # PyTorch stops compiling a function that it has compiled eight times (torch 2.13, recompile_limit), and all layers
    # are one function to it: each may be of a kind of its own, for one length and then for all.
    dynamo = torch._dynamo.config
    dynamo.recompile_limit = max(dynamo.recompile_limit, 4 * len(layers))
    try:
        for layer in layers:
            layer.compile(backend=compiling.backend, **options)
        if not layers:
            engine.compile(compiling.backend, options)
    except (AssertionError, ValueError, RuntimeError) as error:
        raise _rejected_by_deepspeed(error) from error


def _recompute_layers(
    model: PreTrainedModel | PipelineModule,
    recompute: schema.ActivationCheckpointingConfig,
    compiling: schema.CompileConfig,
    stage: int,
) -> None:
    """Turn on activation checkpointing in the layers that this rank computes, and warn if they are not compiled."""
    from toolkit.engine.recompute import checkpoint_activations

    compiled = compiles_layers(compiling, recompute, stage)
    checkpoint_activations(getattr(model, STAGE, model), recompute, stage, compiled)
    if compiling.enabled and not compiled:
        warn(
            "torch.compile does not reach the layers: not with activation checkpointing under ZeRO 3, nor with "
            "settings of DeepSpeed's own. Set zero=stage2, or train.activation_checkpointing.enabled=false."
        )


def initialize_untrained(model: PreTrainedModel, ds_config: dict[str, Any]) -> deepspeed.DeepSpeedEngine:
    """Build an engine without an optimizer, for the forward passes of a model that is partitioned already."""
    return _initialize(model, count_sequence_parts(without_optimizer(ds_config)), mpu=_tensor_groups(model, ds_config))


def _initialize(
    model: PreTrainedModel | PipelineModule, ds_config: dict[str, Any], **options: Any
) -> deepspeed.DeepSpeedEngine:
    """Apply the workarounds, call deepspeed.initialize, and check that it left the rotary frequencies unchanged.
    ConfigError if DeepSpeed rejects the settings.
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
    return ConfigError("DeepSpeed rejects this configuration: {reason}", reason=str(error) or type(error).__name__)


Groups = list[torch.nn.Parameter] | list[dict[str, Any]]


def parameter_groups(
    model: torch.nn.Module, optim: schema.OptimConfig, copies: Mapping[str, torch.nn.Parameter] | None = None
) -> Groups:
    """Return a model's trained parameters, in groups of equal learning rate and weight decay if `optim` asks for such.
    `copies`: by name, what is returned in place of the model's own.

    The rate falls from layer to layer as in ELECTRA (arXiv 2003.10555, appendix B) and BEiT. The group with the highest
    rate comes first, as logs show the rate of the first group.
    """
    named = (copies or dict(model.named_parameters())).items()
    trained = [(name, parameter) for name, parameter in named if parameter.requires_grad]
    if not rule_tables.is_grouped(optim):
        parameters = [parameter for _, parameter in trained]
        return _split_off_experts([{"params": parameters}]) if any(map(is_expert_part, parameters)) else parameters
    from toolkit.engine.weight_decay import weight_names

    layers, weights = 1 + max((layer_of(name) for name, _ in trained), default=-1), weight_names(model)
    groups: dict[tuple[float, bool], list[torch.nn.Parameter]] = {}
    for name, parameter in trained:
        layer, rate = layer_of(name), optim.lr
        is_matrix, is_weight = len(getattr(parameter, "ds_shape", parameter.shape)) >= 2, name in weights
        decays = {"all": True, "matrices": is_weight, "hidden": is_weight and layer >= 0}[optim.decay.value]
        # What DeepSpeed's Muon orthogonalizes (0.19.8, deepspeed/__init__.py, set_optimizer_flags).
        is_muon = is_matrix and not any(word in name.lower() for word in ("embed", "lm_head"))
        if optim.adam_lr and not is_muon:
            rate = optim.adam_lr
        rate *= optim.lora_plus_ratio if ".lora_B." in name else 1
        # Counted from the top: 0 above the last layer, 1 for the last layer, `layers` + 1 for embeddings.
        depth = layers - layer if layer >= 0 else layers + 1 if "embed" in name.lower() else 0
        groups.setdefault((rate * optim.layer_lr_decay**depth, decays), []).append(parameter)
    return _split_off_experts(
        [
            {"params": groups[rate, decays], "lr": rate, "weight_decay": optim.weight_decay if decays else 0.0}
            for rate, decays in sorted(groups, reverse=True)
        ]
    )


def _split_off_experts(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Move experts that are divided over ranks into parameter groups of their own, as their gradients are summed over
    other ranks. The groups are marked as DeepSpeed marks those of its own experts (0.19.8, moe/utils.py,
    split_params_into_different_moe_groups_for_optimizer).
    """
    divided = []
    for group in groups:
        experts = [parameter for parameter in group["params"] if is_expert_part(parameter)]
        others = [parameter for parameter in group["params"] if not is_expert_part(parameter)]
        divided += [group | {"params": others}] if others else []
        divided += [group | {"params": experts, "moe": True, "name": experts[0].group_name}] if experts else []
    return divided


def _optimizer(optim: schema.OptimConfig, ds_config: dict[str, Any]) -> Callable[[Any], torch.optim.Optimizer] | None:
    """Return a function that makes the optimizer of a DeepSpeed JSON; None if DeepSpeed makes it by name."""
    if not ds_config.get("bf16", {}).get("bf16_optimizer_states"):
        return client_optimizer(optim, "offload_optimizer" in ds_config["zero_optimization"])
    from toolkit.engine.bf16_adam import Bf16Adam

    is_decoupled = optim.name is schema.OptimizerName.adamw
    return lambda groups: Bf16Adam(groups, optim.lr, tuple(optim.betas), optim.eps, optim.weight_decay, is_decoupled)


def client_optimizer(optim: schema.OptimConfig, is_offloaded: bool) -> Callable[[Any], torch.optim.Optimizer] | None:
    """Return a function that makes the optimizer from parameters or groups; None if DeepSpeed makes it by name."""
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
