"""An agent on each machine, through ssh or on this one: JSON lines in and out until its input ends, in time limits."""

import json
import os
import queue
import resource
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from toolkit import children
from toolkit.config.schema import RunConfig
from toolkit.extras.doctor import facts
from toolkit.launch.variables import PACKED
from toolkit.messages import LaunchError, ToolkitError, set_language, tr

MARK = "toolkit-doctor "
"""Begins each answer: what a shell greets with is none."""


class Agent:
    """Answers the requests of `serve` on one machine. `compose`: recipe and overrides -> config."""

    def __init__(self, compose: Callable[[Sequence[str]], RunConfig]) -> None:
        self.compose = compose
        self.listener: facts.Listener | None = None
        self.marks: list[Path] = []

    def facts(self, words: Sequence[str], language: str, environ: Mapping[str, str]) -> dict[str, Any]:
        """Return everything that can be told without the other machines, merged into one dict: `facts.of_machine`;
        `takes_secrets`, whether sshd here accepted the variable that carries secrets; and with a recipe
        `facts.of_recipe`, or the recipe's error as `wrong`. `words`: recipe and overrides, [] for none; `environ`: the
        variables that ranks will have.
        """
        set_language(language)
        # For what is looked for below, and for the ranks that `collective` starts.
        os.environ.update(environ)
        takes_secrets = os.environ.pop(PACKED, None) is not None  # `Host` lets ssh send it, without any secret in it
        of_recipe: dict[str, Any] = {}
        if words:
            try:
                cfg = self.compose(words)
                os.environ.update(cfg.launch.values)
                of_recipe = facts.of_recipe(cfg, os.environ)
            except ToolkitError as error:
                of_recipe = {"wrong": str(error)}
        return {**facts.of_machine(os.environ), "takes_secrets": takes_secrets, **of_recipe}

    def listen(self, address: str, port: int, folders: Mapping[str, str]) -> dict[str, Any]:
        """Answer the others from now on; put a file into the `folders` (setting -> directory) that they may share with
        this machine. `port`: where ranks meet, 0 for none. Return `address`, and the ports `tcp` and `udp` there, or an
        `error`; and `marks`: setting -> file.
        """
        answer: dict[str, Any] = {"marks": {}}
        for name, folder in folders.items():
            mark = facts.nearest(Path(folder)) / f".doctor-{uuid.uuid4().hex}"
            with suppress(OSError):
                mark.touch()
                self.marks.append(mark)
                answer["marks"][name] = str(mark)
        try:
            self.listener = facts.Listener(address, port)
        except OSError as error:
            return {**answer, "error": error.strerror or str(error)}
        return {**answer, "address": address, "tcp": self.listener.tcp, "udp": self.listener.udp}

    def collective(self, environments: Sequence[Mapping[str, str]], backend: str, seconds: float) -> dict[str, Any]:
        """Start this machine's ranks of a real all-reduce, one for each of `environments`; return as `ranks`, in the
        same order, what each has told (see `_answer_of_rank`) before so many seconds were over.
        """
        self.close()  # rank 0 needs the port at which `listen` answers
        until = time.monotonic() + seconds
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            ranks = []
            for number, environ in enumerate(environments):
                # NCCL writes to stdout what it is told to by NCCL_DEBUG, so that the answer has a file of its own.
                answer, log = Path(folder, f"{number}.json"), Path(folder, f"{number}.log")
                out = stack.enter_context(log.open("wb"))
                command = [sys.executable, "-m", "toolkit.extras.doctor.collective", backend, str(seconds), str(answer)]
                rank = children.start(
                    command, env={**os.environ, **environ}, stdout=out, stderr=out, stdin=subprocess.DEVNULL
                )
                stack.callback(rank.wait)  # callbacks run in reverse order: a rank is killed, then waited for
                stack.callback(rank.kill)
                ranks.append((rank, answer, log))
            return {"ranks": [_answer_of_rank(rank, answer, log, until, seconds) for rank, answer, log in ranks]}

    def close(self) -> None:
        """Stop listening, and remove the files that `listen` has made."""
        if self.listener:
            self.listener.close()
        for mark in self.marks:
            mark.unlink(missing_ok=True)
        self.marks.clear()


