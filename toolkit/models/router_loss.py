"""Balancing of routed experts: the routers' loss, biases of their scores, and a capacity that drops tokens.

The routers' loss of a layer and a micro-batch is E x sum over E experts of f x P: f how often an expert is chosen per
token, P its mean probability, without padding (Fedus, Zoph, Shazeer 2021, Switch Transformers,
https://arxiv.org/abs/2101.03961, equations 4 to 6). The mean over layers, micro-batches and data-parallel ranks is
added, times the coefficient. Ranks that have parts of the same rows compute f and P over all their tokens. transformers
(5.23) pools all layers before it multiplies, so that one layer can compensate for another.

Models that balance with a bias of each expert's score (GLM-4.5, DeepSeek-V3) have no such loss. After a step the bias
moves by a rate, up where an expert got fewer tokens of the global batch than the mean of its layer, down where more:
Wang et al. 2024, https://arxiv.org/abs/2408.15664; DeepSeek-V3, https://arxiv.org/abs/2412.19437, section 2.1.2.

A capacity limits the tokens of an expert, and drops the others: Lepikhin et al. 2020, GShard, https://arxiv.org/abs/2006.16668,
section 2.2, where the last tokens are dropped; here those with the smallest weights.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from toolkit.config.schema import PreferenceLoss, RunConfig, TaskKind
from toolkit.messages import ConfigError
from toolkit.models import experts
from toolkit.models.structure import routers_in
from toolkit.sample_types import Batch


class _Observation(NamedTuple):
    """What a router did in a micro-batch."""

    loss: torch.Tensor
    load: torch.Tensor
    """Each expert's tokens, [E]."""
    dropped: torch.Tensor
    """Number of choices that the capacity dropped."""


