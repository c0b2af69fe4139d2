"""Values of each sample of a batch, also where each rank has a part of the rows (layouts/sequence.py)."""

from typing import Any

import torch

from toolkit.models.loss import loss_head, on_device
from toolkit.sample_types import Batch


def full_row_segments(batch: Batch) -> torch.Tensor:
    """Return the segments of a batch's full rows, [B, S], also if this rank has a part of each row."""
    return batch.get("row_segments", batch["segment_ids"])


def part_indices(batch: Batch, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Convert token indices of full rows to indices in this rank's part of the rows.

    Args:
        batch: `part`, if it has one, is this rank's number among P ranks, and P.
        indices: of the B x S tokens of full rows, row by row, int64 [N].

    Returns:
        Which indices are in the part, bool [N]; and the indices of these in its B x S / P tokens.
    """
    if "part" not in batch:
        return torch.ones_like(indices, dtype=torch.bool), indices
    size, (part, parts) = full_row_segments(batch).size(1), batch["part"].tolist()
    length = size // parts
    column = indices % size - part * length
    is_in_part = (column >= 0) & (column < length)
    return is_in_part, (indices // size * length + column)[is_in_part]


def sum_over_row_parts(values: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Return the sum of samples' values over the P ranks that hold parts of their rows; a collective if P > 1.

    Every rank then computes the same loss, and DeepSpeed averages the gradients. So this rank's values get the gradient
    times P: the average over the ranks is the gradient of one rank with full rows.
    """
    if "part" not in batch:
        return values
    from toolkit.layouts.sequence import sum_over_parts

    scaled = values * int(batch["part"][1])
    return scaled + (sum_over_parts(values.detach()) - scaled.detach())  # the sum's value with the gradient of `scaled`


def answer_log_probabilities(engine: Any, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Run forward and return for each sample, row by row, the sum of its trained tokens' log-probabilities (nats),
    which has gradients, and the number of these tokens, both float32 [samples] on the engine's device. A sample without
    trained tokens gives 0 and 0. `engine`, `batch`: as in `loss.token_loss_sum`.
    """
    # The predicting tokens count: they are of the same sample, and always in this rank's part of the rows.
    indices, segments = batch["target_indices"].cpu() - 1, batch["segment_ids"].cpu()
    in_row = samples_in_rows(batch)
    in_earlier_rows = in_row.cumsum(0) - in_row
    # The number of each trained token's sample; segments of a row are numbered from 1.
    samples = in_earlier_rows[indices // segments.size(1)] + segments.flatten()[indices] - 1
    counts = torch.bincount(samples, minlength=int(in_row.sum()))
    losses = loss_head(engine).losses(engine, on_device(engine, batch))
    # The losses of a sample are next to each other. Not index_add, which adds in another order each time on a GPU.
    sums = torch.stack([part.sum() for part in losses.split(counts.tolist())])
    sums_and_counts = sum_over_row_parts(torch.stack((-sums, counts.to(losses, non_blocking=True))), batch)
    return sums_and_counts[0], sums_and_counts[1].detach()


def samples_in_rows(batch: Batch) -> torch.Tensor:
    """Return how many samples each row of a batch holds, int64 [B]."""
    return full_row_segments(batch).amax(dim=1).cpu()
