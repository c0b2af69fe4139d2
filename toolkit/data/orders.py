"""Orders of the training data other than shuffling: a curriculum by length, and mixtures whose weights change."""

import heapq
import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from toolkit.config.schema import CurriculumConfig, CurriculumShape, SourceConfig, TrainConfig
from toolkit.data.sampler import Permutation, Position, steps_per_epoch
from toolkit.messages import DataError


def length_limits(curriculum: CurriculumConfig, max_length: int) -> NDArray[np.float64]:
    """Return the longest sample (tokens) that each step of the curriculum may take, [curriculum.steps]: it grows from
    start_length to max_length linearly, as a square root or in stairs.
    """
    progress = np.arange(curriculum.steps) / max(curriculum.steps, 1)
    if curriculum.shape is CurriculumShape.root:
        progress = np.sqrt(progress)
    elif curriculum.shape is CurriculumShape.discrete:
        progress = np.floor(progress * curriculum.levels) / curriculum.levels
    return curriculum.start_length + (max_length - curriculum.start_length) * progress


class CurriculumOrder:
    """Short rows first, after competence-based curriculum learning (Platanios et al., NAACL 2019, arXiv 1903.09848).

    Each row comes once per epoch: a step draws from the rows within its limit, then from the next longer ones. Later
    epochs are shuffled, by `key`. `lengths`: each row's longest sample, tokens [rows]; `limits`: of the first steps.
    """

    def __init__(
        self, lengths: NDArray[np.int64], limits: NDArray[np.float64], global_size: int, max_length: int, key: str
    ) -> None:
        self.num_rows, self.global_size, self.max_length, self.key = len(lengths), global_size, max_length, key
        shuffled = Permutation(self.num_rows, f"{key} 0")(np.arange(self.num_rows))
        ranks = np.empty(self.num_rows, np.int64)
        ranks[shuffled] = np.arange(self.num_rows)  # position of each row in the shuffled order
        by_length = np.lexsort((ranks, lengths))  # rows by length, those of equal length in the shuffled order
        # Of each step: how many rows are drawn after it, and how many rows are no longer than its limit.
        drawn_after = np.minimum(np.arange(1, len(limits) + 1) * global_size, self.num_rows)
        allowed = np.searchsorted(lengths[by_length], limits, side="right")
        # Where they are fewer than must have been drawn by the step's end, the next longer rows are allowed, too.
        allowed = np.maximum(allowed, drawn_after)
        self.limits = np.maximum(limits, lengths[by_length[allowed - 1]])
        """The limits that hold: above those asked for where there are too few short rows."""
        # Of the rows that a step may take, it takes those that come first in the shuffled order.
        self._first_epoch = shuffled[_drawn_ranks(ranks[by_length], allowed, drawn_after)]

    def rows(self, position: Position, count: int) -> NDArray[np.int64]:
        """Return the `count` rows of the step that begins at `position`, of all ranks."""
        if position.epoch == 0:
            return self._first_epoch[position.row : position.row + count]
        positions = np.arange(position.row, position.row + count)
        return Permutation(self.num_rows, f"{self.key} {position.epoch}")(positions)

    def figures(self, position: Position) -> dict[str, float]:
        """Return the metric of the step that begins at `position`: the longest sample it may take, in tokens."""
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
    num_offered = 0
    for num_allowed, num_drawn in zip(allowed.tolist(), drawn_after.tolist(), strict=True):
        for rank in ranks[num_offered:num_allowed].tolist():
            heapq.heappush(pool, rank)
        num_offered = max(num_offered, num_allowed)
        order += [heapq.heappop(pool) for _ in range(num_drawn - len(order))]
    is_left = np.ones(len(ranks), bool)
    is_left[order] = False
    return np.concatenate((np.array(order, np.int64), np.flatnonzero(is_left)))


class ScheduledMixture:
    """Sources whose shares of a step follow weights that change over the run: weight x rows / sum of those.

    Steps take whole rows; what a source is short of, it gets later, so over any stretch each has its share up to a row.
    Each has its own order: no row comes twice before all have come. `bounds`: the first row of each source, and the
    end. An epoch has as many rows as the mean weights give.
    """

    def __init__(
        self,
        bounds: Sequence[int],
        sources: Sequence[SourceConfig],
        names: Sequence[str],
        global_size: int,
        train: TrainConfig,
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
        self.total_steps = train.max_steps or train.over_epochs(self.steps_per_epoch)
        self._taken = [[0] * len(sources)]  # of each step so far: rows taken before it, from each source
        self._owed = [0.0] * len(sources)  # rows that each source is short of after these steps

    def shares(self, step: int) -> list[float]:
        """Return the share of each source in the rows of a step (numbered from 0); they sum to 1."""
        progress = min(1.0, (step + 0.5) / self.total_steps)
        parts = [source.weight_at(progress) * size for source, size in zip(self.sources, self.sizes, strict=True)]
        return [part / sum(parts) for part in parts]

    def rows(self, position: Position, count: int) -> NDArray[np.int64]:
        """Return the rows of the step that begins at `position`, of all ranks: each source continues its order."""
        step = self._step(position)
        spans = zip(self._taken_before(step), self._taken_before(step + 1), strict=True)
        return np.concatenate([self._source_rows(number, begin, end) for number, (begin, end) in enumerate(spans)])

    def figures(self, position: Position) -> dict[str, float]:
        """Return the metrics of the step that begins at `position`: the share of each source; equal names are added."""
        shares: dict[str, float] = {}
        for name, share in zip(self.names, self.shares(self._step(position)), strict=True):
            shares[f"mixture_share/{name}"] = round(shares.get(f"mixture_share/{name}", 0) + share, 6)
        return shares

    def _step(self, position: Position) -> int:
        """Return the number, from 0, of the step that begins at `position`."""
        return position.epoch * self.steps_per_epoch + position.row // self.global_size

    def _taken_before(self, step: int) -> list[int]:
        """Return how many rows were taken from each source before a step, [sources]. In each step a source is owed its
        share of the rows and what it was short of before; the whole rows of that are taken, and the sources that are
        owed most fill up the step. The counts of all steps are kept in `_taken`.
        """
        for number in range(len(self._taken) - 1, step):  # steps that are not counted yet
            row = number % self.steps_per_epoch * self.global_size
            count = min(self.global_size, self.num_rows - row)
            owed = [before + count * share for before, share in zip(self._owed, self.shares(number), strict=True)]
            # Less a row for each source, so that rounding never takes more than `count` together.
            taken = [max(0, math.floor(due) - len(owed)) for due in owed]
            for _ in range(count - sum(taken)):
                taken[int(np.argmax(np.subtract(owed, taken)))] += 1
            self._owed = [due - num_taken for due, num_taken in zip(owed, taken, strict=True)]
            self._taken.append([before + num_taken for before, num_taken in zip(self._taken[-1], taken, strict=True)])
        return self._taken[step]

    def _source_rows(self, number: int, begin: int, end: int) -> NDArray[np.int64]:
        """Return the rows that are taken from source `number` as its rows `begin` to `end` - 1 of the run (from 0);
        each pass over the source has its own shuffled order.
        """
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
