"""The linear layers in a model's decoder layers, and which of them LoRA can be added to."""

import inspect
import re

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from toolkit.models.structure import layer_lists


def layer_of(name: str, lists: list[str]) -> str:
    """Return the name of the decoder layer that a module or parameter is in, of `layer_lists`; "" if it is in none."""
    for layers in lists:
        if name.startswith(f"{layers}."):
            return f"{layers}.{name.removeprefix(f'{layers}.').partition('.')[0]}"
    return ""


def linear_layers(model: PreTrainedModel) -> set[str]:
    """Return the names of the linear layers in a model's decoder layers, GPT-2's Conv1D (transposed weights) too."""
    layers = tuple(f"{name}." for name in layer_lists(model))
    linear = nn.Linear, Conv1D
    return {name for name, part in model.named_modules() if isinstance(part, linear) and name.startswith(layers)}


_RECURRENT = {"conv", "hybrid", "hybrid_sliding", "linear_attention"}
"""Values of `layer_types` in transformers' configs (5.23) for layers that carry a state from token to token."""
_CACHES = {"cache", "cache_params", "past_key_values"}
"""Names of the cache among the arguments of a block's forward; the first from transformers 5.24 on."""
_MASK_OR_CACHE = {"attention_mask", *_CACHES}
"""Arguments of forward in blocks that mix tokens, and in no feed-forward layer."""


def mixing_layers(model: PreTrainedModel) -> set[str]:
    """Return the names of the linear layers with which a hybrid, a model in which some layers are not attention, mixes
    tokens: `layers.0.linear_attn.out_proj`, `layers.3.self_attn.q_proj`, but not `layers.0.mlp.up_proj`. Empty for
    other models, which are not hybrids.
    """
    kinds = getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ()
    if not _RECURRENT.intersection(kinds):
        return set()
    linear, lists = linear_layers(model), layer_lists(model)
    # The modules that linear layers are in, such as `layers.3.self_attn`, except for decoder layers themselves.
    blocks = {name.rpartition(".")[0] for name in linear} - {layer_of(name, lists) for name in linear}
    mixing = tuple(f"{name}." for name in blocks if _forward_arguments(model.get_submodule(name)) & _MASK_OR_CACHE)
    # Blocks inside another one that mixes tokens, such as indexers, are left out.
    inner = tuple(block for block in mixing if any(block != other and block.startswith(other) for other in mixing))
    return {name for name in linear if name.startswith(mixing) and not name.startswith(inner)}


def with_weight_read_directly(model: PreTrainedModel, names: set[str]) -> set[str]:
    """Return those of the linear layers `names` whose weight the code of their block reads without calling the layer,
    as kernels for state spaces do: LoRA on such a layer would have no effect.
    """
    read_in_block: dict[str, set[str]] = {}
    for block in {name.rpartition(".")[0] for name in names}:
        part = model.get_submodule(block)
        # Kernels for state spaces have a cache of the state.
        code = inspect.getsource(type(part)) if _CACHES & _forward_arguments(part) else ""
        # `self.out_proj.weight` -> out_proj; not `self.out_proj.weight.dtype`, which reads no numbers.
        read_in_block[block] = {*re.findall(r"\bself\.(\w+)\.weight\b(?!\.(?:device|dtype|shape))", code)}
    return {name for name in names if name.rpartition(".")[2] in read_in_block[name.rpartition(".")[0]]}


def _forward_arguments(part: nn.Module) -> frozenset[str]:
    return frozenset(inspect.signature(type(part).forward).parameters)
