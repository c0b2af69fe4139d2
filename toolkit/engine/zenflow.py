"""ZenFlow of DeepSpeed 0.19.8, with the weights in their places."""

from collections.abc import Sequence
from typing import Any

import torch
from deepspeed.runtime.zenflow.zenflow_stage_1_and_2 import ZenFlowZeroOptimizer

from toolkit.errors import ConfigError
from toolkit.messages import tr


def prepare(trained: Sequence[torch.nn.Parameter]) -> None:
    """Let parameters look at their own numbers.

    ZenFlow lays matrices column by column into its flat buffer (zenflow_utils.py, _flatten_dense_tensors), but the
    parameters are then made views of it row by row (stage_1_and_2.py, _update_model_bit16_weights): every matrix is
    scrambled before the first step (measured). With this, an update of everything in every step is AdamW's.

    Args:
        trained: what will be trained.

    Raises:
        ConfigError: something of it has no columns.
    """
    if any(parameter.dim() > 2 for parameter in trained):
        raise ConfigError(
            tr(
                "zero.zenflow.enabled = true chooses columns of matrices, but this model trains experts that stand in "
                "one tensor. Use zero=stage2_offload."
            )
        )
    ZenFlowZeroOptimizer._update_model_bit16_weights = _update_model_bit16_weights


def _update_model_bit16_weights(self: Any, group_index: int) -> None:
    flat = self.bit16_groups_flat[group_index]
    reordered = self.round_robin_bit16_groups[group_index]
    metas, offsets = self.round_robin_bit16_meta[group_index], self.round_robin_bit16_offsets[group_index]
    for parameter, meta, offset in zip(reordered, metas, offsets, strict=True):
        piece = flat.narrow(0, offset, meta.numel()).data
        parameter.data = piece.view(meta.shape[::-1]).t() if meta.dim() == 2 else piece.view(meta.shape)
    for index, parameter in enumerate(self.bit16_groups[group_index]):
        parameter.data = reordered[self.round_robin_bit16_indices[group_index][index]].data
