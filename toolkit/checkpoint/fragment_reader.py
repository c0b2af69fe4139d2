"""Read the fragments of a checkpoint (checkpoint/fragments.py) in whatever layout: to resume, convert or export."""

import json
import math
import struct
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from toolkit.checkpoint.directory import CHECKSUMS, FRAGMENTS, read_header
from toolkit.checkpoint.fragments import BLOCK, DTYPES, WEIGHT, Part, view_bytes
from toolkit.config import tensor_split
from toolkit.distributed import process_group
from toolkit.messages import CheckpointError, reason_of


def spread(scales: torch.Tensor, phase: int, length: int) -> torch.Tensor:
    """Return the scale of each of `length` numbers, from one per block of an 8-bit optimizer. `phase`: position of the
    first number in the first block.
    """
    return scales.repeat_interleave(BLOCK)[phase : phase + length]


@dataclass(slots=True)
class _Stretch:
    """Where in a file the numbers of one state of a fragment are; see `Fragment` for the other fields."""

    path: Path
    begin: int
    """Byte in the file."""
    position: int
    length: int
    dtype: torch.dtype
    phase: int | None = None
    """For scales: position of the first number in its block."""


class Fragments:
    """A checkpoint's fragments, read from whatever ranks wrote them. CheckpointError names file and parameter."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.facts: dict[str, dict[str, Any]] = {}
        """Parameter -> shape, dtype, parts, numbers."""
        self._stretches: dict[tuple[str, str, int], list[_Stretch]] = defaultdict(list)
        """(Parameter, state, number of the part) -> its stretches."""
        self._bound: dict[str, dict[str, tuple[Path, int, torch.dtype, list[int]]]] = defaultdict(dict)
        """Parameter -> state -> file, first byte, type and shape of a tensor that is no stretch."""
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
            fragment_facts, begin, dtype = facts[name], data + entry["data_offsets"][0], DTYPES[entry["dtype"]]
            (length,) = header[f"{WEIGHT}:{name}"]["shape"]  # `entry` may have a scale for each block only
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
            self._fill(view_bytes(tensors[state]), path, begin)
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
        is_same_order = turned == self.facts[name].get("turned", False)
        if is_same_order and part[1] == self.facts[name]["parts"]:  # it was split into as many
            return self._range(name, state, position, length, part[0])
        if is_same_order and tensor_split.split_of(name) is tensor_split.Split.rows:
            return self._across_parts(name, state, position, length, part)
        own_part = process_group.take_part(name, self.whole(name, state), *part)
        own_part = own_part.t() if turned else own_part
        return own_part.reshape(-1)[position : position + length]

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
        shape = tensor_split.part_shape(name, tuple(facts["shape"]), facts["parts"])
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
            if stretch.position <= done < end:  # it holds the next number that is wanted
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
            self._fill(view_bytes(target), stretch.path, stretch.begin + first * stretch.dtype.itemsize)
            return
        block, phase = divmod(stretch.phase + first, BLOCK)
        scales = torch.empty(-(-(phase + len(target)) // BLOCK), dtype=stretch.dtype)
        self._fill(view_bytes(scales), stretch.path, stretch.begin + block * stretch.dtype.itemsize)
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
        yield name, fragments.whole(name).to(DTYPES[fragments.facts[name]["dtype"]])
