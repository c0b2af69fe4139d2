"""DeepSpeed's autotuner times real runs of a recipe."""

import json
import sys
from pathlib import Path

from ranks import run
from shared import rows_of, tiny


def test_an_experiment_on_two_ranks(rows_file: Path, tmp_path: Path) -> None:
    words = [word for word in tiny(rows_file, tmp_path, "named") if not word.startswith(("batch.micro", "run.name"))]
    own = ["stages=2", "micro=2", f"output={tmp_path}/tuned"]
    command = [sys.executable, "-m", "toolkit", "autotune", "--num_gpus", "2", *words, *own]
    finished = run(command, cwd=tmp_path)
    assert finished.code == 0, finished.output[-3000:]
    [folder] = (tmp_path / "tuned" / "results").iterdir()
    found = json.loads((folder / "metrics.json").read_text())
    assert f"zero=stage2 batch.micro_per_gpu=2  {found['throughput']:.2f} samples/s" in finished.output
    assert "The fastest: zero=stage2 batch.micro_per_gpu=2" in finished.output
    # The steps that DeepSpeed timed, by our own clock, which counts data and logging too.
    rows = [row["step_s"] for row in rows_of(folder / "runs" / "run") if "loss" in row]
    assert len(rows) == 5, "the sixth step ends the run"
    assert 4 / found["throughput"] < 2 * max(rows)
    assert json.loads((folder / "runs" / "run" / "ds_config.json").read_text())["train_micro_batch_size_per_gpu"] == 2
    assert not (folder / "runs" / "run" / "checkpoints").exists()
    assert not (tmp_path / "runs").exists()
