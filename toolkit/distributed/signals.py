"""Signals (SIGINT, SIGTERM, Slurm's SIGUSR1, SIGHUP), acted on by all ranks at the next step boundary.

They raise a flag that goes into the sum that each step needs: launchers signal ranks up to 30 s apart, and peers would
wait in a collective. Outside of the loop a signal ends the process.
"""

import os
import signal
from types import FrameType

from toolkit.distributed import failure
from toolkit.messages import Stopped

_CAUGHT = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
_received = ""
_deferred = False


def install_signals() -> None:
    """Install the handlers. Until `defer_signals` a signal raises Stopped, afterwards it only sets a flag."""
    act_on_signals_at_once()
    for number in _CAUGHT:
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it
            signal.signal(number, _handle)


def defer_signals() -> None:
    """From now on a signal only sets the flag that the training loop reads to save and stop."""
    global _deferred
    _deferred = True


def act_on_signals_at_once() -> None:
    """From now on (after the loop) a signal raises Stopped again; a signal received before is forgotten."""
    global _deferred, _received
    _deferred, _received = False, ""


def release_signals() -> None:
    """Restore the default handlers: the work is done, and a signal may end this process without a message."""
    for number in _CAUGHT:
        if signal.getsignal(number) is _handle:
            signal.signal(number, signal.SIG_DFL)


def die_of_signals() -> None:
    """From now on a signal ends this process without a message."""
    for number in _CAUGHT:
        signal.signal(number, signal.SIG_DFL)


def received_signal() -> str:
    """Return the name of the signal that was received, "" if none was."""
    return _received


def _handle(number: int, frame: FrameType | None) -> None:
    """Handle a signal: record it and, unless signals are deferred, raise Stopped for the first one."""
    global _received
    is_first = not _received
    _received = signal.Signals(number).name
    # Stopped is not raised again: the launcher's SIGTERM after a Ctrl-C must not disturb the unwinding.
    if _deferred or not is_first:
        return
    if (folder := failure.finished_folder()) is not None:
        done = Stopped(
            "{signal} came after the run had finished: {folder} is complete. Only its report may be missing:  toolkit "
            "report {folder}",
            signal=_received,
            folder=folder,
        )
        done.exit_code = 0
        raise done
    raise Stopped(
        "stopped by {signal} outside of training steps (pid {pid}). Without a file DONE in its directory the run is "
        "unfinished.",
        signal=_received,
        pid=os.getpid(),
    )
