"""The planned memory of a rank beside the bytes of its live tensors, on two ranks."""

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from ranks import forked, run
from shared import runs_nightly, tiny

RUN = Path(__file__).parents[2] / "run.py"
WORKER = Path(__file__).with_name("plan_worker.py")
SIZES = {
    "21M": (384, 1472, 6, 2),
    "33M": (512, 1408, 8, 8),
    "45M": (640, 1792, 10, 2),
}
"""Hidden and inner width, heads and groups, of ten layers each."""
PRECISION = {"21M": "fp32", "33M": "bf16", "45M": "fp32"}
TOLERANCE = 0.1
FEW = ["21M-zero3-lora", "33M-zero2-full"]
CELLS = [f"{size}-zero{stage}-{way}" for size in SIZES for stage in range(4) for way in ("full", "lora")]


def words(cell: str, rows_file: Path, folder: Path, is_brief: bool) -> list[str]:
    """Return a cell's overrides; briefly with shorter rows where each token takes long: few CPUs compute in bf16."""
    size, zero, way = cell.split("-")
    hidden, inner, heads, groups = SIZES[size]
    stage = int(zero[-1])
    return [
        *tiny(rows_file, folder, cell),
        f"model.shape.hidden_size={hidden}",
        f"model.shape.intermediate_size={inner}",
        f"model.shape.num_heads={heads}",
        f"model.shape.num_kv_heads={groups}",
        "model.shape.num_layers=10",
        f"zero=stage{stage}",
        f"tuning={way}",
        f"precision={PRECISION[size]}",
        "optim.torch=false",
        f"data.max_length={32 if is_brief and PRECISION[size] == 'bf16' else 128}",
        "batch.micro_per_gpu=2",
        # Accumulated gradients are there in half of the cells, recomputed activations in some.
        f"batch.global_size={8 if stage % 2 else 4}",
        f"train.activation_checkpointing.enabled={str(size == '33M' and stage % 2 == 1).lower()}",
    ]


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, rows_file: Path) -> dict[str, Any]:
    """Every cell, in one launch."""
    folder = tmp_path_factory.mktemp("plan")
    is_brief = not runs_nightly(request)
    cells = FEW if is_brief else CELLS
    cases, output = folder / "cases.json", folder / "found.json"
    cases.write_text(json.dumps({cell: words(cell, rows_file, folder, is_brief) for cell in cells}))
    ran = run([*forked(2, WORKER), str(cases), str(output)], cwd=folder, timeout_s=1500)
    assert ran.code == 0, ran.output[-6000:]
    found: dict[str, Any] = json.loads(output.read_text())
    assert list(found) == cells
    return found


def test_sizes_are_what_they_are_called(found: dict[str, Any]) -> None:
    for cell, one in found.items():
        assert one["parameters"] >= 20e6
        assert (one["trained_parameters"] < 1e6) == cell.endswith("lora")


def test_plan_is_what_is_measured(found: dict[str, Any]) -> None:
    ratios = {
        f"{cell} {phase}": one["planned_bytes"][phase] / one["measured_bytes"][phase]
        for cell, one in found.items()
        for phase in ("step", "evaluation")
    }
    wrong = {name: round(ratio, 3) for name, ratio in ratios.items() if not math.isclose(ratio, 1, abs_tol=TOLERANCE)}
    assert not wrong


@pytest.mark.nightly
@pytest.mark.parametrize("way", ["packed", "lora"])
def test_the_process_takes_no_more_than_planned(tmp_path: Path, rows_file: Path, way: str) -> None:
    """On full rows, where activations are most of it; the heap keeps half as much again as the tensors."""
    text = " ".join(f"word{number % 97}" for number in range(1500))
    rows = tmp_path / "long.jsonl"
    rows.write_text("".join(json.dumps({"text": f"{n} {text}"}) + "\n" for n in range(32)))
    shape = ["model.shape.hidden_size=192", "model.shape.intermediate_size=512", "model.shape.num_layers=4"]
    more = {"packed": ["data.packing=packed"], "lora": ["tuning=lora"]}[way]
    lengths = ["data.max_length=1024", "data.too_long=truncate", "batch.micro_per_gpu=8", "batch.global_size=8"]
    command = [*tiny(rows, tmp_path, way, *shape, *lengths, *more), "train.max_steps=3", "plan.max_gpu_gib=0"]
    ran = run([sys.executable, str(RUN), *command], cwd=tmp_path, timeout_s=500)
    assert ran.code == 0, ran.output[-6000:]
    logged = [json.loads(line) for line in (tmp_path / "runs" / way / "metrics.jsonl").read_text().splitlines()]
    last = [row for row in logged if "loss" in row][-1]
    share = last["host_memory_peak_bytes"] / last["planned_memory_bytes"]
    assert 0.5 < share <= 1, last


