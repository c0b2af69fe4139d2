"""Prompt tuning: learned embeddings stand before the first token. Equal to peft's PROMPT_TUNING, whose files it shares.

Lester et al. 2021, https://arxiv.org/abs/2104.08691. P learned embeddings, H hidden width.
"""

from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from toolkit.models.tuning.layers import by_name, mask_and_positions, num_cached


class SoftPrompt(nn.Module):
    """The learned embeddings.

    Args:
        values: [P, H], where they begin.
    """

    def __init__(self, values: torch.Tensor) -> None:
        super().__init__()
        self.num_tokens = len(values)
        self.embedding = nn.Embedding.from_pretrained(values, freeze=False)
        self.is_due = False
        """Whether the tokens that are embedded next begin with places for the prompt."""

    def forward(self, rows: int) -> torch.Tensor:
        """Return the embeddings for so many rows, [rows, P, H]."""
        places = torch.arange(self.num_tokens, device=self.embedding.weight.device)
        return self.embedding(places).expand(rows, -1, -1)


def attach_prompt(model: PreTrainedModel, prompt: SoftPrompt) -> None:
    """Let every forward pass of a model begin with learned embeddings, and its logits with the first token's.

    Args:
        model: its class stays; the prompt becomes its submodule `soft_prompt`.
        prompt: of the model's width.
    """
    model.soft_prompt = prompt
    model.register_forward_pre_hook(partial(_make_room, prompt), with_kwargs=True)
    model.get_input_embeddings().register_forward_hook(lambda _, __, embedded: _fill(prompt, embedded))
    model.register_forward_hook(partial(_leave_out, prompt), with_kwargs=True)


def _make_room(
    prompt: SoftPrompt, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    kwargs = by_name(model, args, kwargs)
    ids = kwargs["input_ids"]
    kwargs["attention_mask"], positions = mask_and_positions(kwargs, ids, prompt.num_tokens)
    positions = positions + prompt.num_tokens
    prompt.is_due = not num_cached(kwargs)
    if prompt.is_due:
        kwargs["input_ids"] = torch.cat((ids.new_zeros(len(ids), prompt.num_tokens), ids), dim=1)
        own = torch.arange(prompt.num_tokens, device=ids.device).expand(len(positions), -1)
        positions = torch.cat((own, positions), dim=1)
    kwargs["position_ids"] = positions
    return (), kwargs


def _fill(prompt: SoftPrompt, embedded: torch.Tensor) -> torch.Tensor:
    """Put the prompt where `_make_room` left room for it."""
    if not prompt.is_due:
        return embedded
    prompt.is_due = False
    return torch.cat((prompt(len(embedded)).to(embedded.dtype), embedded[:, prompt.num_tokens :]), dim=1)


def _leave_out(prompt: SoftPrompt, _: nn.Module, __: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """Leave out the logits of the prompt."""
    if output.logits.size(1) == kwargs["attention_mask"].size(1) > 1:
        output.logits = output.logits[:, prompt.num_tokens :]
    return output
