"""What changes a model's layers while it is trained.

- Tiled MLP of ALST (Bekman et al. 2025, https://arxiv.org/abs/2506.13996, section 3.1): feed-forward layers take tokens
  in pieces and compute each again backward. DeepSpeed 0.19.8's TiledMLP loses gradients of weights where the pieces do
  not divide the tokens, or nothing before it has a gradient.
- NEFTune: noise on the embeddings of training rows (Jain et al., 2023, arXiv 2310.05914).

S tokens, H hidden width.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.neftune import neftune_post_forward_hook

from toolkit.messages import ConfigError

Forward = Callable[[torch.Tensor], torch.Tensor]


def tile_mlp(model: nn.Module, pieces: int) -> None:
    """Make feed-forward layers, but not experts, process their tokens in `pieces`; the same number on all ranks, as
    ZeRO-3 gathers the weights for each piece.
    """
    mlps = [part for name, part in model.named_modules() if name.endswith(".mlp") and not hasattr(part, "experts")]
    if not mlps:
        raise ConfigError(
            "kernels.mlp_pieces = {pieces}: {model} has no feed-forward layers that could be divided. Set it to 1.",
            pieces=pieces,
            model=type(model).__name__,
        )
    for layer in mlps:
        layer.forward = partial(_tiled_forward, layer, layer.forward, pieces)


def _tiled_forward(layer: nn.Module, mlp_forward: Forward, pieces: int, states: torch.Tensor) -> torch.Tensor:
    """Stand in for the forward pass of a feed-forward layer, `mlp_forward`: [..., H] to [..., H]."""
    trained = [parameter for parameter in layer.parameters() if parameter.requires_grad]
    if trained and not states.requires_grad:  # else autograd would not call `_Tiled.backward`
        states = states.detach().requires_grad_()
    tiled: torch.Tensor = _Tiled.apply(states, mlp_forward, pieces, trained)
    return tiled


class _Tiled(torch.autograd.Function):
    """A feed-forward layer applied to its tokens in pieces, whose activations the backward pass computes again."""

    @staticmethod
    def forward(
        ctx: Any, states: torch.Tensor, mlp_forward: Forward, pieces: int, trained: list[nn.Parameter]
    ) -> torch.Tensor:
        ctx.save_for_backward(states)
        ctx.settings = mlp_forward, pieces, trained
        flat = states.flatten(0, -2)  # [tokens, H]
        return torch.cat([mlp_forward(piece) for piece in flat.tensor_split(pieces)]).view(states.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        mlp_forward, pieces, trained = ctx.settings
        [states] = ctx.saved_tensors
        flat, output_gradient = states.detach().flatten(0, -2), gradients[0].flatten(0, -2)
        state_gradients = []
        in_pieces = zip(flat.tensor_split(pieces), output_gradient.tensor_split(pieces), strict=True)
        for number, (piece, gradient) in enumerate(in_pieces, start=1):
            for parameter in trained:  # only with the last piece ZeRO may reduce the gradient (deepspeed 0.19.8)
                parameter.ds_grad_is_ready = number == pieces
            piece = piece.clone().requires_grad_()
            with torch.enable_grad():
                output = mlp_forward(piece)
            torch.autograd.backward(output, gradient)
            state_gradients.append(piece.grad)
        return torch.cat(state_gradients).view(states.shape), None, None, None


def add_neftune(model: PreTrainedModel, alpha: float) -> None:
    """Add uniform noise, up to alpha / sqrt(S x H), to the input embedding in training mode: transformers' own hook
    (5.23). It follows from the rank's random state, as dropout does, so that a resumed run draws the same.
    """
    embedding = model.get_input_embeddings()
    embedding.neftune_noise_alpha = alpha
    embedding.register_forward_hook(neftune_post_forward_hook)
