"""Which sequences make up each step and each rank's part: a function of seed, data, epoch and position. Orders are
computed where they are needed: no checkpoint saves them, and any number of ranks has the same steps.
"""

import hashlib
import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from toolkit.config.schema import CurriculumConfig, CurriculumShape, SourceConfig
from toolkit.messages import DataError

_ROUNDS = 6


class Permutation:
    """A pseudo-random order of 0 … size - 1, a pure function of its arguments on every machine.

    A Feistel network over the smallest even number of bits that holds `size`, cycle-walked (Black and Rogaway, Ciphers
    with Arbitrary Finite Domains, 2002); round function: splitmix64's mixing (Steele, Lea and Flood, 2014).
    """

    def __init__(self, size: int, key: str) -> None:
        self.size = size
        self._half_bits = max(1, -(-max(size - 1, 1).bit_length() // 2))
        digest = hashlib.shake_256(f"{key} {size}".encode()).digest(8 * _ROUNDS)
        self._keys = np.frombuffer(digest, "<u8")

    def __call__(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the elements at some positions, each from 0 to size - 1."""
        values = self._feistel(positions.astype(np.uint64))
        while len(outside := np.flatnonzero(values >= self.size)):  # cycle walking: permute again until it is inside
            values[outside] = self._feistel(values[outside])
        return values.astype(np.int64)

    def _feistel(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Permute the numbers of 2 x `_half_bits` bits, by a Feistel network with a round for each key."""
        half_bits, mask = np.uint64(self._half_bits), np.uint64((1 << self._half_bits) - 1)
        left, right = values >> half_bits, values & mask
        for key in self._keys:
            left, right = right, left ^ (_mixed(right + key) & mask)
        return (left << half_bits) | right


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return splitmix64's output function of each value (constants and shifts are its); multiplication wraps around."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


class Position(NamedTuple):
    """A place in the training data, the same whatever the number of ranks."""

    epoch: int = 0
    row: int = 0
    """Rows of this epoch that are done."""


BEGINNING = Position()


def next_position(position: Position, num_rows: int, global_size: int) -> Position:
    """Return the place after the step that begins at a place."""
    row = position.row + global_size
    return Position(position.epoch, row) if row < num_rows else Position(position.epoch + 1, 0)


def steps_per_epoch(num_rows: int, global_size: int) -> int:
    """Return the steps of an epoch, the last one possibly short."""
    return -(-num_rows // global_size)


class GlobalBatchSampler:
    """Yields one rank's micro-batches, step after step, epoch after epoch; any step is reached at once.

    Within an epoch each row comes once over all ranks; the last step takes what is left, spread evenly. Every rank gets
    exactly `accumulation` micro-batches per step, so that collectives match; some may be empty, which `collate` fills.
    `global_size`: rows per step over all ranks; `micro_per_gpu`: most rows in one micro-batch; `key` (seed and
    fingerprint of the data) or `order` decides the order. With `lengths` (tokens of some rows) a step's rows are dealt
    out by length: the same step for the model, with less padding.
    """

    def __init__(
        self,
        num_rows: int,
        global_size: int,
        micro_per_gpu: int,
        rank: int,
        world_size: int,
        key: str,
        *,
        shuffle: bool = True,
        start: Position = BEGINNING,
        num_steps: int | None = None,
        lengths: Callable[[NDArray[np.int64]], NDArray[np.int64]] | None = None,
        order: "Order | None" = None,
    ) -> None:
        if num_rows < 1:
            raise ValueError("a sampler needs at least one row")
        if global_size < 1 or global_size % (micro_per_gpu * world_size):
            raise ValueError(f"{global_size} is not a multiple of {micro_per_gpu} x {world_size}")
        self.num_rows, self.global_size, self.key, self.shuffle = num_rows, global_size, key, shuffle
        self.rank, self.world_size = rank, world_size
        self.start, self.num_steps, self.lengths, self.order = start, num_steps, lengths, order
        self.accumulation = global_size // (micro_per_gpu * world_size)
        """Micro-batches per rank and step."""

    def __iter__(self) -> Iterator[list[int]]:
        position, done = self.start, 0
        while self.num_steps is None or done < self.num_steps:
            batch = self.step_rows(position)
            if self.lengths is not None:
                batch = batch[np.argsort(-self.lengths(batch), kind="stable")]
            # Sizes differ by one at most, over the ranks and over the micro-batches of a rank.
            own_rows = batch[self.rank :: self.world_size]
            yield from (part.tolist() for part in np.array_split(own_rows, self.accumulation))
            position, done = self.after(position), done + 1

    def after(self, position: Position) -> Position:
        """Return the place after the step that begins at a place."""
        return next_position(position, self.num_rows, self.global_size)

    def step_rows(self, position: Position) -> NDArray[np.int64]:
        """Return the rows of the step that begins at a place, over all ranks; fewer than global_size at the end."""
        positions = np.arange(position.row, min(position.row + self.global_size, self.num_rows))
        if self.order is not None:
            return self.order.rows(position, len(positions))
        return Permutation(self.num_rows, f"{self.key} {position.epoch}")(positions) if self.shuffle else positions


def sequential(num_rows: int, micro_per_gpu: int, rank: int, world_size: int) -> list[list[int]]:
    """Return one rank's micro-batches for an evaluation: each row once over all ranks; [] where a rank has run out."""
    own_rows = list(range(rank, num_rows, world_size))
    most = -(-num_rows // world_size)
    return [own_rows[begin : begin + micro_per_gpu] for begin in range(0, most, micro_per_gpu)]


def length_limits(curriculum: CurriculumConfig, max_length: int) -> NDArray[np.float64]:
    """Return the longest sample of each step, tokens [curriculum.steps], growing from start as d, sqrt(d) or stairs."""
    done = np.arange(curriculum.steps) / max(curriculum.steps, 1)
    if curriculum.shape is CurriculumShape.root:
        done = np.sqrt(done)
    elif curriculum.shape is CurriculumShape.discrete:
        done = np.floor(done * curriculum.levels) / curriculum.levels
    return curriculum.start_length + (max_length - curriculum.start_length) * done


def length_classes(curriculum: CurriculumConfig, max_length: int) -> list[int]:
    """Return the longest samples of packed rows' classes, start_length doubled up to max_length. Packed over all
    lengths nearly every row would hold a long sample, and none could come early.
    """
    classes, length = [], curriculum.start_length
    while curriculum.steps and length < max_length:
        classes.append(length)
        length *= 2
    return classes


class CurriculumOrder:
    """Short rows first, after competence-based curriculum learning (Platanios et al., NAACL 2019, arXiv 1903.09848).

    Each row comes once per epoch: a step draws from the rows within its limit, then from the next longer ones. Later
    epochs are shuffled. `lengths`: each row's longest sample, tokens [rows]; `limits`: of the first steps.
    """

    def __init__(
        self, lengths: NDArray[np.int64], limits: NDArray[np.float64], global_size: int, max_length: int, key: str
    ) -> None:
        self.num_rows, self.global_size, self.max_length, self.key = len(lengths), global_size, max_length, key
        shuffled = Permutation(self.num_rows, f"{key} 0")(np.arange(self.num_rows))
        ranks = np.empty(self.num_rows, np.int64)
        ranks[shuffled] = np.arange(self.num_rows)  # position of each row in the shuffled order
        by_length = np.lexsort((ranks, lengths))
        # Of each step: how many rows are drawn after it, and how many rows are no longer than its limit.
        drawn_after = np.minimum(np.arange(1, len(limits) + 1) * global_size, self.num_rows)
        allowed = np.searchsorted(lengths[by_length], limits, side="right")
        # Where they are fewer than must have been drawn by the step's end, the next longer rows are allowed, too.
        allowed = np.maximum(allowed, drawn_after)
        self.limits = np.maximum(limits, lengths[by_length[allowed - 1]])
        """The limits that hold: above those asked for where there are too few short rows."""
        self._first_epoch = shuffled[_drawn_ranks(ranks[by_length], allowed, drawn_after)]

    def rows(self, position: Position, count: int) -> NDArray[np.int64]:
        """Return the rows of the step that begins at a place."""
        if position.epoch == 0:
            return self._first_epoch[position.row : position.row + count]
        positions = np.arange(position.row, position.row + count)
        return Permutation(self.num_rows, f"{self.key} {position.epoch}")(positions)

    def figures(self, position: Position) -> dict[str, float]:
        """Return the longest sample that the step may take."""
        step = position.row // self.global_size
        grows = position.epoch == 0 and step < len(self.limits)
        return {"curriculum_length": int(self.limits[step]) if grows else self.max_length}


def _drawn_ranks(
    ranks: NDArray[np.int64], allowed: NDArray[np.int64], drawn_after: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return `ranks`, a permutation of 0 … n - 1, in the order of drawing: each step draws the smallest that are left
    of the first `allowed[step]`, until `drawn_after[step]` are drawn in all; then come the others, ascending.
    """
    order: list[int] = []
    pool: list[int] = []
    in_pool = 0
    for num_allowed, num_drawn in zip(allowed.tolist(), drawn_after.tolist(), strict=True):
        for rank in ranks[in_pool:num_allowed].tolist():
            heapq.heappush(pool, rank)
        in_pool = max(in_pool, num_allowed)
        order += [heapq.heappop(pool) for _ in range(num_drawn - len(order))]
    is_left = np.ones(len(ranks), bool)
    is_left[order] = False
    return np.concatenate((np.array(order, np.int64), np.flatnonzero(is_left)))


class ScheduledMixture:
    """Sources whose shares of a step follow weights that change over the run: weight x rows / sum of those.

    Steps take whole rows; what a source is short of, it gets later, so over any stretch each has its share up to a row.
    Each has its own order: no row comes twice before all have come. `bounds`: the first row of each source, and the
    end. `max_steps`: of the run; 0: `epochs` epochs of as many rows as the mean weights give.
    """

    def __init__(
        self,
        bounds: Sequence[int],
        sources: Sequence[SourceConfig],
        names: Sequence[str],
        global_size: int,
        max_steps: int,
        epochs: int,
        key: str,
    ) -> None:
        self.bounds, self.sources, self.names = list(bounds), list(sources), list(names)
        self.global_size, self.key = global_size, key
        self.sizes = [end - begin for begin, end in pairwise(self.bounds)]
        for name, size, source in zip(names, self.sizes, sources, strict=True):
            if not size and source.mean_weight:
                raise DataError(
                    "data source {name} has no row to train, so that its weights mean nothing. Remove it.", name=name
                )
        means = [source.mean_weight for source in sources]
        self.num_rows = max(1, round(sum(mean * size for mean, size in zip(means, self.sizes, strict=True))))
        self.steps_per_epoch = steps_per_epoch(self.num_rows, global_size)
        self.total_steps = max_steps or epochs * self.steps_per_epoch
        self._taken = [[0] * len(sources)]
        self._owed = [0.0] * len(sources)

    def shares(self, step: int) -> list[float]:
        """Return the share of each source in a step, from 0; after the run's last step those of its end."""
        at = min(1.0, (step + 0.5) / self.total_steps)
        parts = [source.weight_at(at) * size for source, size in zip(self.sources, self.sizes, strict=True)]
        return [part / sum(parts) for part in parts]

    def rows(self, position: Position, count: int) -> NDArray[np.int64]:
        """Return the rows of the step that begins at a place."""
        step = self._step(position)
        before, after = self._taken_before(step), self._taken_before(step + 1)
        return np.concatenate([self._of(number, *span) for number, span in enumerate(zip(before, after, strict=True))])

    def figures(self, position: Position) -> dict[str, float]:
        """Return the share of each source."""
        shares: dict[str, float] = {}
        for name, share in zip(self.names, self.shares(self._step(position)), strict=True):
            shares[f"mixture_share/{name}"] = round(shares.get(f"mixture_share/{name}", 0) + share, 6)
        return shares

    def _step(self, position: Position) -> int:
        return position.epoch * self.steps_per_epoch + position.row // self.global_size

    def _taken_before(self, step: int) -> list[int]:
        """Return how many rows each source has given before a step. In each step a source is due its share of the rows
        and what it was short of before; it gives the whole rows of that, and those due most fill up the step.
        """
        for number in range(len(self._taken) - 1, step):
            row = number % self.steps_per_epoch * self.global_size
            count = min(self.global_size, self.num_rows - row)
            owed = [old + count * share for old, share in zip(self._owed, self.shares(number), strict=True)]
            # Less a row for each source, so that rounding never takes more than `count` together.
            taken = [max(0, math.floor(due) - len(owed)) for due in owed]
            for _ in range(count - sum(taken)):
                taken[int(np.argmax(np.subtract(owed, taken)))] += 1
            self._owed = [due - got for due, got in zip(owed, taken, strict=True)]
            self._taken.append([old + got for old, got in zip(self._taken[-1], taken, strict=True)])
        return self._taken[step]

    def _of(self, number: int, begin: int, end: int) -> NDArray[np.int64]:
        """Return the rows that a source gives as number `begin` to `end` - 1; each pass over it has its own order."""
        size, rows = self.sizes[number], []
        while begin < end:
            pass_number, first = divmod(begin, size)
            count = min(end - begin, size - first)
            order = Permutation(size, f"{self.key} source {number} {pass_number}")
            rows.append(self.bounds[number] + order(np.arange(first, first + count)))
            begin += count
        return np.concatenate(rows) if rows else np.empty(0, np.int64)


Order = CurriculumOrder | ScheduledMixture
"""Which rows each step takes, as a function of its place alone, and what metrics.jsonl says of them."""
