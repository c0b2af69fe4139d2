"""Tiny models in transformers' layout: one that says the same whatever it is asked, and one with random weights."""

from pathlib import Path
from typing import Any

import torch
from transformers import GlmConfig, GlmForCausalLM

from toolkit.models.chat import END, fit_tokenizer

SAYS = "你吗文福说马 and so on."
"""No token of it comes twice: each says which is next."""


def write_speaker(folder: Path, *, says: str = SAYS, ends: bool = True, positions: int = 1_000_000) -> Path:
    """Write a model that answers every question alike.

    Args:
        folder: made if needed.
        says: the answer, no token of which may come twice.
        ends: else it begins again, for ever.
        positions: of the model.
    """
    tokenizer = fit_tokenizer(lambda: ["and so on", "he said and"], 300, folder.parent / f"{folder.name}-fit")
    [start] = tokenizer.encode("\n", add_special_tokens=False)
    tokens = [start, *tokenizer.encode(says, add_special_tokens=False)]
    assert len(set(tokens)) == len(tokens)
    follows = dict(zip(tokens, [*tokens[1:], tokenizer.convert_tokens_to_ids(END) if ends else tokens[1]], strict=True))
    model = GlmForCausalLM(_config(tokenizer, -(-len(tokenizer) // 8) * 8, positions))
    with torch.no_grad():
        for layer in model.model.layers:  # no layer adds anything: the last token alone decides
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(*model.model.embed_tokens.weight.shape))
        model.lm_head.weight.zero_()
        for token, following in follows.items():
            model.lm_head.weight[following, token] = 1.0
    return _save(model, tokenizer, folder)


def write_random(folder: Path, *, positions: int = 256) -> Path:
    """Write a model that babbles, each question its own answer."""
    tokenizer = fit_tokenizer(lambda: ["and so on", "he said and"], 300, folder.parent / f"{folder.name}-fit")
    torch.manual_seed(0)
    model = GlmForCausalLM(_config(tokenizer, 64, positions))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return _save(model, tokenizer, folder)


def _config(tokenizer: Any, hidden: int, positions: int) -> GlmConfig:
    return GlmConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=positions,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )


def _save(model: GlmForCausalLM, tokenizer: Any, folder: Path) -> Path:
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
