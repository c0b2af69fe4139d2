"""`toolkit prove` without ranks: small models of every architecture, what counts as a deviation, what is rejected."""

import json
from pathlib import Path

import official
import pytest
import torch

from tests.architectures import CONFIGS
from toolkit.cli import main
from toolkit.extras import shrink
from toolkit.extras.prove import Finding, deviation
from toolkit.extras.shrink import HEADS, shrunk_config, shrunk_model
from toolkit.messages import ModelError

NAN = float("nan")


@pytest.mark.parametrize("name", CONFIGS)
def test_every_architecture_becomes_small(name: str, tmp_path: Path) -> None:
    config = CONFIGS[name]().to_dict()
    large = {**config, "num_hidden_layers": 40, "intermediate_size": 13696, "vocab_size": 1000}
    (tmp_path / "config.json").write_text(json.dumps(large))
    model = shrunk_model(str(tmp_path), seed=1)
    assert model.config.model_type == config["model_type"] and model.config.num_attention_heads == HEADS
    assert model.config.vocab_size == 1000
    ids = torch.arange(12).view(1, -1)
    assert model(input_ids=ids).logits.isfinite().all()
    assert torch.equal(model(input_ids=ids).logits, shrunk_model(str(tmp_path), seed=1)(input_ids=ids).logits)


@pytest.mark.parametrize("family", ["v1", "v2", "v3", "glm4"])
def test_official_chatglms_become_small(family: str, tmp_path: Path) -> None:
    folder = official.write(tmp_path, family, tokenizer=True)
    model = shrunk_model(str(folder), seed=1, heads=8)
    own = json.loads((folder / "config.json").read_text())
    assert model.config.vocab_size == own.get("padded_vocab_size", own.get("vocab_size"))
    assert model.config.num_attention_heads == 8 and model.config.hidden_size == 8 * shrink.HEAD_SIZE


def test_grouping_of_heads_and_kinds_of_layers_stay() -> None:
    config = {"num_attention_heads": 32, "num_key_value_heads": 2, "layer_types": ["a", "a", "a", "b"] * 10}
    small = shrunk_config(
        {**config, "attention_dropout": 0.1, "rope_scaling": {"factor": 2, "short_factor": [1.0] * 64}}
    )
    assert small["num_key_value_heads"] == 2 and small["layer_types"] == ["a", "b", "a", "b"]
    assert small["attention_dropout"] == 0.0 and len(small["rope_scaling"]["short_factor"]) == shrink.HEAD_SIZE // 2
    assert shrunk_config({**config, "num_key_value_heads": 32})["num_key_value_heads"] == HEADS


def test_sizes_under_unknown_names_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["llama"]().to_dict()))
    monkeypatch.setattr(shrink, "LARGEST", 1000)
    with pytest.raises(ModelError, match="made small, this architecture still has"):
        shrunk_model(str(tmp_path), seed=1)


def test_deviations() -> None:
    assert deviation([1.0, 2.0], [1.0, 4.0]) == 0.5
    assert deviation([1.0], [1.0, 4.0]) != deviation([1.0], [1.0, 4.0])  # NaN
    for found, is_right in ((8e-4, True), (9e-4, False), (NAN, False)):
        assert Finding(name="losses", found=found, rounding=1e-4).is_right is is_right
    assert Finding(name="losses", found=1e-6, rounding=0.0).is_right  # another order of additions


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["tuning=ptuning_v2"], "prove knows tuning=full, freeze and lora"),
        (["output={file}"], "exists already"),
        (["steps=0"], "steps = 0 is not a positive whole number"),
    ],
)
def test_what_cannot_be_proved(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    given = [word.format(file=tmp_path / "file") for word in words]
    assert main(["prove", "--num_gpus", "2", "recipe=quickstart", f"run.dir={tmp_path}/runs", *given]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
