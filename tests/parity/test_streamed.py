"""A model that is read layer by layer gives the logits of the whole one, in the memory of a layer."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from golden import GOLDEN, SETS
from safetensors.torch import load_file, save_file
from transformers import conversion_mapping, core_model_loading as loading

from tests.unit.tiny_model import SIZES
from toolkit.engine.memory import PeakMemory
from toolkit.export.verify import verify_logits
from toolkit.export.write import check_exportable, write_folder
from toolkit.messages import CheckpointError, ModelError
from toolkit.models import load_model, probe
from toolkit.models.load import streamed_model
from toolkit.models.save import non_weight_files, save_model

MODELS: dict[str, Any] = {
    "llama": (transformers.LlamaConfig, {}),
    "tied": (transformers.Qwen2Config, {"tie_word_embeddings": True}),
    "gemma": (transformers.Gemma2Config, {"tie_word_embeddings": True}),
    "experts": (
        transformers.Qwen3MoeConfig,
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    ),
    "joined": (  # of three convolutions in the files one is computed
        transformers.OlmoHybridConfig,
        {
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
        },
    ),
    "divided": (transformers.HrmTextConfig, {"num_layers_per_stack": 1}),  # of one matrix in the files four are
}


def model_of(name: str, **sizes: int) -> transformers.PreTrainedModel:
    kind, more = MODELS[name]
    torch.manual_seed(2)
    return transformers.AutoModelForCausalLM.from_config(kind(**{**SIZES, **more, **sizes})).eval()


@pytest.mark.parametrize("name", [*SETS, *MODELS])
def test_logits_are_those_of_the_whole_model(name: str, tmp_path: Path) -> None:
    if name in SETS:
        folder = GOLDEN / name
    else:
        folder = tmp_path / "model"
        model_of(name).save_pretrained(folder)
    whole = load_model(folder)
    ids = probe.spread_ids(whole.config)
    streamed = streamed_model(folder)
    for _ in range(2):  # what was dropped is read again
        assert torch.equal(probe.capture(streamed, ids).logits, probe.capture(whole, ids).logits)
    assert probe.capture(streamed, ids).dtype == probe.capture(whole, ids).dtype


class Woven(loading.Concatenate):
    """A conversion that a newer transformers might have."""


def test_only_what_cannot_be_read_piece_by_piece_is_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then ZeRO-3 says so, and the export is proven all the same. No conversion of transformers 5.23 needs it."""
    for name in ("joined", "divided"):
        model = model_of(name)
        taken = probe.capture(model, probe.spread_ids(model.config))
        write_folder(model, non_weight_files(model, None), tmp_path / name, "hf", taken)
        with monkeypatch.context() as patched:
            patched.setattr("toolkit.models.load.load_by_transformers", lambda *_: pytest.fail("it was read whole"))
            streamed_model(tmp_path / name)
            assert "the logits are those of the save" in verify_logits(tmp_path / name)

    def newer(model: transformers.PreTrainedModel, **options: Any) -> list[loading.WeightTransform]:
        table = conversion_mapping.get_model_conversion_mapping(model, **options)
        for entry in table:
            if len(entry.source_patterns) > 1 and isinstance(entry, loading.WeightConverter):
                entry.operations = [Woven(dim=0)]
        return table

    monkeypatch.setattr("toolkit.models.stored_form.get_model_conversion_mapping", newer)
    with pytest.raises(ModelError, match=r"OlmoHybridForCausalLM stores .* only be read whole, not with zero.stage=3"):
        load_model(tmp_path / "joined", ready=lambda *_: None)
    assert "the logits are those of the save" in verify_logits(tmp_path / "joined")


def test_a_head_that_its_model_holds_before_the_embedding_that_it_is_tied_to(tmp_path: Path) -> None:
    """Training knows the weight by the head's name, files by the embedding's."""
    sizes = {**SIZES, "pad_token_id": 1, "max_position_embeddings": 64, "is_decoder": True}
    model = transformers.CamembertForCausalLM(transformers.CamembertConfig(**sizes)).eval()
    state = {name: value.detach() for name, value in model.named_parameters()}
    assert "lm_head.decoder.weight" in state
    taken, files = probe.capture(model, probe.spread_ids(model.config)), non_weight_files(model, None)
    check_exportable(model, files, tmp_path / "export")
    write_folder(model, files, tmp_path / "export", "hf", taken, state=state)
    assert "the logits are those of the save" in verify_logits(tmp_path / "export")


