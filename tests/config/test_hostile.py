"""A recipe from a stranger can do nothing: refused at once, nothing executed."""

import time
from pathlib import Path

import pytest

from toolkit.command_line import positive_int
from toolkit.config.load import load
from toolkit.engine.ds_import import read_json
from toolkit.launch.environment import detect
from toolkit.messages import ConfigError, LaunchError, Problems

CODE = "{_target_: os.system, command: 'touch CANARY'}"
RECIPES = {
    "target": f"model: {CODE}\n",
    "target in a list": f"data:\n  sources:\n    - {CODE}\n",
    "target in a free section": f"ds_extra:\n  deep:\n    - {CODE}\n",
    "hydra callbacks": f"hydra:\n  callbacks:\n    x: {CODE}\n",
    "hydra logging": "hydra:\n  job_logging:\n    handlers:\n      x: {'()': os.system, command: 'touch CANARY'}\n",
    "defaults into hydra": "defaults:\n  - override /hydra/launcher: basic\n",
    "environment": "run:\n  name: ${oc.env:HOME}\n",
    "environment in a free section": "ds_extra:\n  x: ${oc.env:HOME}\n",
    "resolver named by another key": "run:\n  dir: oc.env\n  name: ${${run.dir}:HOME}\n",
    "resolver put together": "run:\n  dir: env\n  name: ${oc.${run.dir}:HOME}\n",
    "resolver put together in a free section": "ds_extra:\n  x: [{y: '${oc.${run.dir}:HOME}'}]\n",
    "key that is no text": "null: x\n",
    "number as a key in a free section": "ds_extra:\n  1: x\n",
    "set": "run: !!set {a}\n",
    "set in a free section": "ds_extra:\n  x: !!set {a}\n",
    "bytes in a free section": "ds_extra:\n  x: !!binary aGk=\n",
    "python tag": "run:\n  name: !!python/object/apply:os.system ['touch CANARY']\n",
    "alias bomb": "a: &a [x,x,x,x,x,x,x,x,x]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a]\nc: [*b,*b,*b,*b,*b,*b,*b,*b]\n",
    "deep": "ds_extra:\n  x: " + "[" * 100 + "]" * 100 + "\n",
    "large": "run:\n  name: '" + "x" * 2_000_000 + "'\n",
    "class": "run:\n  __class__: x\n",
}
WORDS = [
    "+model._target_=os.system",
    "ds_extra._target_=os.system",
    "ds_extra.x={_target_: os.system}",
    "data.sources=[{_target_: os.system}]",
    "+hydra.callbacks.x._target_=os.system",
    "hydra/launcher=basic",
    "run.name=${oc.env:HOME}",
    "ds_extra.x=[a,'${oc.env:HOME}']",
    "'run.name=${oc.${run.dir}:HOME}'",
    "zero@model=stage3",
    "ds_extra.x=" + "[" * 3000 + "]" * 3000,
]


@pytest.mark.fault("S2")
@pytest.mark.parametrize("name", RECIPES)
def test_hostile_recipe(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("r.yaml").write_text(RECIPES[name])
    started = time.monotonic()
    with pytest.raises(ConfigError, match=r"^(2 errors:\n1\. )?r\.yaml"):
        load(["recipe=r.yaml"])
    assert time.monotonic() - started < 2
    assert not Path("CANARY").exists()


def test_a_target_in_a_free_section_is_named_at_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("r.yaml").write_text("ds_extra:\n  outer:\n    a: 1\n    _target_: os.system\n")
    with pytest.raises(ConfigError, match=r"r\.yaml:4: '_target_' is not allowed"):
        load(["recipe=r.yaml"])


@pytest.mark.fault("S2")
@pytest.mark.parametrize("word", WORDS)
def test_hostile_word(word: str) -> None:
    with pytest.raises(ConfigError, match=r"^command line: "):
        load(["recipe=quickstart", word])


def test_deep_word() -> None:
    with pytest.raises(ConfigError):
        load(["recipe=quickstart", "ds_extra.x=" + "[" * 300 + "]" * 300])


DIGITS = "9" * 5000


def test_numbers_of_thousands_of_digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python refuses to read them, with an error of its own."""
    monkeypatch.chdir(tmp_path)
    for word in (f"run.seed={DIGITS}", f"ds_extra.foo={DIGITS}"):
        with pytest.raises(ConfigError, match=r"^command line: ") as error:
            load(["recipe=quickstart", word])
        assert len(str(error.value)) < 500
    Path("r.yaml").write_text(f"run:\n  seed: {DIGITS}\n")
    with pytest.raises(ConfigError, match=r"^r\.yaml"):
        load(["recipe=r.yaml"])
    Path("ds.json").write_text(f'{{"train_batch_size": {DIGITS}}}')
    with pytest.raises(ConfigError, match=r"^ds\.json is not JSON: Exceeds the limit"):
        read_json("ds.json", Problems())
    with pytest.raises(ConfigError, match=r"world_size = 9{40} is not a positive whole number"):
        positive_int({"world_size": DIGITS}, "world_size")
    with pytest.raises(LaunchError, match=r"RANK=9{40} is not a number"):
        detect({"RANK": DIGITS, "WORLD_SIZE": "1"})
