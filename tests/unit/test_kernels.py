"""Optional kernel packages: the table is transformers' own, and every command that knows the model names them."""

import json
import re
from pathlib import Path

import pytest
import transformers

from toolkit.cli import main
from toolkit.config.load import load
from toolkit.extras.doctor import facts as doctor_facts
from toolkit.plan import kernels
from toolkit.plan.kernels import DISTRIBUTIONS, TABLE, describe_missing, kernels_of

MODELS = Path(transformers.__file__).parent / "models"
DECORATOR = r"use_kernel_func_from_hub_with_fallback\(\s*\"\w+\",\s*\"(\w+)\""
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
QWEN = {"model_type": "qwen3_5_text", "hidden_size": 32, "intermediate_size": 48, "vocab_size": 64, **DELTA}
QWEN |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
QWEN |= {"layer_types": ["linear_attention", "full_attention"], "architectures": ["Qwen3_5ForCausalLM"]}


def test_the_table_is_what_transformers_calls() -> None:
    called = {
        folder.name: {*re.findall(DECORATOR, (folder / f"modeling_{folder.name}.py").read_text(encoding="utf-8"))}
        for folder in MODELS.iterdir()
        if (folder / f"modeling_{folder.name}.py").is_file()
    }
    expected = {kind: set(row.packages) for row in TABLE for kind in row.types}
    assert expected == {kind: packages for kind, packages in called.items() if packages}
    assert {name for row in TABLE for name in row.packages} == set(DISTRIBUTIONS)


def test_whose_layers_use_them() -> None:
    wrapper = {"model_type": "qwen3_5", "text_config": {"model_type": "qwen3_5_text"}}
    for config in (wrapper, QWEN, {"model_type": "qwen3_next"}):
        found = kernels_of(config)
        assert found is not None and found.layers == "gated delta rule"
    assert kernels_of({"model_type": "qwen3"}) is None and describe_missing({"model_type": "qwen3"}) == ""


def test_every_command_names_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(kernels, "find_spec", lambda name: None if name == "fla" else object())
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(QWEN))
    said = "Without flash-linear-attention its gated delta rule layers run in plain PyTorch"
    main(["models", str(tmp_path / "model")])
    assert said in " ".join(capsys.readouterr().out.split())
    main(["plan", "recipe=zero1", "model=hf", "model.path=model", "gpus=1x80GB"])
    assumed = "gated delta rule layers: times assume the kernels of flash-linear-attention causal-conv1d"
    assert assumed in " ".join(capsys.readouterr().out.split())
    assert said in doctor_facts._missing_kernels(load(["recipe=zero1", "model=hf", "model.path=model"]).cfg)
