"""What transformers calls causal: computed as transformers itself does, or refused by name before anything is read."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from toolkit.models import load_model
from toolkit.plan.outline import flop_sizes

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
HEADS = {**SIZES, "num_key_value_heads": 1, "head_dim": 16}
XLM = {"vocab_size": 64, "emb_dim": 32, "n_layers": 1, "n_heads": 2}


def built(kind: str, **values: Any) -> Any:
    """Return a random model of a `model_type`."""
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **values)).eval()


def gemma3() -> Any:
    """Return Gemma 3 of text and images, with as many layers for one as for the other."""
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14}
    return built("gemma3", text_config=HEADS, vision_config=vision, mm_tokens_per_image=4)


def roberta(tmp_path: Path) -> Any:
    """Return a RoBERTa as it is loaded for training, whose positions begin after that of padding, 3."""
    built("roberta", **SIZES, is_decoder=True, pad_token_id=3).save_pretrained(tmp_path / "roberta")
    return load_model(tmp_path / "roberta")


def test_flops_of_odd_configs_are_unknown_and_end_nothing() -> None:
    """Heads that differ by layer, which transformers refuses to read as one number; values that are no numbers."""
    config = transformers.Gemma4TextConfig(**HEADS, layer_types=["sliding_attention", "full_attention"])
    with pytest.raises(RuntimeError, match="per-layer attribute"):
        _ = config.head_dim
    assert flop_sizes(lambda name: getattr(config, name, None)) == {}
    llama = {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 32}
    assert flop_sizes(llama.get) == {"layers": 2, "heads": 2, "head_size": 16}
    for odd in ([4, 2], "2", 2.0):
        assert flop_sizes({**llama, "num_attention_heads": odd}.get) == {}
    assert flop_sizes({**llama, "model_type": "mixtral"}.get) == {}