def train(rows_file: Path, folder: Path, name: str, *more: str, ranks: int = 2) -> Any:
    """Train with a layout that is chosen; return the output and the run's folder."""
    overrides = tiny(rows_file, folder, name, "plan.auto=true", "train.max_steps=3", "checkpoint.every=2", *more)
    ran = run([*forked(ranks, str(RUN), *overrides)], cwd=folder, timeout_s=300)
    assert ran.code == 0, ran.output[-6000:]
    return ran.output, folder / "runs" / name


def test_plan_auto_chooses_and_as_many_ranks_keep_it(tmp_path: Path, rows_file: Path) -> None:
    said, folder = train(rows_file, tmp_path, "chosen")
    assert "plan.auto: " in said
    chosen = yaml.safe_load((folder / "config.yaml").read_text())
    plan = json.loads((folder / "plan.json").read_text())
    assert chosen["batch"]["micro_per_gpu"] == 2  # all four rows at once, which cost the least time
    assert sum(plan["device_bytes"]["step"].values()) <= plan["usable_bytes"]
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert all(row["planned_memory_bytes"] > 0 for row in rows if "loss" in row)
    # Nothing would fit any more, but a run that resumes on as many ranks keeps its layout.
    _, again = train(rows_file, tmp_path, "again", f"resume={folder}/checkpoints/step-2", "plan.max_gpu_gib=0.001")
    kept = yaml.safe_load((again / "config.yaml").read_text())
    assert (kept["zero"], kept["batch"]) == (chosen["zero"], chosen["batch"])
    said, alone = train(rows_file, tmp_path, "alone", f"resume={folder}/checkpoints/step-2", ranks=1)
    assert "plan.auto: " in said
    assert yaml.safe_load((alone / "config.yaml").read_text())["batch"]["micro_per_gpu"] == 4


@pytest.mark.nightly
def test_plan_auto_with_layers_that_are_split(tmp_path: Path, rows_file: Path) -> None:
    said, divided = train(rows_file, tmp_path, "divided", "parallel=tensor", "zero=stage1")
    assert "plan.auto: " in said
    assert yaml.safe_load((divided / "config.yaml").read_text())["batch"]["micro_per_gpu"] == 4


def test_plan_auto_says_when_nothing_fits(tmp_path: Path, rows_file: Path) -> None:
    overrides = tiny(rows_file, tmp_path, "none", "plan.auto=true", "plan.max_gpu_gib=0.001")
    ran = run([*forked(2, str(RUN), *overrides)], cwd=tmp_path, timeout_s=300)
    assert ran.code != 0
    assert ran.output.count("plan.auto: nothing fits on") == 1
    assert "Traceback" not in ran.output


@pytest.mark.nightly
def test_a_calibration_measures_what_is_assumed_otherwise(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "toolkit", "plan", "recipe=quickstart", "model=glm_tiny", "gpus=2xcpu"]
    options = ["data.sources=[{path: rows.jsonl}]", f"prepare.dir={tmp_path}", "precision=bf16"]
    assumed = run([*command, *options], cwd=tmp_path, timeout_s=60)
    measured = run([*command, *options, "calibrate=true"], cwd=tmp_path, timeout_s=200)
    assert (assumed.code, measured.code) == (0, 0), measured.output[-3000:]
    assert ("Assumed, not measured" in assumed.output, "Assumed, not measured" in measured.output) == (True, False)
    assert "Warning" not in measured.output
    (file,) = (tmp_path / "plan").glob("rates-*.json")
    rates = json.loads(file.read_text())
    assert rates["is_measured"]
    assert min(rates[name] for name in ("flops", "link", "memory", "gather", "latency_s")) > 0
    assert rates["gather"] <= rates["link"]
    assert run([*command, *options], cwd=tmp_path, timeout_s=60).output == measured.output  # it is kept
