"""What a session hands on to its trackers."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from toolkit.cli import show
from toolkit.config.schema import RunConfig
from toolkit.tasks.language import LanguageTask
from toolkit.track.queue import Trackers
from toolkit.train.task import RunContext
from toolkit.train.tracking import Tracking, _mean_loss

BREAKS = "one\u2028two\u2029three\x85four"
"""What str.splitlines cuts, and JSON does not escape."""


class Recorder:
    """Trackers that keep what they are handed."""

    def __init__(self, is_on: bool = True) -> None:
        self.is_on = is_on
        self.handed: list[tuple[int, str, list[dict[str, Any]]]] = []

    def answers(self, step: int, name: str, rows: list[dict[str, Any]]) -> None:
        self.handed.append((step, name, rows))


def evaluated(folder: Path, text: str, is_on: bool = True) -> list[tuple[int, str, list[dict[str, Any]]]]:
    """Hand on the answers of a file."""
    (folder / "evaluations").mkdir()
    (folder / "evaluations" / "step-2.jsonl").write_text(text, encoding="utf-8")
    hook, trackers = Tracking(RunConfig()), Recorder(is_on)
    hook.trackers = cast("Trackers", trackers)
    run = SimpleNamespace(folder=folder, ranks=SimpleNamespace(rank=1))
    hook.at_begin(cast("RunContext", run), LanguageTask())
    hook.at_evaluation(1, {"eval_loss": 2.0}, 0.5)  # without answers
    hook.at_evaluation(2, {"eval_loss": 2.0, "eval_answers": 1.0}, 0.5)
    return trackers.handed


def test_answers_with_any_line_break(tmp_path: Path) -> None:
    rows = [{"prompt": "P", "output": BREAKS}, {"prompt": "Q", "output": "\r\n"}]
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    assert evaluated(tmp_path, text) == [(2, "answers", rows)]


def test_a_file_of_answers_that_a_full_disk_cut_off(tmp_path: Path) -> None:
    assert evaluated(tmp_path, '{"prompt": "P", "output": "A"}\n{"prompt": "Q", "out') == []


def test_without_a_tracker_answers_are_not_read(tmp_path: Path) -> None:
    assert evaluated(tmp_path, '{"prompt": "P", "output": "A"}\n', is_on=False) == []


def test_samples_of_a_bad_step_with_any_line_break(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sample = {"where": "a.jsonl:1", "rank": 0, "micro_batch": 0, "loss": 1.0, "tokens": 3, "trained_tokens": 2}
    rows = [{"step": 6, "text": "loss is nan"}, {**sample, "text": [["trained", BREAKS]]}]
    file = tmp_path / "bad-step-6.jsonl"
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    show.run([str(file)])
    said = capsys.readouterr().out
    assert "loss is nan" in said
    assert "a.jsonl:1" in said


def test_the_mean_loss_leaves_out_the_tokens_of_a_bad_row(tmp_path: Path) -> None:
    rows = [
        {"step": 1, "loss": 1.0, "trained_tokens": 100},
        {"step": 2, "loss": "nan", "trained_tokens": 1000},
        {"step": 2, "eval_loss": 9.0},
        {"step": 3, "loss": 3.0, "trained_tokens": 1100},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = SimpleNamespace(folder=tmp_path, cfg=RunConfig())
    assert _mean_loss(cast("RunContext", run)) == pytest.approx(2.0)


def test_the_mean_loss_of_a_task_that_counts_samples(tmp_path: Path) -> None:
    rows = [{"step": 1, "loss": 1.0, "samples": 4}, {"step": 2, "loss": 3.0, "samples": 8}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = SimpleNamespace(folder=tmp_path, cfg=RunConfig())
    assert _mean_loss(cast("RunContext", run)) == pytest.approx(2.0)


def test_the_mean_loss_of_a_run_from_another_ones_checkpoint(tmp_path: Path) -> None:
    pace = {"step_s": 2.0, "trained_tokens_per_s": 5.0}
    rows = [
        {"step": 5010, "loss": 1.0, "trained_tokens": 50_100, **pace},
        {"step": 5020, "loss": 3.0, "trained_tokens": 50_400, **pace},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "starts.jsonl").write_text('{"from_step": 5000}\n{"from_step": 5010}\n')
    run = SimpleNamespace(folder=tmp_path, cfg=RunConfig())
    assert _mean_loss(cast("RunContext", run)) == pytest.approx((100 * 1.0 + 300 * 3.0) / 400)


@pytest.mark.parametrize(("timeout_s", "patience_s"), [(1800, 30.0), (40, 10.0)])
def test_trackers_are_waited_for_no_longer_than_other_ranks_wait(timeout_s: int, patience_s: float) -> None:
    cfg = RunConfig()
    cfg.distributed.timeout_s = timeout_s
    assert Tracking(cfg).trackers.patience_s == patience_s
