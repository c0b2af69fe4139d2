"""A type of models that transformers may add one day: tried as a tiny model, named untested, never rejected for it."""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import generate_tested_types
import pytest
import transformers

from tests.unit.test_model_facts import checked
from toolkit.cli import main
from toolkit.config.schema import PrepareConfig, RunConfig
from toolkit.extras import type_trial
from toolkit.messages import read_table
from toolkit.models import load, trainable
from toolkit.models.chat import fit_tokenizer

# What the process of the trial imports as it starts: types that behave, leak, fail, die or hang.
TYPES = """
import os, time
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

def fail(*_): raise ValueError("no such kernel")
def die(*_): os._exit(9)
def hang(*_): time.sleep(600)
def leak(_, __, embedded): return embedded + 0.1 * embedded.cumsum(1)

def register(name, hook):
    class Config(LlamaConfig):
        model_type = name
    class Model(LlamaForCausalLM):
        config_class = Config
        def __init__(self, config):
            super().__init__(config)
            if hook is not None:
                self.model.embed_tokens.register_forward_hook(hook)
    AutoConfig.register(name, Config)
    AutoModelForCausalLM.register(Config, Model)

HOOKS = dict(good=None, leaks=leak, fails=fail, dies=die, hangs=hang)
for name, hook in HOOKS.items():
    register("new_" + name, hook)
"""
SIZES = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 8}


@pytest.fixture
def new_types(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Register the types here and in the processes that this one starts."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    mapping: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    contents = CONFIG_MAPPING._extra_content, mapping._extra_content
    before = [dict(content) for content in contents]
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(TYPES)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'site'}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.chdir(tmp_path)
    exec(TYPES, {"__name__": "new_types"})
    yield
    for content, old in zip(contents, before, strict=True):
        content.clear()
        content.update(old)


def folder_of(kind: str, folder: Path) -> Path:
    folder.mkdir()
    config = {"model_type": kind, "vocab_size": 300, "num_key_value_heads": 4, **SIZES}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("new_good", "model_type = new_good is untested: a tiny model of it was built, trains, and packs."),
        ("new_leaks", "untested: a tiny model of it was built and trains; it does not pack: .* influence each other"),
        ("new_fails", "untested: a tiny model of it was built, but does not train: ValueError: no such kernel."),
        ("new_dies", "untested: no tiny model of it could be tried: its process ended with code 9"),
        ("new_hangs", "untested: no tiny model of it could be tried: no answer within 20 s."),
    ],
)
def test_what_a_tiny_model_does(
    kind: str, sentence: str, new_types: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "new_hangs":
        monkeypatch.setattr(type_trial, "_TRIAL_S", 20)
    folder, cfg = folder_of(kind, tmp_path / "model"), RunConfig(prepare=PrepareConfig(dir=str(tmp_path / "cache")))
    about = type_trial.about(folder, cfg)
    assert re.search(sentence, about), about
    monkeypatch.setattr(type_trial, "_in_child", lambda folder: pytest.fail("it is cached"))
    assert type_trial.about(folder, cfg) == about


def test_it_is_named_and_not_rejected(
    new_types: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = folder_of("new_fails", tmp_path / "model")
    trial = type_trial.Trial(is_built=True, reason="ValueError: no such kernel")
    monkeypatch.setattr(type_trial, "_in_child", lambda folder: trial)
    assert main(["models", str(folder)]) == 0
    assert "  untested                model_type = new_fails is untested: a tiny" in capsys.readouterr().out
    load.load_empty(folder).to_empty(device="cpu").save_pretrained(folder)
    fit_tokenizer(lambda: ["and so on"], 270, tmp_path / "fit").save_pretrained(folder)
    code, printed = checked(folder, capsys)
    assert code == 0 and "does not train: ValueError: no such kernel." in printed, printed
    trainable.report_untested_type(load.load_empty(folder))
    assert capsys.readouterr().out.splitlines() == [
        "model_type = new_fails is untested: `toolkit check` tries a tiny model of it."
    ]


def test_the_list_is_that_of_this_transformers() -> None:
    listed = read_table("models/tested.yaml")
    assert len(listed["types"].split()) > 150
    if str(listed["transformers"]).split(".")[:2] == transformers.__version__.split(".")[:2]:
        assert listed["types"].split() == generate_tested_types.tested_types(), "run scripts/generate_tested_types.py"
    assert trainable.is_tested("qwen3") and not trainable.is_tested("xlnet")
