"""One error, told once: the first rank that fails says why, the others end quietly within seconds.

The first to create the marker FAILED in the run folder is the one that speaks. The others notice the marker, either
when their own collective breaks or through a thread that looks for it (a rank inside a collective runs no Python).
"""

import os
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path

from toolkit import terminal
from toolkit.launch import report

_marker: Path | None = None
_is_mine = False
_over = threading.Event()

CHECK_EVERY_S = 0.5
GRACE_S = 2.0


def watch(folder: Path) -> None:
    """From now on this process ends itself soon after another rank has put FAILED into `folder`."""
    global _marker
    first, _marker = _marker is None, folder / "FAILED"
    if not first:
        return
    threading.Thread(target=_wait_for_marker, name="failure-watch", daemon=True).start()


def is_watching() -> bool:
    """Return whether `watch` has been called: from then on the marker decides who speaks."""
    return _marker is not None


def another_has_failed() -> bool:
    """Return whether another rank has put its error into the marker."""
    return _marker is not None and not _is_mine and _marker.exists()


def announce(rank: int, text: str, code: int) -> bool:
    """Claim the failure.

    Args:
        rank: this rank.
        text: what went wrong, for the marker.
        code: exit code of this rank, for the marker and for `toolkit launch`.

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
            file.write(f"rank {rank} on {socket.gethostname()} (pid {os.getpid()}), exit code {code}\n{text}\n")
    return True


def end_watch() -> None:
    """The run is over: no more looking."""
    _over.set()


def _wait_for_marker() -> None:
    while not _over.wait(CHECK_EVERY_S):
        if another_has_failed():
            time.sleep(GRACE_S)  # let this rank's own unwinding finish if it can
            if not _over.is_set():
                terminal.show_cursor()
                os._exit(1)