def _answer_of_rank(
    rank: "subprocess.Popen[bytes]", answer: Path, log: Path, until: float, seconds: float
) -> dict[str, Any]:
    """Wait for a rank `until` a time of time.monotonic(); return what it has written to `answer`, else {"error": …}:
    that it did not answer in `seconds`, or, if it has ended, the last line of its log.
    """
    with suppress(subprocess.TimeoutExpired):
        rank.wait(timeout=max(0.0, until - time.monotonic()))
    if answer.exists():
        return dict(json.loads(answer.read_text(encoding="utf-8")))
    if rank.poll() is None:
        return {"error": tr("no answer in {seconds} s", seconds=f"{seconds:.0f}")}
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return {"error": lines[-1] if lines else tr("ended with code {code}", code=rank.returncode)}


def serve(compose: Callable[[Sequence[str]], RunConfig]) -> None:
    """Answer the requests on standard input, {"do": VERB, …its arguments} as JSON in a line each, until it ends."""
    agent = Agent(compose)
    verbs: dict[str, Callable[..., dict[str, Any]]] = {
        "facts": agent.facts,
        "clock": lambda: {"time": time.time()},
        "listen": agent.listen,
        # Try the others, and look for their files.
        "reach": lambda marks, **arguments: {
            "peers": facts.can_connect(**arguments),
            "shared": {name: Path(mark).exists() for name, mark in marks.items()},
        },
        "speed": lambda **arguments: {"mb_s": facts.link_speed(**arguments)},
        "collective": agent.collective,
    }
    try:
        for line in sys.stdin:
            request = json.loads(line)
            answer = verbs[request.pop("do")](**request)
            sys.stdout.write("\n" + MARK + json.dumps(answer) + "\n")
            sys.stdout.flush()
    finally:
        agent.close()


NO_FOLDER = 121
_AGENT = ("-m", "toolkit", "doctor", "--agent")
_SSH_S = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class SshOptions:
    """How ranks are started on machines, as far as it matters who is to see what they will see."""

    through_ssh: bool
    """False for this machine itself."""
    arguments: Sequence[str] = ()
    """Of ssh, before all others: the first counts."""
    script: str = ""
    """Sourced before Python starts."""


