"""Routed experts, with LoRA or divided over ranks (`parallel.expert`): tokens go to the ranks that have their experts.

Routers, shared experts and all else of a layer stay transformers' own: only the function that computes routed experts
is replaced, through transformers' interface for it (5.20 to 5.23, integrations/moe.py). The exchange is GShard's:
Lepikhin et al. 2020, https://arxiv.org/abs/2006.16668, section 3.2. Nothing is dropped here: routers may, whose
numbers of what they drop are ~0 to ~(E - 1) (`loss.Routers`).

T tokens of a rank, K experts of a token, E experts of a layer, P ranks that share them, N rows that reach a rank, H
hidden width.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from peft.tuners.lora.layer import ParamWrapper
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from toolkit.config import mesh
from toolkit.distributed import process_group
from toolkit.messages import ModelError, tr
from toolkit.models import weights

SORTED = "sorted"
"""transformers' name of the way in which experts are computed here: from rows in the order of their experts."""


def divide(model: PreTrainedModel, ranks: int) -> dict[str, slice]:
    """Leave of each layer's experts those of this rank, in an empty model; return by name of every parameter and stored
    buffer which of its rows this rank has. ModelError if there are no experts, or not so many. A collective.
    """
    check_divides(model, ranks)
    from deepspeed.utils import groups  # seconds, which those who divide nothing need not wait

    groups._create_expert_and_data_parallel(ranks)
    group = f"ep_size_{ranks}"
    return keep(model, groups._get_expert_parallel_rank(group), ranks, group)


def keep_interface(model: nn.Module) -> None:
    """Let experts be computed by transformers' interface again, where something has replaced their forward pass.

    liger-kernel does (0.8.5, LigerExperts), and knows no other ranks, no LoRA and no 4 bits.
    """
    for part in model.modules():
        if hasattr(part, "has_gate"):
            part.__dict__.pop("forward", None)


def names_of(model: PreTrainedModel) -> set[str]:
    """Return the names of the matrices of a model's routed experts, each of all experts of a layer."""
    return {name for name, one in model.named_parameters() if is_stacked(name, one)}


def is_stacked(name: str, parameter: nn.Parameter) -> bool:
    """Whether a parameter is a matrix of the routed experts, of all of a layer or of this rank's."""
    return bool(re.match(mesh.EXPERTS, name)) and len(process_group.full_shape(name, parameter)) == 3


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
        own = whole.data[stored[name]].clone()  # or what others have would stay, too
        setattr(layer, leaf, mark(nn.Parameter(own, requires_grad=whole.requires_grad), group))
        layer.num_experts, layer.expert_group = size, group
    model.set_experts_implementation(SORTED)
    return stored


def mark(parameter: nn.Parameter, group: str) -> nn.Parameter:
    """Let DeepSpeed know that the ranks of a group have different parts of a parameter (0.19.8, moe/experts.py)."""
    parameter.allreduce, parameter.group_name = False, group  # type: ignore[attr-defined]
    return parameter


class ExpertLora(ParamWrapper):
    """LoRA of all experts of a layer, which are one tensor, for the module that has it.

    peft's own adds both factors' product, as large as all experts, to the tensor in each pass (0.21, ParamWrapper).
    Here the factors multiply each expert's rows (`_product`). The second one is `[out, rank, E]`; peft's `[out, rank x
    E]` has its numbers in the same order.
    """

    def forward(self, *args: Any, **options: Any) -> Any:
        """Compute the experts, which look for their additions themselves."""
        return self.base_layer(*args, **options)


@contextmanager
def shown_whole(model: PreTrainedModel) -> Iterator[None]:
    """Let divided experts look as large as all of a layer, so that what LoRA draws does not depend on the ranks, and
    experts in 4 bits as if they were not.
    """
    divided = {
        name: one
        for name, one in _experts_of(model).items()
        if process_group.is_expert_part(one) or hasattr(one, "quant_state")
    }
    for name, one in divided.items():  # what peft reads of partitioned ones
        one.__dict__["ds_shape"] = torch.Size(process_group.full_shape(name, one))
    yield
    for one in divided.values():
        del one.__dict__["ds_shape"]


