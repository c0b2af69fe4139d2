"""Adam and AdamW whose weights and moments are in bf16, rounded stochastically."""

import zlib
from typing import Any

import torch
from torch import distributed

from toolkit.plan.memory import BF16_CHUNK


class Bf16Adam(torch.optim.Optimizer):
    """PyTorch's Adam and AdamW, computed in float32 from weights, gradients and moments in bf16.

    bf16 has 8 bits: rounded to nearest, a weight loses every update below 1/512 to 1/256 of it. What is stored is
    rounded stochastically instead (Zamirai et al. 2020, arXiv 2010.06192): up with a probability equal to the
    remainder, so that the average is exact. Updates are elementwise, so it may get pieces of parameters, as by ZeRO.
    `is_decoupled`: AdamW's weight decay; otherwise Adam's, which is added to the gradient.
    """

    def __init__(
        self, params: Any, lr: float, betas: tuple[float, ...], eps: float, weight_decay: float, is_decoupled: bool
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._is_decoupled = is_decoupled
        self._last_step = 0
        """Step of the last updated parameter."""
        self._position = 0
        """Number of parameters that were updated before it in that step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient. What is drawn depends on step, rank and `_position` of the
        parameter alone, so that a resumed run draws the same. ZeRO-3 hands over one flat tensor at a time.
        """
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                for name in ("exp_avg", "exp_avg_sq"):
                    if name not in state:
                        state[name] = torch.zeros_like(parameter, requires_grad=False)
                state["step"] = step = state.get("step", 0) + 1
                self._position = self._position + 1 if step == self._last_step else 0
                self._last_step = step
                rank = distributed.get_rank() if distributed.is_initialized() else 0
                seed = zlib.crc32(f"{step} {self._position} {rank}".encode())
                generator = torch.Generator(parameter.device).manual_seed(seed)
                tensors = (parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"])
                chunks = (tensor.view(-1).split(BF16_CHUNK) for tensor in tensors)  # few numbers at once are in float32
                for weights, gradients, means, squares in zip(*chunks, strict=True):
                    self._update(weights, gradients, means, squares, group, step, generator)

    def _update(
        self,
        weights: torch.Tensor,
        gradients: torch.Tensor,
        means: torch.Tensor,
        squares: torch.Tensor,
        group: dict[str, Any],
        step: int,
        generator: torch.Generator,
    ) -> None:
        """Update a chunk in place, by the operations of PyTorch's Adam (2.13, optim/adam.py, _single_tensor_adam) in
        float32. `step`: number of the update, from 1; `generator`: for the rounding.
        """
        lr, (beta1, beta2), decay = group["lr"], group["betas"], group["weight_decay"]
        weight, gradient, mean, square = (tensor.float() for tensor in (weights, gradients, means, squares))
        if self._is_decoupled:
            weight.mul_(1 - lr * decay)
        elif decay:
            gradient.add_(weight, alpha=decay)
        mean.lerp_(gradient, 1 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        denominator = square.sqrt().div_((1 - beta2**step) ** 0.5).add_(group["eps"])
        weight.addcdiv_(mean, denominator, value=-lr / (1 - beta1**step))
        del gradient, denominator
        for stored, value in ((weights, weight), (means, mean), (squares, square)):
            stored.copy_(round_stochastically(value, generator))


def round_stochastically(values: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Round float32 values in place to numbers that bf16 has: one of the two neighbours of each, the nearer one more
    often, so that the average is the value. Numbers of bf16, infinities and quiet NaN stay.
    """
    noise = torch.randint(0, 2**16, values.shape, dtype=torch.int32, device=values.device, generator=generator)
    noise.masked_fill_(values.isnan(), 0)  # the NaN of CUDA has all bits set but the sign: a carry would make it -0.0
    # bf16 is float32 without its last 16 bits; a carry out of them is a step to the next number away from zero.
    values.view(torch.int32).add_(noise).bitwise_and_(-(2**16))
    return values
