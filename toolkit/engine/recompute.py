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
from toolkit.messages import ConfigError, warn


def recompute_layers(
    model: PreTrainedModel,
    config: schema.ActivationCheckpointingConfig,
    compiling: schema.CompileConfig,
    stage: int,
) -> None:
    """Turn on activation checkpointing in the layers of `model`, which this rank computes, at ZeRO `stage`; warn if
    `compiling` is enabled but cannot reach them.
    """
    compiled = False
    if compiling.enabled:
        from toolkit.engine.compiling import reaches_recomputed_layers

        compiled = reaches_recomputed_layers(compiling, config, stage)
    checkpoint_activations(model, config, stage, compiled)


def checkpoint_activations(
    model: PreTrainedModel, config: schema.ActivationCheckpointingConfig, stage: int, compiled: bool = False
) -> None:
    """Recompute the model's layers by DeepSpeed's checkpoint function: torch's, which transformers would use, ignores
    DeepSpeed's settings. With `compiled` torch's is used all the same, as torch.compile traces no other; see
    `compiling.reaches_recomputed_layers`. `stage`: of ZeRO.
    """
    check_recomputes(model, stage)
    if compiled:
        model._set_gradient_checkpointing(True, partial(torch_checkpoint.checkpoint, use_reentrant=False))
        return
    # On CPU ranks the activations are in host memory already, and DeepSpeed 0.19.8 would empty them there: its copy to
    # the CPU is the same tensor (checkpointing.py, get_cpu_activations_for_backward).
    in_host_memory = deepspeed.accelerator.get_accelerator().device_name() == "cpu"
    if config.cpu_checkpointing and in_host_memory:
        warn("train.activation_checkpointing.cpu_checkpointing = true has no effect on CPU ranks.")
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
    if config.cpu_checkpointing and len(outermost_layers(model)) < len(layers):
        # DeepSpeed 0.19.8 never frees what an inner layer moves in the first forward pass (offload_activations.py).
        raise ConfigError(
            "train.activation_checkpointing.cpu_checkpointing = true cannot be with {architecture}, whose recomputed "
            "layers contain others: host memory would grow with every step. Set it to false.",
            architecture=type(model).__name__,
        )
    # DeepSpeed's non-reentrant function is needed in two cases: a layer reads something with a gradient that is not
    # among its inputs (a learned prefix); or a layer runs several times, as ZeRO-2 takes one gradient of each
    # parameter, and the reentrant function makes one each time. It is wrong for trained layers under ZeRO-3: their
    # weights are partitioned again when its gradients are computed (deepspeed 0.19.8).
    reads_more = any(layer._can_checkpoint_with_cache for layer in layers)
    function = partial(
        _checkpoint,
        reentrant=not (reads_more or _repeated_parameter(model)),
        is_moved=config.cpu_checkpointing and not in_host_memory,
    )
    model._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=function)
    trained = (layer for layer in layers if any(parameter.requires_grad for parameter in layer.parameters()))
    if first := next(trained, None):
        first._gradient_checkpointing_func = partial(_with_input_gradient, function)


def check_recomputes(model: PreTrainedModel, stage: int) -> None:
    """Raise ConfigError if a model's layers cannot be recomputed at this ZeRO stage. It may be on the meta device."""
    if not model.supports_gradient_checkpointing:
        raise ConfigError(
            "train.activation_checkpointing.enabled = true, but {architecture} does not support it.",
            architecture=type(model).__name__,
        )
    if stage == 3 and (name := _repeated_parameter(model)):
        raise ConfigError(
            "train.activation_checkpointing.enabled = true and zero.stage = 3 cannot be together with {architecture}: "
            "{name} is used several times in a forward pass. Use zero=stage2, or disable activation checkpointing.",
            architecture=type(model).__name__,
            name=name,
        )


def _layers(model: PreTrainedModel) -> list[GradientCheckpointingLayer]:
    """Return the layers that can be recomputed; a layer that a model holds in two places is listed twice."""
    parts = (part for _, part in model.named_modules(remove_duplicate=False))
    return [part for part in parts if isinstance(part, GradientCheckpointingLayer)]


def outermost_layers(model: PreTrainedModel) -> list[GradientCheckpointingLayer]:
    """Return the layers that are in no other one; a layer that a model holds in two places is listed twice."""
    layers = _layers(model)
    inner = {part for layer in layers for part in layer.modules() if part is not layer}
    return [layer for layer in layers if layer not in inner]


_REPEATING = ("dory", "hrm_text", "inkling2_loop_text")
"""Model types (transformers 5.24) that call their layers several times in a forward pass."""


