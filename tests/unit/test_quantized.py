"""Directories of quantised weights: what is reported of them, and the way to train their models."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.architectures import write
from tests.unit.tiny_model import SIZES
from toolkit.cli import main
from toolkit.export.convert import export_verified
from toolkit.export.write import ExportOptions
from toolkit.messages import ModelError
from toolkit.models.load import load_model, stream_parameters

METHODS = {
    "fp8": "FineGrainedFP8Config(dequantize=True)",
    "mxfp4": "Mxfp4Config(dequantize=True)",
    "gptq": "tuning=qlora",
    "awq": "tuning=qlora",
    "compressed-tensors": "tuning=qlora",
    "bitsandbytes": "tuning=qlora",
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("section", ["", "text_config"])
def test_check_and_train_say_the_same(
    section: str, method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("chat.jsonl").write_text('{"prompt": "a", "response": "b"}\n')
    folder = write(tmp_path / "model", "llama")
    change(folder, {section: {"quantization_config": {"quant_method": method}}} if section else quantized(method))
    errors = []
    for command in ("check", "train"):
        capsys.readouterr()
        assert main([command, "recipe=zero1", "model=hf", f"model.path={folder}", "data=chat.jsonl"]) == 2
        shown = capsys.readouterr()
        errors.append(re.search(r"\S+ holds quantized weights .*", shown.out + shown.err)[0])  # type: ignore[index]
    assert errors[0] == errors[1]
    assert f"({method} in config.json)" in errors[0] and METHODS[method] in errors[0]
    for read in (lambda: stream_parameters(folder), lambda: export_verified(folder, tmp_path / "out", ExportOptions())):
        with pytest.raises(ModelError, match="holds quantized weights"):
            read()


def quantized(method: str) -> dict[str, Any]:
    """Return what config.json says of such weights."""
    return {"quantization_config": {"quant_method": method}}


def change(folder: Path, values: dict[str, Any]) -> None:
    """Set keys of config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def write_fp8(folder: Path) -> dict[str, torch.Tensor]:
    """Write a model in blocks of FP8; return what its linear layers are in 16 bits."""
    sizes = SIZES | {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
    config = transformers.Qwen3Config(**sizes)
    transformers.Qwen3ForCausalLM(config).bfloat16().save_pretrained(folder)
    stored, expected = {}, {}
    for name, value in load_file(folder / "model.safetensors").items():
        stored[name] = value
        if name.endswith("proj.weight"):
            rows, columns = (max(size // 128, 1) for size in value.shape)
            blocks = value.float().view(rows, -1, columns, 128)
            scales = blocks.abs().amax((1, 3), keepdim=True) / 448
            codes = (blocks / scales).to(torch.float8_e4m3fn)
            stored[name] = codes.view(value.shape)
            stored[f"{name}_scale_inv"] = scales.view(rows, columns).contiguous()
            expected[name] = (codes.float() * scales).view(value.shape).bfloat16()
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    change(folder, {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}})
    return expected


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
    change(folder, quantized("mxfp4"))
    return expected


@pytest.mark.parametrize(("write_model", "kind"), [(write_fp8, "FineGrainedFP8Config"), (write_mxfp4, "Mxfp4Config")])
def test_the_way_of_the_docs(write_model: Any, kind: str, tmp_path: Path) -> None:
    """The script on the page writes a directory of the same values, which is read piece by piece and exported."""
    torch.manual_seed(5)
    expected = write_model(tmp_path / "quantized")
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    script = next(block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "dequantize=True" in block)
    script = script.replace("FineGrainedFP8Config", kind)
    script = script.replace("/models/Qwen3-8B-FP8", str(tmp_path / "quantized"))
    exec(script.replace("/models/Qwen3-8B-bf16", str(tmp_path / "bf16")), {})
    written = dict(stream_parameters(tmp_path / "bf16")[1])
    assert expected and all(torch.equal(written[name], value) for name, value in expected.items())
    export_verified(tmp_path / "bf16", tmp_path / "export", ExportOptions())
    assert load_model(tmp_path / "export").dtype is torch.bfloat16
