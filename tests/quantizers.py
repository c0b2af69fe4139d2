"""Writers of tiny models in published formats of quantized weights."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.architectures import write
from tests.unit.tiny_model import SIZES

INTEGERS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}


def change(folder: Path, values: dict[str, Any]) -> None:
    """Set keys of config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def write_fp8(folder: Path, **more: int) -> dict[str, torch.Tensor]:
    """Write a model in blocks of FP8, some sizes changed; return what its linear layers are in 16 bits."""
    sizes = SIZES | {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32} | more
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


def packed(codes: torch.Tensor, bits: int, order: tuple[int, ...] = ()) -> torch.Tensor:
    """Return a matrix of unsigned codes as int32s along its rows; `order`: which code comes first, second, …"""
    count = 32 // bits
    order = order or tuple(range(count))
    words = [
        [sum(int(row[start + each]) << bits * place for place, each in enumerate(order)) for start in starts]
        for row in codes
        for starts in [range(0, len(row), count)]
    ]
    return torch.tensor(words, dtype=torch.int64).to(torch.int32)


def gptq(bits: int, format: str) -> Any:
    """Return a way to pack by AutoGPTQ 0.8's QuantLinear, in act order, and the settings."""

    def pack(codes: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, group: torch.Tensor) -> Any:
        stored = (zeros - 1) % 2**bits if format == "gptq" else zeros
        parts = {"qweight": packed(codes, bits).T, "qzeros": packed(stored.T, bits), "scales": scales.T}
        return {**parts, "g_idx": group.int()}

    return pack, bits, {"quant_method": "gptq", "bits": bits, "checkpoint_format": format, "desc_act": True}


def awq() -> Any:
    """Return a way to pack by AutoAWQ 0.2.9's WQLinear_GEMM, and the settings."""
    order = (0, 2, 4, 6, 1, 3, 5, 7)

    def pack(codes: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, group: torch.Tensor) -> Any:
        parts = {"qweight": packed(codes.T, 4, order), "qzeros": packed(zeros.T, 4, order)}
        return {**parts, "scales": scales.T}

    return pack, 4, {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "GEMM"}


def compressed(bits: int, symmetric: bool) -> Any:
    """Return a way to pack by compressed-tensors 0.20's PackedQuantizationCompressor, and the settings."""

    def pack(codes: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, group: torch.Tensor) -> Any:
        parts = {
            "weight_packed": packed(codes, bits),
            "weight_scale": scales,
            "weight_shape": torch.tensor(codes.shape),
        }
        if symmetric:
            zeros.fill_(2 ** (bits - 1))
            return parts
        return {**parts, "weight_zero_point": packed(zeros.T, bits).T}

    weights = INTEGERS | {"num_bits": bits, "symmetric": symmetric}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    settings = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
    return pack, bits, settings


INTEGER_FORMATS = {
    **{f"gptq {bits} bits": gptq(bits, "gptq") for bits in (2, 4, 8)},
    "gptq in order": gptq(4, "gptq"),
    "gptq_v2": gptq(4, "gptq_v2"),
    "awq": awq(),
    "compressed-tensors 4 bits": compressed(4, True),
    "compressed-tensors 8 bits, zero points": compressed(8, False),
}


def write_integers(folder: Path, case: str, dtype: str = "bfloat16") -> dict[str, torch.Tensor]:
    """Write a Llama whose linear layers are in a format of `INTEGER_FORMATS`; return what they are, unrounded."""
    pack, bits, settings = INTEGER_FORMATS[case]
    write(folder, "llama")
    stored, expected = {}, {}
    generator = torch.Generator().manual_seed(7)
    for name, value in load_file(folder / "model.safetensors").items():
        stored[name] = value.bfloat16()
        if name.endswith("proj.weight"):
            outputs, inputs = value.shape
            groups = inputs // 16
            codes = torch.randint(2**bits, value.shape, generator=generator)
            zeros = torch.randint(2**bits, (outputs, groups), generator=generator)
            scales = (torch.rand((outputs, groups), generator=generator) / 50).to(getattr(torch, dtype))
            group = torch.arange(inputs) // 16
            if "gptq" in case and "in order" not in case:
                group = group[torch.randperm(inputs, generator=generator)]
            del stored[name]
            for end, part in pack(codes, zeros, scales, group).items():
                stored[f"{name.removesuffix('weight')}{end}"] = part.contiguous()
            expected[name] = (codes - zeros[:, group]).float() * scales.float()[:, group]
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    change(folder, {"quantization_config": settings, "dtype": dtype})
    return expected
