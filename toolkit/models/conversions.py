"""Conversions of stored tensors that the table of transformers lacks (5.23, core_model_loading.py)."""

from typing import Any

import torch
from transformers import core_model_loading as loading


class Unchanged(loading.ConversionOps):
    """No change of a tensor."""

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, Any]:
        """Return the tensor under its new name."""
        [value] = input_dict.values()
        return {target_patterns[0]: value}

    @property
    def reverse_op(self) -> loading.ConversionOps:
        """What makes the stored tensors again."""
        return self


class UnequalParts(loading.Concatenate):
    """Concatenation of parts of these sizes along a dimension; transformers would divide into equal ones."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.sizes: dict[int, list[int]] = {}
        """Size together -> sizes of the parts."""

    @property
    def reverse_op(self) -> loading.ConversionOps:
        """What makes the stored tensors again."""
        return _Division(self.dim, self.sizes)


class _Division(loading.Chunk):
    """The reverse of `UnequalParts`."""

    def __init__(self, dim: int, sizes: dict[int, list[int]]) -> None:
        super().__init__(dim)
        self.sizes = sizes

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, torch.Tensor]:
        """Divide a tensor into parts of the known sizes, or of equal ones if its size is not in `sizes`."""
        [value] = input_dict.values()
        value = value[0] if isinstance(value, list) else value
        if (sizes := self.sizes.get(value.shape[self.dim])) is None:
            return super().convert(input_dict, source_patterns, target_patterns, **kwargs)
        parts = [part.contiguous() for part in value.split(sizes, self.dim)]
        return dict(zip(target_patterns, parts, strict=True))
