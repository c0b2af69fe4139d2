"""A step waits for nothing and reduces no more often than it must; a compiled model learns the same: on real ranks."""

from pathlib import Path

from ranks import REPOSITORY, forked, run

WORKER = str(REPOSITORY / "tests" / "ranks" / "lean_worker.py")


def test_lean_on_two_ranks(tmp_path: Path) -> None:
    finished = run(forked(2, WORKER), cwd=tmp_path)
    assert finished.code == 0, finished.output[-5000:]
    assert finished.output.count("ALL CHECKED") == 2
