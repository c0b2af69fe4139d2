"""The one call of `deepspeed.initialize`; parameter groups, and optimizers that DeepSpeed cannot make from a name."""

import logging
import time
from collections.abc import Callable, Iterable
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
from toolkit.engine.ds_config import count_parts, fit_reduce_bucket, tensor_ranks, without_optimizer
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
"""So long a file server may hide what another node has just made; NFS caches absence for up to 60 s."""


def load_ops(names: Iterable[str]) -> str:
    """Build what is not built yet, in minutes, and load it; return why an op cannot be, "" if all are there.
    PyTorch's lock elects one builder, and the others poll it, so no collective waits for a compiler.
    """
    until = time.monotonic() + STALE_S
    for name in names:
        builder = _BUILDERS.get(name)
        while builder:
            try:
                get_accelerator().create_op_builder(builder).load(verbose=False)
                break
            except Exception as error:  # whatever a missing CUDA toolkit, a compiler or a linker make of it
                if isinstance(error, ImportError) and "No such file" in str(error) and time.monotonic() < until:
                    time.sleep(1)
                    continue
                logging.getLogger("DeepSpeed").info("building %s", name, exc_info=True)
                lines = str(error).splitlines() or [type(error).__name__]
                told = [lines[0], *(line for line in lines[1:] if "error" in line.lower())][:2]
                return f"{name}: {' '.join(line.strip() for line in told)}"
    return ""


def use_tf32(precision: schema.PrecisionConfig) -> None:
    """Let this process multiply fp32 matrices in TF32, or not, on GPUs; PyTorch's own default differs by operation."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision.tf32


def compiles_layers(
    compiling: schema.CompileConfig, recompute: schema.ActivationCheckpointingConfig, stage: int
) -> bool:
    """Whether torch.compile compiles a model's layers. It looks into PyTorch's checkpoint function, and not into
    DeepSpeed's (0.19.8, checkpointing.py, `lazy_disable`), which has settings of its own, and which ZeRO 3 without
    DeepCompile needs, as the hooks that gather the weights end each graph.
    """
    settings = replace(recompute, enabled=False, number_checkpoints=0) != schema.ActivationCheckpointingConfig()
    is_reached = not settings and (stage < 3 or compiling.deepcompile)
    return compiling.enabled and (not recompute.enabled or is_reached)


def initialize_engine(
    model: PreTrainedModel | PipelineModule,
    ds_config: dict[str, Any],
    activation_checkpointing: schema.ActivationCheckpointingConfig,
    make_schedule: Callable[[torch.optim.Optimizer], Any],
    compiling: schema.CompileConfig | None = None,
    optim: schema.OptimConfig | None = None,
) -> deepspeed.DeepSpeedEngine:
    """Build the engine: partitioning and precision come from `ds_config` alone, and so does the optimizer if it can.
    Under stage 3 the model is partitioned already. `make_schedule` gets the optimizer and returns its learning-rate
    schedule.
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
            # Its BF16_Optimizer takes the norm of no tensor (0.19.8, runtime/utils.py, get_global_norm_of_tensors).
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
    received = count_parts(fit_reduce_bucket(ds_config, elements))
    engine = _initialize(
        model,
        received,
        model_parameters=parameter_groups(model.named_parameters(), optim or schema.OptimConfig()),
        optimizer=client_optimizer(optim, "offload_optimizer" in zero) if optim else None,
        mpu=_tensor_groups(model, ds_config),
        lr_scheduler=make_schedule,
    )
    engine.received_config = received
    deepspeed_patches.scale_fp16_loss(engine)
    deepspeed_patches.follow_schedule(engine)
    if compiling is not None and compiling.enabled:
        _compile(engine, compiling)
    return engine


def _compile(engine: deepspeed.DeepSpeedEngine, compiling: schema.CompileConfig) -> None:
    backends = torch.compiler.list_backends(exclude_tags=())
    if compiling.backend not in backends:
        raise ConfigError(
            "compile.backend = {backend} is not installed. There are: {known}.",
            backend=compiling.backend,
            known=", ".join(backends),
        )
    if compiling.deepcompile and not is_deepcompile_supported():
        raise ConfigError(tr("compile.deepcompile = true needs NVIDIA GPUs, and there are none here. Set it to false."))
    deepspeed_patches.keep_compiled_gradients()
    dynamic = {"auto": None, "always": True, "never": False}[compiling.dynamic.value]
    try:
        engine.compile(compiling.backend, {"dynamic": dynamic, **({"mode": compiling.mode} if compiling.mode else {})})
    except (AssertionError, ValueError, RuntimeError) as error:
        raise _refusal(error) from error


def _recompute_layers(
    model: PreTrainedModel | PipelineModule,
    recompute: schema.ActivationCheckpointingConfig,
    compiling: schema.CompileConfig,
    stage: int,
) -> None:
    from toolkit.engine.recompute import checkpoint_activations

    compiled = compiles_layers(compiling, recompute, stage)
    checkpoint_activations(getattr(model, STAGE, model), recompute, stage, compiled)
    if compiling.enabled and not compiled:
        warn(
            "torch.compile does not reach the layers: not with activation checkpointing under ZeRO 3, nor with "
            "settings of DeepSpeed's own. Set zero=stage2, or train.activation_checkpointing.enabled=false."
        )


def initialize_untrained(model: PreTrainedModel, ds_config: dict[str, Any]) -> deepspeed.DeepSpeedEngine:
    """Build an engine that only runs a model, partitioned already, forward: without what belongs to an optimizer."""
    return _initialize(model, count_parts(without_optimizer(ds_config)), mpu=_tensor_groups(model, ds_config))


