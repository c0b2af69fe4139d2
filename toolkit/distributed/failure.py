"""One error, told once: the first rank that fails says why, the others end quietly within seconds.

The first to create the marker FAILED in the run folder is the one that speaks. The others notice the marker, either
when their own collective breaks or through a thread that looks for it (a rank inside a collective runs no Python).
That thread speaks for a rank that was killed and cannot (see peers.py).
"""

import os
import socket
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from toolkit import terminal
from toolkit.distributed.peers import Peer, Peers
from toolkit.launch import report

_marker: Path | None = None
_is_mine = False
_over = threading.Event()
_peers: Peers | None = None
_told_of_peer = threading.Event()

CHECK_EVERY_S = 0.5
GRACE_S = 2.0
_PEER_S = 1.5
"""How long a rank whose collective breaks looks for one that was killed, before it takes the error for its own."""


def watch(folder: Path, rank: int = 0, everybody: Sequence[Peer] = ()) -> None:
    """From now on this process ends itself soon after another rank has failed or was killed.

    Args:
        folder: the run directory, in which the one that fails puts FAILED.
        rank: this rank.
        everybody: all ranks in their order; none where they are known already.
    """
    global _marker, _peers
    first, _marker = _marker is None, folder / "FAILED"
    if everybody:
        _peers = Peers(folder, rank, everybody)
    elif _peers is not None:
        _peers.folder = folder / "logs"
    if not first:
        return
    threading.Thread(target=_wait_for_marker, name="failure-watch", daemon=True).start()


def is_watching() -> bool:
    """Return whether `watch` has been called: from then on the marker decides who speaks."""
    return _marker is not None


def another_has_failed() -> bool:
    """Return whether another rank has put its error into the marker."""
    return _marker is not None and not _is_mine and _marker.exists()


def announce(rank: int, text: str, code: int, of_peer: bool = False) -> bool:
    """Claim the failure.

    Args:
        rank: this rank.
        text: what went wrong, for the marker.
        code: exit code of this rank, for the marker and for `toolkit launch`.
        of_peer: it went wrong with another rank, which the text names.

    Returns:
        True if this rank was the first and should tell the user; False if another rank has already spoken.
    """
    global _is_mine
    try:
        file = open(_marker, "x", encoding="utf-8") if _marker else None
    except FileExistsError:
        return _is_mine
    except OSError:
        file = None  # the folder is gone or full: better told twice than not at all
    report.note(code=code, died=time.time())
    if file:
        _is_mine = True
        with suppress(OSError), file:  # a full disk leaves it empty, which still ends the others
            me = f"rank {rank} on {socket.gethostname()} (pid {os.getpid()})"
            file.write(f"{text}\nnoticed by {me}\n" if of_peer else f"{me}, exit code {code}\n{text}\n")
    return True


def is_told_of_peer() -> bool:
    """Return whether this process has told already that another rank was killed: nothing else is to be told."""
    return _told_of_peer.is_set()


def was_killed() -> bool:
    """Look whether another rank was killed, which breaks this one's collectives; if so tell it, and return True."""
    if _peers is None or _told_of_peer.wait(_PEER_S) or another_has_failed():
        return is_told_of_peer()
    if text := _peers.silent():
        _tell_of_peer(_peers, text)
    return is_told_of_peer()


def end_watch() -> None:
    """This process ends in good order, or has told why not: no more looking."""
    _over.set()
    if _peers is not None:
        _peers.note(left=True)


def _tell_of_peer(peers: Peers, text: str) -> None:
    if announce(peers.rank, text, 1, of_peer=True):
        _told_of_peer.set()
        with suppress(OSError):
            sys.stderr.write(f"{text}\n")
            sys.stderr.flush()


def _wait_for_marker() -> None:
    while not _over.is_set():
        if _peers is None:
            _over.wait(CHECK_EVERY_S)
        else:
            text = _peers.wait(CHECK_EVERY_S)
            if text and not _over.is_set() and not another_has_failed():
                _tell_of_peer(_peers, text)
            _peers.note()
        if another_has_failed() or is_told_of_peer():
            time.sleep(GRACE_S)  # let this rank's own unwinding finish if it can
            if not _over.is_set():
                terminal.show_cursor()
                os._exit(1)
