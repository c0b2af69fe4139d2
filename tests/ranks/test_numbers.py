"""A step whose numbers go wrong changes no weights, on no rank; it is named, and gone around as the config says."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from ranks import forked, run
from shared import WORKER, by_tier, losses, of_tier, plain_loop, rows_of, tiny

from toolkit.cli import main

STEPS, SHORT = 16, 8
"""Of those whose spikes are found, as many norms come before them; of the others."""
SPIKES = ["train.max_grad_norm_ratio=20", "train.max_loss_ratio=4", f"train.max_steps={STEPS}"]
FOUR = {"6": ["loss", "nan"], "12": ["gradient", "200"], "13": ["gradient", "nan"], "15": ["loss", "-inf"]}
OVERFLOWS = {str(step): ["gradient", "inf"] for step in range(3, 12)}
ALL_BAD = {str(step): ["loss", "nan"] for step in range(3, 12)}
REWIND = ["train.on_bad_step=rewind", "checkpoint.every=2"]
FP16 = ["precision=fp16", "precision.initial_scale_power=8"]
PLAIN = [
    "precision=fp16",
    "optim=sgd",
    "optim.momentum=0",
    "optim.lr=0.05",
    "schedule=constant",
    "schedule.warmup_steps=0",
]
PLAIN += ["train.gradient_clipping=0"]
GROWING = [*PLAIN, "precision.initial_scale_power=4", "precision.loss_scale_window=2"]
CELLS: dict[str, tuple[dict[str, list[str]], list[str]]] = {
    "skip-stage0-fp32": (FOUR, ["zero=stage0", *SPIKES]),
    "skip-stage0-bf16": (FOUR, ["zero=stage0", "precision=bf16", *SPIKES]),
    "skip-stage1-bf16": (FOUR, ["zero=stage1", "precision=bf16", *SPIKES]),
    "skip-stage2-fp32-offload": (FOUR, ["zero=stage2_offload", "optim.torch=false", *SPIKES]),
    "skip-stage3-fp32": (FOUR, ["zero=stage3", *SPIKES]),
    "skip-stage0-fp16": (FOUR, ["zero=stage0", *FP16, *SPIKES]),
    "skip-stage2-fp16": (FOUR, ["zero=stage2", *FP16, *SPIKES]),
    "fixed-stage2-fp16": ({}, ["zero=stage2", *PLAIN, "precision.loss_scale=16"]),
    **{f"growing-stage{stage}-fp16": ({}, [f"zero=stage{stage}", *GROWING]) for stage in (0, 2, 3)},
    "rewind-stage0": ({"6": ["loss", "nan"]}, ["zero=stage0", *REWIND]),
    "rewind-stage3-offload": ({"6": ["loss", "nan"]}, ["zero=stage3_offload", "optim.torch=false", *REWIND]),
    "rewind-spike": ({"14": ["loss", "50"]}, ["zero=stage2", "checkpoint.asynchronous=true", *REWIND, *SPIKES]),
    "ruined": ({"6": ["weights", "nan"]}, ["zero=stage0", "checkpoint.keep=1", *REWIND]),
    "ruined-unseen": ({"6": ["unseen weights", "nan"]}, ["zero=stage0", "checkpoint.keep=1", *REWIND]),
    "stop": ({"6": ["gradient", "nan"]}, ["zero=stage2", "train.on_bad_step=stop", "checkpoint.every=4"]),
    "rewind-in-vain": (ALL_BAD, ["zero=stage2", *REWIND]),
    "nowhere-to-go": (ALL_BAD, ["zero=stage2", "train.on_bad_step=rewind"]),
    "too-many": (ALL_BAD, ["zero=stage1", "train.max_skipped_steps=3"]),
    "fp16-at-the-end": (OVERFLOWS, ["zero=stage2", "precision=fp16", "precision.initial_scale_power=1"]),
}
COMMON = [f"train.max_steps={SHORT}", "evaluate.at_start=false"]
LATE = ("skip-stage1-bf16", "rewind-spike", "growing-stage2-fp16")
"""Cells of the nightly tier."""


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, rows_file: Path) -> Path:
    """Every cell of the tier, in one launch on two ranks."""
    folder = tmp_path_factory.mktemp("numbers")
    cases: list[dict[str, Any]] = [
        {
            "overrides": tiny(rows_file, folder, name, *COMMON, *words),
            "spoil": {"steps": steps, "note": str(folder / f"{name}.note")},
        }
        for name, (steps, words) in of_tier(request, CELLS, late=LATE).items()
    ]
    again = tiny(rows_file, folder, "stop", *COMMON, *CELLS["stop"][1])
    cases.append({"overrides": [*again, "train.on_bad_step=skip"]})  # the same step again, this time without the fault
    listing = folder / "cases.json"
    listing.write_text(json.dumps(cases))
    finished = run([*forked(2, WORKER), str(listing)], cwd=folder, timeout_s=300)
    assert finished.code == 0, finished.output[-6000:]
    (folder / "output").write_text(finished.output)
    return folder


def plain(folder: Path, rows_file: Path, name: str, steps: int, **options: Any) -> list[float]:
    """Return the losses of a plain PyTorch loop with the same data."""
    words = [word for word in CELLS[name][1] if not word.startswith("train.on_bad_step")]
    return plain_loop(tiny(rows_file, folder, "plain", *words), steps, **options)[0]


def noted(folder: Path, name: str) -> list[str]:
    """Return what the injector noted."""
    return (folder / f"{name}.note").read_text().splitlines()


@pytest.mark.fault("N1", "N4")
@pytest.mark.parametrize("name", by_tier([name for name in CELLS if name.startswith("skip")], late=LATE))
def test_a_bad_step_changes_nothing(name: str, folder: Path, rows_file: Path) -> None:
    assert len(noted(folder, name)) == 4, "the faults did not happen"
    rows = rows_of(folder / "runs" / name)
    fp16 = "fp16" in name
    # In fp16 a gradient that is not finite is an overflow of the loss scale, not a bad step.
    assert [row["skipped_steps"] for row in rows if "loss" in row][-1] == 4
    assert [row["bad_steps"] for row in rows if "loss" in row][-1] == (3 if fp16 else 4)
    assert rows[5]["loss"] == "nan"
    assert rows[14]["loss"] == "-inf"
    assert rows[5]["lr"] == rows[6]["lr"], "the schedule advanced on a skipped step"
    logs = folder / "runs" / name / "logs"
    assert {path.name for path in logs.glob("bad-step-*")} == {
        f"bad-step-{step}.jsonl" for step in ((6, 12, 15) if fp16 else (6, 12, 13, 15))
    }
    expected = plain(folder, rows_file, name, STEPS, without={6, 12, 13, 15}) if "fp32" in name else None
    if expected is None:
        expected = losses(folder / "runs" / "skip-stage0-fp32")
    tolerance = 2e-5 if "fp32" in name else 0.01
    finite = [step for step in range(STEPS) if step not in (5, 14)]
    assert [losses(folder / "runs" / name)[i] for i in finite] == pytest.approx(
        [expected[i] for i in finite], abs=tolerance
    )


def test_the_norms_without_zero_are_those_with_it(folder: Path) -> None:
    """DeepSpeed 0.19.8 divides fp16 gradients by a loss scale that it never multiplied them by, unless we do."""
    without, with_zero = (rows_of(folder / "runs" / f"skip-stage{stage}-fp16") for stage in (0, 2))
    norms = [[row["grad_norm"] for row in rows[:5]] for rows in (without, with_zero)]
    assert norms[0] == pytest.approx(norms[1], rel=0.05)


@pytest.mark.parametrize("stage", [0, pytest.param(2, marks=pytest.mark.nightly), 3])
def test_an_update_has_its_size_when_the_loss_scale_grows(stage: int, folder: Path) -> None:
    """DeepSpeed 0.19.8 divides by the scale of the next step, unless we do."""
    fixed, growing = (losses(folder / "runs" / f"{name}-fp16") for name in ("fixed-stage2", f"growing-stage{stage}"))
    assert growing == pytest.approx(fixed, abs=0.003)


@pytest.mark.fault("N4")
@pytest.mark.parametrize("name", by_tier(["rewind-stage0", "rewind-stage3-offload", "rewind-spike"], late=LATE))
def test_a_rewound_run_goes_around_the_data(name: str, folder: Path, rows_file: Path) -> None:
    spike = name == "rewind-spike"
    assert noted(folder, name) == (["14 loss 50"] if spike else ["6 loss nan"])
    # Back from 6 to 4, or from 14 to 12; or one save further if the last was not proven yet at the bad step.
    run_folder = folder / "runs" / name
    steps, bad = (STEPS, 14) if spike else (SHORT, 6)
    said = re.search(rf"Rewound to step (\d+); the data of the steps up to {bad} is skipped", output(folder, name))
    assert said is not None
    back = int(said[1])
    assert back in (bad - 2, bad - 4)
    data = [*range(1, back + 1), *range(bad + 1, bad + 1 + steps - back)]
    assert losses(run_folder) == pytest.approx(plain(folder, rows_file, name, steps, data=data), abs=2e-5)
    rows = [row for row in rows_of(run_folder) if "loss" in row]
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    assert (rows[-1]["rewinds"], rows[-1]["bad_steps"], rows[-1]["skipped_steps"]) == (1, 1, 0)
    lost = [json.loads(line) for line in (run_folder / "logs" / "metrics-lost.jsonl").read_text().splitlines()]
    assert [row["step"] for row in lost] == list(range(back + 1, bad + 1))
    assert json.loads((run_folder / "DONE").read_text())["rewinds"] == 1


@pytest.mark.fault("N4")
@pytest.mark.parametrize("name", ["ruined", "ruined-unseen"])
def test_ruined_weights_displace_no_good_checkpoint(name: str, folder: Path) -> None:
    """The update of step 6 ruins the weights, and a checkpoint of it is due; only one is kept."""
    unseen = name == "ruined-unseen"
    assert noted(folder, name) == [f"6 {'unseen ' if unseen else ''}weights nan"]
    refused = "WARNING: the checkpoint step-6 could not be saved: the weights give logits that are NaN or Inf"
    said, run_folder = output(folder, name), folder / "runs" / name
    assert (refused in said) is not unseen
    back = re.findall(r"Rewound to step (\d+)", said)
    assert back == (["6", "4"] if unseen else ["4"]), "first to the newest, then to the last that a good step followed"
    rows = [row for row in rows_of(run_folder) if "loss" in row]
    assert [row["step"] for row in rows] == list(range(1, SHORT + 1))
    assert all(isinstance(row["loss"], float) for row in rows)
    assert json.loads((run_folder / "DONE").read_text())["rewinds"] == len(back)
    kept = sorted(path.name for path in (run_folder / "checkpoints").iterdir())
    assert kept == ["good", "latest", *(["step-6.replaced"] if unseen else []), f"step-{SHORT}"]


def output(folder: Path, name: str) -> str:
    """Return what was said during one cell."""
    text = (folder / "output").read_text()
    _, *parts = re.split(r"(?m)^.*Run directory: (.*)$", text)
    return next(told for where, told in zip(parts[::2], parts[1::2], strict=True) if where.endswith(f"/{name}"))


def test_what_went_wrong_is_shown(folder: Path, rows_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = folder / "runs" / "skip-stage3-fp32" / "logs" / "bad-step-6.jsonl"
    said = output(folder, "skip-stage3-fp32")
    where = re.search(
        rf"WARNING: step 6: the loss is nan; it comes from rank 1, micro-batch 0: ({rows_file}:\d+)\.", said
    )
    assert where is not None, said
    assert f"toolkit show {file}" in said
    assert main(["show", str(file), "n=1", "color=never"]) == 0
    shown = capsys.readouterr().out
    row = json.loads(rows_file.read_text().splitlines()[int(where[1].rpartition(":")[2]) - 1])
    assert f"── {where[1]}: rank 1, micro-batch 0 with loss nan" in shown
    assert f"⟦{row['response']}<|endoftext|>⟧" in shown
    assert row["prompt"] in shown
    assert "3 more; n=0 shows all." in shown
    assert main(["show", str(file), "n=0", "color=never"]) == 0
    assert capsys.readouterr().out.count("── ") == 4


@pytest.mark.fault("N2", "N3")
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("stop", "step 6: the gradient is not finite; the highest loss is that of rank "),
        ("rewind-in-vain", "step-2 did not help (3 times)"),
        ("nowhere-to-go", "there is no checkpoint to go back to: set checkpoint.every or checkpoint.minutes."),
        ("too-many", "3 steps in a row up to step 5 were skipped"),
        ("fp16-at-the-end", "gradients overflow even at the smallest loss scale (1.0)"),
    ],
)
def test_a_run_that_cannot_go_on_says_why(name: str, text: str, folder: Path) -> None:
    *faults, end = noted(folder, name)
    assert faults, "the fault did not happen"
    assert end.startswith("Diverged: ") and text in end
    assert (folder / "runs" / name / "DONE").exists() == (name == "stop")


def test_the_policy_may_change_on_the_way(folder: Path, rows_file: Path) -> None:
    """Stopped at step 6 and started again: it goes on after step 4, and loses nothing."""
    assert losses(folder / "runs" / "stop") == pytest.approx(plain(folder, rows_file, "stop", SHORT), abs=2e-5)
