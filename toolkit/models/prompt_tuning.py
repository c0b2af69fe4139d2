"""P-Tuning v2 and prompt tuning.

P-Tuning v2 prefixes, in the official layout: learned keys and values that stand before every layer's own.

Liu et al. 2021, https://arxiv.org/abs/2110.07602. P prefix length, L layers, W = 2 * L * width of one layer's
keys.

The prefix becomes part of the model, and every forward pass begins with it. As in the ChatGLM repositories, and unlike
peft's prefix tuning, positions of the tokens begin at 0 after the prefix.

Prompt tuning: learned embeddings stand before the first token. Equal to peft's PROMPT_TUNING, whose files it shares.

Lester et al. 2021, https://arxiv.org/abs/2104.08691. P learned embeddings, H hidden width.
"""

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache

from toolkit.models.lora import arguments_by_name, decoder_layers, mask_and_positions, num_cached

PREFIX = "transformer.prefix_encoder."
"""What the names of its tensors begin with in official checkpoints."""


class PrefixEncoder(nn.Module):
    """The prefix of one model. Parameters carry the official names (`embedding`, `trans.0`, `trans.2`).

    Args:
        num_tokens: P.
        num_layers: L.
        num_heads: heads of the keys (groups, where heads share them).
        head_size: width of a head.
        embedding_size: width of the embedding under `projection_size`.
        projection_size: width of the MLP between the embedding and the keys; 0: no MLP, the embedding is `[P, W]`.
        dropout: of keys and values in training; the original's is 0.1.
    """

    def __init__(
        self,
        num_tokens: int,
        num_layers: int,
        num_heads: int,
        head_size: int,
        embedding_size: int = 0,
        projection_size: int = 0,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.dropout = dropout
        self.num_tokens, self.num_layers = num_tokens, num_layers
        self.num_heads, self.head_size = num_heads, head_size
        width = 2 * num_layers * num_heads * head_size
        self.trans: nn.Module | None = None
        if projection_size:
            self.embedding = nn.Embedding(num_tokens, embedding_size)
            self.trans = nn.Sequential(
                nn.Linear(embedding_size, projection_size), nn.Tanh(), nn.Linear(projection_size, width)
            )
        else:
            self.embedding = nn.Embedding(num_tokens, width)

    def forward(self) -> torch.Tensor:
        """Return keys and values of all layers, [2 * L, heads, P, head_size]."""
        places = torch.arange(self.num_tokens, device=self.embedding.weight.device)
        states = self.embedding(places)  # looked up, so that ZeRO-3 fetches it
        if self.trans is not None:
            states = self.trans(states)  # [P, W]
        states = states.view(self.num_tokens, 2 * self.num_layers, self.num_heads, self.head_size)
        return states.permute(1, 2, 0, 3)

    def states(self, batch_size: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return each layer's keys and values for so many rows, [B, heads, P, head_size] each.

        The keys are not rotated. Positions of the tokens that follow start at 0, not at P; a `[B, S]` attention mask
        gets P ones in front.
        """
        states = self()[:, None].expand(-1, batch_size, -1, -1, -1)
        states = functional.dropout(states, self.dropout, self.training)  # of each row for itself, as the original's
        return [(states[2 * layer], states[2 * layer + 1]) for layer in range(self.num_layers)]


def prefix_for(model: PreTrainedModel, num_tokens: int, projection: bool, dropout: float = 0.0) -> PrefixEncoder:
    """Return an untrained prefix with the official sizes for a ChatGLM model."""
    config = model.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    width = 2 * config.num_hidden_layers * heads * head_size
    return PrefixEncoder(
        num_tokens,
        config.num_hidden_layers,
        heads,
        head_size,
        # ChatGLM-6B embeds in the hidden width, its successors in the full one.
        embedding_size=config.hidden_size if config.model_type == "chatglm" else width,
        projection_size=config.hidden_size if projection else 0,
        dropout=dropout,
    )


class FixedCache(DynamicCache):
    """Keys and values that stand before a forward pass's own, which are not kept: the pass can be repeated."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the prefix and the new states of a layer, [B, heads, P + S, head_size] each."""
        own = self.layers[layer_idx]
        return torch.cat((own.keys, key_states), dim=-2), torch.cat((own.values, value_states), dim=-2)


def attach_prefix(model: PreTrainedModel, encoder: PrefixEncoder) -> None:
    """Let every forward pass of a model begin with a prefix.

    The model's class stays; the prefix becomes its submodule `prefix_encoder`.
    """
    model.prefix_encoder = encoder
    model.register_forward_pre_hook(partial(_begin_with_prefix, encoder), with_kwargs=True)
    for layer in decoder_layers(model):  # transformers would drop the cache where activations are recomputed
        layer._can_checkpoint_with_cache = True  # type: ignore[assignment]


def _begin_with_prefix(
    prefix: PrefixEncoder, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    kwargs = arguments_by_name(model, args, kwargs)
    ids = kwargs["input_ids"] if kwargs.get("inputs_embeds") is None else kwargs["inputs_embeds"]
    cache: Cache | None = kwargs.get("past_key_values")
    if not getattr(model, "builds_positions", False):  # to ChatGLM-6B, what precedes the mask is a prefix
        mask, kwargs["position_ids"] = mask_and_positions(kwargs, ids, prefix.num_tokens)
        kwargs["attention_mask"] = mask
    if not num_cached(kwargs):
        if cache is None:
            cache = DynamicCache() if kwargs.get("use_cache") else FixedCache()
        for layer, (keys, values) in enumerate(prefix.states(len(ids))):
            DynamicCache.update(cache, keys, values, layer)
    kwargs["past_key_values"] = cache
    return (), kwargs


class SoftPrompt(nn.Module):
    """The learned embeddings.

    `values`, [P, H], are where they begin.
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

    The model's class stays; the prompt becomes its submodule `soft_prompt`.
    """
    model.soft_prompt = prompt
    model.register_forward_pre_hook(partial(_make_room, prompt), with_kwargs=True)
    model.get_input_embeddings().register_forward_hook(lambda _, __, embedded: _fill(prompt, embedded))
    model.register_forward_hook(partial(_leave_out, prompt), with_kwargs=True)


def _make_room(
    prompt: SoftPrompt, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    kwargs = arguments_by_name(model, args, kwargs)
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
