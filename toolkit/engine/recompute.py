"""Activation checkpointing: a model's layers are computed again in the backward pass, by DeepSpeed's function or
PyTorch's.
"""

from collections import Counter
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import deepspeed
import torch
from torch.utils import _pytree, checkpoint as torch_checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from toolkit.config import schema
from toolkit.messages import ConfigError


def checkpoint_activations(
    model: PreTrainedModel, config: schema.ActivationCheckpointingConfig, stage: int, compiled: bool = False
) -> None:
    """Route the model's layers through DeepSpeed's checkpoint function, so that its settings take effect.
    transformers would use torch's function and leave DeepSpeed's section unread. `stage`: of ZeRO. `compiled`: take
    torch's, as torch.compile looks into no other; see `build.compiles_layers`.
    """
    check_recomputes(model, stage)
    if compiled:
        model._set_gradient_checkpointing(True, partial(torch_checkpoint.checkpoint, use_reentrant=False))
        return
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
    layers = _layers(model)
    # A layer reads more than its inputs that has a gradient: a learned prefix. Not for trained layers: their pieces
    # under ZeRO-3 are gone when this function's gradients come (deepspeed 0.19.8). Or it takes part several times:
    # ZeRO-2 takes one gradient for each parameter, and DeepSpeed's other function makes one each time.
    reads_more = any(layer._can_checkpoint_with_cache for layer in layers)
    function = partial(_checkpoint, reentrant=not (reads_more or _repeated_part(model)))
    model._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=function)
    trained = (layer for layer in layers if any(parameter.requires_grad for parameter in layer.parameters()))
    if first := next(trained, None):
        first._gradient_checkpointing_func = partial(_with_gradient, function)


def check_recomputes(model: PreTrainedModel, stage: int) -> None:
    """Reject a model whose layers cannot be computed again at a stage of ZeRO; a ConfigError. It may be on meta."""
    if not model.supports_gradient_checkpointing:
        raise ConfigError(
            "train.activation_checkpointing.enabled = true, but {architecture} does not support it.",
            architecture=type(model).__name__,
        )
    if stage == 3 and (name := _repeated_part(model)):
        raise ConfigError(
            "train.activation_checkpointing.enabled = true and zero.stage = 3 cannot be together with {architecture}: "
            "{name} is used several times in a forward pass. Use zero=stage2, or disable activation checkpointing.",
            architecture=type(model).__name__,
            name=name,
        )


def _layers(model: PreTrainedModel) -> list[GradientCheckpointingLayer]:
    """Return the layers that can be computed again, those that a model has twice twice."""
    parts = (part for _, part in model.named_modules(remove_duplicate=False))
    return [part for part in parts if isinstance(part, GradientCheckpointingLayer)]


_REPEATING = ("hrm_text",)
"""Types of models (transformers 5.23) that call their layers several times in a forward pass."""


def _repeated_part(model: PreTrainedModel) -> str:
    """Return the name of a trained parameter that takes part several times in a forward pass, as those of the block
    that Zamba's layers share; "" if there is none.
    """
    layers = _layers(model) * (2 if model.config.model_type in _REPEATING else 1)
    inner = {part for layer in layers for part in layer.modules() if part is not layer}
    outer = (layer for layer in layers if layer not in inner)
    counts = Counter(parameter for layer in outer for parameter in layer.parameters() if parameter.requires_grad)
    return next((name for name, parameter in model.named_parameters() if counts[parameter] > 1), "")


def _with_gradient(checkpoint: Callable[..., Any], function: Callable[..., Any], *inputs: Any) -> Any:
    """Let the first layer that is trained have inputs with a gradient, also where all before it is frozen.
    The layer is computed again from its inputs; from what has no gradient nothing would lead back to its parameters.
    A hook of the layer would come too late: before 5.23 transformers calls those within the checkpoint.
    """
    if torch.is_grad_enabled() and not inputs[0].requires_grad:
        inputs[0].requires_grad_()
    return checkpoint(function, *inputs)


def _checkpoint(function: Callable[..., Any], *inputs: Any, reentrant: bool) -> Any:
    """DeepSpeed's checkpoint during training; looked up late, so that tests can count its calls.

    Gradients reach only tensors that it is handed one by one, and it returns a tuple of one tensor as that tensor
    (0.19.8, checkpointing.py, `checkpoint`). So what has a gradient is taken out of all that a layer gets, by position
    or by name (Zamba 2's embeddings), and what a layer writes into a mapping for later layers comes out beside what it
    returns (Gemma 3n and 4, whose last layers share keys and values).
    Not for frozen layers below all that is trained: they keep nothing, and it would keep their inputs in host memory,
    with cpu_checkpointing, for a backward pass that never comes (0.19.8, checkpointing.py, CheckpointFunction).
    """
    call, keywords = (function.func, function.keywords) if isinstance(function, partial) else (function, {})
    mappings = {name: value for name, value in keywords.items() if isinstance(value, MutableMapping)}
    plain = keywords | {name: dict(value) for name, value in mappings.items()}
    leaves, form = _pytree.tree_flatten((inputs, plain))
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    if reentrant and not places:
        return function(*inputs)
    tensors = [leaves[place] for place in places]
    for place in places:
        leaves[place] = None  # not held here, as they may be moved to host memory
    kinds = {name: type(value) for name, value in mappings.items()}
    layer = _Flat(partial(call, *getattr(function, "args", ())), kinds, leaves, places, form)
    checkpointing = deepspeed.checkpointing
    outputs = (checkpointing.checkpoint if reentrant else checkpointing.non_reentrant_checkpoint)(layer, *tensors)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    result, written = _pytree.tree_unflatten(outputs, layer.returned)
    for name, values in written.items():
        mappings[name].update(values)
    return result


@dataclass
class _Flat:
    """A layer that takes the tensors with a gradient alone, and returns all in one tuple."""

    call: Callable[..., Any]
    kinds: dict[str, Any]
    """Type of each mapping that it gets by name."""
    leaves: list[Any]
    """All that it gets, None at `places`."""
    places: list[int]
    form: _pytree.TreeSpec
    returned: Any = None
    """Of the last result and what was written into each mapping."""

    def __call__(self, *tensors: torch.Tensor) -> tuple[Any, ...]:
        leaves = list(self.leaves)
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor
        arguments, options = _pytree.tree_unflatten(leaves, self.form)
        mappings = {name: kind(options[name]) for name, kind in self.kinds.items()}
        result = self.call(*arguments, **(options | mappings))
        written = {
            name: {key: value for key, value in mapping.items() if value is not options[name].get(key)}
            for name, mapping in mappings.items()
        }
        flat, self.returned = _pytree.tree_flatten((result, written))
        return tuple(flat)
