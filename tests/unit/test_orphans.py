"""A rank ends with its launcher, also while it imports, and if the launcher has died before its first line."""

import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from toolkit.launch import orphans

ROOT = Path(__file__).parents[2]
RANK = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
LAUNCHERS = {"deepspeed": {"CROSS_SIZE": "1"}, "torchrun": {"TORCHELASTIC_RUN_ID": "x"}}
STARTER = """
import json, os, subprocess, sys, time
from pathlib import Path
commands, folder = json.loads(sys.argv[1]), Path(sys.argv[2])
Path(folder, f"starter-{len(commands)}").write_text(str(os.getpid()))
while Path(folder, f"wait-{len(commands)}").exists():
    time.sleep(0.05)
command = [sys.executable, "-c", sys.argv[3], json.dumps(commands[1:]), str(folder), sys.argv[3], *commands[0]] \\
    if len(commands) > 1 else commands[0]
child = subprocess.Popen(command)
child.wait()
"""
RANK_PROGRAM = """
import os, sys, time
from pathlib import Path
folder, parent = Path(sys.argv[1]), os.getppid()
(folder / "rank").write_text(str(os.getpid()))
while (folder / "late").exists() and os.getppid() == parent:
    time.sleep(0.05)
class Slow:
    def find_spec(self, name, path, target=None):
        if name in ("torch", "hydra"):
            (folder / "imports").touch()
            time.sleep(300)
sys.meta_path.insert(0, Slow())
try:
    if sys.argv[2] == "import":
        import toolkit.custom
    from toolkit.cli import main
    code = main(["train", "recipe=quickstart"])
except SystemExit as end:
    code = end.code
(folder / "code").write_text(str(code))
"""


def read(file: Path) -> int:
    """Return the number in a file, when it is there."""
    until = time.monotonic() + 60
    while not file.exists() or not file.read_text():
        assert time.monotonic() < until, f"no {file.name}"
        time.sleep(0.05)
    return int(file.read_text())


def wait_until_gone(pid: int) -> None:
    until = time.monotonic() + 60
    with contextlib.suppress(psutil.NoSuchProcess):
        while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < until, "still there"
            time.sleep(0.05)


@pytest.fixture
def started(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """Start a front end, its launcher and a rank that imports for ever, or begins late."""
    launcher, is_late, does = (*request.param, "train")[:3]
    if is_late:
        (tmp_path / "late").touch()
    rank = [sys.executable, "-c", RANK_PROGRAM, str(tmp_path), does]
    commands = [["deepspeed.launcher.launch"], rank]
    environ = {name: value for name, value in os.environ.items() if name not in ("TORCHELASTIC_RUN_ID", "CROSS_SIZE")}
    log = (tmp_path / "log").open("w")
    front_end = subprocess.Popen(
        [sys.executable, "-c", STARTER, json.dumps(commands), str(tmp_path), STARTER],
        cwd=ROOT,
        env={**environ, **RANK, **LAUNCHERS[launcher], "LANG": "C.UTF-8"},
        stdout=log,
        stderr=log,
        start_new_session=True,
    )
    yield tmp_path, launcher
    front_end.kill()
    front_end.wait()
    log.close()
    for name in ("starter-1", "rank"):
        if (tmp_path / name).exists():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int((tmp_path / name).read_text()), signal.SIGKILL)


WHILE_IMPORTING = [("deepspeed", False), ("torchrun", False), ("torchrun", False, "import")]


@pytest.mark.parametrize("started", WHILE_IMPORTING, indirect=True)
def test_a_rank_that_imports_ends_with_its_launcher(started: tuple[Path, str]) -> None:
    folder, _ = started
    rank = read(folder / "rank")
    while not (folder / "imports").exists():
        time.sleep(0.05)
    os.kill(read(folder / "starter-1"), signal.SIGKILL)
    wait_until_gone(rank)


@pytest.mark.parametrize("started", [("deepspeed", False)], indirect=True)
def test_a_rank_that_imports_ends_with_its_front_end(started: tuple[Path, str]) -> None:
    folder, _ = started
    rank = read(folder / "rank")
    while not (folder / "imports").exists():
        time.sleep(0.05)
    os.kill(read(folder / "starter-2"), signal.SIGKILL)
    wait_until_gone(rank)


