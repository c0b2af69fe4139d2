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
from pathlib import Path
from types import FrameType

import psutil

from toolkit import children
from toolkit.launch import report

_POLL_S = 0.2
_AGAIN_S = 1.0
"""Ranks that start while a signal is passed on get it a moment later."""
_RANK = {"LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"}
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
        environ: the environment, with `report.variables`, by which ranks are known that are in a session of their own.
        words: the ranks' own, recipe and overrides, by which they are known.
        requests: signals; they are passed on to all ranks at once.
        look: called several times a second.
        patience_s: how long what has lost its launcher may take to end, until it is killed.

    Returns:
        The launcher's exit code; negative if a signal killed it.
    """
    # A session of its own: Ctrl-C reaches the ranks through us alone, and they can be found without their launcher.
    process = children.start(command, env=environ, stdin=subprocess.DEVNULL, start_new_session=True)
    passed = ended = 0.0
    told, seen = environ[report.VARIABLE], False
    while (code := process.poll()) is None or _session(process.pid) or _ranks(words, told):
        now = time.monotonic()
        if requests.is_new or (requests.last and now - passed > _AGAIN_S):
            ranks = _ranks(words, told)
            for rank in ranks:
                _send(rank, requests.last)
            seen = seen or bool(ranks)
            if not ranks and (requests.is_new or not seen):  # still starting, or all of them are on other machines
                _stop_launchers(process.pid)
            requests.is_new, passed = False, now
        if code is not None:
            ended = ended or now
            for left in _session(process.pid) + _ranks(words, told) if now - ended > patience_s else []:
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


def _stop_launchers(session: int) -> None:
    """End the front end and the launcher of this machine; an mpirun passes SIGUSR1 on, and waits for its ranks.

    Not a pdsh, in whose words the launcher's name stands.
    """
    launchers, mpiruns = [], []
    for process in _session(session):
        with suppress(psutil.Error):
            words = process.cmdline()
            if Path(words[0]).name.startswith("mpirun"):
                mpiruns.append(process)
            elif {"deepspeed.launcher.runner", "deepspeed.launcher.launch"} & set(words):
                launchers.append(process)
    for process in mpiruns or launchers:
        _send(process, signal.SIGUSR1 if mpiruns else signal.SIGTERM)


def _ranks(words: Sequence[str], told: str) -> list[psutil.Process]:
    """Return the ranks on this machine: they have a rank, the run's words and report, and are no children of a rank.

    MPICH's, and those that were started through ssh, are in a session of their own.
    """
    found = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.cmdline()[-len(words) :] == list(words) and process.status() != psutil.STATUS_ZOMBIE:
                environ = process.environ()
                if _RANK & environ.keys() and told in environ.get(report.VARIABLE, ""):
                    found[process.pid] = process.ppid()
    return [psutil.Process(pid) for pid, parent in found.items() if parent not in found and psutil.pid_exists(pid)]
