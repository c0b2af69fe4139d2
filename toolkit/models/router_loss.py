"""Losses that keep all experts of a mixture in use. E experts, K of them chosen for each of T tokens, L layers of them.

For a layer and a micro-batch: E x sum over experts of f x P, where f is how often an expert is chosen per token and P
its mean probability: K where all are used alike, more where they are not (Fedus, Zoph, Shazeer 2021, Switch
Transformers, https://arxiv.org/abs/2101.03961, equations 4 to 6). Padding is left out. What is added to the training
loss is its mean over layers, micro-batches and data-parallel ranks, times the coefficient. transformers (5.23) puts all
layers' f and P together before it multiplies them, by which one layer makes up for another.
"""

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils.output_capturing import OutputRecorder

from toolkit.config.schema import RunConfig
from toolkit.errors import ConfigError
from toolkit.messages import tr


class RouterLoss:
    """The routers' loss of a model; `model.router_loss`, None where it has none.

    Its gradient enters where the weights of the chosen experts leave the router, in the pass that gradients go back
    through: also where layers are computed again, whose first pass leaves nothing to go back through, and whatever is
    done with the logits of the model. `routers` return logits [T, E], weights of the chosen and the chosen [T, K].
    """

    def __init__(self, coefficient: float, routers: list[nn.Module]) -> None:
        self.coefficient, self.num_layers = coefficient, len(routers)
        self._values: dict[int, torch.Tensor] = {}
        self._sum: torch.Tensor | float = 0.0
        self._is_token: torch.Tensor | None = None
        self._factor = 0.0
        for number, router in enumerate(routers):
            router.register_forward_hook(lambda _, __, output, number=number: self._add(number, output))

    def begin(self, segment_ids: torch.Tensor, device: torch.device, scale: float) -> None:
        """Take notice of the next micro-batch's forward and backward pass.

        `segment_ids`, [B, S], are 0 on padding; `scale` is of this micro-batch's loss, beside the coefficient.
        """
        self._end()
        self._is_token = (segment_ids > 0).to(device, non_blocking=True)
        self._factor = scale * self.coefficient / self.num_layers

    def collect(self) -> torch.Tensor:
        """Return the sum over micro-batches of the mean over layers, and take notice of nothing more.

        float32 scalar of this rank, without a gradient and without the coefficient.
        """
        self._end()
        total, self._sum, self._is_token = self._sum, 0.0, None
        assert isinstance(total, torch.Tensor)
        return total

    def _end(self) -> None:
        if self._values:
            self._sum = self._sum + torch.stack(list(self._values.values())).mean()
            self._values = {}

    def _add(self, number: int, output: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | None:
        if self._is_token is None:
            return None
        if not isinstance(output, tuple) or len(output) < 3:
            raise ConfigError(
                tr(
                    "model.router_loss: the routers of this model give no more than their logits, so the loss cannot "
                    "be counted. Set model.router_loss=0."
                )
            )
        logits, weights, chosen, *others = output
        # Learned tokens may stand in front of each row (tuning=prompt).
        rows, size = self._is_token.shape
        learned = logits.flatten(0, -2).size(0) // rows - size
        value = balance(logits, chosen, nn.functional.pad(self._is_token, (learned, 0), value=True).flatten())
        self._values[number] = value.detach()  # twice the same where the layer is computed again
        if not value.requires_grad:
            return None
        return (logits, _WithLoss.apply(weights, value, self._factor), chosen, *others)


def balance(logits: torch.Tensor, chosen: torch.Tensor, is_token: torch.Tensor) -> torch.Tensor:
    """Return the loss of one layer's router, float32 scalar, 0 of no tokens.

    `logits`: [T, E]; `chosen`: experts of each token, [T, K]; `is_token`: False where padding stands, [T].
    """
    size, counts = logits.size(-1), is_token.float()
    total = counts.sum().clamp(min=1)
    probabilities = torch.softmax(logits.flatten(0, -2), dim=-1, dtype=torch.float32)
    chosen = chosen.flatten(0, -2)
    often = torch.zeros(size, device=logits.device).scatter_add_(
        0, chosen.flatten(), counts.repeat_interleave(chosen.size(-1))
    )
    return size * torch.dot(often / total, counts @ probabilities / total)


class _WithLoss(torch.autograd.Function):
    """A tensor as it is, through which a loss gets a gradient that does not depend on the tensor's own."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, loss: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *outer: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return outer[0], outer[0].new_full((), ctx.factor, dtype=torch.float32), None


def router_loss(model: PreTrainedModel, cfg: RunConfig) -> RouterLoss | None:
    """Return a model's loss of its routers as `model.router_loss` says; None where it is not wanted."""
    wanted, own = cfg.model.router_loss, getattr(model.config, "router_aux_loss_coef", None)
    routers = _routers(model) if own is not None else []
    if wanted > 0 and not routers:
        raise ConfigError(
            "model.router_loss = {value}, but {architecture} has no routers with such a loss (no "
            "router_aux_loss_coef in its config). Leave it out.",
            value=wanted,
            architecture=type(model).__name__,
        )
    coefficient = float(own or 0) if wanted < 0 else wanted
    if not routers or not coefficient:
        return None
    others = {
        "parallel.tensor": cfg.parallel.tensor > 1,
        "parallel.sequence": cfg.parallel.sequence > 1,
        "parallel.pipeline": cfg.parallel.pipeline > 1,
        "compile.enabled": cfg.compile.enabled,
    }
    if used := [key for key, is_used in others.items() if is_used]:
        raise ConfigError(
            "the loss of this model's routers ({value}, model.router_loss) does not go together with {key}. Leave "
            "that out, or set model.router_loss=0.",
            value=coefficient,
            key=used[0],
        )
    return RouterLoss(coefficient, routers)


def _routers(model: PreTrainedModel) -> list[nn.Module]:
    """Return what transformers records as router_logits, where it is the first of what they return."""
    found = []
    for part in model.modules():
        recorders = getattr(part, "_can_record_outputs", None) if isinstance(part, PreTrainedModel) else None
        recorder = (recorders or {}).get("router_logits")
        if isinstance(recorder, OutputRecorder) and recorder.index == 0:
            where = f".{recorder.layer_name.strip('.')}." if recorder.layer_name else "."
            modules = part.named_modules(prefix="")
            found += [one for name, one in modules if isinstance(one, recorder.target_class) and where in f".{name}."]
    return list(dict.fromkeys(found))
