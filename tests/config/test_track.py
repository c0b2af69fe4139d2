"""`track`: one tracker or several, from the command line, a recipe or a DeepSpeed JSON."""

import importlib.util
import json
from pathlib import Path

import pytest

from toolkit.config.load import LoadedConfig, load, to_yaml
from toolkit.config.requirements import check_tracker_packages
from toolkit.config.rules import check_rules
from toolkit.config.schema import TRACKER_PACKAGES, TRACKERS
from toolkit.engine.ds_config import build_ds_config
from toolkit.engine.ds_import import import_json
from toolkit.messages import ConfigError
from toolkit.track.backends import MlflowRun

RECIPE = "recipe=quickstart"


def enabled(*words: str) -> list[str]:
    return load([RECIPE, *words]).cfg.track.enabled


@pytest.mark.parametrize("name", TRACKERS)
def test_each_has_a_file(name: str) -> None:
    assert enabled(f"track={name}") == [name]


def test_several_none_and_one_more() -> None:
    assert enabled() == enabled("track=jsonl") == enabled("track=[]") == []
    assert enabled("track=[wandb,tensorboard]") == ["tensorboard", "wandb"]
    assert enabled("track=csv", "track.wandb.enabled=true") == ["csv", "wandb"]
    assert load([RECIPE, "track=[wandb]", "track.wandb.mode=offline"]).cfg.track.wandb.mode.value == "offline"


def test_a_recipe_lists_several(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("# @package _global_\ndefaults:\n  - override /track: [csv, mlflow]\n")
    loaded = load([f"recipe={recipe}"])
    assert loaded.cfg.track.enabled == ["csv", "mlflow"]
    assert loaded.where["track.csv.enabled"] == "conf/track/csv.yaml:3"
    assert load([f"recipe={recipe}", "track=wandb"]).cfg.track.enabled == ["wandb"]
    again = tmp_path / "config.yaml"
    again.write_text(to_yaml(loaded.cfg))
    assert load([f"recipe={again}"]).cfg.track.enabled == ["csv", "mlflow"]


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("track=[tensorbord]", "unknown choice 'track=tensorbord'. Did you mean 'tensorboard'?"),
        ("track=[wandb,1]", "'track' = ['wandb', 1] must be a section of keys"),
        ("zero=[stage1,stage2]", "'zero' = ['stage1', 'stage2'] must be a section of keys"),
        ("track.wandb.api_key=abc", "unknown key 'track.wandb.api_key'"),
    ],
)
def test_refused(word: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load([RECIPE, word])
    assert message in str(caught.value)


@pytest.mark.parametrize("name", TRACKER_PACKAGES)
def test_a_package_that_is_not_installed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of that name, which wandb leaves where it runs, is no package."""
    real = importlib.util.find_spec
    (tmp_path / name).mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    here = str(tmp_path / name)
    empty = importlib.machinery.ModuleSpec(name, None, is_package=True)
    empty.submodule_search_locations = [here]
    monkeypatch.setattr(importlib.util, "find_spec", lambda asked: empty if asked == name else real(asked))
    loaded = load([RECIPE, f"track=[csv,{name}]"])
    check_rules(loaded, 2)
    with pytest.raises(ConfigError) as caught:
        check_tracker_packages(loaded)
    assert str(caught.value) == (
        f"conf/track/{name}.yaml:3: track.{name} needs the package {name}, which is not installed:  "
        f"pip install {TRACKER_PACKAGES[name]}"
    )
    check_tracker_packages(load([RECIPE, "track=csv"]))


def test_deepspeeds_own_tracker_needs_its_package() -> None:
    """DeepSpeed prints what is missing and ends with ImportError."""
    with pytest.raises(ConfigError, match=r"ds_extra\.comet needs the package comet_ml, which is not installed:"):
        check_tracker_packages(load([RECIPE, "ds_extra.comet={enabled: true}"]))


def test_which_mlflow_addresses_are_folders() -> None:
    folders = {uri: MlflowRun.folders({"uri": uri}) for uri in ("runs/mlruns", "file:///a/b")}
    assert folders == {"runs/mlruns": {"uri": Path("runs/mlruns")}, "file:///a/b": {"uri": Path("/a/b")}}
    assert not any(MlflowRun.folders({"uri": uri}) for uri in ("http://h:5000", "sqlite:///a.db", "databricks://x"))


def imported(folder: Path, values: object, *words: str) -> tuple[LoadedConfig, list[str]]:
    path = folder / "ds.json"
    path.write_text(json.dumps(values, indent=1))
    return import_json(str(path), load([RECIPE, *words]), 2)


def test_deepspeeds_monitors_become_trackers(tmp_path: Path) -> None:
    values = {
        "train_batch_size": 16,
        "tensorboard": {"enabled": True, "output_path": "/tb", "job_name": "mine"},
        "csv_monitor": {"enabled": True, "output_path": "/csv", "job_name": "mine"},
        "wandb": {"enabled": True, "project": "p", "group": "g", "team": "t"},
    }
    loaded, notes = imported(tmp_path, values)
    track = loaded.cfg.track
    assert loaded.cfg.track.enabled == ["tensorboard", "csv", "wandb"]
    assert track.tensorboard.dir == "/tb/mine"
    assert (track.wandb.project, track.wandb.group, track.wandb.entity) == ("p", "g", "t")
    text = "\n".join(notes)
    assert text.count("DeepSpeed's monitor stays off: track.") == 3
    assert "csv_monitor.output_path has no effect: metrics.csv is written into the run directory." in text
    made = build_ds_config(loaded.cfg, 2, 100)
    assert not {"tensorboard", "csv_monitor", "wandb"} & set(made.values)
    assert "The trackers (tensorboard, csv, wandb) are omitted" in "\n".join(made.missing)


def test_monitors_that_are_off_or_left_open_change_nothing(tmp_path: Path) -> None:
    values = {
        "train_batch_size": 16,
        "tensorboard": {"enabled": False, "job_name": "x"},
        "wandb": {"enabled": "auto", "project": "p"},
        "csv_monitor": {"output_path": "/csv"},
    }
    loaded, notes = imported(tmp_path, values, "track=wandb", "track.wandb.project=mine")
    assert loaded.cfg.track.enabled == ["wandb"]
    assert loaded.cfg.track.wandb.project == "mine"
    assert "stays off" not in "\n".join(notes)


def test_a_monitor_beats_the_recipe_and_loses_to_the_command_line(tmp_path: Path) -> None:
    values = {"train_batch_size": 16, "wandb": {"enabled": True, "project": "theirs"}}
    loaded, notes = imported(tmp_path, values, "track=wandb", "track.wandb.project=mine")
    assert loaded.cfg.track.wandb.project == "mine"
    assert "wandb.project" in "\n".join(notes), "what has no effect is listed"
    with pytest.raises(ConfigError, match=r"wandb.enabled = \"yes\" must be true or false"):
        imported(tmp_path, {"train_batch_size": 16, "wandb": {"enabled": "yes"}})
