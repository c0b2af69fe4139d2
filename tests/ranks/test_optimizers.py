"""Every optimizer under the ZeRO stages that it is offered for, on two ranks: one trajectory, also after a restart."""

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run
from shared import WORKER, by_tier, launcher, losses, of_tier, plain_loop, tiny

from toolkit.checkpoint.fragment_reader import Fragments
from toolkit.engine.lion import Lion

STEPS, SAVED = 6, 3
TOLERANCE = 5e-6
# Lion takes signs: of a number next to 0 the order of additions decides. Measured: 8.7e-6, of losses that fall by 0.1.
LION_TOLERANCE = 5e-5
# Muon orthogonalises in bfloat16, where another order of additions shows. Measured: at most 1.3e-3.
MUON_TOLERANCE = 1e-2

PLAIN = ["optim.weight_decay=0.1"]
MUON = ["optim=muon", "optim.lr=0.02", "optim.adam_lr=0.003", "train.gradient_clipping=0", *PLAIN]
GROUPS = ["optim.decay=matrices", "optim.layer_lr_decay=0.5", *PLAIN]
OFFLOAD = "zero.offload_optimizer.device=cpu"
# name -> overrides
CELLS = {
    "sgd-2": ["optim=sgd", "zero=stage2", *PLAIN],
    "sgd-3": ["optim=sgd", "zero=stage3", OFFLOAD, *PLAIN],
    "lion-1": ["optim=lion", "zero=stage1", "optim.lr=0.0003", *PLAIN],
    "lion-3": ["optim=lion", "zero=stage3", OFFLOAD, "optim.lr=0.0003", *PLAIN],
    "adafactor-0": ["optim=adafactor", "zero=stage0", "optim.lr=0.03", *PLAIN],
    "adagrad-0": ["optim=adagrad", "zero=stage0", "optim.lr=0.01", *PLAIN],
    "groups-0": ["zero=stage0", *GROUPS],
    "groups-2": ["zero=stage2", *GROUPS],
    "groups-3": ["zero=stage3", *GROUPS],
    "muon-0": ["zero=stage0", *MUON],
    "muon-2": ["zero=stage2", *MUON],
    "muon-3": ["zero=stage3", *MUON],
    "muon-2-offload": ["zero=stage2", OFFLOAD, *MUON],
    "muon-1-bf16": ["zero=stage1", "precision=bf16", *MUON],
    "fused-0": ["zero=stage0", "optim.torch=false", *PLAIN],
    **(
        {"8bit-2": ["optim=adamw_8bit", "zero=stage2"], "8bit-3": ["optim=adamw_8bit", "zero=stage3", OFFLOAD]}
        if importlib.util.find_spec("bitsandbytes")
        else {}
    ),
}
AGAIN = ("adafactor-0", "adagrad-0", "sgd-2", "lion-3", "groups-2", "muon-2", "muon-3", "muon-2-offload", "8bit-2")
"""Those that go on from a checkpoint, and rehearse a step before they do."""
ELSEWHERE = {"fused-0": ["zero=stage2", "optim.torch=true"]}
"""Those that go on as another class of optimizer, which has other parts of the states."""
LATE = ("sgd-3", "lion-1", "groups-3", "muon-2-offload", "muon-1-bf16")
"""Cells of the nightly tier."""
AGAIN_LATE = ("adafactor-0", "groups-2", "muon-3", "muon-2-offload")
"""Those that go on in the nightly tier alone: test_layouts.py and test_resume.py have their like."""
PLAINLY: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda trained, lr: torch.optim.SGD(trained, lr=lr, momentum=0.9, weight_decay=0.1),
    "lion": lambda trained, lr: Lion(trained, lr=lr, betas=(0.9, 0.99), weight_decay=0.1),
    "adafactor": lambda trained, lr: torch.optim.Adafactor(trained, lr=lr, weight_decay=0.1),
    "adagrad": lambda trained, lr: torch.optim.Adagrad(trained, lr=lr, eps=1e-8, weight_decay=0.1),
}


def words(rows_file: Path, folder: Path, name: str, *overrides: str) -> list[str]:
    common = [f"train.max_steps={STEPS}", f"checkpoint.every={SAVED}", "checkpoint.keep=0", "checkpoint.export=false"]
    return tiny(rows_file, folder, name, *common, "evaluate.at_start=false", *overrides)


