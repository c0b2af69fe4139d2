"""Routed experts with LoRA, in 4 bits, or divided over ranks, computed from rows sorted by their experts.

Only transformers' function for routed experts is replaced, by its interface for that (5.20 to 5.23,
integrations/moe.py); routers, shared experts and the rest of a layer are transformers'.

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

from toolkit.config import tensor_split
from toolkit.distributed import process_group
from toolkit.messages import ModelError

SORTED = "sorted"
"""The name under which transformers knows `_sorted_forward`."""


def restore_expert_interface(model: nn.Module) -> None:
    """Undo a replaced forward pass of experts, so that transformers' interface computes them. liger-kernel (0.8.5,
    LigerExperts) replaces it by one that supports neither other ranks, nor LoRA, nor 4 bits.
    """
    for part in model.modules():
        if hasattr(part, "has_gate"):  # set by transformers' interface: the module of a layer's experts
            part.__dict__.pop("forward", None)


def expert_matrix_names(model: PreTrainedModel) -> set[str]:
    """Return the names of a model's routed experts' matrices; each holds all experts of a layer, [E, …, …]."""
    return {name for name, parameter in model.named_parameters() if is_stacked(name, parameter)}


def is_stacked(name: str, parameter: nn.Parameter) -> bool:
    """Whether a parameter holds a matrix of each routed expert of a layer, or of this rank's experts."""
    return bool(re.match(tensor_split.EXPERTS, name)) and len(process_group.full_shape(name, parameter)) == 3


