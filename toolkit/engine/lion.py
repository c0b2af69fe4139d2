"""Lion of PyTorch's operations, for ranks without DeepSpeed's (`optim.torch`)."""

from typing import Any

import torch


class Lion(torch.optim.Optimizer):
    """Lion (arXiv 2302.06675, algorithm 2). Updates are elementwise, so it may get pieces of parameters, as by ZeRO."""

    def __init__(
        self, params: Any, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state, (beta1, beta2) = self.state[parameter], group["betas"]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                momentum = state["exp_avg"]
                update = momentum.lerp(parameter.grad, 1 - beta1).sign_()
                parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])
                momentum.lerp_(parameter.grad, 1 - beta2)
