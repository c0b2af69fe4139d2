"""Pairs from docstrings: made by parsing only, in a fixed order, six questions per object."""

import json
import sys
import textwrap
from pathlib import Path

import pytest

from toolkit.config.load import load
from toolkit.config.schema import DataConfig, RowFormat, SourceConfig
from toolkit.data.docstrings import derive_pairs, pairs_file
from toolkit.data.sources import read_conversations

MODULE = '''
"""JSON in a few words. A second sentence.

A second paragraph."""
raise SystemExit("executed")

class Box:
    """box(size) -> Box

    A container that holds
    one ``thing`` at a time."""
    def take(self, what: int = 3, *, gently=True) -> None:
        """Take the thing out of the box (e.g. a hat). Put it back later."""
    def _hidden(self):
        """Never shown to anybody outside."""
    def zero(self):
        """Take the thing out of the box (e.g. a hat)."""

def short():
    """Too short."""

def long():
    """A sentence that goes through all that it could say of its function and so is longer than a small model learns."""

def open_end():
    """Return a text that is long enough but has no end"""
'''


@pytest.fixture
def library(tmp_path: Path) -> Path:
    folder = tmp_path / "library"
    for name in ("json/__init__.py", "json/_c.py", "json/test/tools.py", "unknown.py", "posixpath.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(
            textwrap.dedent(MODULE if name.startswith("json/__") else f'"""Says what {name} is for."""')
        )
    (folder / "csv.py").write_text("def (")
    (folder / "copy.py").write_bytes(b'"""A word such as caf\xe9."""')
    return folder


def test_pairs_by_hand(library: Path) -> None:
    pairs = list(derive_pairs(library))
    answers = {
        "json": "JSON in a few words.",
        "json.Box": "A container that holds one `thing` at a time.",
        "json.Box.take": "Take the thing out of the box (e.g. a hat).",
        "os.path": "Says what posixpath.py is for.",
    }
    asked = [(name, answer) for name, answer in answers.items() for _ in range(6)]
    assert [answer for _, answer in pairs] == [answer for _, answer in asked]
    assert all(name in question for (question, _), (name, _) in zip(pairs, asked, strict=True))
    assert len({question for question, _ in pairs}) == len(pairs)


def test_pairs_of_the_running_python(tmp_path: Path, said: list[str]) -> None:
    modules = set(sys.modules)
    path = pairs_file(tmp_path)
    assert not {"antigravity", "this"} & (set(sys.modules) - modules)
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert len(rows) > 1000
    assert len({row["prompt"] for row in rows}) == 6 * len({row["response"] for row in rows}) == len(rows)
    assert all(len(row["response"]) <= 90 for row in rows)
    asked = load(["recipe=quickstart"]).cfg.evaluate.prompts
    assert len({row["response"] for row in rows if row["prompt"] in asked}) == len(asked) == 2
    written = path.stat().st_mtime_ns
    assert pairs_file(tmp_path) == path
    assert path.stat().st_mtime_ns == written

    data = DataConfig(sources=[SourceConfig(format=RowFormat.docstrings)])
    read = list(read_conversations(data, tmp_path))
    assert [row.messages[0]["content"] for row in read] == [row["prompt"] for row in rows]
    assert said == []
