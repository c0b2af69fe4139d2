"""What runs on each machine: reads requests as JSON lines, answers with JSON lines, ends with its input."""

import json
import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from toolkit import children
from toolkit.config import variables
from toolkit.config.schema import RunConfig
from toolkit.doctor import facts, network
from toolkit.errors import ToolkitError
from toolkit.launch.env_vars import PACKED
from toolkit.messages import set_language, tr

MARK = "toolkit-doctor "
"""Begins each answer: what a shell greets with is none."""


class Agent:
    """One machine's.

    Args:
        compose: makes a config of recipe and overrides.
    """

    def __init__(self, compose: Callable[[Sequence[str]], RunConfig]) -> None:
        self.compose = compose
        self.listener: network.Listener | None = None
        self.marks: list[Path] = []

    def facts(self, words: Sequence[str], language: str, environ: Mapping[str, str]) -> dict[str, Any]:
        """Return everything that can be told without the other machines, with the variables that ranks will have."""
        set_language(language)
        os.environ.update(environ)
        takes = {"takes_secrets": os.environ.pop(PACKED, None) is not None}
        if not words:
            return {**facts.of_machine(os.environ), **takes}
        try:
            cfg = self.compose(words)
        except ToolkitError as error:
            return {**facts.of_machine(os.environ), **takes, "wrong": str(error)}
        os.environ.update(variables.values(cfg.launch.env))
        return {**facts.of_machine(os.environ), **takes, **facts.of_recipe(cfg, os.environ)}

    def clock(self) -> dict[str, Any]:
        """Return this machine's time."""
        return {"time": time.time()}

    def listen(self, address: str, port: int, folders: Mapping[str, str]) -> dict[str, Any]:
        """Answer the others from now on; put a file into the folders that they may share with this machine."""
        found: dict[str, Any] = {"marks": {}}
        for name, folder in folders.items():
            mark = facts.nearest(Path(folder)) / f".doctor-{uuid.uuid4().hex}"
            with suppress(OSError):
                mark.touch()
                self.marks.append(mark)
                found["marks"][name] = str(mark)
        try:
            self.listener = network.Listener(address, port)
        except OSError as error:
            return {**found, "error": error.strerror or str(error)}
        return {**found, "address": address, "tcp": self.listener.tcp, "udp": self.listener.udp}

    def reach(self, address: str, mtu: int, peers: Mapping[str, Any], marks: Mapping[str, str]) -> dict[str, Any]:
        """Try the others, and look for their files."""
        shared = {name: Path(mark).exists() for name, mark in marks.items()}
        return {"peers": network.reach(address, mtu, peers), "shared": shared}

    def speed(self, address: str, peer: Mapping[str, Any]) -> dict[str, Any]:
        """Measure how fast another machine sends to this one."""
        return {"mb_s": network.speed(address, peer)}

    def collective(self, environments: Sequence[Mapping[str, str]], backend: str, seconds: float) -> dict[str, Any]:
        """Start this machine's ranks of a real all-reduce, and return what each of them told before the time was up."""
        self.close()  # the ranks meet at the port
        until = time.monotonic() + seconds
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            ranks = []
            for number, environ in enumerate(environments):
                # NCCL writes to stdout what it is told to by NCCL_DEBUG, so that the answer has a file of its own.
                answer, log = Path(folder, f"{number}.json"), Path(folder, f"{number}.log")
                out = stack.enter_context(log.open("wb"))
                command = [sys.executable, "-m", "toolkit.doctor.collective", backend, str(seconds), str(answer)]
                rank = children.start(
                    command, env={**os.environ, **environ}, stdout=out, stderr=out, stdin=subprocess.DEVNULL
                )
                stack.callback(_end, rank)
                ranks.append((rank, answer, log))
            return {"ranks": [_told(*rank, until, seconds) for rank in ranks]}

    def close(self) -> None:
        """Leave nothing behind."""
        if self.listener:
            self.listener.close()
        for mark in self.marks:
            mark.unlink(missing_ok=True)
        self.marks.clear()


def _told(rank: "subprocess.Popen[bytes]", answer: Path, log: Path, until: float, seconds: float) -> dict[str, Any]:
    """Return what a rank has written, or the last thing that it has said."""
    with suppress(subprocess.TimeoutExpired):
        rank.wait(timeout=max(0.0, until - time.monotonic()))
    if answer.exists():
        return dict(json.loads(answer.read_text(encoding="utf-8")))
    if rank.poll() is None:
        return {"error": tr("no answer in {seconds} s", seconds=f"{seconds:.0f}")}
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return {"error": lines[-1] if lines else tr("ended with code {code}", code=rank.returncode)}


def _end(rank: "subprocess.Popen[bytes]") -> None:
    rank.kill()
    rank.wait()


def serve(compose: Callable[[Sequence[str]], RunConfig]) -> None:
    """Answer until the input ends.

    Args:
        compose: makes a config of recipe and overrides.
    """
    agent = Agent(compose)
    verbs = (agent.facts, agent.clock, agent.listen, agent.reach, agent.speed, agent.collective)
    named = {verb.__name__: verb for verb in verbs}
    try:
        for line in sys.stdin:
            request = json.loads(line)
            answer = named[request.pop("do")](**request)
            sys.stdout.write("\n" + MARK + json.dumps(answer) + "\n")
            sys.stdout.flush()
    finally:
        agent.close()
