"""Quantized weights, read in 16 bits: matrix by matrix, without a GPU or the quantizer's package.

Matrices become `scale * (code - zero point)` in float32, rounded once to the precision that is asked for.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch

from toolkit.messages import ModelError, tr
from toolkit.models import directory, quantized, weights

Tensors = Mapping[str, torch.Tensor]
"""The stored tensors of one matrix, by the ends of their names."""
Shapes = Mapping[str, tuple[int, ...]]
"""Their shapes, by the same; of .weight_shape its values."""
_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
"""The values of OCP Microscaling Formats' 4-bit floats."""
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Which of the eight codes in an int32 belongs to each output."""
_OF_ACTIVATIONS = (".activation_scale", ".input_scale", ".output_scale", ".q_scale", ".k_scale", ".v_scale")
"""Ends of the names of scales of activations and caches, which have none in 16 bits."""


class _Kind(NamedTuple):
    """How a method stores a matrix."""

    marks: str
    """Pattern of the name of the tensor by which such a matrix is known; its first group is the start of all names."""
    weight: str
    """End of the matrix' name in 16 bits."""
    ends: tuple[str, ...]
    """Ends of the names of tensors that belong to it: read, or of no use in 16 bits."""
    shape: Callable[[Shapes], tuple[int, ...]]
    """Takes the shapes of the tensors, and returns that of the matrix."""
    decode: Callable[[Tensors, Mapping[str, Any]], torch.Tensor]
    """Takes the tensors and the quantization_config, and returns the matrix, unrounded."""


class _StoredFiles(weights.WeightFiles):
    """Metadata of all tensors as they are in the files."""

    types: ClassVar = weights.WeightFiles.types | {
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E5M2": torch.float8_e5m2,
        "F8_E8M0": torch.float8_e8m0fnu,
    }


class QuantizedFiles(weights.WeightFiles):
    """Metadata of a directory's tensors as they are in 16 bits, which `open` makes of the quantized ones."""

    def __init__(self, folder: Path, dtype: torch.dtype | None = None) -> None:
        """Read the headers of the files. `dtype`: of the matrices; None takes the 16 bits that config.json names.

        Raises:
            ModelError: the way of quantization is not one that can be read, or the files are damaged.
        """
        super().__init__(folder, [])
        quantized.check_readable(folder)
        config = directory.read_object(folder / "config.json")
        self._settings = directory.quantization_settings(config)
        named = str(config.get("dtype") or config.get("torch_dtype"))
        self.dtype = dtype or (torch.float16 if named == "float16" else torch.bfloat16)
        self._stored = _StoredFiles(folder)
        self._matrices: dict[str, tuple[str, _Kind]] = {}
        """Name of each matrix in 16 bits -> the start of its tensors' names, and how they are stored."""
        owners = self._find_matrices()
        for name, info in self._stored.items():
            if matrix := owners.get(name):
                self.setdefault(matrix, weights.TensorInfo(info.file, self._shape_of(matrix), self.dtype))
            elif not name.endswith(_OF_ACTIVATIONS):
                self[name] = info

    @contextmanager
    def open(self, name: str) -> Iterator[torch.Tensor]:
        """Yield one tensor; a quantized matrix is made of its stored tensors, in the precision asked for."""
        with ExitStack() as opened:
            if name not in self._matrices:
                if self[name].dtype.is_floating_point and self[name].dtype.itemsize == 1:
                    raise ModelError("{file}: '{name}' is in 8 bits without a scale.", file=self[name].file, name=name)
                yield opened.enter_context(self._stored.open(name))
                return
            stem, kind = self._matrices[name]
            ends = [end for end in kind.ends if stem + end in self._stored]
            tensors = {end: opened.enter_context(self._stored.open(stem + end)) for end in ends}
            value = _decoded(name, self[name].file, kind, tensors, self._settings, self.dtype)
        yield value

    def _find_matrices(self) -> dict[str, str]:
        """Fill `_matrices`; return name of a stored tensor -> name of the matrix in 16 bits that it belongs to."""
        owners: dict[str, str] = {}
        for kind in _KINDS[self._settings["quant_method"]]:
            for name in self._stored:
                if name not in owners and (match := re.fullmatch(kind.marks, name)):
                    matrix = match[1] + kind.weight
                    self._matrices[matrix] = match[1], kind
                    owners |= dict.fromkeys((match[1] + end for end in kind.ends), matrix)
        return owners

    def _shape_of(self, matrix: str) -> tuple[int, ...]:
        """Return the shape of a matrix in 16 bits; ModelError if its stored tensors do not fit together."""
        stem, kind = self._matrices[matrix]
        shapes = {end: self._stored[stem + end].shape for end in kind.ends if stem + end in self._stored}
        if ".weight_shape" in shapes:
            with self._stored.open(stem + ".weight_shape") as value:
                shapes[".weight_shape"] = tuple(value.tolist())  # its values are the shape of the matrix
        try:
            return kind.shape(shapes)
        except (LookupError, ArithmeticError, ValueError) as error:
            raise _misfit(matrix, self._stored[next(stem + end for end in shapes)].file, error) from error


