"""docs/config.md is what the schema says."""

from pathlib import Path

from toolkit.config.keys import all_keys, field_type
from toolkit.config.reference import render

PAGE = Path(__file__).parents[2] / "docs" / "config.md"


def test_the_page_is_fresh() -> None:
    assert PAGE.read_text(encoding="utf-8") == render(), "run scripts/generate_config_docs.py"


def test_every_key_is_on_it() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for key in all_keys():
        if not hasattr(field_type(key), "__dataclass_fields__"):
            assert f"| `{key}` |" in page, key
