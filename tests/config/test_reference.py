"""docs/config.md and config_zh.md are what the schema says."""

from pathlib import Path

import pytest
from config_reference import render, sentences

from toolkit.config.schema import all_keys
from toolkit.config.validate import field_type
from toolkit.messages import chinese

CHINESE = chinese()["sentences"]
DOCS = Path(__file__).parents[2] / "docs"
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
