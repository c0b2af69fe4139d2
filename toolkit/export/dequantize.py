"""A directory of quantized weights, written in 16 bits: matrix by matrix, without a GPU or the quantizer's package.

Matrices become `scale * (code - zero point)` in float32, rounded once to the precision of the copy; all other tensors
of 16 bits are rounded to it, and those in float32 stay. Layers that no model of transformers has, such as those for
multi-token prediction, are written too.
"""

import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from transformers.utils.hub import convert_file_size_to_int

from toolkit.export.shards import write_shards
from toolkit.export.write import ExportOptions, atomic_directory
from toolkit.messages import ConfigError, ModelError, reading, tr
from toolkit.models import directory, quantized
from toolkit.terminal import phase

Tensors = Mapping[str, torch.Tensor]
"""The stored tensors of one matrix, by the ends of their names."""
_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
"""The values of OCP Microscaling Formats' 4-bit floats."""
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Which of the eight codes in an int32 belongs to each output."""
_OF_ACTIVATIONS = (".activation_scale", ".input_scale", ".output_scale", ".q_scale", ".k_scale", ".v_scale")
"""Ends of the names of scales of activations and caches, which have none in 16 bits."""
_NOT_COPIED = re.compile(
    r"\..*|config\.json|hf_quant_config\.json|quant(ize)?_config\.json|manifest\.json"
    r"|.*\.(safetensors|bin|pt|pth|gguf|h5|msgpack|onnx|py|index\.json)"
)


class _Kind(NamedTuple):
    """How a method stores a matrix."""

    marks: str
    """Pattern of the name of the tensor by which such a matrix is known; its first group is the start of all names."""
    weight: str
    """End of the matrix' name in the copy."""
    ends: tuple[str, ...]
    """Ends of the names of tensors that belong to it: read, or of no use in 16 bits."""
    decode: Callable[[Tensors, Mapping[str, Any]], torch.Tensor]
    """Takes the tensors and the quantization_config, and returns the matrix, unrounded."""


