"""A run that died and goes on is the run that never died: losses, weights, optimizer and random states, bit for bit."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import forked, run
from safetensors.torch import load_file
from shared import WORKER, by_tier, launcher, losses, of_tier, rows_of, tiny, trained

from toolkit.checkpoint.directory import FRAGMENTS, published_checkpoints, step_of
from toolkit.checkpoint.intact import manifest_problems
from toolkit.cli import main

STEPS, EVERY = 10, 4
COMMON = [f"checkpoint.every={EVERY}", "checkpoint.keep=0", f"train.max_steps={STEPS}"]
ASYNC = "checkpoint.asynchronous=true"
NOISE = "train.neftune_alpha=5"
MIXTURE = "data.sources=[{path: FILE, weights: [{at: 0, weight: 2}, {at: 1, weight: 0}]}, {path: more.jsonl}]"
GROUPS = ["optim.decay=matrices", "optim.layer_lr_decay=0.5", "optim.weight_decay=0.3"]
STATES = ["precision=bf16", "precision.optimizer_states=bf16"]
CHANGED = ["optim.lr=0.001", "optim.weight_decay=0.5", "optim.eps=1e-6", "checkpoint.allow_changes=[optim]"]
# 30 training rows in steps of 4: an epoch is 8 steps. Step 4 is in the middle of one, step 8 its end.
ONE_AND_A_QUARTER = ["train.max_steps=0", "train.epochs=1.25"]
CURRICULUM = [
    *("data.curriculum.steps=6", "data.curriculum.start_length=12", "data.max_length=64"),
    *ONE_AND_A_QUARTER,
]
CELLS: dict[str, tuple[int, list[str]]] = {
    "stage0-fp32": (4, ["zero=stage0"]),
    "stage0-bf16-packed": (4, ["zero=stage0", "precision=bf16", "data.packing=packed", "batch.global_size=2"]),
    "stage1-fp32-grouped": (4, ["zero=stage1", "data.packing=grouped", "batch.global_size=2", "data.num_workers=1"]),
    "stage1-bf16": (8, ["zero=stage1", "precision=bf16", "data.num_workers=2"]),
    "stage1-fp32-mixture": (4, ["zero=stage1", MIXTURE]),
    "stage2-fp32-offload": (4, ["zero=stage2_offload", "optim.torch=false"]),
    "stage2-bf16-packed": (8, ["zero=stage2", "precision=bf16", "data.packing=packed", "batch.global_size=2", ASYNC]),
    "stage3-fp32-packed": (
        4,
        ["zero=stage3", "data.packing=packed", "batch.global_size=2", "data.num_workers=1"],
    ),
    "stage3-bf16-offload": (4, ["zero=stage3_offload", "optim.torch=false", "precision=bf16", NOISE]),
    "stage3-fp32": (8, ["zero=stage3", ASYNC, *GROUPS]),
    "stage1-bf16-states": (4, ["zero=stage1", *STATES]),
    "stage2-bf16-states": (8, ["zero=stage2", *STATES, "train.rehearse=true", "optim=adam", "optim.weight_decay=0.1"]),
    "stage3-bf16-states": (4, ["zero=stage3", *STATES, "zero.sub_group_size=30000", *GROUPS]),
    "stage2-fp32": (4, ["zero=stage2"]),
    "stage2-fp32-curriculum": (4, ["zero=stage2", *CURRICULUM, *GROUPS]),
}
# The same run with its checkpoints saved in the other way -> its overrides.
TWINS: dict[str, list[str]] = {
    "stage0-fp32": ["zero=stage0", ASYNC],
    "stage2-bf16-packed": ["zero=stage2", "precision=bf16", "data.packing=packed", "batch.global_size=2"],
    "stage3-fp32": ["zero=stage3", *GROUPS],
    "stage3-bf16-offload": ["zero=stage3_offload", "optim.torch=false", "precision=bf16", NOISE, ASYNC],
}


# name -> (straight run, its ranks, ranks that go on, overrides)
OTHERS: dict[str, tuple[str, int, list[str]]] = {
    "2-to-1-stage1": ("stage1-fp32-grouped", 1, ["zero=stage1", "data.packing=grouped", "batch.global_size=2"]),
    "2-to-1-stage3": ("stage3-fp32", 1, ["zero=stage3", "zero.sub_group_size=30000", *GROUPS]),
    "2-to-1-stage0": ("stage0-fp32", 1, ["zero=stage0"]),
    "2-to-1-stage2-micro4": ("stage2-fp32", 1, ["zero=stage2", "batch.micro_per_gpu=4"]),
    "2-to-4-stage2": ("stage2-fp32", 4, ["zero=stage2"]),
    "2-to-4-stage3": ("stage3-fp32", 4, ["zero=stage3", *GROUPS]),
    "4-to-2-stage2": ("stage2-fp32-4", 2, ["zero=stage2"]),
    "2-to-1-offload-to-stage2": ("stage2-fp32-offload", 1, ["zero=stage2"]),
    "2-to-1-mixture": ("stage1-fp32-mixture", 1, ["zero=stage1", MIXTURE]),
    "2-to-1-curriculum": ("stage2-fp32-curriculum", 1, ["zero=stage2", *CURRICULUM, *GROUPS]),
    "2-to-1-bf16-states": ("stage3-bf16-states", 1, ["zero=stage2", *STATES, *GROUPS]),
    "stage2-to-1": ("stage2-fp32", 2, ["zero=stage1"]),
    "stage1-to-2": ("stage1-fp32-grouped", 2, ["zero=stage2", "data.packing=grouped", "batch.global_size=2"]),
    "stage3-to-offload": ("stage3-fp32", 2, ["zero=stage3_offload", "optim.torch=false", *GROUPS]),
    "stage2-to-offload": ("stage2-fp32", 2, ["zero=stage2_offload", "optim.torch=false"]),
}
# name -> when it saves, by the clock
BY_CLOCK = {
    name: ["checkpoint.keep=0", "zero=stage2", f"checkpoint.minutes={minutes}"]
    for name, minutes in {"clock": 0.0005, "once": 0}.items()
}
SHORT = ("stage2-fp32", "2-to-1-stage2-micro4")
"""Cells of the default tier."""
LATE = (
    *("stage0-fp32", "stage1-fp32-grouped", "stage1-bf16", "stage2-fp32-offload", "stage2-bf16-packed", "stage3-fp32"),
    *("stage1-bf16-states", "stage2-bf16-states"),
    *(name for name in OTHERS if name not in ("2-to-1-mixture", "2-to-1-curriculum", "2-to-1-bf16-states", *SHORT)),
)
"""Those of the nightly tier: each axis is met in another cell, and layouts change in test_layouts.py."""


@pytest.fixture(scope="session")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, rows_file: Path) -> Path:
    """Every cell straight, and again from a checkpoint; all in one launch on two ranks."""
    folder = tmp_path_factory.mktemp("resume")
    rows = [json.loads(line) for line in rows_file.read_text().splitlines()[:20]]
    more = [json.dumps({"prompt": row["response"], "response": row["prompt"]}) + "\n" for row in rows]
    (folder / "more.jsonl").write_text("".join(more))
    cases: list[dict[str, Any]] = []
    for name, (step, overrides) in of_tier(request, CELLS, SHORT, LATE).items():
        cases.append({"overrides": tiny(rows_file, folder, name, *COMMON, *overrides)})
        again = f"{name}-again"
        died = {"of": f"{folder}/runs/{name}", "step": step, "as": f"{folder}/runs/{again}"}
        cases.append({"overrides": tiny(rows_file, folder, again, *COMMON, *overrides), "died": died})
        if name in TWINS:  # at once: after offload in bf16, other bf16 runs of a process differ in the sixth digit
            cases.append({"overrides": tiny(rows_file, folder, f"{name}-twin", *COMMON, *TWINS[name])})
    if of_tier(request, BY_CLOCK):
        cases += [{"overrides": tiny(rows_file, folder, name, *words)} for name, words in BY_CLOCK.items()]
        cases.append(changed(2, folder, rows_file))
    launch(request, folder, rows_file, 2, cases)
    return folder / "runs"


def changed(num_ranks: int, folder: Path, rows_file: Path) -> dict[str, Any]:
    """Return a run that goes on with other settings."""
    died = {"of": f"{folder}/runs/stage2-fp32", "step": EVERY, "as": f"{folder}/runs/changed-{num_ranks}"}
    overrides = tiny(rows_file, folder, f"changed-{num_ranks}", *COMMON, "zero=stage2", *CHANGED)
    return {"overrides": overrides, "died": died}


def launch(
    request: pytest.FixtureRequest, folder: Path, rows_file: Path, num_ranks: int, cases: list[dict[str, Any]]
) -> None:
    """Run cases one after another on some ranks."""
    for case in cases:
        case["overrides"] = [word.replace("FILE", str(rows_file)) for word in case["overrides"]]
    listing = folder / f"cases-{num_ranks}-{len(cases)}.json"
    listing.write_text(json.dumps(cases))
    finished = run([*launcher(request)(num_ranks, WORKER), str(listing)], cwd=folder, timeout_s=500)
    assert finished.code == 0, finished.output[-6000:]


@pytest.fixture(scope="session")
def others(request: pytest.FixtureRequest, runs: Path, rows_file: Path) -> Path:
    """What was saved at step 4 goes on with other ranks, or under another stage."""
    folder = runs.parent
    whole = tiny(rows_file, folder, "stage2-fp32-4", *COMMON, "zero=stage2")
    cells = of_tier(request, OTHERS, SHORT, LATE)
    by_ranks: dict[int, list[dict[str, Any]]] = {
        4: [{"overrides": whole}] if "4-to-2-stage2" in cells else [],
        2: [],
        1: [],
    }
    for name, (straight, num_ranks, overrides) in cells.items():
        died = {"of": f"{runs}/{straight}", "step": EVERY, "as": f"{runs}/{name}"}
        by_ranks[num_ranks].append({"overrides": tiny(rows_file, folder, name, *COMMON, *overrides), "died": died})
    if len(cells) > 1:
        by_ranks[1].append(changed(1, folder, rows_file))
    for num_ranks, cases in by_ranks.items():
        if cases:
            launch(request, folder, rows_file, num_ranks, cases)
    return runs


def differences(left: Any, right: Any, place: str = "") -> list[str]:
    """Return where two values of a checkpoint differ, to the last bit."""
    if isinstance(left, torch.Tensor):
        same = left.dtype == right.dtype and torch.equal(left, right)
        return [] if same else [f"{place}: {(left.float() - right.float()).abs().max() if left.numel() else left}"]
    if isinstance(left, dict):
        if set(left) != set(right):
            return [f"{place}: {set(left) ^ set(right)}"]
        return [found for key in left for found in differences(left[key], right[key], f"{place}/{key}")]
    if isinstance(left, list | tuple):
        if len(left) != len(right):
            return [f"{place}: {len(left)} and {len(right)}"]
        return [
            found
            for i, pair in enumerate(zip(left, right, strict=True))
            for found in differences(*pair, f"{place}/{i}")
        ]
    if hasattr(left, "__dict__") and not isinstance(left, type):
        return differences(vars(left), vars(right), f"{place}.")
    return [] if left == right else [f"{place}: {left} and {right}"]


def compared(one: Path, other: Path) -> list[str]:
    """Return where two checkpoints differ, in every tensor and in what the engine counts."""
    files = sorted(path.relative_to(one) for path in one.rglob("*.safetensors"))
    assert files == sorted(path.relative_to(other) for path in other.rglob("*.safetensors"))
    assert len([file for file in files if file.name.startswith(FRAGMENTS)]) == 2, "each rank writes one"
    counts = [json.loads((folder / "engine.json").read_text()) for folder in (one, other)]
    tensors = (
        found for file in files for found in differences(load_file(one / file), load_file(other / file), str(file))
    )
    return [*differences(*counts, "engine.json"), *tensors]


@pytest.mark.fault("R1")
@pytest.mark.parametrize("name", by_tier(CELLS, SHORT, LATE))
def test_the_rest_of_the_run_is_the_same(name: str, runs: Path) -> None:
    straight, again = trained(runs / name), trained(runs / f"{name}-again")
    assert again == straight
    losses = [row["loss"] for row in straight if "loss" in row]
    assert len(losses) == STEPS
    assert len(set(losses)) > STEPS - 3, "losses that do not move prove nothing"
    # It did go on, and did the steps again that were lost.
    step = CELLS[name][0]
    lost = [json.loads(line) for line in (runs / f"{name}-again/logs/metrics-lost.jsonl").read_text().splitlines()]
    assert [row["step"] for row in lost if "loss" in row] == list(range(step + 1, STEPS + 1))


@pytest.mark.fault("R1")
@pytest.mark.parametrize("name", by_tier(CELLS, SHORT, LATE))
def test_the_last_checkpoint_is_the_same(name: str, runs: Path) -> None:
    straight, again = (runs / one / "checkpoints" / f"step-{STEPS}" for one in (name, f"{name}-again"))
    assert not manifest_problems(straight)
    assert not manifest_problems(again)
    assert not compared(straight, again)
    state, other = (json.loads((folder / "state.json").read_text()) for folder in (straight, again))
    assert state["config"]["run"].pop("name") != other["config"]["run"].pop("name")
    for one in (state, other):
        one.pop("metrics_bytes"), one.pop("versions")
    assert state == other
    assert state["step"] == STEPS
    if not any(word in name for word in ("packed", "grouped", "mixture")):
        assert (state["epoch"], state["row"]) == (1, 8)


@pytest.mark.fault("R1")
@pytest.mark.parametrize("name", by_tier(TWINS, late=LATE))
@pytest.mark.parametrize("step", [4, 8, STEPS])
def test_an_asynchronous_save_holds_what_a_synchronous_one_does(name: str, step: int, runs: Path) -> None:
    """Though it is copied as late as can be: the worker holds copies back until the next update."""
    one, other = (runs / run / "checkpoints" / f"step-{step}" for run in (name, f"{name}-twin"))
    assert not compared(one, other)


@pytest.mark.fault("W1")
@pytest.mark.parametrize("name", by_tier(OTHERS, SHORT, LATE))
def test_other_ranks_and_stages_compute_the_same(name: str, others: Path) -> None:
    straight, again = rows_of(others / OTHERS[name][0]), rows_of(others / name)
    tolerance = 0.01 if "bf16" in name else 1e-5  # states are rounded by other draws. Measured: 0.003
    for key in ("loss", "eval_loss", "lr", "epoch", "trained_tokens"):
        left, right = ([row[key] for row in rows if key in row] for rows in (straight, again))
        assert len(left) == len(right) > 1, key
        assert max(abs(a - b) for a, b in zip(left, right, strict=True)) < (tolerance if "loss" in key else 1e-12), key
    losses = [row["loss"] for row in straight if "loss" in row]
    assert losses[4] - losses[-1] > 0.01, "losses that do not move prove nothing"


def test_settings_that_may_change_hold_from_the_first_step_on(others: Path) -> None:
    before, changed, of_one = (
        [row for row in rows_of(others / name) if "loss" in row] for name in ("stage2-fp32", "changed-2", "changed-1")
    )
    for step, (old, new) in enumerate(zip(before, changed, strict=True), 1):
        assert new["lr"] == pytest.approx(old["lr"] * (1 if step <= EVERY else 1 / 3))
        assert (abs(new["loss"] - old["loss"]) < 1e-9) == (step <= EVERY + 1), "the weights before it are the same"
    assert [row["loss"] for row in of_one] == pytest.approx([row["loss"] for row in changed], abs=1e-5)


def test_what_changes_over_a_run_is_in_its_rows(runs: Path) -> None:
    lengths = [row["curriculum_length"] for row in rows_of(runs / "stage2-fp32-curriculum") if "loss" in row]
    assert lengths[0] < lengths[3] < 64
    assert lengths[6:] == [64] * 4
    shares = [
        [value for key, value in row.items() if key.startswith("mixture_share/")]
        for row in rows_of(runs / "stage1-fp32-mixture")
        if "loss" in row
    ]
    assert [len(one) for one in shares] == [2] * STEPS
    assert shares[0][0] > 0.7 > 0.2 > shares[-1][0]


def test_nothing_unfinished_is_left(runs: Path) -> None:
    assert not list(runs.rglob("*.tmp"))
    assert not list(runs.rglob("zero_to_fp32.py"))


def test_checkpoints_by_the_clock_change_nothing(runs: Path) -> None:
    """Rank 0 counts the time; ranks save after the same steps, and the losses are those of a run that saves once."""
    by_clock, once = (
        [step_of(path) for path in published_checkpoints(runs / name / "checkpoints")] for name in BY_CLOCK
    )
    assert len(by_clock) > 1 and by_clock[0] == once[0] and len(once) == 1
    assert losses(runs / "clock") == losses(runs / "once")


def test_a_step_is_done_again_bit_for_bit(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = runs / "stage3-fp32-packed"  # tokens are dropped at random in it
    before = {path: path.stat().st_mtime_ns for path in done.rglob("*") if path.is_file()}
    assert main(["replay", str(done), "step=7"]) == 2
    assert "was saved by 2 ranks, and here are 1" in capsys.readouterr().err
    finished = run(forked(2, "--module", "toolkit", "replay", str(done), "step=7"), cwd=runs.parent)
    assert finished.code == 0, finished.output[-4000:]
    row = next(row for row in rows_of(done) if row["step"] == 7 and "loss" in row)
    assert f"Step 7: loss {row['loss']}, gradient norm {row['grad_norm']}." in finished.output
    assert "The loss of steps 7 to 7 equals that in metrics.jsonl." in finished.output
    assert {path: path.stat().st_mtime_ns for path in before} == before
    (file,) = done.glob("replays/step-7/*/step-7.jsonl")
    head, *samples = [json.loads(line) for line in file.read_text().splitlines()]
    assert head["step"] == 7
    assert {sample["rank"] for sample in samples} == {0, 1}
    assert (file.parent / "DONE").exists()
