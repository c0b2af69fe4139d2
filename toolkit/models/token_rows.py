"""Rows of an embedding that LoRA trains (peft's `trainable_token_indices`), computed apart from the frozen ones.

peft (0.21) copies the whole matrix in each forward pass, and asks for its gradient; and it reads weights past their
layer, where ZeRO-3 has not gathered them. The values are the same.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any
from unittest.mock import patch

import torch
from peft.tuners.trainable_tokens import TrainableTokensLayer
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel

from toolkit.models import weights


class _Rows(nn.ParameterDict):
    """The trained rows of each adapter. Called as a module, so that ZeRO-3 gathers them."""

    __call__ = nn.Module.__call__  # a ParameterDict's own raises

    def forward(self, numbers: torch.Tensor, adapter: str) -> torch.Tensor:
        """Return rows by their numbers among those of an adapter."""
        return functional.embedding(numbers, self[adapter])


def compute_apart(model: PreTrainedModel) -> None:
    """Let the layers with trained rows of a model compute these apart from the frozen ones."""
    shared: dict[int, _Rows] = {}
    for layer in model.modules():
        if isinstance(layer, TrainableTokensLayer):
            rows = layer.trainable_tokens_delta  # a tied layer has those of the other
            layer.trainable_tokens_delta = shared.setdefault(id(rows), _Rows(rows))
            vars(layer)["forward_adapters"] = MethodType(_forward, layer)  # mypy lets no method be assigned to


def _forward(layer: Any, inputs: torch.Tensor, active_adapters: list[str], *args: Any, **options: Any) -> torch.Tensor:
    """Return what `layer`, an embedding or an output layer, gives with its trained rows in the place of its own."""
    output: torch.Tensor = layer.base_layer(inputs, *args, **options)
    if layer.disable_adapters or layer.merged or not active_adapters:
        return output
    (adapter,) = active_adapters
    ids = torch.tensor(layer.token_indices[adapter], device=output.device)  # [K], of the trained rows
    if not isinstance(layer.base_layer, nn.Embedding):  # the output layer: replace the trained tokens' logits
        rows = layer.trainable_tokens_delta(torch.arange(len(ids), device=output.device), adapter).to(inputs.dtype)
        return output.index_copy(-1, ids, functional.linear(inputs, rows).to(output.dtype))
    is_row = inputs[..., None] == ids  # [B, S, K]
    # Each token's number among the K rows; 0 for a token that has none, whose row `where` drops below.
    rows = layer.trainable_tokens_delta(is_row.byte().argmax(dim=-1), adapter).to(output.dtype)
    scale = layer._get_embed_scale()  # peft's (0.21): the factor of embeddings such as Gemma's, None without one
    rows = rows if scale is None else rows * scale.to(rows.dtype)
    return torch.where(is_row.any(dim=-1, keepdim=True), rows, output)


@contextmanager
def gathered_on_any_device() -> Iterator[None]:
    """Let peft (0.21) take the initial rows from partitioned weights on all devices, not on CUDA's alone."""

    def collect(_: Any, weight: torch.Tensor, rows: list[int], __: int) -> torch.Tensor:
        with weights.full_params([weight]):
            return weight[rows].detach().clone()

    with patch.object(TrainableTokensLayer, "_collect_token_weights", collect):
        yield
