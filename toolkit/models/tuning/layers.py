"""The parts of a model that ways of tuning choose among."""

import inspect
from typing import Any

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
    names = list(inspect.signature(type(model).forward).parameters)[1:]
    return dict(zip(names, args, strict=False)) | kwargs
