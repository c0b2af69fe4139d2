"""What transformers calls causal: computed as transformers itself does, or refused by name before anything is read."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from toolkit.config.schema import TuningConfig, TuningMethod
from toolkit.messages import ModelError
from toolkit.models import load_model, lora
from toolkit.models.fine_tuning import freeze_towers
from toolkit.models.load import check_vocabulary
from toolkit.models.prompt_tuning import attach_prefix
from toolkit.models.structure import decoder_layers_name, towers
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


def test_what_only_images_go_through_stays_as_it_is(tmp_path: Path) -> None:
    model = gemma3()
    tokenizer: Any = range(64)
    check_vocabulary(model, tokenizer)
    with pytest.raises(ModelError, match="the tokenizer has 65 tokens, the model only 64"):
        check_vocabulary(model, range(65))  # type: ignore[arg-type]
    assert decoder_layers_name(model) == "model.language_model.layers"
    targets, _ = lora.choose_targets(model, TuningConfig(method=TuningMethod.lora))
    assert len(targets) == 6
    assert all(name.startswith("model.language_model.layers.") for name in targets)
    model.save_pretrained(tmp_path / "model")
    freeze_towers(model, tmp_path / "model")
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {name for name, _ in model.named_parameters() if "language_model" in name}
    ids = torch.arange(5, 15)[None]
    model(input_ids=ids, labels=ids).loss.backward()
    assert all(parameter.grad is not None for name, parameter in model.named_parameters() if name in trained)


def test_a_model_of_text_has_nothing_beside_it() -> None:
    with torch.device("meta"):
        models = [built("gpt_neox", **SIZES), built("bart", vocab_size=64, d_model=32, decoder_layers=1)]
    assert [towers(model) for model in models] == [(), ()]


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


def test_a_prefix_needs_keys_of_one_size() -> None:
    config = {**HEADS, "layer_types": ["sliding_attention", "full_attention"]}
    for model in (built("gemma4_text", **config), built("mamba", vocab_size=64, hidden_size=32, num_hidden_layers=1)):
        with pytest.raises(ModelError, match=r"ptuning_v2 cannot be with .* keys and values of one size\. Use"):
            attach_prefix(model, 4, False, 0.0)
