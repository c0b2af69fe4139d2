"""What is exported can be read by transformers 4, which others still have: tokenizers, and the same logits."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerFast

from toolkit.export.write import write_folder
from toolkit.models import save
from toolkit.models.chat_template import TemplateChatEncoder

VERSION = "transformers==4.57.1"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)
YARN = {"rope_type": "yarn", "rope_theta": 500000.0, "factor": 4.0, "original_max_position_embeddings": 512}
SIZES = {
    "vocab_size": 16,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "eos_token_id": 3,
    "pad_token_id": 0,
}


def rope(**more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, **more}}


KINDS: dict[str, Any] = {
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 4,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 500.0, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 30.0},
    },
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 8}
MODELS: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "default": (transformers.LlamaConfig, rope(), {"rope_theta": 500.0}),
    "yarn": (transformers.LlamaConfig, rope(**YARN), {"rope_theta": 500000.0, "rope_scaling": YARN}),
    "part": (transformers.Phi3Config, rope(partial_rotary_factor=0.5), {"partial_rotary_factor": 0.5}),
    "other names": (
        transformers.GPTNeoXConfig,
        rope(partial_rotary_factor=0.5),
        {"rotary_pct": 0.5, "rotary_emb_base": 500.0},
    ),
    "by layer": (
        transformers.Gemma3TextConfig,
        KINDS | {"head_dim": 8},
        {
            "rope_theta": 500.0,
            "rope_local_base_freq": 30.0,
            "rope_scaling": {"rope_type": "linear", "rope_theta": 500.0, "factor": 8.0},
        },
    ),
    "by layer, other names": (
        transformers.ModernBertDecoderConfig,
        {
            "layer_types": KINDS["layer_types"],
            "local_attention": 8,
            "rope_parameters": KINDS["rope_parameters"] | {"full_attention": rope()["rope_parameters"]},
        },
        {"global_rope_theta": 500.0, "local_rope_theta": 30.0},
    ),
    "experts": (transformers.Qwen3MoeConfig, rope() | EXPERTS | {"num_experts": 3, "head_dim": 8}, {"num_experts": 3}),
    "hybrid": (
        transformers.GraniteMoeHybridConfig,
        EXPERTS
        | {
            "layer_types": ["linear_attention", "full_attention"],
            "num_local_experts": 2,
            "shared_intermediate_size": 8,
            "mamba_n_heads": 4,
            "mamba_d_head": 8,
            "mamba_d_state": 4,
        },
        {"layer_types": ["mamba", "attention"], "time_step_limit": [0.0, float("inf")]},
    ),
}
IDS = [[1, 2, 3, 4, 5, 6]]
READ = """
import json, sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
for folder in sys.argv[2:]:
    tokenizer, model = (kind.from_pretrained(folder) for kind in (AutoTokenizer, AutoModelForCausalLM))
    logits = model.eval()(torch.tensor(json.loads(sys.argv[1]))).logits
    print(json.dumps([tokenizer("<|im_start|> a b").input_ids, tokenizer.all_special_tokens, logits.tolist()]))
"""


def exported(folder: Path, name: str) -> tuple[Any, transformers.PreTrainedModel]:
    """Write a model with a tokenizer of no family of its own; return its encoder and the model."""
    backend = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "b": 2}, "<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens([AddedToken(text, special=True) for text in ("</s>", "<|im_start|>", "<|im_end|>")])
    names = {"eos_token": "</s>", "additional_special_tokens": ["<|im_start|>", "<|im_end|>"]}
    encoder = TemplateChatEncoder(PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=TEMPLATE, **names))
    kind, settings, _ = MODELS[name]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(kind(**{**SIZES, **settings})).eval()
    write_folder(model, save.non_weight_files(model, encoder), folder, "hf", None)
    return encoder, model


@pytest.mark.parametrize("name", MODELS)
def test_names_that_transformers_4_knows(name: str, tmp_path: Path) -> None:
    encoder, model = exported(tmp_path / "export", name)
    settings = json.loads((tmp_path / "export" / "tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert settings["additional_special_tokens"] == ["<|im_start|>", "<|im_end|>"]
    assert not {"extra_special_tokens", "backend"} & settings.keys()
    config = json.loads((tmp_path / "export" / "config.json").read_text())
    expected = MODELS[name][2]
    assert {key: config[key] for key in expected} == expected
    assert ("rope_scaling" in config) == ("rope_scaling" in expected)
    # The version that is installed here reads the same as before.
    again, trained = AutoConfig.from_pretrained(tmp_path / "export").to_dict(), model.config.to_dict()
    assert {key: again[key] for key in trained} | {"_name_or_path": ""} == trained
    told = TemplateChatEncoder(AutoTokenizer.from_pretrained(tmp_path / "export"))
    assert told.fingerprint == encoder.fingerprint


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with transformers 4, its other packages being those that are here."""
    folder = tmp_path_factory.mktemp("older")
    words = [VERSION, "huggingface_hub<1.0", "tokenizers>=0.22,<=0.23"]
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder), *words]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if ran.returncode:
        pytest.skip(f"{VERSION} cannot be installed here: {ran.stderr.strip()[-200:]}")
    return folder


@pytest.mark.nightly
def test_transformers_4_computes_the_same(older: Path, tmp_path: Path) -> None:
    made = [exported(tmp_path / name, name) for name in MODELS]
    command = [sys.executable, "-c", READ, json.dumps(IDS), *(str(tmp_path / name) for name in MODELS)]
    environ = os.environ | {"PYTHONPATH": str(older)}
    ran = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=600, check=False)
    assert ran.returncode == 0, ran.stderr
    for name, (encoder, model), line in zip(MODELS, made, ran.stdout.splitlines()[-len(made) :], strict=True):
        ids, special, logits = json.loads(line)
        assert ids == encoder.tokenizer("<|im_start|> a b").input_ids
        assert special == encoder.tokenizer.all_special_tokens
        found, wanted = torch.tensor(logits), model(torch.tensor(IDS)).logits
        assert torch.allclose(found, wanted, atol=1e-6, rtol=1e-5), (name, (found - wanted).abs().max())
