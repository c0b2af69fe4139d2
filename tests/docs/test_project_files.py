"""The files that GitHub reads: issue forms, the pull request form, the citation, and the version in each."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from pages import ROOT

import toolkit

FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("[0-9]*.yml"))
KINDS = {"markdown", "textarea", "input", "dropdown"}


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_an_issue_form_is_one_by_the_syntax(path: Path) -> None:
    form: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert {"name", "description", "labels", "body"} == set(form)
    fields = [item for item in form["body"] if item["type"] != "markdown"]
    assert {item["type"] for item in form["body"]} <= KINDS and fields
    assert len({item["id"] for item in fields}) == len(fields)
    for item in fields:
        assert " / " in item["attributes"]["label"], "both languages"
        assert set(item) <= {"type", "id", "attributes", "validations"}
        assert all(isinstance(option, str) for option in item["attributes"].get("options", ()))


def test_who_reports_a_failure_attaches_what_the_toolkit_collects() -> None:
    asking = {path.stem: "toolkit doctor --report" in path.read_text(encoding="utf-8") for path in FORMS}
    others = {"4-feature": False, "5-install": False, "6-question": True}
    assert asking == {"1-bug": True, "2-wrong-number": True, "3-model": True} | others


def test_the_pull_request_form_asks_in_both_languages_for_what_contributing_asks() -> None:
    text = (ROOT / ".github" / "PULL_REQUEST_TEMPLATE.md").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line.startswith(("## ", "- [ ] "))]
    assert len(lines) >= 5 and all(" / " in line for line in lines)
    for name in ("CONTRIBUTING.md", "CONTRIBUTING_zh.md"):
        assert name in text and "scripts/test ranks" in (ROOT / name).read_text(encoding="utf-8")


def test_the_citation_is_of_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == toolkit.__version__ and citation["license"] == "Apache-2.0"
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
