"""Which sequences make up each step and each rank's part: a function of seed, data, epoch and position. Orders are
computed where they are needed: no checkpoint saves them, and any number of ranks has the same steps.
"""

import hashlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from toolkit.config.schema import CurriculumConfig

if TYPE_CHECKING:
    from toolkit.data.orders import Order

_ROUNDS = 6


class Permutation:
    """A pseudo-random order of 0 … size - 1, a pure function of its arguments on every machine.

    A Feistel network over the smallest even number of bits that holds `size`, cycle-walked (Black and Rogaway, Ciphers
    with Arbitrary Finite Domains, 2002); round function: splitmix64's mixing (Steele, Lea and Flood, 2014).
    """

    def __init__(self, size: int, key: str) -> None:
        self.size = size
        num_bits = max(size - 1, 1).bit_length()  # of the largest element
        self._half_bits = max(1, -(-num_bits // 2))  # rounded up
        digest = hashlib.shake_256(f"{key} {size}".encode()).digest(8 * _ROUNDS)
        self._keys = np.frombuffer(digest, "<u8")

    def __call__(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the permutation's elements at `positions`, each from 0 to size - 1; same shape."""
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
    """A position in the training data, the same whatever the number of ranks."""

    epoch: int = 0
    row: int = 0
    """Rows of this epoch that are done."""


BEGINNING = Position()


def next_position(position: Position, num_rows: int, global_size: int) -> Position:
    """Return the position after the step that begins at `position`. `num_rows`: of an epoch; `global_size`: of a step
    over all ranks, the last step of an epoch being possibly shorter.
    """
    row = position.row + global_size
    return Position(position.epoch, row) if row < num_rows else Position(position.epoch + 1, 0)


def steps_per_epoch(num_rows: int, global_size: int) -> int:
    """Return the optimizer steps of an epoch of `num_rows`, the last of which may have less than `global_size` rows."""
    return -(-num_rows // global_size)


class GlobalBatchSampler:
    """Yields one rank's micro-batches, step after step, epoch after epoch; any step is reached at once.

    Within an epoch each row comes once over all ranks; the last step takes what is left, spread evenly. Every rank gets
    exactly `accumulation` micro-batches per step, so that collectives match; some may be empty, which `collate` fills.
    `global_size`: rows per step over all ranks; `micro_per_gpu`: most rows in one micro-batch; `key` (seed and
    fingerprint of the data) or `order` decides the order. With `costs` (of some rows: their tokens, or the pairs that
    attention computes) a step's rows are dealt out in order of cost, so that all ranks compute like rows at the same
    time: the same step for the model, with less padding and less waiting for the slowest rank.
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
        costs: Callable[[NDArray[np.int64]], NDArray[np.int64]] | None = None,
        order: "Order | None" = None,
    ) -> None:
        if num_rows < 1:
            raise ValueError("a sampler needs at least one row")
        if global_size < 1 or global_size % (micro_per_gpu * world_size):
            raise ValueError(f"{global_size} is not a multiple of {micro_per_gpu} x {world_size}")
        self.num_rows, self.global_size, self.key, self.shuffle = num_rows, global_size, key, shuffle
        self.rank, self.world_size = rank, world_size
        self.start, self.num_steps, self.costs, self.order = start, num_steps, costs, order
        self.accumulation = global_size // (micro_per_gpu * world_size)
        """Micro-batches per rank and step."""

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the rows of this rank's micro-batches, `accumulation` lists a step; endless without `num_steps`."""
        position, done = self.start, 0
        while self.num_steps is None or done < self.num_steps:
            batch = self.step_rows(position)
            if self.costs is not None:
                batch = batch[np.argsort(-self.costs(batch), kind="stable")]
            # Sizes differ by one at most, over the ranks and over the micro-batches of a rank.
            own_rows = batch[self.rank :: self.world_size]
            yield from (part.tolist() for part in np.array_split(own_rows, self.accumulation))
            position, done = self.after(position), done + 1

    def after(self, position: Position) -> Position:
        """Return the position after the step that begins at `position`."""
        return next_position(position, self.num_rows, self.global_size)

    def step_rows(self, position: Position) -> NDArray[np.int64]:
        """Return the rows of the step that begins at `position`, of all ranks; fewer at the end of an epoch."""
        positions = np.arange(position.row, min(position.row + self.global_size, self.num_rows))
        if self.order is not None:
            return self.order.rows(position, len(positions))
        return Permutation(self.num_rows, f"{self.key} {position.epoch}")(positions) if self.shuffle else positions


def sequential(num_rows: int, micro_per_gpu: int, rank: int, world_size: int) -> list[list[int]]:
    """Return the rows of one rank's micro-batches for an evaluation. Each row comes once over all ranks; all ranks get
    equally many micro-batches, so that collectives match; the last ones may be [].
    """
    own_rows = list(range(rank, num_rows, world_size))
    most_rows = -(-num_rows // world_size)  # of any rank
    return [own_rows[begin : begin + micro_per_gpu] for begin in range(0, most_rows, micro_per_gpu)]


def length_classes(curriculum: CurriculumConfig, max_length: int) -> list[int]:
    """Return the upper bounds (tokens) of the length classes that a curriculum packs separately: start_length, doubled
    up to max_length; [] without curriculum. If all lengths were packed together, nearly every row would hold a long
    sample, and none could come early.
    """
    classes, length = [], curriculum.start_length
    while curriculum.steps and length < max_length:
        classes.append(length)
        length *= 2
    return classes
