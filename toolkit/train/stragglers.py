"""Which rank the others wait for: steps take equally long on all, so each rank's own work is compared.

That is the time from the end of a step to the next first sum over ranks (data, host), and the forward passes; backward
passes reduce gradients. Under ZeRO-3 forward passes wait too, which hides most of a slow processor or GPU.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low  # of two ranks, the one that is not slow
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

from toolkit.messages import tr

WINDOW = 20
"""Steps, at least, over which ranks are compared."""
IN_A_ROW = 3
"""Comparisons one after the other in which a rank has to be slow."""
SLOWER = 1.2
"""A slow rank's own work to the median of the ranks."""
LEAST_SHARE = 0.03
"""Of a step's time by which its own work has to be longer: less is not worth a warning."""


class Stopwatch:
    """Adds up a device's time between marks without waiting: on GPUs marks are events, as the host only queues work."""

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
                "median_rank_s": median_low(self.own_s) / self.steps,
                "fastest_rank_s": min(self.own_s) / self.steps,
            }
        return row

    def __add__(self, other: "RankTimes") -> "RankTimes":

        def both(name: str) -> list[float]:
            return [one + more for one, more in zip(getattr(self, name), getattr(other, name), strict=True)]

        per_rank = map(both, ("own_s", "data_wait_s", "tokens"))
        return RankTimes(self.steps + other.steps, self.seconds + other.seconds, *per_rank)


class StragglerDetector:
    """Reports, once for each, ranks that are slow for long. `hosts` are those of the ranks."""

    def __init__(self, hosts: Sequence[str]) -> None:
        self.hosts = hosts
        self._times: RankTimes | None = None
        self._suspect, self._in_a_row = -1, 0
        self._reported: set[int] = set()

    def see(self, times: RankTimes) -> str:
        """Add the steps since the last call; return a warning for the user, "" if there is none."""
        self._times = times = self._times + times if self._times else times
        if times.steps < WINDOW:
            return ""
        self._times = None
        suspect = _slow_rank(times)
        self._in_a_row = self._in_a_row + 1 if suspect == self._suspect else 1
        self._suspect = suspect
        if suspect < 0 or self._in_a_row < IN_A_ROW or suspect in self._reported:
            return ""
        self._reported.add(suspect)
        own_s, median_s, host = times.own_s[suspect], median_low(times.own_s), self.hosts[suspect]
        if times.data_wait_s[suspect] - median_low(times.data_wait_s) > (own_s - median_s) / 2:
            where = tr(
                "Most of that it waits for its data: look at the disk or the network that {host} reads from; more "
                "data.num_workers may hide it.",
                host=host,
            )
        else:
            where = tr(
                "It is not the data: look at what else runs on {host}, and at the clocks and the temperature of its "
                "processors and GPUs (top, nvidia-smi).",
                host=host,
            )
        return tr(
            "all ranks wait for rank {rank} on {host}: its own work takes {own} s per step, {times} times "
            "that of the median rank ({median} s). {where}",
            rank=suspect,
            host=host,
            own=f"{own_s / times.steps:.3g}",
            median=f"{median_s / times.steps:.3g}",
            times=f"{own_s / median_s:.1f}",
            where=where,
        )


def _slow_rank(times: RankTimes) -> int:
    """Return the slow rank, -1 if none is; slow per token too, as longer sequences take longer."""
    slowest = _slowest(times.own_s)
    waits = times.own_s[slowest] - median_low(times.own_s)
    per_token = [own_s / max(tokens, 1) for own_s, tokens in zip(times.own_s, times.tokens, strict=True)]
    is_slow = all(values[slowest] > SLOWER * median_low(values) for values in (times.own_s, per_token))
    return slowest if is_slow and waits > LEAST_SHARE * times.seconds else -1


def _slowest(values: Sequence[float]) -> int:
    return max(range(len(values)), key=values.__getitem__)
