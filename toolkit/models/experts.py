"""Routed experts, computed from rows in the order of their experts: with LoRA, in 4 bits, or divided over ranks.

Routers, shared experts and all else of a layer stay transformers' own: only the function that computes routed experts
is replaced, through transformers' interface for it (5.20 to 5.23, integrations/moe.py).

T tokens of a rank, K experts of a token, E experts of a layer, N rows, H hidden width.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from peft.tuners.lora.layer import ParamWrapper
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from toolkit.config import mesh
from toolkit.distributed import process_group
from toolkit.messages import ModelError

SORTED = "sorted"
"""transformers' name of the way in which experts are computed here: from rows in the order of their experts."""


def keep_interface(model: nn.Module) -> None:
    """Let experts be computed by transformers' interface again, where something has replaced their forward pass.
    liger-kernel does (0.8.5, LigerExperts), and knows no other ranks, no LoRA and no 4 bits.
    """
    for part in model.modules():
        if hasattr(part, "has_gate"):
            part.__dict__.pop("forward", None)


def names_of(model: PreTrainedModel) -> set[str]:
    """Return the names of the matrices of a model's routed experts, each of all experts of a layer."""
    return {name for name, parameter in model.named_parameters() if is_stacked(name, parameter)}


def is_stacked(name: str, parameter: nn.Parameter) -> bool:
    """Whether a parameter is a matrix of the routed experts, of all of a layer or of this rank's."""
    return bool(re.match(mesh.EXPERTS, name)) and len(process_group.full_shape(name, parameter)) == 3


