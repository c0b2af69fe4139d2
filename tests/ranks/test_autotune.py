"""What DeepSpeed's autotuner compares are real runs of a recipe."""

import statistics
import sys
from pathlib import Path

import pytest
from ranks import run
from shared import rows_of, tiny


@pytest.mark.nightly
def test_an_experiment_on_two_ranks(rows_file: Path, tmp_path: Path) -> None:
    words = [word for word in tiny(rows_file, tmp_path, "named") if not word.startswith(("batch.micro", "run.name"))]
    own = ["stages=2", "micro=2", "sweep=tuned"]
    command = [sys.executable, "-m", "toolkit", "autotune", "--num_gpus", "2", *words, *own]
    finished = run(command, cwd=tmp_path)
    assert finished.code == 0, finished.output[-3000:]
    assert "The fastest: zero=stage2 batch.micro_per_gpu=2" in finished.output
    [folder] = (path for path in (tmp_path / "runs" / "tuned").iterdir() if (path / "DONE").exists())
    speeds = [row["tokens_per_s"] for row in rows_of(folder) if "loss" in row]
    assert len(speeds) == 8
    assert f"  {statistics.median(speeds):.0f}  {folder.name}" in finished.output
    assert [row["step"] for row in rows_of(folder) if "eval_loss" in row] == [8]
    assert not (folder / "checkpoints").exists() and not (folder / "export").exists()
