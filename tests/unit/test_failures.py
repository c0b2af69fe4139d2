"""One error, told once, with the right exit code."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from toolkit.cli.failures import guarded
from toolkit.errors import CheckpointError, ConfigError, DataError, Diverged, LaunchError, ModelError, Stopped

CODES = {ConfigError: 2, DataError: 2, ModelError: 2, LaunchError: 2, Diverged: 70, CheckpointError: 74, Stopped: 75}
ROOT = Path(__file__).parents[2]


def raising(error: BaseException) -> int:
    raise error


@pytest.mark.parametrize("kind", CODES)
def test_a_toolkit_error_is_one_message(kind: type, capsys: pytest.CaptureFixture[str]) -> None:
    assert guarded(lambda: raising(kind("what, where, what to do"))) == CODES[kind]
    assert capsys.readouterr().err == f"{kind.__name__}: what, where, what to do\n"


def test_a_defect_keeps_its_traceback_and_its_message_comes_last(capsys: pytest.CaptureFixture[str]) -> None:
    assert guarded(lambda: raising(ZeroDivisionError("oops"))) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-1].startswith("ZeroDivisionError (rank 0 on ")
    assert lines[-1].endswith("): oops")


def test_success_is_passed_on() -> None:
    assert guarded(lambda: 0) == 0


SIGNALLED = """
import os, signal, sys
from toolkit.cli.failures import guarded
from toolkit.distributed import signals
from toolkit.errors import ConfigError

class Lost(ConfigError if sys.argv[1] == "ours" else RuntimeError):
    def __str__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        return "lost a peer"

def lose():
    raise Lost

signals.install()
sys.exit(guarded(lose))
"""


@pytest.mark.parametrize(("kind", "code"), [("ours", 2), ("theirs", 1)])
def test_a_signal_while_a_failure_is_told_changes_nothing(kind: str, code: int) -> None:
    child = subprocess.run(
        [sys.executable, "-c", SIGNALLED, kind], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert child.returncode == code
    assert child.stderr.endswith(": lost a peer\n")
    assert "stopped by" not in child.stderr


CHILD = """
import sys, time
from pathlib import Path
from toolkit.distributed import failure
folder = Path(sys.argv[1])
failure.watch(folder)
if sys.argv[2] == "announce":
    print(failure.announce(3, "first", 70), failure.announce(3, "again", 1), flush=True)
else:
    print(failure.announce(4, "second", 1) if sys.argv[2] == "late" else "waits", flush=True)
    time.sleep(30)
"""


def child(folder: Path, role: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, str(folder), role], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )


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