class Routers:
    """The routers of a model with experts, during training; `ModelRecord.routers`.

    Hooks observe the forward passes in training mode between `begin` and `collect`: they count each expert's tokens,
    and add the routers' loss, whose gradient enters at the chosen experts' weights, so that it reaches recomputed
    layers too. After a step biases may move. A router returns logits [tokens, E], weights and numbers of the chosen
    experts [tokens, K]; one that returns less is not counted. A choice that the capacity drops gets the weight 0 and
    the number ~n in place of n.
    """

    def __init__(
        self, routers: Mapping[str, nn.Module], coefficient: float = 0.0, bias_rate: float = 0.0, capacity: float = 0.0
    ) -> None:
        self.coefficient, self.bias_rate, self.capacity = coefficient, bias_rate, capacity
        self.num_layers = len(routers)
        self._routers = list(routers.values())
        numbers = [(re.findall(r"\d+", name) or [name])[0] for name in routers]
        self.layers = numbers if len(set(numbers)) == len(numbers) else list(routers)
        """Each router's layer number as text, or its name if a layer has several routers."""
        self._observed: dict[int, _Observation] = {}
        """Number of a router -> what it did in this micro-batch."""
        self._sizes: dict[int, int] = {}
        """Number of a router -> number of its experts, E."""
        self._sum: torch.Tensor | None = None
        """What `collect` returns, of the micro-batches so far."""
        self._samples: torch.Tensor | None = None
        """How many samples each token of the micro-batch is in, [B, S]; None while nothing is observed."""
        # Of the micro-batch, set by `begin`: ranks that its rows are divided over, how often learned tokens in front of
        # a row count, factor of the routers' loss, and whether it is a filler.
        self._parts, self._learned, self._factor, self._is_filler = 1, 1, 0.0, False
        for number, router in enumerate(self._routers):
            router.register_forward_hook(lambda router, _, output, number=number: self._observe(number, router, output))

    def begin(self, batch: Batch, device: torch.device, scale: float) -> None:
        """Observe the next micro-batch. A token counts once for each sample that it is in; those of a filler
        (loader.collate) do not count. `scale`: factor of the token loss, which the routers' loss gets too.
        """
        self._close_micro_batch()
        segments, rows = batch["segment_ids"], batch.get("row_ids", batch["input_ids"])
        # 0 for padding, 1 for a token of one sample, more for one of a prefix that several share.
        samples = (segments > 0) * (batch.get("seen_until", segments) - segments + 1)
        self._samples = samples.to(device, non_blocking=True)
        self._is_filler = bool((rows == rows[0, 0]).all())  # one id throughout
        part, self._parts = batch["part"].tolist() if "part" in batch else (0, 1)
        self._learned = int(part == 0)  # each rank computes them: the first counts them
        # Ranks with parts of the same rows compute the same loss: times their number, as gradients are averaged.
        self._factor = 0.0 if self._is_filler else scale * self.coefficient / self.num_layers * self._parts

    def collect(self, device: torch.device) -> torch.Tensor:
        """Stop observing, and return this rank's sums over micro-batches in one tensor: the losses' mean over layers,
        without the coefficient; each expert's tokens, layer after layer; with a capacity the dropped choices.
        """
        self._close_micro_batch()
        total, self._sum, self._samples = self._sum, None, None
        return torch.zeros(1, device=device) if total is None else total

    def move_biases(self, loads: torch.Tensor) -> None:
        """Raise the biases of experts with fewer tokens than the mean of their layer by the rate, and lower those of
        experts with more; `loads` of the global batch, in the order of `collect`.
        """
        if not self.bias_rate:
            return
        for number, load in self._by_layer(loads):
            bias: Any = self._routers[number].e_score_correction_bias
            bias.add_(torch.sign(load.mean() - load).to(bias), alpha=self.bias_rate)

    def table(self, loads: torch.Tensor) -> dict[str, list[int]]:
        """Return layer -> tokens of each expert; `loads`: in the order of `collect`."""
        return {self.layers[number]: load.long().tolist() for number, load in self._by_layer(loads)}

    def dropped(self, loads: torch.Tensor) -> dict[str, float]:
        """Return as a metric the fraction of choices that the capacity dropped, the last of `loads`; {} without one."""
        return {"expert_dropped": float(loads[-1] / loads[:-1].sum())} if self.capacity else {}

    def _by_layer(self, loads: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield each router's number with its experts' tokens, of loads one layer after the other."""
        sizes = list(self._sizes.values())
        return zip(self._sizes, loads[: sum(sizes)].split(sizes), strict=True)

    def _close_micro_batch(self) -> None:
        """Add what was observed in the last micro-batch, if anything was, to the sums. A filler adds zeros."""
        if not self._observed:
            return
        observed = [self._observed[number] for number in sorted(self._observed)]
        self._sizes = {number: len(self._observed[number].load) for number in sorted(self._observed)}
        mean_loss = torch.stack([entry.loss for entry in observed]).mean()
        parts = [mean_loss[None], *(entry.load for entry in observed)]
        if self.capacity:
            parts.append(torch.stack([entry.dropped for entry in observed]).sum()[None])
        sums = torch.cat(parts)
        if self._is_filler:
            sums.zero_()
        self._sum = sums if self._sum is None else self._sum + sums
        self._observed = {}

    def _observe(
        self, number: int, router: nn.Module, output: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, ...] | None:
        """Note loss, load and drops of the router `number` in `_observed`: a hook after its forward pass.

        `output`: logits [tokens, E], weights and numbers of the chosen experts [tokens, K] each, and whatever else the
        router returns. Returns the output with changed weights, through which the loss gets its gradient and dropped
        choices weigh nothing; None, if neither is needed, leaves it as it is.
        """
        if self._samples is None or not router.training:  # not between `begin` and `collect`, or an evaluation
            return None
        if not isinstance(output, tuple) or len(output) < 3:  # it returns logits alone
            self._check_needs_no_choices()
            return None
        logits, weights, chosen, *remaining = output
        # Learned tokens may stand in front of each row (tuning=prompt), on all ranks that have a part of it.
        rows, size = self._samples.shape
        learned = logits.flatten(0, -2).size(0) // rows - size
        samples = nn.functional.pad(self._samples, (learned, 0), value=self._learned).flatten()
        load = expert_loads(chosen, samples, logits.size(-1))
        loss = dropped = load.new_zeros(())
        if self.coefficient:
            loss = balance_loss(logits, load, samples, self._parts)
        if self.capacity:
            is_kept = within_capacity(chosen, weights.detach(), samples > 0, logits.size(-1), self.capacity)
            dropped = ((~is_kept).sum(-1).flatten() * samples).sum().float()
            weights, chosen = weights * is_kept, torch.where(is_kept, chosen, ~chosen)
        # Where the layer is computed again in the backward pass, the same once more.
        self._observed[number] = _Observation(loss.detach(), load, dropped)
        if loss.requires_grad:
            weights = _WithLoss.apply(weights, loss, self._factor)
        is_changed = bool(self.capacity) or loss.requires_grad
        return (logits, weights, chosen, *remaining) if is_changed else None

    def _check_needs_no_choices(self) -> None:
        """Raise ConfigError if a loss or a capacity is asked for, which need what the routers choose."""
        if self.coefficient or self.capacity:
            raise ConfigError(
                "model.{key}: the routers of this model give no more than their logits, so what they choose cannot "
                "be seen. Set model.{key}=0.",
                key="router_loss" if self.coefficient else "expert_capacity",
            )


def expert_loads(chosen: torch.Tensor, samples: torch.Tensor, size: int) -> torch.Tensor:
    """Return each expert's tokens, float32 [size]. `chosen`: [tokens, K]; `samples`: how often each token counts."""
    chosen, counts = chosen.flatten(0, -2), samples.float()
    return torch.zeros(size, device=chosen.device).scatter_add_(
        0, chosen.flatten(), counts.repeat_interleave(chosen.size(-1))
    )


def within_capacity(
    chosen: torch.Tensor, weights: torch.Tensor, is_real: torch.Tensor, size: int, factor: float
) -> torch.Tensor:
    """Return which choices [tokens, K] are within the capacity of their experts, bool; see `model.expert_capacity`. An
    expert takes `factor` times the mean of n x K / E choices of n real tokens, rounded up. Of more those with the
    smallest weights are not within it, of equal ones the last. Choices of padding never are.

    `chosen`, `weights`: numbers and weights of the experts, [tokens, K]. `is_real`: no padding, [tokens]. `size`: E.
    """
    choices = chosen.flatten(0, -2)
    limit = (is_real.sum().double() * (factor * choices.size(-1) / size)).ceil()
    expert = choices.masked_fill(~is_real.unsqueeze(-1), size).flatten()  # padding's has the number E
    order = weights.flatten().argsort(descending=True, stable=True)
    order = order[expert[order].argsort(stable=True)]
    expert = expert[order]  # [tokens x K], those of an expert next to each other, by falling weights
    counts = experts.count_choices(expert, size + 1)
    # A choice's place among those of its expert: its own less that of the expert's first.
    rank_in_expert = torch.arange(len(order), device=chosen.device) - (counts.cumsum(0) - counts)[expert]
    is_within = (rank_in_expert < limit) & (expert < size)
    return torch.empty_like(is_within).scatter_(0, order, is_within).view_as(chosen)  # in the order of `chosen` again


def expert_load_metrics(loads: Iterable[Sequence[int]]) -> dict[str, float]:
    """Return the metrics of the experts' tokens: the most that one has, as a multiple of its layer's mean; the fraction
    of experts without any; and the entropy of a layer's loads as a fraction of the largest possible, the mean over
    layers. `loads`: tokens of each expert, by layer.
    """
    layers = [torch.tensor(load, dtype=torch.float64) for load in loads]
    entropies = [
        float(torch.special.entr(load / load.sum()).sum()) / math.log(len(load)) if len(load) > 1 else 1.0
        for load in layers
    ]
    return {
        "expert_load_max": max(float(load.max() / load.mean()) for load in layers),
        "expert_unused": float((torch.cat(layers) == 0).double().mean()),
        "router_entropy": sum(entropies) / len(entropies),
    }


def balance_loss(logits: torch.Tensor, load: torch.Tensor, samples: torch.Tensor, parts: int = 1) -> torch.Tensor:
    """Return a router's loss, E x sum over E experts of f x P, a float32 scalar: f how often an expert is chosen per
    token, P its mean probability. `logits`: [tokens, E]; `load`: from `expert_loads`, [E]; `samples`: how often each
    token counts, [tokens]. If `parts` > 1 ranks have parts of the same rows, the loss is of all their tokens, and this
    is a collective.
    """
    size, counts = logits.size(-1), samples.float()
    probabilities = torch.softmax(logits.flatten(0, -2), dim=-1, dtype=torch.float32)
    sums = torch.cat((counts.sum()[None], load, counts @ probabilities))
    if parts > 1:
        from toolkit.layouts.sequence import sum_over_parts

        sums = sum_over_parts(sums)
    num_tokens, num_choices, probability_sums = sums.split((1, size, size))
    num_tokens = num_tokens.clamp(min=1)  # 0 if all is padding
    return size * torch.dot(num_choices / num_tokens, probability_sums / num_tokens)


class _WithLoss(torch.autograd.Function):
    """Returns a tensor unchanged; in the backward pass the gradient of `loss` is `factor`, whatever the tensor's is."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, loss: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *outer: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return outer[0], outer[0].new_full((), ctx.factor, dtype=torch.float32), None


def routers_of(model: PreTrainedModel, cfg: RunConfig) -> Routers | None:
    """Return a model's routers with the loss, biases and capacity that the config asks for; None if the model has no
    routers, or if hooks cannot observe them and nothing is asked for. ConfigError if what is asked for is impossible.
    """
    rate, capacity = cfg.model.router_bias_rate, cfg.model.expert_capacity
    config_coefficient = getattr(model.config.get_text_config(), "router_aux_loss_coef", None)
    routers = routers_in(model)
    _check_possible(model, cfg, routers, config_coefficient)
    if not routers:
        return None
    # Below 0 the key asks for the model's own coefficient.
    coefficient = float(config_coefficient or 0) if cfg.model.router_loss < 0 else cfg.model.router_loss
    unobserved = {  # hooks do not see what routers return
        "parallel.tensor": cfg.parallel.tensor > 1,
        "parallel.pipeline": cfg.parallel.pipeline > 1,
        "compile.enabled": cfg.compile.enabled,
    }
    # Here hooks could count tokens, but a loss, a bias or a capacity would be wrong.
    incompatible = {"preference.loss": cfg.preference.is_on, "task.kind": cfg.task.kind is not TaskKind.language}
    conflicting = [key for key, is_used in (unobserved | incompatible).items() if is_used]
    if conflicting and coefficient:
        raise ConfigError(
            "the loss of this model's routers ({value}, model.router_loss) is incompatible with {key}. Remove that, or "
            "set model.router_loss=0.",
            value=coefficient,
            key=conflicting[0],
        )
    for name, value in (("router_bias_rate", rate), ("expert_capacity", capacity)):
        if conflicting and value:
            raise ConfigError(
                "model.{name} = {value} is incompatible with {key}. Remove one of the two.",
                name=name,
                value=value,
                key=conflicting[0],
            )
    # KTO runs forward on halves of the micro-batch that `Routers.begin` is told of.
    if any(unobserved.values()) or cfg.preference.loss is PreferenceLoss.kto:
        return None
    return Routers(routers, coefficient, rate, capacity)


def _check_possible(
    model: PreTrainedModel, cfg: RunConfig, routers: Mapping[str, nn.Module], config_coefficient: float | None
) -> None:
    """Raise ConfigError if a model's routers do not support the loss, bias or capacity that the config asks for."""
    wanted, rate, capacity = cfg.model.router_loss, cfg.model.router_bias_rate, cfg.model.expert_capacity
    if wanted > 0 and (config_coefficient is None or not routers):
        raise ConfigError(
            "model.router_loss = {value}, but {architecture} has no routers with such a loss (no "
            "router_aux_loss_coef in its config). Leave it out.",
            value=wanted,
            architecture=type(model).__name__,
        )
    if rate and (not routers or not all("e_score_correction_bias" in router._buffers for router in routers.values())):
        raise ConfigError(
            "model.router_bias_rate = {value}, but {architecture} has no routers with a bias (e_score_correction_bias) "
            "that could be moved. Leave it out; experts of other models are balanced with model.router_loss.",
            value=rate,
            architecture=type(model).__name__,
        )
    if capacity and not (routers and experts.use_sorted_experts(model)):
        raise ConfigError(
            "model.expert_capacity = {value}, but {architecture} has no routed experts that transformers computes by "
            "an interface. Leave it out.",
            value=capacity,
            architecture=type(model).__name__,
        )
