"""An agent on each machine, spoken to through ssh, or directly on this one; all at once, each with its time limit."""

import json
import os
import queue
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import IO, Any

from toolkit.doctor.agent import MARK
from toolkit.messages import tr

NO_FOLDER = 121
_AGENT = ("-m", "toolkit", "doctor", "--agent")
_SSH_S = 10


class Host:
    """One machine.

    Args:
        name: as the hostfile has it.
        port: of its sshd; "" for ssh's own.
        through_ssh: False for this machine itself.
    """

    def __init__(self, name: str, port: str, through_ssh: bool) -> None:
        self.name = name
        command = [sys.executable, *_AGENT]
        if through_ssh:
            folder = shlex.quote(os.getcwd())
            # As DeepSpeed's launcher starts ranks: the same folder, the same Python, the folder on its path.
            inside = f"cd {folder} || exit {NO_FOLDER}; PYTHONPATH={folder} exec {shlex.join(command)}"
            options = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={_SSH_S}", *(["-p", port] if port else [])]
            command = ["ssh", *options, name, inside]
        self.answers: queue.Queue[str] = queue.Queue()
        self.complaints: list[str] = []
        self.process = subprocess.Popen(  # noqa: S603 -- the name has passed hostfile.HOST
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,  # an interrupt is for this process, which then ends them
        )
        streams = ((self.process.stdout, self.answers.put), (self.process.stderr, self.complaints.append))
        self.pumps = [threading.Thread(target=_pump, args=one, daemon=True) for one in streams]
        for pump in self.pumps:
            pump.start()

    def ask(self, verb: str, limit_s: float, **arguments: Any) -> dict[str, Any]:
        """Return what the machine answers, or {"error": why it does not}."""
        with suppress(OSError):
            assert self.process.stdin
            self.process.stdin.write(json.dumps({"do": verb, **arguments}) + "\n")
            self.process.stdin.flush()
        until = time.monotonic() + limit_s
        while (left := until - time.monotonic()) > 0:
            with suppress(queue.Empty):
                line = self.answers.get(timeout=min(left, 0.1))
                if line.startswith(MARK):
                    return dict(json.loads(line.removeprefix(MARK)))
                continue
            if self.process.poll() is not None and self.answers.empty():
                return {"error": self._last_words()}
        return {"error": tr("no answer in {seconds} s", seconds=f"{limit_s:.0f}")}

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

    def kill(self) -> None:
        """End what is still there."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=1)
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for pump in self.pumps:
            pump.join(timeout=1)  # longer only if something that it has started still writes


class Hosts:
    """All machines.

    Args:
        names: as the hostfile has them.
        port: of their sshd.
        through_ssh: False for this machine alone.
    """

    def __init__(self, names: Iterable[str], port: str, through_ssh: bool) -> None:
        self.hosts = {name: Host(name, port, through_ssh) for name in names}
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

    def __exit__(self, *_: object) -> None:
        for host in self.hosts.values():
            host.close()
        for host in self.hosts.values():
            host.kill()
        self.pool.shutdown(wait=False, cancel_futures=True)


def _pump(stream: IO[str], take: Callable[[str], None]) -> None:
    with stream:
        for line in stream:
            take(line)
