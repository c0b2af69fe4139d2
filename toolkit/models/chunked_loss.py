"""Cross entropy straight from hidden states, a chunk of tokens at a time. T tokens, H hidden width, V vocabulary.

The gradients are made beside the loss, while a chunk's logits are there: nothing of the size [T, V] is ever held, and
no logit is computed twice. Hsu et al. 2024 (Liger Kernel), https://arxiv.org/abs/2410.10989, section 3.2.
"""

from typing import Any

import torch
from torch.nn import functional

from toolkit.plan.memory import CHUNK_BYTES as CHUNK_BYTES

_FP16_SCALE = 2.0**12
"""float16 ends at 6e-8: probabilities of a large vocabulary are scaled by it (exactly) while they are in float16."""


def chunked_losses(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor
) -> torch.Tensor:
    """Return each token's cross entropy, without gradients.

    Args:
        hidden: [T, H].
        weight: of the output layer, [V, H], of the same type.
        bias: [V].
        targets: [T].

    Returns:
        float32 [T].
    """
    pieces = zip(hidden.split(_rows(weight)), targets.split(_rows(weight)), strict=True)
    losses = [_log_probabilities(states, weight, bias).gather(1, wanted[:, None]) for states, wanted in pieces]
    return -torch.cat(losses).view(-1)


def chunked_loss_sum(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor
) -> torch.Tensor:
    """Return the sum of the tokens' cross entropies, once differentiable in all but the targets. Arguments as above.

    Gradients are made and added up in float32 and not multiplied by the caller's until the backward pass, so neither
    a loss scale nor its absence makes them over- or underflow. Where the weight is trained, its gradient is held in
    float32 from the forward pass to the backward pass (V x H x 4 bytes, beside what is added to it once more as much);
    of a frozen weight there is none.

    Returns:
        float32 scalar; 0, with zero gradients, of no tokens.
    """
    return _ChunkedLossSum.apply(hidden, weight, bias, targets)


class _ChunkedLossSum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor
    ) -> torch.Tensor:
        of_hidden, of_weight, of_bias, _ = ctx.needs_input_grad
        scale = _FP16_SCALE if hidden.dtype is torch.float16 else 1.0
        total = hidden.new_zeros((), dtype=torch.float32)
        hidden_gradient = torch.empty_like(hidden, dtype=torch.float32) if of_hidden else None
        weight_gradient: torch.Tensor | None = None
        bias_gradient = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and of_bias else None
        size = _rows(weight)
        for begin in range(0, len(hidden), size):
            states, wanted = hidden[begin : begin + size], targets[begin : begin + size, None]
            gradient = _log_probabilities(states, weight, bias)
            total -= gradient.gather(1, wanted).sum()
            # Of a token's loss by its logits: the probabilities, less 1 at the target.
            gradient.exp_()
            gradient.scatter_(1, wanted, gradient.gather(1, wanted) - 1)
            if bias_gradient is not None:
                bias_gradient += gradient.sum(dim=0)
            gradient = gradient.mul_(scale).to(hidden.dtype)
            if hidden_gradient is not None:
                hidden_gradient[begin : begin + size] = _product(gradient, weight)
            if of_weight:
                weight_gradient = _sum_with_product(weight_gradient, gradient.t(), states)
        if of_weight and weight_gradient is None:
            weight_gradient = torch.zeros_like(weight, dtype=torch.float32)
        ctx.dtype, ctx.scale = hidden.dtype, scale
        ctx.gradients = hidden_gradient, weight_gradient, bias_gradient
        return total

    @staticmethod
    def backward(ctx: Any, *outer: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden_gradient, weight_gradient, bias_gradient = ctx.gradients
        ctx.gradients = None  # they are changed in place: a second pass must fail
        factor = outer[0] / ctx.scale
        return (
            _scaled(hidden_gradient, factor, ctx.dtype),
            _scaled(weight_gradient, factor, ctx.dtype),
            _scaled(bias_gradient, outer[0], ctx.dtype),
            None,
        )


def _rows(weight: torch.Tensor) -> int:
    """Return the tokens of a chunk."""
    return max(1, CHUNK_BYTES // (4 * weight.size(0)))


def _log_probabilities(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.log_softmax(functional.linear(states, weight, bias), dim=1, dtype=torch.float32)


def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return the matrix product in float32, with factors in half precision as they are."""
    if left.dtype is torch.float32:
        return left @ right
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=torch.float32)
    if left.dtype is torch.bfloat16:
        # Added up in float32 inside, rounded once per chunk: as exact as what the optimizer gets in the end. A fifth of
        # the time of float32 factors on a processor that knows bfloat16.
        return (left @ right).float()
    return left.float() @ right.float()


def _sum_with_product(total: torch.Tensor | None, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    if total is None:
        return _product(left, right)
    if left.dtype is torch.float32:
        return total.addmm_(left, right)
    return total.add_(_product(left, right))


def _scaled(gradient: torch.Tensor | None, factor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    return None if gradient is None else gradient.mul_(factor).to(dtype)
