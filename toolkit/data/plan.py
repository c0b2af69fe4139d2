"""Which samples share a row of a batch: planned once for the whole run, saved beside the store, mapped by all ranks."""

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toolkit.config.schema import Packing, SourceConfig
from toolkit.data.permutation import Permutation
from toolkit.data.store import Store, read_manifest
from toolkit.distributed.build_once import build_once

CODE_VERSION = 1
"""Part of a plan's name; raise it when plans come out differently."""

PAD_MULTIPLE = 8
"""Rows are padded to a multiple of this, so that there are few different shapes."""

_SLICE = 1 << 20


def pad_multiple(parts: int) -> int:
    """Return what the length of rows is made a multiple of, so that they can be divided into equal parts."""
    return math.lcm(PAD_MULTIPLE, parts)


@dataclass(frozen=True, slots=True)
class Plan:
    """Rows, each a list of samples of one split; with `grouped` a row is a whole micro-batch.

    Without arrays each sample is a row of its own.
    """

    num_rows: int
    members: NDArray[np.uint32] | None = None
    """Samples (indices of the split), row after row, [samples of an epoch]."""
    offsets: NDArray[np.int64] | None = None
    """Where each row begins in `members`, and the end, [num_rows + 1]; None: each row is one sample."""
    folder: Path | None = None
    """Where the arrays are mapped from."""

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, row: int) -> list[int]:
        """Return the samples of a row."""
        if self.members is None:
            return [int(row)]
        if self.offsets is None:
            return [int(self.members[row])]
        samples: list[int] = self.members[self.offsets[row] : self.offsets[row + 1]].tolist()
        return samples

    def __reduce__(self) -> Any:
        return (Plan, (self.num_rows,)) if self.folder is None else (load_plan, (self.folder,))


def plan_rows(
    store: Store,
    packing: Packing,
    *,
    max_length: int,
    micro_per_gpu: int,
    window: int = 0,
    seed: int,
    sources: list[SourceConfig],
    cache_dir: Path,
    say: Callable[[str], None],
) -> Plan:
    """Return the plan of a split, made now if nobody has.

    Args:
        store: the split.
        packing: see the schema.
        max_length: tokens of a row.
        micro_per_gpu: rows of a micro-batch; used by `grouped`.
        window: see `data.packing_window`.
        seed: decides which samples meet, and which are taken of a source whose weight is no whole number.
        sources: the training sources with their weights; [] takes each sample once.
        cache_dir: `prepare.dir`; plans are kept in plans/ below it.
        say: receives the message shown while waiting for another process.

    Raises:
        DataError: the plan cannot be written.
    """
    weights = [source.weight for source in sources]
    if packing is Packing.none and all(weight == 1 for weight in weights):
        return Plan(len(store))
    key: list[Any] = [CODE_VERSION, store.fingerprint, store.split, packing.name, max_length, window, seed, weights]
    if packing is Packing.grouped:
        key.append(micro_per_gpu)
    name = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]

    def build(folder: Path) -> None:
        samples = weighted_samples(store, weights, seed)
        # Samples of one length are dealt out at random, so that rows do not follow the order of the files.
        samples = samples[Permutation(len(samples), f"plan {seed}")(np.arange(len(samples)))]
        lengths = store.lengths(samples)
        if packing is Packing.packed:
            rows = pack(lengths, max_length, window)
        elif packing is Packing.grouped:
            rows = group(lengths, micro_per_gpu * max_length)
        else:
            rows = np.arange(len(samples))
        _save(folder, samples, rows)

    target = cache_dir / "plans" / name
    build_once(target, build, lambda folder: (folder / "plan.json").is_file(), say)
    return load_plan(target)


def weighted_samples(store: Store, weights: list[float], seed: int) -> NDArray[np.int64]:
    """Return the samples of an epoch: each as often as its source's weight says, of a fraction a random part."""
    everything = np.arange(len(store))
    if all(weight == 1 for weight in weights):
        return everything
    of_file = np.array([file["source"] for file in read_manifest(store.folder)["files"]])
    source_of = of_file[store.files[store.members]]
    chosen = []
    for number, weight in enumerate(weights):
        mine = everything[source_of == number]
        chosen += [mine] * int(weight)
        part = round((weight - int(weight)) * len(mine))
        if not part and weight < 1:
            part = min(1, len(mine))  # a source that was named is never left out
        if part:
            chosen.append(mine[Permutation(len(mine), f"weight {seed} {number}")(np.arange(part))])
    return np.concatenate(chosen) if chosen else everything[:0]


