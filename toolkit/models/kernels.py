"""Kernels that replace a model's layers: liger-kernel's, and feed-forward layers in pieces.

liger-kernel: Triton kernels for GPUs, written against its release 0.8.5.

Tiled MLP, of ALST (Bekman et al. 2025, https://arxiv.org/abs/2506.13996, section 3.1): feed-forward layers look at one
token alone, and their inner states are several times as wide as what goes in and comes out. So they take a row's tokens
in pieces; only what goes in is kept, and backward each piece is computed again. DeepSpeed 0.19.8's TiledMLP does so
too, but loses gradients of weights where the tokens cannot be divided by the pieces, or nothing before it has a
gradient.
"""

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from toolkit.config.schema import KernelsConfig, LossKernel, When
from toolkit.errors import ConfigError
from toolkit.messages import tr
from toolkit.models.attention import trains_on_gpu


def apply_liger(model: Any, kernels: KernelsConfig) -> str:
    """Replace a new model's norms, feed-forward layers and rotary positions by liger's, as `kernels.liger` says.

    Returns why nothing was replaced; "" if it was.
    """
    if kernels.loss is LossKernel.liger and (reason := _why_no_kernels()):
        raise ConfigError("kernels.loss = liger: {reason}", reason=reason)
    if kernels.liger is When.never:
        return tr("kernels.liger is never")
    reason = _why_no_kernels()
    if not reason:
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

        kind = model.config.model_type
        if kind not in MODEL_TYPE_TO_APPLY_LIGER_FN:
            reason = tr("liger-kernel does not know {kind} models", kind=kind)
    if reason and kernels.liger is When.always:
        raise ConfigError("kernels.liger = always: {reason}", reason=reason)
    if not reason:
        from liger_kernel.transformers import _apply_liger_kernel_to_instance

        # Losses are ours to compute (kernels.loss): they are summed over the global batch.
        _apply_liger_kernel_to_instance(model=model, cross_entropy=False, fused_linear_cross_entropy=False)
    return reason


def _why_no_kernels() -> str:
    if not trains_on_gpu():
        return tr("there is no GPU")
    if find_spec("liger_kernel") is None:
        return tr("the package liger-kernel is not installed (pip install liger-kernel)")
    return ""


Forward = Callable[[torch.Tensor], torch.Tensor]


def tile_mlp(model: nn.Module, pieces: int) -> None:
    """Let each decoder layer's feed-forward layer take its tokens in pieces. Layers of experts stay as they are.

    `pieces` are as many on every rank, whatever the rows: ZeRO-3 gathers weights for each of them.
    """
    found = [part for name, part in model.named_modules() if name.endswith(".mlp") and not hasattr(part, "experts")]
    if not found:
        raise ConfigError(
            "kernels.mlp_pieces = {pieces}: {model} has no feed-forward layers that could be divided. Set it to 1.",
            pieces=pieces,
            model=type(model).__name__,
        )
    for layer in found:
        layer.forward = partial(_forward, layer, layer.forward, pieces)


def _forward(layer: nn.Module, mlp_forward: Forward, pieces: int, states: torch.Tensor) -> torch.Tensor:
    if not torch.is_grad_enabled():
        return _in_pieces(mlp_forward, states, pieces)
    trained = [parameter for parameter in layer.parameters() if parameter.requires_grad]
    if trained and not states.requires_grad:  # or nothing would lead back to the weights
        states = states.detach().requires_grad_()
    tiled: torch.Tensor = _Tiled.apply(states, mlp_forward, pieces, trained)
    return tiled


def _in_pieces(mlp_forward: Forward, states: torch.Tensor, pieces: int) -> torch.Tensor:
    """Return `mlp_forward` of the states [B, S, H], or [tokens, H], a piece of the tokens at a time."""
    flat = states.flatten(0, -2)
    return torch.cat([mlp_forward(piece) for piece in flat.tensor_split(pieces)]).view(states.shape)


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, states: torch.Tensor, mlp_forward: Forward, pieces: int, trained: list[nn.Parameter]
    ) -> torch.Tensor:
        ctx.save_for_backward(states)
        ctx.given = mlp_forward, pieces, trained
        return _in_pieces(mlp_forward, states, pieces)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        mlp_forward, pieces, trained = ctx.given
        [states] = ctx.saved_tensors
        flat, outer = states.detach().flatten(0, -2), gradients[0].flatten(0, -2)
        found = []
        cut = zip(flat.tensor_split(pieces), outer.tensor_split(pieces), strict=True)
        for number, (piece, gradient) in enumerate(cut, start=1):
            for parameter in trained:  # ZeRO hands a gradient on when the last piece is in it (deepspeed 0.19.8)
                parameter.ds_grad_is_ready = number == pieces
            piece = piece.clone().requires_grad_()
            with torch.enable_grad():
                output = mlp_forward(piece)
            torch.autograd.backward(output, gradient)
            found.append(piece.grad)
        return torch.cat(found).view(states.shape), None, None, None
