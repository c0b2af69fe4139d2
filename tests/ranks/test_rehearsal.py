"""The rehearsal before step 1: it changes nothing, leaves nothing behind, and finds what would have failed later."""

import json
from pathlib import Path
from typing import Any

import pytest
from ranks import forked, gone, run
from shared import FAULTY, RECOMPUTE, WORKER, by_tier, of_tier, tiny, trained

STEPS, DIED_AT = 4, 2
CELLS: dict[str, list[str]] = {
    "stage0": ["zero=stage0"],
    "stage0-bf16-packed": ["zero=stage0", "precision=bf16", "data.packing=packed", "batch.global_size=2"],
    "stage0-fp16": ["zero=stage0", "precision=fp16", "optim.torch=false"],
    "stage1-bf16-recompute": ["zero=stage1", "precision=bf16", RECOMPUTE],
    "stage2": ["zero=stage2", "batch.global_size=8", "data.num_workers=1"],
    "stage2-fp16": ["zero=stage2", "precision=fp16", "precision.initial_scale_power=12"],
    "stage2-offload": ["zero=stage2_offload", "optim.torch=false", "data.packing=grouped", "batch.micro_per_gpu=2"],
    "stage2-lora-dropout": ["zero=stage2", "precision=bf16", "tuning=lora", "tuning.dropout=0.2", RECOMPUTE],
    "stage3": ["zero=stage3", "evaluate.metrics=[rouge_l]", "evaluate.max_new_tokens=4", "evaluate.prompts=[red]"],
    "stage3-bf16-packed": ["zero=stage3", "precision=bf16", "data.packing=packed", "batch.global_size=4"],
    "stage3-bf16-offload": ["zero=stage3_offload", "optim.torch=false", "precision=bf16"],
    "stage3-lora-dropout": ["zero=stage3", "tuning=lora", "tuning.dropout=0.2", "batch.micro_per_gpu=2"],
}
RESUMED = ["stage0", "stage1-bf16-recompute", "stage2-fp16", "stage3", "stage3-lora-dropout"]
LATE = (
    *("stage0", "stage0-fp16", "stage1-bf16-recompute", "stage2", "stage2-lora-dropout"),
    *("stage3-bf16-packed", "stage3-bf16-offload"),
)
RESUMED_LATE = ("stage0", "stage1-bf16-recompute", "stage3")
"""Cells of the nightly tier: each stage and precision is met in another one."""
REFUSED: dict[str, list[str]] = {
    "unwritable": [],
    "small disk": ["checkpoint.every=1"],
    "small memory": ["plan.max_gpu_gib=0.001", "zero=stage2"],
}


def words(rows_file: Path, folder: Path, name: str, *overrides: str) -> list[str]:
    """Return a tiny run whose weights change from the first step on."""
    constant = ["schedule=constant", "schedule.warmup_steps=0", f"train.max_steps={STEPS}"]
    return tiny(rows_file, folder, name, *constant, f"checkpoint.every={DIED_AT}", *overrides)


@pytest.fixture(scope="session")
def rehearsed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, rows_file: Path
) -> tuple[Path, str]:
    """Every cell as it is, rehearsed, and some rehearsed after a death; then runs that cannot be. One launch."""
    folder = tmp_path_factory.mktemp("rehearsal")
    cases: list[dict[str, Any]] = []
    on = "train.rehearse=true"
    resumed = of_tier(request, dict.fromkeys(RESUMED), late=RESUMED_LATE)
    for name, overrides in of_tier(request, CELLS, late=LATE).items():
        cases.append({"overrides": words(rows_file, folder, name, *overrides)})
        # At once: after offload in bf16, other bf16 runs of a process differ in the sixth digit.
        cases.append({"overrides": words(rows_file, folder, f"{name}-rehearsed", *overrides, on)})
        if name in resumed:
            died = {"of": f"{folder}/runs/{name}", "step": DIED_AT, "as": f"{folder}/runs/{name}-again"}
            cases.append({"overrides": words(rows_file, folder, f"{name}-again", *overrides, on), "died": died})
    # A run that died before its first checkpoint, in whose folder a file stands in the way.
    broken = folder / "runs" / "unwritable"
    (broken / "logs").mkdir(parents=True)
    (broken / "run.lock").touch()
    (broken / "checkpoints").write_text("somebody's")
    for name, overrides in REFUSED.items():
        case = {"overrides": words(rows_file, folder, name, *overrides, on), "refused": f"{folder}/{name}.txt"}
        cases.append(case | ({"free_bytes": 10_000_000} if name == "small disk" else {}))
    listing = folder / "cases.json"
    listing.write_text(json.dumps(cases))
    finished = run([*forked(2, WORKER), str(listing)], cwd=folder, timeout_s=500)
    assert finished.code == 0, finished.output[-6000:]
    return folder, finished.output


