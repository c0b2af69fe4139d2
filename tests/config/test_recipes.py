"""Every shipped YAML composes, says only what it must, and every recipe runs anywhere with model=glm_tiny."""

import dataclasses
import math
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from toolkit.arguments import parse
from toolkit.cli.recipes import about
from toolkit.config import files
from toolkit.config.files import is_hub_name, known_recipes, read
from toolkit.config.load import load
from toolkit.config.mesh import model_ranks
from toolkit.config.rules import check_rules
from toolkit.config.schema import Init, RowFormat, RunConfig, TuningMethod
from toolkit.data.data_paths import files_of
from toolkit.engine.ds_config import build_ds_config
from toolkit.launch.environment import Ranks
from toolkit.messages import set_language
from toolkit.train.startup import greet

ROOT = Path(__file__).parents[2]
GROUP_FILES = sorted((ROOT / "conf").glob("*/*.yaml"))
RECIPES = sorted(known_recipes())
DIVIDED = {"glm45_air_lora", "glm47_flash", "qwen3_30b_a3b"}


def leaves(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return dotted key -> value."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            found |= leaves(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value
    return found


def plain_leaves(cfg: RunConfig) -> dict[str, Any]:
    """Return a config's dotted keys and plain values."""
    tree = dataclasses.asdict(cfg)
    return {key: getattr(value, "value", value) for key, value in leaves(tree).items()}


@pytest.mark.parametrize("path", [*known_recipes().values(), *(ROOT / "conf" / "model").glob("*.yaml")], ids=str)
@pytest.mark.parametrize("language", ["en", "zh"])
def test_lists_say_what_a_file_is_for(path: Path, language: str) -> None:
    """And not what its comments say to programs; a sentence that does not end on its line would be cut."""
    set_language(language)
    assert len(about(path)) > 5 and not set(about(path)) & set("@$")
    assert re.search(rf"^# {re.escape(about(path))}(?:[.。] ?|:\n)", path.read_text(encoding="utf-8"), re.MULTILINE)


def test_every_yaml_file_is_known() -> None:
    known = {*GROUP_FILES, ROOT / "conf" / "config.yaml", *known_recipes().values()}
    assert set((ROOT / "conf").rglob("*.yaml")) | set((ROOT / "recipes").rglob("*.yaml")) == known
    assert not list(ROOT.glob("conf/**/*.yml"))


@pytest.mark.parametrize("path", GROUP_FILES, ids=lambda path: f"{path.parent.name}={path.stem}")
def test_every_group_choice_composes(path: Path) -> None:
    loaded = load(["recipe=zero1", f"{path.parent.name}={path.stem}"])
    text = path.read_text()
    assert text.startswith("# "), "a comment says what it is for"
    assert 1 <= len([line for line in text.splitlines() if line and not line.startswith("#")]) <= 15
    is_empty = not yaml.safe_load(text)  # track=jsonl: nothing beside metrics.jsonl
    assert is_empty or any(
        place.startswith(f"conf/{path.parent.name}/{path.stem}.yaml:") for place in loaded.where.values()
    )


@pytest.mark.parametrize("path", GROUP_FILES, ids=lambda path: f"{path.parent.name}={path.stem}")
def test_group_files_do_not_repeat_defaults(path: Path) -> None:
    """The first key names the choice (`stage: 2`) and may equal the default; the others only say what differs."""
    own = leaves(yaml.safe_load(path.read_text()), f"{path.parent.name}.")
    defaults = plain_leaves(RunConfig())
    for key, value in list(own.items())[1:]:
        assert value != defaults.get(key), f"{key} = {value} is the default"


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes_say_only_what_differs(recipe: str, tmp_path: Path) -> None:
    path = known_recipes()[recipe]
    own = {key: value for key, value in read(path).values.items() if key != "defaults"}
    bare = tmp_path / f"{recipe}.yaml"
    bare.write_text(yaml.safe_dump({"defaults": read(path).values["defaults"]}))
    without = plain_leaves(load([f"recipe={bare}"]).cfg)
    for key, value in leaves(own).items():
        assert without[key] != value, f"{key} = {value} is what the groups give anyway"


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_is_introduced(recipe: str) -> None:
    lines = known_recipes()[recipe].read_text().splitlines()
    header = "\n".join(line for line in lines[: lines.index("defaults:")])
    assert lines[0] == "# @package _global_"
    assert "# Hardware" in header
    assert f"run.py recipe={recipe}" in header
    for document in ("docs/recipes.md", "docs/recipes_zh.md"):
        assert f"| `{recipe}` |" in (ROOT / document).read_text()
    assert f"| {recipe} |" in (ROOT / "recipes" / "README.md").read_text()


OWN_DATA = {"quickstart", "pretrain_continue", *(name for name in RECIPES if name.endswith("_adgen"))}
"""Recipes that do not train on conversations of one's own."""


@pytest.mark.parametrize("recipe", sorted(set(RECIPES) - OWN_DATA))
def test_a_header_says_how_many_steps_and_what_to_tune_first(recipe: str) -> None:
    """In both languages; the numbers are those of the config."""
    header = known_recipes()[recipe].read_text().partition("\ndefaults:")[0]
    found = re.findall(r"(\d+) steps \((\d+) train, (\d+) validate;\s(?:# )?(\d+) per step, (\d+) epochs?\)", header)
    assert found
    cfg = load([f"recipe={recipe}"]).cfg
    for steps, train, validate, size, epochs in (map(int, one) for one in found):
        assert (size, epochs) == (cfg.batch.global_size, cfg.train.epochs)
        assert validate == round((train + validate) * cfg.data.validation_fraction)
        assert steps == epochs * math.ceil(train / size)
        assert re.search(f"{steps} 步（.*每步 {size} [条对].*{epochs} 轮", header)
    assert re.search(r"(?s)Tune\s(?:# )?first:?.*optim\.lr \(", header) and "先调" in header
    if cfg.tuning.method is TuningMethod.lora and not cfg.preference.is_on:
        assert cfg.optim.lr >= 5e-5, "LoRA needs a higher rate than full fine-tuning"


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_runs_anywhere_with_glm_tiny(recipe: str, tmp_path: Path) -> None:
    needed = [f"zero.offload_optimizer.nvme_path={tmp_path}"] if recipe == "zero3_nvme" else []
    needed += ["tuning=lora"] if recipe.endswith("_qlora") else []  # weights in 4 bits need a GPU
    needed += ["parallel.expert=1"] if recipe in DIVIDED else []  # it has no experts
    for precision in ([], ["precision=fp32"]):
        data = ["data=examples"] if recipe.endswith("_adgen") else []
        loaded = load([f"recipe={recipe}", "model=glm_tiny", f"run.dir={tmp_path}", *data, *needed, *precision])
        check_rules(loaded, world_size=2)


def test_every_recipe_keeps_its_own_zero_group() -> None:
    stages = {name: load([f"recipe={name}"]).cfg.zero.stage for name in RECIPES}
    assert stages == {
        "quickstart": 2,
        "chatglm": 3,
        "chatglm_6b": 3,
        "chatglm2_6b": 3,
        "glm4_9b": 3,
        "chatglm3_lora": 2,
        "chatglm3_qlora": 2,
        "glm4_9b_lora": 2,
        "glm4_0414_9b": 3,
        "glm4_0414_32b": 3,
        "glm45_air_lora": 2,
        "glm45_air_qlora": 2,
        "glm47_flash": 2,
        "glm47_flash_lora": 2,
        "qwen3_30b_a3b": 2,
        "qwen3_30b_a3b_lora": 2,
        "qwen3_8b": 3,
        "qwen3_8b_lora": 2,
        "chatglm3_dpo_lora": 2,
        "qwen3_dpo": 3,
        "qwen3_distill": 3,
        "qwen3_reward_lora": 2,
        "qwen3_classify_lora": 2,
        "qwen3_embed_lora": 2,
        "llama31_8b": 3,
        "llama31_8b_lora": 2,
        "deepseek_r1_distill_qwen_7b_lora": 2,
        "pretrain_continue": 3,
        "lora": 2,
        "smollm2_135m": 2,
        "long_context": 3,
        "chatglm_full_adgen": 3,
        "chatglm_lora_adgen": 2,
        "chatglm_ptuning_adgen": 2,
        "zero1": 1,
        "zero2_offload": 2,
        "zero3_offload": 3,
        "zero3_nvme": 3,
        "fp16": 2,
    }


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_names_its_model_and_its_data(recipe: str) -> None:
    cfg = load([f"recipe={recipe}"]).cfg
    docstrings = [source for source in cfg.data.sources if source.format is RowFormat.docstrings]
    assert bool(docstrings) == (recipe == "quickstart"), "docstrings are the quick start's alone"
    assert cfg.data.sources
    assert cfg.model.init is Init.random or is_hub_name(cfg.model.path)
    told = not recipe.endswith("_adgen")
    assert bool(files.example_data_notice(cfg.data)) == told


def test_example_data_is_found_from_anywhere_and_gives_way_to_a_file_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    sources = load(["recipe=chatglm"]).cfg.data.sources
    assert [source.path for source in sources] == list(files.SHIPPED)
    assert [file for source in sources for file in files_of(source)] == [
        ROOT / "examples" / "data" / Path(path).name for path in files.SHIPPED
    ]
    check_rules(load(["recipe=chatglm", "model=glm_tiny"]), world_size=2)
    own = tmp_path / files.SHIPPED[0]
    own.parent.mkdir(parents=True)
    own.write_text("{}")
    assert files.located(files.SHIPPED[0]) == files.SHIPPED[0]
    assert files.located("chat.jsonl") == "chat.jsonl"


def test_an_installed_package_holds_the_example_data() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    assert '"toolkit._examples" = "examples/data"' in text and '    "toolkit._examples",' in text
    assert '"toolkit._examples" = ["*.jsonl"]' in text and '"toolkit.models" = ["*.yaml", "templates/*.jinja"]' in text


NOTICES = {
    "pretrain_continue": "text",
    "qwen3_dpo": "pairs",
    "qwen3_reward_lora": "pairs",
    "qwen3_classify_lora": "labels",
    "qwen3_embed_lora": "pairs",
    "quickstart": "chat",
}
"""Recipe -> what its notice calls a file of a user's own, as the recipe's head does."""


def test_example_data_is_announced() -> None:
    own = load(["recipe=chatglm", "data.sources=[{path: chat.jsonl}]"]).cfg.data
    assert not files.example_data_notice(own)
    mixed = load(["recipe=chatglm", "data.sources=[{path: chat.jsonl}, {format: docstrings}]"]).cfg.data
    assert "the docstrings of the installed Python" in files.example_data_notice(mixed)
    for recipe, own in {**NOTICES, "zero1": "chat"}.items():
        assert files.example_data_notice(load([f"recipe={recipe}"]).cfg.data).endswith(f" add data={own}.jsonl")


def test_no_recipe_overlaps_reductions() -> None:
    """docs/speed.md says why; a recipe that did would contradict it."""
    for recipe in RECIPES:
        cfg = load([f"recipe={recipe}"]).cfg
        values = build_ds_config(cfg, max(2, model_ranks(cfg)), 100).values
        assert values["zero_optimization"]["overlap_comm"] is False, recipe


def test_a_run_on_example_data_begins_with_saying_so(capsys: pytest.CaptureFixture[str]) -> None:
    ranks = Ranks(rank=0, local_rank=0, world_size=2, local_world_size=2, launcher="deepspeed")
    for words, told in (
        (["recipe=chatglm"], True),
        (["recipe=quickstart"], True),
        (["recipe=zero1", "data=x.jsonl"], False),
    ):
        greet(parse(["model=glm_tiny", *words], world_size=2), ranks, "glm-tiny")
        assert capsys.readouterr().out.startswith("EXAMPLE DATA") == told
