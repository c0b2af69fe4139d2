"""Start real ranks under real launchers, with a timeout, and clean up after them."""

import atexit
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from fork_ranks import PIDS

from toolkit.children import end_with_parent
from toolkit.launch.environment import free_port

REPOSITORY = Path(__file__).parents[2]
FORK = str(Path(__file__).parent / "fork_ranks.py")
BIN = Path(sys.executable).parent
TIMEOUT_S = 240


@dataclass(frozen=True)
class Finished:
    """A command that has ended."""

    code: int
    output: str
    """stdout and stderr as they came, interleaved."""


def deepspeed(num_ranks: int, *words: str) -> list[str]:
    """Return the command that starts `words` on `num_ranks` ranks of this machine."""
    return [str(BIN / "deepspeed"), "--num_gpus", str(num_ranks), "--master_port", str(free_port()), *words]


def forked(num_ranks: int, *words: str) -> list[str]:
    """Return the command that does that with a tenth of the start-up work; 0 ranks: the program under no launcher.

    What is read from the environment as modules are imported has no effect, and sets of strings are in the same order
    on all ranks: where that matters, `deepspeed` or `run_unlike`.
    """
    return [sys.executable, FORK, _server(), str(num_ranks), str(free_port()), *words]


@cache
def _server() -> str:
    """Start what all forked ranks are forks of; return its socket."""
    folder = tempfile.TemporaryDirectory(prefix="ranks-")
    path = f"{folder.name}/socket"
    command = [sys.executable, "-u", FORK, path]
    # Pipes, as forks write to; what Python believes of its standard output it believes for ever.
    process = subprocess.Popen(
        command,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        preexec_fn=end_with_parent,
    )
    atexit.register(folder.cleanup)
    atexit.register(process.wait)
    atexit.register(process.terminate)
    while not Path(path).exists():
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)
    return path


def environment(**extra: str) -> dict[str, str]:
    """Return the environment of a launch: CPU ranks, one thread each, this interpreter's scripts first."""
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    env |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "LANG": "C.UTF-8", "PYTHONPATH": str(REPOSITORY)}
    env["PATH"] = f"{BIN}{os.pathsep}{env['PATH']}"
    return env | extra


def start(command: Sequence[str], cwd: Path, **extra: str) -> "subprocess.Popen[str]":
    """Start a command in a session of its own, so that `kill_session` reaches all its ranks. It listens to signals also
    where the tests do not: under nohup, or in the background of a shell.
    """

    def listen() -> None:
        for number in (signal.SIGHUP, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)

    return subprocess.Popen(
        command,
        cwd=cwd,
        env=environment(**extra),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
        preexec_fn=listen,
    )


def kill_session(process: "subprocess.Popen[str]") -> None:
    """Kill whatever is left of a command's session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def run(command: Sequence[str], cwd: Path, timeout_s: float = TIMEOUT_S, **extra: str) -> Finished:
    """Run a command to its end."""
    process = start(command, cwd, **extra)
    try:
        output, _ = process.communicate(timeout=timeout_s)
    finally:
        kill_session(process)
    return Finished(process.returncode, output)


def run_unlike(cwd: Path, *words: str, timeout_s: float = TIMEOUT_S) -> Finished:
    """Run a program to its end on two ranks whose sets of strings are in other orders: a fork, and an interpreter of
    its own.
    """
    group = {"WORLD_SIZE": "2", "LOCAL_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    commands = forked(0, *words), [sys.executable, *words]
    processes = [
        start(command, cwd, RANK=str(rank), LOCAL_RANK=str(rank), **group) for rank, command in enumerate(commands)
    ]
    try:
        with ThreadPoolExecutor(len(processes)) as pool:
            outputs = list(pool.map(lambda process: process.communicate(timeout=timeout_s)[0], processes))
    finally:
        for process in processes:
            kill_session(process)
    return Finished(next((one.returncode for one in processes if one.returncode), 0), "".join(outputs))


def alive(marker: str) -> list[int]:
    """Return the processes whose command line holds a text."""
    found = [int(file.name) for file in _forks() if marker in file.read_text() and _runs(int(file.name))]
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal() and int(folder.name) != os.getpid():
            try:
                line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if marker in line and _runs(int(folder.name)):
                found.append(int(folder.name))
    return found


def _forks() -> list[Path]:
    """Return a file with the words of each process that was ever forked; each has the words of the server in /proc."""
    return list(Path(_server() + PIDS).iterdir()) if _server.cache_info().currsize else []


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def gone(marker: str, within_s: float) -> float:
    """Wait until no process is left; return the seconds that took."""
    started = time.monotonic()
    while alive(marker):
        assert time.monotonic() - started < within_s, f"still there after {within_s} s"
        time.sleep(0.2)
    return time.monotonic() - started


def wait_for(condition: Callable[[], object], within_s: float = 120) -> None:
    """Wait until something is so."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < within_s
        time.sleep(0.1)
