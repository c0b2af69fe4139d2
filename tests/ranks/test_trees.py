"""Conversations as trees on ranks: the losses of their samples on their own, in every layout; resumed bit by bit."""

import json
from pathlib import Path

import pytest
from ranks import forked, run
from shared import ALL, LORA, RECOMPUTE, WORKER, by_tier, conversations, of_tier, rows_of, trained

# fp32: the only difference left is the order of additions.
TOLERANCE = 1e-5
STEPS = 4
SAVED = ["checkpoint.every=2", "checkpoint.keep=0"]

# name -> overrides; two ranks
CELLS: dict[str, list[str]] = {
    "stage2": ["zero=stage2", *SAVED],
    "stage3-micro2": ["zero=stage3", ALL, "batch.micro_per_gpu=2", RECOMPUTE],
    "lora-stage3": ["zero=stage3", ALL, RECOMPUTE, *LORA, *SAVED],
    "lora-stage2-mask": ["zero=stage2", "model.attention=sdpa", "batch.micro_per_gpu=2", *LORA],
    "sequence": ["zero=stage2", "parallel.sequence=2"],
    "pipeline": ["zero=stage1", "parallel.pipeline=2", RECOMPUTE],
}
RESUMED = ("stage2", "lora-stage3")
LATE, RESUMED_LATE = ("stage3-micro2",), ("stage2",)
"""Cells of the nightly tier: what is particular to each is met in another one."""


@pytest.fixture(scope="session")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return overrides: ten conversations with reasoning, of which each step takes all, as trees or not."""
    return [*conversations(tmp_path_factory.mktemp("chats")), f"train.max_steps={STEPS}"]


@pytest.fixture(scope="session")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, words: list[str]) -> Path:
    """Train all cells, as trees and as copies; resume some from the middle in directories of their own."""
    folder = tmp_path_factory.mktemp("trees")
    cases, resumed = [], of_tier(request, dict.fromkeys(RESUMED), late=RESUMED_LATE)
    for name, given in of_tier(request, CELLS, late=LATE).items():
        base = [*words, f"run.dir={folder}", *given]
        cases.append({"overrides": [*base, f"run.name={name}"]})
        cases.append({"overrides": [*base, f"run.name={name}-copies", "data.share_prefixes=false"]})
        if name in resumed:
            checkpoint = folder / name / "checkpoints" / "step-2"
            cases.append({"overrides": [*base, f"run.name={name}-resumed", f"resume={checkpoint}"]})
    listing = folder / "cases.json"
    listing.write_text(json.dumps(cases))
    finished = run([*forked(2, WORKER), str(listing)], cwd=folder, timeout_s=400)
    assert finished.code == 0, finished.output[-6000:]
    return folder


@pytest.mark.parametrize("name", by_tier(CELLS, late=LATE))
def test_trees_follow_their_copies(name: str, runs: Path) -> None:
    trees, copies = (rows_of(runs / one) for one in (name, f"{name}-copies"))
    assert len(trees) == len(copies)
    steps = [pair for pair in zip(trees, copies, strict=True) if "loss" in pair[0]]
    assert len(steps) == STEPS
    assert steps[0][0]["loss"] - steps[-1][0]["loss"] > 0.02, "it must learn, or the comparison says little"
    for one, other in zip(trees, copies, strict=True):
        for key in ("loss", "grad_norm", "eval_loss"):
            assert one.get(key, 0.0) == pytest.approx(other.get(key, 0.0), rel=TOLERANCE, abs=TOLERANCE), (key, one)
    for one, other in steps:
        assert one["trained_tokens"] == other["trained_tokens"]
        assert one["total_tokens"] < 0.8 * other["total_tokens"]


def test_divided_over_ranks_as_on_one(runs: Path) -> None:
    """Trees whose tokens ranks share have the losses of trees that a rank has alone."""
    for one, other in zip(rows_of(runs / "sequence"), rows_of(runs / "stage2"), strict=True):
        for key in ("loss", "grad_norm", "eval_loss", "trained_tokens", "total_tokens"):
            assert one.get(key, 0.0) == pytest.approx(other.get(key, 0.0), rel=TOLERANCE, abs=TOLERANCE), (key, one)


@pytest.mark.parametrize("name", by_tier(RESUMED, late=RESUMED_LATE))
def test_resumed_bit_by_bit(name: str, runs: Path) -> None:
    whole, resumed = ([row for row in trained(runs / one) if row["step"] > 2] for one in (name, f"{name}-resumed"))
    assert len(whole) >= 3 and whole == resumed
