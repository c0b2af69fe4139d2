"""docs/config.md, config_zh.md and the JSON schema of recipes are what the schema says."""

import json
from pathlib import Path

import jsonschema
import pytest
import yaml
from config_reference import render, sentences
from recipe_schema import recipe_schema

from toolkit.config.dotted_keys import all_keys
from toolkit.config.files import Loader
from toolkit.config.validate import field_type
from toolkit.messages import chinese

CHINESE = chinese()["sentences"]
DOCS = Path(__file__).parents[2] / "docs"
RECIPES = DOCS.parent / "recipes"
PAGES = [DOCS / "config.md", DOCS / "config_zh.md"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_page_is_fresh(page: Path) -> None:
    assert page.read_text(encoding="utf-8") == render(chinese=page == PAGES[1]), "run scripts/generate_config_docs.py"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_key_is_on_it(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for key in all_keys():
        if not hasattr(field_type(key), "__dataclass_fields__"):
            assert f"| `{key}` |" in text, key


def test_every_sentence_has_its_chinese_and_there_are_no_others() -> None:
    assert sentences() - set(CHINESE) == set(), "without Chinese"
    assert set(CHINESE) - sentences() == set(), "no longer used"
    assert all(any("\u4e00" <= letter <= "\u9fff" for letter in text) for text in CHINESE.values())


def test_the_json_schema_of_recipes_is_fresh() -> None:
    written = (RECIPES / "recipe.schema.json").read_text(encoding="utf-8")
    assert written == recipe_schema(), "run scripts/generate_config_docs.py"


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_editors_find_nothing_wrong_with_our_recipes(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.splitlines()[1] == "# yaml-language-server: $schema=recipe.schema.json"
    jsonschema.validate(yaml.load(text, Loader), json.loads(recipe_schema()))


@pytest.mark.parametrize(
    ("content", "is_right"),
    [
        ("defaults: [chatglm, {override /zero: 3}, _self_]\ndata: chat.jsonl\nzero: 2", True),
        ("data: {sources: [a.jsonl, {path: b, weight: 2}]}\nevaluate: {every: '${checkpoint.every}'}", True),
        ("batch: {micro_per_gpu: auto}\noptim: {torch: auto, betas: [0.9, 0.99]}\nds_extra: {a: {b: 1}}", True),
        ("data: {sources: {path: a}, validation: 500}\ntrain: {epochs: 2.5}", True),
        ("data: {sources: [{path: a, max_samples: 9}], validation: 5%}", True),
        ("data: {validation: -1}", False),
        ("zero: {stag: 3}", False),
        ("optim: {lr: 0}", False),
        ("train: {epochs: 0}", False),
        ("precision: {dtype: bf61}", False),
        ("data: {sources: [{pth: a}]}", False),
    ],
)
def test_editors_see_mistakes_as_they_are_typed(content: str, is_right: bool) -> None:
    checker = jsonschema.Draft7Validator(json.loads(recipe_schema()))
    assert checker.is_valid(yaml.load(content, Loader)) == is_right