def parameters_of(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    """Return the parameters of a model's routed experts, biases included."""
    return {name: parameter for name, parameter in model.named_parameters() if re.match(mesh.EXPERTS, name)}


def mark(parameter: nn.Parameter, group: str) -> nn.Parameter:
    """Let DeepSpeed know that the ranks of a group have different parts of a parameter (0.19.8, moe/experts.py)."""
    parameter.allreduce, parameter.group_name = False, group  # type: ignore[attr-defined]
    return parameter


class ExpertLora(ParamWrapper):
    """LoRA of all experts of a layer, which are one tensor, for the module that has it.

    peft's own adds both factors' product, as large as all experts, to the tensor in each pass (0.21, ParamWrapper).
    Here the factors multiply each expert's rows (`_expert_products`). The second one is `[out, rank, E]`; peft's
    `[out, rank x E]` has its numbers in the same order.
    """

    def forward(self, *args: Any, **options: Any) -> Any:
        """Compute the experts, which look for their additions themselves."""
        return self.base_layer(*args, **options)


@contextmanager
def pretend_full_shapes(model: PreTrainedModel) -> Iterator[None]:
    """Let peft see experts in the shapes of the whole layer, and not divided over ranks or packed into 4 bits.
    So what LoRA draws for them does not depend on the number of ranks. peft reads `ds_shape` where a parameter has one.
    """
    divided = {
        name: parameter
        for name, parameter in parameters_of(model).items()
        if process_group.is_expert_part(parameter) or hasattr(parameter, "quant_state")
    }
    for name, parameter in divided.items():
        parameter.__dict__["ds_shape"] = torch.Size(process_group.full_shape(name, parameter))
    yield
    for parameter in divided.values():
        del parameter.__dict__["ds_shape"]


def quantize(layer: Any, name: str, device: torch.device) -> Any:
    """Put a layer's matrices of one name, all or this rank's, on a device in 4 bits, and return them."""
    from bitsandbytes import nn as bnb

    leaf = name.rpartition(".")[2]
    matrices = getattr(layer, leaf)
    if matrices.numel() >= 1 << 31:
        raise ModelError(
            "tuning.method = qlora: {name} has {count} numbers on a rank, and bitsandbytes counts to 2 ** 31. "
            "Divide the experts: parallel.expert.",
            name=name,
            count=f"{matrices.numel():,}",
        )
    small = bnb.Params4bit(matrices.data, requires_grad=False, compress_statistics=True, quant_type="nf4").to(device)
    setattr(layer, leaf, mark(small, matrices.group_name) if process_group.is_expert_part(matrices) else small)
    return small


def compute_sorted(model: PreTrainedModel) -> bool:
    """Let a model's experts be computed here, which know of 4 bits, LoRA and other ranks; return whether they can."""
    if is_possible := model._can_set_experts_implementation():
        model.set_experts_implementation(SORTED)
    return is_possible


class _QuantizedProducts(torch.autograd.Function):
    """`_grouped_products` with frozen matrices in 4 bits, dequantized again by the backward pass and not kept."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, packed: Any, groups: "Groups", turned: bool) -> torch.Tensor:
        ctx.operands = packed, groups, turned
        return _grouped_products(rows, _dequantized(packed, rows.dtype), groups, turned)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        packed, groups, turned = ctx.operands
        input_gradient = _grouped_products(gradients[0], _dequantized(packed, gradients[0].dtype), groups, not turned)
        return input_gradient, None, None, None


def _dequantized(packed: Any, dtype: torch.dtype) -> torch.Tensor:
    from bitsandbytes.functional import dequantize_4bit

    matrices: torch.Tensor = dequantize_4bit(packed.data, packed.quant_state)
    return matrices.to(dtype)


def attach_lora(model: PreTrainedModel, adapter: str) -> None:
    """Turn the LoRA layers that peft has put around experts into `ExpertLora`, with the second factor in its shape,
    [out, rank, E]; of experts that are divided over ranks, keep this rank's part of both factors.
    """
    wrapped = [(name, module) for name, module in model.named_modules() if type(module) is ParamWrapper]
    expert_layers = [(name, module) for name, module in wrapped if hasattr(module.get_base_layer(), "has_gate")]
    if not expert_layers or not compute_sorted(model):
        return
    for name, layer in expert_layers:
        base: Any = layer.get_base_layer()
        first: Any = layer.lora_A[adapter]
        second: Any = layer.lora_B[adapter]
        second.weight = nn.Parameter(second.weight.data.unflatten(1, (-1, layer.num_experts)))
        if base.num_experts < layer.num_experts:
            for key, factor in (("lora_A", first), ("lora_B", second)):
                factor_name = f"{name}.{key}.{adapter}.weight"
                part = process_group.part_of(base.get_parameter(layer.parameter_name))
                rank_part = process_group.take_part(factor_name, factor.weight.data, *part)
                factor.weight = mark(nn.Parameter(rank_part.clone()), base.expert_group)
            layer.num_experts = base.num_experts
        layer.__class__ = ExpertLora
        base.__dict__.setdefault("lora", {})[layer.parameter_name] = (layer, adapter)


def _sorted_forward(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Return the weighted sum of what each token's experts make of its state, [T, H]. `self`: a layer's experts, or
    this rank's of them; `hidden_states`: [T, H]; `top_k_index`: numbers among all experts, [T, K], ~number for a
    dropped choice; `top_k_weights`: [T, K], 0 for a dropped choice.
    """
    choices, num_local = top_k_index.size(-1), self.num_experts
    elsewhere = getattr(self, "compute_elsewhere", None)
    if elsewhere is None:  # nothing is sent; leaving dropped ones out would cost a wait for the number of the others
        top_k_index = torch.where(top_k_index < 0, ~top_k_index, top_k_index)
    chosen, order = top_k_index.reshape(-1).sort(stable=True)
    token = order // choices
    # Rows have no name here: they are freed where they have been copied.
    if elsewhere is None:
        computed = compute(self, hidden_states[token], Groups(count(chosen, num_local)), chosen)
    else:
        computed = elsewhere(self, hidden_states[token], chosen)
    of_tokens = computed[order.argsort()].view(-1, choices, computed.size(-1)) * top_k_weights.unsqueeze(-1)
    return of_tokens.sum(dim=1).to(hidden_states.dtype)


def count(chosen: torch.Tensor, number: int) -> torch.Tensor:
    """Return how often each of so many experts is chosen; not `bincount`, for which the host waits for a GPU."""
    return chosen.new_zeros(number).scatter_add_(0, chosen, torch.ones_like(chosen))


class Groups:
    """How many rows each expert has, in the order of the rows; the host asks for numbers where it computes by them."""

    def __init__(self, counts: torch.Tensor) -> None:
        self._counts = counts
        self.ends = counts.cumsum(0).to(torch.int32)

    @cached_property
    def sizes(self) -> list[int]:
        """The same on the host."""
        return self._counts.tolist()


def compute(self: Any, rows: torch.Tensor, groups: Groups, expert: torch.Tensor) -> torch.Tensor:
    """Return what experts make of rows [N, H] in the order of their experts, `expert` [N]; as transformers does."""
    inner = _expert_products(self, "gate_up_proj" if self.has_gate else "up_proj", rows, groups, expert)
    inner = self._apply_gate(inner) if self.has_gate else self.act_fn(inner)
    outer = _expert_products(self, "down_proj", inner, groups, expert)
    return self.post_expert_norm(outer) if getattr(self, "has_post_expert_norm", False) else outer


def _expert_products(self: Any, name: str, rows: torch.Tensor, groups: Groups, expert: torch.Tensor) -> torch.Tensor:
    """Return the product of each row with its expert's matrix, and with what LoRA adds to it.

    Args:
        self: the module of a layer's experts, as transformers hands it to a function of its interface.
        name: attribute of the matrices [E, O, I], or [E, I, O] where they are transposed.
        rows: [N, I], in the order of their experts.
        groups: how many rows each expert has.
        expert: the expert of each row [N].

    Returns:
        [N, O].
    """
    matrices, turned = getattr(self, name), self.is_transposed
    if hasattr(matrices, "quant_state"):
        products = _QuantizedProducts.apply(rows, matrices, groups, turned)
    else:
        products = _grouped_products(rows, matrices, groups, turned)
    layer, adapter = getattr(self, "lora", {}).get(name, (None, ""))
    if layer is not None and not layer.disable_adapters:
        first = layer.lora_A[adapter].weight.unflatten(0, (layer.num_experts, -1))  # [E, rank, I]
        # [E, rank, O] in that order: what the kernel multiplies has one axis of neighbours, in steps of 16 bytes.
        second = layer.lora_B[adapter].weight.permute(2, 1, 0).contiguous()
        added = _grouped_products(_grouped_products(rows, first, groups, False), second, groups, True)
        products = products + added * layer.scaling[adapter]
    return products + getattr(self, f"{name}_bias")[expert] if self.has_bias else products


def _grouped_products(rows: torch.Tensor, matrices: torch.Tensor, groups: Groups, turned: bool) -> torch.Tensor:
    """Return the products of rows [N, I] with matrices [E, O, I], `turned` [E, I, O], each with its group of rows.
    Every matrix takes part, also one without a row: its gradient is 0, and all ranks reduce the same.
    """
    if _has_kernel(rows):
        return functional.grouped_mm(rows, matrices if turned else matrices.transpose(1, 2), offs=groups.ends)
    parts = zip(rows.split(groups.sizes), (matrices.transpose(1, 2) if turned else matrices).unbind(), strict=True)
    return torch.cat([functional.linear(part, matrix) for part, matrix in parts])


def _has_kernel(rows: torch.Tensor) -> bool:
    return rows.is_cuda and rows.dtype is torch.bfloat16 and len(rows) > 0


ALL_EXPERTS_FUNCTIONS.register(SORTED, _sorted_forward)
