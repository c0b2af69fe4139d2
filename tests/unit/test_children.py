"""No process outlives the one that started it, however that ends; and there is one place that starts processes."""

import ast
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from toolkit import children

ROOT = Path(__file__).parents[2]
STARTS = {
    *("subprocess.run", "subprocess.Popen", "subprocess.call", "subprocess.check_call", "subprocess.check_output"),
    *("psutil.Popen", "os.system", "os.popen", "os.fork", "os.forkpty", "os.posix_spawn", "pty.fork", "Popen"),
    *("ProcessPoolExecutor", "get_context", "multiprocessing.get_context", "multiprocessing.Process"),
}


def names_called(path: Path) -> set[str]:
    """Return what a file calls, as dotted names."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            found.add(ast.unparse(node.func))
    return found


FILES = sorted([*(ROOT / "toolkit").rglob("*.py"), *(ROOT / "benchmarks").glob("*.py")])


def test_processes_are_started_in_one_place() -> None:
    others = [path for path in FILES if path.name not in ("children.py", "subreaper.py")]
    assert [path for path in others if names_called(path) & STARTS] == [], "use toolkit.children"


def test_no_python_runs_between_fork_and_exec() -> None:
    for path in FILES:
        calls = (node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call))
        lines = [call.lineno for call in calls if any(word.arg == "preexec_fn" for word in call.keywords)]
        assert lines == [], path


def test_a_program_that_is_not_there_is_told_as_subprocess_does(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no-such-program"):
        children.run(["no-such-program", "x"], env={"PATH": str(tmp_path)})


PARENT = """
import signal, sys, time
from toolkit import children
signal.signal(signal.SIGINT, signal.default_int_handler)  # it stays ignored below a shell's background job
way, folder = sys.argv[1:]
# In a session of its own, and without its parent: what a launcher's ranks may be.
tree = ["sh", "-c", f"echo $$ > {folder}/first; setsid sh -c 'echo $$ > {folder}/second; exec sleep 300' & wait"]
if way == "start":
    children.start(["sh", "-c", f"echo $$ > {folder}/first; exec sleep 300"])
elif way == "run":
    children.run(["sh", "-c", f"echo $$ > {folder}/first; exec sleep 300"])
elif way == "tree":
    children.start_tree(tree)
elif way == "workers":
    pool = children.workers(1)
    note = f"open('{folder}/first', 'w').write(str(__import__('os').getpid()))"
    pool.submit(exec, note)
    pool.submit(time.sleep, 300)
time.sleep(300)
"""


def number(file: Path) -> int:
    """Return the process that a file names, when it is there."""
    until = time.monotonic() + 60
    while not file.exists() or not file.read_text().strip():
        assert time.monotonic() < until
        time.sleep(0.05)
    return int(file.read_text())


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


ENDS = [(way, kind) for way in ("start", "run", "tree") for kind in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)]
ENDS += [("workers", signal.SIGKILL), ("workers", signal.SIGTERM)]  # after a SIGINT Python waits for a pool's work


@pytest.mark.parametrize(("way", "kind"), ENDS)
def test_children_end_with_their_parent(way: str, kind: signal.Signals, tmp_path: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, way, str(tmp_path)], cwd=ROOT, stderr=subprocess.DEVNULL, start_new_session=True
    )
    pids = [number(tmp_path / name) for name in (["first", "second"] if way == "tree" else ["first"])]
    parent.send_signal(kind)
    parent.wait(60)
    until = time.monotonic() + 60
    try:
        while not all(gone(pid) for pid in pids):
            assert time.monotonic() < until, "still there"
            time.sleep(0.05)
    finally:
        for pid in pids:
            if not gone(pid):
                os.kill(pid, signal.SIGKILL)


def test_the_keeper_ends_what_a_launcher_leaves_and_returns_its_code(tmp_path: Path) -> None:
    script = f"setsid sleep 300 & echo $! > {tmp_path}/left; exit 7"
    process = children.start_tree(["sh", "-c", script])
    assert process.wait(60) == 7
    assert gone(number(tmp_path / "left"))
    assert children.start_tree(["sh", "-c", "kill -9 $$"]).wait(60) == 128 + 9
