"""Tensors in a model's files that are none of the model's: layers for multi-token prediction."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.architectures import PREDICTING, auto_class, stored_tensors, write, write_predicting
from toolkit.export.convert import export_verified
from toolkit.export.write import ExportOptions, write_folder
from toolkit.models.load import load_empty, stream_parameters
from toolkit.models.load_weights import assign_state, load_model
from toolkit.models.record import record_of
from toolkit.models.save import non_weight_files, save_model


def count_in(folder: Path, name: str) -> Any:
    """Return how many such layers config.json counts."""
    config = json.loads((folder / "config.json").read_text())
    return config.get("text_config", config)[PREDICTING[name][1]]


@pytest.mark.parametrize("max_shard_size", ["5GB", "20KB"])
@pytest.mark.parametrize("name", PREDICTING)
def test_exports_copy_them(name: str, max_shard_size: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    extra = write_predicting(tmp_path / "in", name)
    export_verified(tmp_path / "in", tmp_path / "out", ExportOptions(max_shard_size=max_shard_size))
    before, after = (stored_tensors(tmp_path / folder) for folder in ("in", "out"))
    assert before.keys() == after.keys(), "every tensor that came in comes out"
    assert all(torch.equal(after[key], value) and after[key].dtype == value.dtype for key, value in extra.items())
    assert count_in(tmp_path / "out", name) == 1
    assert not (tmp_path / "out" / "extra_tensors.json").exists()
    model, report = auto_class(name).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not report["missing_keys"] and not report["mismatched_keys"]
    ids = torch.arange(5, 21)[None]
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, load_model(tmp_path / "in")(input_ids=ids).logits)
    # What was exported is exported again.
    export_verified(tmp_path / "out", tmp_path / "again", ExportOptions())
    assert stored_tensors(tmp_path / "again").keys() == before.keys()


@pytest.mark.parametrize("name", PREDICTING)
def test_without_the_directory_none_are_promised(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    extra = write_predicting(tmp_path / "in", name)
    model, values = stream_parameters(tmp_path / "in")
    files = non_weight_files(model, None)
    assign_state(model, dict(values))
    (tmp_path / "in").rename(tmp_path / "elsewhere")
    write_folder(model, files, tmp_path / "out", "hf", None)
    assert f"lacks {len(extra)} tensors" in capsys.readouterr().out
    assert count_in(tmp_path / "out", name) == 0
    assert not stored_tensors(tmp_path / "out").keys() & extra.keys()
    save_model(model, tmp_path / "alone")
    assert count_in(tmp_path / "alone", name) == 0


def test_a_text_model_has_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    extra = write_predicting(tmp_path / "in", "qwen3_5")
    export_verified(tmp_path / "in", tmp_path / "out", ExportOptions(text_only=True))
    assert f"{len(extra)} tensors in {tmp_path / 'in'}" in capsys.readouterr().out
    assert not stored_tensors(tmp_path / "out").keys() & extra.keys()
    assert transformers.AutoConfig.from_pretrained(tmp_path / "out").to_dict()["mtp_num_hidden_layers"] == 0


def test_buffers_of_old_files_are_not_named(tmp_path: Path) -> None:
    """GPT-2's files hold masks that transformers computes."""
    write(tmp_path / "in", "gpt2")
    stored = load_file(tmp_path / "in" / "model.safetensors")
    stored["transformer.h.0.attn.bias"] = torch.ones(1, 1, 8, 8)
    save_file(stored, tmp_path / "in" / "model.safetensors", metadata={"format": "pt"})
    assert record_of(load_empty(tmp_path / "in", compared=True)).extra_tensors is None