def expert_parameters(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    """Return the parameters of a model's routed experts by name, biases included."""
    return {name: parameter for name, parameter in model.named_parameters() if re.match(tensor_split.EXPERTS, name)}


def mark_as_divided(parameter: nn.Parameter, group: str) -> nn.Parameter:
    """Mark a parameter for DeepSpeed (0.19.8, moe/experts.py): each rank of a group has a part of its own."""
    parameter.allreduce, parameter.group_name = False, group  # type: ignore[attr-defined]
    return parameter


class ExpertLora(ParamWrapper):
    """LoRA of a layer's experts, which are one tensor.

    peft adds the product of both factors, as large as all experts, to the tensor in each pass (0.21, ParamWrapper).
    Here the factors multiply each expert's rows (`_expert_products`). The second factor is `[out, rank, E]`, a view of
    peft's `[out, rank x E]`.
    """

    def forward(self, *args: Any, **options: Any) -> Any:
        """Compute the experts; `_expert_products` adds their LoRA."""
        return self.base_layer(*args, **options)


@contextmanager
def pretend_full_expert_shapes(model: PreTrainedModel) -> Iterator[None]:
    """Show peft experts in the full shape of the layer, even if they are divided over ranks or packed into 4 bits, so
    that the random values of LoRA do not depend on the number of ranks. peft reads a parameter's `ds_shape`, if any.
    """
    divided = {
        name: parameter
        for name, parameter in expert_parameters(model).items()
        if process_group.is_expert_part(parameter) or hasattr(parameter, "quant_state")
    }
    for name, parameter in divided.items():
        parameter.__dict__["ds_shape"] = torch.Size(process_group.full_shape(name, parameter))
    try:
        yield
    finally:
        for parameter in divided.values():
            del parameter.__dict__["ds_shape"]


def quantize_matrices(layer: Any, name: str, device: torch.device) -> Any:
    """Replace the parameter `name` of `layer`, the matrices of its experts or of this rank's, by 4-bit ones on a
    device, and return these. ModelError if there are too many numbers for bitsandbytes.
    """
    from bitsandbytes import nn as bnb

    attribute = name.rpartition(".")[2]
    matrices = getattr(layer, attribute)
    if matrices.numel() >= 1 << 31:
        raise ModelError(
            "tuning.method = qlora: {name} has {count} numbers on a rank, and bitsandbytes counts to 2 ** 31. "
            "Divide the experts: parallel.expert.",
            name=name,
            count=f"{matrices.numel():,}",
        )
    packed = bnb.Params4bit(matrices.data, requires_grad=False, compress_statistics=True, quant_type="nf4").to(device)
    if process_group.is_expert_part(matrices):
        mark_as_divided(packed, matrices.group_name)
    setattr(layer, attribute, packed)
    return packed


def use_sorted_experts(model: PreTrainedModel) -> bool:
    """Make a model compute its experts by `_sorted_forward`; return whether transformers supports that for it."""
    is_possible = model._can_set_experts_implementation()  # transformers 5.24, modeling_utils.py
    if is_possible:
        model.set_experts_implementation(SORTED)
    return is_possible


class _QuantizedProducts(torch.autograd.Function):
    """`_grouped_products` with frozen 4-bit matrices, which the backward pass dequantizes again, to save memory."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, packed: Any, groups: "Groups", transposed: bool) -> torch.Tensor:
        ctx.operands = packed, groups, transposed
        return _grouped_products(rows, _dequantized(packed, rows.dtype), groups, transposed)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        packed, groups, transposed = ctx.operands
        input_gradient = _grouped_products(
            gradients[0], _dequantized(packed, gradients[0].dtype), groups, not transposed
        )
        return input_gradient, None, None, None


def _dequantized(packed: Any, dtype: torch.dtype) -> torch.Tensor:
    from bitsandbytes.functional import dequantize_4bit

    matrices: torch.Tensor = dequantize_4bit(packed.data, packed.quant_state)
    return matrices.to(dtype)


def attach_lora(model: PreTrainedModel, adapter: str) -> None:
    """Turn peft's LoRA layers around experts into `ExpertLora`, with the second factor as [out, rank, E]. If the
    experts are divided over ranks, keep this rank's part of both factors.
    """
    wrapped = [(name, module) for name, module in model.named_modules() if type(module) is ParamWrapper]
    expert_layers = [(name, module) for name, module in wrapped if hasattr(module.get_base_layer(), "has_gate")]
    if not expert_layers or not use_sorted_experts(model):
        return
    for name, layer in expert_layers:
        base: Any = layer.get_base_layer()  # the module of the layer's experts
        first: Any = layer.lora_A[adapter]
        second: Any = layer.lora_B[adapter]
        second.weight = nn.Parameter(second.weight.data.unflatten(1, (-1, layer.num_experts)))
        if base.num_experts < layer.num_experts:  # peft has seen all (`pretend_full_expert_shapes`), this rank has some
            part = process_group.part_of(base.get_parameter(layer.parameter_name))
            for key, factor in (("lora_A", first), ("lora_B", second)):
                factor_name = f"{name}.{key}.{adapter}.weight"
                rank_part = process_group.take_part(factor_name, factor.weight.data, *part)
                factor.weight = mark_as_divided(nn.Parameter(rank_part.clone()), base.expert_group)
            layer.num_experts = base.num_experts
        layer.__class__ = ExpertLora
        # `_expert_products` looks it up by the matrix's name: a layer has up to two with LoRA.
        base.__dict__.setdefault("lora", {})[layer.parameter_name] = (layer, adapter)


def _sorted_forward(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Return the weighted sum of the outputs of each token's experts, [T, H]. `self`: the module of a layer's experts,
    or of this rank's; `hidden_states`: [T, H]; `top_k_index`: the chosen among all experts, [T, K], ~n for a dropped
    choice of expert n; `top_k_weights`: [T, K], 0 for a dropped choice.
    """
    choices, num_local = top_k_index.size(-1), self.num_experts
    compute_elsewhere = getattr(self, "compute_elsewhere", None)  # with parallel.expert; see layouts/experts.py
    if compute_elsewhere is None:
        # Dropped choices are computed too: skipping them would make the host wait for the number of the others.
        top_k_index = torch.where(top_k_index < 0, ~top_k_index, top_k_index)
    chosen, order = top_k_index.reshape(-1).sort(stable=True)
    token_index = order // choices
    # No variable holds `hidden_states[token]`, so that it is freed as soon as it is copied.
    if compute_elsewhere is None:
        computed = compute_experts(self, hidden_states[token_index], Groups(count_choices(chosen, num_local)), chosen)
    else:
        computed = compute_elsewhere(self, hidden_states[token_index], chosen)
    weighted = computed[order.argsort()].view(-1, choices, computed.size(-1)) * top_k_weights.unsqueeze(-1)
    return weighted.sum(dim=1).to(hidden_states.dtype)


def count_choices(chosen: torch.Tensor, number: int) -> torch.Tensor:
    """Return how often each of `number` experts is chosen; not by `bincount`, for which the host waits for a GPU."""
    return chosen.new_zeros(number).scatter_add_(0, chosen, torch.ones_like(chosen))


class Groups:
    """The number of rows of each expert, in rows that are sorted by experts."""

    def __init__(self, counts: torch.Tensor) -> None:
        self._counts = counts
        self.ends = counts.cumsum(0).to(torch.int32)

    @cached_property
    def sizes(self) -> list[int]:
        """The numbers of rows as ints; the first use waits for the device."""
        return self._counts.tolist()


def compute_experts(self: Any, rows: torch.Tensor, groups: Groups, expert: torch.Tensor) -> torch.Tensor:
    """Return the outputs [N, H] of a layer's experts, whose module is `self`, for rows [N, H] that are sorted by their
    experts; `groups`: how many rows each expert has; `expert`: the expert of each row [N].
    """
    inner = _expert_products(self, "gate_up_proj" if self.has_gate else "up_proj", rows, groups, expert)
    inner = self._apply_gate(inner) if self.has_gate else self.act_fn(inner)
    outer = _expert_products(self, "down_proj", inner, groups, expert)
    return self.post_expert_norm(outer) if getattr(self, "has_post_expert_norm", False) else outer


def _expert_products(self: Any, name: str, rows: torch.Tensor, groups: Groups, expert: torch.Tensor) -> torch.Tensor:
    """Return the product of each row with its expert's matrix, plus LoRA and bias, [N, O]. `self`: the module of a
    layer's experts, as transformers hands it to a function of its interface; `name`: attribute of the matrices [E, O,
    I], or [E, I, O] where they are transposed; `rows`: [N, I], sorted by their experts; `groups`: how many rows each
    expert has; `expert`: the expert of each row [N].
    """
    matrices, transposed = getattr(self, name), self.is_transposed
    if hasattr(matrices, "quant_state"):
        products = _QuantizedProducts.apply(rows, matrices, groups, transposed)
    else:
        products = _grouped_products(rows, matrices, groups, transposed)
    layer, adapter = getattr(self, "lora", {}).get(name, (None, ""))
    if layer is not None and not layer.disable_adapters:
        first = layer.lora_A[adapter].weight.unflatten(0, (layer.num_experts, -1))  # [E, rank, I]
        # [E, rank, O], contiguous: the kernel needs a unit stride in one axis, and multiples of 16 bytes in the other.
        second = layer.lora_B[adapter].weight.permute(2, 1, 0).contiguous()
        added = _grouped_products(_grouped_products(rows, first, groups, False), second, groups, True)
        products = products + added * layer.scaling[adapter]
    return (products + getattr(self, f"{name}_bias")[expert]) if self.has_bias else products


def _grouped_products(rows: torch.Tensor, matrices: torch.Tensor, groups: Groups, transposed: bool) -> torch.Tensor:
    """Return the products [N, O] of each group of rows [N, I] with its matrix, of [E, O, I], `transposed` [E, I, O].
    A matrix without a row takes part too: its gradient is 0, so that all ranks reduce the same gradients.
    """
    if _has_kernel(rows):
        by_input = matrices if transposed else matrices.transpose(1, 2)  # [E, I, O]
        return functional.grouped_mm(rows, by_input, offs=groups.ends)
    by_output = matrices.transpose(1, 2) if transposed else matrices  # [E, O, I]
    parts = zip(rows.split(groups.sizes), by_output.unbind(), strict=True)
    return torch.cat([functional.linear(part, matrix) for part, matrix in parts])


def _has_kernel(rows: torch.Tensor) -> bool:
    """Whether PyTorch's grouped product computes such rows: on GPUs in bf16, if there are any."""
    return rows.is_cuda and rows.dtype is torch.bfloat16 and len(rows) > 0


ALL_EXPERTS_FUNCTIONS.register(SORTED, _sorted_forward)
