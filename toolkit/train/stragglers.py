"""Which rank the others wait for: all ranks take as long for a step as the slowest, so each one's own work is compared.

A rank's own work is what lies between two places where ranks wait for one another, so that the time it takes says
something of this rank: from the end of a step to the first sum over the ranks in the next (data, logging, whatever else
the host does), and the forward passes. Of the backward passes nothing is counted, as gradients are reduced in them.
Under ZeRO-3 ranks wait for one another in the forward passes too, which hides most of a slow processor or GPU, but
neither slow data nor a slow host.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

from toolkit.distributed.process_group import rank, sum_over_ranks, world_size
from toolkit.messages import tr

WINDOW = 20
"""Steps, at least, over which ranks are compared."""
IN_A_ROW = 3
"""Comparisons one after the other in which a rank has to be slow."""
SLOWER = 1.2
"""A slow rank's own work to the median of the ranks."""
LEAST_SHARE = 0.03
"""Of a step's time by which its own work has to be longer: less is not worth telling."""


class Stopwatch:
    """Adds up what a device takes for the work between one mark and the next, without waiting for it.

    The host only queues a GPU's work, so its own clock would show how fast it queues: on a GPU marks are events among
    the work itself.

    Args:
        device: whose work it is.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cpu = device.type == "cpu"
        self._marks: list[Any] = []

    def mark(self) -> None:
        """The work begins, or ends."""
        if self._is_cpu:
            self._marks.append(time.perf_counter())
        else:
            event = get_accelerator().Event(enable_timing=True)
            event.record()
            self._marks.append(event)

    def seconds(self) -> float:
        """Return the sum. On a GPU only when the host has waited for the last mark."""
        pairs = zip(self._marks[::2], self._marks[1::2], strict=True)
        if self._is_cpu:
            return sum(end - begin for begin, end in pairs)
        return sum(begin.elapsed_time(end) for begin, end in pairs) / 1000


@dataclass(frozen=True, slots=True)
class RankTimes:
    """Some steps, rank by rank. Sums over the steps."""

    steps: int
    seconds: float
    """From the first to the last, the same for all but for the clocks."""
    own_s: Sequence[float]
    """Of each rank's own work, waiting for data included."""
    data_wait_s: Sequence[float]
    """That each rank waited for its data."""
    tokens: Sequence[float]
    """Of each rank, padding included."""

    def row(self) -> dict[str, float]:
        """Return what metrics.jsonl says of it, in seconds per step."""
        data_rank = _slowest(self.data_wait_s)
        row: dict[str, float] = {
            "data_wait_s": self.data_wait_s[data_rank] / self.steps,
            "data_wait_fraction": self.data_wait_s[data_rank] / self.seconds,
        }
        if len(self.own_s) > 1:
            slowest = _slowest(self.own_s)
            row |= {
                "data_wait_rank": data_rank,
                "slowest_rank": slowest,
                "slowest_rank_s": self.own_s[slowest] / self.steps,
                "median_rank_s": _median(self.own_s) / self.steps,
                "fastest_rank_s": min(self.own_s) / self.steps,
            }
        return row

    def __add__(self, other: "RankTimes") -> "RankTimes":
        """Return both together."""

        def both(mine: Sequence[float], others: Sequence[float]) -> list[float]:
            return [one + more for one, more in zip(mine, others, strict=True)]

        return RankTimes(
            self.steps + other.steps,
            self.seconds + other.seconds,
            both(self.own_s, other.own_s),
            both(self.data_wait_s, other.data_wait_s),
            both(self.tokens, other.tokens),
        )


def exchange(mine: Sequence[float], device: torch.device) -> list[list[float]]:
    """Return what all ranks have measured: of each value, that of each rank. A collective.

    Args:
        mine: this rank's values; as many on every rank.
        device: where the backend needs its tensors.
    """
    values = torch.zeros(len(mine), world_size(), dtype=torch.float64)  # sums of tokens are too large for float32
    values[:, rank()] = torch.tensor(mine, dtype=torch.float64)
    found: list[list[float]] = sum_over_ranks(values.flatten(), device).view(len(mine), -1).tolist()
    return found


class StragglerDetector:
    """Tells, once for each, of ranks that are slow for long.

    Args:
        hosts: of the ranks.
    """

    def __init__(self, hosts: Sequence[str]) -> None:
        self.hosts = hosts
        self._pace: RankTimes | None = None
        self._suspect, self._times = -1, 0
        self._told: set[int] = set()

    def see(self, pace: RankTimes) -> str:
        """Take note of some steps; return what the user is to be told, "" if nothing.

        Args:
            pace: of the steps since the last call.
        """
        self._pace = pace = self._pace + pace if self._pace else pace
        if pace.steps < WINDOW:
            return ""
        self._pace = None
        suspect = _slow(pace)
        self._times = self._times + 1 if suspect == self._suspect else 1
        self._suspect = suspect
        if suspect < 0 or self._times < IN_A_ROW or suspect in self._told:
            return ""
        self._told.add(suspect)
        return self._text(pace, suspect)

    def _text(self, pace: RankTimes, slow: int) -> str:
        own_s, median_s = pace.own_s[slow], _median(pace.own_s)
        data_s = pace.data_wait_s[slow] - _median(pace.data_wait_s)
        if data_s > (own_s - median_s) / 2:
            where = tr(
                "Most of that it waits for its data: look at the disk or the network that {host} reads from; more "
                "data.num_workers may hide it.",
                host=self.hosts[slow],
            )
        else:
            where = tr(
                "It is not the data: look at what else runs on {host}, and at the clocks and the temperature of its "
                "processors and GPUs (top, nvidia-smi).",
                host=self.hosts[slow],
            )
        return tr(
            "WARNING: all ranks wait for rank {rank} on {host}: its own work takes {own} s per step, {times} times "
            "that of the median rank ({median} s). {where}",
            rank=slow,
            host=self.hosts[slow],
            own=f"{own_s / pace.steps:.3g}",
            median=f"{median_s / pace.steps:.3g}",
            times=f"{own_s / median_s:.1f}",
            where=where,
        )


def _slow(pace: RankTimes) -> int:
    """Return the rank that is slow, -1 if none is.

    A rank whose rows are longer than those of others takes longer, and is not slow: it has to be so per token as well.
    """
    slowest = _slowest(pace.own_s)
    waits = pace.own_s[slowest] - _median(pace.own_s)
    per_token = [own_s / max(tokens, 1) for own_s, tokens in zip(pace.own_s, pace.tokens, strict=True)]
    is_slow = all(values[slowest] > SLOWER * _median(values) for values in (pace.own_s, per_token))
    return slowest if is_slow and waits > LEAST_SHARE * pace.seconds else -1


def _slowest(values: Sequence[float]) -> int:
    return max(range(len(values)), key=values.__getitem__)


def _median(values: Sequence[float]) -> float:
    """Return the lower one of two in the middle: of two ranks, the one that is not slow."""
    return statistics.median_low(values)
