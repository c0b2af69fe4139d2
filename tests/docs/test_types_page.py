"""docs/model_types.md is what the newest run over all types gave, of every type that transformers calls causal."""

from pathlib import Path

import pytest
from types_page import WAYS, fill_page, newest

from tests.model_types import KINDS

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("page", "language"), [("model_types.md", "en"), ("model_types_zh.md", "zh")])
def test_the_table_is_fresh(page: str, language: str) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    assert "| `llama` | " in text
    assert fill_page(text, language, newest()) == text, "run scripts/types_page.py"


def test_each_type_has_a_row() -> None:
    rows = newest()["types"]
    missing = sorted(set(KINDS) - set(rows))
    assert not missing, f"python scripts/record_types.py benchmarks/DATE-types.json 2 {' '.join(missing)}"


def test_nothing_fails() -> None:
    """What cannot work is rejected with a reason."""
    for kind, row in newest()["types"].items():
        if "not built" not in row:
            assert set(row) == set(WAYS), kind
            for way, cell in row.items():
                assert cell["state"] in ("ok", "grouped", "refused", "accepted"), (kind, way, cell)
                assert cell["state"] not in ("refused", "grouped") or cell["reason"], (kind, way)
