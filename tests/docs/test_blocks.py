"""Blocks of code on the pages: recipes compose, JSON is JSON, Python is Python, and both languages show the same."""

import json
import re
from pathlib import Path

import pytest
from pages import PAIRED, ROOT, Block, blocks, chinese

from tests.programs import missing_imports
from toolkit.config.load import load
from toolkit.config.rules import check_rules

BOTH = [page for pair in PAIRED for page in (pair, chinese(pair))]
PACKAGES = {path.name for path in (ROOT / "toolkit").iterdir() if path.is_dir()}
LANGUAGES = {"bash", "yaml", "json", "python", "text", "none"}
STRUCTURE = {
    "headings": r"^#+ ",
    "rows of tables": r"^\| ",
    "blocks": r"^```\w*$",
    "items": r"^- \*\*",
    "lists": r"^- ",
    "numbered": r"^\d+\. ",
    "code": r"`engine/[a-z_]+\.py`",
}


def shown(*languages: str) -> list[Block]:
    """Return the blocks of all pages in some languages."""
    return [block for page in BOTH for block in blocks(page, *languages)]


@pytest.mark.parametrize("page", PAIRED, ids=lambda page: page.name)
def test_both_languages_have_the_same_structure(page: Path) -> None:
    english, other = (one.read_text(encoding="utf-8") for one in (page, chinese(page)))
    for what, pattern in STRUCTURE.items():
        count = [len(re.findall(pattern, text, re.MULTILINE)) for text in (english, other)]
        assert count[0] == count[1], what
    levels = [[len(mark) for mark in re.findall(r"^(#+) ", text, re.MULTILINE)] for text in (english, other)]
    assert levels[0] == levels[1]
    assert [one.language for one in blocks(page)] == [one.language for one in blocks(chinese(page))]
    name = page.stem
    assert f"[中文]({name}_zh.md)" in english and f"[English]({name}.md)" in other


def test_each_block_says_its_language() -> None:
    for page in BOTH:
        text = page.read_text(encoding="utf-8")
        assert len(re.findall(r"^```", text, re.MULTILINE)) == 2 * len(blocks(page)), page.name
        assert {block.language for block in blocks(page)} <= LANGUAGES, page.name


@pytest.mark.parametrize("block", shown("yaml"), ids=str)
def test_each_recipe_composes(block: Block, tmp_path: Path) -> None:
    """A section of a recipe is a recipe, too; what it builds on is a recipe that says nothing."""
    file = tmp_path / "shown.yaml"
    file.write_text(block.body, encoding="utf-8")
    check_rules(load([f"recipe={file}"]), files=False)


def test_each_json_is_json() -> None:
    for block in shown("json"):
        assert is_json(block.body) or all(map(is_json, block.body.splitlines())), block


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def test_each_python_is_python() -> None:
    for block in shown("python"):
        assert not missing_imports(block.body, str(block)), block


def test_each_source_file_that_is_named_exists() -> None:
    for page in BOTH:
        for name in re.findall(r"`((?:[a-z_]+/)+[a-z0-9_.]*/?)`", page.read_text(encoding="utf-8")):
            top, is_python = name.split("/")[0], name.endswith(".py")
            if top in ("benchmarks", "conf", "recipes", "scripts", "tests") or (is_python and top in PACKAGES):
                assert (ROOT / "toolkit" / name).exists() or (ROOT / name).exists(), f"{page.name}: {name}"
