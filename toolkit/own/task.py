"""What a program brings: its model, its data and its loss."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, default_collate

from toolkit.checkpoint import random_state
from toolkit.errors import ConfigError, DataError
from toolkit.messages import tr

Loss = Callable[[Any, Any], torch.Tensor]
"""Given the model and a batch, returns one loss per sample, [n]."""
Metrics = Callable[[Any, Any], Mapping[str, torch.Tensor]]
"""Given the model and a batch, returns by name a value per sample, [n, ...]."""
Score = Callable[[Mapping[str, torch.Tensor]], Mapping[str, float]]
"""Given the values of all samples, by name [N, ...] on the CPU, returns figures."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A program's own parts; see `toolkit.own.train`."""

    model: nn.Module | Callable[[], nn.Module]
    dataset: Any
    loss: Loss
    validation: Any = None
    metrics: Metrics | None = None
    score: Score | None = None
    collate: Callable[[list[Any]], Any] = default_collate
    shards_itself: bool = False

    @property
    def model_name(self) -> str:
        """Return what messages call the model."""
        model = self.model
        name = type(model).__name__ if isinstance(model, nn.Module) else getattr(model, "__name__", "?")
        return tr("a model of one's own") if name == "<lambda>" else name

    def build(self, seed: int) -> nn.Module:
        """Return the model, the same on every rank; one that is there already is taken as rank 0 has it.

        Args:
            seed: of random weights, where a function makes the model.

        Raises:
            ConfigError: it is no module, or nothing in it is trained.
        """
        model = self.model
        if not isinstance(model, nn.Module):
            random_state.seed_all(seed)
            model = model()
        if not isinstance(model, nn.Module):
            raise ConfigError(
                tr("model= must be a torch.nn.Module or make one, and is {kind}.", kind=type(model).__name__)
            )
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise ConfigError(
                tr("nothing in {model} is trained: no parameter wants a gradient.", model=self.model_name)
            )
        return model


def is_map_style(dataset: Any) -> bool:
    """Whether any sample of a data set can be read at once.

    Raises:
        DataError: it is no data set.
    """
    if isinstance(dataset, DataLoader):
        raise DataError(tr("give the data set, not a DataLoader: batches are made here."))
    if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__") and not isinstance(dataset, IterableDataset):
        return True
    if not hasattr(dataset, "__iter__"):
        raise DataError(
            tr(
                "{kind} is no data set: it needs __len__ and __getitem__, or __iter__.",
                kind=type(dataset).__name__,
            )
        )
    return False


def digest(model: nn.Module) -> str:
    """Return what tells two models apart by the names and shapes of what a checkpoint holds."""
    shapes = {name: tuple(getattr(one, "ds_shape", one.shape)) for name, one in model.named_parameters()}
    shapes |= {name: tuple(one.shape) for name, one in model.named_buffers()}
    return blake2b(repr(sorted(shapes.items())).encode(), digest_size=8).hexdigest()
