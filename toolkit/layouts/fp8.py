"""Linear layers that multiply in FP8 while a model trains (`precision.fp8`).

Both matrices of a product are scaled into the range of an 8-bit type, by the largest number that each has at this
moment, and `torch._scaled_mm` sums in higher precision. Weights stay parameters in bf16, and an evaluation multiplies
in bf16: what is saved, exported and evaluated is a model like any other.

Scalings are torchao's (0.18, torchao/float8/config.py) by name, types and numbers. Its layer itself keeps a view of the
weight for the backward pass, by which ZeRO-3 would hold all layers' weights at once; this one keeps the parameter.

T tokens, I and O the widths that go in and come out.
"""

from collections import Counter
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import nn
from torch.nn import functional

from toolkit.config.schema import Fp8
from toolkit.distributed import process_group
from toolkit.distributed.accelerator import trains_on_gpu
from toolkit.messages import ConfigError, clauses, say, tr, warn
from toolkit.models import experts, structure
from toolkit.plan.outline import is_routed

MULTIPLE = 16
"""What the sizes of the matrices must be divisible by (torch 2.13, `torch._scaled_mm` on GPUs)."""
_LEAST = 1e-12  # in place of 0 where the largest number is 0
_ROUTERS, _INDEXER = {"gate", "router"}, "indexer"
"""Names of modules whose outputs choose: experts, or the tokens that are attended to (GLM-MoE-DSA, DeepSeek-V3.2)."""


