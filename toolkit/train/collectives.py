"""What `profile.comms` measures of collectives: a share of the time for metrics.jsonl, and a table for the report."""

import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

from deepspeed.comm.comm import comms_logger, timers

from toolkit import disk
from toolkit.data.sampler import Position
from toolkit.distributed import process_group
from toolkit.train.hooks import Hook

if TYPE_CHECKING:
    from toolkit.train.loop import TrainLoop
    from toolkit.train.throughput import RankTimes

_SECONDS = "communication_s"


class Collectives(Hook):
    """Adds up this rank's collectives: seconds from DeepSpeed's timers, calls and bytes from its log, as its own
    summary never resets timers (0.19.8, comm.timed_op).
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.seconds_since_log = 0.0

    def at_start(self, loop: "TrainLoop") -> None:
        """Drop what came before the first step."""
        self._take()

    def at_pause(self) -> None:
        """Count what belongs to the steps so far."""
        self._count()

    def at_resume(self) -> None:
        """Drop the collectives of an evaluation or a save."""
        self._take()

    def at_rewind(self, step: int) -> None:
        """Drop the steps that are done again."""
        self._take()
        self.seconds_since_log = 0.0

    def rank_figures(self) -> dict[str, float]:
        """Return this rank's seconds."""
        self._count()
        seconds, self.seconds_since_log = self.seconds_since_log, 0.0
        return {_SECONDS: seconds}

    def at_log(self, step: int, position: Position, times: "RankTimes") -> dict[str, float]:
        """Return the share of the time; of the rank that waits least, as all others wait for it."""
        return {"communication_fraction": min(times.figures[_SECONDS]) / times.seconds}

    def after_log(self, times: "RankTimes") -> None:
        """Write the sums into the run directory, where the report finds them."""
        if process_group.rank():
            return
        rows = [
            {"operation": name, "calls": calls, "bytes": self.bytes[name], "seconds": round(self.seconds[name], 6)}
            for name, calls in sorted(self.calls.items())
        ]
        content = json.dumps({"operations": rows}, indent=1).encode() + b"\n"
        disk.write_atomically(self.folder / "collectives.json", content)

    def _count(self) -> None:
        log, seconds = self._take()
        for name, sizes in log.items():
            self.calls[name] += sum(entry[0] for entry in sizes.values())
            self.bytes[name] += sum(size * entry[0] for size, entry in sizes.items())
            self.seconds[name] += seconds.get(name, 0.0)
        self.seconds_since_log += sum(seconds.values())

    @staticmethod
    def _take() -> tuple[dict[str, dict[int, list[int]]], dict[str, float]]:
        """Take what is new out of DeepSpeed's log and timers: calls by operation and size, and seconds by operation."""
        log = comms_logger.get_raw_data()
        comms_logger.reset_data()
        return log, {name: timer.elapsed() / 1000 for name, timer in timers.timers.items()}