@pytest.mark.parametrize(
    "started", [("deepspeed", True), ("torchrun", True), ("torchrun", True, "import")], indirect=True
)
def test_a_rank_whose_launcher_died_first_does_not_begin(started: tuple[Path, str]) -> None:
    folder, launcher = started
    read(folder / "rank")
    os.kill(read(folder / "starter-1"), signal.SIGKILL)
    assert read(folder / "code") == 1
    assert f"rank 0 ends: what started it ({launcher}) has been killed." in (folder / "log").read_text()
    assert not (folder / "imports").exists()


@pytest.mark.parametrize("started", [("deepspeed", True)], indirect=True)
def test_a_rank_whose_front_end_died_first_does_not_begin(started: tuple[Path, str]) -> None:
    folder, _ = started
    read(folder / "rank")
    os.kill(read(folder / "starter-2"), signal.SIGKILL)
    launcher = read(folder / "starter-1")
    while psutil.Process(launcher).ppid() != 1:
        time.sleep(0.05)
    (folder / "late").unlink()
    assert read(folder / "code") == 1


# name and words of the parent; its number, session; the process's session (7 is itself); taken over: a rank, a launcher
FAMILIES = [
    ("systemd", "/sbin/init", 1, 1, 50, (True, True)),
    ("systemd", "/lib/systemd/systemd --user", 300, 300, 50, (True, True)),
    ("tini", "tini -- bash job.sh", 1, 1, 50, (True, True)),
    ("sleep", "sleep infinity", 1, 1, 50, (True, True)),
    ("tini", "tini -- python -m deepspeed.launcher.launch", 1, 1, 1, (True, False)),
    ("systemd", "/sbin/init", 1, 1, 7, (True, False)),  # a service
    ("torchrun", "/usr/bin/python3 /usr/bin/torchrun run.py", 1, 1, 7, (False, False)),  # what a container runs
    ("deepspeed", "/opt/bin/deepspeed run.py", 1, 1, 1, (False, False)),
    ("python3", "python3 -u -m deepspeed.launcher.launch", 40, 30, 30, (False, False)),
    ("bash", "bash wrapper.sh", 40, 30, 30, (False, False)),
    ("", "", 0, 0, 7, (False, False)),  # docker exec
    ("mpirun", "mpirun -n 2 python run.py", 1, 1, 1, (False, False)),
]


@pytest.mark.parametrize(("name", "words", "pid", "session", "own", "taken"), FAMILIES)
def test_who_may_be_the_parent(
    name: str, words: str, pid: int, session: int, own: int, taken: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    parent = SimpleNamespace(pid=pid, name=lambda: name, cmdline=words.split) if name else None
    process: Any = SimpleNamespace(pid=7, parent=lambda: parent)
    monkeypatch.setattr(os, "getsid", {7: own, pid: session}.__getitem__)
    assert (orphans.is_orphaned(process, is_rank=True), orphans.is_orphaned(process, is_rank=False)) == taken


KILLED = """
import multiprocessing, os, signal, time
from toolkit import children
child = multiprocessing.get_context("spawn").Process(target=children.ending_with_this("time", "sleep"), args=(600,))
if __name__ == "__main__":
    child.start()
    print(child.pid, flush=True)
    time.sleep(600)
"""


def test_a_process_of_deepspeeds_optimizers_ends_with_a_rank_that_is_killed(tmp_path: Path) -> None:
    """Python ends its own at its exit, which a signal does without."""
    from deepspeed.runtime.superoffload import superoffload_utils
    from deepspeed.runtime.zenflow import zenflow_utils

    from toolkit.engine import deepspeed_patches

    deepspeed_patches.end_optimizer_processes_with_rank()
    for one in (zenflow_utils.zenflow_optimizer_process, superoffload_utils.superoffload_optimizer_worker):
        assert pickle.loads(pickle.dumps(one)).args == one.args, "multiprocessing sends it so"
    script = tmp_path / "rank.py"
    script.write_text(KILLED)
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=environ) as rank:
        assert rank.stdout is not None
        pid = int(rank.stdout.readline())
        rank.kill()
    until = time.monotonic() + 60
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < until, os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
