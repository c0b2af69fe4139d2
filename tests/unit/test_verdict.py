"""The verdict that a report begins with: what it says of curves, and that it never says more than they show."""

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.unit.fake_runs import fake_run, lines, row
from toolkit.checkpoint.directory import RunState
from toolkit.config.load import load, to_dict
from toolkit.config.schema import EVAL_EMBED, EVAL_LABELS, EVAL_LOSS, EVAL_PAIRS
from toolkit.engine import parameters
from toolkit.export.card import card
from toolkit.messages import set_language
from toolkit.report.run import read_run
from toolkit.report.verdict import (
    DIVERGED,
    FLAT,
    LEARNED,
    OVERFIT,
    SHORT,
    UNSEEN,
    Curves,
    Points,
    curves_of,
    judge,
    next_commands,
    verdict_of,
)
from toolkit.tasks.classify import ClassifyTask
from toolkit.tasks.distill import DistillTask
from toolkit.tasks.embed import EmbedTask
from toolkit.tasks.language import LanguageTask
from toolkit.tasks.preference import PreferenceTask

QUICKSTART = ((0, 7.6583), (100, 3.6349), (200, 1.8756), (300, 0.6586), (400, 0.1886), (500, 0.1014), (528, 0.1013))
"""Validation losses of recipe=quickstart on one rank, and its n-gram baselines."""
NGRAMS = {"unigram": 5.691, "bigram": 1.851}


def at(*losses: float, every: int = 100) -> Points:
    return [(every * index, loss) for index, loss in enumerate(losses)]


def of(validation: Points = (), steps: int = 400, **more: Any) -> Curves:
    return Curves(steps=steps, training=at(3.0, 2.0, 1.5), validation=validation, **more)


