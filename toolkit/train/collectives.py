"""`profile.comms`: the share of time that collectives take, for metrics.jsonl, and a table of them for the report."""

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
    """Adds up this rank's collectives by operation: seconds from DeepSpeed's timers, calls and bytes from its log.
    DeepSpeed's own summary would not do, as it never resets its timers (0.19.8, comm.timed_op).
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.seconds_since_log = 0.0

    def at_start(self, loop: "TrainLoop") -> None:
        """Drop the collectives of before the first step."""
        self._take_new()

    def at_pause(self) -> None:
        """Count the collectives of the steps before the pause."""
        self._add_new()

    def at_resume(self) -> None:
        """Drop the collectives of an evaluation or a save."""
        self._take_new()

    def at_rewind(self, step: int) -> None:
        """Drop the collectives of the steps that are repeated after a rewind."""
        self._take_new()
        self.seconds_since_log = 0.0

    def rank_figures(self) -> dict[str, float]:
        """Return this rank's seconds in collectives since the last log."""
        self._add_new()
        seconds, self.seconds_since_log = self.seconds_since_log, 0.0
        return {_SECONDS: seconds}

    def at_log(self, step: int, position: Position, times: "RankTimes") -> dict[str, float]:
        """Return the share of time in collectives on the rank with the least: on others it includes waiting for it."""
        return {"communication_fraction": min(times.figures[_SECONDS]) / times.seconds}

    def after_log(self, times: "RankTimes") -> None:
        """Write rank 0's sums per operation to collectives.json in the run directory, which the report reads."""
        if process_group.rank():
            return
        rows = [
            {"operation": name, "calls": calls, "bytes": self.bytes[name], "seconds": round(self.seconds[name], 6)}
            for name, calls in sorted(self.calls.items())
        ]
        content = json.dumps({"operations": rows}, indent=1).encode() + b"\n"
        disk.write_atomically(self.folder / "collectives.json", content)

    def _add_new(self) -> None:
        """Add the collectives since they were last taken to this rank's sums."""
        log, seconds = self._take_new()
        for name, by_size in log.items():  # by_size: bytes of a message -> [calls, …]
            self.calls[name] += sum(calls for calls, *_ in by_size.values())
            self.bytes[name] += sum(size * calls for size, (calls, *_) in by_size.items())
            self.seconds[name] += seconds.get(name, 0.0)
        self.seconds_since_log += sum(seconds.values())

    @staticmethod
    def _take_new() -> tuple[dict[str, dict[int, list[int]]], dict[str, float]]:
        """Empty DeepSpeed's log and timers; return operation -> message size in bytes -> [calls, …], and operation ->
        seconds, both since the last call.
        """
        log = comms_logger.get_raw_data()
        comms_logger.reset_data()
        return log, {name: timer.elapsed() / 1000 for name, timer in timers.timers.items()}
