"""The names and units of metrics: those of the code are those of the documentation, and those of transformers."""

import re

from tests.unit.metric_table import PAGE, documented, names_elsewhere
from toolkit.config.schema import EVAL_LOSS, Metric
from toolkit.track.metrics import hf_name, is_evaluation, metric_values, tracked_name

METRICS = documented()


def test_names_elsewhere_are_the_codes() -> None:
    shown = names_elsewhere()
    for name in METRICS:
        rule = "eval_NAME" if name.startswith("eval_") else "NAME"
        general = tuple(one.replace("NAME", name.removeprefix("eval_")) for one in shown[rule])
        assert shown.get(name, general) == (tracked_name(name), hf_name(name))
    assert len(METRICS) > 50


def test_both_languages_have_the_same_tables() -> None:
    chinese = PAGE.with_stem("tracking_zh")
    assert documented(chinese) == METRICS
    assert names_elsewhere(chinese) == names_elsewhere()


def test_evaluations_are_in_it() -> None:
    assert EVAL_LOSS in METRICS
    others = {name for name in METRICS if name.startswith("eval_")} - {"eval_METRIC", "eval_length"}
    assert others == {
        "eval_loss",
        "eval_perplexity",
        "eval_tokens",
        "eval_samples",
        "eval_answers",
        "eval_tokens_per_s",
        "eval_pairs",
        "eval_rewards",
        "eval_accuracy",
        "eval_macro_f1",
        "eval_recall_at_1",
        "eval_mrr",
        "eval_kl",
        "eval_logps",
        "eval_general_loss",
    }
    assert not {f"eval_{metric.value}" for metric in Metric} & others


def test_names_are_those_of_transformers() -> None:
    """Its integrations rewrite a log with this function; MLflow's does not."""
    from transformers.integrations.integration_utils import rewrite_logs

    for name in METRICS:
        assert rewrite_logs({hf_name(name): 1}) == {tracked_name(name): 1}
    theirs = {"loss", "grad_norm", "learning_rate", "epoch", "num_input_tokens_seen", "global_step", "eval_loss"}
    theirs |= {"train_loss", "train_runtime", "train_samples_per_second", "train_steps_per_second"}
    assert theirs <= {hf_name(name) for name in METRICS}
    assert tracked_name("eval_loss/a") == "eval/loss/a"
    assert re.fullmatch(r"train/learning_rate", tracked_name("lr"))


def test_a_rows_figures() -> None:
    row = {"step": 1, "loss": "nan", "grad_norm": "inf", "name": "x", "lr": 0.1}
    found = metric_values(row)
    assert str(found.pop("loss")) == "nan"
    assert found == {"step": 1.0, "grad_norm": float("inf"), "lr": 0.1}
    assert is_evaluation({"step": 1, "eval_loss": 1.0})
    assert not is_evaluation(row)