def quantize(layer: Any, name: str, device: torch.device) -> Any:
    """Put a layer's matrices of one name, all or this rank's, on a device in 4 bits, and return them."""
    from bitsandbytes import nn as bnb

    leaf = name.rpartition(".")[2]
    whole = getattr(layer, leaf)
    if whole.numel() >= 1 << 31:
        raise ModelError(
            "tuning.method = qlora: {name} has {count} numbers on a rank, and bitsandbytes counts to 2 ** 31. "
            "Divide the experts: parallel.expert.",
            name=name,
            count=f"{whole.numel():,}",
        )
    small = bnb.Params4bit(whole.data, requires_grad=False, compress_statistics=True, quant_type="nf4").to(device)
    setattr(layer, leaf, mark(small, whole.group_name) if process_group.is_expert_part(whole) else small)
    return small


def compute_sorted(model: PreTrainedModel) -> bool:
    """Let a model's experts be computed here, which know of 4 bits, LoRA and other ranks; return whether they can."""
    if is_possible := model._can_set_experts_implementation():
        model.set_experts_implementation(SORTED)
    return is_possible


class _QuantizedProduct(torch.autograd.Function):
    """`_grouped` with frozen matrices in 4 bits, which are expanded once more in the backward pass and not kept."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, packed: Any, groups: "_Groups", turned: bool) -> torch.Tensor:
        ctx.of = packed, groups, turned
        return _grouped(rows, _expanded(packed, rows.dtype), groups, turned)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        packed, groups, turned = ctx.of
        found = _grouped(gradients[0], _expanded(packed, gradients[0].dtype), groups, not turned)
        return found, None, None, None


def _expanded(packed: Any, dtype: torch.dtype) -> torch.Tensor:
    from bitsandbytes.functional import dequantize_4bit

    found: torch.Tensor = dequantize_4bit(packed.data, packed.quant_state)
    return found.to(dtype)


def attach_lora(model: PreTrainedModel, adapter: str) -> None:
    """Let what peft put around experts be computed as `ExpertLora`; of divided ones, leave this rank's part."""
    wrapped = [(name, one) for name, one in model.named_modules() if type(one) is ParamWrapper]
    found = [(name, one) for name, one in wrapped if hasattr(one.get_base_layer(), "has_gate")]
    if not found or not compute_sorted(model):
        return
    for name, layer in found:
        base: Any = layer.get_base_layer()
        first: Any = layer.lora_A[adapter]
        second: Any = layer.lora_B[adapter]
        second.weight = nn.Parameter(second.weight.data.unflatten(1, (-1, layer.num_experts)))
        if base.num_experts < layer.num_experts:
            for key, factor in (("lora_A", first), ("lora_B", second)):
                whole = f"{name}.{key}.{adapter}.weight"
                part = process_group.part_of(base.get_parameter(layer.parameter_name))
                own = process_group.take_part(whole, factor.weight.data, *part)
                factor.weight = mark(nn.Parameter(own.clone()), base.expert_group)
            layer.num_experts = base.num_experts
        layer.__class__ = ExpertLora
        base.__dict__.setdefault("lora", {})[layer.parameter_name] = (layer, adapter)


