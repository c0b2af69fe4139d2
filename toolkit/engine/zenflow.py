"""Workarounds of ZenFlow (DeepSpeed 0.19.8), which updates the most important columns of a matrix first."""

from collections.abc import Sequence
from typing import Any

import torch
from deepspeed.ops.adam import ZenFlowSelectiveAdamW
from deepspeed.runtime.zenflow.zenflow_stage_1_and_2 import ZenFlowZeroOptimizer

from toolkit.messages import ConfigError, tr

_STEP = ZenFlowSelectiveAdamW._step_with_offload


def patch_zenflow(trained: Sequence[torch.nn.Parameter]) -> None:
    """Replace two methods of ZenFlow: weights become views of its flat buffer in the order of their columns, and
    columns that are updated on the GPU are not updated on the CPU, too. ConfigError for parameters of over two
    dimensions.

    ZenFlow lays matrices column by column into its flat buffer (zenflow_utils.py, _flatten_dense_tensors), but the
    parameters are then made views of it row by row (stage_1_and_2.py, _update_model_bit16_weights): every matrix is
    scrambled before the first step (measured). With both replaced, a ZenFlow that chooses all columns in each step
    computes what AdamW does, also with `zero.zenflow.offload`.
    """
    if any(parameter.dim() > 2 for parameter in trained):
        raise ConfigError(
            tr(
                "zero.zenflow.enabled = true chooses columns of matrices, but this model trains "
                "experts that are one tensor. Use zero=stage2_offload."
            )
        )
    ZenFlowZeroOptimizer._update_model_bit16_weights = _update_model_bit16_weights
    ZenFlowSelectiveAdamW._step_with_offload = _step_with_offload


def _step_with_offload(self: Any) -> None:
    """Put the chosen columns back to what they were before the CPU's optimizer updated them too, then update them.
    DeepSpeed means to, but copies them into what indexing returned, a copy (zenflow_torch_adam.py, flush_bucket): with
    `offload` the chosen columns were updated twice (measured).
    """
    for group in self.param_groups:
        for parameter in group["params"]:
            before = getattr(parameter, "temp_selected_param", None)
            if before is not None and parameter.dim() == 2:  # a vector is not indexed: DeepSpeed puts it back itself
                parameter.data[:, parameter.selected_indices] = before.to(parameter.device)
    _STEP(self)


def _update_model_bit16_weights(self: Any, group_index: int) -> None:
    """Let a group's weights be views of its flat buffer, matrices of its columns: in place of DeepSpeed's method."""
    flat = self.bit16_groups_flat[group_index]
    reordered = self.round_robin_bit16_groups[group_index]
    metas, offsets = self.round_robin_bit16_meta[group_index], self.round_robin_bit16_offsets[group_index]
    for parameter, meta, offset in zip(reordered, metas, offsets, strict=True):
        piece = flat.narrow(0, offset, meta.numel()).data
        parameter.data = piece.view(meta.shape[::-1]).t() if meta.dim() == 2 else piece.view(meta.shape)
    # DeepSpeed has put the parameters into another order: each gets the data of its place in that.
    for index, parameter in enumerate(self.bit16_groups[group_index]):
        parameter.data = reordered[self.round_robin_bit16_indices[group_index][index]].data
