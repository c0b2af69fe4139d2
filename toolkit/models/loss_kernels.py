"""Cross entropies of tokens and their gradients, a chunk of tokens at a time, so that no logits [T, V] are held.

Gradients of a sum are made next to the loss, so no logit is computed twice. Hsu et al. 2024 (Liger Kernel),
https://arxiv.org/abs/2410.10989, section 3.2. T tokens, H hidden width, V vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional

CHUNK_BYTES = 128 * 2**20
"""Of the logits in float32 that the loss computes at once; plan/memory.py counts with it."""
_FP16_SCALE = 2.0**12
"""float16 ends at 6e-8: probabilities of a large vocabulary are scaled by it (exactly) while they are in float16."""


class Scores(NamedTuple):
    """Factors of logits [T, V]: states [T, H], weight [V, H] and bias [V]; without a weight states are the logits."""

    states: torch.Tensor
    weight: torch.Tensor | None = None
    bias: torch.Tensor | None = None

    @property
    def vocabulary(self) -> int:
        """V."""
        return self.states.size(1) if self.weight is None else self.weight.size(0)

    def logits(self, part: slice) -> torch.Tensor:
        """Return the logits of a slice of the tokens in float32, as a new tensor."""
        states = self.states[part]
        if self.weight is None:
            return states.to(torch.float32, copy=True)
        return functional.linear(states, self.weight, self.bias).float()


def chunked_loss_sum(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor
) -> torch.Tensor:
    """Return the sum of the tokens' cross entropies, 0 for no tokens; differentiable once, in all but the targets.

    Gradients are summed in float32 during the forward pass, and multiplied by the outer gradient in the backward pass,
    so that no loss scale makes them over- or underflow. Until then a trained weight's gradient takes V x H x 4 bytes.
    As each addition to it reads and writes all of it, the gradients of several chunks' logits are collected first, in
    up to half as many bytes.
    """
    return _ChunkedLossSum.apply(hidden, weight, bias, targets)


class _ChunkedLossSum(torch.autograd.Function):
    """The forward pass keeps the gradients of the sum in `ctx.gradients`, a tuple of one `LossGradients`."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor
    ) -> torch.Tensor:
        total = hidden.new_zeros((), dtype=torch.float32)

        def of_logits(part: slice) -> torch.Tensor:
            """Subtract the targets' log-probabilities from `total`; return the gradients by the logits."""
            log_probabilities, target_ids = _log_probabilities(hidden[part], weight, bias), targets[part, None]
            total.sub_(log_probabilities.gather(1, target_ids).sum())
            # The gradient of a token's loss by its logits: the probabilities, minus 1 at the target.
            gradient = log_probabilities.exp_()
            return gradient.scatter_(1, target_ids, gradient.gather(1, target_ids) - 1)

        size = chunk_rows(len(weight))
        ctx.gradients = (LossGradients(Scores(hidden, weight, bias), ctx.needs_input_grad, of_logits, size),)
        return total

    @staticmethod
    def backward(ctx: Any, *outer: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradients,), ctx.gradients = ctx.gradients, None  # `times` changes them in place: a second backward must fail
        return (*gradients.times(outer[0]), None)


