"""A random order that is computed where it is needed instead of being kept: any part of it in the time of that part."""

import hashlib

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 6


class Permutation:
    """A pseudo-random order of 0 … size - 1, a pure function of its arguments on every machine.

    A Feistel network over the smallest even number of bits that holds `size`, walked along its cycles until the result
    is below `size` (Black and Rogaway, Ciphers with Arbitrary Finite Domains, 2002); round function: the mixing of
    splitmix64 (Steele, Lea and Flood, 2014).

    Args:
        size: number of elements.
        key: anything; another key gives another order.
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
