"""P-Tuning v2 and prompt tuning: what is learned stands before the tokens. P learned places, H hidden width.

P-Tuning v2 prefixes, in the official layout: learned keys and values before every layer's own. Liu et al. 2021,
https://arxiv.org/abs/2110.07602. L layers, W = 2 * L * width of one layer's keys. The prefix becomes part of the model,
and every forward pass begins with it. As in the ChatGLM repositories, and unlike peft's prefix tuning, positions of the
tokens begin at 0 after the prefix.

Prompt tuning: learned embeddings before the first token. Lester et al. 2021, https://arxiv.org/abs/2104.08691. Equal to
peft's PROMPT_TUNING, whose files it shares.
"""

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
    """The prefix of one model, with the official sizes and names (`embedding`, `trans.0`, `trans.2`).

    `num_tokens`: P; `projection`: whether an MLP stands between the embedding, else [P, W], and the keys; `dropout`: of
    keys and values in training; the original's is 0.1.
    """

    def __init__(self, config: Any, num_tokens: int, projection: bool, dropout: float) -> None:
        super().__init__()
        self.num_tokens, self.num_layers, self.dropout = num_tokens, config.num_hidden_layers, dropout
        self.num_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        self.head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        width, hidden = 2 * self.num_layers * self.num_heads * self.head_size, config.hidden_size
        self.trans: nn.Module | None = None
        if projection:
            # ChatGLM-6B embeds in the hidden width, its successors in the full one.
            embedded = hidden if config.model_type == "chatglm" else width
            self.embedding = nn.Embedding(num_tokens, embedded)
            self.trans = nn.Sequential(nn.Linear(embedded, hidden), nn.Tanh(), nn.Linear(hidden, width))
        else:
            self.embedding = nn.Embedding(num_tokens, width)

    def forward(self) -> torch.Tensor:
        """Return keys and values of all layers, [2 * L, heads, P, head_size]."""
        indices = torch.arange(self.num_tokens, device=self.embedding.weight.device)
        states = self.embedding(indices)  # looked up, so that ZeRO-3 fetches it
        if self.trans is not None:
            states = self.trans(states)  # [P, W]
        states = states.view(self.num_tokens, 2 * self.num_layers, self.num_heads, self.head_size)
        return states.permute(1, 2, 0, 3)

    def states(self, batch_size: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return each layer's keys, which are not rotated, and values, [B, heads, P, head_size] each."""
        states = self()[:, None].expand(-1, batch_size, -1, -1, -1)
        states = functional.dropout(states, self.dropout, self.training)  # of each row for itself, as the original's
        return [(states[2 * layer], states[2 * layer + 1]) for layer in range(self.num_layers)]

    def begin(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Put the prefix in front of a forward pass, before it."""
        kwargs = arguments_by_name(model, args, kwargs)
        ids = kwargs["input_ids"] if kwargs.get("inputs_embeds") is None else kwargs["inputs_embeds"]
        cache: Cache | None = kwargs.get("past_key_values")
        if not getattr(model, "builds_positions", False):  # to ChatGLM-6B, what precedes the mask is a prefix
            kwargs["attention_mask"], kwargs["position_ids"] = mask_and_positions(kwargs, ids, self.num_tokens)
        if not num_cached(kwargs):
            if cache is None:
                cache = DynamicCache() if kwargs.get("use_cache") else FixedCache()
            for layer, (keys, values) in enumerate(self.states(len(ids))):
                DynamicCache.update(cache, keys, values, layer)
        kwargs["past_key_values"] = cache
        return (), kwargs


class FixedCache(DynamicCache):
    """Keys and values that stand before a forward pass's own, which are not kept: the pass can be repeated."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the prefix and the new states of a layer, [B, heads, P + S, head_size] each."""
        own = self.layers[layer_idx]
        return torch.cat((own.keys, key_states), dim=-2), torch.cat((own.values, value_states), dim=-2)


def attach_prefix(model: PreTrainedModel, num_tokens: int, projection: bool, dropout: float) -> None:
    """Let every forward pass of a model begin with an untrained prefix, its submodule `prefix_encoder`."""
    model.prefix_encoder = prefix = PrefixEncoder(model.config, num_tokens, projection, dropout).to(model.dtype)
    model.register_forward_pre_hook(prefix.begin, with_kwargs=True)
    for layer in decoder_layers(model):  # transformers would drop the cache where activations are recomputed
        layer._can_checkpoint_with_cache = True  # type: ignore[assignment]


class SoftPrompt(nn.Module):
    """The learned embeddings, which begin as `values`, [P, H]."""

    def __init__(self, values: torch.Tensor) -> None:
        super().__init__()
        self.num_tokens = len(values)
        self.embedding = nn.Embedding.from_pretrained(values, freeze=False)
        self.is_due = False
        """Whether the tokens that are embedded next begin with places for the prompt."""

    def forward(self, rows: int) -> torch.Tensor:
        """Return the embeddings for so many rows, [rows, P, H]."""
        indices = torch.arange(self.num_tokens, device=self.embedding.weight.device)
        return self.embedding(indices).expand(rows, -1, -1)

    def make_room(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Put places for the prompt in front of a forward pass's tokens, before it."""
        kwargs = arguments_by_name(model, args, kwargs)
        ids = kwargs["input_ids"]
        kwargs["attention_mask"], positions = mask_and_positions(kwargs, ids, self.num_tokens)
        positions = positions + self.num_tokens
        self.is_due = not num_cached(kwargs)
        if self.is_due:
            kwargs["input_ids"] = torch.cat((ids.new_zeros(len(ids), self.num_tokens), ids), dim=1)
            own = torch.arange(self.num_tokens, device=ids.device).expand(len(positions), -1)
            positions = torch.cat((own, positions), dim=1)
        kwargs["position_ids"] = positions
        return (), kwargs

    def fill(self, _: nn.Module, __: tuple[Any, ...], embedded: torch.Tensor) -> torch.Tensor:
        """Put the prompt where `make_room` left room for it, after the input embedding."""
        if not self.is_due:
            return embedded
        self.is_due = False
        return torch.cat((self(len(embedded)).to(embedded.dtype), embedded[:, self.num_tokens :]), dim=1)

    def drop_logits(self, _: nn.Module, __: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Drop the logits of the prompt, after the forward pass."""
        if output.logits.size(1) == kwargs["attention_mask"].size(1) > 1:
            output.logits = output.logits[:, self.num_tokens :]
        return output


def attach_prompt(model: PreTrainedModel, prompt: SoftPrompt) -> None:
    """Let every forward pass of a model begin with learned embeddings, its submodule `soft_prompt`.

    Its logits begin with the first token's.
    """
    model.soft_prompt = prompt
    model.register_forward_pre_hook(prompt.make_room, with_kwargs=True)
    model.get_input_embeddings().register_forward_hook(prompt.fill)
    model.register_forward_hook(prompt.drop_logits, with_kwargs=True)
