"""What the user sees beside lines: long phases with their progress, and on a terminal one live view.

Where nobody watches (a pipe, a scheduler's log) there are plain lines that can be searched, and rich is not imported.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

from toolkit import messages
from toolkit.messages import say, tr

if TYPE_CHECKING:
    from rich.live import Live

SCHEDULERS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "CI")
"""Variables that say that nobody watches, even where there is a terminal."""
WORTH_TELLING_S = 10.0
"""Phases that take less leave no line."""
EVERY_S = 30.0
"""How often a plain line tells that a phase goes on."""
BYTES = "B"

_display = "auto"
_is_session = False
live: "Live | None" = None
"""What live_view.py draws, while there is something to show."""


def set_display(display: str) -> None:
    """Begin a training session, whose progress is shown as `display` says: live, plain, or auto as the terminal allows.
    Other commands never call this: their progress goes to stderr, beside what they answer.
    """
    global _display, _is_session
    _display, _is_session = display, True


def is_live() -> bool:
    """Return whether there is a live view: `run.display` says so, or `stream` is a terminal that is watched."""
    if _display != "auto":
        return _display == "live"
    is_watched = stream().isatty() and os.environ.get("TERM", "") not in ("", "dumb")
    return is_watched and not any(os.environ.get(name) for name in SCHEDULERS)


def stream() -> TextIO:
    """Return where the live view is drawn."""
    return sys.stdout if _is_session else sys.stderr


def _tell(line: str) -> None:
    """Print a line about a phase: as a message in a training session, else to stderr, as stdout may carry answers."""
    if _is_session or live is not None:
        say(line)
    else:
        sys.stderr.write(line + "\n")
        sys.stderr.flush()


def show_cursor() -> None:
    """Give the terminal its cursor back: for a process that is about to end without unwinding."""
    if live is not None:
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, b"\x1b[?25h")


@contextmanager
def phase(title: str, total: int = 0, unit: str = "") -> Iterator[Callable[[int], None]]:
    """Show on the main rank how far the body has got, under a title; yield a function that it calls with how much more
    is done. `total`: how much there is, 0 if unknown; `unit`: of what, translated, or BYTES.
    """
    if not messages.is_main_rank():
        yield lambda more: None
        return
    started = time.monotonic()
    shown = _lines(title, total, unit)
    if is_live():
        from toolkit.live_view import progress_bar

        shown = progress_bar(title, total, unit)
    with shown as advance:
        yield advance
    seconds = time.monotonic() - started
    if seconds >= WORTH_TELLING_S:
        _tell(tr("{title}: done in {seconds} s.", title=title, seconds=f"{seconds:.0f}"))


@contextmanager
def _lines(title: str, total: int, unit: str) -> Iterator[Callable[[int], None]]:
    """Print the progress of a `phase` every EVERY_S seconds, even without any, so that a silent minute is no hang."""
    done, ended, started = 0, threading.Event(), time.monotonic()

    def advance(more: int) -> None:
        nonlocal done
        done += more

    def tell() -> None:
        while not ended.wait(EVERY_S):
            seconds = f"{time.monotonic() - started:.0f}"
            if total:
                share = f"{100 * done / total:.0f}"
                _tell(tr("{title}: {share} % after {seconds} s.", title=title, share=share, seconds=seconds))
            else:
                _tell(tr("{title}: {seconds} s so far.", title=title, seconds=seconds))

    teller = threading.Thread(target=tell, name="progress", daemon=True)
    teller.start()
    try:
        yield advance
    finally:
        ended.set()


def clock(seconds: float) -> str:
    """Return hours:minutes:seconds."""
    rounded = int(seconds)
    return f"{rounded // 3600}:{rounded % 3600 // 60:02d}:{rounded % 60:02d}"
