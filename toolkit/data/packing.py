"""Plans which samples share a sequence, and how often each is taken: once for a whole run, saved next to the cache."""

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toolkit.config.schema import Packing, SourceConfig
from toolkit.data import sampler, store
from toolkit.data.plans import PAD_MULTIPLE, PackingPlan, joined_ranges, load_plan
from toolkit.distributed.file_lock import built_once

CODE_VERSION = 1
"""Part of a plan's name; raise it when plans come out differently."""

LEAST_SHARED = 16
"""Tokens; samples that have fewer in common stay apart, so that chance does not decide what is learned together."""

_SLICE = 1 << 20


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
    (`evaluated_samples`). `size`: so many consecutive samples, a unit, always share a row, as a preference pair does;
    then nothing is packed. `share`: samples of one conversation are packed together, their common prefix once.
    """
    unit_offsets = _unit_offsets(cache, size)
    # Where weights change over the run, a row holds samples of one source, as another's may not be due with it.
    by_source = any(source.weights for source in sources)
    weights = [1.0 if by_source else source.weight for source in sources]
    is_capped = 0 < most < len(cache) // size
    if packing is Packing.none and not by_source and all(weight == 1 for weight in weights):
        return _one_unit_per_row(size * evaluated_samples(cache, most, size), unit_offsets)
    # Only where neighbouring samples are of one row of the data is there a prefix to share.
    share = share and packing is Packing.packed and not np.diff(cache.rows[cache.members]).all()
    classes = list(classes) if packing is Packing.packed else []
    key: list[Any] = [CODE_VERSION, cache.content, cache.split, packing.name, max_length, window, seed, weights]
    # What is not in use adds nothing, so that plans saved before it existed keep their names.
    key += [micro_per_gpu] if packing is Packing.grouped else []
    key += [{"most": most}] if is_capped else []
    key += ["pairs"] if size > 1 else []
    key += [{"shared": LEAST_SHARED}] if share else []
    if by_source or classes:
        points = [[source.weight, *((point.at, point.weight) for point in source.weights)] for source in sources]
        key.append({"weights": points if by_source else [], "classes": classes})

    def pack_or_group(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        if packing is Packing.packed:
            return pack(lengths, max_length, window)
        return group(lengths, micro_per_gpu * max_length) if packing is Packing.grouped else np.arange(len(lengths))

    def save_arrays(folder: Path) -> tuple[int, list[int]]:
        numbers = evaluated_samples(cache, most, size) if is_capped else weighted_samples(cache, weights, seed, size)
        units = _Units(cache, numbers, size, max_length if share else 0, f"plan {seed}")
        # A row holds units of one kind: of a source, or of a class of length.
        kinds = cache.sources()[units.first] if by_source else np.searchsorted(classes, units.longest)
        num_kinds = len(sources) if by_source else len(classes) + 1
        rows, bounds = _rows_by_kind(units.lengths, kinds, num_kinds, pack_or_group)
        units.save(folder, rows, unit_offsets)
        return bounds[-1], bounds if by_source else []

    return saved_plan(cache_dir, key, save_arrays)


def _unit_offsets(cache: store.TokenizedCache, size: int) -> range:
    """Return a unit's samples minus its first: 0 and 1 of a pair; in a `MismatchedCache` of n samples 0 and n."""
    distance = cache.num_numbers - len(cache)
    return range(0, 2 * distance, distance) if distance else range(size)


def _rows_by_kind(
    lengths: NDArray[np.int64], kinds: NDArray[np.int64], num_kinds: int, rows_of: Callable[..., NDArray[np.int64]]
) -> tuple[NDArray[np.int64], list[int]]:
    """Return the row of each unit, [units], where each kind (0 … num_kinds - 1) has its own rows; and the first row of
    each kind, and the end. `rows_of`: lengths of units (tokens) -> their rows, from 0 on.
    """
    rows, bounds = np.empty(len(kinds), np.int64), [0]
    for kind in range(num_kinds):
        of_kind = np.flatnonzero(kinds == kind)
        rows_of_kind = rows_of(lengths[of_kind])
        rows[of_kind] = bounds[-1] + rows_of_kind
        bounds.append(bounds[-1] + int(rows_of_kind.max(initial=-1)) + 1)
    return rows, bounds


class _Units:
    """Units of packing, samples that stay together, shuffled by `key`: unit n is the `size` samples from n x size on,
    for each n of `numbers`; or with `capacity` (a unit's most tokens, size 1) samples that share a prefix.
    """

    def __init__(
        self, cache: store.TokenizedCache, numbers: NDArray[np.int64], size: int, capacity: int, key: str
    ) -> None:
        self.samples: NDArray[np.int64] | None = None
        """All samples, ascending, where they share prefixes; else None."""
        # `first`, `lengths`, `longest`, [units]: a unit's first sample, its tokens, and those of its longest sample.
        if not capacity:
            order = sampler.Permutation(len(numbers), key)(np.arange(len(numbers)))
            self.first = size * numbers[order]
            self.lengths = self.longest = cache.lengths(self.first)  # with `size` > 1 unused, as nothing is packed
            return
        from toolkit.data.prefixes import shared_prefixes

        self.samples = np.sort(numbers)
        self.shared = shared_prefixes(cache, self.samples, capacity)
        begins, lengths = np.flatnonzero(self.shared == 0), cache.lengths(self.samples)
        order = sampler.Permutation(len(begins), key)(np.arange(len(begins)))
        self.begins, self.sizes = begins[order], np.diff(begins, append=len(numbers))[order]
        """Where each unit begins in `samples`, and how many samples it has, [units]."""
        self.first = self.samples[self.begins]
        self.lengths = np.add.reduceat(lengths - self.shared, begins)[order]
        self.longest = np.maximum.reduceat(lengths, begins)[order]

    def save(self, folder: Path, rows: NDArray[np.int64], unit_offsets: range) -> None:
        """Save a `PackingPlan`'s arrays. `rows`: of each unit; `unit_offsets`: see `_unit_offsets`."""
        row_after_row = np.argsort(rows, kind="stable")  # the units in this order
        if self.samples is None:
            members = _unit_samples(self.first[row_after_row], unit_offsets)
            samples_of_rows = len(unit_offsets) * np.bincount(rows)
        else:
            indices = joined_ranges(self.begins[row_after_row], self.sizes[row_after_row])
            members = self.samples[indices].astype(np.uint32)
            samples_of_rows = np.bincount(np.repeat(rows, self.sizes))
            np.save(folder / "shared.npy", self.shared[indices].astype(np.uint32))
        np.save(folder / "members.npy", members)
        if samples_of_rows.max(initial=1) > 1:  # without offsets each row is one sample
            np.save(folder / "offsets.npy", np.concatenate(([0], np.cumsum(samples_of_rows))))


