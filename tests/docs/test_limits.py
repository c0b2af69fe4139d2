"""docs/limits.md names whatever docs/status.md says has not really run, and is one link from the first pages."""

import re

import pytest
from pages import ROOT
from status_page import features

PAGES = {
    "docs/limits.md": ("README.md", "docs/index.md", "CHANGELOG.md"),
    "docs/limits_zh.md": ("README_zh.md", "docs/index_zh.md", "CHANGELOG_zh.md"),
}


@pytest.mark.parametrize(("page", "column"), [("docs/limits.md", 0), ("docs/limits_zh.md", 1)])
def test_what_has_not_run_is_named(page: str, column: int) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    never = [
        feature["name"][column]
        for feature in features()
        if feature.get("how") in ("config", "stand-in") or not feature.get("tests")
    ]
    assert len(never) >= 10
    names = [
        part
        for name in never
        for part in re.split(", |、", name.removesuffix("'s Modelfile").removesuffix(" 的 Modelfile"))
    ]
    assert [name for name in names if name not in text] == []


@pytest.mark.parametrize("tail", ["", "_zh"])
def test_what_has_not_run_on_a_gpu_is_counted(tail: str) -> None:
    """As docs/status.md counts it; the changelog has the others."""
    status = (ROOT / "docs" / "status.md").read_text(encoding="utf-8")
    [(run, features_there)] = re.findall(r"^(\d+) of (\d+) features have been measured on a GPU", status, re.MULTILINE)
    limits, changelog = (ROOT / "docs" / f"limits{tail}.md", ROOT / f"CHANGELOG{tail}.md")
    [row] = [line for line in limits.read_text(encoding="utf-8").splitlines() if "QLoRA" in line]
    assert {str(int(features_there) - int(run)), features_there} <= set(re.findall(r"\d+", row))
    [item] = [line for line in changelog.read_text(encoding="utf-8").splitlines() if line.startswith("- **GPU")]
    assert {run, features_there} <= set(re.findall(r"\d+", item))


@pytest.mark.parametrize("page", PAGES)
def test_the_first_pages_link_it(page: str) -> None:
    for first in PAGES[page]:
        text = (ROOT / first).read_text(encoding="utf-8")
        assert page.rpartition("/")[2] in text, first
    readme = (ROOT / PAGES[page][0]).read_text(encoding="utf-8")
    assert page in readme.partition("```")[0], "before the first command"
