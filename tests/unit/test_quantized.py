"""Directories of quantized weights: what every command says of them, how they are read, and their copies in 16 bits, by
the formulas that the formats' own programs publish.
"""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.architectures import stored_tensors, write, write_predicting
from tests.quantizers import INTEGER_FORMATS, INTEGERS, change, write_fp8, write_integers
from tests.unit.tiny_model import SIZES
from toolkit.cli import main
from toolkit.config.schema import ModelConfig, RunConfig
from toolkit.export.convert import export_verified
from toolkit.export.write import ExportOptions
from toolkit.messages import LARGEST_JSON_BYTES, ModelError
from toolkit.models.added_tokens import _check_supported
from toolkit.models.extra_tensors import dtype_and_shape
from toolkit.models.load import stream_parameters, streamed_model
from toolkit.models.load_weights import load_model
from toolkit.models.quantized import check_readable
from toolkit.models.record import record_of
from toolkit.models.weights import files_of
from toolkit.tasks.distill import check_teacher

COPY, ORIGINAL = "toolkit export-model {folder} dtype=bf16 output=DIR", "Use the original repository in bf16"
PUBLISHED: dict[str, tuple[dict[str, Any], str]] = {
    # openai/gpt-oss-20b
    "mxfp4": ({"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}, COPY),
    # deepseek-ai/DeepSeek-V3
    "fp8": (
        {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]},
        COPY,
    ),
    # mistralai/Ministral-3-3B-Instruct-2512
    "fp8 of one scale": ({"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}, COPY),
    # TheBloke/Llama-2-7B-Chat-GPTQ
    "gptq": ({"bits": 4, "group_size": 128, "desc_act": True, "sym": True, "quant_method": "gptq"}, COPY),
    "gptq marlin": ({"bits": 4, "quant_method": "gptq", "checkpoint_format": "marlin"}, ORIGINAL),
    # Qwen/Qwen2.5-7B-Instruct-AWQ
    "awq": ({"bits": 4, "group_size": 128, "quant_method": "awq", "version": "gemm", "zero_point": True}, COPY),
    "awq gemv": ({"bits": 4, "group_size": 128, "quant_method": "awq", "version": "gemv"}, ORIGINAL),
    # moonshotai/Kimi-K2-Thinking
    "compressed-tensors": (
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": INTEGERS | {"group_size": 32}}},
        },
        COPY,
    ),
    "compressed-tensors sparse": ({"quant_method": "compressed-tensors", "format": "sparse-24-bitmask"}, ORIGINAL),
    # unsloth's -bnb-4bit repositories, and those of before there was a quant_method
    "bitsandbytes": ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, ORIGINAL),
    "old bitsandbytes": ({"load_in_8bit": True}, ORIGINAL),
    # nvidia's -NVFP4 repositories
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, ORIGINAL),
    "auto-round": ({"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round:auto_gptq"}, ORIGINAL),
    # mlx-community's repositories
    "mlx": ({"group_size": 64, "bits": 4}, ORIGINAL),
}
"""What published repositories say in quantization_config -> what is to be done."""
NAMES = {"fp8 of one scale": "fp8", "old bitsandbytes": "bitsandbytes", "modelopt": "modelopt NVFP4"}


@pytest.mark.parametrize("case", PUBLISHED)
def test_the_kind_and_the_way_are_named(case: str, tmp_path: Path) -> None:
    """What is read is so as well where a change of its tables has to be made in the files themselves."""
    folder, (settings, way) = write(tmp_path / "model", "llama"), PUBLISHED[case]
    change(folder, {"quantization_config": settings})
    reads: list[Callable[[], Any]] = [lambda: _check_supported(ModelConfig(path=str(folder)), folder)]
    if way == ORIGINAL:
        reads += [
            lambda: stream_parameters(folder),
            lambda: export_verified(folder, tmp_path / "out", ExportOptions()),
        ]
    else:
        assert not any(parameter.is_meta for parameter in load_model(folder).parameters())
    for read in reads:
        with pytest.raises(ModelError) as raised:
            read()
        name = NAMES.get(case, case.split()[0])
        assert f"({name} in config.json)" in str(raised.value) and way.format(folder=folder) in str(raised.value)