def _one_unit_per_row(first_samples: NDArray[np.int64], unit_offsets: range) -> PackingPlan:
    """Return a plan whose row i holds the samples `first_samples[i] + unit_offsets`."""
    size = len(unit_offsets)
    offsets = np.arange(0, size * len(first_samples) + 1, size) if size > 1 else None
    return PackingPlan(len(first_samples), _unit_samples(first_samples, unit_offsets), offsets)


def _unit_samples(first_samples: NDArray[np.int64], unit_offsets: range) -> NDArray[np.uint32]:
    """Return the samples of units one after another: each first sample plus each of `unit_offsets`, [samples]."""
    return (first_samples[:, None] + np.array(unit_offsets)).ravel().astype(np.uint32)


def weighted_samples(cache: store.TokenizedCache, weights: list[float], seed: int, size: int = 1) -> NDArray[np.int64]:
    """Return the samples of an epoch, each as often as its source's weight: 2.5 takes all twice, and a random half once
    more. `weights`: one per source. `size` > 1: numbers of units of so many consecutive samples instead.
    """
    all_numbers = np.arange(len(cache) // size)  # of samples, or of units
    if all(weight == 1 for weight in weights):
        return all_numbers
    source_of = cache.sources()[::size]
    parts = []
    for number, weight in enumerate(weights):
        of_source = all_numbers[source_of == number]
        parts += [of_source] * int(weight)
        num_more = round((weight - int(weight)) * len(of_source))
        if not num_more and weight < 1:
            num_more = min(1, len(of_source))  # a source that was named is never left out
        if num_more:
            order = sampler.Permutation(len(of_source), f"weight {seed} {number}")
            parts.append(of_source[order(np.arange(num_more))])
    return np.concatenate(parts) if parts else all_numbers[:0]


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
    shares = np.maximum(1, np.floor(proportional).astype(np.int64))  # samples of each source
    num_left = max(0, most - int(shares.sum()))  # by rounding down; they go to the largest remainders
    for source in np.argsort(shares - proportional, kind="stable")[:num_left]:
        shares[source] += 1
    while shares.sum() > most and shares.max() > 1:  # too many, where small sources were given one
        shares[shares.argmax()] -= 1
    parts = []
    for number, share in zip(numbers, shares, strict=True):
        of_source = np.flatnonzero(source_of == number)
        parts.append(of_source[sampler.Permutation(len(of_source), f"evaluation {number}")(np.arange(share))])
    return np.sort(np.concatenate(parts))


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
    for window_begin in range(0, len(lengths), window):
        order = window_begin + np.argsort(-lengths[window_begin : window_begin + window], kind="stable")
        stacks: list[list[int]] = [[] for _ in range(capacity + 1)]
        rooms = 0
        for slice_begin in range(0, len(order), _SLICE):  # lists of all numbers would take much memory
            samples = order[slice_begin : slice_begin + _SLICE]
            rows_of_samples = []
            for length in lengths[samples].tolist():
                fitting = rooms >> length
                if fitting:
                    lowest_bit = fitting & -fitting
                    room = length + lowest_bit.bit_length() - 1
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
                rows_of_samples.append(row)
            rows[samples] = rows_of_samples
    return rows


def group(lengths: NDArray[np.int64], budget: int) -> NDArray[np.int64]:
    """Return the number of each sample's micro-batch, [samples]; samples of similar length are grouped, to pad little.
    `lengths`: tokens, [samples]; `budget`: tokens of a micro-batch, padding included; a longer sample is alone.
    """
    order = np.argsort(-lengths, kind="stable")
    groups = np.empty(len(lengths), np.int64)
    begin = number = 0
    while begin < len(order):
        padded_length = -(-int(lengths[order[begin]]) // PAD_MULTIPLE) * PAD_MULTIPLE  # of the group's longest sample
        end = begin + max(1, budget // padded_length)
        groups[order[begin:end]] = number
        begin, number = end, number + 1
    return groups


def saved_plan(cache_dir: Path, key: list[Any], build: Callable[[Path], tuple[int, list[int]]]) -> PackingPlan:
    """Return the plan saved under a hash of `key`, all that it depends on; else make it now: `build` saves the arrays
    into a directory and returns the number of rows, and the first row of each source and the end ([] if rows mix them).
    """
    target = cache_dir / "plans" / hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]
    with built_once(target, lambda folder: (folder / "plan.json").is_file()) as folder:
        if folder is not None:  # the plan does not exist yet
            num_rows, bounds = build(folder)
            (folder / "plan.json").write_text(json.dumps({"num_rows": num_rows, "bounds": bounds}), encoding="utf-8")
    return load_plan(target)
