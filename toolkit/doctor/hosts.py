"""An agent on each machine, spoken to through ssh, or directly on this one; all at once, each with its time limit."""

import json
import os
import queue
import resource
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Any

from toolkit import children
from toolkit.doctor.agent import MARK
from toolkit.errors import LaunchError
from toolkit.launch.env_vars import PACKED
from toolkit.messages import tr

NO_FOLDER = 121
_AGENT = ("-m", "toolkit", "doctor", "--agent")
_SSH_S = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How ranks are started on machines, as far as it matters who is to see what they will see."""

    through_ssh: bool
    """False for this machine itself."""
    arguments: Sequence[str] = ()
    """Of ssh, before all others: the first counts."""
    script: str = ""
    """Sourced before Python starts."""


class Host:
    """One machine.

    Args:
        name: as the hostfile has it.
        way: to it.
    """

    def __init__(self, name: str, way: Way) -> None:
        self.name = name
        command = [sys.executable, *_AGENT]
        if way.through_ssh:
            # As DeepSpeed's launcher starts ranks (0.19.8, PDSHRunner): the same folder, first on the path of the same
            # Python. Other variables are sent later, where no list of processes shows them.
            folder = os.getcwd()
            path = os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH")])])
            source = f"source {shlex.quote(way.script)}; " if way.script else ""
            inside = f"{source}cd {shlex.quote(folder)} || exit {NO_FOLDER}; PYTHONPATH={shlex.quote(path)} exec "
            options = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={_SSH_S}", "-o", f"SendEnv={PACKED}"]
            command = ["ssh", *way.arguments, *options, name, inside + shlex.join(command)]
        self.answers: queue.Queue[str] = queue.Queue()
        self.complaints: list[str] = []
        self.process = children.start(
            command,
            ends_with_input=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env={**os.environ, PACKED: "{}"},
            start_new_session=True,  # an interrupt is for this process, which then ends them
        )
        streams = ((self.process.stdout, self.answers.put), (self.process.stderr, self.complaints.append))
        self.pumps = [threading.Thread(target=_pump, args=one, daemon=True) for one in streams]
        for pump in self.pumps:
            pump.start()

    def ask(self, verb: str, limit_s: float, **arguments: Any) -> dict[str, Any]:
        """Return what the machine answers, or {"error": why it does not}, with "late" where it may still do so."""
        with suppress(OSError):
            assert self.process.stdin
            self.process.stdin.write(json.dumps({"do": verb, **arguments}) + "\n")
            self.process.stdin.flush()
        until = time.monotonic() + limit_s
        while (left := until - time.monotonic()) > 0:
            with suppress(queue.Empty):
                line = self.answers.get(timeout=min(left, 0.1))
                if MARK in line:  # behind a greeting without an end of line, perhaps
                    return dict(json.loads(line.partition(MARK)[2]))
                continue
            if self.process.poll() is not None and self.answers.empty():
                return {"error": self._last_words()}
        return {"error": tr("no answer in {seconds} s", seconds=f"{limit_s:.0f}"), "late": True}

    def _last_words(self) -> str:
        time.sleep(0.1)  # for the thread that reads them
        if self.process.returncode == NO_FOLDER:
            return tr("there is no folder {folder}", folder=os.getcwd())
        said = [line.strip() for line in self.complaints if line.strip()]
        return said[-1] if said else tr("ended with code {code}", code=self.process.returncode)

    def close(self) -> None:
        """Let the agent end: its input does."""
        with suppress(OSError):
            assert self.process.stdin
            self.process.stdin.close()

    def kill(self, until: float) -> None:
        """End what is still there at a time of time.monotonic()."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=max(0.0, until - time.monotonic()))
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for pump in self.pumps:
            pump.join(timeout=max(0.0, until + 1 - time.monotonic()))


class Hosts:
    """All machines.

    Args:
        names: as the hostfile has them.
        way: to them.

    Raises:
        LaunchError: there is no ssh here, or too few files may be open.
    """

    def __init__(self, names: Sequence[str], way: Way) -> None:
        self.hosts: dict[str, Host] = {}
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        needed = 100 + 8 * len(names)
        if soft < needed and (hard == resource.RLIM_INFINITY or hard >= needed):
            resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
        try:
            for name in names:
                self.hosts[name] = Host(name, way)
        except OSError as error:
            self.close()
            raise LaunchError(
                tr("cannot start {program}: {reason}.", program="ssh", reason=error.strerror or error)
            ) from error
        self.pool = ThreadPoolExecutor(max_workers=max(1, len(self.hosts)))

    def ask(self, verb: str, limit_s: float, requests: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        """Ask several at once.

        Args:
            verb: what is asked.
            limit_s: for each.
            requests: host -> arguments.
        """
        asked = {
            name: self.pool.submit(self.hosts[name].ask, verb, limit_s, **arguments)
            for name, arguments in requests.items()
        }
        return {name: future.result() for name, future in asked.items()}

    def __enter__(self) -> "Hosts":
        return self

    def close(self) -> None:
        """Let all agents end, and end those that do not."""
        for host in self.hosts.values():
            host.close()
        until = time.monotonic() + 2
        for host in self.hosts.values():
            host.kill(until)

    def __exit__(self, *_: object) -> None:
        self.close()
        self.pool.shutdown(wait=False, cancel_futures=True)


def _pump(stream: IO[str], take: Callable[[str], None]) -> None:
    with stream:
        for line in stream:
            take(line)