def write_dequantized(source: Path, folder: Path, options: ExportOptions) -> None:
    """Write the model of a directory of quantized weights to `folder`, which must not exist, in 16 bits.

    Raises:
        ModelError: the way of quantization is not one that can be read, or the files are damaged.
        ConfigError: another layout or part of the model is asked for.
    """
    config = directory.read_object(source / "config.json")
    settings = directory.quantization_settings(config)
    if not quantized.is_readable(settings):
        raise quantized.quantization_error(config, source)
    if options.text_only or options.format != "hf":
        raise ConfigError(tr("quantized weights are written in 16 bits first: remove text_only= and format=."))
    directory.check_weight_files(source, None)
    named = str(config.get("dtype") or config.get("torch_dtype"))
    dtype = options.precision or (torch.float16 if named == "float16" else torch.bfloat16)
    with atomic_directory(folder) as temporary:
        temporary.mkdir()
        values = _in_16_bits(source, _KINDS[settings["quant_method"]], settings, dtype)
        _write_weights(values, temporary, folder, convert_file_size_to_int(options.max_shard_size))
        for file in source.iterdir():
            if file.is_file() and not _NOT_COPIED.fullmatch(file.name):
                shutil.copyfile(file, temporary / file.name)
        for section in directory.sections_of(config):
            for key in ("quantization_config", "compression_config", "auto_map"):  # its code is not copied
                section.pop(key, None)
        config = {key: value for key, value in config.items() if key != "torch_dtype"}
        config["dtype"] = str(dtype).removeprefix("torch.")
        (temporary / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _in_16_bits(
    source: Path, kinds: Iterable[_Kind], settings: Mapping[str, Any], dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and value of all tensors of the copy, in the order of the files."""
    files: dict[str, Path] = {}
    for file in directory.weight_files(source):
        with reading(file, ModelError), safe_open(file, framework="pt") as opened:
            files |= dict.fromkeys(opened.keys(), file)

    def read(name: str) -> torch.Tensor:
        with reading(files[name], ModelError), safe_open(files[name], framework="pt") as opened:
            tensor: torch.Tensor = opened.get_tensor(name)
            return tensor

    matrices: dict[str, tuple[str, _Kind]] = {}
    used: set[str] = set()
    for kind in kinds:
        for name in files:
            if name not in used and (match := re.fullmatch(kind.marks, name)):
                matrices[name] = match[1], kind
                used |= {match[1] + end for end in kind.ends}
    with phase(tr("Writing weights in 16 bits"), len(files)) as advance:
        for name in files:
            if name in matrices:
                stem, kind = matrices[name]
                tensors = {end: read(stem + end) for end in kind.ends if stem + end in files}
                yield stem + kind.weight, _decoded(name, files[name], kind, tensors, settings, dtype)
            elif name not in used and not name.endswith(_OF_ACTIVATIONS):
                value = read(name)
                if value.is_floating_point() and value.itemsize == 1:
                    raise ModelError("{file}: '{name}' is in 8 bits without a scale.", file=files[name], name=name)
                is_rounded = value.dtype in (torch.float16, torch.bfloat16)
                yield name, value.to(dtype) if is_rounded else value
            advance(1)


def _decoded(
    name: str, file: Path, kind: _Kind, tensors: Tensors, settings: Mapping[str, Any], dtype: torch.dtype
) -> torch.Tensor:
    """Return a matrix in the precision of the copy; ModelError if its tensors do not fit, or values are too large."""
    try:
        value = kind.decode(tensors, settings).to(dtype)
    except (KeyError, ValueError, IndexError, RuntimeError) as error:
        is_missing = isinstance(error, KeyError)
        reason = tr("{name}: missing", name=error.args[0]) if is_missing else str(error).splitlines()[0]
        raise ModelError(
            "{file}: the tensors of '{name}' do not fit together ({reason}). Download the model again.",
            file=file,
            name=name,
            reason=reason,
        ) from error
    if not value.isfinite().all():
        raise ModelError(
            "{file}: '{name}' has values that {dtype} cannot hold. Use dtype=bf16.", file=file, name=name, dtype=dtype
        )
    return value


def _write_weights(values: Iterable[tuple[str, torch.Tensor]], folder: Path, final: Path, most: int) -> None:
    """Write tensors to files of at most so many bytes, or of one tensor, with an index. `final`: see `write_shards`."""
    shards, total = write_shards(values, folder, final, most, "{}.safetensors")
    files = [*dict.fromkeys(shards.values())]
    names = {file: f"model-{number:05}-of-{len(files):05}.safetensors" for number, file in enumerate(files, 1)}
    for file, name in names.items():
        (folder / file).rename(folder / name)
    weight_map = {tensor: names[file] for tensor, file in sorted(shards.items())}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _fp8(tensors: Tensors, settings: Mapping[str, Any]) -> torch.Tensor:
    """Read DeepSeek's blocks of FP8, or one scale for all: what is called the inverse of the scale is the factor."""
    return tensors[""].float() * _spread(tensors["_scale_inv"], tensors[""].shape, settings.get("weight_block_size"))


def _mxfp4(tensors: Tensors, settings: Mapping[str, Any]) -> torch.Tensor:
    """Read gpt-oss's experts, whose matrices are stored transposed: blocks [experts, outputs, inputs / 32, 16]."""
    parts = [  # by experts, to save memory; exact, as the values have few bits
        (_fp4(blocks) * _power_of_2(scales)[..., None]).flatten(-2).T.bfloat16()
        for blocks, scales in zip(tensors["_blocks"], tensors["_scales"], strict=True)
    ]
    return torch.stack(parts)


def _gptq(tensors: Tensors, settings: Mapping[str, Any]) -> torch.Tensor:
    """Read qweight [inputs * bits / 32, outputs], qzeros [groups, outputs * bits / 32] and scales [groups, outputs]; in
    the first of both formats zero points are stored less 1.
    """
    scales = tensors[".scales"]
    bits = _bits(tensors[".qzeros"], scales)
    zeros = _unpacked(tensors[".qzeros"], bits)
    if quantized.format_of(settings) == "gptq":
        zeros = (zeros + 1) & (2**bits - 1)
    return _affine(_unpacked(tensors[".qweight"].T, bits), zeros.T, scales.T, tensors.get(".g_idx"))


def _awq(tensors: Tensors, settings: Mapping[str, Any]) -> torch.Tensor:
    """Read qweight [inputs, outputs / 8], qzeros [groups, outputs / 8] and scales [groups, outputs], interleaved."""
    codes, zeros = (_unpacked(tensors[name], 4, _AWQ_ORDER).T for name in (".qweight", ".qzeros"))
    return _affine(codes, zeros, tensors[".scales"].T)


def _packed(tensors: Tensors, settings: Mapping[str, Any]) -> torch.Tensor:
    """Read compressed-tensors' packed integers, which are stored plus half their range, or 4-bit floats."""
    packed, scales = tensors[".weight_packed"], tensors[".weight_scale"]
    if packed.dtype == torch.uint8:
        scales = _power_of_2(scales) if scales.dtype == torch.uint8 else scales.float()
        values = _fp4(packed)
        return values * _spread(scales, values.shape) / tensors.get(".weight_global_scale", torch.ones(1)).float()
    outputs, inputs = (int(size) for size in tensors[".weight_shape"])
    bits = -(-packed.shape[1] * 32 // inputs)
    half = 2 ** (bits - 1)
    zeros = torch.tensor(0)
    if ".weight_zero_point" in tensors:  # packed along the outputs
        zeros = _unpacked(tensors[".weight_zero_point"].T, bits)[:, :outputs].T - half
    return _affine(_unpacked(packed, bits)[:, :inputs] - half, zeros, scales, tensors.get(".weight_g_idx"))


def _scaled(tensors: Tensors, settings: Mapping[str, Any]) -> torch.Tensor:
    """Read compressed-tensors' codes of a byte each: with one scale for all, or for each output, group or block."""
    codes, scales = tensors[".weight"], tensors[".weight_scale"]
    groups = settings.get("config_groups")
    weights = [group.get("weights") or {} for group in groups.values()] if isinstance(groups, dict) else []
    block = next((each["block_structure"] for each in weights if each.get("block_structure")), None)
    block = [int(size) for size in block.split("x")] if isinstance(block, str) else block
    zeros = tensors.get(".weight_zero_point")
    values = codes.float() if zeros is None else codes.float() - _spread(zeros, codes.shape, block)
    return values * _spread(scales, codes.shape, block)


def _affine(codes: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, group: torch.Tensor | None = None) -> Any:
    """Return a matrix of integer codes [outputs, inputs], with a zero point and a scale for each group [outputs,
    groups]. `group`: that of each input, where they are not neighbours.
    """
    inputs, groups = codes.shape[1], scales.shape[1]
    if group is None or (group < 0).any():  # compressed-tensors' way to say that there is none
        if inputs % groups:
            raise ValueError(f"{inputs} % {groups} != 0")
        group = torch.arange(inputs) // (inputs // groups)
    zeros = zeros[:, group.long()] if zeros.ndim else zeros
    return (codes - zeros).float() * scales.float()[:, group.long()]


def _spread(scales: torch.Tensor, shape: torch.Size, block: Any = None) -> torch.Tensor:
    """Return scales as one factor for each element of a matrix, or a stack of them. `block`: rows and columns that have
    one scale in common, the last ones perhaps fewer; None: as many as divide the matrix evenly.
    """
    scales = _power_of_2(scales) if scales.dtype == torch.uint8 else scales.float()
    if scales.numel() == 1 or scales.ndim == 1:
        return scales.reshape(())
    for dim in (-2, -1):
        size, count = shape[dim], scales.shape[dim]
        each = block[dim] if block and count > 1 else size // count
        if -(-size // each) != count:
            raise ValueError(f"{tuple(shape)}: {tuple(scales.shape)}")
        if count > 1:
            scales = scales.repeat_interleave(each, dim).narrow(dim, 0, size)
    return scales


def _unpacked(words: torch.Tensor, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Return the unsigned codes in the int32s of a matrix's rows, the lowest bits first. `order`: place of each."""
    if bits not in (2, 4, 8):
        raise ValueError(f"{bits} bits")
    codes = words.unsqueeze(-1) >> torch.arange(0, 32, bits, dtype=torch.int32) & (2**bits - 1)
    return codes[..., list(order)].flatten(-2) if order else codes.flatten(-2)


def _bits(packed: torch.Tensor, unpacked: torch.Tensor) -> int:
    return packed.shape[-1] * 32 // unpacked.shape[-1]


def _fp4(packed: torch.Tensor) -> torch.Tensor:
    """Return the 4-bit floats in bytes, the lower half first."""
    return _E2M1[torch.stack((packed & 15, packed >> 4), dim=-1).int()].flatten(-2)


def _power_of_2(exponents: torch.Tensor) -> torch.Tensor:
    return torch.exp2(exponents.float() - 127)


_SCALES = (".weight_scale", ".weight_zero_point", ".weight_g_idx", ".weight_shape", ".weight_global_scale")
_INPUTS = (".input_scale", ".input_zero_point", ".input_global_scale", ".output_scale", ".output_zero_point")
_KINDS = {
    "fp8": (_Kind(r"(.+)_scale_inv", "", ("", "_scale_inv"), _fp8),),
    "mxfp4": (_Kind(r"(.+)_blocks", "", ("_blocks", "_scales"), _mxfp4),),
    "gptq": (_Kind(r"(.+)\.qweight", ".weight", (".qweight", ".qzeros", ".scales", ".g_idx"), _gptq),),
    "awq": (_Kind(r"(.+)\.qweight", ".weight", (".qweight", ".qzeros", ".scales"), _awq),),
    "compressed-tensors": (
        _Kind(r"(.+)\.weight_packed", ".weight", (".weight_packed", *_SCALES, *_INPUTS), _packed),
        _Kind(r"(.+)\.weight_scale", ".weight", (".weight", *_SCALES, *_INPUTS), _scaled),
    ),
}
