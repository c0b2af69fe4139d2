"""Checkpoints in DeepSpeed's own files, converted: weights and states bit for bit, and training goes on with them."""

import json
from pathlib import Path

import pytest
import torch
from convert_worker import BEFORE, CASES, DECAY, EPS, LR, SAMPLES, STEPS
from ranks import REPOSITORY, forked, run
from safetensors.torch import load_file
from shared import losses
from test_custom import words

from toolkit.checkpoint.fragment_reader import Fragments
from toolkit.checkpoint.intact import manifest_problems, read_run_state
from toolkit.cli import main

WORKERS = REPOSITORY / "tests" / "ranks"
OLD = REPOSITORY / "tests" / "golden" / "format1" / "step-3"
OLD_LOSSES = [1.6059789657592773, 1.0381387710571288, 0.9242085814476013]
"""Of the run that saved it at 6473635, which wrote format 1: custom_worker.py's "plain" on two ranks."""
TARGETS = {"zero0": "zero=stage3", "zero1": "zero=stage2", "zero2": "zero=stage0", "zero3": "zero=stage1"}


def resuming(folder: Path, name: str, *more: str) -> list[str]:
    """Return the words of a run that resumes from what was converted under its name."""
    own = (
        f"resume={folder}/converted/{name}",
        f"train.max_steps={STEPS}",
        "optim.torch=true",
        "checkpoint.export=false",
    )
    return words(folder, name, *own, *more)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Plain DeepSpeed's checkpoints, converted, and runs that go on with them in another layout."""
    folder = tmp_path_factory.mktemp("convert")
    finished = run(forked(2, str(WORKERS / "convert_worker.py"), str(folder)), cwd=folder)
    assert finished.code == 0, finished.output[-6000:]
    for name in CASES:
        before = contents(folder / name)
        # As transformers' Trainer names it, or DeepSpeed.
        source = folder / name if name == "zero2" else folder / name / f"global_step{BEFORE}"
        assert main(["convert-checkpoint", str(source), f"output={folder}/converted/{name}"]) == 0
        assert contents(folder / name) == before
    assert main(["convert-checkpoint", str(OLD), f"output={folder}/converted/old"]) == 0
    jobs = []
    for name, (_, grouped, _) in CASES.items():
        own = [f"batch.global_size={SAMPLES}", f"optim.lr={LR}", f"optim.eps={EPS}"]
        own += [f"optim.weight_decay={DECAY}", f"optim.decay={'matrices' if grouped else 'all'}"]
        own += ["train.gradient_clipping=0", TARGETS[name]]
        jobs.append(("converted", resuming(folder, name, *own)))
    jobs.append(("plain", resuming(folder, "old", "zero=stage2")))
    (folder / "jobs.json").write_text(json.dumps(jobs))
    finished = run(forked(2, str(WORKERS / "custom_worker.py"), str(folder / "jobs.json")), cwd=folder)
    assert finished.code == 0, finished.output[-6000:]
    (folder / "output.txt").write_text(finished.output)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    """Return every file of a directory."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", CASES)
def test_weights_and_states_are_those_of_the_engine(name: str, folder: Path) -> None:
    found, held = Fragments(folder / "converted" / name), load_file(folder / f"{name}.safetensors")
    assert manifest_problems(found.folder) == []
    trained = {key.partition(":")[2] for key in held}
    stored = {"scale"} | ({"base.weight", "base.bias"} - trained)
    assert {*found.names} == trained | stored and "again.weight" not in found.names
    for key, value in held.items():
        state, _, parameter = key.partition(":")
        assert torch.equal(found.whole(parameter, state), value), key
        assert found.numbers(parameter) == {"step": BEFORE} and found.states(parameter) == {"exp_avg", "exp_avg_sq"}
    assert found.whole("scale").tolist() == [0.5, 2.0, 1.5]
    state = read_run_state(found.folder)
    assert state.step == BEFORE and state.is_foreign


@pytest.mark.parametrize("name", CASES)
def test_training_goes_on_as_the_engine_itself(name: str, folder: Path) -> None:
    """In another ZeRO stage."""
    straight, found = json.loads((folder / f"{name}.json").read_text()), losses(folder / "runs" / name)
    assert found == pytest.approx(straight[BEFORE:], abs=1e-5, rel=0)
    assert straight[BEFORE - 1] - straight[-1] > 1e-3, "losses that do not move prove nothing"
    assert "Data order, random states and token counts start again" in (folder / "output.txt").read_text()


def test_a_run_of_format_1_is_resumed_exactly(folder: Path) -> None:
    """Its data and what is drawn at random, too: each sample has noise. Up to the rounding of other processors."""
    assert losses(folder / "runs" / "old") == pytest.approx(OLD_LOSSES, abs=1e-6, rel=0)


def test_what_is_not_of_the_weights_is_copied(folder: Path) -> None:
    before, after = contents(OLD), contents(folder / "converted" / "old")
    assert not [name for name in after if name.endswith(".pt")]
    copied = [name for name in before if not name.endswith(".pt") and name != "manifest.json"]
    assert len(copied) == 4 and all(after[name] == before[name] for name in copied)