def _scaled(
    matrix: torch.Tensor, axis: int | None, dtype: torch.dtype, power: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a matrix scaled to the range of an 8-bit type, and the factor that undoes the scale: one number, or one
    for each slice along `axis`. `power`: scales are rounded down to powers of two.
    """
    largest = matrix.abs().amax() if axis is None else matrix.abs().amax(axis, keepdim=True)
    type_max = torch.finfo(dtype).max
    scale = (type_max / largest.double().clamp(min=_LEAST)).float()
    if power:
        scale = scale.log2().floor().exp2()
    in_range = matrix.to(torch.float32, copy=True).mul_(scale).clamp_(-type_max, type_max)
    return in_range.to(dtype), scale.reciprocal()


def _product(
    left: torch.Tensor, right: torch.Tensor, fp8: Fp8, *, gradient: bool = False, by_column: bool = True
) -> torch.Tensor:
    """Return the product in bf16 of two matrices, multiplied in FP8. `gradient`: whether `left` is a gradient, which
    tensorwise takes a wider range; `by_column`: unless tensorwise, whether each column of `right` has its own scale.
    """
    by_row = fp8 is not Fp8.tensorwise
    by_column = by_column and by_row
    dtype = torch.float8_e5m2 if gradient and not by_row else torch.float8_e4m3fn
    first, undo_first = _scaled(left, -1 if by_row else None, dtype, power=by_row)
    second, undo_second = _scaled(right, 0 if by_column else None, torch.float8_e4m3fn, power=by_row)
    if by_row and not by_column:  # the kernel takes a factor for each column all the same
        undo_second = undo_second.expand(1, right.shape[1]).contiguous()
    # The kernels want rows on the left and columns on the right, each in one piece.
    first, second = first.contiguous(), second.t().contiguous().t()
    return torch._scaled_mm(
        first, second, scale_a=undo_first, scale_b=undo_second, out_dtype=left.dtype, use_fast_accum=not gradient
    )


class _Multiply(torch.autograd.Function):
    """The product of states [T, I] and a weight [O, I], [T, O], and its gradients, multiplied in FP8."""

    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, weight: torch.Tensor, fp8: Fp8) -> torch.Tensor:
        # The parameter itself, which ZeRO-3 lets go, and gathers again before the backward pass.
        ctx.save_for_backward(states if ctx.needs_input_grad[1] else None, weight)
        ctx.fp8 = fp8
        return _product(states, weight.t(), fp8)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,), (states, weight), fp8 = gradients, ctx.saved_tensors, ctx.fp8
        of_states = of_weight = None  # the gradients by them
        if ctx.needs_input_grad[0]:
            of_states = _product(gradient, weight, fp8, gradient=True, by_column=fp8 is Fp8.rowwise)
        # torchao's name: the gradient of the weight is in high precision.
        if ctx.needs_input_grad[1] and fp8 is Fp8.rowwise_with_gw_hp:
            of_weight = gradient.t() @ states
        elif ctx.needs_input_grad[1]:
            padding = (0, 0, 0, -len(states) % MULTIPLE)  # the kernel needs multiples; rows of zeros add nothing
            gradient, states = functional.pad(gradient, padding), functional.pad(states, padding)
            of_weight = _product(gradient.t(), states, fp8, gradient=True)
        return of_states, of_weight, None


class Fp8Linear(nn.Linear):
    """A linear layer that multiplies in FP8 in training; a layer becomes one by its class and `fp8`, see `convert`."""

    fp8: Fp8

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[…, I] to […, O]."""
        if not self.training:
            return super().forward(input)
        output = _Multiply.apply(input.flatten(0, -2), self.weight, self.fp8).unflatten(0, input.shape[:-1])
        return output if self.bias is None else output + self.bias


def check_device(fp8: Fp8) -> None:
    """Try a small layer on every rank's device, before a model is read; ConfigError if one cannot. A collective."""
    if fp8 is Fp8.none:
        return
    reason, device = "", torch.device(get_accelerator().current_device_name())
    try:
        layer = _converted(nn.Linear(MULTIPLE, MULTIPLE, device=device, dtype=torch.bfloat16), fp8)
        states = torch.ones(MULTIPLE, MULTIPLE, device=device, dtype=torch.bfloat16, requires_grad=True)
        float(torch.autograd.grad(layer(states).sum(), [states, layer.weight])[1].sum())  # waits for the GPU
    except (RuntimeError, AttributeError) as error:
        reason = str(error).partition("\n")[0]
    if reasons := sorted({text for text in process_group.gather(reason) if text}):
        raise ConfigError(
            "precision.fp8 = {value} needs GPUs that multiply so, of compute capability 8.9 or higher (L40S, RTX 4090, "
            "H100, H200, B200), and PyTorch says: {reasons}. Use {remedy}.",
            value=fp8.value,
            reasons=clauses(reasons),
            remedy="precision=bf16" if fp8 is Fp8.tensorwise else "precision.fp8=tensorwise, precision=bf16",
        )


def convert(model: Any, fp8: Fp8, compiles: bool = True) -> None:
    """Let the linear layers of a model's decoder multiply in FP8, and say how many do, and what does not: LoRA's
    additions, routers, experts, indexers, and sizes that do not divide. Names, parameters and hooks stay. ConfigError
    if no layer can. `compiles`: whether torch.compile will make one kernel of scaling and rounding.
    """
    if fp8 is Fp8.none:
        return
    left_out: Counter[str] = Counter()
    count = 0
    for name, layer in model.get_submodule(structure.decoder_layers_name(model)).named_modules():
        path = name.split(".")
        if type(layer) is not nn.Linear:
            continue
        if ".lora_" in name:
            left_out[tr("LoRA's matrices")] += 1
        elif is_routed(f".{name}.") or not _ROUTERS.isdisjoint(path):
            left_out[tr("routers and experts")] += 1
        elif _INDEXER in path:
            left_out[tr("indexers of sparse attention")] += 1
        elif layer.in_features % MULTIPLE or layer.out_features % MULTIPLE:
            left_out[tr("sizes that are no multiples of 16")] += 1
        else:
            _converted(layer, fp8)
            count += 1
    if stacks := len(experts.expert_matrix_names(model)):  # parameters, and so no modules of the loop above
        left_out[tr("routers and experts")] += stacks
    if not count:
        raise ConfigError(tr("precision.fp8: no linear layer of this model can multiply in FP8. Use precision=bf16."))
    say(
        "FP8 ({fp8}): {count} linear layers multiply in it while training. In bf16 stay embedding, output layer{left}.",
        fp8=fp8.value,
        count=count,
        left="".join(tr(", {what} ({number})", what=what, number=number) for what, number in left_out.items()),
    )
    if not trains_on_gpu():
        say("FP8 on CPUs is for trying it out: it is much slower than bf16.")
    elif not compiles:
        warn("FP8 without torch.compile: scaling takes about what the products save. Set compile=inductor.")


def _converted(layer: nn.Linear, fp8: Fp8) -> nn.Linear:
    """Return a layer, which has become an `Fp8Linear`."""
    layer.__class__ = Fp8Linear
    assert isinstance(layer, Fp8Linear)
    layer.fp8 = fp8
    return layer
