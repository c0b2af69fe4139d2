"""The names and units of metrics: those of the code are those of the documentation, and those of transformers."""

import re
from pathlib import Path

import pytest

from toolkit.config.schema import EVAL_LOSS, Metric
from toolkit.track.metrics import SUMMARY, UNITS, hf_name, is_evaluation, metric_values, tracked_name

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("page", ["tracking.md", "tracking_zh.md"])
def test_the_table_is_the_codes(page: str) -> None:
    """Name, unit, name in trackers, name in MLflow; what it means stands beside it."""
    table = {}
    for line in (DOCS / page).read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 5 and cells[0].startswith("`"):
            assert cells[4], f"{cells[0]} is not explained"
            table[cells[0].strip("`")] = tuple(cell.strip("`") for cell in cells[1:4])
    expected = {name: (unit, tracked_name(name), hf_name(name)) for name, unit in (UNITS | SUMMARY).items()}
    assert table == expected


def test_evaluations_are_in_it() -> None:
    assert EVAL_LOSS in UNITS
    others = {name for name in UNITS if name.startswith("eval_")} - {"eval_METRIC", "eval_length"}
    assert others == {
        "eval_loss",
        "eval_perplexity",
        "eval_tokens",
        "eval_samples",
        "eval_answers",
        "eval_tokens_per_s",
    }
    assert not {f"eval_{metric.value}" for metric in Metric} & others


def test_names_are_those_of_transformers() -> None:
    """Its integrations rewrite a log with this function; MLflow's does not."""
    from transformers.integrations.integration_utils import rewrite_logs

    for name in UNITS | SUMMARY:
        assert rewrite_logs({hf_name(name): 1}) == {tracked_name(name): 1}
    theirs = {"loss", "grad_norm", "learning_rate", "epoch", "num_input_tokens_seen", "global_step", "eval_loss"}
    theirs |= {"train_loss", "train_runtime", "train_samples_per_second", "train_steps_per_second"}
    assert theirs <= {hf_name(name) for name in UNITS | SUMMARY}
    assert tracked_name("eval_loss/a") == "eval/loss/a"
    assert re.fullmatch(r"train/learning_rate", tracked_name("lr"))


def test_a_rows_figures() -> None:
    row = {"step": 1, "loss": "nan", "grad_norm": "inf", "name": "x", "lr": 0.1}
    found = metric_values(row)
    assert str(found.pop("loss")) == "nan"
    assert found == {"step": 1.0, "grad_norm": float("inf"), "lr": 0.1}
    assert is_evaluation({"step": 1, "eval_loss": 1.0})
    assert not is_evaluation(row)
