"""Rows of tensors that ranks gather, or exchange with each other."""

from collections.abc import Mapping
from typing import Any

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
    # Of each rank: name -> number of rows, type, shape of a row.
    forms = gather({name: (len(value), str(value.dtype), tuple(value.shape[1:])) for name, value in values.items()})
    if any(set(of_rank) != set(forms[0]) for of_rank in forms):
        raise ValueError(f"ranks gather other metrics: {[sorted(of_rank) for of_rank in forms]}")
    return {
        name: _gather_tensors(values[name], [of_rank[name] for of_rank in forms], device) for name in sorted(values)
    }


def _gather_tensors(
    value: torch.Tensor, forms: list[tuple[int, str, tuple[int, ...]]], device: torch.device | str
) -> torch.Tensor:
    """Return the rows of all ranks of one metric; `forms`: of each rank number of rows, type, and shape of a row."""
    filled = {(dtype, shape) for count, dtype, shape in forms if count}
    if len(filled) > 1:
        raise ValueError(f"ranks gather other shapes or types: {forms}")
    if len(forms) == 1 or not filled:
        return value.detach().cpu()
    [(dtype_name, shape)] = filled
    dtype = getattr(torch, dtype_name.removeprefix("torch."))
    # As bytes: not every backend knows every type (gloo: bool and bfloat16). all_gather wants one length of all ranks.
    longest, width = max(count for count, *_ in forms), torch.Size(shape).numel() * dtype.itemsize
    padded = torch.zeros(longest, width, dtype=torch.uint8, device=device)
    if len(value):
        padded[: len(value)] = value.detach().to(device).contiguous().reshape(len(value), -1).view(torch.uint8)
    parts = [torch.empty_like(padded) for _ in forms]
    dist.all_gather(parts, padded)
    rows = torch.cat([part[:count] for part, (count, *_) in zip(parts, forms, strict=True)]).cpu()
    return rows.contiguous().view(dtype).reshape(-1, *shape)


def exchange_rows(
    rows: torch.Tensor, group: dist.ProcessGroup, sent: list[int] | None = None, came: list[int] | None = None
) -> torch.Tensor:
    """Send `sent[i]` rows of a tensor to rank i of a group, one rank's after another's, and return the `came[i]` rows
    that came from each (without numbers: equally many). The gradient is exchanged the other way round.
    """
    return _Exchange.apply(rows, group, sent, came)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, group: Any, sent: Any, came: Any) -> torch.Tensor:
        ctx.way_back = group, came, sent  # gradients go back to where the rows came from
        received = rows.new_empty(len(rows) if came is None else sum(came), *rows.shape[1:])
        dist.all_to_all_single(received, rows.contiguous(), came, sent, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return exchange_rows(gradients[0], *ctx.way_back), None, None, None
