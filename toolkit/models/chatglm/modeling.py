"""The family's two architectures: ChatGLM-6B's own, and its successors' as transformers' GlmForCausalLM.

ChatGLM-6B: post-norm blocks, prefix attention, two-dimensional rotary positions; modules carry the official names. A
sequence is `context [gMASK] <sop> answer`: every token sees the context, what follows is causal. Position channel 0
counts the context and stays at the mask token's; channel 1 is 0 there and counts from <sop> on. B batch, S sequence, H
hidden, N heads, D head size. GLM, Du et al. 2022, https://arxiv.org/abs/2103.10360, section 2.

ChatGLM2-6B, ChatGLM3-6B, CodeGeeX2-6B and glm-4-9b: the blocks are transformers' (RMSNorm, SwiGLU gate first,
interleaved rotary pairs on half of each head); names differ, and q, k and v are one matrix.
"""

import re
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional
from transformers import GenerationMixin, GlmConfig, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.glm.modeling_glm import eager_attention_forward

from toolkit.messages import ModelError
from toolkit.models.cache import CACHE, cache_of
from toolkit.models.weights import Layout, Shapes

_ROTARY_BASE = 10000.0


def rotary_tables(position_ids: torch.Tensor, head_size: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines `[B, 1, S, D]` of position ids `[B, 2, S]`, D being `head_size`: D/2 columns of each of
    the two channels, of which i and i + D/4 are a pair.

    Inverse frequencies are rounded to float16, as in the original; angles are float32 (the original's half-precision
    table is off by up to 2.0 beyond position 1024). No buffer, so no cast can reach it.
    """
    steps = torch.arange(0, head_size // 2, 2, dtype=torch.float32, device=position_ids.device) / (head_size // 2)
    frequencies = (1.0 / (_ROTARY_BASE**steps)).to(torch.float16).to(torch.float32)
    angles = position_ids[..., None].float() * frequencies  # [B, 2, S, D/4]
    angles = torch.cat((angles, angles), dim=-1)  # [B, 2, S, D/2]
    angles = torch.cat((angles[:, 0], angles[:, 1]), dim=-1)[:, None]  # [B, 1, S, D]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate queries or keys `[B, N, S, D]`: half of a head by the first channel of positions, half by the second."""
    first, second, third, fourth = states.chunk(4, dim=-1)
    return states * cos + torch.cat((-second, first, -fourth, third), dim=-1) * sin


def check_rows(input_ids: torch.Tensor, config: "ChatGLMConfig") -> None:
    """Raise ModelError unless each row of ids `[B, S]` holds <sop>, from which positions are found."""
    has_sop = (input_ids == config.bos_token_id).any(dim=1)
    is_filler = (input_ids == config.pad_token_id).all(dim=1)  # a row of a rank that has no sample left
    if not (has_sop | is_filler).all():
        raise ModelError(
            "a row holds no <sop> (id {sop}): it was cut off, or the tokenizer belongs to another revision of "
            "the model (130,528 or 150,528 tokens).",
            sop=config.bos_token_id,
        )


def build_positions(input_ids: torch.Tensor, config: "ChatGLMConfig", padded: torch.Tensor | None) -> torch.Tensor:
    """Return position ids `[B, 2, S]` of sequences `[B, S]` with <sop>. Channel 0 counts the context, without what is
    `padded`, bool `[B, S]`, and stays at the mask token's; channel 1 is 0 there and counts from <sop> on.
    """
    start = first_index(input_ids, config.bos_token_id)[:, None]  # [B, 1]
    # [gMASK], else [MASK], else (where the original gives up) the context's end, where one would stand.
    mask_at = start
    for token in (config.mask_token_id, config.gmask_token_id):
        token_at = first_index(input_ids, token)[:, None]
        mask_at = torch.where(token_at < input_ids.size(1), token_at, mask_at)
    index = torch.arange(input_ids.size(1), device=input_ids.device)[None]  # [1, S]
    left_padding = 0 if padded is None else padded.long().cumprod(dim=1).sum(dim=1, keepdim=True)  # [B, 1]
    context = torch.where(index < start, index, mask_at) - left_padding
    block = index - start + 1
    return torch.stack((context.clamp(min=0), block.clamp(min=0)), dim=1)


def build_mask(input_ids: torch.Tensor, config: "ChatGLMConfig", padded: torch.Tensor | None) -> torch.Tensor:
    """Return the mask of sequences with <sop>, bool `[B, 1, S, S]`, True where forbidden; `padded`: bool `[B, S]`."""
    index = torch.arange(input_ids.size(1), device=input_ids.device)
    is_context = index[None] < first_index(input_ids, config.bos_token_id)[:, None]  # [B, S]
    masked = (index[None, :] > index[:, None])[None] & ~is_context[:, None, :]  # later tokens, but for the context's
    if padded is not None:
        masked = masked | padded[:, None, :] | padded[:, :, None]
    return masked[:, None]


def first_index(input_ids: torch.Tensor, token: int) -> torch.Tensor:
    """Return the first index of a token in each row `[B]`; S where there is none."""
    is_token = input_ids == token
    return torch.where(is_token.any(dim=1), is_token.int().argmax(dim=1), input_ids.size(1))


# The published weights were trained with sqrt(2 * 28); the original block never learns of another number of layers.
_RESIDUAL_SCALE = (2 * 28) ** 0.5


class ChatGLMConfig(PreTrainedConfig):
    """The keys of the official config.json: `position_encoding_2d` marks the architecture, `bos_token_id` is <sop>,
    `eos_token_id` <eop>. H / N must be a multiple of 4.
    """

    model_type = "chatglm"
    attribute_map: ClassVar = {"num_hidden_layers": "num_layers", "max_position_embeddings": "max_sequence_length"}

    hidden_size: int = 4096
    inner_hidden_size: int = 16384
    num_layers: int = 28
    num_attention_heads: int = 32
    vocab_size: int = 130528
    max_sequence_length: int = 2048
    layernorm_epsilon: float = 1e-5
    position_encoding_2d: bool = True
    mask_token_id: Any = None
    gmask_token_id: Any = None
    bos_token_id: int = 130004
    eos_token_id: int = 130005
    pad_token_id: int = 3
    use_cache: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        # [MASK] [gMASK] [sMASK] <unused_0> <sop> <eop> follow each other; the first months' config.json names two.
        self.mask_token_id = self.bos_token_id - 4 if self.mask_token_id is None else self.mask_token_id
        self.gmask_token_id = self.bos_token_id - 3 if self.gmask_token_id is None else self.gmask_token_id
        self.tie_word_embeddings = False
        super().__post_init__(**kwargs)


class ChatGLMAttention(nn.Module):
    """Multi-head attention; `query_key_value` holds q, k and v of one head after another."""

    def __init__(self, config: ChatGLMConfig, layer: int) -> None:
        super().__init__()
        self.config = config
        self.layer = layer
        self.head_size = config.hidden_size // config.num_attention_heads
        self.num_key_value_groups = 1
        self.is_causal = False  # the mask decides
        self.query_key_value = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(
        self,
        hidden_states: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor,
        past_key_values: Cache | None,
        **options: Any,
    ) -> torch.Tensor:
        """Return `[B, S, H]` for `[B, S, H]`. `attention_mask`: `[B, 1, S, S + past]`; `options`: of the attention."""
        batch, size, _ = hidden_states.shape
        mixed = self.query_key_value(hidden_states).view(batch, size, -1, 3 * self.head_size).transpose(1, 2)
        query, key, value = mixed.chunk(3, dim=-1)  # [B, N, S, D]
        query, key = rotate(query, *rotary), rotate(key, *rotary)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer)
            free = max(0, key.size(2) - attention_mask.size(-1))  # slots of a static cache that are still empty
            attention_mask = functional.pad(attention_mask, (0, free), value=torch.finfo(attention_mask.dtype).min)
        # The original divides by sqrt(D) * (layer + 1) and multiplies the scores again: mathematically 1 / sqrt(D).
        attend: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        output, _ = attend(
            self, query, key, value, attention_mask, scaling=self.head_size**-0.5, dropout=0.0, **options
        )
        return self.dense(output.reshape(batch, size, -1))


