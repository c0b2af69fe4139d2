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
    """Multiply the loss of a step's first micro-batch, or its gradient only; or make weights after a step NaN.

    Args:
        steps: {"6": ("loss", "nan"), "13": ("gradient", "1000"), "14": ("weights", "nan")}. Counted by calls, so that
            a step that is done again counts anew. With "unseen weights" no save has a probe.
        is_here: whether this rank is the one.
        note: gets a line for each step that was spoilt.
    """
    from toolkit.tasks import language
    from toolkit.train import loop
    from toolkit.train.checkpointer import Checkpointer

    real_step, real_loss, may_probe = loop.train_step, language.token_loss_sum, Checkpointer._may_probe
    if any(what == "unseen weights" for what, _ in steps.values()):
        Checkpointer._may_probe = lambda saver, is_last=False: False  # type: ignore[method-assign]
    calls, is_first = 0, True

    def train_step(*arguments: Any, **options: Any) -> Any:
        nonlocal calls, is_first
        calls, is_first = calls + 1, True
        result = real_step(*arguments, **options)
        what, value = steps.get(str(calls), ("", ""))
        if what.endswith("weights"):  # on every rank, as an update is
            for parameter in arguments[0].module.parameters():
                parameter.data.fill_(float(value))
            if is_here:
                with note.open("a", encoding="utf-8") as lines:
                    lines.write(f"{calls} {what} {value}\n")
        return result

    def token_loss_sum(*arguments: Any) -> torch.Tensor:
        nonlocal is_first
        loss = real_loss(*arguments)
        what, factor = steps.get(str(calls), ("", "1"))
        if not (what in ("loss", "gradient") and is_first and is_here):
            return loss
        is_first = False
        with note.open("a", encoding="utf-8") as lines:
            lines.write(f"{calls} {what} {factor}\n")
        return GradientOnly.apply(loss, float(factor)) if what == "gradient" else loss * float(factor)

    loop.train_step, language.token_loss_sum = train_step, token_loss_sum
    try:
        yield
    finally:
        loop.train_step, language.token_loss_sum = real_step, real_loss
        Checkpointer._may_probe = may_probe  # type: ignore[method-assign]
