"""The plan of a split's sequences: which samples each of them holds. All ranks map the same saved plan."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toolkit.config.schema import SourceConfig
from toolkit.data import store

PAD_MULTIPLE = 8
"""Rows are padded to a multiple of this, so that there are few different shapes."""


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
        samples = joined_ranges(self.offsets[rows], counts)
        costs = cache.lengths(self.members[samples]) ** 2
        if self.shared is not None:
            costs -= self.shared[samples].astype(np.int64) ** 2
        begins = np.cumsum(counts) - counts  # of each row in `costs`
        return np.add.reduceat(costs, begins)

    def __reduce__(self) -> Any:
        if self.folder is None:  # a plan that is not saved has no more than these
            return PackingPlan, (self.num_rows, self.members, self.offsets)
        return load_plan, (self.folder,)  # the worker process maps the files again, rather than to copy the arrays


def takes_each_once(cache: store.TokenizedCache, sources: Sequence[SourceConfig], most: int) -> bool:
    """Whether an epoch takes each sample of a split once: no weights, no limit `most` below their number, and no
    `MismatchedCache`, which has each sample in two forms.
    """
    is_weighted = any(source.weight != 1 or source.weights for source in sources)
    return not is_weighted and cache.num_numbers == len(cache) and not 0 < most < len(cache)


def joined_ranges(begins: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return `counts[i]` numbers from `begins[i]` on, for one i after another: [5, 0] and [2, 3] give 5, 6, 0, 1, 2."""
    return np.repeat(begins - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())


def load_plan(folder: Path) -> PackingPlan:
    """Return a saved plan; its arrays are memory-mapped, so that processes of a node share them."""
    members, offsets, shared = (
        np.load(path, mmap_mode="r").view(np.ndarray) if path.is_file() else None
        for path in (folder / "members.npy", folder / "offsets.npy", folder / "shared.npy")
    )
    about = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
    return PackingPlan(about["num_rows"], members, offsets, folder, tuple(about.get("bounds", ())), shared)
