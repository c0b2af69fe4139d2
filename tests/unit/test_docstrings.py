"""Pairs from docstrings: made by parsing only, in a fixed order, one per object."""

import json
import sys
import textwrap
from pathlib import Path

import pytest

from toolkit.config.schema import DataConfig, RowFormat, SourceConfig
from toolkit.data.sources import derive_pairs, pairs_file, read_conversations

MODULE = '''
"""Tools for doing things in the right order.

A second paragraph."""
raise SystemExit("executed")

class Box:
    """box(size) -> Box

    A container that holds
    one thing at a time."""
    def take(self, what: int = 3, *, gently=True) -> None:
        """Take the thing out of the box."""
    def _hidden(self):
        """Never shown to anybody outside."""
    def also(self):
        """Take the thing out of the box."""

def short():
    """Too short."""

def shown(a, b=(1, 2)):
    """Return a text that is long enough.

    >>> shown(1)"""
'''


@pytest.fixture
def library(tmp_path: Path) -> Path:
    folder = tmp_path / "library"
    for name in ("tools.py", "test/tools.py", "site-packages/tools2.py", "pack/__init__.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(
            textwrap.dedent(MODULE if name == "tools.py" else '"""Says what the pack is for."""')
        )
    (folder / "broken.py").write_text("def (")
    (folder / "latin.py").write_bytes(b'"""caf\xe9"""')
    return folder


def test_pairs_by_hand(library: Path) -> None:
    answers = {answer for _, answer in derive_pairs(library)}
    questions = [question for question, _ in derive_pairs(library)]
    names = ["pack", "tools", "tools.Box", "tools.Box.take", "tools.shown"]
    assert len(questions) == len(names)
    for question, name in zip(questions, names, strict=True):
        assert name in question
    assert "Says what the pack is for." in answers
    assert "A container that holds one thing at a time." in answers
    assert answers & {
        "Take the thing out of the box.",
        "tools.Box.take(what=3, *, gently=True): Take the thing out of the box.",
    }
    assert list(derive_pairs(library)) == list(derive_pairs(library))


def test_pairs_of_the_running_python(tmp_path: Path, said: list[str]) -> None:
    modules = set(sys.modules)
    path = pairs_file(tmp_path)
    assert not {"antigravity", "this"} & (set(sys.modules) - modules)
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert len(rows) > 2000
    assert len({row["prompt"] for row in rows}) == len({row["response"] for row in rows}) == len(rows)
    assert all(len(row["response"]) < 1000 for row in rows)
    written = path.stat().st_mtime_ns
    assert pairs_file(tmp_path) == path
    assert path.stat().st_mtime_ns == written

    data = DataConfig(sources=[SourceConfig(format=RowFormat.docstrings)])
    read = list(read_conversations(data, tmp_path))
    assert [row.messages[0]["content"] for row in read] == [row["prompt"] for row in rows]
    assert said == []
