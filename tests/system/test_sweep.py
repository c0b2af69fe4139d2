"""A real sweep: two runs under DeepSpeed's launcher, the first stopped by a signal and gone on with."""

import json
import signal
import sys
import time
from pathlib import Path

from ranks import free_port, kill_session, run, start
from shared import tiny


def test_two_runs_and_a_signal_in_the_first(rows_file: Path, tmp_path: Path) -> None:
    left_out = ("run.name", "train.max_steps", "optim.lr")
    words = [word for word in tiny(rows_file, tmp_path, "") if not word.startswith(left_out)]
    command = [sys.executable, "-m", "toolkit", "sweep", "--num_gpus", "1", "--master_port", str(free_port()), *words]
    command += ["optim.lr=0.003,0.004", "train.max_steps=150", "checkpoint.verify_export=false", "sweep=both"]
    command += ["checkpoint.export=true"]
    folder = tmp_path / "runs" / "both"
    process = start(command, cwd=tmp_path)
    try:
        metrics = folder / "lr-0.003" / "metrics.jsonl"
        until = time.monotonic() + 120
        while not metrics.exists() or len(metrics.read_text().splitlines()) < 3:
            assert process.poll() is None and time.monotonic() < until
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
    finally:
        kill_session(process)
    assert process.returncode == 75, output[-3000:]
    assert "Stopped: the sweep was stopped by SIGTERM" in output
    assert [job["state"] for job in json.loads((folder / "sweep.json").read_text())["jobs"]] == ["stopped", "waiting"]

    finished = run(command, cwd=tmp_path)
    assert finished.code == 0, finished.output[-3000:]
    starts = [json.loads(line) for line in (folder / "lr-0.003" / "logs" / "starts.jsonl").read_text().splitlines()]
    assert [start["from_step"] > 0 for start in starts] == [False, True]
    for name in ("0.003", "0.004"):
        assert (folder / f"lr-{name}" / "DONE").exists()
        table = [line.split() for line in finished.output.splitlines() if line.startswith(f"  optim.lr={name} ")]
        [row] = table
        assert row[1:3] == ["done", "0"] and float(row[3]) > 0 and float(row[4]) > 0 and row[-1] == f"lr-{name}"
