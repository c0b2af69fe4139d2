"""A checkpoint becomes the model that the run itself exports, without its ranks; and both prove themselves."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from official import write
from ranks import forked, run
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from shared import FAULTY, WORKER, by_tier, can_do_async_io, experts, of_tier, tiny

from toolkit.checkpoint import directory, fragments
from toolkit.cli import main
from toolkit.config.load import load
from toolkit.messages import ConfigError
from toolkit.models import probe
from toolkit.train import run_dir

CELLS: dict[str, list[str]] = {
    "zero0-fp32": ["zero=stage0"],
    "zero2-bf16": ["zero=stage2", "precision=bf16", "checkpoint.keep_weights=1"],
    "zero3-bf16": ["zero=stage3_offload", "optim.torch=false", "precision=bf16"],
    "zero0-kept": ["zero=stage0", "checkpoint.keep_weights=-1"],
    "zero3-kept": ["zero=stage3_offload", "optim.torch=false", "precision=bf16", "checkpoint.keep_weights=1"],
    # A sub-group goes to NVMe from 1 MiB on.
    "nvme-zero3": [
        *("zero=stage3_nvme", "zero.offload_optimizer.nvme_path=FOLDER/nvme", "zero.offload_param.buffer_size=2000000"),
        *("model.shape.hidden_size=96", "model.shape.intermediate_size=384", "model.shape.vocab_size=4096"),
        *("optim.torch=false", "checkpoint.keep_weights=1"),
    ],
    "v1-zero2": ["zero=stage2", "precision=bf16"],
    "v3-zero3": ["zero=stage3", "precision=bf16", "zero.sub_group_size=3000"],
    "tied-experts-zero3": ["zero=stage3", "precision=bf16"],
    "tied-experts-zero1": ["zero=stage1", "precision=bf16"],
}
LATE = ("zero0-kept", "zero3-kept", "v1-zero2", "tied-experts-zero1")
"""Cells of the nightly tier: weights are kept by a process of their own, of what is on the disk."""


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, rows_file: Path) -> Path:
    """All cells, in one launch on two ranks: a checkpoint at step 3, of which the weights stay, and one at step 6."""
    folder = tmp_path_factory.mktemp("export")
    models = {
        "v1": write(folder / "v1", "v1", pickled=True, tokenizer=True),
        "v3": write(folder / "v3", "v3", tokenizer=True),
        "tied": experts(folder / "experts"),
    }
    cases = []
    (folder / "nvme").mkdir()
    for name, overrides in of_tier(request, CELLS, late=LATE).items():
        if name == "nvme-zero3" and not can_do_async_io():
            continue
        model = models.get(name.split("-")[0])
        words = ["train.max_steps=6", "checkpoint.every=3", "checkpoint.keep=1", "checkpoint.export=true"]
        words += ["evaluate.at_start=false"]
        words += [word.replace("FOLDER", str(folder)) for word in overrides]
        words += ["model=hf", f"model.path={model}"] if model else []
        cases.append({"overrides": tiny(rows_file, folder, name, *words)})
    (folder / "cases.json").write_text(json.dumps(cases))
    finished = run([*forked(2, WORKER), str(folder / "cases.json")], cwd=folder, timeout_s=400)
    assert finished.code == 0, finished.output[-6000:]
    assert "WARNING: the weights" not in finished.output
    return folder / "runs"


def check_async_io(name: str) -> None:
    """Skip a cell that needs what DeepSpeed cannot build here."""
    if name == "nvme-zero3" and not can_do_async_io():
        pytest.skip("DeepSpeed's aio op cannot be built here: libaio's headers are missing (Debian: libaio-dev)")


def contents(folder: Path) -> dict[str, bytes]:
    """Return every file of a folder."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", by_tier(CELLS, late=LATE))
