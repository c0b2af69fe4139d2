"""The table of combinations in docs/parallelism.md is what the nightly test found, of the configs that are accepted."""

from pathlib import Path

import pytest
from combinations import cells
from layout_tables import fill_page, newest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("page", "language"), [("parallelism.md", "en"), ("parallelism_zh.md", "zh")])
def test_the_table_is_fresh(page: str, language: str) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    assert "\n| `parallel.tensor=2` | 0-3 | " in text
    assert fill_page(text, language, newest()) == text, "run scripts/layout_tables.py"


def test_what_is_accepted_was_run() -> None:
    assert set(newest()) == {cell.name for cell in cells() if not cell.refusals()}, (
        "run scripts/test --tier=all tests/ranks/test_combinations.py --record-combinations FILE"
    )
    assert max(newest().values()) < 5e-6
