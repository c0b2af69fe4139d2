"""What is exported can be read by transformers 4, which others still have: tokenizers, and the same logits."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from toolkit.models import save
from toolkit.models.chat_template import TemplateChatEncoder

VERSION = "transformers==4.57.1"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)
YARN = {"rope_type": "yarn", "rope_theta": 500000.0, "factor": 4.0, "original_max_position_embeddings": 512}
ROPES: dict[str, dict[str, Any]] = {"default": {"rope_type": "default", "rope_theta": 500000.0}, "yarn": YARN}
IDS = [[1, 2, 3, 4, 5, 6]]
READ = """
import json, sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer, model = (kind.from_pretrained(sys.argv[1]) for kind in (AutoTokenizer, AutoModelForCausalLM))
logits = model.eval()(torch.tensor(json.loads(sys.argv[2]))).logits
print(json.dumps([tokenizer("<|im_start|> a b").input_ids, tokenizer.all_special_tokens, logits.tolist()]))
"""


def exported(folder: Path, rope: dict[str, Any]) -> tuple[Any, LlamaForCausalLM]:
    """Write a model with a tokenizer of no family of its own; return its encoder and the model."""
    backend = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "b": 2}, "<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens([AddedToken(text, special=True) for text in ("</s>", "<|im_start|>", "<|im_end|>")])
    names = {"eos_token": "</s>", "additional_special_tokens": ["<|im_start|>", "<|im_end|>"]}
    encoder = TemplateChatEncoder(PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=TEMPLATE, **names))
    sizes = {"vocab_size": 16, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "eos_token_id": 3}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, rope_parameters=rope)).eval()
    folder.mkdir()
    for name, content in save.describe(model, encoder).items():
        (folder / name).write_bytes(content)
    save_file(model.state_dict(), folder / "model.safetensors", {"format": "pt"})
    return encoder, model


@pytest.mark.parametrize("name", ROPES)
def test_names_that_transformers_4_knows(name: str, tmp_path: Path) -> None:
    encoder, model = exported(tmp_path / "export", ROPES[name])
    settings = json.loads((tmp_path / "export" / "tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert settings["additional_special_tokens"] == ["<|im_start|>", "<|im_end|>"]
    assert not {"extra_special_tokens", "backend"} & settings.keys()
    config = json.loads((tmp_path / "export" / "config.json").read_text())
    assert config["rope_theta"] == 500000.0 and ("rope_scaling" in config) == (name == "yarn")
    # The version that is installed here reads the same as before.
    assert AutoConfig.from_pretrained(tmp_path / "export").rope_parameters == model.config.rope_parameters
    again = TemplateChatEncoder(AutoTokenizer.from_pretrained(tmp_path / "export"))
    assert again.fingerprint == encoder.fingerprint


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
@pytest.mark.parametrize("name", ROPES)
def test_transformers_4_computes_the_same(name: str, older: Path, tmp_path: Path) -> None:
    encoder, model = exported(tmp_path / "export", ROPES[name])
    environ = os.environ | {"PYTHONPATH": str(older)}
    command = [sys.executable, "-c", READ, str(tmp_path / "export"), json.dumps(IDS)]
    ran = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr
    ids, special, logits = json.loads(ran.stdout.splitlines()[-1])
    assert ids == encoder.tokenizer("<|im_start|> a b").input_ids
    assert special == encoder.tokenizer.all_special_tokens
    torch.testing.assert_close(torch.tensor(logits), model(torch.tensor(IDS)).logits, atol=1e-6, rtol=1e-5)
