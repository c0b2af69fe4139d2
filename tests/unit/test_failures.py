"""One error, told once, with the right exit code."""

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import astuple
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from toolkit.distributed import ended, failure, meeting, peers, presence, process_group
from toolkit.distributed.exits import run_guarded
from toolkit.distributed.process_group import on_rank0
from toolkit.launch import environment
from toolkit.messages import CheckpointError, ConfigError, DataError, Diverged, LaunchError, ModelError, Stopped
from toolkit.train import trainer

CODES = {ConfigError: 2, DataError: 2, ModelError: 2, LaunchError: 2, Diverged: 70, CheckpointError: 74, Stopped: 75}
ROOT = Path(__file__).parents[2]


def raising(error: BaseException) -> int:
    raise error


@pytest.mark.parametrize("kind", CODES)
def test_a_toolkit_error_is_one_message(kind: type, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_guarded(lambda: raising(kind("what, where, what to do"))) == CODES[kind]
    assert capsys.readouterr().err == f"{kind.__name__}: what, where, what to do\n"


def test_a_defect_keeps_its_traceback_and_its_message_comes_after_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_guarded(lambda: raising(ZeroDivisionError("oops"))) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-2].startswith("ZeroDivisionError (rank 0 on ") and lines[-2].endswith("): oops")
    assert lines[-1].endswith("toolkit doctor --report")


def test_success_is_passed_on() -> None:
    assert run_guarded(lambda: 0) == 0


SIGNALLED = """
import os, signal, sys
from toolkit.distributed import signals
from toolkit.distributed.exits import run_guarded
from toolkit.messages import ConfigError

class Lost(ConfigError if sys.argv[1] == "ours" else RuntimeError):
    def __str__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        return "lost a peer"

def lose():
    raise Lost

signals.install_signals()
sys.exit(run_guarded(lose))
"""