@pytest.fixture(scope="session")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, rows_file: Path) -> Path:
    """Every cell, and some of them again from a checkpoint; all in one launch."""
    folder = tmp_path_factory.mktemp("optimizers")
    cases: list[dict[str, Any]] = []
    go_on = of_tier(request, dict.fromkeys(AGAIN), late=AGAIN_LATE)
    for name, overrides in of_tier(request, CELLS, late=LATE).items():
        cases.append({"overrides": words(rows_file, folder, name, *overrides)})
        if name in (*go_on, *ELSEWHERE):
            died = {"of": f"{folder}/runs/{name}", "step": SAVED, "as": f"{folder}/runs/{name}-again"}
            changed = ELSEWHERE.get(name, ["train.rehearse=true"])
            again = words(rows_file, folder, f"{name}-again", *overrides, *changed)
            cases.append({"overrides": again, "died": died})
    (folder / "cases.json").write_text(json.dumps(cases))
    # Muon's arithmetic would be compiled for each shape, which takes minutes on CPUs.
    command = launcher(request)(2, WORKER, str(folder / "cases.json"))
    finished = run(command, cwd=folder, timeout_s=600, TORCHDYNAMO_DISABLE="1")
    assert finished.code == 0, finished.output[-6000:]
    return folder / "runs"


def furthest(left: list[float], right: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("name", by_tier([name for name in CELLS if name.split("-")[0] in PLAINLY], late=LATE))
def test_as_in_a_plain_loop(
    name: str, runs: Path, rows_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = PLAINLY[name.split("-")[0]]
    monkeypatch.setattr(torch.optim, "AdamW", lambda trained, lr, **_: make(trained, lr))
    expected, _ = plain_loop(
        words(rows_file, tmp_path, "reference", *CELLS[name], OFFLOAD.replace("cpu", "none")), STEPS
    )
    assert expected[0] - expected[-1] > 0.02, "the reference itself must learn, or the comparison says little"
    assert furthest(losses(runs / name), expected) < (LION_TOLERANCE if "lion" in name else TOLERANCE)


@pytest.mark.parametrize(
    ("name", "other", "tolerance"),
    [
        ("groups-2", "groups-0", TOLERANCE),
        ("muon-2", "muon-0", MUON_TOLERANCE),
        ("muon-3", "muon-0", MUON_TOLERANCE),
        pytest.param("groups-3", "groups-0", TOLERANCE, marks=pytest.mark.nightly),
        pytest.param("muon-2-offload", "muon-0", MUON_TOLERANCE, marks=pytest.mark.nightly),
        pytest.param("muon-1-bf16", "muon-0", 0.05, marks=pytest.mark.nightly),
    ],
)
def test_stages_agree(name: str, other: str, tolerance: float, runs: Path) -> None:
    found = losses(runs / name)
    assert found[0] - found[-1] > 0.02
    assert furthest(found, losses(runs / other)) < tolerance


def test_8_bits_are_near_32(runs: Path) -> None:
    pytest.importorskip("bitsandbytes")
    left, right = losses(runs / "8bit-2"), losses(runs / "8bit-3")
    assert left[0] - left[-1] > 0.02
    assert furthest(left, right) < 0.01


@pytest.mark.parametrize("name", by_tier([name for name in AGAIN if name in CELLS], late=AGAIN_LATE))
def test_goes_on_as_if_nothing_had_happened(name: str, runs: Path) -> None:
    """Momentum is there again, and the rehearsal of a step has not touched it."""
    assert losses(runs / f"{name}-again") == losses(runs / name)


@pytest.mark.parametrize("name", ELSEWHERE)
def test_goes_on_as_another_class_of_optimizer(name: str, runs: Path) -> None:
    """FusedAdam's count of steps, from which Adam corrects its moments, is saved for every parameter."""
    saved = Fragments(runs / name / "checkpoints" / f"step-{SAVED}")
    assert {facts["numbers"]["step"] for facts in saved.facts.values() if "numbers" in facts} == {SAVED}
    assert furthest(losses(runs / f"{name}-again"), losses(runs / name)) < TOLERANCE