CASES = {
    "real": (
        of(QUICKSTART, 528, baselines=NGRAMS),
        LEARNED,
        "Learned: validation loss 7.66 -> 0.101, below the unigram (5.69) and bigram (1.85) baselines.",
    ),
    "a rise that few tokens may show by chance": (
        of(at(5.04, 0.784, 0.695, 0.745), 54, validation_tokens=109),
        LEARNED,
        "Learned: validation loss 5.04 -> 0.745. It was lowest at step 200 (0.695); over 109 validation tokens that "
        "may be chance.",
    ),
    "the same rise on many tokens": (
        of(at(5.04, 0.784, 0.695, 0.745), 54, validation_tokens=10_900),
        OVERFIT,
        "Validation loss rises since step 200: 0.695 -> 0.745. Stop earlier.",
    ),
    "without baselines": (of(at(2.68, 2.1, 1.97, 1.96)), LEARNED, "Learned: validation loss 2.68 -> 1.96."),
    "above the bigrams": (
        of(QUICKSTART[:2], 100, baselines=NGRAMS),
        SHORT,
        "Not enough yet: validation loss 7.66 -> 3.63, below the unigram baseline (5.69), above the bigram one (1.85).",
    ),
    "above the unigrams": (
        of(at(7.66, 6.6), 60, baselines=NGRAMS),
        SHORT,
        "Not enough yet: validation loss 7.66 -> 6.60, above the unigram baseline (5.69).",
    ),
    "few steps": (of(at(2.68, 2.6), 30), SHORT, "30 steps are too few: validation loss 2.68 -> 2.60."),
    "one step": (of(at(2.68, 2.6), 1), SHORT, "1 step is too few: validation loss 2.68 -> 2.60."),
    "few steps, falling": (of(at(5.0, 4.0, 3.0), 30), SHORT, "30 steps are too few: validation loss 5.00 -> 3.00."),
    "few steps, level": (of(at(5.0, 3.0, 3.0), 30), LEARNED, "Learned: validation loss 5.00 -> 3.00."),
    "few steps, flat": (of(at(5.0, 5.0, 5.0), 30), SHORT, "30 steps are too few: validation loss 5.00 -> 5.00."),
    "flat": (of(at(2.68, 2.7, 2.67)), FLAT, "Loss did not fall: validation loss 2.68 -> 2.67."),
    "rises from the start": (of(at(2.0, 2.5, 3.0)), FLAT, "Loss did not fall: validation loss 2.00 -> 3.00."),
    "overfits": (
        of(at(2.68, 1.96, 2.1, 2.31)),
        OVERFIT,
        "Validation loss rises since step 100: 1.96 -> 2.31. Stop earlier.",
    ),
    "overfits beyond its beginning": (
        of(at(2.0, 1.5, 2.5)),
        OVERFIT,
        "Validation loss rises since step 100: 1.50 -> 2.50. Stop earlier.",
    ),
    "a peak": (
        of(at(2.68, 1.96, 3.0, 2.1)),
        OVERFIT,
        "Validation loss was lowest at step 100: 1.96, at the end 2.10.",
    ),
    "within 1 %": (of(at(2.68, 1.96, 1.97)), LEARNED, "Learned: validation loss 2.68 -> 1.97."),
    "small losses": (of(at(0.003, 0.0005)), LEARNED, "Learned: validation loss 0.00300 -> 0.000500."),
    "negative losses": (of(at(-1.0, -3.0)), LEARNED, "Learned: validation loss -1.00 -> -3.00."),
    "NaN": (of(at(2.68, 2.0), not_finite=True), DIVERGED, "Diverged: the last loss is NaN or Inf, at step 400."),
    "skipped steps": (
        of(at(2.68, 1.96), skipped=40),
        LEARNED,
        "Learned: validation loss 2.68 -> 1.96. Skipped steps: 40 of 400.",
    ),
    "few skipped steps": (of(at(2.68, 1.96), skipped=3), LEARNED, "Learned: validation loss 2.68 -> 1.96."),
    "one evaluation": (
        of([(400, 1.96)]),
        SHORT,
        "One evaluation is too few to judge: validation loss 1.96 at step 400.",
    ),
    "no evaluation": (of(), SHORT, "No evaluation yet: training loss 3.00 -> 1.50."),
    "no validation set": (
        of(has_validation=False),
        UNSEEN,
        "No validation set: training loss 3.00 -> 1.50, which does not show whether the model does better on new data.",
    ),
    "no validation set, flat": (
        replace(of(has_validation=False), training=at(*[2.0, 1.9, 2.1] * 20)),
        FLAT,
        "Loss did not fall: training loss 2.00 -> 2.00.",
    ),
    "no validation set, one row": (
        replace(of(has_validation=False, steps=10), training=at(2.0)),
        SHORT,
        "10 steps are too few: training loss 2.00.",
    ),
    "pairs": (
        of(at(0.69, 0.41), shares=at(0.0, 0.83), metric="reward accuracy", samples=200, chance=0.5),
        LEARNED,
        "Learned: validation reward accuracy 0.0% -> 83.0%. Validation loss 0.690 -> 0.410.",
    ),
    "pairs, by a coin": (
        of(at(0.69, 0.68), shares=at(0.0, 0.55), metric="reward accuracy", samples=40, chance=0.5),
        FLAT,
        "Not above chance: validation reward accuracy 0.0% -> 55.0%, guessing gives 50%. "
        "Validation loss 0.690 -> 0.680.",
    ),
    "labels": (
        of(at(0.7, 0.9), shares=at(0.52, 0.6, 0.81), metric="accuracy", samples=500),
        LEARNED,
        "Learned: validation accuracy 52.0% -> 81.0%. Validation loss 0.700 -> 0.900.",
    ),
    "labels, too few": (
        of(at(0.7, 0.6), shares=at(0.5, 0.6), metric="accuracy", samples=20),
        FLAT,
        "Validation accuracy did not rise: 50.0% -> 60.0%; differences below 22 points may be chance. "
        "Validation loss 0.700 -> 0.600.",
    ),
    "labels, few steps": (
        of(at(0.7, 0.7), 20, shares=at(0.5, 0.5), metric="accuracy", samples=20),
        SHORT,
        "20 steps are too few: validation accuracy 50.0% -> 50.0%. Validation loss 0.700 -> 0.700.",
    ),
    "labels, known before": (
        of((), shares=at(1.0, 1.0), metric="accuracy", samples=20),
        FLAT,
        "Validation accuracy was 100.0% from the start and is 100.0%.",
    ),
    "labels, damaged": (
        of((), shares=at(-3.0, 7.0), metric="accuracy", samples=-5),
        LEARNED,
        "Learned: validation accuracy -300.0% -> 700.0%.",
    ),
    "labels, overfit": (
        of(at(0.7, 0.5), shares=at(0.5, 0.9, 0.6), metric="accuracy", samples=500),
        OVERFIT,
        "Validation accuracy falls since step 100: 90.0% -> 60.0%.",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_verdict_says_what_the_curves_show(name: str) -> None:
    curves, kind, text = CASES[name]
    verdict = judge(curves)
    assert verdict is not None and (verdict.kind, verdict.text) == (kind, text)


HEADLINES = {
    "real": "Learned: the validation loss is below the unigram and bigram baselines.",
    "without baselines": "Learned.",
    "a rise that few tokens may show by chance": (
        "Learned. It was lowest at step 200 (0.695); over 109 validation tokens that may be chance."
    ),
    "few steps, falling": "30 steps are too few to judge.",
    "one step": "1 step is too few to judge.",
    "the same rise on many tokens": "",
}


@pytest.mark.parametrize("name", HEADLINES)
def test_a_headline_repeats_no_figure(name: str) -> None:
    verdict = judge(CASES[name][0])
    assert verdict is not None and verdict.headline == HEADLINES[name]


def test_nothing_is_said_of_a_run_without_steps(tmp_path: Path) -> None:
    assert judge(Curves(steps=0, training=())) is None
    (tmp_path / "config.yaml").touch()
    assert verdict_of(read_run(tmp_path)) is None


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A finished run, whose curves a test replaces."""
    folder = fake_run(tmp_path / "run")
    (folder / "DONE").write_text('{"steps": 40}')
    return folder


def evaluated(*values: Any, name: str = "eval_loss", **more: Any) -> Iterator[dict[str, Any]]:
    for index, value in enumerate(values):
        yield {"step": 100 * index, "eval_loss": 1.0, name: value, **more}


def test_curves_are_those_of_the_file(folder: Path) -> None:
    rows = [row(step, skipped_steps=2) for step in range(1, 300)]
    lines(folder / "metrics.jsonl", [*evaluated(3.0, 2.5, 2.0), *rows, {"step": 200, "eval_loss": 1.5}])
    curves = curves_of(read_run(folder))
    assert list(curves.validation) == [(0, 3.0), (100, 2.5), (200, 1.5)], "of a step that was repeated the last"
    assert (curves.steps, curves.skipped, curves.not_finite, curves.has_validation) == (299, 2, False, True)
    (folder / "DONE").write_text('{"steps": 300, "unigram_loss": 5.5, "bigram_loss": "damaged"}')
    assert curves_of(read_run(folder)).baselines == {"unigram": 5.5}
    lines(folder / "metrics.jsonl", [*evaluated(3.0, "nan"), *rows])
    assert curves_of(read_run(folder)).not_finite
    lines(folder / "metrics.jsonl", [*rows, row(300, loss="nan")])
    assert curves_of(read_run(folder)).not_finite and not curves_of(read_run(folder)).has_validation
    lines(folder / "metrics.jsonl", [*rows, row(300, loss="nan"), row(301)])
    assert not curves_of(read_run(folder)).not_finite, "a step that was skipped"


@pytest.mark.parametrize(
    ("name", "count", "metric", "chance"),
    [
        (EVAL_PAIRS[0], "eval_pairs", "reward accuracy", 0.5),
        (EVAL_LABELS[0], "eval_samples", "accuracy", 0.0),
        (EVAL_EMBED[0], "eval_samples", "recall at 1", 0.0),
    ],
)
def test_a_task_is_judged_by_its_own_metric(name: str, count: str, metric: str, chance: float, folder: Path) -> None:
    lines(folder / "metrics.jsonl", [row(400), *evaluated(0.5, 0.9, name=name, **{count: 300})])
    run = read_run(folder)
    curves = curves_of(run)
    assert (curves.metric, curves.chance, curves.samples) == (metric, chance, 300)
    assert list(curves.shares) == [(0, 0.5), (100, 0.9)]
    run.data["program"] = "own.py"  # whose metrics may be called so and be no share
    assert not curves_of(run).shares


def test_what_to_type_next_follows_from_the_verdict(folder: Path) -> None:
    def typed(*rows: dict[str, Any], steps: int = 400) -> list[str]:
        lines(folder / "metrics.jsonl", [*(row(step) for step in range(1, steps + 1)), *rows])
        run = read_run(folder)
        verdict = verdict_of(run)
        assert verdict is not None
        return [command for _, command in next_commands(run, verdict, ["python", "run.py", "recipe=x"])]

    learned = list(evaluated(3.0, 2.0, 1.0))
    longer = f"python run.py recipe=x resume={folder} train.max_steps=80 'checkpoint.allow_changes=[train.max_steps]'"
    assert typed(*learned) == [f"toolkit export-model {folder}"]
    (folder / "export").mkdir()
    (folder / "checkpoints" / "latest").mkdir(parents=True)
    assert typed(*learned) == [f"toolkit chat {folder}/export", longer], "it is still falling"
    (folder / "export" / "adapter_config.json").touch()
    level = [f"toolkit chat {folder}/export", f"toolkit export-model {folder}/export merge=true output=merged"]
    assert typed(*evaluated(3.0, 1.0, 1.0)) == level
    assert typed(*evaluated(3.0, 2.9), steps=30) == [longer]
    assert typed({"step": 400, "eval_loss": 1.0}) == ["python run.py recipe=x evaluate.every=80"]
    keep = "python run.py recipe=x evaluate.keep_best=eval_loss checkpoint.every=100"
    assert typed(*evaluated(3.0, 1.0, 2.0)) == [f"toolkit chat {folder}/export", keep]
    (folder / "checkpoints" / "step-100").mkdir()
    best = f"toolkit export-model {folder}/checkpoints/step-100 output=step-100"
    assert typed(*evaluated(3.0, 1.0, 2.0)) == [f"toolkit chat {folder}/export", best]
    look = f"toolkit show recipe={folder}/config.yaml"
    assert typed(*evaluated(3.0, 3.0)) == [look, "python run.py recipe=x optim.lr=0.006"]
    assert typed(*evaluated(3.0, "nan")) == [look, "python run.py recipe=x optim.lr=0.00067"]
    assert typed() == [*level, "python run.py recipe=x data.validation_fraction=0.05 evaluate.every=80"]


def test_a_run_that_has_not_ended_is_not_judged_as_one_that_has(folder: Path) -> None:
    (folder / "DONE").unlink()
    run = read_run(folder)
    verdict = verdict_of(run)
    assert verdict is not None
    assert verdict.text == "Until it ended at step 40: 40 steps are too few: validation loss 8.00 -> 4.00."
    [(_, command)] = next_commands(run, verdict, [])
    assert command == "deepspeed --num_gpus 2 run.py recipe=quickstart run.name=fine", "the command that started it"
    shutil.rmtree(folder / "logs")
    (folder / "logs").mkdir()
    (folder / "logs" / "heartbeat-rank-0.json").touch()
    (folder / "run.lock").write_text(json.dumps({"pid": 1, "host": "another-node"}))
    run = read_run(folder)
    set_language("zh")
    try:
        verdict = verdict_of(run)
    finally:
        set_language("en")
    assert verdict is not None
    assert verdict.text == "目前：40 步太少：验证 loss 8.00 -> 4.00。"
    assert next_commands(run, verdict, []) == []


MEASURED = {
    "language": (LanguageTask, "Validation loss 0.500 nats/token."),
    "classify": (ClassifyTask, "Validation loss 0.5000, accuracy 25.0%."),
    "embed": (EmbedTask, "Validation loss 0.5000, recall at 1 25.0%."),
    "preference": (PreferenceTask, "Validation loss 0.5000, reward accuracy 25.0%."),
    "distill": (
        DistillTask,
        "Validation loss 0.500 nats/token.\nGeneral validation samples: loss 0.250 nats/token, 0.2500 nats/token from "
        "the model before training.",
    ),
}
"""Task, and its last lines where its figures were measured once."""


@pytest.mark.parametrize("name", MEASURED)
def test_what_was_measured_once_has_no_arrow(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, lines_of_one = MEASURED[name]
    monkeypatch.setattr(parameters, "count_parameters", lambda model: {})
    run: Any = SimpleNamespace(
        cfg=SimpleNamespace(evaluate=SimpleNamespace(ngram_baselines=False)),
        engine=SimpleNamespace(module=torch.nn.Linear(1, 1)),
    )
    task: Any = kind.__new__(kind)  # without data
    figures = {EVAL_LOSS: 0.5, **{figure: 0.25 for figure, _ in kind.reported}}
    said = []
    for steps in ([], [20], [0, 20]):
        state = RunState(evaluations=[{"step": step, **figures} for step in steps])
        result: Any = SimpleNamespace(state=state)
        summary = kind.summary(task, run, result)
        assert ("first_eval_loss" in summary, "last_eval_loss" in summary) == (len(steps) > 1, bool(steps))
        said.append("\n".join(kind.end_lines(task, summary)))
    assert said[:2] == ["", lines_of_one]
    assert re.sub(r"([\d.]+%?) -> \1", r"\1", said[2]) == lines_of_one != said[2]


def test_a_training_loss_of_one_step_has_no_arrow() -> None:
    verdict = judge(Curves(steps=1, training=[(1, 3.0)], has_validation=False))
    assert verdict is not None and verdict.text == "1 step is too few: training loss 3.00."
    config = to_dict(load(["recipe=quickstart"]).cfg)
    for step, losses in ((1, "training: 3.0000 nats/token"), (2, "training: 3.0000 -> 3.0000 nats/token")):
        state = RunState(step=step, first_loss=3.0, last_loss=3.0, config=config)
        assert losses in card(state, is_adapter=False).decode()
