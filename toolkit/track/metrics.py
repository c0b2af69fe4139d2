"""metrics.jsonl: one object per logged step, one per evaluation."""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path

from toolkit.errors import CheckpointError
from toolkit.messages import tr
from toolkit.track.append import append


class MetricsLog:
    """Appends rows to metrics.jsonl of a run. For rank 0 only.

    A disk that is full is no reason to end a run: rows wait in memory until there is room.

    Args:
        file: metrics.jsonl.
        say: tells the user.
        hand_on: gets each row too: what the trackers get.
    """

    def __init__(
        self, file: Path, say: Callable[[str], None], hand_on: Callable[[Mapping[str, object]], None] = lambda row: None
    ) -> None:
        self.file, self.say, self.hand_on = file, say, hand_on
        self._waiting: list[str] = []

    def append(self, row: Mapping[str, object]) -> None:
        """Append one row.

        Numbers that are not finite are written as strings ("nan", "inf"): JSON has no such numbers, and a row that a
        strict reader refuses would hide just the step that matters.

        Args:
            row: names and values.
        """
        clean = {
            key: str(value) if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in row.items()
        }
        told = bool(self._waiting)
        self._waiting.append(json.dumps(clean, ensure_ascii=False) + "\n")
        try:
            self._write()
        except OSError as error:
            if not told:
                self.say(
                    tr(
                        "WARNING: {file} cannot be written: {reason}. Training goes on; its rows wait in memory.",
                        file=self.file,
                        reason=error.strerror or error,
                    )
                )
        self.hand_on(row)

    def forget(self) -> None:
        """Drop the rows that wait: the run has gone back to before them."""
        self._waiting.clear()

    def finish(self) -> None:
        """Write what still waits.

        Raises:
            CheckpointError: there is still no room.
        """
        try:
            self._write()
        except OSError as error:
            raise CheckpointError(
                tr(
                    "{file} cannot be written: {reason}. The last {count} rows are lost.",
                    file=self.file,
                    reason=error.strerror or error,
                    count=len(self._waiting),
                )
            ) from error

    def _write(self) -> None:
        """Write all that waits, or nothing of it."""
        if not self._waiting:
            return
        append(self.file, "".join(self._waiting).encode())
        self._waiting.clear()
