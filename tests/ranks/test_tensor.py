"""Layers split over ranks: every family trains as one process would; a whole run goes on, evaluates and exports."""

import json
from pathlib import Path

import pytest
from ranks import REPOSITORY, deepspeed, forked, run
from shared import SHORT_FIRST, check_short_first, rows_of, tiny, trained

from toolkit.checkpoint import directory
from toolkit.export.model import load_checkpoint
from toolkit.models import load_model, probe

HERE = REPOSITORY / "tests" / "ranks"
STEPS = 6


def test_every_family_trains_as_one_process_would() -> None:
    """Four ranks: two models of two ranks each."""
    finished = run(forked(4, str(HERE / "tensor_worker.py")), cwd=REPOSITORY, timeout_s=480)
    assert finished.code == 0, finished.output[-5000:]
    assert finished.output.count("ALL CHECKED") == 4


@pytest.fixture(scope="module")
def runs(rows_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs on two ranks, data-parallel and with split layers, and what became of them after a death."""
    folder = tmp_path_factory.mktemp("tensor")
    own = ["zero=stage1", f"train.max_steps={STEPS}", "checkpoint.every=2", "checkpoint.keep=0"]
    asks = ["evaluate.metrics=[bleu]", "evaluate.max_new_tokens=3", "evaluate.batch_size=2", "evaluate.every=3"]
    asks += ["data.packing=packed", "train.rehearse=true"]

    def words(name: str, *more: str) -> list[str]:
        return tiny(rows_file, folder, name, *own, *more)

    died = {"of": str(folder / "runs" / "split"), "step": 4, "as": str(folder / "runs" / "again")}
    cases = [
        # First: an engine that splits nothing cannot follow one that does in the same process.
        {"overrides": words("data", *asks)},
        {"overrides": words("short-first-data", *SHORT_FIRST)},
        {"overrides": words("split", *asks, "parallel=tensor")},
        {"overrides": words("again", *asks, "parallel=tensor"), "died": died},
        {"overrides": words("short-first", *SHORT_FIRST, "parallel=tensor", "kernels.mlp_pieces=2")},
        {"overrides": words("frozen", "parallel=tensor", "tuning=freeze", "tuning.last_layers=1")},
    ]
    (folder / "cases.json").write_text(json.dumps(cases))
    finished = run(
        deepspeed(2, str(HERE / "sessions_worker.py"), str(folder / "cases.json")), cwd=folder, timeout_s=480
    )
    assert finished.code == 0, finished.output[-5000:]
    return folder / "runs"


def test_a_run_is_the_same_as_without(runs: Path) -> None:
    """Losses, gradient norms, token counts, validation losses and answers."""
    plain, split = rows_of(runs / "data"), rows_of(runs / "split")
    assert len(plain) == len(split) > STEPS
    for before, after in zip(plain, split, strict=True):
        for name in ("step", "trained_tokens", "total_tokens", "eval_tokens", "eval_answers"):
            assert after.get(name) == before.get(name), name
        for name in ("loss", "grad_norm", "eval_loss", "eval_bleu"):
            assert after.get(name, 0.0) == pytest.approx(before.get(name, 0.0), rel=1e-5), name
    for step in (3, STEPS):
        file = Path("evaluations") / f"step-{step}.jsonl"
        before, after = ((runs / name / file).read_text() for name in ("data", "split"))
        assert before and before == after


def test_the_same_samples_first_as_without(runs: Path) -> None:
    """The split layers compute their rows in pieces here."""
    check_short_first(runs / "short-first", runs / "short-first-data", rel=1e-5)


def test_it_goes_on_bit_for_bit(runs: Path) -> None:
    assert trained(runs / "again") == trained(runs / "split")


@pytest.mark.parametrize("name", ["split", "frozen"])
def test_checkpoints_and_exports_are_whole(name: str, runs: Path) -> None:
    """The same logits by the run, by its export, and by its last checkpoint without ranks."""
    export, checkpoint = runs / name / "export", runs / name / "checkpoints" / f"step-{STEPS}"
    assert not directory.manifest_problems(checkpoint)
    for model in (load_model(export), load_checkpoint(checkpoint)):
        taken = probe.read(export)
        assert taken is not None
        difference, tolerance = probe.compare(model, taken)
        assert difference <= tolerance
    mine, kept = load_model(export).state_dict(), load_checkpoint(checkpoint).state_dict()
    assert all((mine[key] == kept[key]).all() for key in mine)
