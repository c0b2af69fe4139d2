"""Checkpoints of transformers' Trainer without DeepSpeed: names from the model's order, and what is rejected."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from toolkit.checkpoint.fragment_reader import Fragments
from toolkit.cli import main

STEP = 2


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.file}",)


def write(folder: Path, lora: bool) -> dict[str, dict[str, torch.Tensor]]:
    """Write a base model and a checkpoint of two steps; return what a fragment must hold of each trained parameter."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "vocab_size": 16}
    config = LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2, tie_word_embeddings=True)
    base: Any = LlamaForCausalLM(config)
    base.save_pretrained(folder / "base")
    model = base
    if lora:  # q, o and k have the same shape: only the order tells them apart
        model = get_peft_model(base, LoraConfig(r=2, target_modules=["o_proj", "k_proj", "q_proj"]))
        model.peft_config["default"].base_model_name_or_path = str(folder / "base")
    trained = [(name, one) for name, one in model.named_parameters() if one.requires_grad]
    groups = [[one for _, one in trained if one.dim() > 1], [one for _, one in trained if one.dim() < 2]]
    optimizer = torch.optim.AdamW([{"params": group} for group in groups], lr=0.1)
    ids = torch.arange(16).view(2, 8)
    for _ in range(STEP):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    checkpoint = folder / "checkpoint-2"
    model.save_pretrained(checkpoint)
    torch.save(optimizer.state_dict(), checkpoint / "optimizer.pt")
    (checkpoint / "trainer_state.json").write_text(json.dumps({"global_step": STEP, "epoch": 1.0}))
    states = ("exp_avg", "exp_avg_sq")
    return {
        name.removeprefix("base_model.model."): {
            "weight": one.detach(),
            **{state: optimizer.state[one][state] for state in states},
        }
        for name, one in trained
    }


def converted(folder: Path, capsys: pytest.CaptureFixture[str], code: int, *more: str) -> str:
    """Convert the checkpoint, see that nothing is left of a refusal, and return what was said."""
    assert main(["convert-checkpoint", str(folder / "checkpoint-2"), f"output={folder / 'output'}", *more]) == code
    assert (folder / "output").exists() == (code == 0)
    said = capsys.readouterr()
    return said.err if code else said.out


@pytest.mark.parametrize("lora", [False, True])
def test_states_get_the_names_that_they_belong_to(
    lora: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    held = write(tmp_path, lora)
    assert "comes from another program" in converted(tmp_path, capsys, 0)
    found = Fragments(tmp_path / "output")
    assert {*found.names} == held.keys() and len(held) == (12 if lora else 2 + 2 * 9)
    for name, values in held.items():
        assert found.numbers(name) == {"step": STEP}
        for state, value in values.items():
            assert torch.equal(found.whole(name, state), value), (name, state)


def test_the_base_of_an_adapter_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the adapter says, in the cache if that is a name on Hugging Face, or where base= says."""
    write(tmp_path, lora=True)
    (tmp_path / "base" / "model.safetensors").unlink()  # weights are not read
    file = tmp_path / "checkpoint-2" / "adapter_config.json"
    settings = json.loads(file.read_text()) | {"base_model_name_or_path": "owner/name"}
    file.write_text(json.dumps(settings))
    assert "was not found: owner/name. Add base=DIR" in converted(tmp_path, capsys, 2)
    converted(tmp_path, capsys, 0, f"base={tmp_path / 'base'}")
    shutil.rmtree(tmp_path / "output")
    cached = str(tmp_path / "base" / "config.json")
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_, **__: cached)
    converted(tmp_path, capsys, 0)


def test_what_cannot_be_told_is_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, lora=False)
    file = tmp_path / "checkpoint-2" / "optimizer.pt"
    content = torch.load(file, weights_only=True)
    assert "has no effect with" in converted(tmp_path, capsys, 2, f"base={tmp_path / 'base'}")
    other = json.loads(json.dumps(content["param_groups"]))
    other[0]["params"], other[1]["params"] = other[0]["params"][:3], other[0]["params"][3:] + other[1]["params"]
    torch.save(content | {"param_groups": other}, file)  # of a program with groups of its own
    assert "cannot be converted: ValueError: parameter groups [3, 17]" in converted(tmp_path, capsys, 74)
    swapped = {**content["state"], 0: content["state"][1], 1: content["state"][0]}
    torch.save(content | {"state": swapped}, file)  # of a model with another order
    assert "cannot be converted: ValueError: model.embed_tokens.weight: (8, 8)" in converted(tmp_path, capsys, 74)
    eight_bits = {number: {"state1": one["exp_avg"], "step": 1} for number, one in content["state"].items()}
    torch.save(content | {"state": eight_bits}, file)
    assert "optimizer state state1" in converted(tmp_path, capsys, 74)
    torch.save({"state": Bomb(tmp_path / "fired")}, file)
    assert "optimizer.pt is a pickle that wants to run code" in converted(tmp_path, capsys, 74)
    assert not (tmp_path / "fired").exists()