def _forward(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Return what the experts of each token make of it, weighted and added up, [T, H] of [T, H]. `top_k_index`, [T, K]:
    numbers among all experts, of which `self` has this rank's, ~number of a dropped choice, whose weight [T, K] is 0.
    """
    choices, own = top_k_index.size(-1), self.num_experts
    group = getattr(self, "expert_group", None)
    if group is None:  # nothing is sent, and leaving dropped ones out would cost a wait for the number of the others
        top_k_index = torch.where(top_k_index < 0, ~top_k_index, top_k_index)
    chosen, order = top_k_index.reshape(-1).sort(stable=True)
    token = order // choices
    # Rows have no name here: they are freed where they have been copied.
    if group is None:
        computed = _compute(self, hidden_states[token], _Groups(count(chosen, own)), chosen)
    else:
        computed = _compute_elsewhere(self, hidden_states[token], chosen, group)
    of_tokens = computed[order.argsort()].view(-1, choices, computed.size(-1)) * top_k_weights.unsqueeze(-1)
    return of_tokens.sum(dim=1).to(hidden_states.dtype)


def count(chosen: torch.Tensor, number: int) -> torch.Tensor:
    """Return how often each of so many experts is chosen; not `bincount`, for which the host waits for a GPU."""
    return chosen.new_zeros(number).scatter_add_(0, chosen, torch.ones_like(chosen))


class _Groups:
    """How many rows each expert has, in the order of the rows; the host asks for numbers where it computes by them."""

    def __init__(self, counts: torch.Tensor) -> None:
        self._counts = counts
        self.ends = counts.cumsum(0).to(torch.int32)

    @cached_property
    def sizes(self) -> list[int]:
        """The same on the host."""
        return self._counts.tolist()


def _compute_elsewhere(self: Any, rows: torch.Tensor, chosen: torch.Tensor, name: str) -> torch.Tensor:
    """Return what experts make of rows [T x K, H] that are sorted by expert, on the ranks that have them; 0 of those
    that were dropped.
    """
    from deepspeed.utils import groups

    group = groups._get_expert_parallel_group(name)
    own, ranks = self.num_experts, dist.get_world_size(group)
    counts = count(chosen.clamp(min=-1) + 1, own * ranks + 1)[1:]
    received = torch.empty_like(counts)  # [P, own]: rows from each rank for each expert
    dist.all_to_all_single(received, counts, group=group)
    received = received.view(ranks, own)
    sent, came = rows_exchanged(counts.view(ranks, own), received)
    dropped = len(rows) - sum(sent)  # the first ones
    rows = process_group.exchange_rows(rows[dropped:], group, sent, came)  # [N, H], by rank and expert
    expert = torch.arange(own, device=rows.device).repeat(ranks)
    expert = expert.repeat_interleave(received.flatten(), output_size=sum(came))
    place = expert.argsort(stable=True)
    rows = rows[place]
    rows = _compute(self, rows, _Groups(received.sum(0)), expert[place])
    back = process_group.exchange_rows(rows[place.argsort()], group, came, sent)
    return functional.pad(back, (0, 0, dropped, 0)) if dropped else back


def rows_exchanged(counts: torch.Tensor, received: torch.Tensor) -> tuple[list[int], list[int]]:
    """Return how many rows go to each rank and come from it, of those for each of their and our experts [P, own]."""
    sent, came = torch.stack((counts.sum(1), received.sum(1))).tolist()  # the host waits here
    return sent, came


def _compute(self: Any, rows: torch.Tensor, groups: _Groups, expert: torch.Tensor) -> torch.Tensor:
    """Return what experts make of rows [N, H] in the order of their experts, `expert` [N]; as transformers does."""
    inner = _product(self, "gate_up_proj" if self.has_gate else "up_proj", rows, groups, expert)
    inner = self._apply_gate(inner) if self.has_gate else self.act_fn(inner)
    outer = _product(self, "down_proj", inner, groups, expert)
    return self.post_expert_norm(outer) if getattr(self, "has_post_expert_norm", False) else outer


def _product(self: Any, name: str, rows: torch.Tensor, groups: _Groups, expert: torch.Tensor) -> torch.Tensor:
    """Return the product of each row with its expert's matrix, and with what LoRA adds to it."""
    matrices, turned = getattr(self, name), self.is_transposed
    if hasattr(matrices, "quant_state"):
        found = _QuantizedProduct.apply(rows, matrices, groups, turned)
    else:
        found = _grouped(rows, matrices, groups, turned)
    layer, adapter = getattr(self, "lora", {}).get(name, (None, ""))
    if layer is not None and not layer.disable_adapters:
        first = layer.lora_A[adapter].weight.unflatten(0, (layer.num_experts, -1))  # [E, rank, I]
        # [E, rank, O] in that order: what the kernel multiplies has one axis of neighbours, in steps of 16 bytes.
        second = layer.lora_B[adapter].weight.permute(2, 1, 0).contiguous()
        added = _grouped(_grouped(rows, first, groups, False), second, groups, True)
        found = found + added * layer.scaling[adapter]
    return found + getattr(self, f"{name}_bias")[expert] if self.has_bias else found


def _grouped(rows: torch.Tensor, matrices: torch.Tensor, groups: _Groups, turned: bool) -> torch.Tensor:
    """Return the products of rows [N, I] with matrices [E, O, I], `turned` [E, I, O], each with its group of rows.

    Every matrix takes part, also one without a row: its gradient is 0, and all ranks reduce the same.
    """
    if _has_kernel(rows):
        return functional.grouped_mm(rows, matrices if turned else matrices.transpose(1, 2), offs=groups.ends)
    parts = zip(rows.split(groups.sizes), (matrices.transpose(1, 2) if turned else matrices).unbind(), strict=True)
    return torch.cat([functional.linear(part, matrix) for part, matrix in parts])


def _has_kernel(rows: torch.Tensor) -> bool:
    return rows.is_cuda and rows.dtype is torch.bfloat16 and len(rows) > 0


ALL_EXPERTS_FUNCTIONS.register(SORTED, _forward)