def test_where_a_wrapper_says_it(tmp_path: Path) -> None:
    """Some say it of their text model alone, as Kimi K2.5; the model has nothing of it any more."""
    folder = write(tmp_path / "model", "mistral3")
    config = json.loads((folder / "config.json").read_text())
    for settings, is_read in (({"quant_method": "fp8"}, True), ({"quant_method": "modelopt"}, False)):
        change(folder, {"text_config": config["text_config"] | {"quantization_config": settings}})
        if not is_read:
            with pytest.raises(ModelError, match=r"\(modelopt in config.json\)"):
                check_readable(folder)
            continue
        assert "quant" not in str(load_model(folder).config.to_dict())


def test_commands_say_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """NVIDIA ModelOpt's exports may say it in hf_quant_config.json alone, which is read with bounds."""
    monkeypatch.chdir(tmp_path)
    Path("chat.jsonl").write_text('{"prompt": "a", "response": "b"}\n')
    folder = write(tmp_path / "model", "llama")
    file = folder / "hf_quant_config.json"
    producer = {"name": "modelopt", "version": "0.37.0"}
    file.write_text(json.dumps({"producer": producer, "quantization": {"quant_algo": "FP8", "group_size": None}}))
    errors = told(folder, capsys)
    assert len(set(errors)) == 1 and "(modelopt FP8 in hf_quant_config.json)" in errors[0] and ORIGINAL in errors[0]
    assert "docs/models.md#quantized-checkpoints" in errors[0]
    for content, message in (("{", "is not JSON"), ("[" * 5000, "is not JSON")):
        file.write_text(content)
        with pytest.raises(ModelError, match=message):
            stream_parameters(folder)
    os.truncate(file, LARGEST_JSON_BYTES + 1)
    with pytest.raises(ModelError, match="more than"):
        stream_parameters(folder)