def _initialize(
    model: PreTrainedModel | PipelineModule, ds_config: dict[str, Any], **options: Any
) -> deepspeed.DeepSpeedEngine:
    """Call deepspeed.initialize, patched, with its refusals as ConfigErrors; check that rotary tables are unchanged."""
    frequencies = deepspeed_patches.rotary_frequencies(getattr(model, STAGE, model))
    deepspeed_patches.spare_waits()
    deepspeed_patches.tie_optimizers()
    if ds_config["zero_optimization"]["stage"] == 3:
        from toolkit.engine import partitioned  # noqa: F401  # it changes DeepSpeed
    try:
        engine, *_ = deepspeed.initialize(model=model, config=ds_config, dist_init_required=False, **options)
    except (AssertionError, ValueError, NotImplementedError) as error:
        raise _refusal(error) from error
    deepspeed_patches.assert_frequencies_unchanged(getattr(engine.module, STAGE, engine.module), frequencies)
    return engine


def _tensor_groups(model: PreTrainedModel | PipelineModule, ds_config: dict[str, Any]) -> ModuleType | None:
    """Return the module that tells DeepSpeed the tensor-parallel groups, None if layers are not split over ranks."""
    if tensor_ranks(ds_config) == 1:
        return None
    from toolkit.layouts.tensor import tensor_groups

    return tensor_groups(model, ds_config)


def _refusal(error: Exception) -> ConfigError:
    return ConfigError("DeepSpeed rejects this configuration: {reason}", reason=str(error) or type(error).__name__)


Groups = list[torch.nn.Parameter] | list[dict[str, Any]]


def parameter_groups(named: Iterable[tuple[str, torch.nn.Parameter]], optim: schema.OptimConfig) -> Groups:
    """Return what is trained: the parameters, or groups of those with the same rate and weight decay.
    The rate falls from layer to layer as in ELECTRA (arXiv 2003.10555, appendix B) and BEiT. The group with the highest
    rate comes first: it is what logs show.
    """
    trained = [(name, parameter) for name, parameter in named if parameter.requires_grad]
    if not rule_tables.is_grouped(optim):
        parameters = [parameter for _, parameter in trained]
        return _split_off_experts([{"params": parameters}]) if any(map(is_expert_part, parameters)) else parameters
    layers = 1 + max((layer_of(name) for name, _ in trained), default=-1)
    groups: dict[tuple[float, bool], list[torch.nn.Parameter]] = {}
    for name, parameter in trained:
        layer, rate = layer_of(name), optim.lr
        is_matrix = len(getattr(parameter, "ds_shape", parameter.shape)) >= 2
        # Experts' biases are one matrix for all of a layer's.
        is_weight = is_matrix and "bias" not in name.rpartition(".")[2]
        decays = {"all": True, "matrices": is_weight, "hidden": is_weight and layer >= 0}[optim.decay.value]
        # What DeepSpeed's Muon orthogonalizes (0.19.8, deepspeed/__init__.py, set_optimizer_flags).
        is_muon = is_matrix and not any(word in name.lower() for word in ("embed", "lm_head"))
        if optim.adam_lr and not is_muon:
            rate = optim.adam_lr
        # From the top: what is above the last layer 0, the last layer 1, embeddings `layers` + 1.
        depth = layers - layer if layer >= 0 else layers + 1 if "embed" in name.lower() else 0
        groups.setdefault((rate * optim.layer_lr_decay**depth, decays), []).append(parameter)
    return _split_off_experts(
        [
            {"params": groups[rate, decays], "lr": rate, "weight_decay": optim.weight_decay if decays else 0.0}
            for rate, decays in sorted(groups, reverse=True)
        ]
    )


def _split_off_experts(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the groups with experts that are divided over ranks in groups of their own, as their gradients are summed
    over other ranks. These are marked as DeepSpeed marks its own (0.19.8, moe/utils.py,
    split_params_into_different_moe_groups_for_optimizer).
    """
    divided = []
    for group in groups:
        experts = [parameter for parameter in group["params"] if is_expert_part(parameter)]
        others = [parameter for parameter in group["params"] if not is_expert_part(parameter)]
        divided += [group | {"params": others}] if others else []
        divided += [group | {"params": experts, "moe": True, "name": experts[0].group_name}] if experts else []
    return divided


def client_optimizer(optim: schema.OptimConfig, is_offloaded: bool) -> Callable[[Any], torch.optim.Optimizer] | None:
    """Return what makes the optimizer of parameters or groups; None where DeepSpeed does, by its name."""
    settings: dict[str, Any] = {"lr": optim.lr, "betas": tuple(optim.betas), "weight_decay": optim.weight_decay}
    if optim.name is schema.OptimizerName.adamw_8bit:
        from bitsandbytes.optim import AdamW8bit

        return lambda groups: AdamW8bit(groups, eps=optim.eps, **settings)
    if rule_tables.is_client(optim):
        return lambda groups: Lion(groups, **settings)
    on_cpu = get_accelerator().device_name() == "cpu"
    if optim.name is schema.OptimizerName.lion and on_cpu and not is_offloaded:
        raise ConfigError(tr("optim.name = lion: DeepSpeed has no FusedLion for CPU ranks. Add optim.torch=true."))
    return None


class Lion(torch.optim.Optimizer):
    """Lion (arXiv 2302.06675, algorithm 2), parameter by parameter; each number by itself, so ZeRO may cut them up."""

    def __init__(
        self, params: Any, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state, (now, later) = self.state[parameter], group["betas"]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                momentum = state["exp_avg"]
                update = momentum.lerp(parameter.grad, 1 - now).sign_()
                parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])
                momentum.lerp_(parameter.grad, 1 - later)