@pytest.mark.parametrize(
    "name",
    by_tier(
        [*CELLS, *(f"{name}-again" for name in RESUMED)], late=[*LATE, *(f"{name}-again" for name in RESUMED_LATE)]
    ),
)
def test_the_run_is_the_same_to_the_last_bit(name: str, rehearsed: tuple[Path, str]) -> None:
    runs = rehearsed[0] / "runs"
    other = runs / (name if name.endswith("-again") else f"{name}-rehearsed")
    name = name.removesuffix("-again")
    straight, with_rehearsal = trained(runs / name), trained(other)
    assert with_rehearsal == straight
    losses = [row["loss"] for row in straight if "loss" in row]
    assert len(losses) == STEPS
    assert len(set(losses)) == STEPS, "losses that do not move prove nothing"


@pytest.mark.parametrize("name", by_tier(CELLS, late=LATE))
def test_nothing_is_left_behind(name: str, rehearsed: tuple[Path, str]) -> None:
    folder, _ = rehearsed
    left, right = (
        {path.relative_to(run).as_posix() for path in run.rglob("*")}
        for run in (folder / "runs" / name, folder / "runs" / f"{name}-rehearsed")
    )
    assert left == right
    assert left


def test_it_is_told_in_one_line(request: pytest.FixtureRequest, rehearsed: tuple[Path, str]) -> None:
    told = [line for line in rehearsed[1].splitlines() if line.startswith("Dry run passed in ")]
    cells = of_tier(request, CELLS, late=LATE)
    assert len(told) == len(cells) + len(of_tier(request, dict.fromkeys(RESUMED), late=RESUMED_LATE))
    assert all("the longest batch (" in line and "Peak tensor memory: " in line for line in told)


def test_what_cannot_be_written_is_told(rehearsed: tuple[Path, str]) -> None:
    folder, _ = rehearsed
    text = (folder / "unwritable.txt").read_text()
    assert text.startswith(f"CheckpointError: checkpoints cannot be written to {folder}/runs/unwritable/checkpoints: ")
    assert "Set run.dir" in text
    assert (folder / "runs" / "unwritable" / "checkpoints").read_text() == "somebody's"
    text = (folder / "small disk.txt").read_text()
    assert "0.01 GB free" in text
    assert "3 checkpoints of 0.00576 GB (checkpoint.keep = 2" in text
    assert not list((folder / "runs" / "small disk").rglob("*.tmp"))


def test_too_little_memory_is_told_with_what_helps(rehearsed: tuple[Path, str]) -> None:
    lines = (rehearsed[0] / "small memory.txt").read_text().splitlines()
    assert lines[0].startswith("OutOfMemory: out of memory before the first step, on rank 0 (")
    assert "1.0 MiB may be used" in lines[1]
    assert lines[2].startswith("GiB per rank")
    helps = next(place for place, line in enumerate(lines) if line.startswith("What helps"))
    assert [line.strip() for line in lines[helps + 1 :]] == [
        "train.activation_checkpointing.enabled=true",
        "zero=stage3",
        "zero=stage2_offload",
        "zero=stage3_offload",
        "tuning=lora",
        "data.max_length=64",
    ]


@pytest.mark.fault("K1")
def test_memory_that_runs_out_on_one_rank_ends_all(rows_file: Path, tmp_path: Path) -> None:
    note = tmp_path / "note"
    fault = {"at": "rehearsal", "nth": 1, "rank": 1, "do": "memory", "note": str(note)}
    command = forked(2, FAULTY, *words(rows_file, tmp_path, "run", "zero=stage2", "train.rehearse=true"))
    finished = run(command, cwd=tmp_path, FAULT=json.dumps(fault))
    assert note.read_text() == "rehearsal 1\n", "the fault did not happen"
    assert finished.code != 0
    assert finished.output.count("out of memory before the first step, on rank 1") == 1
    assert "Traceback" not in finished.output
    assert "exit code 2\n" in (tmp_path / "runs" / "run" / "FAILED").read_text()
    gone(str(tmp_path), 20)


def test_a_model_that_cannot_be_exported_ends_before_the_first_step(rows_file: Path, tmp_path: Path) -> None:
    fault = {"at": "export.structure", "rank": 0, "do": "tell", "tell": "no such form", "note": str(tmp_path / "note")}
    wanted = ["checkpoint.export=true", "train.rehearse=true"]
    command = forked(2, FAULTY, *words(rows_file, tmp_path, "run", "zero=stage3", *wanted))
    finished = run(command, cwd=tmp_path, FAULT=json.dumps(fault))
    assert finished.code == 2, finished.output[-4000:]
    said = "ModelError: the model of this run could not be exported after training: no such form. Nothing was trained."
    assert finished.output.count(said) == 1
    assert "step 1/" not in finished.output
