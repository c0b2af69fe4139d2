"""Evaluation on real ranks: it leaves no trace in the training, and every way of running it finds the same."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from official import write
from ranks import forked, run
from safetensors.torch import load_file
from shared import WORKER, by_tier, losses, of_tier, rows_of, tiny

METRICS = "evaluate.metrics=[bleu,chrf,rouge_l,exact_match,distinct_2,length]"
STEPS = 6
COMMON = [f"train.max_steps={STEPS}", "checkpoint.every=2", "optim.lr=0.01"]
QUIET = ["evaluate.at_start=false"]
SHORT = "evaluate.max_new_tokens=8"
GREEDY = [METRICS, SHORT, "evaluate.every=2", "evaluate.batch_size=2"]
# 7 validation samples: 4 batches of 2, or 3 of 3, of which the second rank gets one less.
DRAWN = [METRICS, SHORT, "evaluate.every=1", "evaluate.batch_size=3", "evaluate.temperature=1.0", "evaluate.top_k=50"]
CELLS = {
    "quiet-2": ["zero=stage2", *QUIET],
    "quiet-3": ["zero=stage3", *QUIET],
    "drawn-2": ["zero=stage2", "checkpoint.export=true", *DRAWN],
    "drawn-3": ["zero=stage3", *DRAWN],
    "greedy-2": [
        "zero=stage2",
        *GREEDY,
        "checkpoint.keep=1",
        "evaluate.keep_best=eval_chrf",
    ],
    "greedy-3": ["zero=stage3", *GREEDY],
}
LATE = ("quiet-2", "greedy-3")
"""Cells of the nightly tier."""


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, rows_file: Path) -> Path:
    """All cells of the tier in one launch on two ranks."""
    folder = tmp_path_factory.mktemp("evaluate")
    cells = of_tier(request, CELLS, late=LATE)
    cases = [{"overrides": tiny(rows_file, folder, name, *COMMON, *words)} for name, words in cells.items()]
    official = write(folder / "v1", "v1", tokenizer=True)  # ChatGLM-6B's own model, with its two position channels
    for stage in (2, 3):
        words = ["model=hf", f"model.path={official}", f"zero=stage{stage}", "train.max_steps=1", METRICS]
        words += ["evaluate.temperature=1.0", "evaluate.batch_size=3"]
        words += [SHORT, "schedule.warmup_steps=0", "evaluate.prompts=[red]", "optim.lr=0.1"]
        cases.append({"overrides": tiny(rows_file, folder, f"v1-{stage}", *words)})
    (folder / "cases.json").write_text(json.dumps(cases))
    finished = run([*forked(2, WORKER), str(folder / "cases.json")], cwd=folder)
    assert finished.code == 0, finished.output[-6000:]
    return folder / "runs"


def answers(file: Path) -> list[dict[str, Any]]:
    """Return the rows of a file of answers."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.nightly), 3])
def test_training_is_the_same_to_the_bit_with_and_without_it(stage: int, runs: Path) -> None:
    quiet, drawn = runs / f"quiet-{stage}", runs / f"drawn-{stage}"
    assert len(losses(quiet)) == STEPS and len(set(losses(quiet))) == STEPS
    assert losses(quiet) == losses(drawn)
    assert [row["step"] for row in rows_of(drawn) if "eval_bleu" in row] == list(range(STEPS + 1))
    for rank in (0, 1):
        name = f"checkpoints/step-{STEPS}/random-rank-{rank:05d}.safetensors"
        left, right = load_file(quiet / name), load_file(drawn / name)
        assert all(torch.equal(left[key], right[key]) for key in left)


@pytest.mark.parametrize("kind", by_tier(["drawn", "greedy", "v1"], late=["greedy"]))
def test_a_partitioned_model_answers_as_a_whole_one(kind: str, runs: Path) -> None:
    """Before the first step, when both have the same weights; drawn answers differ from each other."""
    whole, partitioned = (answers(runs / f"{kind}-{stage}" / "evaluations" / "step-0.jsonl") for stage in (2, 3))
    assert len(whole) == 7
    assert whole == partitioned
    assert len({row["output"] for row in whole}) > (0 if kind == "greedy" else 5)
    figures = [next(row for row in rows_of(runs / f"{kind}-{stage}") if "eval_bleu" in row) for stage in (2, 3)]
    for name, value in figures[0].items():
        if name != "eval_tokens_per_s":
            assert figures[1][name] == pytest.approx(value, abs=1e-5), name


