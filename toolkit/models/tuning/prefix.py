"""P-Tuning v2 as a way of training: the prefix becomes part of the model, and every forward pass begins with it.

Liu et al. 2021, https://arxiv.org/abs/2110.07602. As in the ChatGLM repositories, and unlike peft's prefix tuning,
positions of the tokens begin at 0 after the prefix.
"""

from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache

from toolkit.models.chatglm.prefix import PrefixEncoder
from toolkit.models.tuning.layers import by_name, decoder_layers, mask_and_positions, num_cached


class FixedCache(DynamicCache):
    """Keys and values that stand before a forward pass's own, which are not kept: the pass can be repeated."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the prefix and the new states of a layer, [B, heads, P + S, head_size] each."""
        own = self.layers[layer_idx]
        return torch.cat((own.keys, key_states), dim=-2), torch.cat((own.values, value_states), dim=-2)


def attach_prefix(model: PreTrainedModel, encoder: PrefixEncoder) -> None:
    """Let every forward pass of a model begin with a prefix.

    Args:
        model: its class stays; the prefix becomes its submodule `prefix_encoder`.
        encoder: of the model's sizes.
    """
    model.prefix_encoder = encoder
    model.register_forward_pre_hook(partial(_begin_with_prefix, encoder), with_kwargs=True)
    for layer in decoder_layers(model):  # transformers would drop the cache where activations are recomputed
        layer._can_checkpoint_with_cache = True  # type: ignore[assignment]


def _begin_with_prefix(
    prefix: PrefixEncoder, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    kwargs = by_name(model, args, kwargs)
    ids = kwargs["input_ids"] if kwargs.get("inputs_embeds") is None else kwargs["inputs_embeds"]
    cache: Cache | None = kwargs.get("past_key_values")
    if not getattr(model, "builds_positions", False):  # to ChatGLM-6B, what precedes the mask is a prefix
        mask, kwargs["position_ids"] = mask_and_positions(kwargs, ids, prefix.num_tokens)
        kwargs["attention_mask"] = mask
    if not num_cached(kwargs):
        if cache is None:
            cache = DynamicCache() if kwargs.get("use_cache") else FixedCache()
        for layer, (keys, values) in enumerate(prefix.states(len(ids))):
            DynamicCache.update(cache, keys, values, layer)
    kwargs["past_key_values"] = cache
    return (), kwargs