def _repeated_parameter(model: PreTrainedModel) -> str:
    """Return the name of a trained parameter that is used several times in a forward pass, as in the block that Zamba's
    layers share; "" if there is none.
    """
    layers = outermost_layers(model)
    if model.config.model_type in _REPEATING:
        layers *= 2
    counts = Counter(parameter for layer in layers for parameter in layer.parameters() if parameter.requires_grad)
    return next((name for name, parameter in model.named_parameters() if counts[parameter] > 1), "")


def _with_input_gradient(checkpoint: Callable[..., Any], function: Callable[..., Any], *inputs: Any) -> Any:
    """Checkpoint the first trained layer with an input that requires a gradient, even if all layers before it are
    frozen: without one autograd would not reach the parameters of a recomputed layer. A forward hook of the layer would
    run too late: before 5.23 transformers calls those inside the checkpoint.
    """
    if torch.is_grad_enabled() and not inputs[0].requires_grad:
        inputs[0].requires_grad_()
    return checkpoint(function, *inputs)


def _checkpoint(function: Callable[..., Any], *inputs: Any, reentrant: bool, is_moved: bool = False) -> Any:
    """Run a layer through DeepSpeed's checkpoint function, and return its result.

    Its gradients reach only tensors that are positional arguments, and it returns a tuple of one tensor as that tensor
    (0.19.8, checkpointing.py, `checkpoint`). So the tensors with a gradient are picked from all arguments of the layer,
    also from keywords (Zamba 2's embeddings); and what the layer writes into a mapping for later layers (Gemma 3n and
    4, whose last layers share keys and values) is returned with its result and written again here.

    Layers without such a tensor run plainly: frozen ones below all trained layers have no backward pass, for which
    cpu_checkpointing would keep their inputs in host memory (0.19.8, checkpointing.py, CheckpointFunction).

    `function` calls the layer, with `inputs` as positional arguments; if it is a partial, it holds the keywords.
    `is_moved`: whether DeepSpeed moves the inputs to host memory.
    """
    keywords = function.keywords if isinstance(function, partial) else {}
    mappings = {name: value for name, value in keywords.items() if isinstance(value, MutableMapping)}
    copies = {name: dict(value) for name, value in mappings.items()}  # without what the layer is about to write
    leaves, form = _pytree.tree_flatten((inputs, keywords | copies))
    positions = [at for at, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    if reentrant and not positions:
        return function(*inputs)
    # A view, as DeepSpeed empties what it has moved, and a later layer may take the same tensor (Gemma 4).
    tensors = [leaves[at].view_as(leaves[at]) if is_moved else leaves[at] for at in positions]
    for position in positions:
        leaves[position] = None  # no reference is kept, as they may be moved to host memory
    kinds = {name: type(value) for name, value in mappings.items()}
    # Without a partial's keywords, which are among the leaves.
    call = partial(function.func, *function.args) if isinstance(function, partial) else function
    layer = _FlatLayer(call, kinds, leaves, positions, form)
    checkpointing = deepspeed.checkpointing  # looked up at each call, so that tests can count the calls
    outputs = (checkpointing.checkpoint if reentrant else checkpointing.non_reentrant_checkpoint)(layer, *tensors)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    result, written = _pytree.tree_unflatten(outputs, layer.returned)
    for name, values in written.items():
        mappings[name].update(values)
    return result


@dataclass
class _FlatLayer:
    """A layer as a function of its tensors with a gradient alone, which returns all tensors in one flat tuple."""

    call: Callable[..., Any]
    kinds: dict[str, Any]
    """Type of each mapping among its keyword arguments."""
    leaves: list[Any]
    """All leaves of its arguments, None at `positions`."""
    positions: list[int]
    """Indices in `leaves` of the tensors with a gradient."""
    form: _pytree.TreeSpec
    """Structure of its arguments."""
    returned: Any = None
    """Structure of the last result, with what was written into each mapping."""

    def __call__(self, *tensors: torch.Tensor) -> tuple[Any, ...]:
        """Run the layer with `tensors` put back at `positions`. Returns the leaves of (its result, what it wrote into
        each mapping); their structure is left in `returned`, by which the caller rebuilds both. What a layer writes for
        later layers into a mapping among its arguments (Gemma 3n and 4) gets gradients only if it is returned, too.
        """
        leaves = list(self.leaves)
        for position, tensor in zip(self.positions, tensors, strict=True):
            leaves[position] = tensor
        arguments, keywords = _pytree.tree_unflatten(leaves, self.form)  # with dicts in place of the mappings
        mappings = {name: mapping_type(keywords[name]) for name, mapping_type in self.kinds.items()}
        result = self.call(*arguments, **(keywords | mappings))
        written = {
            name: {key: value for key, value in mapping.items() if value is not keywords[name].get(key)}
            for name, mapping in mappings.items()
        }
        flat, self.returned = _pytree.tree_flatten((result, written))
        return tuple(flat)
