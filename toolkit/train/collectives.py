"""What DeepSpeed's log of collectives (`profile.comms`) counted, operation by operation."""

import json
from collections import Counter
from pathlib import Path

from deepspeed.comm.comm import comms_logger, timers

FILE = "collectives.json"


class Collectives:
    """Adds up this rank's collectives.

    DeepSpeed's own summary holds sums of sums, as it never resets its timers (0.19.8, comm.timed_op). So seconds are
    taken from the timers, and calls and bytes from the log.
    """

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self.seconds: Counter[str] = Counter()

    def take(self, counts: bool = True) -> float:
        """Take what came since the last call out of DeepSpeed's log.

        Args:
            counts: whether it is added up; what happens beside training is not.

        Returns:
            Its seconds; 0 unless `profile.comms` times them.
        """
        log = comms_logger.get_raw_data()
        comms_logger.reset_data()
        spent = {name: timer.elapsed() / 1000 for name, timer in timers.timers.items()}
        if counts:
            for name, sizes in log.items():
                self.calls[name] += sum(entry[0] for entry in sizes.values())
                self.bytes[name] += sum(size * entry[0] for size, entry in sizes.items())
                self.seconds[name] += spent.get(name, 0.0)
        return sum(spent.values())

    def write(self, folder: Path) -> None:
        """Write the sums into a run folder, where the report finds them."""
        rows = [
            {"operation": name, "calls": calls, "bytes": self.bytes[name], "seconds": round(self.seconds[name], 6)}
            for name, calls in sorted(self.calls.items())
        ]
        temporary = folder / f".{FILE}.tmp"
        temporary.write_text(json.dumps({"operations": rows}, indent=1) + "\n", encoding="utf-8")
        temporary.replace(folder / FILE)

    @property
    def is_on(self) -> bool:
        """Whether DeepSpeed counts anything."""
        return bool(comms_logger.enabled)
