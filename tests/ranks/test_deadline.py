"""A run with far more steps than it has time for: it is killed, goes on, ends by itself, and is done again."""

import json
import re
from pathlib import Path

from ranks import forked, run
from shared import FAULTY, tiny

from tests import series

SAVED, KILLED_IN = 4, 9
"""Killed when the second save has begun, before which the first is proven, however slow the disk is."""
LATE_FROM, FITTING = 12, 24
"""The step from which on it is late, and how many fit from there on; fewer if they take longer than those before."""
PLANNED = 100_000


def test_a_run_ends_by_itself_with_its_schedule_before_the_deadline(tmp_path: Path, rows_file: Path) -> None:
    words = tiny(
        rows_file,
        tmp_path,
        "run",
        f"train.max_steps={PLANNED}",
        "schedule=cosine",
        f"checkpoint.every={SAVED}",
        "zero=stage2",
        "run.deadline=30h",
        "checkpoint.export=true",
    )
    fault = {"at": "step", "step": KILLED_IN, "rank": 0, "do": "kill", "note": str(tmp_path / "note")}
    died = run(forked(2, FAULTY, *words), cwd=tmp_path, FAULT=json.dumps(fault))
    assert (tmp_path / "note").exists() and died.code != 0
    folder = tmp_path / "runs" / "run"
    killed = series.metrics_jsonl(folder / "metrics.jsonl")["lr"]
    late = {"at": "clock", "fit_at": LATE_FROM, "fit": FITTING}
    finished = run(forked(2, FAULTY, *words), cwd=tmp_path, FAULT=json.dumps(late))
    assert finished.code == 0, finished.output[-4000:]
    assert re.search(rf"Resuming after step ({SAVED}|{2 * SAVED}) ", finished.output)
    assert f"of {PLANNED:,} steps fit" in finished.output

    done = json.loads((folder / "DONE").read_text())
    rates = series.metrics_jsonl(folder / "metrics.jsonl")["lr"]
    assert "deadline_spare_s" in done
    assert [step for step, _ in rates] == list(range(1, done["steps"] + 1))
    assert LATE_FROM < done["steps"] < PLANNED
    assert rates[:SAVED] == killed[:SAVED]
    values = [rate for _, rate in rates]
    assert values[-1] < 0.2 * max(values), "the schedule ends with the run"
    assert (folder / "export" / "config.json").exists()
    assert (folder / "checkpoints" / f"step-{done['steps']}").exists()

    step = done["steps"] - 1
    again = run(forked(2, "--module", "toolkit", "replay", str(folder), f"step={step}"), cwd=tmp_path)
    assert again.code == 0, again.output[-4000:]
    assert f"The loss of steps {step} to {step} equals that in metrics.jsonl." in again.output
