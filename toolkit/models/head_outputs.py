"""What objectives take of a model besides the losses of tokens: scores of tokens, states at tokens, hidden states.

B batch, S sequence, T chosen tokens, H hidden width, V vocabulary, as in loss.py.
"""

from collections.abc import Callable
from typing import Any

import torch

from toolkit.models.loss import LossPath, as_rows, forward_arguments, loss_head, on_device, output_layer
from toolkit.models.loss_kernels import Scores
from toolkit.sample_types import Batch


def scores(engine: Any, batch: Batch, indices: torch.Tensor) -> Scores:
    """Run forward on a batch from `on_device`; return the logits, or their factors, of the tokens at `indices` [T]."""
    head = loss_head(engine)
    path = head.path(engine)
    if path is not LossPath.losses:
        return Scores(head.picked_logits(engine, batch, indices, path))
    layer = output_layer(engine)
    states = head.run_with(engine, batch, indices, as_rows).flatten(0, 1)
    return Scores(states, layer.weight, layer.bias)


def states_at(engine: Any, batch: Batch, indices: torch.Tensor) -> torch.Tensor:
    """Run forward on a batch from `on_device`; return the output layer's inputs [T, H] at `indices` [T] of
    the B x S tokens. The layer's weight takes part with a factor of 0, so that it has a gradient, for which ZeRO waits.
    """
    layer = output_layer(engine)

    def with_weight(states: torch.Tensor) -> torch.Tensor:
        return as_rows(states + 0 * layer.weight.flatten()[0])

    # `run_with` takes the state before each index, which predicts the token there.
    return loss_head(engine).run_with(engine, batch, indices + 1, with_weight).flatten(0, 1)


def total(engine: Any, batch: Batch, indices: torch.Tensor, compute: Callable[[Scores], torch.Tensor]) -> torch.Tensor:
    """Run forward and return the scalar that `compute` returns for the scores of T tokens. If possible it is called
    inside the output layer's forward pass, while ZeRO-3 has gathered the layer's weight.
    """
    head = loss_head(engine)
    if head.path(engine) is not LossPath.losses:
        return compute(scores(engine, batch, indices))
    layer = output_layer(engine)

    def total_of(states: torch.Tensor) -> torch.Tensor:
        return compute(Scores(states, layer.weight, layer.bias))[None, None, None]  # as `run_with` needs

    return head.run_with(engine, batch, indices, total_of).sum()


def hidden_states(model: Any, batch: Batch) -> torch.Tensor:
    """Run a transformers model without its output layer and return the states `[B, S, H]`. The batch of a later
    pipeline stage has `inputs_embeds`; one without `segment_ids` has no padding, as that of a probe.
    """
    inputs = on_device(model, batch) if "labels" in batch else batch  # a probe's is on the device already
    output = model.base_model(**forward_arguments(model, inputs))
    states: torch.Tensor = output if isinstance(output, torch.Tensor) else output.last_hidden_state
    return states
