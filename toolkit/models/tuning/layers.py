"""The parts of a model that ways of tuning choose among."""

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """Return a model's decoder layers, first to last."""
    layers: nn.ModuleList = model.get_submodule(decoder_layers_name(model))
    return layers


def decoder_layers_name(model: PreTrainedModel) -> str:
    """Return the name of the list of a model's decoder layers."""
    number = model.config.num_hidden_layers
    found = [name for name, part in model.named_modules() if isinstance(part, nn.ModuleList) and len(part) == number]
    return min(found, key=len)


def by_name(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return all arguments of a forward pass by name."""
    return dict(zip(_argument_names(type(model).forward), args, strict=False)) | kwargs


@cache
def _argument_names(forward: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(forward).parameters)[1:]


def num_cached(kwargs: dict[str, Any]) -> int:
    """Return how many places the cache of a forward pass holds already."""
    cache = kwargs.get("past_key_values")
    return 0 if cache is None else int(cache.get_seq_length())


def mask_and_positions(kwargs: dict[str, Any], ids: torch.Tensor, num_before: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the attention mask and the positions of a forward pass before which something learned stands.

    Args:
        kwargs: arguments of the pass; what they leave out is made as transformers makes it.
        ids: `[B, S]`, or embeddings `[B, S, H]`.
        num_before: places of what is learned: the mask has ones for them in front, positions do not count them.
    """
    rows, size = ids.shape[:2]
    mask = kwargs.get("attention_mask")
    if mask is None:
        earlier = max(num_cached(kwargs) - num_before, 0)
        mask = torch.ones(rows, earlier + size, dtype=torch.long, device=ids.device)
    positions = kwargs.get("position_ids")
    if positions is None:
        positions = (mask.long().cumsum(dim=1) - 1).clamp(min=0)[:, -size:]
    return torch.cat((mask.new_ones(rows, num_before), mask), dim=1), positions
