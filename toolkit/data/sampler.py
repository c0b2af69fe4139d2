"""Which rows make up each step, and which of them each rank takes: a function of seed, data, epoch and position.

The random order is computed where it is needed instead of being kept: any part of it in the time of that part.
"""

import hashlib
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 6


class Permutation:
    """A pseudo-random order of 0 … size - 1, a pure function of its arguments on every machine.

    A Feistel network over the smallest even number of bits that holds `size`, walked along its cycles until the result
    is below `size` (Black and Rogaway, Ciphers with Arbitrary Finite Domains, 2002); round function: the mixing of
    splitmix64 (Steele, Lea and Flood, 2014).
    """

    def __init__(self, size: int, key: str) -> None:
        self.size = size
        self._half = max(1, -(-max(size - 1, 1).bit_length() // 2))
        digest = hashlib.shake_256(f"{key} {size}".encode()).digest(8 * _ROUNDS)
        self._keys = np.frombuffer(digest, "<u8")

    def __call__(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the elements at some positions, each from 0 to size - 1."""
        values = self._network(positions.astype(np.uint64))
        while len(outside := np.flatnonzero(values >= self.size)):
            values[outside] = self._network(values[outside])
        return values.astype(np.int64)

    def _network(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        half, mask = np.uint64(self._half), np.uint64((1 << self._half) - 1)
        left, right = values >> half, values & mask
        for key in self._keys:
            left, right = right, left ^ (_mixed(right + key) & mask)
        return (left << half) | right


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return splitmix64's output function; overflow is meant."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


class Position(NamedTuple):
    """A place in the training data, the same whatever the number of ranks."""

    epoch: int = 0
    row: int = 0
    """Rows of this epoch that are done."""


BEGINNING = Position()


def next_position(place: Position, num_rows: int, global_size: int) -> Position:
    """Return the place after the step that begins at a place."""
    row = place.row + global_size
    return Position(place.epoch, row) if row < num_rows else Position(place.epoch + 1, 0)


def steps_per_epoch(num_rows: int, global_size: int) -> int:
    """Return the steps of an epoch, the last one possibly short."""
    return -(-num_rows // global_size)


class Order(Protocol):
    """Which rows each step takes, as a function of its place alone."""

    num_rows: int
    """Rows of an epoch."""

    def rows(self, place: Position, count: int) -> NDArray[np.int64]:
        """Return the rows of the step that begins at a place, so many of them, over all ranks."""
        ...

    def figures(self, place: Position) -> dict[str, float]:
        """Return what there is to say about them in the step's row of metrics.jsonl."""
        ...


class GlobalBatchSampler:
    """Yields one rank's micro-batches, step after step, epoch after epoch.

    Within an epoch each row comes once over all ranks. The last step of an epoch takes what is left, spread evenly:
    it is neither dropped nor filled up with repeats. Every rank gets exactly `accumulation` micro-batches per step, so
    that collectives match; some of a short step may be empty lists, which `collate` turns into untrained filler.

    Any place is reached at once: the order is computed for a step's rows only, nothing is kept and nothing skipped.

    Args:
        global_size: rows per step over all ranks.
        micro_per_gpu: most rows in one micro-batch.
        key: decides the order of every epoch: seed and fingerprint of the data.
        lengths: tokens of some rows. If given, a step's rows are dealt out by length, so that those of a micro-batch
            are alike: the same step for the model, as its loss is a sum over all its tokens, with less padding.
        order: decides the rows of each step in the place of `key` and `shuffle`.
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
        place, done = self.start, 0
        while self.num_steps is None or done < self.num_steps:
            yield from self._share(self.step_rows(place))
            place, done = self.after(place), done + 1

    def after(self, place: Position) -> Position:
        """Return the place after the step that begins at a place."""
        return next_position(place, self.num_rows, self.global_size)

    def step_rows(self, place: Position) -> NDArray[np.int64]:
        """Return the rows of the step that begins at a place, over all ranks; fewer than global_size at the end."""
        positions = np.arange(place.row, min(place.row + self.global_size, self.num_rows))
        if self.order is not None:
            return self.order.rows(place, len(positions))
        return Permutation(self.num_rows, f"{self.key} {place.epoch}")(positions) if self.shuffle else positions

    def _share(self, batch: NDArray[np.int64]) -> Iterator[list[int]]:
        """Deal a global batch to the ranks, and a rank's part to its micro-batches: sizes differ by one at most."""
        if self.lengths is not None:
            batch = batch[np.argsort(-self.lengths(batch), kind="stable")]
        mine = batch[self.rank :: self.world_size]
        for part in np.array_split(mine, self.accumulation):
            yield part.tolist()


def sequential(num_rows: int, micro_per_gpu: int, rank: int, world_size: int) -> list[list[int]]:
    """Return one rank's micro-batches for an evaluation: each row once over all ranks, in their order.

    Returns:
        As many micro-batches on every rank; [] where a rank has run out of rows.
    """
    mine = list(range(rank, num_rows, world_size))
    most = -(-num_rows // world_size)
    return [mine[begin : begin + micro_per_gpu] for begin in range(0, most, micro_per_gpu)]
