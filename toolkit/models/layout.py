"""How the tensors of a folder become the parameters of a model, and back."""

import re
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    apply_renamings,
    rename_source_key,
)

from toolkit.errors import ModelError

Shapes = dict[str, tuple[int, ...]]


class Layout:
    """How the tensors of one kind of directory fill a model's parameters: here each that of its own name.

    `ignored`: ends of names that are computed instead of read.
    """

    def __init__(self, ignored: tuple[str, ...] = ()) -> None:
        self._ignored = ignored

    def parameters(self, name: str) -> list[str]:
        """Return the parameters that a stored tensor fills, [] if it is not read."""
        return [] if self._ignored and name.endswith(self._ignored) else [name]

    def split(self, name: str, value: torch.Tensor) -> list[torch.Tensor]:
        """Return a stored tensor's parts, in the order of `parameters`."""
        return [value]

    def join(self, name: str, parts: list[torch.Tensor]) -> torch.Tensor:
        """Undo `split`."""
        return parts[0]

    def index(self, name: str) -> Any:
        """Return the index at which the parts stand in their parameters, `...` if they fill them."""
        return ...

    def stored_shape(self, name: str, shapes: Shapes) -> tuple[int, ...]:
        """Return the shape a tensor must have to fill parameters of these shapes."""
        return shapes[name]


def predicting(config: Any) -> str:
    """Return a pattern of the names in layers beyond the last, which predict several tokens at once and are not loaded.

    transformers (5.23) skips those of the published sizes by their number; a model of another depth has them elsewhere.
    """
    config = config.get_text_config()
    count, last = getattr(config, "num_nextn_predict_layers", 0) or 0, getattr(config, "num_hidden_layers", 0)
    return "|".join(rf"(?:^|\.)layers\.{number}\." for number in range(last, last + min(count, 16))) or r"(?!)"


class TransformersLayout(Layout):
    """The names and shapes in which transformers writes a model, which for some are not those of its parameters.

    Some are called otherwise (GPT-NeoX's head), and the experts of a layer stand in one parameter but are stored one by
    one. What becomes of which is read off transformers' own table (5.23, conversion_mapping.py).
    """

    def __init__(self, model: PreTrainedModel, shapes: Shapes) -> None:
        super().__init__()
        self._shapes, self._model = shapes, model
        table = get_model_conversion_mapping(model)
        self._renamings = [one for one in table if isinstance(one, WeightRenaming)]
        self._converters = [one for one in table if isinstance(one, WeightConverter)]
        self._targets: dict[str, tuple[str, Any]] = {}
        # Layers for predicting several tokens at once (GLM-4.5, DeepSeek-V3), buffers of older versions.
        unread = {*(model._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq$", predicting(model.config)}
        self._unread = re.compile("|".join(f"(?:{one})" for one in unread))

    def parameters(self, name: str) -> list[str]:
        """Return the parameter, perhaps a joint one of all experts; [] if transformers reads no such tensor."""
        parameter = self._target(name)[0]
        return [parameter] if parameter in self._shapes or not self._unread.search(name) else []

    def index(self, name: str) -> Any:
        """Return an expert's own part of the joint parameter; see `Layout`."""
        return self._target(name)[1]

    def stored_shape(self, name: str, shapes: Shapes) -> tuple[int, ...]:
        """Return the shape of one expert's matrix; see `Layout`."""
        parameter, place = self._target(name)
        if place is ...:
            return shapes[parameter]
        _, rows, columns = shapes[parameter]
        return (rows if isinstance(place, int) else place[1].stop - place[1].start, columns)

    def _target(self, name: str) -> tuple[str, Any]:
        if name not in self._targets:
            self._targets[name] = self._find(name)
        return self._targets[name]

    def _find(self, name: str) -> tuple[str, Any]:
        prefix = self._model.base_model_prefix
        parameter, pattern = rename_source_key(name, self._renamings, self._converters, prefix, self._shapes)
        if pattern is None or parameter not in self._shapes:
            return parameter, ...
        converter = next(one for one in self._converters if pattern in one.source_patterns)
        number = re.search(pattern.replace("*", r"(\d+)"), apply_renamings(name, self._renamings))
        # One after another along the first dimension, perhaps gate and up beside each other along the second.
        steps = [(type(one), getattr(one, "dim", None)) for one in converter.operations]
        parts = len(converter.source_patterns)
        if number is None or steps != [(MergeModulelist, 0), (Concatenate, 1)][: 1 if parts == 1 else 2]:
            raise ModelError(
                "{architecture} stores {name} in another form than it computes with, which cannot be read piece by "
                "piece: zero.stage=3, verify and export need that. Use zero=stage2 with checkpoint.export=false.",
                architecture=type(self._model).__name__,
                name=name,
            )
        if parts == 1:
            return parameter, int(number[1])
        size, part = self._shapes[parameter][1] // parts, converter.source_patterns.index(pattern)
        return parameter, (int(number[1]), slice(part * size, (part + 1) * size))