class LossGradients:
    """Gradients, in float32, of a sum of tokens' losses by states, weight and bias, for which `needs` says, in this
    order, whether they are needed. `of_logits` returns the gradients by the logits [tokens, V] of a slice of tokens; it
    is called for `size` tokens at a time.
    """

    def __init__(
        self, scores: Scores, needs: Sequence[bool], of_logits: Callable[[slice], torch.Tensor], size: int
    ) -> None:
        hidden, weight, bias = scores
        needs_hidden, needs_weight, needs_bias = needs[:3]
        self.dtype, self.scale = hidden.dtype, _FP16_SCALE if hidden.dtype is torch.float16 else 1.0
        self.of_hidden = torch.empty_like(hidden, dtype=torch.float32) if needs_hidden else None
        self.of_weight = torch.zeros_like(weight, dtype=torch.float32) if weight is not None and needs_weight else None
        self.of_bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and needs_bias else None
        group_size = size
        if weight is not None and needs_weight:
            # Several chunks at once: rows x V x element size is half of the V x H x 4 bytes of the weight's gradient.
            group_size = max(size, 2 * weight.size(1) // hidden.element_size())
        for start in range(0, len(hidden), group_size):
            stop = min(start + group_size, len(hidden))
            # The gradient by the logits of a group of several chunks, filled below; that of a single one is not copied.
            gradient = hidden.new_empty(stop - start, scores.vocabulary) if stop - start > size else None
            for part_start in range(start, stop, size):
                part = slice(part_start, min(part_start + size, stop))
                of_part = of_logits(part)
                if self.of_bias is not None:
                    self.of_bias += of_part.sum(dim=0)
                of_part.mul_(self.scale)
                if gradient is None:
                    gradient = of_part.to(hidden.dtype)
                else:
                    gradient[part.start - start : part.stop - start] = of_part
                del of_part  # before the next chunk's logits, of the same size, are computed
            assert gradient is not None
            if self.of_hidden is not None:
                self.of_hidden[start:stop] = gradient if weight is None else _product(gradient, weight)
            if self.of_weight is not None:
                _add_product(self.of_weight, gradient.t(), hidden[start:stop])

    def times(self, outer: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of states, weight and bias, times `outer`, in the states' type; only once."""
        return (
            _scaled(self.of_hidden, outer / self.scale, self.dtype),
            _scaled(self.of_weight, outer / self.scale, self.dtype),
            _scaled(self.of_bias, outer, self.dtype),
        )


def chunked_losses(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor
) -> torch.Tensor:
    """Return each token's cross entropy, float32 [T], of states [T, H]; differentiable in all but the targets."""
    losses: torch.Tensor = _ChunkedLosses.apply(hidden, weight, bias, targets)
    return losses


class _ChunkedLosses(torch.autograd.Function):
    """Each token's loss. The backward pass, which alone knows the outer gradients, computes the logits again."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight, bias, targets)
        chunks = zip(hidden.split(chunk_rows(len(weight))), targets.split(chunk_rows(len(weight))), strict=True)
        losses = [_log_probabilities(states, weight, bias).gather(1, ids[:, None]) for states, ids in chunks]
        return -torch.cat(losses).view(-1)

    @staticmethod
    def backward(ctx: Any, *outer: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, targets = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias, _ = ctx.needs_input_grad
        hidden_gradient = torch.empty_like(hidden) if needs_hidden else None
        weight_gradient = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None
        bias_gradient = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and needs_bias else None
        size = chunk_rows(len(weight))
        for begin in range(0, len(hidden), size):
            states, target_ids = hidden[begin : begin + size], targets[begin : begin + size, None]
            gradient = _log_probabilities(states, weight, bias).exp_()
            gradient.scatter_(1, target_ids, gradient.gather(1, target_ids) - 1)
            gradient *= outer[0][begin : begin + size, None]
            if bias_gradient is not None:
                bias_gradient += gradient.sum(dim=0)
            gradient = gradient.to(hidden.dtype)
            if hidden_gradient is not None:
                hidden_gradient[begin : begin + size] = _product(gradient, weight)
            if weight_gradient is not None:
                weight_gradient += _product(gradient.t(), states)
        weight_gradient = None if weight_gradient is None else weight_gradient.to(weight.dtype)
        bias_gradient = None if bias_gradient is None else bias_gradient.to(bias.dtype)
        return hidden_gradient, weight_gradient, bias_gradient, None


def chunk_rows(vocabulary: int) -> int:
    """Return how many tokens' float32 logits fit into `CHUNK_BYTES`."""
    return max(1, CHUNK_BYTES // (4 * vocabulary))


def _log_probabilities(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.log_softmax(functional.linear(states, weight, bias), dim=1, dtype=torch.float32)


def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return the matrix product in float32, without copies of half-precision factors if the device can."""
    if left.dtype is torch.float32:
        return left @ right
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=torch.float32)
    if left.dtype is torch.bfloat16:
        # Summed in float32 inside and rounded once per chunk, to the precision of the gradient that the optimizer gets.
        # Five times as fast as float32 factors on a processor with bfloat16 instructions.
        return (left @ right).float()
    return left.float() @ right.float()


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Add a matrix product to float32 `total`; in half precision a slice of rows at a time, to save memory."""
    if left.dtype is torch.float32:
        total.addmm_(left, right)
        return
    rows = max(1, CHUNK_BYTES // (4 * total.size(1)))
    for sums, factors in zip(total.split(rows), left.split(rows), strict=True):
        sums.add_(_product(factors, right))


def _scaled(gradient: torch.Tensor | None, factor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    return None if gradient is None else gradient.mul_(factor).to(dtype)
