"""The reading paths of docs/architecture.md: each file, function and call that they name is in the code."""

import ast
import re

import pytest
from pages import ROOT, chinese

from tests.test_layers import imports
from toolkit.cli import module_of

PAGE = ROOT / "docs" / "architecture.md"
ROW = re.compile(r"^\| (\d+) \| `([\w/]+\.py)` \| `([\w.]+)` \| ?(\d*) \|", re.MULTILINE)
CALLS_BY_INTERFACE = {
    ("cli/__init__.py", "cli/train.py"): "import_module(module_of(command))",
    ("data/tokenize_workers.py", "models/chat_template.py"): "self.encoder.encode_many(",
    ("train/trainer.py", "tasks/language.py"): "task.export(run, result)",
}
"""Calls without an import: caller and called file -> what the caller's text has in its place."""
MOST_ROWS = [10, 15, 10]
"""Files of each path: a change that lengthens one says what it buys."""


def paths(text: str) -> list[list[tuple[str, ...]]]:
    """Return the rows of each table: number, file, function, number of the caller's row."""
    rows = ROW.findall(text)
    starts = [index for index, row in enumerate(rows) if row[0] == "1"]
    return [rows[start:end] for start, end in zip(starts, [*starts[1:], len(rows)], strict=True)]


PATHS = paths(PAGE.read_text(encoding="utf-8"))


def definitions(file: str) -> set[str]:
    """Return the names of a module's functions, classes and methods, `Class.method`."""
    names = set[str]()
    for node in ast.parse((ROOT / "toolkit" / file).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)}
    return names


def test_three_paths_are_in_both_languages() -> None:
    assert [len(rows) for rows in PATHS] == MOST_ROWS
    assert paths(chinese(PAGE).read_text(encoding="utf-8")) == PATHS
    for rows in PATHS:
        assert [int(number) for number, *_ in rows] == list(range(1, len(rows) + 1))
        assert len({file for _, file, *_ in rows}) == len(rows), "a file is read once"


@pytest.mark.parametrize("rows", PATHS, ids=lambda rows: rows[-1][1])
def test_a_path_is_what_the_code_does(rows: list[tuple[str, ...]]) -> None:
    for number, file, function, caller_number in rows:
        assert function in definitions(file), f"{file} has no {function}"
        if not caller_number:
            continue
        assert int(caller_number) < int(number), "callers come first"
        caller = rows[int(caller_number) - 1][1]
        text = (ROOT / "toolkit" / caller).read_text(encoding="utf-8")
        if word := CALLS_BY_INTERFACE.get((caller, file)):
            assert word in text, f"{caller}: {word}"
            continue
        module = f"toolkit.{file.removesuffix('.py').replace('/', '.')}"
        imported = {*imports(ROOT / "toolkit" / caller)}
        assert module in imported, f"{caller} does not import {module}"
        outer, _, method = function.partition(".")
        assert re.search(rf"\b({outer}|{method or outer})\b", text), f"{caller} does not name {function}"


def test_calls_by_interface_reach_their_files() -> None:
    assert module_of("train") == "toolkit.cli.train"
    assert {file for pair in CALLS_BY_INTERFACE for file in pair} <= {file for rows in PATHS for _, file, *_ in rows}
