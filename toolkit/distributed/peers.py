"""The other ranks of a run: which was killed, and by what, and which gives no sign of life any more.

Linux wakes a rank when one of its node has ended (pidfd); notes of those on other nodes stand still. Imported at the
start of a run of several ranks: when one of them dies, memory and disks may be what has run out.
"""

import json
import os
import select
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from toolkit.distributed.ended import exit_status, kernel_line, out_of_memory_kills
from toolkit.distributed.presence import SILENT_S, Note, Peer, note_file, stretch
from toolkit.messages import joined, tr

_GIB = 2**30


class Peers:
    """All ranks of a run, as one of them sees them; `note` is its own."""

    def __init__(self, note: Note, everybody: Sequence[Peer]) -> None:
        self.note, self.rank, self.everybody = note, note.rank, list(everybody)
        self.ended = ""
        """What to report if a collective breaks: that a rank has ended, where its exit status is not known; else ""."""
        self._kills = out_of_memory_kills()
        self._poll = select.poll()
        self._files: dict[int, int] = {}
        """Descriptor -> rank, of those of this machine."""
        for rank, peer in enumerate(everybody):
            if rank != self.rank and peer.machine == everybody[self.rank].machine:
                with suppress(OSError, AttributeError):  # an old kernel: its launcher alone notices
                    handle = os.pidfd_open(peer.pid)
                    self._files[handle] = rank
                    self._poll.register(handle, select.POLLIN)

    def is_first_alive(self) -> bool:
        """Whether this rank has the lowest number of those on its node that have not ended."""
        return all(rank > self.rank for rank in self._files.values())

    def wait(self, seconds: float) -> str:
        """Wait for a rank on this node to end; return a sentence about it if it was killed, else ""."""
        for handle, _ in self._poll.poll(1000 * seconds):
            rank = self._files.pop(handle)
            status = exit_status(self.everybody[rank].pid)  # at once: its launcher takes it away
            self._poll.unregister(handle)
            os.close(handle)
            has_notes = self.note.folder is not None
            if status is None and not has_notes:  # it may have ended in good order
                self.ended = tr(
                    "rank {rank} on {host} (pid {pid}) has ended, and its launcher has its exit status: if it has "
                    "printed no error, it was killed; see dmesg, or ask the scheduler.",
                    rank=rank,
                    host=self.everybody[rank].host,
                    pid=self.everybody[rank].pid,
                )
            # With an unknown status the note tells: a rank that ends in good order says so ("left") in its last one.
            may_be_killed = has_notes if status is None else os.WIFSIGNALED(status)
            note = self._read(rank)
            if may_be_killed and not note.get("left"):
                return self._killed_text(rank, status, note)
        return ""

    def silent(self, seconds: float = SILENT_S) -> str:
        """Return a sentence about other nodes' ranks whose presence files stay unchanged for `seconds`; "" if none."""
        machine = self.note.process.machine
        others = [rank for rank, peer in enumerate(self.everybody) if peer.machine != machine]
        if not others or self.note.folder is None:
            return ""
        before = {rank: self._read(rank) for rank in others}
        time.sleep(seconds * stretch(len(self.everybody)))
        gone = [rank for rank in others if before[rank] == self._read(rank) and not before[rank].get("left")]
        if not gone or len(gone) == len(others) > 1:  # of all the others it is rather this machine that is cut off
            return ""
        return tr(
            "rank {ranks} gives no sign of life any more: killed, or the node or the network to it is gone.",
            ranks=", ".join(f"{rank} ({self.everybody[rank].host})" for rank in gone),
        )

    def _killed_text(self, rank: int, status: int | None, note: Mapping[str, Any]) -> str:
        """Return a sentence about a killed rank: by which signal, its last memory, and whether memory had run out."""
        peer = self.everybody[rank]
        if status is None:
            text = tr(
                "rank {rank} on {host} (pid {pid}) was killed: it has ended without an error of its own, and its "
                "launcher has its exit status.",
                rank=rank,
                host=peer.host,
                pid=peer.pid,
            )
        else:
            number = os.WTERMSIG(status)
            text = tr(
                "rank {rank} on {host} (pid {pid}) was killed by signal {number} ({name}).",
                rank=rank,
                host=peer.host,
                pid=peer.pid,
                number=number,
                name=next((other.name for other in signal.Signals if other == number), "?"),
            )
        memory = reason = ""
        if "rss" in note:
            memory = tr(
                "It used {used} GiB of memory {seconds} s before.",
                used=f"{note['rss'] / _GIB:.2f}",
                seconds=f"{max(0.0, time.time() - note['time']):.0f}",
            )
        kernel = kernel_line(peer.pid)
        if kernel or out_of_memory_kills() > self._kills:
            reason = tr(
                "The system ran out of memory and ended it. Use less: a smaller batch.micro_per_gpu, no or less "
                "offloading, fewer ranks on this node; `toolkit plan` counts host memory."
            )
        elif status is None or os.WTERMSIG(status) == signal.SIGKILL:
            reason = tr("If it was not killed on purpose, memory may have run out: see dmesg, or ask the scheduler.")
        return joined(text, memory, reason, kernel)

    def _read(self, rank: int) -> dict[str, Any]:
        """Return a rank's last note, {} if there is none to be read."""
        if self.note.folder is None:
            return {}
        with suppress(OSError, ValueError):
            return dict(json.loads(note_file(self.note.folder, rank).read_text(encoding="utf-8")))
        return {}
