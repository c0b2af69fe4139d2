"""A run that is stopped by hand."""

import time
from collections.abc import Callable
from pathlib import Path

from toolkit.distributed.process_group import rank
from toolkit.launch import deepspeed
from toolkit.messages import tr

STOP = "stop"


class StopFile:
    """A file `stop` in the run folder, by which a run is stopped by hand where no signal can be sent.

    Args:
        folder: the run folder.
    """

    EVERY_S = 1.0

    def __init__(self, folder: Path) -> None:
        self.path, self.next = folder / STOP, 0.0
        self.found = False

    def is_there(self) -> bool:
        """Whether rank 0 sees the file; asked at most once a second, as the folder may be far away."""
        if rank() == 0 and not self.found and time.monotonic() >= self.next:
            self.next = time.monotonic() + self.EVERY_S
            self.found = self.path.exists()
        return self.found

    def remove(self) -> None:
        """Remove the file once it has been obeyed, or the run could never go on."""
        if self.found:
            self.path.unlink(missing_ok=True)


def remove_stale(folder: Path, say: Callable[[str], None]) -> None:
    """Remove a stop file that is older than this start; it was meant for an earlier one. For rank 0 only.

    A run that its launcher starts again after a failure obeys it: it was made since the command was typed.
    """
    path = folder / STOP
    if path.exists() and not deepspeed.restart_number():
        path.unlink(missing_ok=True)
        say(
            tr(
                "Removed the file {file}, which is older than this start. To stop this run, create it again.",
                file=path,
            )
        )
