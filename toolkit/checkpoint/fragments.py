"""What a checkpoint holds of parameters and optimizer: by the model's names, not by ranks, in safetensors.

A *fragment* is a stretch of the numbers of a parameter, flattened: its fp32 master weight and the optimizer's states of
it. Each rank writes those that it owns into `fragments-RANK.safetensors`, each tensor named STATE:PARAMETER, and the
header says where in the whole parameter it lies. Whoever reads takes what it needs from all files, in whatever layout.
The last tensor has the CRC-32 of the header and of all others, taken of what was in memory: a write is proven by it,
and damage has a name.
"""

import json
import math
import struct
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from toolkit import disk
from toolkit.checkpoint.directory import CHECKSUMS, FRAGMENTS, read_header
from toolkit.config import mesh
from toolkit.distributed import process_group
from toolkit.messages import CheckpointError, reason_of

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
_DTYPES = {name: getattr(torch, theirs) for name, theirs in (disk.TENSOR_TYPES | _RARE_TYPES).items()}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
BLOCK = 256
"""Numbers of a flat tensor for which 8-bit optimizers keep one scale (bitsandbytes 0.50)."""
Part = tuple[int, int]
"""Which part of a parameter that is split over a tensor group a rank has, and of how many; (0, 1) is the whole."""


@dataclass(slots=True)
class Fragment:
    """A stretch of one parameter, or of this rank's part of it."""

    name: str
    shape: tuple[int, ...]
    """Of the whole parameter."""
    position: int
    """Of the first number in the flattened parameter, or part."""
    dtype: torch.dtype
    """That the model computes with."""
    part: Part = (0, 1)
    values: dict[str, torch.Tensor] = field(default_factory=dict)
    """State -> a number for each of the stretch [N]."""
    numbers: dict[str, float] = field(default_factory=dict)
    """State -> one number for all of it, such as the count of steps."""
    scales: dict[str, torch.Tensor] = field(default_factory=dict)
    """State -> a number for each block that the stretch lies in."""
    phase: int = 0
    """Of the first number in its block."""
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
        for kind in (fragment.values, fragment.scales, fragment.bound):
            tensors |= {f"{state}:{fragment.name}": value.detach() for state, value in kind.items()}
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
    encoded += b" " * (-len(encoded) % 8)
    encoded = struct.pack("<Q", len(encoded)) + encoded  # the format: length, header, data
    checksums = np.zeros(count, np.int64)
    checksums[0] = zlib.crc32(encoded)
    with open(path, "wb") as file:
        file.write(encoded)
        for number, tensor in enumerate(content.tensors.values(), 1):
            octets = _octets(tensor.cpu().contiguous())
            checksums[number] = zlib.crc32(octets)
            file.write(octets)
        file.write(checksums.tobytes())


