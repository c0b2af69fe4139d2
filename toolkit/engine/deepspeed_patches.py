"""Every place where DeepSpeed or PyTorch is worked around; each says the version in which it was seen.

Among them: an update is asked for just before it happens, when its gradient norm is known and the weights are untouched
(`UpdateVeto`). A veto takes DeepSpeed's own way of skipping a step whose gradients overflowed, so that all its counts
agree: the step is in `skipped_steps`, the schedule does not advance, gradients are dropped (deepspeed 0.19.8).
"""

import math
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import deepspeed
import torch
from deepspeed import DeepSpeedEngine
from deepspeed.ops.adam import ZenFlowSelectiveAdamW
from deepspeed.runtime.utils import combine_grad_norm_groups
from deepspeed.runtime.zenflow.zenflow_stage_1_and_2 import ZenFlowZeroOptimizer
from deepspeed.utils import groups
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from toolkit.config.schema import ActivationCheckpointingConfig
from toolkit.config.tensor import check_split
from toolkit.distributed.tensor import is_tensor_part, tensor_group
from toolkit.errors import ConfigError
from toolkit.messages import tr


def patch_tensor_groups(model: PreTrainedModel, ds_config: dict[str, Any]) -> ModuleType | None:
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


def scale_fp16_loss(engine: deepspeed.DeepSpeedEngine) -> None:
    """Without ZeRO, fp16 gradients are divided by a loss scale that DeepSpeed never multiplied the loss by.

    Clipping then has no effect and small gradients are lost (0.19.8, engine.backward; DeepSpeed pull request 8393).
    """
    if engine.fp16_enabled() and not engine.zero_optimization():
        backward = engine.backward
        engine.backward = lambda loss, **options: backward(loss * engine.optimizer.loss_scale, **options)


def checkpoint_activations(model: PreTrainedModel, config: ActivationCheckpointingConfig) -> None:
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


