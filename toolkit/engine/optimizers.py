"""Parameter groups, and the optimizers that DeepSpeed cannot make from a name."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

from toolkit.config.optimizers import is_client, is_grouped
from toolkit.config.schema import DecayOf, OptimConfig, OptimizerName
from toolkit.errors import ConfigError
from toolkit.messages import tr
from toolkit.plan.parameters import layer_of

Groups = list[torch.nn.Parameter] | list[dict[str, Any]]


def parameter_groups(named: Iterable[tuple[str, torch.nn.Parameter]], optim: OptimConfig) -> Groups:
    """Return what is trained: the parameters, or groups of those with the same rate and weight decay.

    The rate falls from layer to layer as in ELECTRA (arXiv 2003.10555, appendix B) and BEiT. The group with the highest
    rate comes first: it is what logs show.

    Args:
        named: names and parameters; frozen ones are left out.
        optim: rates and decay.
    """
    trained = [(name, parameter) for name, parameter in named if parameter.requires_grad]
    if not is_grouped(optim):
        return [parameter for _, parameter in trained]
    layers = 1 + max((layer_of(name) for name, _ in trained), default=-1)
    groups: dict[tuple[float, bool], list[torch.nn.Parameter]] = {}
    for name, parameter in trained:
        is_matrix = len(getattr(parameter, "ds_shape", parameter.shape)) >= 2
        decays = {
            DecayOf.all: True,
            DecayOf.matrices: is_matrix,
            DecayOf.hidden: is_matrix and layer_of(name) >= 0,
        }[optim.decay]
        rate = optim.lr
        if optim.adam_lr and not _is_muon(name, is_matrix):
            rate = optim.adam_lr
        rate *= optim.layer_lr_decay ** (layers + 1 - _depth(name, layers))
        groups.setdefault((rate, decays), []).append(parameter)
    return [
        {"params": groups[rate, decays], "lr": rate, "weight_decay": optim.weight_decay if decays else 0.0}
        for rate, decays in sorted(groups, reverse=True)
    ]


def _depth(name: str, layers: int) -> int:
    """Return 0 for embeddings, 1 for the first layer, and so on; what is above the last layer is one more."""
    layer = layer_of(name)
    return layer + 1 if layer >= 0 else 0 if "embed" in name.lower() else layers + 1


def _is_muon(name: str, is_matrix: bool) -> bool:
    """Whether DeepSpeed's Muon orthogonalises it (0.19.8, deepspeed/__init__.py, set_optimizer_flags)."""
    return is_matrix and not any(word in name.lower() for word in ("embed", "lm_head"))


def client_optimizer(optim: OptimConfig, is_offloaded: bool) -> Callable[[Any], torch.optim.Optimizer] | None:
    """Return what makes the optimizer of parameters or groups; None where DeepSpeed does, by its name.

    Args:
        optim: which.
        is_offloaded: whether its states are in host memory.

    Raises:
        ConfigError: DeepSpeed has none for this machine.
    """
    settings: dict[str, Any] = {"lr": optim.lr, "betas": tuple(optim.betas), "weight_decay": optim.weight_decay}
    if optim.name is OptimizerName.adamw_8bit:
        from bitsandbytes.optim import AdamW8bit

        return lambda groups: AdamW8bit(groups, eps=optim.eps, **settings)
    if is_client(optim):
        return lambda groups: Lion(groups, **settings)
    on_cpu = get_accelerator().device_name() == "cpu"
    if optim.name is OptimizerName.lion and on_cpu and not is_offloaded:
        raise ConfigError(tr("optim.name = lion: DeepSpeed has no FusedLion for CPU ranks. Add optim.torch=true."))
    return None


class Lion(torch.optim.Optimizer):
    """Lion (arXiv 2302.06675, algorithm 2), parameter by parameter; each number by itself, so ZeRO may cut them up.

    Args:
        params: parameters or groups.
        lr: learning rate.
        betas: share of the momentum in the update, and in the next momentum.
        weight_decay: decoupled, times the rate.
    """

    def __init__(
        self, params: Any, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["exp_avg"] = torch.zeros_like(parameter)
        momentum, gradient, (now, later) = state["exp_avg"], parameter.grad, group["betas"]
        assert gradient is not None
        update = momentum.lerp(gradient, 1 - now).sign_()
        parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])
        momentum.lerp_(gradient, 1 - later)