def _decoded(
    name: str, file: Path, kind: _Kind, tensors: Tensors, settings: Mapping[str, Any], dtype: torch.dtype
) -> torch.Tensor:
    """Return the matrix `name` in `dtype`; ModelError if its tensors do not fit together, or its values not in that."""
    try:
        value = kind.decode(tensors, settings).to(dtype)
    except (LookupError, ValueError, RuntimeError) as error:
        raise _misfit(name, file, error) from error
    if not value.isfinite().all():
        raise ModelError(
            "{file}: '{name}' has values that {dtype} cannot hold. Use dtype=bf16.", file=file, name=name, dtype=dtype
        )
    return value


def _misfit(name: str, file: Path, error: Exception) -> ModelError:
    """Return the error for a matrix whose tensors do not belong together."""
    is_missing = isinstance(error, KeyError)
    return ModelError(
        "{file}: the tensors of '{name}' do not fit together ({reason}). Download the model again.",
        file=file,
        name=name,
        reason=tr("{name}: missing", name=error.args[0]) if is_missing else str(error).splitlines()[0],
    )


def _fp8(tensors: Tensors, settings: Mapping[str, Any]) -> torch.Tensor:
    """Read DeepSeek's FP8, with a factor for each block or one for all: the stored "inverse scale" is the factor."""
    values, scales, block = tensors[""].float(), tensors["_scale_inv"], settings.get("weight_block_size")
    # Where blocks divide the matrix evenly, without a factor for each element in memory.
    if block and scales.shape == (values.shape[0] / block[0], values.shape[1] / block[1]):
        blocks = values.unflatten(1, (-1, block[1])).unflatten(0, (-1, block[0]))
        return blocks.mul_(scales.float()[:, None, :, None]).view_as(values)
    return values.mul_(_spread(scales, values.shape, block))


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
        zeros = (zeros + 1) & (2**bits - 1)  # within `bits` bits
    num_inputs, group_of_input = len(tensors[".qweight"]) * 32 // bits, tensors.get(".g_idx")
    group_size = -(-num_inputs // len(scales))  # rounded up
    if group_of_input is not None and torch.equal(group_of_input, torch.arange(len(group_of_input)) // group_size):
        group_of_input = None  # not in act order
    return _decode_affine(_unpacked(tensors[".qweight"].T, bits), zeros.T, scales.T, group_of_input)


def _awq(tensors: Tensors, settings: Mapping[str, Any]) -> torch.Tensor:
    """Read qweight [inputs, outputs / 8], qzeros [groups, outputs / 8] and scales [groups, outputs], interleaved."""
    codes = _unpacked(tensors[".qweight"], 4, _AWQ_ORDER).T.contiguous()
    return _decode_affine(codes, _unpacked(tensors[".qzeros"], 4, _AWQ_ORDER).T, tensors[".scales"].T)


def _packed(tensors: Tensors, settings: Mapping[str, Any]) -> torch.Tensor:
    """Read compressed-tensors' packed integers, which are stored plus half their range, or 4-bit floats."""
    packed, scales = tensors[".weight_packed"], tensors[".weight_scale"]
    if packed.dtype == torch.uint8:
        scales = _power_of_2(scales) if scales.dtype == torch.uint8 else scales.float()
        values = _fp4(packed)
        # NVFP4's scales were multiplied by a factor of the whole matrix before they were rounded to FP8.
        return values * _spread(scales, values.shape) / tensors.get(".weight_global_scale", torch.ones(1)).float()
    outputs, inputs = (int(size) for size in tensors[".weight_shape"])
    bits = -(-packed.shape[1] * 32 // inputs)  # rounded up, as the last int32 of a row may be partly unused
    half = 2 ** (bits - 1)
    zeros = torch.tensor(half)
    if ".weight_zero_point" in tensors:  # packed along the outputs
        zeros = _unpacked(tensors[".weight_zero_point"].T, bits)[:, :outputs].T
    return _decode_affine(_unpacked(packed, bits)[:, :inputs], zeros, scales, tensors.get(".weight_g_idx"))


def _scaled(tensors: Tensors, settings: Mapping[str, Any]) -> torch.Tensor:
    """Read compressed-tensors' codes of a byte each: with one scale for all, or for each output, group or block."""
    codes, scales = tensors[".weight"], tensors[".weight_scale"]
    groups = settings.get("config_groups")
    of_weights = [group.get("weights") or {} for group in groups.values()] if isinstance(groups, dict) else []
    block = next((each["block_structure"] for each in of_weights if each.get("block_structure")), None)
    if isinstance(block, str):  # "128x128", else [128, 128]
        block = [int(size) for size in block.split("x")]
    zeros = tensors.get(".weight_zero_point")
    values = codes.float() if zeros is None else codes.float() - _spread(zeros, codes.shape, block)
    return values * _spread(scales, codes.shape, block)


def _decode_affine(
    codes: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, group: torch.Tensor | None = None
) -> torch.Tensor:
    """Return float32 (code - zero) x scale for integer `codes` [outputs, inputs]. `zeros`: of each group, [outputs,
    groups], or one for all; `scales`: of each group, [outputs, groups]; `group`: the group of each input, [inputs]
    (GPTQ's act-order), None where groups are consecutive and equally long.
    """
    inputs, groups = codes.shape[1], scales.shape[1]
    if group is not None and not (group < 0).any():  # compressed-tensors' way to say that there is none
        zeros = zeros[:, group.long()] if zeros.ndim else zeros
        return codes.float().sub_(zeros).mul_(scales.float()[:, group.long()])
    if inputs % groups:
        raise ValueError(f"{inputs} % {groups} != 0")
    values = codes.float().unflatten(1, (groups, -1))
    return values.sub_(zeros.unsqueeze(-1)).mul_(scales.float().unsqueeze(-1)).flatten(1)


def _spread(scales: torch.Tensor, shape: torch.Size, block: Any = None) -> torch.Tensor:
    """Return `scales` as factors for the elements of a matrix of this shape, or of a stack of matrices. `block`: rows
    and columns that have one scale in common, the last ones perhaps fewer; None: as many as divide the matrix evenly.
    ValueError if the shapes do not fit.
    """
    scales = _power_of_2(scales) if scales.dtype == torch.uint8 else scales.float()
    if scales.numel() == 1 or scales.ndim == 1:  # one scale for all; torch raises if there are several in one dimension
        return scales.reshape(())
    for dim in (-2, -1):
        size, count = shape[dim], scales.shape[dim]
        repeats = block[dim] if block and count > 1 else size // count
        if -(-size // repeats) != count:  # rounded up
            raise ValueError(f"{tuple(shape)}: {tuple(scales.shape)}")
        if count > 1:
            scales = scales.repeat_interleave(repeats, dim).narrow(dim, 0, size)
    return scales


def _unpacked(words: torch.Tensor, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Return the unsigned codes of `bits` bits in the int32s of a matrix's rows, the lowest first, as a byte each.
    `order`: for each output, which of the codes in an int32 it is; None if they are in order.
    """
    if bits not in (2, 4, 8):
        raise ValueError(f"{bits} bits")
    bytes_of_rows = words.contiguous().view(torch.uint8)
    codes = bytes_of_rows.unsqueeze(-1) >> torch.arange(0, 8, bits, dtype=torch.uint8) & (2**bits - 1)
    codes = codes.flatten(-2)
    return codes.unflatten(-1, (-1, 32 // bits))[..., order].flatten(-2) if order else codes


def _bits(packed: torch.Tensor, unpacked: torch.Tensor) -> int:
    """Return the bits of a code, if the int32s of a row of `packed` hold as many codes as `unpacked` has columns."""
    return packed.shape[-1] * 32 // unpacked.shape[-1]


def _fp4(packed: torch.Tensor) -> torch.Tensor:
    """Return the 4-bit floats in bytes, the lower half first."""
    return _E2M1[torch.stack((packed & 15, packed >> 4), dim=-1).int()].flatten(-2)


def _power_of_2(exponents: torch.Tensor) -> torch.Tensor:
    """Return the scales that exponents of 8 bits (E8M0, with a bias of 127) stand for."""
    return torch.exp2(exponents.float() - 127)


_SCALES = (".weight_scale", ".weight_zero_point", ".weight_g_idx", ".weight_shape", ".weight_global_scale")
_INPUTS = (".input_scale", ".input_zero_point", ".input_global_scale", ".output_scale", ".output_zero_point")


def _shape_of_words(shapes: Shapes) -> tuple[int, ...]:
    """Return [outputs, inputs] of GPTQ's qweight [inputs * bits / 32, outputs]."""
    bits = shapes[".qzeros"][-1] * 32 // shapes[".scales"][-1]
    return shapes[".scales"][-1], shapes[".qweight"][0] * 32 // bits


def _shape_of_packed(shapes: Shapes) -> tuple[int, ...]:
    """Return [outputs, inputs] of compressed-tensors' integers, or of 4-bit floats, two in a byte."""
    outputs, halves = shapes[".weight_packed"]
    return shapes.get(".weight_shape", (outputs, 2 * halves))


_KINDS = {
    "fp8": (_Kind(r"(.+)_scale_inv", "", ("", "_scale_inv"), lambda shapes: shapes[""], _fp8),),
    "mxfp4": (
        _Kind(
            r"(.+)_blocks",
            "",
            ("_blocks", "_scales"),
            lambda shapes: (shapes["_blocks"][0], 32 * shapes["_blocks"][2], shapes["_blocks"][1]),
            _mxfp4,
        ),
    ),
    "gptq": (_Kind(r"(.+)\.qweight", ".weight", (".qweight", ".qzeros", ".scales", ".g_idx"), _shape_of_words, _gptq),),
    "awq": (
        _Kind(
            r"(.+)\.qweight",
            ".weight",
            (".qweight", ".qzeros", ".scales"),
            lambda shapes: (shapes[".scales"][1], shapes[".qweight"][0]),
            _awq,
        ),
    ),
    "compressed-tensors": (
        _Kind(r"(.+)\.weight_packed", ".weight", (".weight_packed", *_SCALES, *_INPUTS), _shape_of_packed, _packed),
        _Kind(
            r"(.+)\.weight_scale", ".weight", (".weight", *_SCALES, *_INPUTS), lambda shapes: shapes[".weight"], _scaled
        ),
    ),
}
