"""Metrics over ranks: rows of all ranks put together, whatever their number on each."""

from collections.abc import Mapping

import torch
import torch.distributed as dist

from toolkit.distributed.process_group import gather


def gather_metrics(values: Mapping[str, torch.Tensor], device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
    """Return the rows of all ranks, those of rank 0 first, on every rank. A collective.

    For what is no mean, such as F1 or AUC; of a mean it is enough to sum numerator and denominator (`sum_over_ranks`).

    Args:
        values: by name, `[n, ...]`; n may differ between ranks and be 0, all else is the same on all that have rows.
        device: where the backend needs its tensors: the rank's GPU for nccl, the CPU for gloo.

    Returns:
        By name `[N, ...]` on the CPU, N rows in all.

    Raises:
        ValueError: on every rank: ranks give other names, types or shapes.
    """
    names = gather({name: (len(one), str(one.dtype), tuple(one.shape[1:])) for name, one in values.items()})
    if any(set(one) != set(names[0]) for one in names):
        raise ValueError(f"ranks gather other metrics: {[sorted(one) for one in names]}")
    return {name: _gathered(values[name], [one[name] for one in names], device) for name in sorted(values)}


def _gathered(
    value: torch.Tensor, kinds: list[tuple[int, str, tuple[int, ...]]], device: torch.device | str
) -> torch.Tensor:
    filled = {(dtype, shape) for count, dtype, shape in kinds if count}
    if len(filled) > 1:
        raise ValueError(f"ranks gather other shapes or types: {kinds}")
    if len(kinds) == 1 or not filled:
        return value.detach().cpu()
    [(name, shape)] = filled
    dtype = getattr(torch, name.removeprefix("torch."))
    # As bytes: not every backend knows every type (gloo: bool and bfloat16). all_gather wants one length of all ranks.
    longest, width = max(count for count, *_ in kinds), torch.Size(shape).numel() * dtype.itemsize
    mine = torch.zeros(longest, width, dtype=torch.uint8, device=device)
    if len(value):
        mine[: len(value)] = value.detach().to(device).contiguous().reshape(len(value), -1).view(torch.uint8)
    parts = [torch.empty_like(mine) for _ in kinds]
    dist.all_gather(parts, mine)
    rows = torch.cat([part[:count] for part, (count, *_) in zip(parts, kinds, strict=True)]).cpu()
    return rows.contiguous().view(dtype).reshape(-1, *shape)
