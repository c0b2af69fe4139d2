"""Samples to one rectangular batch of tensors. B: samples of the micro-batch; S: padded length."""

from collections.abc import Sequence

import torch

from toolkit.data.store import Sample

Batch = dict[str, torch.Tensor]
"""input_ids, labels, attention_mask, position_ids, each int64 [B, S]."""

UNTRAINED = -100
"""Label of a token that the loss does not cover."""


def collate(samples: Sequence[Sample], pad_id: int, pad_multiple: int = 8) -> Batch:
    """Pad on the right to the longest sample, rounded up.

    Args:
        samples: ids and mask of each; none gives a filler of one row that is wholly untrained, for ranks that have
            nothing left but must take part in the step.
        pad_id: id that fills up.
        pad_multiple: S is a multiple of it, so that there are few different shapes.

    Returns:
        The batch. `labels` stand at their own token's position (not shifted): -100 where the loss does not cover it.
        `attention_mask` is 1 on real tokens; on a filler everywhere, as attention over nothing would give NaN.
    """
    longest = max((len(ids) for ids, _ in samples), default=1)
    size = (max(len(samples), 1), -(-longest // pad_multiple) * pad_multiple)
    input_ids = torch.full(size, pad_id, dtype=torch.int64)
    labels = torch.full(size, UNTRAINED, dtype=torch.int64)
    attention_mask = torch.zeros(size, dtype=torch.int64) if samples else torch.ones(size, dtype=torch.int64)
    for row, (ids, trained) in enumerate(samples):
        # Copies: torch has no uint32 arithmetic, and the mapped file is read-only.
        tokens = torch.from_numpy(ids.astype("int64"))
        input_ids[row, : len(ids)] = tokens
        labels[row, : len(ids)] = tokens.masked_fill(~torch.from_numpy(trained.copy()), UNTRAINED)
        attention_mask[row, : len(ids)] = 1
    position_ids = torch.arange(size[1]).expand(size).contiguous()
    return {
        "input_ids": input_ids,
        "labels": labels,
        "attention_mask": attention_mask,
        "position_ids": position_ids,
    }
