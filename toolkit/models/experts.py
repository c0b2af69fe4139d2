"""Routed experts divided over ranks (`parallel.expert`): each token goes to the ranks that have its experts, and back.

Routers, shared experts and all else of a layer stay transformers' own: only the function that computes routed experts
is replaced, through transformers' interface for it (5.20 to 5.23, integrations/moe.py). The exchange is GShard's:
Lepikhin et al. 2020, https://arxiv.org/abs/2006.16668, section 3.2, without capacity: nothing is dropped.

T tokens of a rank, K experts of a token, E experts of a layer, P ranks that share them, N rows that reach a rank, H
hidden width.
"""

import re
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from toolkit.config import mesh
from toolkit.messages import ModelError, tr
from toolkit.models import weights

DIVIDED = "divided"
"""transformers' name of the way in which experts are computed here."""


def divide(model: PreTrainedModel, ranks: int) -> dict[str, slice]:
    """Leave of each layer's experts those of this rank, in an empty model. A collective.

    Returns:
        By name of every parameter and stored buffer, which of its rows this rank has.

    Raises:
        ModelError: the model has no experts, or they cannot be divided by `ranks`.
    """
    check_divides(model, ranks)
    from deepspeed.utils import groups  # seconds, which those who divide nothing need not wait

    groups._create_expert_and_data_parallel(ranks)
    group = f"ep_size_{ranks}"
    return keep(model, groups._get_expert_parallel_rank(group), ranks, group)


def _experts_of(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    return {name: one for name, one in model.named_parameters() if re.match(mesh.EXPERTS, name)}


def check_divides(model: PreTrainedModel, ranks: int) -> None:
    """Check that a model's experts can be divided over so many ranks; a ModelError if not."""
    numbers = {one.size(0) for one in _experts_of(model).values()}
    reason = ""
    if not numbers or not model._can_set_experts_implementation():
        reason = tr("it has no routed experts that transformers computes by an interface")
    elif uneven := [number for number in numbers if number % ranks]:
        reason = tr("its {count} experts cannot be divided by {ranks}", count=uneven[0], ranks=ranks)
    if reason:
        raise ModelError(
            "parallel.expert = {ranks} is incompatible with {model}: {reason}.",
            ranks=ranks,
            model=type(model).__name__,
            reason=reason,
        )


def keep(model: PreTrainedModel, rank: int, ranks: int, group: str) -> dict[str, slice]:
    """Leave of each layer's experts those of one of `ranks`, whose group DeepSpeed knows by a name; see `divide`."""
    stored = dict.fromkeys(weights.shapes_of(model), slice(None))
    for name, whole in _experts_of(model).items():
        module, _, leaf = name.rpartition(".")
        layer, size = model.get_submodule(module), whole.size(0) // ranks
        stored[name] = slice(rank * size, (rank + 1) * size)
        setattr(layer, leaf, mark(nn.Parameter(whole.data[stored[name]], requires_grad=whole.requires_grad), group))
        layer.num_experts, layer.expert_group = size, group
    model.set_experts_implementation(DIVIDED)
    return stored


def mark(parameter: nn.Parameter, group: str) -> nn.Parameter:
    """Let DeepSpeed know that the ranks of a group have different parts of a parameter (0.19.8, moe/experts.py)."""
    parameter.allreduce, parameter.group_name = False, group  # type: ignore[attr-defined]
    return parameter


def _forward(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Return what the experts of each token make of it, weighted and added up, [T, H].

    Args:
        self: the layer's experts, of which this rank has some.
        hidden_states: this rank's tokens [T, H].
        top_k_index: numbers of their experts, among all [T, K].
        top_k_weights: [T, K].
    """
    from deepspeed.utils import groups

    group = groups._get_expert_parallel_group(self.expert_group)
    own, ranks, choices = self.num_experts, dist.get_world_size(group), top_k_index.size(-1)
    chosen, order = top_k_index.reshape(-1).sort(stable=True)
    counts = torch.bincount(chosen, minlength=own * ranks)
    received = torch.empty_like(counts)  # [P, own]: rows from each rank for each expert
    dist.all_to_all_single(received, counts, group=group)
    received = received.view(ranks, own)
    sizes = torch.cat((counts.view(ranks, own).sum(1), received.sum(1), received.sum(0))).tolist()  # the one wait
    sent, came, per_expert = sizes[:ranks], sizes[ranks : 2 * ranks], sizes[2 * ranks :]
    rows = _Exchange.apply(hidden_states[order // choices], sent, came, group)  # [N, H], by rank and expert
    expert = torch.arange(own, device=rows.device).repeat(ranks).repeat_interleave(received.flatten())
    place = expert.argsort(stable=True)
    computed = _compute(self, rows[place], per_expert, expert[place])
    back = _Exchange.apply(computed[place.argsort()], came, sent, group)
    of_tokens = back[order.argsort()].view(-1, choices, back.size(-1)) * top_k_weights.unsqueeze(-1)
    return of_tokens.sum(dim=1).to(hidden_states.dtype)


def _compute(self: Any, rows: torch.Tensor, sizes: list[int], expert: torch.Tensor) -> torch.Tensor:
    """Return what experts make of rows [N, H], sorted by `expert` [N], `sizes` of each; as transformers does."""
    inner = _product(self, "gate_up_proj" if self.has_gate else "up_proj", rows, sizes, expert)
    inner = self._apply_gate(inner) if self.has_gate else self.act_fn(inner)
    outer = _product(self, "down_proj", inner, sizes, expert)
    return self.post_expert_norm(outer) if getattr(self, "has_post_expert_norm", False) else outer


def _product(self: Any, name: str, rows: torch.Tensor, sizes: list[int], expert: torch.Tensor) -> torch.Tensor:
    """Return the product of each row with its expert's matrix.

    Every expert takes part, also one without a row: its gradient is 0, and all ranks reduce the same.
    """
    weight = getattr(self, name)
    if rows.is_cuda and rows.dtype is torch.bfloat16 and len(rows):
        ends = torch.tensor(sizes, device=rows.device).cumsum(0, dtype=torch.int32)
        found = functional.grouped_mm(rows, weight if self.is_transposed else weight.transpose(1, 2), offs=ends)
    else:
        matrices = (weight.transpose(1, 2) if self.is_transposed else weight).unbind()
        parts = zip(rows.split(sizes), matrices, strict=True)
        found = torch.cat([functional.linear(part, matrix) for part, matrix in parts])
    return found + getattr(self, f"{name}_bias")[expert] if self.has_bias else found


class _Exchange(torch.autograd.Function):
    """Send `sent` rows to each rank and get `came` rows from each; backward the other way."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, sent: list[int], came: list[int], group: Any) -> torch.Tensor:
        ctx.sizes, ctx.group = (sent, came), group
        received = rows.new_empty(sum(came), rows.size(1))
        dist.all_to_all_single(received, rows.contiguous(), came, sent, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        sent, came = ctx.sizes
        return _Exchange.apply(gradients[0], came, sent, ctx.group), None, None, None


ALL_EXPERTS_FUNCTIONS.register(DIVIDED, _forward)
