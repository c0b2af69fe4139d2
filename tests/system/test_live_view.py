"""A real run in a real terminal: its view, its bars, and nothing of them left when it is done."""

import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pyte
from shared import tiny

from toolkit import terminal

RUN = Path(__file__).parents[2] / "run.py"
COLUMNS, LINES = 120, 50
# Writes past Python's stdout, as NCCL does, once the run's logs are there.
CHATTER = """
import os, sys
from toolkit.train import loop
begin = loop.TrainLoop
def chatty(*arguments):
    os.write(1, b"said in C\\n")
    return begin(*arguments)
loop.TrainLoop = chatty
from toolkit.cli import main
sys.exit(main(["train", *sys.argv[1:]]))
"""


def run_in_terminal(command: list[str], cwd: Path, timeout_s: float) -> tuple[int, set[str], list[str]]:
    """Return a command's exit status, every line that was ever on its screen, and those that are left."""
    child, terminal_end = pty.fork()
    if not child:
        os.chdir(cwd)
        for name in terminal.SCHEDULERS:
            os.environ.pop(name, None)
        os.environ.update(TERM="xterm-256color", COLUMNS=str(COLUMNS), LINES=str(LINES), LANG="en_US.UTF-8")
        os.execvp(command[0], command)
    fcntl.ioctl(terminal_end, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    screen = pyte.Screen(COLUMNS, LINES)
    stream, seen, ends = pyte.ByteStream(screen), set(), time.monotonic() + timeout_s
    while time.monotonic() < ends:
        if not select.select([terminal_end], [], [], 0.2)[0]:
            continue
        try:
            stream.feed(os.read(terminal_end, 65536))
        except OSError:  # the other end is closed
            break
        seen |= {line.rstrip() for line in screen.display}
    else:
        os.kill(child, 9)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert not screen.cursor.hidden
    return status, seen, [line.rstrip() for line in screen.display if line.strip()]


def test_a_run_has_one_view(tmp_path: Path, rows_file: Path) -> None:
    program = tmp_path / "chatter.py"
    program.write_text(CHATTER)
    overrides = tiny(rows_file, tmp_path, "seen", "train.max_steps=120", "checkpoint.every=40", "evaluate.every=40")
    status, seen, left = run_in_terminal([sys.executable, str(program), *overrides], tmp_path, 240)
    everything = "\n".join(sorted(seen))
    assert status == 0, everything
    for part in ("─ training ─", "/120", "validation loss", "last checkpoint step-", "Building the engine", "ETA"):
        assert part in everything, part
    assert "step 3/120" not in everything  # no line per step
    assert not [line for line in left if "─" in line or "ETA" in line]  # the view is gone, what was said is there
    done = json.loads((tmp_path / "runs" / "seen" / "DONE").read_text())
    rows = [json.loads(line) for line in (tmp_path / "runs" / "seen" / "metrics.jsonl").read_text().splitlines()]
    logged = [row for row in rows if "step_s" in row]
    steps_s = sum(
        (row["step"] - before) * row["step_s"]
        for before, row in zip([0, *(row["step"] for row in logged)], logged, strict=False)
    )
    assert abs(done["steps_seconds"] - steps_s) < 0.1
    assert done["seconds"] > done["steps_seconds"] + 1, "imports alone take longer than that"
    expected = (
        f"Done: 120 steps in {done['steps_seconds']} s ({done['seconds']} s in all, from the start of the command)"
    )
    assert expected in " ".join(left)
    [ready] = [line for line in seen if line.startswith("Ready after ")]
    assert 1 < int(ready.split()[2]) <= done["seconds"]
    assert "said in C" not in everything
    assert "said in C" in (tmp_path / "runs" / "seen" / "logs" / "rank_0.log").read_text()


def test_a_run_whose_reader_is_gone_saves_and_stops(tmp_path: Path, rows_file: Path) -> None:
    """`… | tee log` and Ctrl-C: tee dies first."""
    overrides = tiny(rows_file, tmp_path, "piped", "train.max_steps=100000")
    command = [sys.executable, str(RUN), *overrides]
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            assert process.stdout
            assert any(line.startswith("step 2/") for line in process.stdout)
            process.stdout.close()
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 75
        finally:
            process.kill()
    assert (tmp_path / "runs" / "piped" / "checkpoints" / "latest").exists()