class ChatGLMMLP(nn.Module):
    """Two linear layers with biases around a tanh-approximated GELU."""

    def __init__(self, config: ChatGLMConfig) -> None:
        super().__init__()
        self.dense_h_to_4h = nn.Linear(config.hidden_size, config.inner_hidden_size)
        self.dense_4h_to_h = nn.Linear(config.inner_hidden_size, config.hidden_size)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return `[B, S, H]` for `[B, S, H]`."""
        return self.dense_4h_to_h(functional.gelu(self.dense_h_to_4h(hidden_states), approximate="tanh"))


class ChatGLMLayerNorm(nn.LayerNorm):
    """LayerNorm whose weights may be float32 in a half-precision model, as they are in the published files."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the normalised states, in the input's precision."""
        return super().forward(hidden_states.to(self.weight.dtype)).to(hidden_states.dtype)


class ChatGLMBlock(GradientCheckpointingLayer):
    """One layer. What is added to each branch is its *normalised* input, scaled, not its input."""

    def __init__(self, config: ChatGLMConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = ChatGLMLayerNorm(config.hidden_size, eps=config.layernorm_epsilon)
        self.attention = ChatGLMAttention(config, layer)
        self.post_attention_layernorm = ChatGLMLayerNorm(config.hidden_size, eps=config.layernorm_epsilon)
        self.mlp = ChatGLMMLP(config)

    def forward(
        self,
        hidden_states: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor,
        past_key_values: Cache | None = None,
        **options: Any,
    ) -> torch.Tensor:
        """Return `[B, S, H]` for `[B, S, H]`."""
        normed = self.input_layernorm(hidden_states)
        attended = self.attention(normed, rotary, attention_mask, past_key_values, **options)
        hidden_states = normed * _RESIDUAL_SCALE + attended
        normed = self.post_attention_layernorm(hidden_states)
        return normed * _RESIDUAL_SCALE + self.mlp(normed)


class ChatGLMPreTrainedModel(PreTrainedModel):
    """What transformers needs to know of the architecture."""

    config_class = ChatGLMConfig
    config: ChatGLMConfig
    base_model_prefix = "transformer"
    _input_embed_layer = "word_embeddings"
    supports_gradient_checkpointing = True
    _no_split_modules: ClassVar = ["ChatGLMBlock"]
    _skip_keys_device_placement: ClassVar = ["past_key_values", "cache"]
    _supports_sdpa = True


class ChatGLMModel(ChatGLMPreTrainedModel):
    """Embedding, blocks and final norm."""

    def __init__(self, config: ChatGLMConfig) -> None:
        super().__init__(config)
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([ChatGLMBlock(config, layer) for layer in range(config.num_layers)])
        self.final_layernorm = ChatGLMLayerNorm(config.hidden_size, eps=config.layernorm_epsilon)
        self.gradient_checkpointing = False
        self.post_init()

    def forward(
        self,
        input_ids: torch.Tensor | None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        in_parts: bool = False,
        **_: Any,
    ) -> torch.Tensor:
        """Return the hidden states `[B, S, H]`; arguments as `ChatGLMForConditionalGeneration.forward`."""
        if input_ids is not None and (attention_mask is None or attention_mask.dim() == 2 or position_ids is None):
            attention_mask, position_ids = self.complete(input_ids, attention_mask, position_ids)
        if attention_mask is None or position_ids is None:
            raise ValueError("with inputs_embeds, attention_mask [B, 1, S, S] and position_ids [B, 2, S] are needed")
        states = self.word_embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        rotary = rotary_tables(position_ids, self.config.hidden_size // self.config.num_attention_heads, states.dtype)
        # Keys that precede the mask are a P-Tuning prefix, which every token sees.
        past = 0 if past_key_values is None else past_key_values.get_seq_length()
        num_prefix = int(past) + attention_mask.size(-2) - attention_mask.size(-1)
        masked = functional.pad(attention_mask, (max(num_prefix, 0), 0))
        # The smallest number instead of -inf: a padding query may see nothing at all, and must not become NaN.
        bias = torch.zeros(masked.shape, dtype=states.dtype, device=states.device)
        bias = bias.masked_fill(masked, torch.finfo(states.dtype).min)
        for layer in self.layers:
            states = layer(states, rotary, bias, past_key_values, in_parts=in_parts)
        return self.final_layernorm(states)

    def complete(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None, position_ids: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return mask `[B, 1, S, S]` and positions `[B, 2, S]`: as given, or built where they are None or the mask is
        `[B, S]`, 0 on padding; for complete sequences only, a prefix in the cache does not count.
        """
        padded = None
        if attention_mask is not None and attention_mask.dim() == 2:
            if attention_mask.size(1) != input_ids.size(1):
                raise ValueError(
                    "a 2-D attention mask must be as long as input_ids; with cached tokens give [B, 1, S, S + cached]"
                )
            padded = attention_mask == 0
        if not getattr(input_ids, "is_checked", False):
            check_rows(input_ids, self.config)
        if attention_mask is None or padded is not None:
            attention_mask = build_mask(input_ids, self.config, padded)
        if position_ids is None:
            position_ids = build_positions(input_ids, self.config, padded)
        return attention_mask, position_ids


class ChatGLMForConditionalGeneration(ChatGLMPreTrainedModel, GenerationMixin):
    """ChatGLM-6B with its output layer."""

    builds_positions = True
    """Callers that know only `[B, S]` positions should pass none: the model makes both channels itself."""

    def check_rows(self, input_ids: torch.Tensor) -> None:
        """Raise ModelError unless the model can find its positions in rows `[B, S]`."""
        check_rows(input_ids, self.config)

    def __init__(self, config: ChatGLMConfig) -> None:
        super().__init__(config)
        self.transformer = ChatGLMModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        in_parts: bool = False,
        cache: Cache | None = None,
        **_: Any,
    ) -> CausalLMOutputWithPast:
        """Run the model; a sequence without <sop> is a ModelError.

        Args:
            input_ids: `[B, S]`; inputs_embeds: `[B, S, H]` in their place.
            attention_mask: bool `[B, 1, S, S + cached]`, True where attention is *forbidden* (the original's
                convention); or `[B, S]`, 0 on padding, from which and from <sop> the model builds it; or None.
            position_ids: `[B, 2, S]`, built by the model when None.
            past_key_values: keys and values of earlier tokens; whatever precedes the mask's columns is a prefix.
                transformers calls it cache from 5.24 on.
            labels: `[B, S]`, -100 where untrained, at their own token's position; gives `loss`, their mean.
            use_cache: return the keys and values; by default as in the config.
            logits_to_keep: compute logits of so many last positions, or of these; 0: of all.
            in_parts: `[B, S]` is this rank's part of rows; attention_mask is of whole ones, `[B, 1, P x S, P x S]`.
        """
        past_key_values = cache if past_key_values is None else past_key_values
        use_cache = self.config.use_cache if use_cache is None else use_cache
        is_recomputed = self.training and self.transformer.gradient_checkpointing  # which would fill a cache twice
        if use_cache and past_key_values is None and not is_recomputed:
            past_key_values = DynamicCache(config=self.config)
        states = self.transformer(input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, in_parts)
        if not isinstance(logits_to_keep, int):
            states = states[:, logits_to_keep]
        elif logits_to_keep:
            states = states[:, -logits_to_keep:]
        logits = self.lm_head(states)
        loss = None
        if labels is not None:
            loss = functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten())
        return CausalLMOutputWithPast(loss=loss, logits=logits, **{CACHE: past_key_values})

    def _prepare_position_ids_for_generation(
        self, inputs_tensor: torch.Tensor, model_kwargs: dict[str, Any]
    ) -> torch.Tensor:
        """Build `[B, 2, S]` positions of the prompts, and turn a 2-D mask into the 4-D one that grows with them."""
        ids = model_kwargs.get("input_ids", inputs_tensor)
        mask, positions = self.transformer.complete(ids, model_kwargs.get("attention_mask"), None)
        model_kwargs["attention_mask"] = mask
        return positions

    def _expand_inputs_for_generation(
        self,
        expand_size: int = 1,
        is_encoder_decoder: bool = False,
        input_ids: torch.Tensor | None = None,
        **model_kwargs: Any,
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Repeat rows for beams; transformers takes three-dimensional positions for those of images, batch second."""
        positions = model_kwargs.pop("position_ids", None)
        input_ids, model_kwargs = super()._expand_inputs_for_generation(
            expand_size, is_encoder_decoder, input_ids, **model_kwargs
        )
        if positions is not None:
            model_kwargs["position_ids"] = positions.repeat_interleave(expand_size, dim=0)
        return input_ids, model_kwargs

    def prepare_inputs_for_generation(
        self,
        input_ids: torch.Tensor,
        next_sequence_length: int | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Cut ids, positions and the mask's rows to the tokens that are not cached yet."""
        if attention_mask is None or attention_mask.dim() == 2 or position_ids is None:
            attention_mask, position_ids = self.transformer.complete(input_ids, attention_mask, position_ids)
        size = input_ids.size(1) if next_sequence_length is None else next_sequence_length
        return {
            "input_ids": input_ids[:, -size:],
            "attention_mask": attention_mask[:, :, -size:],
            "position_ids": position_ids[..., -size:],
            CACHE: cache_of(kwargs),
            "use_cache": kwargs.get("use_cache"),
            "logits_to_keep": kwargs.get("logits_to_keep", 0),
        }

    def _update_model_kwargs_for_generation(
        self, outputs: Any, model_kwargs: dict[str, Any], is_encoder_decoder: bool = False, num_new_tokens: int = 1
    ) -> dict[str, Any]:
        """Append new tokens: they see what the last one saw and what came since; channel 1 counts on."""
        mask, positions = model_kwargs.pop("attention_mask", None), model_kwargs.pop("position_ids", None)
        model_kwargs = super()._update_model_kwargs_for_generation(
            outputs, model_kwargs, is_encoder_decoder, num_new_tokens
        )
        step = positions.new_tensor([0, 1])[None, :, None]
        for _ in range(num_new_tokens):
            positions = torch.cat((positions, positions[..., -1:] + step), dim=-1)
            if mask.dim() == 2:  # positions came from the caller: `prepare_inputs_for_generation` builds the mask
                mask = functional.pad(mask, (0, 1), value=1)
                continue
            row = functional.pad(mask[:, :, -1:], (0, 1), value=False)
            # Cached tokens' rows of the mask are never needed again. Earlier tokens do not see the new one.
            earlier = [] if model_kwargs.get("use_cache", True) else [functional.pad(mask, (0, 1), value=True)]
            mask = torch.cat([*earlier, row], dim=2)
        model_kwargs |= {"attention_mask": mask, "position_ids": positions}
        return model_kwargs


_LAYER = re.compile(r"transformer\.encoder\.layers\.(\d+)\.(.+)")
_FIXED = {
    "transformer.embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "transformer.encoder.final_layernorm.weight": "model.norm.weight",
    "transformer.output_layer.weight": "lm_head.weight",
}
_IN_LAYER = {
    "input_layernorm.weight": "input_layernorm.weight",
    "post_attention_layernorm.weight": "post_attention_layernorm.weight",
    "self_attention.dense.weight": "self_attn.o_proj.weight",
    "mlp.dense_h_to_4h.weight": "mlp.gate_up_proj.weight",
    "mlp.dense_4h_to_h.weight": "mlp.down_proj.weight",
}
_QKV = "self_attention.query_key_value."
_FREQUENCIES = "rotary_pos_emb.inv_freq"


def glm_config(official: dict[str, Any], generation: dict[str, Any], *, divides_positions: bool) -> GlmConfig:
    """Return the transformers config of an official config.json that has passed `official_files.check_supported`.
    `generation`: content of generation_config.json; `divides_positions`: see `official_files.divides_positions`.
    """
    heads, ratio = official["num_attention_heads"], official.get("rope_ratio", 1)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0 * ratio, "partial_rotary_factor": 0.5}
    if divides_positions:
        rope |= {"rope_type": "linear", "rope_theta": 10000.0, "factor": float(ratio)}
    config = GlmConfig(
        vocab_size=official["padded_vocab_size"],
        hidden_size=official["hidden_size"],
        intermediate_size=official["ffn_hidden_size"],
        num_hidden_layers=official["num_layers"],
        num_attention_heads=heads,
        num_key_value_heads=official["multi_query_group_num"] if official.get("multi_query_attention") else heads,
        head_dim=official["kv_channels"],
        hidden_act="silu",
        attention_dropout=official.get("attention_dropout", 0.0),
        attention_bias=bool(official.get("add_qkv_bias", False)),
        rms_norm_eps=official["layernorm_epsilon"],
        max_position_embeddings=official["seq_length"],
        rope_parameters=rope,
        tie_word_embeddings=False,
        # A padding id would freeze its row of the embedding (torch.nn.Embedding's padding_idx): for glm-4 that is the
        # end token's, which the original trains.
        pad_token_id=None,
        bos_token_id=None,
        # Without one transformers would assume glm-4's; </s> has been 2 since ChatGLM2.
        eos_token_id=official.get("eos_token_id") or generation.get("eos_token_id") or 2,
        architectures=["GlmForCausalLM"],
    )
    dtype = official.get("torch_dtype") or official.get("dtype")
    if isinstance(dtype, str):
        config.dtype = getattr(torch, dtype)
    return config


class GlmLayout(Layout):
    """Official names and GlmForCausalLM's; `interleaved`: q, k and v per head (multi_query_attention false)."""

    def __init__(self, config: GlmConfig, interleaved: bool) -> None:
        self._rows = [
            count * config.head_dim
            for count in (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)
        ]
        self._heads, self._head_dim, self._interleaved = config.num_attention_heads, config.head_dim, interleaved

    def parameters(self, name: str) -> list[str]:
        """Return the parameters that an official tensor fills."""
        if name.endswith(_FREQUENCIES):
            return []
        if name in _FIXED:
            return [_FIXED[name]]
        match = _LAYER.fullmatch(name)
        if match is None:
            return [name]
        layer, inside = f"model.layers.{match[1]}", match[2]
        if inside.startswith(_QKV):
            return [f"{layer}.self_attn.{part}_proj.{inside.removeprefix(_QKV)}" for part in "qkv"]
        return [f"{layer}.{_IN_LAYER[inside]}" if inside in _IN_LAYER else name]

    def split(self, name: str, value: torch.Tensor) -> list[torch.Tensor]:
        """Divide query_key_value into q, k and v; anything else stays whole."""
        if _QKV not in name:
            return [value]
        if self._interleaved:  # rows are q, k and v of one head after another
            by_head = value.view(self._heads, 3, self._head_dim, *value.shape[1:])
            return [by_head[:, part].reshape(-1, *value.shape[1:]) for part in range(3)]
        return list(value.split(self._rows))

    def join(self, name: str, parts: list[torch.Tensor]) -> torch.Tensor:
        """Undo `split`."""
        if len(parts) == 1:
            return parts[0]
        if self._interleaved:
            row_shape = parts[0].shape[1:]  # () of a bias
            by_head = [part.view(self._heads, 1, self._head_dim, *row_shape) for part in parts]
            return torch.cat(by_head, dim=1).view(-1, *row_shape)
        return torch.cat(parts)

    def stored_shape(self, name: str, shapes: Shapes) -> tuple[int, ...]:
        """Return the shape that the official tensor must have."""
        parts = [shapes[parameter] for parameter in self.parameters(name)]
        return (sum(part[0] for part in parts), *parts[0][1:])


def official_layout(config: Any, interleaved: bool) -> Layout:
    """Return the official layout of a ChatGLM; see `GlmLayout`."""
    return GlmLayout(config, interleaved) if config.model_type == "glm" else Layout()
