"""The figures on the page of the recipes and in their heads are the plan's, its groups are those that are there."""

import re
from functools import lru_cache
from pathlib import Path

import pytest
from pages import ROOT, chinese

from scripts import record_plans
from toolkit.config.files import known_recipes

PAGE = ROOT / "docs" / "recipes.md"
ROWS = record_plans.rows()
CARDS = [row for row in ROWS if "`model=" not in row]
MODELS = [row for row in ROWS if "`model=" in row]
"""Of the recipe lora. Most are measured first, which takes tens of seconds, so their figures are compared nightly."""


@lru_cache
def planned(row: str) -> record_plans.Card:
    return record_plans.plan(*record_plans.chosen(row))


@pytest.mark.parametrize(
    "card", [*CARDS, *(pytest.param(row, marks=pytest.mark.nightly) for row in MODELS)], ids=lambda card: card[2:40]
)
def test_each_card_is_the_plan_s(card: str) -> None:
    assert card == planned(card).row(), "run scripts/record_plans.py"


@pytest.mark.parametrize("recipe", sorted(known_recipes()))
def test_the_head_of_each_recipe_names_the_plan_s_figures(recipe: str) -> None:
    cards = [planned(row) for row in CARDS if record_plans.chosen(row)[0] == recipe]
    text = known_recipes()[recipe].read_text(encoding="utf-8")
    assert cards and "# Hardware" in text
    assert record_plans.head(text, cards) == text, "run scripts/record_plans.py"
    shown = [f"{line}\n" for line in text.splitlines() if line.startswith("#") and "GiB" in line]
    assert shown == [card.line() for card in cards], "figures of memory are the plan's only"


def test_every_recipe_has_a_card_in_both_languages() -> None:
    assert {card.split("`")[1] for card in CARDS} == set(known_recipes())
    text = chinese(PAGE).read_text(encoding="utf-8")
    assert [row for row in ROWS if row not in text] == []


def test_every_published_model_has_a_recipe_or_a_card() -> None:
    """Once: those that recipes choose have these recipes' cards."""
    chosen = {name for name in known_recipes() for name in re.findall(r"override /model: (\w+)", _text_of(name))}
    published = {path.stem for path in (ROOT / "conf" / "model").glob("*.yaml") if "published:" in path.read_text()}
    assert sorted(row.split("`")[1].removeprefix("model=") for row in MODELS) == sorted(published - chosen)


def _text_of(recipe: str) -> str:
    return known_recipes()[recipe].read_text(encoding="utf-8")


def test_the_groups_are_those_of_conf() -> None:
    for page in (PAGE, chinese(PAGE)):
        shown = {group: set(re.findall(r"`(\w+)`", line)) for group, line in groups(page)}
        assert shown == {
            folder.name: {path.stem for path in folder.glob("*.yaml")}
            for folder in (ROOT / "conf").iterdir()
            if folder.is_dir()
        }


def groups(page: Path) -> list[tuple[str, str]]:
    """Return the rows of the table of groups."""
    table = re.search(r"^\| (?:group|组) \|.*?\n\n", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert table
    return re.findall(r"^\| `(\w+)` \| (.*) \|$", table[0], re.MULTILINE)