@pytest.mark.parametrize(("kind", "code"), [("ours", 2), ("theirs", 1)])
def test_a_signal_while_a_failure_is_told_changes_nothing(kind: str, code: int) -> None:
    child = subprocess.run(
        [sys.executable, "-c", SIGNALLED, kind], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert child.returncode == code
    assert ": lost a peer\n" in child.stderr
    assert "stopped by" not in child.stderr


FINISHED = """
import os, signal, sys
from pathlib import Path
from toolkit.distributed import exits, failure, signals

def report():
    failure.watch_failures(Path(sys.argv[1]))
    os.kill(os.getpid(), signal.SIGTERM)

signals.install_signals()
sys.exit(exits.run_guarded(report))
"""


@pytest.mark.parametrize("is_done", [True, False])
def test_a_signal_after_the_end_leaves_a_finished_run(is_done: bool, tmp_path: Path) -> None:
    (tmp_path / "DONE" if is_done else tmp_path / "other").touch()
    command = [sys.executable, "-c", FINISHED, str(tmp_path)]
    child = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert child.returncode == (0 if is_done else 75)
    assert ("unfinished" in child.stderr) != is_done
    assert (f"is complete. Only its report may be missing:  toolkit report {tmp_path}\n" in child.stderr) == is_done
    assert not (tmp_path / "FAILED").exists()


EXITS = """
import atexit, os, signal, sys
from toolkit.distributed import exits, signals

atexit.register(lambda: os.kill(os.getpid(), signal.SIGTERM))
signals.install_signals()
sys.exit(exits.run_guarded(lambda: 0))
"""


def test_a_signal_while_python_ends_prints_no_traceback() -> None:
    child = subprocess.run([sys.executable, "-c", EXITS], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (child.returncode, child.stderr) == (-signal.SIGTERM, "")


CHILD = """
import sys, time
from pathlib import Path
from toolkit.distributed import failure
folder = Path(sys.argv[1])
failure.watch_failures(folder, earlier_markers={int(inode) for inode in sys.argv[3:]})
if sys.argv[2] == "announce":
    print(failure.announce_failure(3, "first", 70), failure.announce_failure(3, "again", 1), flush=True)
else:
    print(failure.announce_failure(4, "second", 1) if sys.argv[2] == "late" else "waits", flush=True)
    time.sleep(30)
"""


def child(folder: Path, role: str, *known: int) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", CHILD, str(folder), role, *map(str, known)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def test_the_first_speaks_and_the_others_end_within_seconds(tmp_path: Path) -> None:
    with child(tmp_path, "wait") as waiting:
        assert waiting.stdout is not None
        assert waiting.stdout.readline() == "waits\n"
        with child(tmp_path, "announce") as first:
            assert first.communicate(timeout=20)[0] == "True True\n"
            assert first.returncode == 0
        started = time.monotonic()
        assert waiting.wait(timeout=20) == 1
        assert time.monotonic() - started < 8
    with child(tmp_path, "late") as late:
        assert late.communicate(timeout=20)[0] == "False\n"
        assert late.returncode == 1
    head, last = (tmp_path / "FAILED").read_text().splitlines()
    assert head.startswith("rank 3 on ") and head.endswith("), exit code 70")
    assert last == "first"


def test_a_marker_that_was_put_aside_ends_nobody_where_it_still_seems_to_be_there(tmp_path: Path) -> None:
    """NFS shows a file that was moved under its old name to other nodes, for up to a minute."""
    marker = tmp_path / "FAILED"
    marker.touch()
    (tmp_path / "new").touch()
    with child(tmp_path, "wait", marker.stat().st_ino) as waiting:
        assert waiting.stdout is not None
        assert waiting.stdout.readline() == "waits\n"
        with pytest.raises(subprocess.TimeoutExpired):
            waiting.wait(timeout=2 * (failure.CHECK_EVERY_S + failure.GRACE_S))
        (tmp_path / "new").replace(marker)
        assert waiting.wait(timeout=20) == 1


RANK = """
import json, os, sys, time
from dataclasses import astuple
from datetime import timedelta
from pathlib import Path
from toolkit.distributed.exits import run_guarded
from toolkit.distributed import failure, peers, presence
folder, rank, do = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
os.environ["RANK"] = str(rank)
(folder / f"{rank}.new").write_text(json.dumps(astuple(presence.me())))
(folder / f"{rank}.new").rename(folder / str(rank))
names = "012"[:int(sys.argv[4])]
while not all((folder / name).exists() for name in names):
    time.sleep(0.05)
chosen = folder if (folder / "logs").exists() else None
if (folder / "taken").exists():
    peers.exit_status = lambda pid: None
failure.watch_failures(chosen, rank, [presence.Peer(*json.loads((folder / name).read_text())) for name in names])
(folder / f"watches-{rank}").touch()

def run():
    while not (folder / "go").exists():
        time.sleep(0.05)
    if do == "break":
        raise RuntimeError("Connection closed by peer")
    if do == "wait":
        time.sleep(300)
    return 0

sys.exit(run_guarded(run))
"""


def ranks_that_watch(folder: Path, *do: str) -> "list[subprocess.Popen[str]]":
    """Start ranks that look after each other, and wait until they do; in a run directory if `folder` has logs/."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(folder), str(rank), one, str(len(do))],
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, one in enumerate(do)
    ]
    until = time.monotonic() + 60
    while len(list(folder.glob("watches-*"))) < len(do):
        assert time.monotonic() < until
        time.sleep(0.05)
    return ranks


def two_ranks(folder: Path, first: str, second: str) -> "list[subprocess.Popen[str]]":
    (folder / "logs").mkdir()
    return ranks_that_watch(folder, first, second)


def test_a_rank_that_is_killed_before_there_is_a_run_directory_is_named_once(tmp_path: Path) -> None:
    """While rank 0 claims it or reads a checkpoint, which takes minutes; it may be rank 0 itself."""
    killed, waits, breaks = ranks_that_watch(tmp_path, "wait", "wait", "break")
    killed.kill()
    (tmp_path / "go").touch()
    outputs = [rank.communicate(timeout=60)[1] for rank in (waits, breaks)]
    assert [waits.returncode, breaks.returncode] == [1, 1]
    assert outputs[0].startswith("rank 0 on ") and f"(pid {killed.pid}) was killed by signal 9 (SIGKILL)." in outputs[0]
    assert outputs[1] == "", "one rank of a node speaks"
    killed.communicate()


def test_a_rank_whose_exit_status_is_taken_is_named_where_a_collective_breaks(tmp_path: Path) -> None:
    """By a launcher that waits for it, before there is a run directory."""
    (tmp_path / "taken").touch()
    killed, breaks = ranks_that_watch(tmp_path, "wait", "break")
    killed.kill()
    killed.communicate()
    (tmp_path / "go").touch()
    output = breaks.communicate(timeout=60)[1]
    assert breaks.returncode == 1 and "Traceback" not in output and "Connection closed" not in output
    assert f"(pid {killed.pid}) has ended, and its launcher has its exit status" in output


def test_ranks_are_watched_before_the_run_directory_is_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    watched: list[Any] = []

    def claim(cfg: Any) -> None:
        raise ConfigError(f"claims, watched: {watched}")

    monkeypatch.setattr(failure, "watch_failures", lambda folder, rank, peers: watched.append((folder, rank, peers)))
    monkeypatch.setattr(trainer.run_dir, "choose_run_dir", claim)
    ranks = environment.Ranks(0, 0, 1, 1, "single")
    with pytest.raises(ConfigError, match=r"claims, watched: .*None, 0, .*Peer"):
        trainer.Trainer(MagicMock(), MagicMock(), ranks, 0.0).build()


@pytest.mark.parametrize("reaction", ["wait", "break"])
def test_a_rank_that_was_killed_is_named_by_those_that_are_left(reaction: str, tmp_path: Path) -> None:
    """Both where its collective breaks with a library's error, and where it only waits."""
    left, killed = two_ranks(tmp_path, reaction, "wait")
    killed.kill()
    (tmp_path / "go").touch()
    output = left.communicate(timeout=60)[1]
    assert left.returncode == 1
    assert f"(pid {killed.pid}) was killed by signal 9 (SIGKILL). It used 0." in output
    assert output.startswith("rank 1 on ")
    assert "Traceback" not in output and "Connection closed" not in output
    marker = (tmp_path / "FAILED").read_text()
    assert marker.startswith(output.strip())
    assert "noticed by rank 0 on " in marker
    killed.communicate()


def test_a_rank_that_ends_in_good_order_is_not_missed(tmp_path: Path) -> None:
    left, other = two_ranks(tmp_path, "wait", "end")
    (tmp_path / "go").touch()
    assert other.communicate(timeout=60)[1] == ""
    time.sleep(2.0)
    assert left.poll() is None
    assert not (tmp_path / "FAILED").exists()
    left.kill()
    left.communicate()


def test_an_orderly_end_is_known_after_the_launcher_has_taken_the_exit_status(tmp_path: Path) -> None:
    """On a busy machine a rank looks after its launcher has."""
    (tmp_path / "logs").mkdir()
    (tmp_path / "0").write_text(json.dumps(astuple(presence.me())))
    with subprocess.Popen([sys.executable, "-c", RANK, str(tmp_path), "1", "end", "2"], cwd=ROOT) as other:
        while not (tmp_path / "watches-1").exists():
            assert other.poll() is None
            time.sleep(0.05)
        its = presence.Peer(*json.loads((tmp_path / "1").read_text()))
        view = peers.Peers(presence.Note(tmp_path, 0, presence.me(), 2), [presence.me(), its])
        (tmp_path / "go").touch()
        assert other.wait(timeout=60) == 0
    assert view.wait(60) == ""


def test_nothing_is_noted_after_the_note_that_a_rank_has_left(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    note = presence.Note(tmp_path, 0, presence.me(), 1)
    for left in (False, True, False):
        note._written_at = -1e9
        note.write(left)
    assert json.loads((tmp_path / "logs" / "rank-0.json").read_text())["left"] is True


def test_a_rank_of_another_machine_that_is_silent_is_named(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    mine = presence.me()
    everybody = [mine, presence.Peer("far", "far", 7), presence.Peer("away", "away", 7)]
    views = [peers.Peers(presence.Note(tmp_path, rank, everybody[rank], 3), everybody) for rank in range(3)]
    beating, over = threading.Event(), threading.Event()

    def beat() -> None:
        while not over.wait(0.01):
            views[2].note._written_at = -1e9
            views[2].note.write()
            beating.set()

    thread = threading.Thread(target=beat)
    thread.start()
    assert beating.wait(30)
    try:
        assert views[0].silent(2.0).startswith("rank 1 (far) gives no sign of life any more")
        views[1].note.write(left=True)
        assert views[0].silent(2.0) == ""
    finally:
        over.set()
        thread.join()


def test_the_kernels_line_about_a_process(tmp_path: Path) -> None:
    log = tmp_path / "kmsg"
    log.write_text("4,1,1;Out of memory: Killed process 123 (python) total-vm:9kB\n4,1,1;Killed process 12 (x)\n")
    assert ended.kernel_line(123, str(log)) == "Out of memory: Killed process 123 (python) total-vm:9kB"
    assert ended.kernel_line(1, str(log)) == ""
    assert ended.kernel_line(1, str(tmp_path / "none")) == ""


def command(shell: str, **environ: str) -> tuple[int, str]:
    """Run `toolkit check recipe=quickstart` in a shell's line; return its exit code and what it says of errors."""
    line = f"{sys.executable} -m toolkit check recipe=quickstart {shell}; exit ${{PIPESTATUS[0]}}"
    ran = subprocess.run(
        ["bash", "-c", line], env=os.environ | environ, capture_output=True, text=True, check=False, timeout=120
    )
    return ran.returncode, ran.stderr


@pytest.mark.parametrize(
    ("shell", "code", "said"),
    [
        (">/dev/full", 74, "cannot write to the standard output: No space left on device."),
        ("| true", 141, ""),
        (">&-", 0, ""),
        ("<&-", 0, ""),
    ],
    ids=["full", "reader gone", "closed", "stdin closed"],
)
def test_streams_that_fail(shell: str, code: int, said: str) -> None:
    assert command(shell) == (code, said + "\n" * bool(said))


def test_warnings_as_errors_end_no_command() -> None:
    """torch and deepspeed warn as they are imported."""
    call = "run_guarded(lambda: warnings.warn('x') or 0)"
    line = f"import sys, warnings; from toolkit.distributed.exits import run_guarded; {call}"
    ran = subprocess.run(
        [sys.executable, "-c", line],
        env=os.environ | {"PYTHONWARNINGS": "error"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (ran.returncode, "Traceback" in ran.stderr) == (0, False)


def test_launchers_variables_that_are_no_numbers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> int:
        raise ConfigError("mine")

    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "abc")
    assert run_guarded(fail) == 2
    assert capsys.readouterr().err.endswith("ConfigError: mine\n")


def test_disks_that_fail_are_named_without_a_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> int:
        raise error

    error = OSError(errno.ENOSPC, "No space left on device", "/data/x")
    assert run_guarded(fail) == 74
    assert capsys.readouterr().err == "/data/x: No space left on device.\n"
    error = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr("toolkit.distributed.exits._free_mib", lambda place: 0.0 if place == "/dev/shm" else 9.0)
    assert run_guarded(fail) == 74
    said = capsys.readouterr().err
    assert said.startswith("No space left on device: /dev/shm, the memory that ranks and") and "--shm-size" in said
    monkeypatch.setattr("toolkit.distributed.exits._free_mib", lambda place: 0.0)
    assert run_guarded(fail) == 74
    assert ", /dev/shm. Free some" in capsys.readouterr().err


def test_what_another_user_owns_is_named_with_the_owner(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file in a closed directory: not the file, which cannot be seen, but the directory has the owner to ask."""
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o750)
    stat = Path.stat

    def hidden(self: Path, **options: Any) -> os.stat_result:
        if closed in self.parents:
            raise PermissionError(errno.EACCES, "Permission denied", str(self))
        return stat(self, **options)

    def fail() -> int:
        raise PermissionError(errno.EACCES, "Permission denied", str(closed / "deep" / "file"))

    monkeypatch.setattr(Path, "stat", hidden)
    monkeypatch.setattr("toolkit.messages.user_name", lambda number: "me" if number == os.geteuid() else "they")
    assert run_guarded(fail) == 74
    said = capsys.readouterr().err
    assert said.startswith(f"{closed}/deep/file: Permission denied. {closed} belongs to user me (mode 750), and this")
    assert "choose another directory: run.dir" in said and "Traceback" not in said
    with pytest.raises(CheckpointError, match=f"{closed} belongs to user me"):
        on_rank0(fail)


def test_ranks_meet_while_rank_0_works_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint of terabytes is verified for longer than a collective may wait."""
    met, release = [0], threading.Event()

    def meet(function: Callable[[], Any]) -> Any:
        met[0] += 1
        if met[0] == 5:
            release.set()
        return on_rank0(function)

    def fail() -> int:
        raise CheckpointError("damaged")

    monkeypatch.setattr(process_group, "on_rank0", meet)
    monkeypatch.setattr(process_group, "_SLICE_S", 0.01)
    assert process_group.patiently_on_rank0(lambda: release.wait(60)) is True
    assert met[0] >= 6
    with pytest.raises(CheckpointError, match="damaged"):
        process_group.patiently_on_rank0(fail)


def test_panics_are_reported_and_exits_are_not(capsys: pytest.CaptureFixture[str]) -> None:
    class PanicException(BaseException):
        """As pyo3 raises."""

    def panic() -> int:
        raise PanicException("boom")

    def leave() -> int:
        raise SystemExit(5)

    assert run_guarded(panic) == 1
    assert "PanicException (rank 0 on" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run_guarded(leave)


def test_text_files_are_read_as_utf8_in_any_locale() -> None:
    """DeepSpeed opens its own files without naming an encoding: an ASCII locale ended as its refusal of the config."""
    line = (
        "import sys; from toolkit.cli import main; main(['--version']);"
        "print(len(open(sys.argv[1]).read()) > 0, sys.flags.utf8_mode)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", line, str(ROOT / "README_zh.md")],
        env=os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (ran.returncode, ran.stdout.splitlines()[-1:]) == (0, ["True 1"]), ran.stderr


def test_a_first_node_that_nobody_knows_is_named(monkeypatch: pytest.MonkeyPatch, said: list[str]) -> None:
    """torch repeated `gai error` for two minutes; a name that the cluster's DNS learns later is waited for."""
    asked: list[str] = []

    def resolve(address: str, port: Any) -> list[Any]:
        asked.append(address)
        if address == "late" and len(asked) > 3:
            return []
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(meeting.socket, "getaddrinfo", resolve)
    monkeypatch.setattr(meeting, "_ADDRESS_S", 0.2)
    monkeypatch.setattr(meeting, "_met", None)
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setenv("MASTER_ADDR", "nod1")
    with pytest.raises(
        LaunchError, match=r"does not know the first node, MASTER_ADDR = nod1 \(port 29500\): Name or s"
    ):
        meeting.meet(timedelta(seconds=60))
    assert len(said) == 1 and "MASTER_ADDR = nod1 is not known here (Name or service not known): waiting." in said[0]
    asked.clear()
    monkeypatch.setenv("MASTER_ADDR", "late")
    meeting._check_address(3)
    assert len(asked) == 4