def rotary_frequencies(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of a model's rotary frequencies, which DeepSpeed may turn into the model's precision."""
    return {name: buffer.detach().clone() for name, buffer in model.named_buffers() if name.endswith("inv_freq")}


def assert_frequencies_kept(model: torch.nn.Module, before: dict[str, torch.Tensor]) -> None:
    """In half precision, positions beyond a few hundred turn into noise; DeepSpeed 0.18.9 cast the frequencies."""
    for name, buffer in rotary_frequencies(model).items():
        expected = before[name].to(buffer.device)
        if buffer.dtype is not torch.float32 or not torch.equal(buffer, expected):
            raise RuntimeError(f"{name} is {buffer.dtype} after deepspeed.initialize; it must stay as it was, float32")


class UpdateVeto:
    """Stands before the optimizer of one engine.

    Args:
        engine: the engine.
        may_update: gets the norm of the whole gradient before clipping, the same on every rank; called inside
            `engine.step` unless DeepSpeed has found an overflow already. Must answer alike on all ranks.
    """

    def __init__(self, engine: DeepSpeedEngine, may_update: Callable[[float], bool]) -> None:
        self.engine, self.optimizer, self.may_update = engine, engine.optimizer, may_update
        self.grad_norm = math.inf
        """Norm before clipping of the step in progress or just done; inf where gradients overflowed."""
        self.refused = False
        """Whether this gate stopped the step in progress or just done."""
        if hasattr(self.optimizer, "_update_scale"):  # a refusal is no overflow: fp16's loss scale stays as it is
            update_scale = self.optimizer._update_scale
            self.optimizer._update_scale = lambda overflow=False: update_scale(overflow and not self.refused)
        stage = engine.zero_optimization_stage() if hasattr(self.optimizer, "averaged_gradients") else 0
        # Muon puts its update, and its momentum forward, before DeepSpeed takes the norm: it is asked still earlier.
        is_muon = type(engine.basic_optimizer).__name__ == "MuonWithAuxAdam"
        if is_muon and stage == 3:
            self._before_muon("_apply_muon_to_accumulated_grads", "_get_norm_groups", combine_grad_norm_groups)
        elif is_muon and stage and self.optimizer.cpu_offload:
            self._before_muon("_apply_muon_updates_cpu_offload", "scaled_global_norm", float)
        elif stage == 3:
            self._replace("_get_norm_groups", self._stage3_norms)
        elif stage:
            self._replace("scaled_global_norm", self._stage2_norm)
        else:  # no ZeRO, or BF16_Optimizer (stage 1 in bf16)
            take_model_step = engine._take_model_step
            engine._take_model_step = lambda lr_kwargs: self._take_model_step(take_model_step, lr_kwargs)
            if not hasattr(self.optimizer, "overflow"):  # PyTorch's own or a fused one, in fp32
                self._replace("step", self._plain_step)

    def begin(self) -> None:
        """A new step: nothing is known of it yet."""
        self.grad_norm, self.refused = math.inf, False

    def _ask(self, scaled_norm: Any) -> bool:
        """Return whether the update is refused."""
        scale = float(getattr(self.optimizer, "loss_scale", None) or 1.0)  # None: bf16 without ZeRO, FusedAdam (0.19.8)
        norm = float(scaled_norm) / scale
        # DeepSpeed's helpers say -1 for what is not finite.
        self.grad_norm = norm if math.isfinite(norm) and norm >= 0 else math.inf
        self.refused = not self.may_update(self.grad_norm)
        return self.refused

    def _replace(self, name: str, function: Callable[..., Any]) -> None:
        real = getattr(self.optimizer, name)
        setattr(self.optimizer, name, lambda *arguments, **options: function(real, *arguments, **options))

    def _stage3_norms(self, real: Callable[[], list[Any]]) -> list[Any]:
        norms = real()
        return [torch.full((), math.inf)] if self._ask(combine_grad_norm_groups(norms)) else norms

    def _stage2_norm(self, real: Callable[..., Any], *arguments: Any) -> Any:
        norm = real(*arguments)
        return torch.full((), math.inf) if self._ask(norm) else norm

    def _before_muon(self, update: str, norm: str, combine: Callable[[Any], Any]) -> None:
        """Ask with the gradient's norm before Muon makes updates of gradients: refused, its momentum stays.

        Args:
            update: what does so.
            norm: what DeepSpeed takes the norm by: of gradients before, of updates after.
            combine: makes one number of that.
        """
        take_norm = getattr(self.optimizer, norm)

        def ask_first(real: Callable[[], None]) -> None:
            if not self._ask(combine(take_norm())):
                real()

        def norm_or_refusal(real: Callable[..., Any], *arguments: Any) -> Any:
            infinite = torch.full((), math.inf)
            return ([infinite] if norm == "_get_norm_groups" else infinite) if self.refused else real(*arguments)

        self._replace(update, ask_first)
        self._replace(norm, norm_or_refusal)

    def _take_model_step(self, real: Callable[[Any], None], lr_kwargs: Any) -> None:
        gradients = self._gradients()
        # In fp32: the squares of fp16 gradients that are in order would overflow.
        norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients]
        own = torch.stack(norms).norm() if norms else torch.zeros((), device=self.engine.device)
        if self._ask(self._over_model(own)) and gradients:
            gradients[0].view(-1)[0] = math.inf  # which DeepSpeed's optimizers skip themselves
        real(lr_kwargs)

    def _gradients(self) -> list[torch.Tensor]:
        """Return this rank's; of what all ranks of a tensor group have whole the first alone has the gradient."""
        if hasattr(self.optimizer, "get_grads_for_norm"):
            gradients: list[torch.Tensor] = self.optimizer.get_grads_for_norm()[0]
            return gradients
        # Of what all ranks of a tensor group have whole, and of what stages of a pipeline share, one has the gradient.
        has_whole = self.engine.autotp_size() <= 1 or torch.distributed.get_rank(tensor_group()) == 0
        own = (p for p in self.engine.module.parameters() if not getattr(p, "ds_pipe_replicated", False))
        return [p.grad for p in own if p.grad is not None and (has_whole or is_tensor_part(p))]

    def _over_model(self, norm: torch.Tensor) -> torch.Tensor:
        """Return the norm of the gradients of all ranks that share one model: stages, or ranks that split layers."""
        if not self.engine.pipeline_parallelism and self.engine.autotp_size() <= 1:
            return norm
        total = norm.square()
        torch.distributed.all_reduce(total, group=self.engine.mpu.get_model_parallel_group())
        return total.sqrt()

    def _plain_step(self, real: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Without ZeRO in fp32 DeepSpeed looks for no overflow, but heeds the attribute."""
        self.optimizer.overflow = self.refused
        return None if self.refused else real(*arguments, **options)


_STEP = ZenFlowSelectiveAdamW._step_with_offload


def patch_zenflow(trained: Sequence[torch.nn.Parameter]) -> None:
    """Let parameters look at their own numbers, and update none twice.

    ZenFlow lays matrices column by column into its flat buffer (zenflow_utils.py, _flatten_dense_tensors), but the
    parameters are then made views of it row by row (stage_1_and_2.py, _update_model_bit16_weights): every matrix is
    scrambled before the first step (measured). With this, an update of everything in every step is AdamW's. With
    `zero.zenflow.offload` too: see `_step_with_offload`.

    Args:
        trained: what will be trained.

    Raises:
        ConfigError: something of it has no columns.
    """
    if any(parameter.dim() > 2 for parameter in trained):
        raise ConfigError(
            tr(
                "zero.zenflow.enabled = true chooses columns of matrices, but this model trains experts that stand in "
                "one tensor. Use zero=stage2_offload."
            )
        )
    ZenFlowZeroOptimizer._update_model_bit16_weights = _update_model_bit16_weights
    ZenFlowSelectiveAdamW._step_with_offload = _step_with_offload


def _step_with_offload(self: Any) -> None:
    """Put the chosen columns back to what they were before the CPU's optimizer updated them too.

    DeepSpeed means to, but copies them into what indexing returned, a copy (zenflow_torch_adam.py, flush_bucket): with
    `offload` the chosen columns were updated twice (measured).
    """
    for group in self.param_groups:
        for parameter in group["params"]:
            before = getattr(parameter, "temp_selected_param", None)
            if before is not None and parameter.dim() == 2:
                parameter.data[:, parameter.selected_indices] = before.to(parameter.device)
    _STEP(self)


def _update_model_bit16_weights(self: Any, group_index: int) -> None:
    flat = self.bit16_groups_flat[group_index]
    reordered = self.round_robin_bit16_groups[group_index]
    metas, offsets = self.round_robin_bit16_meta[group_index], self.round_robin_bit16_offsets[group_index]
    for parameter, meta, offset in zip(reordered, metas, offsets, strict=True):
        piece = flat.narrow(0, offset, meta.numel()).data
        parameter.data = piece.view(meta.shape[::-1]).t() if meta.dim() == 2 else piece.view(meta.shape)
    for index, parameter in enumerate(self.bit16_groups[group_index]):
        parameter.data = reordered[self.round_robin_bit16_indices[group_index][index]].data