def test_questions_are_asked_before_and_after(runs: Path) -> None:
    """Greedily and of equal weights, so that the first answers are equal; a step at a huge rate changes them."""
    whole, partitioned = (answers(runs / f"v1-{stage}" / "samples.jsonl") for stage in (2, 3))
    assert [list(row) for row in (*whole, *partitioned)] == [["prompt", "before", "answer"]] * 2
    assert whole[0]["prompt"] == "red" and whole[0]["before"] == partitioned[0]["before"] != whole[0]["answer"]
    assert not (runs / "drawn-2" / "samples.jsonl").exists()


def test_the_best_checkpoint_stays(runs: Path) -> None:
    rated = [row for row in rows_of(runs / "greedy-2") if "eval_chrf" in row and row["step"]]
    best = max(rated, key=lambda row: (row["eval_chrf"], -row["step"]))
    kept = {path.name for path in (runs / "greedy-2" / "checkpoints").glob("step-*")}
    assert kept == {f"step-{best['step']}", f"step-{STEPS}"}


@pytest.fixture(scope="module")
def evaluated(runs: Path, rows_file: Path) -> dict[str, Path]:
    """What was exported, evaluated by the command: in one process, and by two ranks under ZeRO-3."""
    folder, found = runs.parent, {}
    words = ["model=hf", f"model.path={runs}/drawn-2/export", *COMMON, *DRAWN]
    for num_ranks, more in ((1, []), (2, ["zero=stage3"])):
        found[f"{num_ranks}"] = folder / f"by-{num_ranks}.jsonl"
        command = [*tiny(rows_file, folder, "", *words, *more), f"output={found[f'{num_ranks}']}"]
        finished = run(forked(0 if num_ranks == 1 else num_ranks, "--module", "toolkit", "eval", *command), cwd=folder)
        assert finished.code == 0, finished.output[-4000:]
        shown = [line.split() for line in finished.output.splitlines()]
        last = [row for row in rows_of(runs / "drawn-2") if "eval_loss" in row][-1]
        for name in ("loss", "chrf", "answers"):
            value = f"{last[f'eval_{name}']:,.4f}" if name != "answers" else "7"
            assert [name, value] in shown, (name, value, finished.output[-2000:])
    return found


def test_the_command_finds_what_training_found(evaluated: dict[str, Path], runs: Path) -> None:
    wanted = answers(runs / "drawn-2" / "evaluations" / f"step-{STEPS}.jsonl")
    assert sum(bool(row["output"]) for row in wanted) > 3
    for file in evaluated.values():
        assert answers(file) == wanted
        whole = json.loads(file.with_suffix(".json").read_text())
        last = [row for row in rows_of(runs / "drawn-2") if "eval_loss" in row][-1]
        for name, value in whole["figures"].items():
            if name != "eval_tokens_per_s":
                assert value == pytest.approx(last[name], abs=1e-5), name


def test_the_command_overwrites_nothing(
    evaluated: dict[str, Path], rows_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from toolkit.cli import main

    monkeypatch.setattr(os, "environ", dict(os.environ))  # the command sets RANK and others
    words = tiny(rows_file, evaluated["1"].parent, "", METRICS)
    before = evaluated["1"].read_bytes()
    assert main(["eval", *words, f"output={evaluated['1']}"]) == 2
    assert "already exists. Choose another output, or remove it." in capsys.readouterr().err
    assert evaluated["1"].read_bytes() == before
    assert main(["eval", *words, "output=x.txt"]) == 2
    assert "output = x.txt must end with .jsonl." in capsys.readouterr().err
    assert main(["eval", *tiny(rows_file, evaluated["1"].parent, ""), "data.validation_fraction=0"]) == 2
    assert "there is nothing to evaluate" in capsys.readouterr().err
