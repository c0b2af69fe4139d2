"""Ranks that fail or are killed: one error is reported once, and all ranks end together.

The first to create the marker FAILED in the run directory reports. Others notice it when their collective breaks, or in
a thread (a rank inside a collective runs no Python), which also reports for a killed rank, see peers.py.
"""

import os
import socket
import sys
import threading
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit import terminal
from toolkit.distributed.presence import Note, Peer, stretch
from toolkit.launch import environment

if TYPE_CHECKING:
    from toolkit.distributed.peers import Peers

_marker: Path | None = None
_is_mine = False
_earlier_markers: Collection[int] = ()
_is_watching = False
_over = threading.Event()
_note: Note | None = None
_peers: "Peers | None" = None
_reported_peer = threading.Event()
CHECK_EVERY_S = 0.5
GRACE_S = 2.0
_PEER_S = 1.5
"""How long a rank whose collective breaks looks for one that was killed, before it takes the error for its own."""


def watch_failures(
    folder: Path | None, rank: int = 0, everybody: Sequence[Peer] = (), earlier_markers: Collection[int] = ()
) -> None:
    """Start a thread that ends this process soon after another rank has failed or was killed; further calls only tell
    it more. `folder`: the run directory, None until it is chosen; `everybody`: the processes of all ranks, () once they
    are known; `earlier_markers`: inodes of FAILED files of earlier starts, still to be seen.
    """
    global _marker, _note, _peers, _earlier_markers, _is_watching
    _marker, _earlier_markers = folder / "FAILED" if folder else None, earlier_markers
    if everybody:
        note, peers = Note(folder, rank, everybody[rank], len(everybody)), None
        if len(everybody) > 1:
            from toolkit.distributed.peers import Peers

            peers = Peers(note, everybody)
        _note, _peers = note, peers
    elif _note is not None and folder is not None:
        _note.folder = folder / "logs"
        _note.write()
    if not _is_watching:
        _is_watching = True
        threading.Thread(target=_wait_for_failure, name="failure-watch", daemon=True).start()


def another_has_failed() -> bool:
    """Return whether another rank has already claimed the failure, by writing its error into the marker file."""
    if _marker is not None and not _is_mine:
        with suppress(OSError):
            return _marker.stat().st_ino not in _earlier_markers
    return False


def announce_failure(rank: int, text: str, code: int, of_peer: bool = False) -> bool:
    """Claim the failure with the marker's `text` and exit `code`; return whether this rank was first, to report it.
    `of_peer`: the text is of another rank, which was killed.
    """
    global _is_mine
    try:
        file = open(_marker, "x", encoding="utf-8") if _marker else None
    except FileExistsError:
        return _is_mine
    except OSError:
        file = None  # the folder is gone or full: better reported twice than not at all
    environment.report_status(code=code, died=time.time())
    if file:
        _is_mine = True
        with suppress(OSError), file:  # a full disk leaves it empty, which still ends the others
            author = f"rank {rank} on {socket.gethostname()} (pid {os.getpid()})"
            file.write(f"{text}\nnoticed by {author}\n" if of_peer else f"{author}, exit code {code}\n{text}\n")
    return True


def end_watch() -> None:
    """Stop watching the other ranks: this process ends regularly, or has reported its error."""
    _over.set()
    if _note is not None:
        _note.write(left=True)


def has_reported_peer() -> bool:
    """Return whether this process has reported that another rank was killed: it reports no error of its own then."""
    return _reported_peer.is_set()


def blame_peers() -> str:
    """Find out whether this rank's error comes from a rank that has ended and so broken the collectives, and report
    that rank; return what to say in place of the error, "" if it is this rank's own or the end was reported.
    """
    if _peers is None:
        return ""
    is_reported = _reported_peer.wait(_PEER_S)  # by the watching thread, which may need a moment to notice the end
    if is_reported or another_has_failed():
        return ""
    if text := _peers.silent():
        _report_peer(_peers, text)
    return _peers.ended


def run_folder() -> Path | None:
    """Return the run directory, where the first rank to fail claims the marker; None before ranks have one."""
    return None if _marker is None else _marker.parent


def finished_folder() -> Path | None:
    """Return the run directory if the run in it is complete, else None."""
    return _marker.parent if _marker is not None and _marker.with_name("DONE").exists() else None


def _report_peer(peers: "Peers", text: str) -> None:
    """Report that a rank was killed, unless another rank does; `_wait_for_failure` then ends this process."""
    if _marker is None and not peers.is_first_alive():  # without a marker to claim, one rank of a node speaks
        _reported_peer.set()
        return
    if announce_failure(peers.rank, text, 1, of_peer=True):
        _reported_peer.set()
        with suppress(OSError):
            sys.stderr.write(f"{text}\n")
            sys.stderr.flush()


def _wait_for_failure() -> None:
    """Watch the other ranks, and end this process after the failure of one: what the thread does."""
    while not _over.is_set():
        if (peers := _peers) is None:
            _over.wait(CHECK_EVERY_S)
        else:
            text = peers.wait(CHECK_EVERY_S * stretch(len(peers.everybody)))
            if text and not _over.is_set() and not another_has_failed():
                _report_peer(peers, text)
        if _note is not None:
            _note.write()
        if another_has_failed() or _reported_peer.is_set():
            time.sleep(GRACE_S)  # let this rank's own unwinding finish if it can
            if not _over.is_set():
                terminal.show_cursor()
                os._exit(1)
