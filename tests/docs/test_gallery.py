"""The gallery shows what was recorded: its commands, its losses and its answers."""

import json
import re
import shlex
from pathlib import Path

import pytest
from page_tables import newest
from pages import ROOT, chinese, commands

PAGE = ROOT / "docs" / "gallery.md"
RUNS = json.loads(newest("gallery").read_text(encoding="utf-8"))["runs"]
NOT_TYPED = "unsigned"
"""The run of DPO alone: the page shows its answers beside those of the command."""


def words(command: str) -> set[str]:
    """Return a command's words without the questions that were asked during the run."""
    return {word for word in shlex.split(command) if not word.startswith("evaluate.prompts") and "?" not in word}


@pytest.mark.parametrize("page", [PAGE, chinese(PAGE)], ids=lambda page: page.name)
def test_the_page_shows_what_was_recorded(page: Path) -> None:
    text, typed = page.read_text(encoding="utf-8"), [words(line) for _, line in commands(page) if "run.name" in line]
    assert [name for name, run in RUNS.items() if name != NOT_TYPED and words(run["command"]) not in typed] == []
    assert len(typed) == len(RUNS) - 1
    shown = {
        "loss": [number for run in RUNS.values() for number in re.findall(r"[\d.]+(?= nats)", run["result"])],
        "answers": [one["answer"] for name in ("library", "library_full", "unsigned") for one in RUNS[name]["answers"]],
    }
    assert {
        kind: missing for kind, wanted in shown.items() if (missing := [one for one in wanted if one not in text])
    } == {}
