"""Orders of rows that change while a run goes on: short samples first, and sources whose weights change.

Like the plain order each is a function of seed, data and place: nothing is saved in a checkpoint, and any number of
ranks has the same rows in each step.
"""

import heapq
import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from toolkit.config.schema import CurriculumConfig, CurriculumShape, SourceConfig
from toolkit.data.sampler import Permutation, Position, steps_per_epoch
from toolkit.errors import DataError


def length_limits(curriculum: CurriculumConfig, max_length: int) -> NDArray[np.float64]:
    """Return the longest sample that each step of a curriculum may take, tokens [curriculum.steps].

    With d from 0 to 1 over the steps the limit is start + (max - start) x d, x sqrt(d), or x the stair below d.
    """
    done = np.arange(curriculum.steps) / max(curriculum.steps, 1)
    if curriculum.shape is CurriculumShape.root:
        done = np.sqrt(done)
    elif curriculum.shape is CurriculumShape.discrete:
        done = np.floor(done * curriculum.levels) / curriculum.levels
    return curriculum.start_length + (max_length - curriculum.start_length) * done


def length_classes(curriculum: CurriculumConfig, max_length: int) -> list[int]:
    """Return the longest samples of the classes that packed rows are made of: start_length, doubled up to max_length.

    Packed over all lengths nearly every row would hold a long sample, and none could come early.
    """
    classes, length = [], curriculum.start_length
    while curriculum.steps and length < max_length:
        classes.append(length)
        length *= 2
    return classes


class CurriculumOrder:
    """Short rows first, after competence-based curriculum learning (Platanios et al., NAACL 2019, arXiv 1903.09848).

    Each row comes once per epoch: while the curriculum lasts, a step draws from the rows that are within its limit and
    have not come yet. Where these are too few, the next longer ones fill it up. All later epochs are shuffled.

    Args:
        lengths: the longest sample of each row, tokens [rows].
        limits: of the first steps, see `length_limits`; no more than an epoch has.
    """

    def __init__(
        self,
        lengths: NDArray[np.int64],
        limits: NDArray[np.float64],
        global_size: int,
        max_length: int,
        key: str,
    ) -> None:
        self.num_rows, self.global_size, self.max_length, self.key = len(lengths), global_size, max_length, key
        by_chance = Permutation(self.num_rows, f"{key} 0")(np.arange(self.num_rows))
        drawn = np.empty(self.num_rows, np.int64)
        drawn[by_chance] = np.arange(self.num_rows)  # of each row, when it would come without a curriculum
        ascending = np.lexsort((drawn, lengths))
        ends = np.minimum(np.arange(1, len(limits) + 1) * global_size, self.num_rows)
        within = np.searchsorted(lengths[ascending], limits, side="right")
        # After a step at least so many rows must have been drawn from: the next longer ones, where too few are short.
        within = np.maximum(within, ends)
        self.limits = np.maximum(limits, lengths[ascending[within - 1]])
        """The limits that hold, where there are too few short rows for those asked for."""
        self._first_epoch = by_chance[_drawn(drawn[ascending], within, ends)]

    def rows(self, place: Position, count: int) -> NDArray[np.int64]:
        """Return the rows of the step that begins at a place."""
        if place.epoch == 0:
            return self._first_epoch[place.row : place.row + count]
        positions = np.arange(place.row, place.row + count)
        return Permutation(self.num_rows, f"{self.key} {place.epoch}")(positions)

    def figures(self, place: Position) -> dict[str, float]:
        """Return the longest sample that the step may take."""
        step = place.row // self.global_size
        grows = place.epoch == 0 and step < len(self.limits)
        return {"curriculum_length": int(self.limits[step]) if grows else self.max_length}


def _drawn(candidates: NDArray[np.int64], within: NDArray[np.int64], ends: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return all candidates, for each step the smallest that may be drawn and are left, and the others ascending.

    Args:
        candidates: distinct numbers below their count, in the order in which they may be drawn.
        within: how many of them may be drawn at each step.
        ends: how many have been drawn after each step.
    """
    order: list[int] = []
    pool: list[int] = []
    known = 0
    for may, end in zip(within.tolist(), ends.tolist(), strict=True):
        for candidate in candidates[known:may].tolist():
            heapq.heappush(pool, candidate)
        known = max(known, may)
        order += [heapq.heappop(pool) for _ in range(end - len(order))]
    left = np.ones(len(candidates), bool)
    left[order] = False
    return np.concatenate((np.array(order, np.int64), np.flatnonzero(left)))


class ScheduledMixture:
    """Sources whose shares of a step follow weights that change over the run.

    At each point of the run a source has the share weight x rows / sum of those over all sources, as it has with fixed
    weights. Steps take whole rows: what a source is short of, it gets in a later step, so that over any stretch each
    has its share up to a row. Each source is gone through in an order of its own, again and again: none of its rows
    comes twice before all have come.

    Args:
        bounds: the first row of each source, and the end.
        max_steps: optimizer steps of the run; 0: `epochs` epochs.
        epochs: passes; an epoch has as many rows as the mean weights give.
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

    def rows(self, place: Position, count: int) -> NDArray[np.int64]:
        """Return the rows of the step that begins at a place."""
        step = self._step(place)
        before, after = self._taken_before(step), self._taken_before(step + 1)
        return np.concatenate([self._of(number, *span) for number, span in enumerate(zip(before, after, strict=True))])

    def figures(self, place: Position) -> dict[str, float]:
        """Return the share of each source."""
        found: dict[str, float] = {}
        for name, share in zip(self.names, self.shares(self._step(place)), strict=True):
            found[f"mixture_share/{name}"] = round(found.get(f"mixture_share/{name}", 0) + share, 6)
        return found

    def _step(self, place: Position) -> int:
        return place.epoch * self.steps_per_epoch + place.row // self.global_size

    def _taken_before(self, step: int) -> list[int]:
        """Return the rows of each source that come before a step."""
        while len(self._taken) <= step:
            self._take(len(self._taken) - 1)
        return self._taken[step]

    def _take(self, step: int) -> None:
        """Decide on a step: each source gets what it is owed, in whole rows, and those owed most the rest."""
        row = step % self.steps_per_epoch * self.global_size
        count = min(self.global_size, self.num_rows - row)
        owed = [old + count * share for old, share in zip(self._owed, self.shares(step), strict=True)]
        given = [max(0, math.floor(due) - len(owed)) for due in owed]  # never more than `count` together
        for _ in range(count - sum(given)):
            most = max(range(len(owed)), key=lambda number: owed[number] - given[number])
            given[most] += 1
        self._owed = [due - got for due, got in zip(owed, given, strict=True)]
        self._taken.append([old + got for old, got in zip(self._taken[-1], given, strict=True)])

    def _of(self, number: int, begin: int, end: int) -> NDArray[np.int64]:
        """Return some of the rows of a source, counted over all its passes."""
        size, rows = self.sizes[number], []
        while begin < end:
            turn, first = divmod(begin, size)
            count = min(end - begin, size - first)
            order = Permutation(size, f"{self.key} source {number} {turn}")
            rows.append(self.bounds[number] + order(np.arange(first, first + count)))
            begin += count
        return np.concatenate(rows) if rows else np.empty(0, np.int64)
