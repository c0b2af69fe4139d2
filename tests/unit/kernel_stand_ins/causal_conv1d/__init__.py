"""A causal convolution in plain PyTorch, with the arguments of causal-conv1d's kernel."""

import torch
from torch.nn import functional


def causal_conv1d_fn(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    activation: str | None = None,
) -> torch.Tensor:
    """Return [B, channels, S]; a token sees those before it that have the same number in `seq_idx`, [B, S]."""
    width, size = weight.size(1), x.size(2)
    result = torch.zeros_like(x) if bias is None else bias[:, None].expand_as(x)
    for back in range(width):
        earlier = functional.pad(x, (back, 0))[:, :, :size]
        if seq_idx is not None:
            same = functional.pad(seq_idx, (back, 0), value=-1)[:, :size] == seq_idx
            earlier = earlier * same[:, None]
        result = result + weight[:, width - 1 - back, None] * earlier
    return functional.silu(result) if activation else result
