"""The text model of a multimodal one, exported on its own."""

from pathlib import Path

import pytest
import torch
import transformers

from tests.architectures import write
from toolkit.export.convert import export_verified
from toolkit.export.write import ExportOptions
from toolkit.messages import ConfigError, ModelError
from toolkit.models import probe
from toolkit.models.load_weights import load_model


@pytest.mark.parametrize("name", ["gemma3_images", "llama4", "qwen3_5"])
def test_it_gives_the_logits_of_the_whole_one(name: str, tmp_path: Path) -> None:
    """Of Llama 4 the text model is stored with its output layer, of the others beside it."""
    whole = load_model(write(tmp_path / name, name))
    export_verified(tmp_path / name, tmp_path / "text", ExportOptions(text_only=True))
    alone, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "text", output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert alone.num_parameters() < whole.num_parameters()
    ids = torch.arange(5, 21)[None]
    with torch.no_grad():
        assert torch.equal(alone(input_ids=ids).logits, whole(input_ids=ids).logits)
    saved = probe.read(tmp_path / "text")
    assert saved is not None and torch.equal(saved.logits, probe.capture(whole, saved.ids).logits)


def test_what_has_none_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "vl", "qwen2_5_vl")
    with pytest.raises(ModelError, match="out of which transformers makes no text model"):
        export_verified(tmp_path / "vl", tmp_path / "text", ExportOptions(text_only=True))
    assert not (tmp_path / "text").exists()
    with pytest.raises(ConfigError, match="remove format=official"):
        ExportOptions(text_only=True, format="official")
