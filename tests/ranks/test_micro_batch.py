"""batch.micro_per_gpu=auto: the largest that fits, alike on all ranks, and the same training as with the number."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import yaml
from ranks import forked, run
from shared import WORDS, WORKER, by_tier, losses, of_tier, tiny

STEPS, ROWS = 3, 32
SMALL = ["zero.reduce_bucket_size=100000", "zero.stage3_prefetch_bucket_size=1000"]
CELLS: dict[str, list[str]] = {
    "stage0": ["zero=stage0"],
    "stage2": ["zero=stage2", SMALL[0]],
    "stage3": ["zero=stage3", *SMALL],
    "stage2-offload": ["zero=stage2_offload", "optim.torch=false", SMALL[0]],
    "sequence": ["zero=stage3", "parallel=sequence", *SMALL],
    "tensor": ["zero=stage2", "parallel=tensor", SMALL[0]],
    "grouped": ["zero=stage1", "precision=bf16", "data.packing=grouped", SMALL[0], "train.max_steps=0"],
}
LIMITED = ["stage0", "stage2", "stage3", "sequence", "tensor"]
LATE = ("stage0", "stage2-offload", "stage3")
LIMITED_LATE = ("stage0", "stage3", "tensor")
"""Cells of the nightly tier."""
TOGETHER = ["sequence", "tensor"]
"""Both ranks compute the same rows."""
LARGE, LITTLE = 8192.0, 30.0


def rows_of_rank(name: str) -> int:
    """Return how many rows a rank has in a step."""
    return ROWS if name in TOGETHER else ROWS // 2


@pytest.fixture(scope="session")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every cell with room for all rows, with their number, and with less room on the last rank. One launch."""
    folder = tmp_path_factory.mktemp("micro")
    draw, file = random.Random(5), folder / "rows.jsonl"
    rows = [{"prompt": " ".join(draw.choices(WORDS, k=40)), "response": " ".join(draw.choices(WORDS, k=40))}] * 50
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def words(name: str, *overrides: str) -> list[str]:
        common = [f"batch.global_size={ROWS}", "schedule=constant", "schedule.warmup_steps=0", "data.max_length=128"]
        return tiny(file, folder, name, *common, f"train.max_steps={STEPS}", "checkpoint.every=2", *overrides)

    cases: list[dict[str, Any]] = []
    auto = "batch.micro_per_gpu=auto"
    limited_names = of_tier(request, dict.fromkeys(LIMITED), late=LIMITED_LATE)
    for name, overrides in of_tier(request, CELLS, late=LATE).items():
        cases.append({"overrides": words(name, *overrides, auto), "room_mib": [LARGE, LARGE]})
        number = f"batch.micro_per_gpu={rows_of_rank(name)}"
        cases.append({"overrides": words(f"{name}-number", *overrides, number)})
        if name in limited_names:
            limited = words(f"{name}-limited", *overrides, auto, "train.rehearse=true")
            cases.append({"overrides": limited, "room_mib": [LARGE, LITTLE]})
    died = {"of": f"{folder}/runs/stage2", "step": 2, "as": f"{folder}/runs/stage2-again"}
    # It would find another number now.
    cases.append({"overrides": words("stage2-again", *CELLS["stage2"], auto), "died": died, "room_mib": [1.0, 1.0]})
    cases.append({"overrides": words("no bound", auto), "refused": f"{folder}/no bound.txt"})
    # After an engine whose layers are split a process of DeepSpeed 0.19.8 makes no other.
    cases.sort(key=lambda case: "parallel=tensor" in case["overrides"])
    listing = folder / "cases.json"
    listing.write_text(json.dumps(cases))
    finished = run([*forked(2, WORKER), str(listing)], cwd=folder, timeout_s=400)
    assert finished.code == 0, finished.output[-6000:]
    (folder / "output").write_text(finished.output)
    return folder / "runs"


def rows_at_once(run_folder: Path, rows_in_step: int) -> int:
    """Return the micro-batch that a run has written down: the same in both of its files."""
    rows = yaml.safe_load((run_folder / "config.yaml").read_text())["batch"]["micro_per_gpu"]
    ds_config = json.loads((run_folder / "ds_config.json").read_text())
    assert ds_config["train_micro_batch_size_per_gpu"] == rows
    assert ds_config["gradient_accumulation_steps"] == rows_in_step // rows
    assert ds_config["train_batch_size"] == ROWS
    return int(rows)


@pytest.mark.parametrize("name", by_tier([*CELLS, "stage2-again"], late=LATE))
def test_it_is_the_run_with_that_number(name: str, runs: Path) -> None:
    number = runs / f"{name.removesuffix('-again')}-number"
    rows = rows_of_rank(name)
    assert rows_at_once(runs / name, rows) == rows
    assert losses(runs / name) == losses(number)
    assert len(set(losses(number))) == len(losses(number)) > 1, "losses that do not move prove nothing"


@pytest.mark.parametrize("name", by_tier(LIMITED, late=LIMITED_LATE))
def test_the_rank_with_the_least_room_decides(name: str, runs: Path) -> None:
    rows = rows_of_rank(name)
    assert 1 < rows_at_once(runs / f"{name}-limited", rows) < rows
    assert losses(runs / f"{name}-limited") == pytest.approx(losses(runs / name), abs=1e-4)


def test_cpu_ranks_need_a_bound(request: pytest.FixtureRequest, runs: Path) -> None:
    assert "plan.max_gpu_gib=4" in (runs.parent / "no bound.txt").read_text()
    cells = of_tier(request, CELLS, late=LATE)
    found = (runs.parent / "output").read_text().count("batch.micro_per_gpu = auto: ")
    assert found == len(cells) + len(of_tier(request, dict.fromkeys(LIMITED), late=LIMITED_LATE))
