"""The figures on the page of the recipes are the plan's, and its groups are those that are there."""

import json
import re
from pathlib import Path

import pytest
from pages import ROOT, chinese

from toolkit.cli import main as toolkit_main
from toolkit.config.files import known_recipes

PAGE = ROOT / "docs" / "recipes.md"
CARDS = re.findall(r"^\| `\w+` \| `\d+x.*\|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
GIB = 2**30


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card[2:40])
def test_each_card_is_the_plan_s(card: str, tmp_path: Path) -> None:
    recipe, gpus, words, *shown = [cell.strip(" `") for cell in card.strip("|").split("|")]
    file = tmp_path / "plan.json"
    given = [f"recipe={recipe}", f"gpus={gpus}", "host_memory=1TB", f"output={file}", *words.split()]
    assert toolkit_main(["plan", *given]) == 0
    planned = json.loads(file.read_text())
    mine = planned["recipe"]
    worst = [max(sum(kinds.values()) for kinds in mine[name].values()) for name in ("device_bytes", "host_bytes")]
    seconds = "" if mine["offload_param"] == "nvme" else f"{mine['step_s']:.2g}"  # the disk's speed is not known
    assert mine["fits"]
    assert shown == [f"{number / GIB:.3g}" for number in (*worst, planned["checkpoint_bytes"])] + [seconds]


def test_every_recipe_has_a_card_in_both_languages() -> None:
    assert {card.split("`")[1] for card in CARDS} == set(known_recipes())
    text = chinese(PAGE).read_text(encoding="utf-8")
    assert [card for card in CARDS if card not in text] == []


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
