"""SIGINT, SIGTERM, SIGUSR1 (Slurm's warning) and SIGHUP (a closed terminal): noted at once, acted on by all ranks at
the next step boundary.

Launchers signal ranks one by one, DeepSpeed's up to 30 s apart, so a rank must never act on a signal alone: its peers
would wait for it in a collective. The flag rides on the sum that each step needs anyway.
"""

import os
import signal
from types import FrameType

from toolkit.errors import Stopped
from toolkit.messages import tr

_CAUGHT = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
_received = ""
_deferred = False


def install() -> None:
    """Catch them. Before `defer` they end this process; afterwards they only raise the flag."""
    act_at_once()
    for number in _CAUGHT:
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it
            signal.signal(number, _handle)


def end_in_silence() -> None:
    """From now on they end this process without a word: it is only waiting for whether it has to speak."""
    for number in _CAUGHT:
        signal.signal(number, signal.SIG_DFL)


def defer() -> None:
    """From now on a signal only raises the flag, which the training loop looks at; after a failure nobody does."""
    global _deferred
    _deferred = True


def act_at_once() -> None:
    """From now on (after the loop) a signal ends this process again."""
    global _deferred, _received
    _deferred, _received = False, ""


def received() -> str:
    """Return the name of the signal that has come, or ""."""
    return _received


def _handle(number: int, frame: FrameType | None) -> None:
    global _received
    again = bool(_received)
    _received = signal.Signals(number).name
    if not _deferred:
        if again:
            # The first one is already unwinding; the launcher's SIGTERM after a Ctrl-C must not disturb that.
            return
        raise Stopped(
            tr(
                "stopped by {signal} outside of training steps (pid {pid}). Without a file DONE in its folder the run "
                "is unfinished.",
                signal=_received,
                pid=os.getpid(),
            )
        )
