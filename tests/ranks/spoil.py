"""Wrong numbers, put into the loss of chosen steps on one rank, and noted when it happens."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch


class GradientOnly(torch.autograd.Function):
    """Multiplies the gradient and leaves the value alone."""

    @staticmethod
    def forward(context: Any, value: torch.Tensor, factor: float) -> torch.Tensor:
        """Pass the value on."""
        context.factor = factor
        return value.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Multiply."""
        return gradient * context.factor, None


@contextmanager
def spoilt(steps: Mapping[str, tuple[str, str]], is_here: bool, note: Path) -> Iterator[None]:
    """Multiply the loss of a step's first micro-batch, or its gradient only.

    Args:
        steps: {"6": ("loss", "nan"), "13": ("gradient", "1000")}. Counted by calls, so that a step that is done again
            counts anew.
        is_here: whether this rank is the one.
        note: gets a line for each step that was spoilt.
    """
    from toolkit.train import loop, step

    real_step, real_loss = loop.train_step, step.token_loss_sum
    calls, is_first = 0, True

    def train_step(*arguments: Any, **options: Any) -> Any:
        nonlocal calls, is_first
        calls, is_first = calls + 1, True
        return real_step(*arguments, **options)

    def token_loss_sum(*arguments: Any) -> torch.Tensor:
        nonlocal is_first
        loss = real_loss(*arguments)
        what, factor = steps.get(str(calls), ("", "1"))
        if not (what and is_first and is_here):
            return loss
        is_first = False
        with note.open("a", encoding="utf-8") as lines:
            lines.write(f"{calls} {what} {factor}\n")
        return GradientOnly.apply(loss, float(factor)) if what == "gradient" else loss * float(factor)

    loop.train_step, step.token_loss_sum = train_step, token_loss_sum
    try:
        yield
    finally:
        loop.train_step, step.token_loss_sum = real_step, real_loss
