"""Files in another form than a model computes with: read as transformers reads them, and exported as they were."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from tests import model_types
from tests.architectures import auto_class, publish, stored_tensors, write
from toolkit.export.convert import export_any
from toolkit.export.write import ExportOptions, write_folder
from toolkit.messages import ModelError
from toolkit.models import load, save, stored_form

ARCHITECTURES = ["qwen3_vl_moe", "qwen3_5_moe", "ernie4_5_vl_moe", "llava", "mixtral", "gpt_oss", "llama4"]
TYPES = ["hrm_text", "inkling2_text", "olmo_hybrid"]
"""Joint matrices in one tensor, interleaved experts, and parts of unequal sizes."""


def _write(folder: Path, name: str) -> Any:
    """Write a model as published; return transformers' class that loads it."""
    if name not in TYPES:
        write(folder, name)
        return auto_class(name)
    model = model_types.built(name)
    publish(model, folder, name)
    return type(model)


def _same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("name", ARCHITECTURES + TYPES)
def test_what_is_read_in_pieces_is_exported_as_it_was(name: str, tmp_path: Path) -> None:
    """Also out of a checkpoint, which has no more than a description of the model."""
    loads = _write(tmp_path / "base", name)
    expected, published = loads.from_pretrained(tmp_path / "base").state_dict(), stored_tensors(tmp_path / "base")
    model, values = load.stream_parameters(tmp_path / "base")
    state = dict(values)
    assert state and all(torch.equal(value, expected[parameter]) for parameter, value in state.items())
    files = save.non_weight_files(model, None)
    for file, content in files.items():
        (tmp_path / "described" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "described" / file).write_bytes(content)
    described = load.load_empty(tmp_path / "described")
    write_folder(described, files, tmp_path / "export", "hf", None, state)
    assert _same(stored_tensors(tmp_path / "export"), published)
    assert not (tmp_path / "export" / stored_form.FILE).exists()


@pytest.mark.parametrize("name", ["qwen3_vl_moe", "qwen3_5_moe", "llava", "olmo_hybrid"])
def test_a_loaded_and_a_merged_model_too(name: str, tmp_path: Path) -> None:
    loads = _write(tmp_path / "base", name)
    published = stored_tensors(tmp_path / "base")
    export_any(tmp_path / "base", tmp_path / "copy", ExportOptions())
    assert _same(stored_tensors(tmp_path / "copy"), published)
    settings = LoraConfig(r=2, target_modules=r".*self_attn\.q_proj", init_lora_weights=False)
    get_peft_model(loads.from_pretrained(tmp_path / "base"), settings).save_pretrained(tmp_path / "adapter")
    export_any(tmp_path / "adapter", tmp_path / "merged", ExportOptions(merge=True), base=str(tmp_path / "base"))
    merged = stored_tensors(tmp_path / "merged")
    assert {key: value.shape for key, value in merged.items()} == {key: value.shape for key, value in published.items()}
    changed = {key for key in merged if not torch.equal(merged[key], published[key])}
    assert changed and all("q_proj" in key for key in changed)


def test_a_model_out_of_no_files_has_the_published_form(tmp_path: Path) -> None:
    """transformers (5.23) transposes Qwen3-VL-MoE's experts as it loads them, and not as it saves them."""
    write(tmp_path / "base", "qwen3_vl_moe")
    model = auto_class("qwen3_vl_moe").from_pretrained(tmp_path / "base")
    model._weight_conversions = None
    save.save_model(model, tmp_path / "copy")
    assert _same(stored_tensors(tmp_path / "copy"), stored_tensors(tmp_path / "base"))


def test_a_damaged_record_of_the_form_is_named(tmp_path: Path) -> None:
    write(tmp_path, "mixtral")
    (tmp_path / stored_form.FILE).write_text('{"lm_head.weight": [32, "many"]}')
    with pytest.raises(ModelError, match=r"stored_form.json is damaged\. Remove it"):
        load.load_empty(tmp_path)
