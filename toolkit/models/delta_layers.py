"""Layers of the gated delta rule (Qwen3-Next, Qwen3.5, OLMo Hybrid) in packed rows: their state begins anew with each
sample, by the kernels of flash-linear-attention and causal-conv1d. transformers (5.23) raises an error without these.
"""

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from toolkit.models.record import record_of

_CLASS = "GatedDeltaNet"
"""How the names of transformers' classes of such layers end."""


def pack_delta_layers(model: PreTrainedModel) -> None:
    """Let the layers of the gated delta rule, if there are any, compute each sample of packed rows by itself."""
    layers = [part for part in model.modules() if type(part).__name__.endswith(_CLASS)]
    for layer in layers:
        layer.register_forward_pre_hook(_join_rows, with_kwargs=True)
        layer.register_forward_hook(_split_rows, with_kwargs=True)
    record_of(model).has_delta_layers = bool(layers)


def _join_rows(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a layer's arguments with its B rows of S tokens, `hidden_states` [B, S, H], joined to one, as fla's kernel
    takes bounds for one row alone; with `seq_idx`, the number of each token's sample, int32 [1, B x S]; and `num_rows`,
    B, for `_split_rows`. A hook before the forward pass; rows that are not packed stay as they are.
    """
    bounds, states = kwargs.get("cu_seq_lens_q"), kwargs["hidden_states"]
    if bounds is None:
        return args, kwargs
    tokens = torch.arange(states.size(0) * states.size(1), device=states.device)
    numbers = torch.bucketize(tokens, bounds[1:].to(tokens), right=True)
    joined = {"hidden_states": states.flatten(0, 1)[None], "seq_idx": numbers.int()[None], "num_rows": len(states)}
    return args, kwargs | joined


def _split_rows(_: nn.Module, __: tuple[Any, ...], kwargs: dict[str, Any], output: torch.Tensor) -> torch.Tensor:
    """Return a layer's output as rows again, [B, S, H]: a hook after its forward pass."""
    return output.unflatten(1, (kwargs["num_rows"], -1))[0] if "num_rows" in kwargs else output
