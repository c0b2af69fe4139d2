"""Processes of a launch: DeepSpeed's launcher as a child, and the ranks that it starts.

DeepSpeed's launcher does not pass signals on: its front end dies of a SIGTERM and leaves the ranks behind, and below it
ranks get theirs one after another, 30 s apart, and are then killed (deepspeed 0.19.8, launch.py, measured). So
`run_launcher` sends signals to the ranks itself.
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from toolkit import children
from toolkit.launch.ancestors import FRONT_END, NODE_LAUNCHER
from toolkit.launch.environment import STATUS_VARIABLE, VARIABLES

_POLL_S = 0.2
_RESEND_S = 1.0
"""Ranks that start while a signal is passed on get it a moment later."""
_LOCAL_RANK_NAMES = {VARIABLES[launcher][1] for launcher in ("torch", "openmpi")}
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


class SignalRequests:
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


def wait_for(running: Sequence["subprocess.Popen[Any]"], requests: SignalRequests) -> list[int]:
    """Wait until all processes have ended, pass each signal on to them once; return their exit codes.
    They are in sessions of their own: a Ctrl-C reaches them through this process alone.
    """
    while any(process.poll() is None for process in running):
        if requests.is_new:
            requests.is_new = False
            for process in running:
                process.send_signal(requests.last)
        time.sleep(_POLL_S)
    return [process.returncode for process in running]


def run_launcher(
    command: Sequence[str],
    environ: Mapping[str, str],
    words: Sequence[str],
    requests: SignalRequests,
    must_kill: Callable[[], bool],
    patience_s: float,
) -> int:
    """Run a launcher's `command` until nothing of it is left on this machine; return its exit code, negative if a
    signal killed it.

    Args:
        environ: the launcher's environment, which names the status file.
        words: the last words of each rank's command line, by which ranks are found (`_find_ranks`).
        requests: signals to be passed on to all ranks at once.
        must_kill: called several times a second; once it returns True, everything is killed.
        patience_s: what still runs so long after the launcher has ended is killed.
    """
    # A session of its own: Ctrl-C reaches the ranks through us alone, and they can be found without their launcher.
    process = children.start(command, env=environ, stdin=subprocess.DEVNULL, start_new_session=True)
    sent_at = ended_at = 0.0  # when the last signal was passed on; when the launcher ended, 0 before that
    status_file, has_had_ranks = environ[STATUS_VARIABLE], False
    while (code := process.poll()) is None or _session_processes(process.pid) or _find_ranks(words, status_file):
        now = time.monotonic()
        if requests.is_new or (requests.last and now - sent_at > _RESEND_S):
            ranks = _find_ranks(words, status_file)
            _send_signal(ranks, requests.last)
            has_had_ranks = has_had_ranks or bool(ranks)
            if not ranks and (requests.is_new or not has_had_ranks):  # still starting, or all are on other machines
                _stop_launchers(process.pid)
            requests.is_new, sent_at = False, now
        if code is not None:
            ended_at = ended_at or now
        if must_kill() or (code is not None and now - ended_at > patience_s):
            _send_signal(_session_processes(process.pid) + _find_ranks(words, status_file), signal.SIGKILL)
        time.sleep(_POLL_S)
    return code


def _send_signal(processes: Sequence[psutil.Process], number: int) -> None:
    """Send a signal to processes; those that have ended are skipped."""
    for process in processes:
        with suppress(psutil.Error):
            process.send_signal(number)


def _session_processes(session: int) -> list[psutil.Process]:
    """Return the processes of a session that are not zombies."""
    alive = []
    for pid in psutil.pids():
        with suppress(OSError, psutil.Error):
            if os.getsid(pid) == session and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                alive.append(psutil.Process(pid))
    return alive


def _stop_launchers(session: int) -> None:
    """Send SIGTERM to DeepSpeed's front end and node launchers in a session, and to a pdsh that starts them. If there
    is an mpirun, send it SIGUSR1 instead, which it passes on to its ranks.
    """
    launchers, mpiruns = [], []
    for process in _session_processes(session):
        with suppress(psutil.Error):
            words = process.cmdline()
            if Path(words[0]).name.startswith("mpirun"):
                mpiruns.append(process)
            elif {FRONT_END, NODE_LAUNCHER} & set(words):
                launchers.append(process)
    if mpiruns:
        _send_signal(mpiruns, signal.SIGUSR1)
    else:
        _send_signal(launchers, signal.SIGTERM)


def _find_ranks(words: Sequence[str], status_file: str) -> list[psutil.Process]:
    """Return the run's ranks on this machine, also those in sessions of their own (MPICH's, and those started through
    ssh): processes with a local rank, with these last words and this status file, whose parent is no rank.
    """
    parent_of_rank = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.cmdline()[-len(words) :] == list(words) and process.status() != psutil.STATUS_ZOMBIE:
                environ = process.environ()
                if _LOCAL_RANK_NAMES & environ.keys() and status_file in environ.get(STATUS_VARIABLE, ""):
                    parent_of_rank[process.pid] = process.ppid()
    return [
        psutil.Process(pid)
        for pid, parent in parent_of_rank.items()
        if parent not in parent_of_rank and psutil.pid_exists(pid)
    ]


def last_line(text: str) -> str:
    """Return the last line of what a program printed, "?" if it printed nothing."""
    lines = [line for line in text.splitlines() if line.strip()] or ["?"]
    return lines[-1]
