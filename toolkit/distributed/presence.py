"""What a rank shows the others of itself: its process, and notes in logs/rank-N.json that it is still there."""

import json
import os
import socket
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

UNHURRIED_RANKS = 64
"""From so many ranks on each looks and writes less often: all of them burden the run directory's server together."""
NOTE_EVERY_S = 2.0
SILENT_S = 6.0
"""A note that stands still for so long is that of a process that is gone."""


def stretch(num_ranks: int) -> float:
    """Return by what to multiply the time between two accesses to the run directory."""
    return max(1.0, num_ranks / UNHURRIED_RANKS)


@dataclass(frozen=True, slots=True)
class Peer:
    """A rank's process."""

    host: str
    machine: str
    """Id of what its pid is unique on: the node, or a container of it."""
    pid: int


def node_id() -> str:
    """Return an id of this node; the host name alone will not do, as containers on several nodes may share one."""
    boot = ""
    with suppress(OSError):  # Linux alone has it
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{socket.gethostname()} {boot}"


def me() -> Peer:
    """Return this process."""
    # Containers on one machine do not see each other's processes.
    space = ""
    with suppress(OSError):
        space = str(Path("/proc/self/ns/pid").readlink())
    return Peer(socket.gethostname(), f"{node_id()} {space}", os.getpid())


class Note:
    """What a rank writes down of itself every two seconds, in logs/rank-N.json. `folder`: the run directory, None until
    it is chosen: nothing is written then, and ranks of other nodes cannot be judged.
    """

    def __init__(self, folder: Path | None, rank: int, process: Peer, num_ranks: int) -> None:
        self.folder = folder / "logs" if folder else None
        self.rank, self.process, self.num_ranks = rank, process, num_ranks
        self._written_at = 0.0
        self._has_left = False
        self._writing = threading.Lock()
        self.write()

    def write(self, left: bool = False) -> None:
        """Write this rank's presence file: that it runs, or, as the last time, that it has left regularly."""
        is_early = time.monotonic() - self._written_at < NOTE_EVERY_S * stretch(self.num_ranks)
        if self.folder is None or (is_early and not left):
            return
        path = note_file(self.folder, self.rank)
        new = path.with_name(f".{path.name}")
        with self._writing, suppress(OSError, psutil.Error):  # the watching thread writes too
            if self._has_left:
                return
            self._written_at, self._has_left = time.monotonic(), left
            state = {"rss": psutil.Process().memory_info().rss, "time": time.time(), "left": left}
            new.write_text(json.dumps({**asdict(self.process), **state}), encoding="utf-8")
            os.replace(new, path)


def note_file(folder: Path, rank: int) -> Path:
    """Return a rank's presence file in a run's logs/."""
    return folder / f"rank-{rank}.json"
