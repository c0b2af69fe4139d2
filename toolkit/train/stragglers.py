"""Detection of stragglers: ranks that all others wait for.

Steps take equally long on all ranks, so each rank's own work is compared: the time from the end of a step to the next
first sum over ranks (data, host), and the forward passes; backward passes reduce gradients. Under ZeRO-3 forward passes
wait too, which hides most of a slow processor or GPU.
"""

import socket
from collections.abc import Sequence
from statistics import median_low  # of two ranks, the one that is not slow
from typing import TYPE_CHECKING

from toolkit.distributed import process_group
from toolkit.messages import tr, warn
from toolkit.train.hooks import Hook
from toolkit.train.throughput import RankTimes, slowest_rank

if TYPE_CHECKING:
    from toolkit.train.loop import TrainLoop

COMPARED_STEPS = 20
"""Steps, at least, over which ranks are compared."""
IN_A_ROW = 3
"""Comparisons one after the other in which a rank has to be slow."""
SLOWER = 1.2
"""Ratio of a slow rank's own work to the median of the ranks."""
LEAST_SHARE = 0.03
"""Of a step's time by which its own work has to be longer: less is not worth a warning."""


class StragglerDetector(Hook):
    """Warns, once per rank, of ranks that stay slower than the others. `hosts`: host names by rank."""

    def __init__(self, hosts: Sequence[str] = ()) -> None:
        self.hosts = hosts
        self._times: RankTimes | None = None
        self._suspect, self._in_a_row = -1, 0
        self._reported: set[int] = set()

    def at_start(self, loop: "TrainLoop") -> None:
        """Gather the host names of all ranks. A collective."""
        self.hosts = process_group.gather(socket.gethostname())

    def after_log(self, times: RankTimes) -> None:
        """Warn of a slow rank, after the row about the steps in which it was slow is printed."""
        if slow := self.compare(times):
            warn(slow)

    def compare(self, times: RankTimes) -> str:
        """Add the times of the steps since the last call. Each COMPARED_STEPS steps, compare the slowest rank with the
        median; return a warning once it was much slower IN_A_ROW times, else "".
        """
        self._times = times = self._times + times if self._times else times
        if times.steps < COMPARED_STEPS:
            return ""
        self._times = None
        slowest = slowest_rank(times.own_s)
        excess_s = times.own_s[slowest] - median_low(times.own_s)
        # At least 1, as a rank may have computed no token.
        per_token = [own_s / max(tokens, 1) for own_s, tokens in zip(times.own_s, times.tokens, strict=True)]
        # Slow per token too, as longer sequences take longer.
        is_slow = all(values[slowest] > SLOWER * median_low(values) for values in (times.own_s, per_token))
        suspect = slowest if is_slow and excess_s > LEAST_SHARE * times.seconds else -1  # -1: no rank
        self._in_a_row = self._in_a_row + 1 if suspect == self._suspect else 1
        self._suspect = suspect
        if suspect < 0 or self._in_a_row < IN_A_ROW or suspect in self._reported:
            return ""
        self._reported.add(suspect)
        return self._warning(suspect, times)

    def _warning(self, suspect: int, times: RankTimes) -> str:
        """Return the warning of a slow rank: by how much it is slow, and whether its data or its machine is."""
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
