"""DeepSpeed's launcher as a child, with the ranks that it starts on this machine: signals reach them, none is left.

The launcher's own handling of signals does not serve: its front end dies of a SIGTERM and leaves the ranks behind, and
below it ranks get theirs one after another, 30 s apart, and are then killed (deepspeed 0.19.8, launch.py).
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import FrameType

import psutil

from toolkit.distributed.orphans import end_with_parent

_POLL_S = 0.2
_AGAIN_S = 1.0
"""Ranks that start while a signal is passed on get it a moment later."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


class Requests:
    """Signals that this process has got, to be passed on."""

    def __init__(self) -> None:
        self.last = 0
        """The last one's number, 0 before the first."""
        self.is_new = False
        """Whether it has not been passed on yet."""
        for number in SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it
                signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.last, self.is_new = number, True


def run(
    command: Sequence[str],
    environ: Mapping[str, str],
    words: Sequence[str],
    requests: Requests,
    look: Callable[[], None],
    patience_s: float,
) -> int:
    """Run a launcher until nothing of it is left on this machine.

    Args:
        command: the launcher with everything that it gets.
        environ: the environment.
        words: the ranks' own, recipe and overrides, by which they are known.
        requests: signals; they are passed on to all ranks at once.
        look: called several times a second.
        patience_s: how long what has lost its launcher may take to end, until it is killed.

    Returns:
        The launcher's exit code; negative if a signal killed it.
    """
    # A session of its own: Ctrl-C reaches the ranks through us alone, and they can be found without their launcher.
    process = subprocess.Popen(  # noqa: S603
        command, env=environ, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=end_with_parent
    )
    passed = ended = 0.0
    while (code := process.poll()) is None or _session(process.pid):
        now = time.monotonic()
        if requests.is_new or (requests.last and now - passed > _AGAIN_S):
            ranks = _ranks(process.pid, words)
            for rank in ranks:
                _send(rank, requests.last)
            for launcher in _launchers(process.pid) if not ranks else []:
                _send(launcher, signal.SIGTERM)  # still starting, or all ranks are on other machines
            requests.is_new, passed = False, now
        if code is not None:
            ended = ended or now
            for left in _session(process.pid) if now - ended > patience_s else []:
                _send(left, signal.SIGKILL)
        look()
        time.sleep(_POLL_S)
    return code


def _send(process: psutil.Process, number: int) -> None:
    with suppress(psutil.Error):
        process.send_signal(number)


def _session(session: int) -> list[psutil.Process]:
    """Return what is alive of a session."""
    found = []
    for pid in psutil.pids():
        with suppress(OSError, psutil.Error):
            if os.getsid(pid) == session and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.append(psutil.Process(pid))
    return found


def _launchers(session: int) -> list[psutil.Process]:
    """Return the front end and the launcher of this machine; not a pdsh, in whose words the launcher's name stands."""
    found = []
    for process in _session(session):
        with suppress(psutil.Error):
            if {"deepspeed.launcher.runner", "deepspeed.launcher.launch"} & set(process.cmdline()):
                found.append(process)
    return found


def _ranks(session: int, words: Sequence[str]) -> list[psutil.Process]:
    """Return the ranks of a session: they have a rank and the run's words, and are no children of a rank."""
    found = {}
    for process in _session(session):
        with suppress(psutil.Error):
            if process.cmdline()[-len(words) :] == list(words) and "LOCAL_RANK" in process.environ():
                found[process.pid] = process.ppid()
    return [psutil.Process(pid) for pid, parent in found.items() if parent not in found and psutil.pid_exists(pid)]
