"""Samples for KTO, which compares each answer with one that belongs to another question."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toolkit.data.store import Sample, TokenizedCache


class MismatchedCache(TokenizedCache):
    """A split of single answers, for KTO: index i is sample i; index len(self) + i is the question of sample i with the
    answer of another sample, the nearest one before it (cyclically) with another question, cut at `limit` tokens.
    """

    def __init__(self, folder: Path, split: str, limit: int) -> None:
        super().__init__(folder, split)
        self.limit = limit

    @property
    def num_numbers(self) -> int:
        """How many indices `__getitem__` takes: each sample, and each with another one's answer."""
        return 2 * len(self)

    def __getitem__(self, index: int) -> Sample:
        """Return (ids, mask) of a sample; from len(self) on of a question with another sample's answer, for KTO."""
        sample = index % len(self)
        ids, trained = super().__getitem__(sample)
        if index < len(self):
            return ids, trained
        begin = int(trained.argmax())  # of the answer
        # Answers of one question may stand side by side: the first of the 63 samples before it with another question,
        # or, if none of them has one, the sample before it.
        for back in (*range(1, 64), 1):
            other_ids, other_trained = super().__getitem__((sample - back) % len(self))
            other_begin = int(other_trained.argmax())
            if not np.array_equal(ids[:begin], other_ids[:other_begin]):
                break
        joined = np.concatenate((ids[:begin], other_ids[other_begin:]))[: self.limit]
        return joined, np.concatenate((trained[:begin], other_trained[other_begin:]))[: self.limit]

    def lengths(self, indices: NDArray[Any] | None = None) -> NDArray[np.int64]:
        """Return the tokens of each of `indices`, or of all samples of the split. Indices from len(self) on are of
        questions with another sample's answer; each counts as long as its own sample, to read nothing.
        """
        return super().lengths(None if indices is None else indices % len(self))

    def where(self, index: int, paths: Sequence[Path] = ()) -> str:
        """Return "file:line" of a sample; of one with another sample's answer that of the question."""
        return super().where(index % len(self), paths)

    def __reduce__(self) -> Any:
        return MismatchedCache, (self.folder, self.split, self.limit)
