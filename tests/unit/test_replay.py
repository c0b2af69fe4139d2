"""A step that is done again: where it begins, and what it is compared with."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from toolkit.cli import main
from toolkit.train.bad_steps import warn_of_bad_step
from toolkit.train.replay import _compare_loss
from toolkit.train.step import Anomaly, AnomalyKind


@pytest.mark.parametrize(
    ("losses", "says"),
    [
        ([1.0, 2.0, 4.0], "The loss of steps 5 to 6 equals that in metrics.jsonl."),
        ([1.0, 2.0, 4.5], "is 3.6666666666666665, and 3.3333333333333335 in metrics.jsonl: not the same computation."),
        ([1.0, math.nan, math.inf], "No loss of steps 5 to 6 is finite: there is no mean to compare."),
        ([4.0], "metrics.jsonl has no row that ends with this step and begins after the checkpoint."),
    ],
)
def test_the_mean_since_the_row_before_is_compared(losses: list[float], says: str, tmp_path: Path) -> None:
    """Rows hold means over the trained tokens of the steps since the one before."""
    rows: list[dict[str, Any]] = [{"step": 4, "loss": 9.0}, {"step": 5, "eval_loss": 1.0}]
    rows += [{"step": 6, "loss": (2.0 * 10 + 4.0 * 20) / 30}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    counts = [7, 10, 20]
    results: Any = [
        SimpleNamespace(loss=loss, counts=SimpleNamespace(losses=count))
        for loss, count in zip(losses, counts, strict=False)
    ]
    assert says in _compare_loss(6, results, tmp_path / "metrics.jsonl")


def test_only_a_run_is_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(tmp_path), "step=3"]) == 2
    assert "is no run directory: it has no config.yaml." in capsys.readouterr().err
    assert main(["replay", str(tmp_path)]) == 2
    assert "step is missing: toolkit replay runs/NAME step=120" in capsys.readouterr().err


def test_samples_that_cannot_be_written_are_not_offered(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    result: Any = SimpleNamespace(micro_losses=torch.tensor([math.nan]), micro_counts=[1])
    anomaly = Anomaly(AnomalyKind.loss, math.nan, 0.0)
    samples = [[[{"where": "rows.jsonl:3"}, {"where": "rows.jsonl:4"}]]]
    what = warn_of_bad_step(tmp_path / "none", 7, anomaly, result, lambda: samples)
    assert what.endswith("micro-batch 0: rows.jsonl:3, rows.jsonl:4")
    said = caplog.text
    assert said.count("No such file or directory") == 1 and "cannot be written (No such" in said
    assert "toolkit show" not in said
