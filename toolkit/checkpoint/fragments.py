"""What a checkpoint holds of parameters and optimizer: by the model's names, not by ranks, in safetensors.

A *fragment* is a stretch of the numbers of a parameter, flattened: its fp32 master weight and the optimizer's states of
it. Each rank writes those that it owns into `fragments-RANK.safetensors`, each tensor named STATE:PARAMETER, and the
header says where in the whole parameter it lies. Whoever reads takes what it needs from all files, in whatever layout.
The last tensor has the CRC-32 of the header and of all others, taken of what was in memory: a write is proven by it,
and damage has a name.
"""

import json
import struct
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from toolkit import disk
from toolkit.checkpoint.directory import CHECKSUMS, FRAGMENTS

WEIGHT = "weight"
"""State under which the weight itself is stored: the fp32 master of what is trained, else as the model has it."""
# What a custom model's buffers may be of, too.
_RARE_TYPES = {
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "C64": "complex64",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
}
DTYPES = {name: getattr(torch, theirs) for name, theirs in (disk.TENSOR_TYPES | _RARE_TYPES).items()}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
BLOCK = 256
"""Numbers of a flat tensor for which 8-bit optimizers keep one scale (bitsandbytes 0.50)."""
Part = tuple[int, int]
"""Which part of a parameter that is split over a tensor group a rank has, and of how many; (0, 1) is the whole."""


@dataclass(slots=True)
class Fragment:
    """A stretch of one parameter, or of this rank's part of it."""

    name: str
    shape: tuple[int, ...]
    """Shape of the whole parameter."""
    position: int
    """Position of the first number in the flattened parameter, or part."""
    dtype: torch.dtype
    """Type that the model computes with."""
    part: Part = (0, 1)
    values: dict[str, torch.Tensor] = field(default_factory=dict)
    """State -> a number for each of the stretch [N]."""
    numbers: dict[str, float] = field(default_factory=dict)
    """State -> one number for all of it, such as the count of steps."""
    scales: dict[str, torch.Tensor] = field(default_factory=dict)
    """State -> a number for each block that the stretch lies in."""
    phase: int = 0
    """Position of the first number in its block."""
    bound: dict[str, torch.Tensor] = field(default_factory=dict)
    """State -> a tensor of the whole parameter that is no stretch, such as Adafactor's rows; in one fragment alone."""
    turned: bool = False
    """Whether it is a stretch of the matrix's columns, one after another."""


def file_name(rank: int, number: int = 0) -> str:
    """Return the name of a rank's fragments file; NVMe offload writes several, numbered by `number`."""
    return f"{FRAGMENTS}{rank:05d}{f'-{number:05d}' if number else ''}.safetensors"


@dataclass(slots=True)
class Content:
    """What one fragments file will hold: tensors by STATE:PARAMETER, and facts (shape, dtype, …) by parameter."""

    tensors: dict[str, torch.Tensor]
    facts: dict[str, Any]


def content_of(fragments: Iterable[Fragment]) -> Content:
    """Return the tensors (STATE:PARAMETER -> tensor) and facts of the file that will hold this rank's fragments."""
    tensors: dict[str, torch.Tensor] = {}
    facts: dict[str, Any] = {}
    for fragment in fragments:
        for tensor_by_state in (fragment.values, fragment.scales, fragment.bound):
            tensors |= {f"{state}:{fragment.name}": value.detach() for state, value in tensor_by_state.items()}
        facts[fragment.name] = {
            "shape": list(fragment.shape),
            "place": fragment.position,
            "dtype": _NAMES[fragment.dtype],
            **({"part": list(fragment.part)} if fragment.part[1] > 1 else {}),
            **({"turned": True} if fragment.turned else {}),
            **({"numbers": fragment.numbers} if fragment.numbers else {}),
            **({"scales": sorted(fragment.scales), "phase": fragment.phase} if fragment.scales else {}),
            **({"bound": sorted(fragment.bound)} if fragment.bound else {}),
        }
    return Content(tensors, facts)


def write(content: Content, path: Path) -> None:
    """Write tensors, and last the CRC-32 of the header and of each, to a safetensors file; OSError if that fails.
    safetensors' own `save_file` would reject tensors that share memory.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt", "fragments": json.dumps(content.facts)}}
    end = 0
    for name, tensor in content.tensors.items():
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    count = 1 + len(content.tensors)
    header[CHECKSUMS] = {"dtype": "I64", "shape": [count], "data_offsets": [end, end + 8 * count]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)  # the data begin at a multiple of 8 bytes
    encoded = struct.pack("<Q", len(encoded)) + encoded  # the format: length, header, data
    checksums = np.zeros(count, np.int64)
    checksums[0] = zlib.crc32(encoded)
    with open(path, "wb") as file:
        file.write(encoded)
        for number, tensor in enumerate(content.tensors.values(), 1):
            data = view_bytes(tensor.cpu().contiguous())
            checksums[number] = zlib.crc32(data)
            file.write(data)
        file.write(checksums.tobytes())


def view_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor as a view of its memory."""
    return memoryview(cast(Any, tensor.reshape(-1).view(torch.uint8).numpy()))
