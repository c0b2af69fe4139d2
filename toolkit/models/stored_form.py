"""How transformers stores a model, by its own table of conversions (5.23, conversion_mapping.py): under other names
than in memory (GPT-NeoX's head), experts one by one, joint matrices in parts, transposed or permuted.

transformers reads a model in several forms. An export has that of the files that the model came from, for which other
programs (vLLM, SGLang) are written: `record` remembers it, `restore` takes it from a checkpoint.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from copy import deepcopy
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel, core_model_loading as loading
from transformers.conversion_mapping import get_model_conversion_mapping

from toolkit.messages import ModelError, NotStreamable
from toolkit.models import weights
from toolkit.models.directory import read_object
from toolkit.models.record import record_of

FILE = "stored_form.json"
"""File of a checkpoint with name and shape of each tensor in the files that its model came from."""


class _Target(NamedTuple):
    """Where a stored tensor goes."""

    parameters: tuple[str, ...]
    index: Any = ...
    converter: loading.WeightConverter | None = None
    """What makes the parameters of the tensor; None: it is copied to `index` of the only one."""


class TransformersLayout(weights.Layout):
    """How files, of which `stored` has names and shapes, fill the parameters of a model."""

    def __init__(self, model: PreTrainedModel, stored: Mapping[str, tuple[int, ...]]) -> None:
        self._shapes, self._model, self._stored = weights.shapes_of(model), model, stored
        shapes = self._shapes
        # What conversions ask of a model; parameters that are partitioned have no shape of their own.
        self._shell = SimpleNamespace(
            config=model.config, get_parameter=lambda name: torch.empty(shapes[name], device="meta")
        )
        self._table = get_model_conversion_mapping(model)
        self._renamings = [entry for entry in self._table if isinstance(entry, loading.WeightRenaming)]
        self._converters = [entry for entry in self._table if isinstance(entry, loading.WeightConverter)]
        self._zeroed_id = (
            model.config.get_text_config().pad_token_id if weights.zeroes_padding_embedding(model) else None
        )
        # Layers for predicting several tokens at once (GLM-4.5, DeepSeek-V3), buffers of older versions.
        unread = {
            *(model._keys_to_ignore_on_load_unexpected or ()),
            r"rotary_emb\.inv_freq$",
            weights.prediction_layer_pattern(model.config),
        }
        self._unread = re.compile("|".join(f"(?:{expression})" for expression in unread))
        self._renamed = cache(self._rename)
        self._target = cache(self._find_target)
        self._parts: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
        """Parameter -> source pattern -> the stored tensors that it consists of, in transformers' order."""
        for name in sorted(stored, key=loading.dot_natural_key):  # an order that some of transformers' renamings need
            parameter, pattern = self._renamed(name)
            if pattern is not None and parameter in shapes:
                self._parts[parameter][pattern].append(name)
        self._settle_transposes()

    def parameters(self, name: str) -> list[str]:
        """Return the parameters that a tensor fills or is a part of; [] if transformers does not read it."""
        parameters = self._target(name).parameters
        return [*parameters] if parameters[0] in self._shapes or not self._unread.search(name) else []

    def split(self, name: str, value: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensor as transformers loads it: converted, Youtu's embedding with zeros for the padding token."""
        target = self._target(name)
        if target.converter is not None:
            return [*self._convert(target.converter, name, value).values()]
        table = self._model.get_input_embeddings().weight if self._zeroed_id is not None else None
        if table is not None and self._model.get_parameter_or_buffer(target.parameters[0]) is table:
            value = value.clone()
            value[self._zeroed_id] = 0
        return [value]

    def unread(self, names: Iterable[str]) -> list[str]:
        """Return the stored tensors that transformers skips."""
        return [name for name in names if self._unread.search(name) and self._renamed(name)[0] not in self._shapes]

    def index(self, name: str) -> Any:
        """Return the part of a joint parameter, an expert's own or one of several; see `Layout`."""
        return self._target(name).index

    def stored_shape(self, name: str, shapes: weights.Shapes) -> tuple[int, ...]:
        """Return the shape a tensor must have to fill parameters of these shapes."""
        target = self._target(name)
        if target.converter is None:
            return super().stored_shape(name, shapes)
        state = {parameter: torch.empty(shapes[parameter], device="meta") for parameter in target.parameters}
        self._shell._weight_conversions = [target.converter]  # as transformers would save these parameters
        [value] = loading.revert_weight_conversion(self._shell, state).values()
        return tuple(value.shape)

    def conversions(self) -> list[loading.WeightTransform]:
        """Return those conversions of transformers' table that the files need, so that their reverse makes the files'
        form. One that concatenates parts of unequal sizes (Olmo Hybrid) becomes `UnequalParts`, which knows the sizes.
        """
        for parts in self._parts.values():
            pattern = next(iter(parts))
            converter, is_stacked = self._converter_of(pattern), "*" in pattern
            operations = converter.operations
            joining = [number for number, step in enumerate(operations) if isinstance(step, loading.Concatenate)]
            only_joins_experts = is_stacked and len(operations) == 1  # which are of one size
            if not joining or only_joins_experts:
                continue
            step = operations[joining[0]]
            axis = int(step.dim) - 1 if is_stacked else int(step.dim)  # an expert's tensor lacks the first dimension
            sizes = [
                self._size_of(parts[source][0], axis) if source in parts else 0 for source in converter.source_patterns
            ]
            if len({*sizes}) > 1:
                from toolkit.models.conversions import UnequalParts

                if not isinstance(step, UnequalParts):
                    step = operations[joining[0]] = UnequalParts(step.dim)
                step.sizes[sum(sizes)] = sizes  # its reverse finds them by the size of the whole
        return [entry for entry in self._table if entry.was_used()]

    def _rename(self, name: str) -> tuple[str, str | None]:
        """Return the (first) parameter that a stored tensor fills, and the pattern of the converter that it needs, None
        if it needs none. A name without a parameter is returned as renamed.
        """
        prefix, used = self._model.base_model_prefix, [entry.was_used() for entry in self._table]
        parameter, pattern = loading.rename_source_key(name, self._renamings, self._converters, prefix, self._shapes)
        if parameter not in self._shapes and name in self._shapes:  # a conversion's pattern matches it by mistake
            parameter, pattern = loading.rename_source_key(name, [], [], prefix, self._shapes)
            # The first call has marked conversions as used, which `conversions` would take for needed.
            for entry, was_used in zip(self._table, used, strict=True):
                entry._was_used = was_used
        return parameter, pattern

    def _converter_of(self, pattern: str) -> loading.WeightConverter:
        return next(entry for entry in self._converters if pattern in entry.source_patterns)

    def _settle_transposes(self) -> None:
        """Replace conversions that transpose or not by a tensor's shape as transformers loads it, and so never as it
        saves (5.23: Qwen3-VL-MoE): by one that always does, or never.
        """
        for parameter, parts in self._parts.items():
            for pattern, names in parts.items():
                converter = self._converter_of(pattern)
                for number, step in enumerate(converter.operations):
                    if getattr(step, "check_dims", False):
                        from toolkit.models.conversions import Unchanged

                        is_same = tuple(self._stored[names[0]]) == self._shapes[parameter]
                        settled = Unchanged() if is_same else loading.Transpose(step.dim0, step.dim1)
                        converter.operations[number] = settled

    def _find_target(self, name: str) -> _Target:
        """Return the parameters that a stored tensor fills, and how."""
        parameter, pattern = self._renamed(name)
        if pattern is None or parameter not in self._shapes:
            return _Target((parameter,))
        converter = self._converter_of(pattern)
        if len(converter.source_patterns) == 1 and "*" not in pattern:
            try:
                empty = torch.empty(self._stored[name], device="meta")
                return _Target(tuple(self._convert(converter, name, empty)), ..., converter)
            except (ArithmeticError, LookupError, RuntimeError, ValueError):  # its shape does not fit
                return _Target((parameter,))
        return self._place_in_joint(name, parameter, pattern, converter)

    def _place_in_joint(self, name: str, parameter: str, pattern: str, converter: loading.WeightConverter) -> _Target:
        """Return the part of a joint parameter that a stored tensor is: of experts stacked along the first dimension,
        and of parts (gate, up) concatenated along another.
        """
        steps: list[tuple[str, Any]] = [
            (type(operation).__name__, getattr(operation, "dim", None)) for operation in converter.operations
        ]
        targets = converter.target_patterns
        if steps == [("ErnieFuseAndSplitTextVisionExperts", None)]:  # the second half of the experts sees images
            # It stacks experts, and joins gate and up where there are two source patterns.
            steps = [("MergeModulelist", 0), ("Concatenate", 1)][: len(converter.source_patterns)]
        is_stacked = ("MergeModulelist", 0) in steps
        joined = [int(dim or 0) for step, dim in steps if step in ("Concatenate", "UnequalParts")]
        # Stacking and one concatenation at most: only then a stored tensor is a part of the parameter as it is.
        has_other_steps = len(steps) != is_stacked + len(joined)
        if has_other_steps or len(joined) > 1 or (is_stacked and "*" not in pattern):
            raise NotStreamable(
                "{architecture} stores {name} in another form than it computes with, so that it can only be read "
                "whole, not with zero.stage=3, parallel.pipeline, parallel.expert or tuning=qlora. Use zero=stage2.",
                architecture=type(self._model).__name__,
                name=name,
            )
        # Experts by their order; if their tensors fill several parameters, one after the other.
        names = self._parts[parameter][pattern]
        num_per_target = -(-len(names) // len(targets))  # rounded up
        target_number, number = divmod(names.index(name), num_per_target)
        index: list[Any] = [number] if is_stacked else []
        if joined:  # expert 3's `up` after its `gate`, I rows each: (3, slice(I, 2 * I))
            axis = joined[0] - is_stacked
            start = sum(self._size_of(part, axis) for part in self._preceding(parameter, converter, name, is_stacked))
            index += [slice(None)] * (joined[0] - len(index)) + [slice(start, start + self._size_of(name, axis))]
        target = parameter.replace(targets[0], targets[target_number])
        return _Target((target,), tuple(index) if joined else index[0])

    def _preceding(self, parameter: str, converter: loading.WeightConverter, name: str, is_stacked: bool) -> list[str]:
        """Return the parts that are concatenated before one; `is_stacked`: within the same expert."""
        parts = [self._parts[parameter][pattern] for pattern in converter.source_patterns]
        if is_stacked:
            number = next(names.index(name) for names in parts if name in names)
            parts = [names[number : number + 1] for names in parts]
        in_order = [part for names in parts for part in names]
        return in_order[: in_order.index(name)]

    def _size_of(self, name: str, axis: int) -> int:
        """Return a stored tensor's size along an axis, 0 if it has none."""
        shape = self._stored[name]
        return shape[axis] if axis < len(shape) else 0

    def _convert(self, converter: loading.WeightConverter, name: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the parameters that transformers makes of one stored tensor."""
        parameter, pattern = self._renamed(name)
        single = deepcopy(converter)
        single.add_tensor(parameter, name, pattern, value)
        converted = single.convert(parameter, model=self._shell, config=self._model.config)
        return {target: part[0] if isinstance(part, list) else part for target, part in converted.items()}


def as_stored(model: PreTrainedModel, shapes: weights.Shapes) -> dict[str, torch.Tensor]:
    """Return the tensors that transformers would store of parameters of these shapes, on the meta device."""
    publish(model)
    skipped = {*weights.tied_parameter_names(model), *(model._keys_to_ignore_on_save or ())}
    state = {
        name: torch.empty(shape, dtype=model.dtype, device="meta")
        for name, shape in shapes.items()
        if name not in skipped
    }
    stored: dict[str, torch.Tensor] = loading.revert_weight_conversion(model, state)
    return stored


def record(model: PreTrainedModel, stored: Mapping[str, tuple[int, ...]]) -> TransformersLayout:
    """Let exports of a model have the form of the files that it came from, of which `stored` has names and shapes.
    Return how these files fill its parameters.
    """
    layout = TransformersLayout(model, stored)
    if record_of(model).code_files is None:  # transformers does not convert what a directory's own code loads
        model._weight_conversions = layout.conversions()  # which `save_pretrained` reverses
        if get_model_conversion_mapping(model, add_legacy=False):
            record_of(model).stored_shapes = {name: [*shape] for name, shape in stored.items()}
    return layout


def restore(model: PreTrainedModel, folder: Path) -> None:
    """Let exports of a model, without weights, have the form that its checkpoint or run recorded."""
    if not (folder / FILE).is_file():
        return
    stored = {name: tuple(shape) for name, shape in read_object(folder / FILE).items()}
    if not all(isinstance(size, int) and size >= 0 for shape in stored.values() for size in shape):
        raise ModelError("{file} is damaged. Remove it: the export then has transformers' form.", file=folder / FILE)
    record(model, stored)


def publish(model: PreTrainedModel) -> None:
    """Let exports of a model that came from no files have the published form, which transformers (5.23) transposes as
    it loads it, and not as it saves.
    """
    if getattr(model, "_weight_conversions", None) is not None or record_of(model).code_files is not None:
        return
    table = get_model_conversion_mapping(model, add_legacy=False)
    for entry in table:
        for number, step in enumerate(getattr(entry, "operations", ())):
            if getattr(step, "check_dims", False):
                entry.operations[number] = loading.Transpose(step.dim0, step.dim1)
    model._weight_conversions = [entry for entry in table if not isinstance(entry, loading.PrefixChange)]