def test_no_more_than_a_layer_is_in_memory(tmp_path: Path) -> None:
    model = model_of("llama", num_hidden_layers=16, hidden_size=64, vocab_size=256, intermediate_size=256)
    model.save_pretrained(tmp_path / "model")
    all_bytes = sum(one.nbytes for one in model.parameters())
    layer_bytes = sum(one.nbytes for one in model.model.layers[0].parameters())
    ids = probe.spread_ids(model.config)
    with PeakMemory(torch.device("cpu"), only_new=True) as memory:
        probe.capture(streamed_model(tmp_path / "model"), ids)
        peak = memory.highest()
    assert layer_bytes < peak < 4 * layer_bytes < all_bytes / 2


def test_an_export_is_proven_without_loading_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, folder = model_of("llama"), tmp_path / "export"
    taken = probe.capture(model, probe.spread_ids(model.config))
    write_folder(model, non_weight_files(model, None), folder, "hf", taken)
    monkeypatch.setattr("toolkit.models.load_weights.load_model", lambda path: pytest.fail("it was loaded whole"))
    assert "the logits are those of the save" in verify_logits(folder)
    values = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    save_file({**values, name: values[name].flip(0)}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match="other weights than were saved: the logits differ by"):
        verify_logits(folder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_bit_that_is_written_otherwise_is_found(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In half precision no forward pass could tell it from rounding; here of experts, which files hold one by one."""
    model, folder, name = model_of("experts").to(dtype), tmp_path / "export", "model.layers.1.mlp.experts.3.up_proj"
    state = {key: value.detach().clone() for key, value in model.named_parameters()}

    def save(*words: Any, **more: Any) -> None:
        save_model(*words, **more)
        [file] = words[1].glob("*.safetensors")
        values = load_file(file)
        bits = values[f"{name}.weight"].view(torch.uint8)
        bits[7, 4] ^= 1
        save_file(values, file, {"format": "pt"})

    write_folder(model, non_weight_files(model, None), folder, "hf", None, state=state)
    monkeypatch.setattr("toolkit.export.write.save_model", save)
    with pytest.raises(
        CheckpointError, match=r"does not hold what was trained: .*layers\.1\.mlp\.experts\.gate_up_proj"
    ):
        write_folder(model, non_weight_files(model, None), tmp_path / "other", "hf", None, state=state)
    assert [path.name for path in tmp_path.iterdir()] == ["export"]


def test_a_model_that_uses_a_layer_elsewhere_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, folder = model_of("llama"), tmp_path / "export"

    def forward(self: Any, hidden: torch.Tensor) -> torch.Tensor:  # reads weights that are dropped by then
        return torch.nn.functional.linear(hidden, self.weight) + 0 * norm_of(self)

    def norm_of(head: Any) -> torch.Tensor:
        return owner[head].model.layers[0].mlp.down_proj.weight.sum() if head in owner else torch.zeros(())

    owner: dict[Any, Any] = {model.lm_head: model}
    monkeypatch.setattr("toolkit.export.verify.streamed_model", lambda path: _linked(streamed_model(path), owner))
    monkeypatch.setattr("toolkit.models.load_weights.load_model", lambda path: _linked(load_model(path), owner))
    taken = probe.capture(model, probe.spread_ids(model.config))
    write_folder(model, non_weight_files(model, None), folder, "hf", taken)
    with monkeypatch.context() as patched:
        patched.setattr(torch.nn.Linear, "forward", forward)
        ids = probe.spread_ids(model.config)
        assert math.isnan(float(probe.capture(_linked(streamed_model(folder), owner), ids).logits.sum()))
        assert "the logits are those of the save" in verify_logits(folder)


def _linked(model: Any, owner: dict[Any, Any]) -> Any:
    owner[model.lm_head] = model
    return model