def told(folder: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return what each command says of a directory's quantized weights."""
    run = ["recipe=zero1", "model=hf", f"model.path={folder}", "data=chat.jsonl"]
    errors = []
    for words in (["check", *run], ["train", *run], ["plan", *run], ["models", str(folder)]):
        capsys.readouterr()
        code = main(words)
        shown = capsys.readouterr()
        text = " ".join((shown.out + shown.err).split())
        found = re.search(r"\S+ holds quantized weights .*?checkpoints\)", text)
        assert found and code == (0 if words[0] == "plan" else 2), (words, code, text)
        errors.append(found[0])
    return errors


def write_mxfp4(folder: Path) -> dict[str, torch.Tensor]:
    """Write a gpt-oss as published; return what its experts are in 16 bits."""
    sizes = SIZES | {"hidden_size": 64, "intermediate_size": 64, "num_local_experts": 4, "num_experts_per_tok": 2}
    transformers.GptOssForCausalLM(transformers.GptOssConfig(**sizes)).bfloat16().save_pretrained(folder)
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])  # OCP Microscaling Formats 1.0: E2M1
    values = torch.cat((values, -values))
    stored, expected = {}, {}
    for name, value in load_file(folder / "model.safetensors").items():
        stored[name] = value
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, inputs, outputs = value.shape
            blocks = torch.randint(256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
            scales = torch.randint(118, 124, (experts, outputs, inputs // 32), dtype=torch.uint8)
            del stored[name]
            stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            pairs = torch.stack((values[(blocks & 15).int()], values[(blocks >> 4).int()]), dim=-1).flatten(-2)
            whole = pairs * torch.exp2(scales.float() - 127)[..., None]
            expected[name] = whole.reshape(experts, outputs, inputs).transpose(1, 2).bfloat16()
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    change(folder, {"quantization_config": {"quant_method": "mxfp4"}})
    return expected


@pytest.mark.parametrize("write_model", [write_fp8, write_mxfp4])
def test_a_copy_is_what_transformers_dequantizes(write_model: Callable[..., Any], tmp_path: Path) -> None:
    """Values are those of the formula and of transformers (5.23), which dequantizes on CPUs; then it is a model."""
    torch.manual_seed(5)
    expected = write_model(tmp_path / "quantized")
    (tmp_path / "quantized" / "notes.txt").write_text("kept")
    said = export_verified(tmp_path / "quantized", tmp_path / "bf16", ExportOptions())
    assert "it loads" in said and (tmp_path / "bf16" / "notes.txt").is_file()
    written = dict(stream_parameters(tmp_path / "bf16")[1])
    assert expected and all(torch.equal(written[name], value) for name, value in expected.items())
    auto = transformers.AutoModelForCausalLM
    theirs = auto.from_pretrained(tmp_path / "quantized", dtype=torch.bfloat16).state_dict()
    ours = auto.from_pretrained(tmp_path / "bf16", dtype=torch.bfloat16).state_dict()
    assert theirs.keys() == ours.keys() and all(torch.equal(ours[name], value) for name, value in theirs.items())
    export_verified(tmp_path / "bf16", tmp_path / "export", ExportOptions())
    assert load_model(tmp_path / "export").dtype is torch.bfloat16


@pytest.mark.parametrize("case", INTEGER_FORMATS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_integers_are_scaled_exactly(case: str, dtype: str, tmp_path: Path) -> None:
    """scale * (code - zero point), rounded once, in a model that trains; by names and shapes of the published files.
    AutoGPTQ's forward pass (2, 4, 8 bits), AutoAWQ's dequantize_gemm and compressed-tensors' decompress, run once on
    such tensors, gave the same bits.
    """
    folder = tmp_path / "model"
    expected = {name: value.to(getattr(torch, dtype)) for name, value in write_integers(folder, case, dtype).items()}
    assert "it loads" in export_verified(folder, tmp_path / "copy", ExportOptions(max_shard_size="20KB"))
    written = stored_tensors(tmp_path / "copy")
    assert expected and len(list((tmp_path / "copy").glob("*.safetensors"))) > 1
    for name, value in expected.items():
        assert torch.equal(written[name], value), name
    config = json.loads((tmp_path / "copy" / "config.json").read_text())
    assert config["dtype"] == dtype and "quantization_config" not in config
    assert all(value.dtype is getattr(torch, dtype) for value in written.values())


@pytest.mark.parametrize("case", INTEGER_FORMATS)
def test_integers_are_read_without_a_copy(case: str, tmp_path: Path) -> None:
    """In float32 the values are not rounded, nor are those that merging adds to."""
    folder = tmp_path / "model"
    expected = write_integers(folder, case)
    model, streamed = load_model(folder, dtype="float32"), dict(stream_parameters(folder)[1])
    read = dict(load_model(folder, dtype="bfloat16").named_parameters())
    for name, value in expected.items():
        assert torch.equal(model.get_parameter(name), value) and torch.equal(streamed[name], value), name
        assert torch.equal(read[name], value.bfloat16()), name
    assert load_model(folder).dtype is torch.bfloat16
    assert "quant" not in str(model.config.to_dict())


@pytest.mark.parametrize("write_model", [write_fp8, write_mxfp4])
def test_a_model_computes_as_its_copy(write_model: Callable[..., Any], tmp_path: Path) -> None:
    """Loaded as a whole and layer by layer, as a teacher is."""
    torch.manual_seed(6)
    write_model(tmp_path / "quantized")
    export_verified(tmp_path / "quantized", tmp_path / "copy", ExportOptions())
    ids = torch.arange(1, 40)[None]
    [whole, copied] = [load_model(tmp_path / name, dtype="bfloat16") for name in ("quantized", "copy")]
    streamed = streamed_model(tmp_path / "quantized", torch.bfloat16)
    with torch.no_grad():
        logits = [model(input_ids=ids).logits for model in (whole, copied, streamed)]
    assert torch.equal(logits[0], logits[1]) and torch.equal(logits[0], logits[2])


def test_transformers_loads_bitsandbytes_as_it_is(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    write(tmp_path / "base", "llama")
    settings = transformers.BitsAndBytesConfig(load_in_4bit=True)
    auto = transformers.AutoModelForCausalLM
    auto.from_pretrained(tmp_path / "base", quantization_config=settings, device_map="cpu").save_pretrained(
        tmp_path / "4 bits"
    )
    layer = load_model(tmp_path / "4 bits", dtype="bfloat16").model.layers[0].mlp.up_proj
    assert type(layer).__name__ == "Linear4bit"


def test_layers_for_several_tokens_are_recorded_as_an_export_reads_them(tmp_path: Path) -> None:
    """A model in float32 has layers for multi-token prediction in 16 bits, as they would be in unquantized files."""
    extra = write_predicting(tmp_path / "model", "deepseek_v3")
    file = tmp_path / "model" / "model.safetensors"
    stored = load_file(file)
    for key in [key for key in extra if key.endswith("proj.weight")]:
        stored |= {key: stored[key].to(torch.float8_e4m3fn), f"{key}_scale_inv": torch.ones(())}
    save_file(stored, file, {"format": "pt"})
    change(tmp_path / "model", {"quantization_config": {"quant_method": "fp8", "weight_block_size": None}})
    source = files_of(tmp_path / "model")
    for dtype in ("float32", "bfloat16"):
        recorded = record_of(load_model(tmp_path / "model", dtype=dtype)).extra_tensors
        assert recorded is not None and recorded["tensors"].keys() == extra.keys()
        assert all(dtype_and_shape(source, name) == found for name, found in recorded["tensors"].items())


@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3_5_moe", "ministral3", "llama4"])
def test_experts_and_multimodal_models_in_fp8(name: str, tmp_path: Path) -> None:
    """Experts that are one by one in the files and joint in memory, and language models inside of others."""
    folder, plain = write(tmp_path / "fp8", name), tmp_path / "plain"
    stored, expected = {}, {}
    for key, value in load_file(folder / "model.safetensors").items():
        expected[key] = value
        stored[key] = value
        if value.ndim == 2 and re.search(r"layers.*proj\.weight$", key) and "vision" not in key:
            scale = value.float().abs().max() / 448
            stored[key] = (value.float() / scale).to(torch.float8_e4m3fn)
            stored[f"{key}_scale_inv"] = scale
            expected[key] = (stored[key].float() * scale).to(value.dtype)
    assert len(stored) > len(expected) + 7
    shutil.copytree(folder, plain)
    save_file(expected, plain / "model.safetensors", {"format": "pt"})
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    change(folder, {"quantization_config": {"quant_method": "fp8", "weight_block_size": None}})
    read, copied = (load_model(path, dtype="bfloat16").state_dict() for path in (folder, plain))
    assert read.keys() == copied.keys() and all(torch.equal(read[key], value) for key, value in copied.items())


@pytest.mark.parametrize("method", ["fp8", "compressed-tensors"])
def test_the_last_block_may_be_short(method: str, tmp_path: Path) -> None:
    """As DeepSeek-V3's kv_a_proj_with_mqa, of 576 rows in blocks of 128, which its own weight_dequant masks."""
    folder = write(tmp_path / "model", "llama")
    stored = load_file(folder / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    codes = torch.randn(stored[name].shape).to(torch.float8_e4m3fn)
    rows, columns = codes.shape
    scales = torch.rand(-(-rows // 24), -(-columns // 24))
    stored[name], stored[f"{name}_scale{'_inv' if method == 'fp8' else ''}"] = codes, scales
    stored["model.layers.0.self_attn.q_proj.activation_scale"] = torch.ones(1)
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    group = {"weights": {"block_structure": [24, 24], "num_bits": 8}}
    settings = {"weight_block_size": [24, 24], "format": "float-quantized", "config_groups": {"group_0": group}}
    change(folder, {"quantization_config": {"quant_method": method, **settings}})
    export_verified(folder, tmp_path / "copy", ExportOptions(dtype="float32"))
    whole = torch.empty(codes.shape)
    for row in range(rows):
        for column in range(columns):
            whole[row, column] = codes[row, column].float() * scales[row // 24, column // 24]
    assert torch.equal(stored_tensors(tmp_path / "copy")[name], whole)


@pytest.mark.parametrize("scales", [torch.uint8, torch.float8_e4m3fn])
def test_floats_of_4_bits_in_compressed_tensors(scales: torch.dtype, tmp_path: Path) -> None:
    """mxfp4-pack-quantized has exponents of 2 for 32 values, nvfp4-pack-quantized FP8 for 16 and a divisor for all."""
    folder = write(tmp_path / "model", "llama")
    stored = load_file(folder / "model.safetensors")
    stem, size = "model.layers.1.mlp.gate_proj.weight", 32 if scales is torch.uint8 else 16
    outputs, inputs = stored.pop(stem).shape
    halves = torch.randint(256, (outputs, inputs // 2), dtype=torch.uint8)
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    values = torch.stack((table[(halves & 15).int()], table[(halves >> 4).int()]), dim=-1).view(outputs, inputs)
    if scales is torch.uint8:
        stored_scales = torch.randint(120, 130, (outputs, inputs // size), dtype=torch.uint8)
        factors = torch.exp2(stored_scales.float() - 127)
    else:
        stored_scales = torch.rand(outputs, inputs // size).to(scales)
        stored[f"{stem}_global_scale"] = torch.tensor([8.0])
        factors = stored_scales.float() / 8
    stored |= {f"{stem}_packed": halves, f"{stem}_scale": stored_scales}
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    change(folder, {"quantization_config": {"quant_method": "compressed-tensors", "format": "mixed-precision"}})
    export_verified(folder, tmp_path / "copy", ExportOptions())
    expected = (values * factors.repeat_interleave(size, 1)).bfloat16()
    assert torch.equal(stored_tensors(tmp_path / "copy")[stem], expected)


def test_damaged_weights_are_named(tmp_path: Path) -> None:
    """What is missing, of another shape, without a scale, or too large for the precision stops the copy."""
    folder = tmp_path / "model"
    write_fp8(folder)
    file = folder / "model.safetensors"
    whole, name = load_file(file), "model.layers.0.self_attn.q_proj.weight"
    damages: dict[str, dict[str, Any]] = {
        "is in 8 bits without a scale": {f"{name}_scale_inv": None},
        "do not fit together .*: missing": {name: None},
        "do not fit together": {f"{name}_scale_inv": torch.ones(7, 3)},
        "has values that torch.float16 cannot hold. Use dtype=bf16": {f"{name}_scale_inv": torch.full((1, 1), 1e4)},
    }
    for message, changed in damages.items():
        damaged = {key: changed.get(key, value) for key, value in whole.items()}
        save_file({key: value for key, value in damaged.items() if value is not None}, file, {"format": "pt"})
        with pytest.raises(ModelError, match=message):
            export_verified(folder, tmp_path / "copy", ExportOptions(dtype="float16"))
        with pytest.raises(ModelError, match=message):
            load_model(folder, dtype="float16")
        assert not (tmp_path / "copy").exists()


def test_a_teacher_of_another_kind_is_rejected(tmp_path: Path) -> None:
    cfg, folder = RunConfig(), write(tmp_path / "teacher", "llama")
    change(folder, {"quantization_config": {"quant_method": "auto-round"}})
    cfg.distill.teacher = str(folder)
    with pytest.raises(ModelError, match=r"quantized weights \(auto-round in config.json"):
        check_teacher(cfg, None)
