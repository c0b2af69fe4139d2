"""ChatGLM2-6B, ChatGLM3-6B, CodeGeeX2-6B and glm-4-9b as transformers' GlmForCausalLM. The blocks are equal (RMSNorm,
SwiGLU gate first, interleaved rotary pairs on half of each head); names differ, and q, k and v are one matrix.
"""

import re
from typing import Any

import torch
from transformers import GlmConfig

from toolkit.models.weights import Layout, Shapes

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
    """Return the transformers config of an official one that has passed `family.check_supported`."""
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
        found = _LAYER.fullmatch(name)
        if found is None:
            return [name]
        prefix, rest = f"model.layers.{found[1]}", found[2]
        if rest.startswith(_QKV):
            return [f"{prefix}.self_attn.{part}_proj.{rest.removeprefix(_QKV)}" for part in "qkv"]
        return [f"{prefix}.{_IN_LAYER[rest]}" if rest in _IN_LAYER else name]

    def split(self, name: str, value: torch.Tensor) -> list[torch.Tensor]:
        """Divide query_key_value into q, k and v; anything else stays whole."""
        if _QKV not in name:
            return [value]
        if self._interleaved:
            by_head = value.view(self._heads, 3, self._head_dim, *value.shape[1:])
            return [by_head[:, part].reshape(-1, *value.shape[1:]) for part in range(3)]
        return list(value.split(self._rows))

    def join(self, name: str, parts: list[torch.Tensor]) -> torch.Tensor:
        """Undo `split`."""
        if len(parts) == 1:
            return parts[0]
        if self._interleaved:
            rest = parts[0].shape[1:]
            by_head = [part.view(self._heads, 1, self._head_dim, *rest) for part in parts]
            return torch.cat(by_head, dim=1).view(-1, *rest)
        return torch.cat(parts)

    def stored_shape(self, name: str, shapes: Shapes) -> tuple[int, ...]:
        """Return the shape that the official tensor must have."""
        parts = [shapes[parameter] for parameter in self.parameters(name)]
        return (sum(part[0] for part in parts), *parts[0][1:])


def official_layout(config: Any, interleaved: bool) -> Layout:
    """Return the official layout of a ChatGLM; see `GlmLayout`."""
    return GlmLayout(config, interleaved) if config.model_type == "glm" else Layout()