class Host:
    """One node, with an agent on it, started through ssh or here."""

    def __init__(self, name: str, ssh: SshOptions) -> None:
        """Start the agent, and a thread each that reads its answers (stdout) and its complaints (stderr)."""
        command = [sys.executable, *_AGENT]
        self.answers: queue.Queue[str] = queue.Queue()
        self.complaints: list[str] = []
        self.process = children.start(
            _through_ssh(command, name, ssh) if ssh.through_ssh else command,
            ends_with_input=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env={**os.environ, PACKED: "{}"},  # no secrets: the agent tells whether the variable arrived
            start_new_session=True,  # an interrupt is for this process, which then ends them
        )
        streams = ((self.process.stdout, self.answers.put), (self.process.stderr, self.complaints.append))
        self.pumps = [threading.Thread(target=_pump, args=stream, daemon=True) for stream in streams]
        for pump in self.pumps:
            pump.start()

    def ask(self, verb: str, limit_s: float, **arguments: Any) -> dict[str, Any]:
        """Return what the machine answers to a request of `serve` within `limit_s`, or {"error": why it does not}, with
        "late" where it may still do so.
        """
        with suppress(OSError):
            assert self.process.stdin
            self.process.stdin.write(json.dumps({"do": verb, **arguments}) + "\n")
            self.process.stdin.flush()
        until = time.monotonic() + limit_s
        while (left := until - time.monotonic()) > 0:
            try:
                line = self.answers.get(timeout=min(left, 0.1))
            except queue.Empty:
                if self.process.poll() is not None and self.answers.empty():
                    return {"error": self._why_ended()}
                continue
            if MARK in line:  # behind a greeting without an end of line, perhaps
                return dict(json.loads(line.partition(MARK)[2]))
        return {"error": tr("no answer in {seconds} s", seconds=f"{limit_s:.0f}"), "late": True}

    def _why_ended(self) -> str:
        """Return why an agent that has ended did so: its last line on stderr, if it wrote any."""
        time.sleep(0.1)  # for the thread that reads what it said last
        if self.process.returncode == NO_FOLDER:
            return tr("there is no directory {folder}", folder=os.getcwd())
        complaints = [line.strip() for line in self.complaints if line.strip()]
        ended = tr("ended with code {code}", code=self.process.returncode)
        return complaints[-1] if complaints else ended

    def kill(self, until: float) -> None:
        """Wait for the agent to end `until` a time of time.monotonic(), then kill it."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=max(0.0, until - time.monotonic()))
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for pump in self.pumps:  # not for ever: a process that an agent has left behind holds its output open
            pump.join(timeout=max(0.0, until + 1 - time.monotonic()))


def _through_ssh(command: Sequence[str], host: str, ssh: SshOptions) -> list[str]:
    """Return the command that starts `command` on a host as DeepSpeed's launcher starts ranks (0.19.8, PDSHRunner): in
    this folder, which is first on Python's path. Other variables are sent later, where no list of processes shows them.
    """
    folder = os.getcwd()
    python_path = os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH")])])
    source = f"source {shlex.quote(ssh.script)}; " if ssh.script else ""
    # What a shell on the host does before it becomes `command`.
    before = f"{source}cd {shlex.quote(folder)} || exit {NO_FOLDER}; PYTHONPATH={shlex.quote(python_path)} exec "
    options = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={_SSH_S}", "-o", f"SendEnv={PACKED}"]
    return ["ssh", *ssh.arguments, *options, host, before + shlex.join(command)]


class Hosts:
    """All nodes; a LaunchError if there is no ssh here, or too few files may be open."""

    def __init__(self, names: Sequence[str], ssh: SshOptions) -> None:
        self.hosts: dict[str, Host] = {}
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        needed = 100 + 8 * len(names)  # each agent's three pipes, both ends while it starts, and some to spare
        can_raise = hard == resource.RLIM_INFINITY or hard >= needed
        if soft < needed and can_raise:
            resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
        try:
            for name in names:
                self.hosts[name] = Host(name, ssh)
        except OSError as error:
            self.close()
            raise LaunchError(
                "cannot start {program}: {reason}.", program="ssh", reason=error.strerror or error
            ) from error
        self.pool = ThreadPoolExecutor(max_workers=max(1, len(self.hosts)))

    def ask(self, verb: str, limit_s: float, requests: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        """Ask several at once, `requests`: host -> arguments of the `verb`; return host -> answer, as of `Host.ask`."""
        asked = {
            name: self.pool.submit(self.hosts[name].ask, verb, limit_s, **arguments)
            for name, arguments in requests.items()
        }
        return {name: future.result() for name, future in asked.items()}

    def __enter__(self) -> "Hosts":
        return self

    def close(self) -> None:
        """Let all agents end, and end those that do not."""
        for host in self.hosts.values():  # an agent ends with its input
            with suppress(OSError):
                assert host.process.stdin
                host.process.stdin.close()
        until = time.monotonic() + 2
        for host in self.hosts.values():
            host.kill(until)

    def __exit__(self, *_: object) -> None:
        self.close()
        self.pool.shutdown(wait=False, cancel_futures=True)


def _pump(stream: IO[str], take: Callable[[str], None]) -> None:
    """Hand each line of a stream to `take` until it ends: a pipe that is not read would block the agent."""
    with stream:
        for line in stream:
            take(line)
