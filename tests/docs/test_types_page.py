"""docs/model_types.md is what the newest run over all types gave, of every type that transformers calls causal."""

from pathlib import Path

import pytest
from record_types import merged
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


def test_each_row_says_at_which_commit_it_was_run() -> None:
    result = newest()
    named = [kind for run in result["runs"] for kind in run["types"]]
    assert sorted(named) == sorted(result["types"])
    assert all(run["commit"] and run["started"] and run["transformers"] for run in result["runs"])


def test_types_that_are_run_again_replace_their_rows_alone() -> None:
    def result(commit: str, transformers: str = "5.1", **rows: str) -> dict:
        packages = {"torch": "1", "transformers": transformers}
        return {"types": rows, "environment": {"packages": packages, "commit": commit, "started": f"at {commit}"}}

    first = merged(None, result("A", bloom="old", opt="old", xglm="old"))
    second = merged(merged(first, result("B", opt="new")), result("B", xglm="new"))
    assert second["types"] == {"bloom": "old", "opt": "new", "xglm": "new"}
    assert second["runs"] == [
        {"commit": "A", "transformers": "5.1", "started": "at A", "types": ["bloom"]},
        {"commit": "B", "transformers": "5.1", "started": "at B", "types": ["opt", "xglm"]},
    ]
    newer = merged(second, result("B", "5.2", bloom="new"))
    assert newer["runs"][1:] == [{"commit": "B", "transformers": "5.2", "started": "at B", "types": ["bloom"]}]
    other = result("C", opt="newer")
    other["environment"]["packages"]["torch"] = "2"
    with pytest.raises(SystemExit, match="Write a new one, of all types"):
        merged(second, other)


def test_nothing_fails() -> None:
    """What cannot work is rejected with a reason."""
    for kind, row in newest()["types"].items():
        if "not built" not in row:
            assert set(row) == set(WAYS), kind
            for way, cell in row.items():
                assert cell["state"] in ("ok", "grouped", "refused", "accepted"), (kind, way, cell)
                assert cell["state"] not in ("refused", "grouped") or cell["reason"], (kind, way)