def _octets(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor as a view of its memory."""
    return memoryview(cast(Any, tensor.reshape(-1).view(torch.uint8).numpy()))


def spread(scales: torch.Tensor, phase: int, length: int) -> torch.Tensor:
    """Return the scale of each of `length` numbers, from one per block of an 8-bit optimizer. `phase`: position of the
    first number in the first block.
    """
    return scales.repeat_interleave(BLOCK)[phase : phase + length]


@dataclass(slots=True)
class _Stretch:
    path: Path
    begin: int
    """Byte in the file."""
    position: int
    length: int
    dtype: torch.dtype
    phase: int | None = None
    """Of scales: of the first number in its block."""


class Fragments:
    """A checkpoint's fragments, read from whatever ranks wrote them. CheckpointError names file and parameter."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.facts: dict[str, dict[str, Any]] = {}
        """Parameter -> shape, dtype, parts, numbers."""
        self._stretches: dict[tuple[str, str, int], list[_Stretch]] = defaultdict(list)
        self._bound: dict[str, dict[str, tuple[Path, int, torch.dtype, list[int]]]] = defaultdict(dict)
        for path in sorted(folder.glob(f"{FRAGMENTS}*.safetensors")):
            try:
                self._note(path, *read_header(path))
            except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
                raise CheckpointError("{file} cannot be read: {reason}.", file=path, reason=error) from None

    def _note(self, path: Path, header: dict[str, Any], data: int) -> None:
        """Index one file by its safetensors header: where each fragment is, and the facts of its parameter. `data`: the
        byte at which the tensors begin.
        """
        facts = json.loads(header["__metadata__"]["fragments"])
        for key, entry in header.items():
            if key in ("__metadata__", CHECKSUMS):
                continue
            state, _, name = key.partition(":")
            fragment_facts, begin, dtype = facts[name], data + entry["data_offsets"][0], _DTYPES[entry["dtype"]]
            (length,) = header[f"{WEIGHT}:{name}"]["shape"]
            if state in fragment_facts.get("bound", ()):
                self._bound[name][state] = path, begin, dtype, entry["shape"]
                continue
            part, count = fragment_facts.get("part", (0, 1))
            phase = int(fragment_facts["phase"]) if state in fragment_facts.get("scales", ()) else None
            stretch = _Stretch(path, begin, int(fragment_facts["place"]), length, dtype, phase)
            self._stretches[name, state, part].append(stretch)
            parameter_facts = self.facts.setdefault(name, fragment_facts | {"parts": count})
            parameter_facts.setdefault("states", {})[state] = dtype

    @cached_property
    def names(self) -> list[str]:
        """The parameters, in the order of their names."""
        return sorted(self.facts)

    def states(self, name: str) -> set[str]:
        """Return the names of a parameter's optimizer states, such as exp_avg; none if it is not in the checkpoint."""
        return self.facts.get(name, {}).get("states", {}).keys() - {WEIGHT}

    def numbers(self, name: str) -> dict[str, float]:
        """Return the scalar states of a parameter, such as step. A count of 0 steps was saved by DeepSpeed's FusedAdam,
        which counts up for one parameter of a group alone (deepspeed_patches.py): the highest count is right for all.
        """
        numbers: dict[str, float] = self.facts.get(name, {}).get("numbers", {})
        return numbers | ({"step": self._most_steps} if numbers.get("step") == 0 else {})

    @cached_property
    def _most_steps(self) -> float:
        """The highest count of steps of any parameter."""
        return max(facts.get("numbers", {}).get("step", 0.0) for facts in self.facts.values())

    def bound(self, name: str) -> dict[str, torch.Tensor]:
        """Return {state: tensor} of a parameter's states that have other shapes than it, such as Adafactor's rows."""
        tensors = {}
        for state, (path, begin, dtype, shape) in self._bound.get(name, {}).items():
            tensors[state] = torch.empty(shape, dtype=dtype)
            self._fill(_octets(tensors[state]), path, begin)
        return tensors

    def dtype(self, name: str, state: str) -> torch.dtype:
        """Return the type in which a state is stored."""
        dtype: torch.dtype = self.facts[name]["states"][state]
        return dtype

    def read(
        self, name: str, state: str, position: int, length: int, part: Part = (0, 1), turned: bool = False
    ) -> torch.Tensor:
        """Return `length` numbers of a flattened state (or weight) from `position` on: of the complete parameter, or of
        the `part` (number, count) that a tensor-parallel rank has. `turned`: flattened column by column.
        """
        if name not in self.facts:
            raise CheckpointError("{folder} holds no parameter {name}.", folder=self.folder, name=name)
        is_same = turned == self.facts[name].get("turned", False)
        if is_same and part[1] == self.facts[name]["parts"]:
            return self._range(name, state, position, length, part[0])
        if is_same and mesh.split_of(name) is mesh.Split.rows:
            return self._across_parts(name, state, position, length, part)
        full_tensor = process_group.take_part(name, self.whole(name, state), *part)
        full_tensor = full_tensor.t() if turned else full_tensor
        return full_tensor.reshape(-1)[position : position + length]

    def _across_parts(self, name: str, state: str, position: int, length: int, part: Part) -> torch.Tensor:
        """Do what `read` does, if the checkpoint has another number of tensor-parallel parts, for parameters split by
        rows: their parts are consecutive when flattened, so only the overlapping ones are read.
        """
        facts, pieces = self.facts[name], []
        size = math.prod(facts["shape"])
        begin, per_part = size // part[1] * part[0] + position, size // facts["parts"]
        end = begin + length
        while begin < end:
            number, first = divmod(begin, per_part)
            count = min(end - begin, per_part - first)
            pieces.append(self._range(name, state, first, count, number))
            begin += count
        return torch.cat(pieces)

    def whole(self, name: str, state: str = WEIGHT) -> torch.Tensor:
        """Return a complete parameter, or a state of it, in its shape, joined from all tensor-parallel parts."""
        facts = self.facts[name]
        shape = mesh.part_shape(name, tuple(facts["shape"]), facts["parts"])
        if facts.get("turned"):
            return self._range(name, state, 0, math.prod(shape), 0).view(shape[::-1]).t().contiguous()
        parts = [self._range(name, state, 0, math.prod(shape), part).view(shape) for part in range(facts["parts"])]
        return process_group.join_parts(name, parts)

    def _range(self, name: str, state: str, position: int, length: int, part: int) -> torch.Tensor:
        """Return `length` numbers from `position` on of a flattened saved part, read from the fragments that hold them;
        a CheckpointError if a number is in none.
        """
        stretches = sorted(self._stretches.get((name, state, part), ()), key=lambda stretch: stretch.position)
        dtype = stretches[0].dtype if stretches else torch.float32
        values, done = torch.empty(length, dtype=dtype), position
        for stretch in stretches:
            end = min(stretch.position + stretch.length, position + length)
            if stretch.position <= done < end:
                self._read_stretch(values[done - position : end - position], stretch, done - stretch.position)
                done = end
        if done < position + length:
            raise CheckpointError(
                "{folder} lacks numbers {first} to {last} of {name} ({state}): the file of a rank is missing.",
                folder=self.folder,
                first=done,
                last=position + length - 1,
                name=name,
                state=state,
            )
        return values

    def _read_stretch(self, target: torch.Tensor, stretch: _Stretch, first: int) -> None:
        """Fill `target` [N] with a fragment's numbers from its `first` on; scales, stored per block, are repeated."""
        if stretch.phase is None:
            self._fill(_octets(target), stretch.path, stretch.begin + first * stretch.dtype.itemsize)
            return
        block, phase = divmod(stretch.phase + first, BLOCK)
        scales = torch.empty(-(-(phase + len(target)) // BLOCK), dtype=stretch.dtype)
        self._fill(_octets(scales), stretch.path, stretch.begin + block * stretch.dtype.itemsize)
        target.copy_(spread(scales, phase, len(target)))

    def _fill(self, target: memoryview, path: Path, begin: int) -> None:
        """Fill `target` with the bytes of a file from `begin` on; a CheckpointError if it cannot be read."""
        try:
            with open(path, "rb", buffering=0) as file:
                file.seek(begin)
                done = 0
                while done < len(target):
                    count = file.readinto(target[done:])
                    if not count:
                        raise OSError("it ends too early")
                    done += count
        except (OSError, ValueError) as error:
            raise CheckpointError("{file} cannot be read: {reason}.", file=path, reason=reason_of(error)) from None


def iter_weights(checkpoint: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and value of each parameter and stored buffer of a checkpoint, as the model computes with them.
    Tied ones come once. Memory holds one of them. CheckpointError if a file is missing or damaged.
    """
    fragments = Fragments(checkpoint)
    for name in fragments.names:
        yield name, fragments.whole(name).to(_DTYPES[fragments.facts[name]["dtype"]])
