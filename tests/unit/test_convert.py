"""What `toolkit convert-checkpoint` refuses, and that what is damaged or runs code is never made into a checkpoint."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import merge_fsdp_weights
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict_saver import save

from toolkit.checkpoint import intact
from toolkit.checkpoint.fragment_reader import Fragments
from toolkit.checkpoint.fragments import WEIGHT
from toolkit.cli import main
from toolkit.export.card import card
from toolkit.export.checkpoint import export_checkpoint
from toolkit.extras import convert_checkpoint as convert
from toolkit.messages import NotExportable, OtherFormat

OLD = Path(__file__).parents[1] / "golden" / "format1" / "step-3"
MODEL, OPTIMIZER = "mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.file}",)


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """DeepSpeed's files alone, as another program has them."""
    folder = tmp_path / "global_step3"
    folder.mkdir()
    for path in OLD.glob("*.pt"):
        shutil.copyfile(path, folder / path.name)
    return folder


def converted(source: Path, capsys: pytest.CaptureFixture[str], code: int) -> str:
    """Try to convert, see that nothing is left of a refusal, and return what was said."""
    output = source.parent / "output"
    assert main(["convert-checkpoint", str(source), f"output={output}"]) == code
    assert code == 0 or not [path for path in source.parent.iterdir() if "output" in path.name]
    said = capsys.readouterr()
    return said.err if code else said.out


def change(path: Path, key: str, value: Any) -> None:
    """Replace a value of a file of DeepSpeed's."""
    found = torch.load(path, weights_only=False)
    found[key] = value
    torch.save(found, path)


@pytest.mark.parametrize("file", [MODEL, OPTIMIZER])
def test_a_pickle_that_runs_code_is_rejected_and_not_executed(
    file: str, foreign: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save({"module": Bomb(tmp_path / "fired")}, foreign / file)
    said = converted(foreign, capsys, 74)
    assert f"{file} is a pickle that wants to run code, which is rejected: " in said and "GLOBAL" in said
    assert not (tmp_path / "fired").exists()
    torch.load(foreign / file, weights_only=False)
    assert (tmp_path / "fired").exists(), "it would have run"


def test_what_is_incomplete_or_of_another_kind_is_rejected(foreign: Path, capsys: pytest.CaptureFixture[str]) -> None:
    last = foreign / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    states = torch.load(last, weights_only=False)["optimizer_state_dict"]
    inner = states["base_optimizer_state"]
    for name, value in (("row", torch.zeros(4)), ("exp_avg", torch.zeros(4))):
        other = inner | {"state": {0: inner["state"][0] | {name: value}}}
        change(last, "optimizer_state_dict", states | {"base_optimizer_state": other})
        assert f"optimizer state {name}" in converted(foreign, capsys, 74)
    muon = inner | {"param_groups": [{**inner["param_groups"][0], "use_muon": True}]}
    change(last, "optimizer_state_dict", states | {"base_optimizer_state": muon})
    assert "Muon" in converted(foreign, capsys, 74)
    lion = inner | {"state": {0: {"momentum_buffer": inner["state"][0]["exp_avg"]}}}
    change(last, "optimizer_state_dict", states | {"base_optimizer_state": lion})
    assert "optimizer states momentum_buffer" in converted(foreign, capsys, 74)
    short = [one[:-1] for one in states["single_partition_of_fp32_groups"]]
    change(last, "optimizer_state_dict", states | {"single_partition_of_fp32_groups": short})
    assert "cannot be converted" in converted(foreign, capsys, 74)
    last.write_bytes(b"")
    assert f"{last.name} cannot be read" in converted(foreign, capsys, 74)
    last.unlink()
    assert "cannot be converted" in converted(foreign, capsys, 74)
    (foreign / "layer_0_expert_0_mp_rank_00_model_states.pt").touch()
    assert "layer_0_expert_0" in converted(foreign, capsys, 74)


def test_nothing_is_overwritten_and_a_source_must_be_one(
    foreign: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert-checkpoint", str(foreign), f"output={foreign}"]) == 2
    assert "exists already: nothing was written" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    for source in (tmp_path / "empty", tmp_path / "missing", OLD / "model"):
        assert main(["convert-checkpoint", str(source), f"output={tmp_path}/output"]) == 2
        assert "holds neither files of a DeepSpeed checkpoint" in capsys.readouterr().err
    (tmp_path / "latest").write_text("global_step3\n")
    assert convert.find(tmp_path) == foreign
    (tmp_path / "empty" / "pytorch_model_fsdp_0").mkdir()
    assert main(["convert-checkpoint", str(tmp_path / "empty"), f"output={tmp_path}/output"]) == 2
    assert f"accelerate merge-weights {tmp_path}/empty/pytorch_model_fsdp_0 DIR" in capsys.readouterr().err


def test_format_1_is_verified_and_a_damaged_one_is_not_converted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(OLD, tmp_path / "step-3")
    content = bytearray((OLD / OPTIMIZER).read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / "step-3" / OPTIMIZER).write_bytes(content)
    assert f"is damaged: {OPTIMIZER}: its content is not what was written" in converted(tmp_path / "step-3", capsys, 74)


@pytest.mark.parametrize("number", [1, 99])
def test_a_run_does_not_take_another_format_for_damage(number: int, tmp_path: Path) -> None:
    shutil.copytree(OLD, tmp_path / "step-3")
    manifest = json.loads((OLD / "manifest.json").read_text())
    (tmp_path / "step-3" / "manifest.json").write_text(json.dumps(manifest | {"format": number}))
    with pytest.raises(OtherFormat, match=r"toolkit convert-checkpoint .*step-3 output=DIR"):
        intact.newest_intact(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-3"]


def test_what_was_converted_does_not_say_what_its_model_is(
    foreign: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    converted(foreign, capsys, 0)
    with pytest.raises(
        NotExportable, match="does not say what its model is: it was saved by an older version or another"
    ):
        export_checkpoint(tmp_path / "output", tmp_path / "export")


def test_files_are_bounded_and_hold_the_same(
    foreign: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "comes from another program" in converted(foreign, capsys, 0)
    monkeypatch.setattr(convert, "_MOST_BYTES", 100)
    assert main(["convert-checkpoint", str(foreign), f"output={tmp_path}/bounded"]) == 0
    whole, bounded = Fragments(tmp_path / "output"), Fragments(tmp_path / "bounded")
    assert len([*bounded.folder.glob("fragments-*")]) > len([*whole.folder.glob("fragments-*")]) == 2
    assert whole.names == bounded.names == ["0.bias", "0.weight", "2.bias", "2.weight"]
    for name in whole.names:
        for state in (WEIGHT, "exp_avg", "exp_avg_sq"):
            assert torch.equal(whole.whole(name, state), bounded.whole(name, state))


@pytest.mark.parametrize("key", ["task", "preference", "distill"])
def test_cards_of_runs_that_did_not_know_a_key(key: str) -> None:
    state = intact.read_run_state(OLD)
    state.config = {name: value for name, value in state.config.items() if name != key}
    assert b"## Losses" in card(state, is_adapter=False)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_weights_of_fsdp_come_from_accelerate(tmp_path: Path) -> None:
    weights = {"model.norm.weight": torch.arange(3.0)}
    save({"model": weights}, checkpoint_id=tmp_path / "pytorch_model_fsdp_0", no_dist=True)
    merge_fsdp_weights(str(tmp_path / "pytorch_model_fsdp_0"), str(tmp_path / "merged"))
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert merged.keys() == weights.keys() and merged["model.norm.weight"].equal(weights["model.norm.weight"])