def pack(lengths: NDArray[np.int64], capacity: int, window: int = 0) -> NDArray[np.int64]:
    """Return the row of each sample by best-fit decreasing: the longest first, each into the fullest row that takes it.

    Best-fit decreasing needs at most 11/9 of the fewest rows possible, plus 4 (Johnson, 1974); with many short samples
    hardly more than the fewest. Rows by the room that is left in them stand in stacks, and which stacks hold any is
    kept as the bits of one integer: the first that fits is found in the time of an addition.

    Args:
        lengths: tokens of each sample, none above the capacity, [samples].
        capacity: tokens of a row.
        window: samples that are packed together, in the order given; 0 means all.
    """
    window = window or len(lengths)
    rows = np.empty(len(lengths), np.int64)
    num_rows = 0
    for start in range(0, len(lengths), window):
        num_rows = _pack(lengths[start : start + window], capacity, rows[start : start + window], num_rows)
    return rows


def _pack(lengths: NDArray[np.int64], capacity: int, rows: NDArray[np.int64], num_rows: int) -> int:
    """Fill `rows`, beginning with the row `num_rows`; return how many rows there are then."""
    if len(lengths) and lengths.max() > capacity:
        raise ValueError(f"a sample of {lengths.max()} tokens does not fit into rows of {capacity}")
    order = np.argsort(-lengths, kind="stable")
    stacks: list[list[int]] = [[] for _ in range(capacity + 1)]
    rooms = 0
    for start in range(0, len(order), _SLICE):
        part = order[start : start + _SLICE]
        placed = []
        for length in lengths[part].tolist():
            fitting = rooms >> length
            if fitting:
                room = length + (fitting & -fitting).bit_length() - 1
                stack = stacks[room]
                row = stack.pop()
                if not stack:
                    rooms ^= 1 << room
            else:
                room, row = capacity, num_rows
                num_rows += 1
            left = room - length
            if left:
                stacks[left].append(row)
                rooms |= 1 << left
            placed.append(row)
        rows[part] = placed
    return num_rows


def group(lengths: NDArray[np.int64], budget: int) -> NDArray[np.int64]:
    """Return the micro-batch of each sample: samples of like length, as many as fit in when padded to the longest.

    Args:
        lengths: tokens of each sample, [samples].
        budget: most tokens of a micro-batch, padding included; a longer sample is alone.
    """
    order = np.argsort(-lengths, kind="stable")
    groups = np.empty(len(lengths), np.int64)
    start = number = 0
    while start < len(order):
        padded = -(-int(lengths[order[start]]) // PAD_MULTIPLE) * PAD_MULTIPLE
        end = start + max(1, budget // padded)
        groups[order[start:end]] = number
        start, number = end, number + 1
    return groups


def _save(folder: Path, samples: NDArray[np.int64], rows: NDArray[np.int64]) -> None:
    counts = np.bincount(rows)
    np.save(folder / "members.npy", samples[np.argsort(rows, kind="stable")].astype(np.uint32))
    if counts.max(initial=1) > 1:
        np.save(folder / "offsets.npy", np.concatenate(([0], np.cumsum(counts))))
    (folder / "plan.json").write_text(json.dumps({"num_rows": len(counts)}), encoding="utf-8")


def load_plan(folder: Path) -> Plan:
    """Return a saved plan, mapped."""
    arrays = [
        np.load(path, mmap_mode="r").view(np.ndarray) if path.is_file() else None
        for path in (folder / "members.npy", folder / "offsets.npy")
    ]
    num_rows = json.loads((folder / "plan.json").read_text(encoding="utf-8"))["num_rows"]
    return Plan(num_rows, arrays[0], arrays[1], folder)
