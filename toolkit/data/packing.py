"""Which samples share a sequence: planned once for the whole run, saved next to the cache, mapped by all ranks."""

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toolkit.config.schema import Packing, SourceConfig
from toolkit.data import sampler, store
from toolkit.distributed.file_lock import build_once

CODE_VERSION = 1
"""Part of a plan's name; raise it when plans come out differently."""

PAD_MULTIPLE = 8
"""Rows are padded to a multiple of this, so that there are few different shapes."""

LEAST_SHARED = 16
"""Tokens; samples that have fewer in common stay apart, so that chance does not decide what is learned together."""

_SLICE = 1 << 20


def pad_multiple(parts: int) -> int:
    """Return the multiple to which sequences are padded so that `parts` ranks get equal pieces of each."""
    return math.lcm(PAD_MULTIPLE, parts)


@dataclass(frozen=True, slots=True)
class PackingPlan:
    """Rows, each a list of samples of one split, or without arrays one; with `grouped` a row is a micro-batch."""

    num_rows: int
    members: NDArray[np.uint32] | None = None
    """Samples (indices of the split), row after row, [samples of an epoch]."""
    offsets: NDArray[np.int64] | None = None
    """Where each row begins in `members`, and the end, [num_rows + 1]; None: each row is one sample."""
    folder: Path | None = None
    """Where the arrays are mapped from."""
    bounds: tuple[int, ...] = ()
    """Of a plan whose rows hold samples of one source each: the first row of each source, and the end."""
    shared: NDArray[np.uint32] | None = None
    """How many of each sample's first tokens are not there again, as they are the first ones of the sample before it in
    its row, [samples of an epoch]; None: no sample shares any. See `prefixes.shared_prefixes`."""

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, row: int) -> list[int]:
        """Return the samples of a row, as indices of the split."""
        if self.members is None:
            return [int(row)]
        if self.offsets is None:
            return [int(self.members[row])]
        samples: list[int] = self.members[self.offsets[row] : self.offsets[row + 1]].tolist()
        return samples

    def prefixes(self, row: int) -> list[int]:
        """Return how many first tokens each sample of a row shares with the one before it; [] if no sample shares."""
        if self.shared is None or self.offsets is None:
            return []
        prefixes: list[int] = self.shared[self.offsets[row] : self.offsets[row + 1]].tolist()
        return prefixes

    @property
    def num_shared(self) -> int:
        """Tokens of an epoch that are not computed again, as a sample before them in the row has the same prefix."""
        return 0 if self.shared is None else int(self.shared.sum(dtype=np.int64))

    def lengths(self, cache: store.TokenizedCache) -> NDArray[np.int64]:
        """Return how many tokens each sample adds to its row, without a shared prefix, [samples of an epoch]."""
        lengths = cache.lengths(self.members)
        return lengths if self.shared is None else lengths - self.shared

    def attention_pairs(self, cache: store.TokenizedCache, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the attention cost of each of `rows`, [len(rows)]: twice its causal pairs of tokens. A sample of L
        tokens has about L² / 2 pairs; the first S² / 2 of them are not computed again if it shares S tokens. The
        sampler deals out rows by it: those of equally many tokens differ up to 100-fold, as they hold one text or many.
        """
        assert self.members is not None and self.offsets is not None
        counts = self.offsets[rows + 1] - self.offsets[rows]
        samples = _joined_ranges(self.offsets[rows], counts)
        costs = cache.lengths(self.members[samples]) ** 2
        if self.shared is not None:
            costs -= self.shared[samples].astype(np.int64) ** 2
        return np.add.reduceat(costs, np.cumsum(counts) - counts)

    def __reduce__(self) -> Any:
        if self.folder is None:  # not saved
            return PackingPlan, (self.num_rows, self.members, self.offsets)
        return load_plan, (self.folder,)  # the worker process maps the files again, rather than to copy the arrays


def plan_sequences(
    cache: store.TokenizedCache,
    packing: Packing,
    *,
    max_length: int,
    micro_per_gpu: int,
    window: int = 0,
    classes: Sequence[int] = (),
    seed: int,
    sources: list[SourceConfig],
    most: int = 0,
    size: int = 1,
    share: bool = False,
    cache_dir: Path,
) -> PackingPlan:
    """Return the packing plan of a split, loaded from `cache_dir` or computed and saved now; the same on all ranks.

    `window`: how many samples are packed together, 0 all. `classes`: upper bounds of length classes (tokens, ascending)
    that are packed separately. `seed` decides which samples share a row and which are taken for a fractional weight.
    `sources`: those of training, with their weights; [] takes each sample once, or with `most` > 0 at most so many
    (`evaluated_samples`). `size`: so many consecutive samples always share a row, as a preference pair does; then
    nothing is packed. `share`: samples of one conversation are packed together, their common prefix once.
    """
    distance = cache.num_numbers - len(cache)  # in a `MismatchedCache` sample i shares a row with i + len(cache)
    relative = range(0, 2 * distance, distance) if distance else range(size)
    by_source = any(source.weights for source in sources)  # a row of several could come when one of them may not
    weights = [1.0 if by_source else source.weight for source in sources]
    is_capped = 0 < most < len(cache) // size
    if packing is Packing.none and not by_source and all(weight == 1 for weight in weights):
        evaluated = size * evaluated_samples(cache, most, size) if len(relative) > 1 or is_capped else None
        return PackingPlan(len(cache)) if evaluated is None else _one_unit_per_row(evaluated, relative)
    key: list[Any] = [CODE_VERSION, cache.content, cache.split, packing.name, max_length, window, seed, weights]
    key += [micro_per_gpu] * (packing is Packing.grouped) + [{"most": most}] * is_capped + ["pairs"] * (size > 1)
    share = share and packing is Packing.packed and not np.diff(cache.rows[cache.members]).all()
    key += [{"shared": LEAST_SHARED}] * share
    classes = list(classes) if packing is Packing.packed else []
    if by_source or classes:
        points = [[source.weight, *((point.at, point.weight) for point in source.weights)] for source in sources]
        key.append({"weights": points if by_source else [], "classes": classes})

    def build(folder: Path) -> tuple[int, list[int]]:
        chosen = evaluated_samples(cache, most, size) if is_capped else weighted_samples(cache, weights, seed, size)
        units = _Units(cache, chosen, size, max_length if share else 0, f"plan {seed}")
        # A row holds units of one kind: of a source, or of a class of length.
        kinds = cache.sources()[units.first] if by_source else np.searchsorted(classes, units.longest)
        rows, bounds = np.empty(len(kinds), np.int64), [0]
        for kind in range(len(sources) if by_source else len(classes) + 1):
            of_kind = np.flatnonzero(kinds == kind)
            if packing is Packing.packed:
                row_of = pack(units.lengths[of_kind], max_length, window)
            elif packing is Packing.grouped:
                row_of = group(units.lengths[of_kind], micro_per_gpu * max_length)
            else:
                row_of = np.arange(len(of_kind))
            rows[of_kind] = row_of + bounds[-1]
            bounds.append(bounds[-1] + int(row_of.max(initial=-1)) + 1)
        units.save(folder, rows, relative)
        return bounds[-1], bounds if by_source else []

    return saved_plan(cache_dir, key, build)


class _Units:
    """Units of packing, shuffled: `size` samples that stay together, or with `capacity` (tokens) the samples of a
    conversation that share a prefix. `numbers`: of the units of `size` samples.
    """

    def __init__(
        self, cache: store.TokenizedCache, numbers: NDArray[np.int64], size: int, capacity: int, key: str
    ) -> None:
        self.size = size
        self.samples: NDArray[np.int64] | None = None
        """All samples, ascending, where units differ in size; else None."""
        if capacity:
            from toolkit.data.prefixes import shared_prefixes

            self.samples = np.sort(numbers)
            self.shared = shared_prefixes(cache, self.samples, capacity)
            self.begins = np.flatnonzero(self.shared == 0)
            self.sizes = np.diff(self.begins, append=len(numbers))
            numbers = np.arange(len(self.begins))
        self.numbers = numbers[sampler.Permutation(len(numbers), key)(np.arange(len(numbers)))]
        self.first = size * self.numbers if self.samples is None else self.samples[self.begins[self.numbers]]
        """First sample of each unit, [units]."""
        self.lengths = self.longest = cache.lengths(self.first)
        if self.samples is not None:
            lengths = cache.lengths(self.samples)
            self.lengths = np.add.reduceat(lengths - self.shared, self.begins)[self.numbers]
            self.longest = np.maximum.reduceat(lengths, self.begins)[self.numbers]

    def save(self, folder: Path, rows: NDArray[np.int64], relative: range) -> None:
        """Save the arrays of a `PackingPlan`. `rows`: the row that each unit is packed into, [units]; `relative`: the
        samples of a unit minus its first.
        """
        numbers = self.numbers[np.argsort(rows, kind="stable")]
        if self.samples is None:
            members, counts = _unit_samples(self.size * numbers, relative), len(relative) * np.bincount(rows)
        else:
            sizes = self.sizes[numbers]
            indices = _joined_ranges(self.begins[numbers], sizes)
            members, counts = self.samples[indices].astype(np.uint32), np.bincount(np.repeat(np.sort(rows), sizes))
            np.save(folder / "shared.npy", self.shared[indices].astype(np.uint32))
        np.save(folder / "members.npy", members)
        if counts.max(initial=1) > 1:
            np.save(folder / "offsets.npy", np.concatenate(([0], np.cumsum(counts))))


def _joined_ranges(begins: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return begins[0], begins[0] + 1, … (counts[0] numbers), then begins[1], …, [sum of counts]."""
    return np.repeat(begins - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())


def _one_unit_per_row(first_samples: NDArray[np.int64], relative: range) -> PackingPlan:
    """Return a plan whose row i holds the samples `first_samples[i] + relative`."""
    size = len(relative)
    offsets = np.arange(0, size * len(first_samples) + 1, size) if size > 1 else None
    return PackingPlan(len(first_samples), _unit_samples(first_samples, relative), offsets)


def _unit_samples(first_samples: NDArray[np.int64], relative: range) -> NDArray[np.uint32]:
    """Return the samples of units one after another: each first sample plus each number of `relative`, [samples]."""
    return (first_samples[:, None] + np.array(relative)).ravel().astype(np.uint32)


def weighted_samples(cache: store.TokenizedCache, weights: list[float], seed: int, size: int = 1) -> NDArray[np.int64]:
    """Return the samples of an epoch, each as often as its source's weight: 2.5 takes all twice, and a random half once
    more. `weights`: one per source. `size` > 1: numbers of units of so many consecutive samples instead.
    """
    everything = np.arange(len(cache) // size)
    if all(weight == 1 for weight in weights):
        return everything
    source_of = cache.sources()[::size]
    chosen = []
    for number, weight in enumerate(weights):
        of_source = everything[source_of == number]
        chosen += [of_source] * int(weight)
        part = round((weight - int(weight)) * len(of_source))
        if not part and weight < 1:
            part = min(1, len(of_source))  # a source that was named is never left out
        if part:
            chosen.append(of_source[sampler.Permutation(len(of_source), f"weight {seed} {number}")(np.arange(part))])
    return np.concatenate(chosen) if chosen else everything[:0]


def evaluated_samples(cache: store.TokenizedCache, most: int, size: int = 1) -> NDArray[np.int64]:
    """Return the samples of a split on which the evaluation loss is measured, ascending, the same for any number of
    ranks: at most `most` (0: all) in proportion to the sources, but one of each at least. `size` > 1: numbers of units
    of so many consecutive samples instead.
    """
    if not 0 < most < len(cache) // size:
        return np.arange(len(cache) // size)
    source_of = cache.sources()[::size]
    numbers, counts = np.unique(source_of, return_counts=True)
    proportional = counts * (most / len(source_of))
    shares = np.maximum(1, np.floor(proportional).astype(np.int64))
    for source in np.argsort(shares - proportional, kind="stable")[: max(0, most - int(shares.sum()))]:
        shares[source] += 1  # the largest remainders first
    while shares.sum() > most and shares.max() > 1:
        shares[shares.argmax()] -= 1
    chosen = []
    for number, share in zip(numbers, shares, strict=True):
        of_source = np.flatnonzero(source_of == number)
        chosen.append(of_source[sampler.Permutation(len(of_source), f"evaluation {number}")(np.arange(share))])
    return np.sort(np.concatenate(chosen))


def pack(lengths: NDArray[np.int64], capacity: int, window: int = 0) -> NDArray[np.int64]:
    """Return the row of each sample by best-fit decreasing: the longest first, each into the fullest row that takes it.

    It needs at most 11/9 of the fewest rows possible, plus 4 (Johnson, 1974). `stacks[n]` holds the rows with n tokens
    of room left; bit n of the integer `rooms` says whether it holds any, so that the smallest sufficient room is the
    lowest bit set from `length` on. `lengths`: tokens of each sample, none above the capacity of a row, [samples].
    `window`: how many samples are packed together, in their order; 0: all.
    """
    if lengths.max(initial=0) > capacity:
        raise ValueError(f"a sample of {lengths.max()} tokens does not fit into rows of {capacity}")
    rows = np.empty(len(lengths), np.int64)
    num_rows = 0
    window = window or max(1, len(lengths))
    for begin in range(0, len(lengths), window):
        order = begin + np.argsort(-lengths[begin : begin + window], kind="stable")
        stacks: list[list[int]] = [[] for _ in range(capacity + 1)]
        rooms = 0
        for start in range(0, len(order), _SLICE):
            part = order[start : start + _SLICE]
            placed = []
            for length in lengths[part].tolist():
                fitting = rooms >> length
                if fitting:
                    room = length + (fitting & -fitting).bit_length() - 1
                    row = stacks[room].pop()
                    if not stacks[room]:
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
    return rows


def group(lengths: NDArray[np.int64], budget: int) -> NDArray[np.int64]:
    """Return the number of each sample's micro-batch, [samples]; samples of similar length are grouped, to pad little.
    `lengths`: tokens, [samples]; `budget`: tokens of a micro-batch, padding included; a longer sample is alone.
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


def saved_plan(cache_dir: Path, key: list[Any], build: Callable[[Path], tuple[int, list[int]]]) -> PackingPlan:
    """Return the plan saved under a hash of `key`, all that it depends on; else make it now: `build` saves the arrays
    into a directory and returns the number of rows and the bounds of the sources.
    """
    target = cache_dir / "plans" / hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]

    def build_plan(folder: Path) -> None:
        num_rows, bounds = build(folder)
        (folder / "plan.json").write_text(json.dumps({"num_rows": num_rows, "bounds": bounds}), encoding="utf-8")

    build_once(target, build_plan, lambda folder: (folder / "plan.json").is_file())
    return load_plan(target)


def load_plan(folder: Path) -> PackingPlan:
    """Return a saved plan; its arrays are memory-mapped, so that processes of a node share them."""
    arrays = [
        np.load(path, mmap_mode="r").view(np.ndarray) if path.is_file() else None
        for path in (folder / "members.npy", folder / "offsets.npy", folder / "shared.npy")
    ]
    about = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
    return PackingPlan(about["num_rows"], arrays[0], arrays[1], folder, tuple(about.get("bounds", ())), arrays[2])
