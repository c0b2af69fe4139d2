"""The page on families is the script's, has every published model once, and its figures are the plan's."""

import json
import re

import pytest
from page_tables import newest
from pages import ROOT

from scripts import families_page

FIGURES = json.loads(newest("families").read_text(encoding="utf-8"))["models"]
PLANNED_FROM_SHAPES = ("qwen3_0_6b", "chatglm3_6b")
"""Planned in seconds; all others are compared nightly."""


def test_the_pages_are_the_script_s() -> None:
    for language, name in (("en", "families.md"), ("zh", "families_zh.md")):
        page = (ROOT / "docs" / name).read_text(encoding="utf-8")
        assert families_page.filled(page, language) == page, "run scripts/families_page.py"


def test_every_published_model_is_in_one_family() -> None:
    families = [family["models"] for family in families_page.FAMILIES.values()]
    counts = {name: sum(bool(re.match(one, name)) for one in families) for name in families_page.models()}
    assert {name: count for name, count in counts.items() if count != 1} == {}
    assert set(FIGURES) == set(families_page.models())


@pytest.mark.parametrize(
    "name",
    [name if name in PLANNED_FROM_SHAPES else pytest.param(name, marks=pytest.mark.nightly) for name in FIGURES],
)
def test_the_figures_are_the_plan_s(name: str) -> None:
    assert families_page.plan(name) == FIGURES[name], "run scripts/families_page.py plan"
