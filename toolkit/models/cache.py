"""Arguments of a forward pass: mask, positions, and the cache of keys and values, which transformers calls `cache` from
5.24 on and `past_key_values` before.
"""

import inspect
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast

OLDER = "past_key_values"
CACHE = "cache" if "cache" in {field.name for field in fields(CausalLMOutputWithPast)} else OLDER
"""Name of the argument and of the output in the installed version."""


def cache_of(arguments: Mapping[str, Any]) -> Cache | None:
    """Return the cache among the arguments of a forward pass, by either name; None if there is none."""
    cache: Cache | None = arguments.get(CACHE)
    return arguments.get(OLDER) if cache is None else cache


def num_cached(arguments: Mapping[str, Any]) -> int:
    """Return how many tokens the cache of a forward pass holds already."""
    cache = cache_of(arguments)
    return 0 if cache is None else int(cache.get_seq_length())


def arguments_by_name(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return all arguments of a forward pass by name; `args`: the positional ones."""
    if args:
        names = [*inspect.signature(type(model).forward).parameters][1:]
        kwargs = dict(zip(names, args, strict=False)) | kwargs
    return dict(kwargs)


def mask_and_positions(
    kwargs: dict[str, Any], ids: torch.Tensor, num_before: int, first: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mask `[B, num_before + S]` and positions `[B, S]` of a forward pass with `num_before` learned tokens in
    front, which positions do not count; with cached tokens the mask is longer by these. If `kwargs`, the arguments of
    the pass, have none, they are made as transformers makes them, positions from `first` on. `ids`: `[B, S]`, or
    embeddings `[B, S, H]`.
    """
    rows, size = ids.shape[:2]
    mask = kwargs.get("attention_mask")
    if mask is None:
        earlier = max(num_cached(kwargs) - num_before, 0)  # the cache holds the learned tokens too
        mask = torch.ones(rows, earlier + size, dtype=torch.long, device=ids.device)
    positions = kwargs.get("position_ids")
    if positions is None:
        positions = (mask.long().cumsum(dim=1) - 1).clamp(min=0)[:, -size:] + first
    longer = torch.cat((mask.new_ones(rows, num_before), mask), dim=1)
    longer.is_right_padded = getattr(mask, "is_right_padded", False)  # type: ignore[attr-defined]
    return longer, positions
