"""P-Tuning v2: learned keys and values in front of each layer's; prompt tuning: learned embeddings before the input.

P-Tuning v2: unlike peft's, positions begin at 0 after the prefix. Liu et al. 2021, https://arxiv.org/abs/2110.07602.
Prompt tuning: Lester et al. 2021, https://arxiv.org/abs/2104.08691.

P learned tokens, L layers, H hidden width, W = 2 * L * width of one layer's keys.
"""

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import DynamicCache

from toolkit.config.schema import TuningConfig
from toolkit.distributed import process_group
from toolkit.messages import ConfigError, ModelError
from toolkit.models import weights
from toolkit.models.cache import CACHE, OLDER, arguments_by_name, cache_of, mask_and_positions, num_cached
from toolkit.models.record import record_of
from toolkit.models.structure import decoder_layers

_WITH_KEYS = {"full_attention", "sliding_attention", "chunked_attention"}
"""Values of `layer_types` (transformers 5.23) for layers of ordinary attention."""
PREFIX = "transformer.prefix_encoder."
"""What the names of its tensors begin with in official checkpoints."""


class PrefixEncoder(nn.Module):
    """The prefix of a model, with the official names: an embedding [P, W], or with `projection` one before an MLP."""

    def __init__(self, config: Any, num_tokens: int, projection: bool, dropout: float) -> None:
        super().__init__()
        self.num_tokens, self.num_layers, self.dropout = num_tokens, config.num_hidden_layers, dropout
        self.num_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        self.head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.tensor_size = 1
        """Number of tensor-parallel ranks, each of which has some of the heads."""
        width, hidden = 2 * self.num_layers * self.num_heads * self.head_size, config.hidden_size
        # With an MLP ChatGLM-6B's embedding is of width H, its successors' of width W.
        embedded = hidden if projection and config.model_type == "chatglm" else width
        self.embedding, self.trans = nn.Embedding(num_tokens, embedded), None
        if projection:
            self.trans = nn.Sequential(nn.Linear(embedded, hidden), nn.Tanh(), nn.Linear(hidden, width))

    def states(self, batch_size: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return each layer's prefix: keys, which are not rotated, and values, `[B, heads, P, head_size]`."""
        indices = torch.arange(self.num_tokens, device=self.embedding.weight.device)
        states = self.embedding(indices)  # by a forward pass, so that ZeRO-3 gathers the weight
        if self.trans is not None:
            states = self.trans(states)  # [P, W]
        states = states.view(self.num_tokens, 2 * self.num_layers, -1)
        if self.tensor_size > 1:
            from deepspeed.module_inject.layers import ScatterToTensorParallelRegion  # takes seconds to import

            sizes, group = [states.size(-1) // self.tensor_size] * self.tensor_size, process_group.tensor_group()
            states = ScatterToTensorParallelRegion.apply(group, states, sizes, torch.distributed.get_rank(group))
        states = states.unflatten(-1, (-1, self.head_size)).permute(1, 2, 0, 3)  # [2 x L, heads, P, head_size]
        states = states[:, None].expand(-1, batch_size, -1, -1, -1)
        # Each row has a dropout mask of its own, as in the original.
        states = functional.dropout(states, self.dropout, self.training)
        return [(states[2 * layer], states[2 * layer + 1]) for layer in range(self.num_layers)]

    def prepend_prefix(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[()], dict[str, Any]]:
        """Let the cache of a forward pass begin with the prefix: a hook before the model's forward pass.

        Return no positional arguments, and all by keyword: with a cache that holds P keys and values of each layer
        before those of the pass, and a mask [B, P + S] that shows them (ChatGLM-6B and parts of rows find them alone).
        """
        kwargs = arguments_by_name(model, args, kwargs)
        ids = kwargs["input_ids"] if kwargs.get("inputs_embeds") is None else kwargs["inputs_embeds"]
        cache = cache_of(kwargs)
        # ChatGLM-6B and parts of rows see from the number of keys that there is a prefix.
        if not getattr(model, "builds_positions", False) and not kwargs.get("in_parts"):
            first = record_of(model).first_position
            kwargs["attention_mask"], kwargs["position_ids"] = mask_and_positions(kwargs, ids, self.num_tokens, first)
        if not num_cached(kwargs):  # later passes of generation have the prefix in their cache
            if cache is None:
                cache = DynamicCache() if kwargs.get("use_cache") else FixedCache()
            for layer, (keys, values) in enumerate(self.states(len(ids))):
                DynamicCache.update(cache, keys, values, layer)  # FixedCache's own method stores nothing
        kwargs.pop(OLDER, None)  # newer models take both names, but not at once
        kwargs[CACHE] = cache
        return (), kwargs


class FixedCache(DynamicCache):
    """A cache that does not store a pass's own keys and values, so that the pass can be recomputed."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the prefix and the new states of a layer, [B, heads, P + S, head_size] each."""
        prefix = self.layers[layer_idx]
        return torch.cat((prefix.keys, key_states), dim=-2), torch.cat((prefix.values, value_states), dim=-2)


def attach_prefix(model: PreTrainedModel, num_tokens: int, projection: bool, dropout: float) -> None:
    """Let every forward pass of a model begin with an untrained prefix, its submodule `prefix_encoder`.

    Raises ModelError where not all layers take keys and values of one size.
    """
    _check_takes_prefix(model)
    prefix = PrefixEncoder(model.config.get_text_config(), num_tokens, projection, dropout).to(model.dtype)
    model.prefix_encoder = prefix
    model.register_forward_pre_hook(prefix.prepend_prefix, with_kwargs=True)
    for layer in decoder_layers(model):  # transformers (5.24) would drop the cache where activations are recomputed
        layer._can_checkpoint_with_cache = True  # type: ignore[assignment]


def _check_takes_prefix(model: PreTrainedModel) -> None:
    """Raise ModelError unless all layers have keys and values of one size, before which a prefix can stand."""
    text = model.config.get_text_config()
    misfits = (
        getattr(text, "kv_lora_rank", None),  # latent attention (DeepSeek-V3), whose keys are wider than its values
        not getattr(text, "num_attention_heads", None),  # no attention (Mamba)
        getattr(model, "_is_stateful", False),  # transformers' mark of models with recurrent layers
        getattr(text, "is_heterogeneous", False),  # layers of several sizes (Gemma 4)
        set(getattr(text, "layer_types", None) or ()) - _WITH_KEYS,
    )
    if any(misfits):
        raise ModelError(
            "tuning = ptuning_v2 cannot be with {architecture}, whose layers do not all have keys and values of one "
            "size. Use tuning=lora.",
            architecture=type(model).__name__,
        )


class SoftPrompt(nn.Module):
    """The learned embeddings, which begin as `values`, [P, H]."""

    def __init__(self, values: torch.Tensor) -> None:
        super().__init__()
        self.num_tokens = len(values)
        self.embedding = nn.Embedding.from_pretrained(values, freeze=False)
        self.is_due = False
        """Whether the rows that are embedded next begin with filler tokens, which the prompt replaces."""

    def reserve_prompt_tokens(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[()], dict[str, Any]]:
        """Put P filler tokens in front of each row, with mask and positions: a hook before the model's forward pass.

        Return no positional arguments, and all by keyword: `input_ids` [B, P + S] in the first pass. Later passes of
        generation, whose cache holds the prompt already, get the mask and the positions alone.
        """
        kwargs, first = arguments_by_name(model, args, kwargs), record_of(model).first_position
        ids = kwargs["input_ids"]
        if kwargs.get("in_parts"):  # parallel.sequence, whose attention takes their number in place of a longer mask
            positions, kwargs["learned"] = kwargs["position_ids"], self.num_tokens
        else:
            kwargs["attention_mask"], positions = mask_and_positions(kwargs, ids, self.num_tokens, first)
        positions = positions + self.num_tokens
        self.is_due = not num_cached(kwargs)
        if self.is_due:
            kwargs["input_ids"] = torch.cat((ids.new_zeros(len(ids), self.num_tokens), ids), dim=1)
            prompt_positions = (torch.arange(self.num_tokens, device=ids.device) + first).expand(len(positions), -1)
            positions = torch.cat((prompt_positions, positions), dim=1)
        kwargs["position_ids"] = positions
        return (), kwargs

    def insert_prompt(self, _: nn.Module, __: tuple[Any, ...], embedded: torch.Tensor) -> torch.Tensor:
        """Return `embedded`, [B, P + S, H] in the first pass, with the learned embeddings [P, H] in place of the filler
        tokens': a hook after the input embedding.
        """
        if not self.is_due:
            return embedded
        self.is_due = False
        prompt = self.embedding(torch.arange(self.num_tokens, device=embedded.device)).to(embedded.dtype)  # [P, H]
        return torch.cat((prompt.expand(len(embedded), -1, -1), embedded[:, self.num_tokens :]), dim=1)

    def remove_prompt_logits(self, _: nn.Module, __: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Remove the logits at the prompt's positions, which no caller knows of: a hook after the forward pass.

        They are there only if the output layer ran on every token of the pass and that was its first. Not so in later
        passes of generation, nor where it computes losses or logits of chosen tokens alone (`loss`, `logits_to_keep`).

        Args:
            kwargs: the pass's arguments as `reserve_prompt_tokens` returned them.
            output: the model's output, with `logits` [B, P + S, V].

        Returns:
            `output`, its `logits` cut to [B, S, V].
        """
        # A part of rows has a mask of the whole rows, but positions of its own tokens.
        per_token = kwargs["position_ids"] if kwargs.get("in_parts") else kwargs["attention_mask"]
        num_positions = per_token.size(1)
        has_prompt_logits = num_positions > 1 and output.logits.size(1) == num_positions
        if has_prompt_logits:
            output.logits = output.logits[:, self.num_tokens :]
        return output


_READ_IDS = ("embed_tokens_per_layer", "tid2eid")
"""Parts of layers (transformers 5.23: Gemma 3n, small Gemma 4, DeepSeek-V4) that look up token ids themselves."""


def attach_prompt(model: PreTrainedModel, prompt: SoftPrompt) -> None:
    """Let every forward pass of a model begin with learned embeddings, its submodule `soft_prompt`.

    Raises ModelError where layers need the ids of tokens too, or peft would not find the embedding.
    """
    architecture, rows = type(model).__name__, model.get_input_embeddings().num_embeddings
    names = [name for name, _ in (*model.named_modules(), *model.named_buffers())]
    if any(name.rpartition(".")[2] in _READ_IDS for name in names):
        raise ModelError(
            "tuning = prompt is not supported with {architecture}: its layers look up the ids of tokens, which learned "
            "embeddings do not have. Use tuning=lora.",
            architecture=architecture,
        )
    if rows != (size := model.config.get_text_config().vocab_size):
        raise ModelError(
            "tuning = prompt is not supported with {architecture}: its embedding has {rows} rows, and peft looks for "
            "vocab_size = {size}. Use tuning=lora.",
            architecture=architecture,
            rows=rows,
            size=size,
        )
    model.soft_prompt = prompt
    model.register_forward_pre_hook(prompt.reserve_prompt_tokens, with_kwargs=True)
    model.get_input_embeddings().register_forward_hook(prompt.insert_prompt)
    model.register_forward_hook(prompt.remove_prompt_logits, with_kwargs=True)


PTUNING_V2 = "PTUNING_V2"


def prefix_settings(num_tokens: int, projection: bool, base: str) -> dict[str, Any]:
    """Return adapter_config.json of a P-Tuning v2 prefix, with the original's keys."""
    return {
        "peft_type": PTUNING_V2,
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "pre_seq_len": num_tokens,
        "prefix_projection": projection,
    }


def initial_values(
    model: PreTrainedModel, config: TuningConfig, tokenizer: PreTrainedTokenizerBase | None
) -> torch.Tensor:
    """Return the initial values of a soft prompt, [P, H]: embeddings of `tuning.init_text`, or of random tokens."""
    embedding, number = model.get_input_embeddings(), config.num_tokens
    if tokenizer is None:  # `toolkit check` tries a model without its tokenizer
        return torch.empty(number, embedding.embedding_dim, device="meta")
    if config.init_text:
        ids = tokenizer(config.init_text, add_special_tokens=False)["input_ids"]
        if not ids:
            raise ConfigError("tuning.init_text = '{text}' holds no token.", text=config.init_text)
        token_ids = torch.tensor((ids * (number // len(ids) + 1))[:number])  # repeated until there are enough
    else:
        token_ids = torch.randint(len(tokenizer), (number,))
    if embedding.weight.is_meta:
        return torch.empty(number, embedding.embedding_dim, device="meta")
    with weights.full_params([embedding.weight]):
        return embedding.weight.detach()[token_ids.to(embedding.weight.device)].cpu()