def test_a_checkpoint_elsewhere_exports_what_the_run_exported(name: str, runs: Path, tmp_path: Path) -> None:
    """Copied, and the cache and the base model's folder gone."""
    check_async_io(name)
    [checkpoint] = directory.published_checkpoints(runs / name / "checkpoints")
    assert checkpoint.name == "step-6"
    moved = shutil.copytree(checkpoint, tmp_path / "moved")
    hidden = [runs.parent / one for one in ("cache", "v1", "v3", "experts")]
    for path in hidden:
        path.rename(path.with_name(f"{path.name}.away"))
    try:
        assert main(["export-model", f"model.path={moved}", "format=hf", f"output={tmp_path}/hf"]) == 0
        before, after = contents(runs / name / "export"), contents(tmp_path / "hf")
        assert set(before) == set(after)
        assert [file for file in before if before[file] != after[file]] == []
        official = ["export-model", f"model.path={moved}", "format=official", f"output={tmp_path}/official"]
        assert main(official) == (0 if name.startswith("v") else 2)
        for folder in (moved, *(tmp_path / one for one in ("hf", "official") if (tmp_path / one).exists())):
            assert main(["verify", str(folder)]) == 0
    finally:
        for path in hidden:
            path.with_name(f"{path.name}.away").rename(path)
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(
    "name", by_tier([name for name, words in CELLS.items() if "keep_weights" in words[-1]], late=LATE)
)
def test_weights_of_an_old_checkpoint_stay(
    name: str, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check_async_io(name)
    checkpoints = runs / name / "checkpoints"
    weights = checkpoints / "step-3-weights"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["good", "latest", "step-3-weights", "step-6"]
    older, newer = probe.read(weights), probe.read(checkpoints / "step-6")
    assert older is not None
    assert newer is not None
    assert torch.equal(older.ids, newer.ids)
    assert not torch.allclose(older.logits, newer.logits, atol=1e-3), "they are of different steps"
    assert main(["verify", str(runs / name)]) == 0
    said = capsys.readouterr().out
    assert [line.split(": ")[0].rpartition("/")[2] for line in said.splitlines() if ": whole, " in line] == [
        *("step-3-weights", "step-6", "export")
    ]
    assert said.count("forward: the logits are those of the save") == 3
    assert main(["generate", f"model.path={weights}", "prompt=red apple", "max_new_tokens=2"]) == 0
    cfg = load(["recipe=quickstart", f"run.dir={tmp_path}", f"resume={weights}"]).cfg
    with pytest.raises(ConfigError, match=rf"resume = {weights} is a model or an adapter alone.*model\.path={weights}"):
        run_dir.choose_run_dir(cfg)
    assert list(tmp_path.iterdir()) == []


def reseal(folder: Path) -> None:
    """Write the manifest anew over whatever lies there: now only the content can tell."""
    (folder / directory.MANIFEST).unlink()
    paths = [path for path in folder.rglob("*") if path.is_file()]
    directory.write_manifest(
        folder, {path.relative_to(folder).as_posix(): directory.record_file(path) for path in paths}, {}
    )


@pytest.mark.parametrize("what", ["wrong", "empty", "missing"])
@pytest.mark.parametrize("place", ["export", "step-3-weights", "step-6"])
def test_verify_sees_what_a_manifest_cannot(
    what: str, place: str, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_folder = runs / "zero2-bf16"
    folder = shutil.copytree(run_folder / ("" if place == "export" else "checkpoints") / place, tmp_path / place)
    name = "model.layers.1.self_attn.o_proj.weight"
    is_checkpoint = place == "step-6"
    for file in sorted(folder.glob("fragments-*") if is_checkpoint else [folder / "model.safetensors"]):
        state = {one: value.clone() for one, value in load_file(file).items()}  # not mapped from what is written over
        key = f"weight:{name}" if is_checkpoint else name
        if what == "missing":
            state.pop(key, None)
        elif key in state:
            state[key] = torch.zeros_like(state[key]) if what == "wrong" else torch.empty(0)
        if is_checkpoint:
            with safe_open(file, "pt") as opened:
                facts = json.loads(opened.metadata()["fragments"])
            del state[directory.CHECKSUMS]
            fragments.write(fragments.Content(state, facts), file)
        else:
            save_file(state, file, metadata={"format": "pt"})
    assert main(["verify", str(folder)]) == 74
    said = capsys.readouterr().out
    assert "DAMAGED" in said
    assert "fragments-0000" in said or "model.safetensors: " in said
    reseal(folder)
    assert main(["verify", str(folder)]) == 74
    said = capsys.readouterr().out
    assert ("the logits differ" if what == "wrong" else name) in said
    quick = 74 if what == "empty" and not is_checkpoint else 0
    assert main(["verify", str(folder), "forward=no"]) == quick


def test_verify_sees_foreign_files_and_says_what_is_old(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(runs / "zero0-fp32" / "export", tmp_path / "export")
    save_file({"a": torch.ones(3)}, folder / "model-2.safetensors")
    assert main(["verify", str(folder)]) == 74
    assert "model-2.safetensors: the manifest does not know it" in capsys.readouterr().out
    (folder / "model-2.safetensors").unlink()
    (folder / directory.MANIFEST).unlink()  # as an older version left it
    shutil.rmtree(folder / "probe")
    assert main(["verify", str(folder)]) == 0
    said = capsys.readouterr().out
    assert "it has no manifest (an older version" in said
    assert "there is no probe" in said
    step = shutil.copytree(runs / "zero0-fp32" / "checkpoints" / "step-6", tmp_path / "step-6")
    shutil.rmtree(step / "model")
    shutil.rmtree(step / "probe")
    reseal(step)
    assert main(["verify", str(step)]) == 0
    assert "no forward: " in capsys.readouterr().out
    assert main(["export-model", f"model.path={step}", "format=hf", f"output={tmp_path}/hf"]) == 74
    assert "it was saved by an older version" in capsys.readouterr().err


def test_a_run_folder_gives_its_newest_whole_checkpoint(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    for step in (6, 7):
        shutil.copytree(runs / "zero3-bf16" / "checkpoints" / "step-6", folder / "checkpoints" / f"step-{step}")
    (folder / "checkpoints" / "step-7" / "mp_rank.pt").write_bytes(b"")
    assert main(["export-model", f"model.path={folder}", "format=hf", f"output={tmp_path}/hf"]) == 0
    said = capsys.readouterr().out
    assert f"{folder}/checkpoints/step-7: DAMAGED" in said
    assert f"Taking {folder}/checkpoints/step-6." in said
    assert (folder / "checkpoints" / "step-7").is_dir()
    shutil.rmtree(folder / "checkpoints" / "step-6")
    assert main(["export-model", f"model.path={folder}", "format=hf", f"output={tmp_path}/again"]) == 74
    assert not (tmp_path / "again").exists()


def test_an_export_that_fails_says_what_is_trained_and_how_to_export_it(
    rows_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here as the disk fills up; the command that is named exports."""
    fault = {"at": "export", "rank": 0, "do": "fail", "note": str(tmp_path / "note")}
    wanted = ["train.max_steps=2", "schedule.warmup_steps=0", "checkpoint.export=true", "train.rehearse=true"]
    words = tiny(rows_file, tmp_path, "run", *wanted)
    finished = run(forked(1, FAULTY, *words), cwd=tmp_path, FAULT=json.dumps(fault))
    assert finished.code == 74, finished.output[-4000:]
    command = ["toolkit", "export-model", "runs/run/checkpoints/step-2", "output=runs/run/export"]
    said = (
        f"{os.strerror(28)}. Nothing else was touched.\n"
        "All 2 steps are trained, and the checkpoint runs/run/checkpoints/step-2 is untouched. Export it later:  "
        f"{' '.join(command)}"
    )
    assert said in finished.output
    assert "Nothing was trained" not in finished.output
    assert "Traceback" not in finished.output
    monkeypatch.chdir(tmp_path)
    assert main(command[1:]) == 0
