"""The reading paths of docs/architecture.md: each file, function and call that they name is in the code."""

import ast
import re

import pytest
from pages import ROOT, chinese

from tests.test_layers import imports
from toolkit.cli import COMMANDS

PAGE = ROOT / "docs" / "architecture.md"
ROW = re.compile(r"^\| (\d+) \| `([\w/]+\.py)` \| ((?:`[\w.]+`(?:, )?)+) \| ?(\d*) \|", re.MULTILINE)
BY_INTERFACE = {
    ("cli/__init__.py", "cli/train.py"),  # import_module(COMMANDS[command])
    ("data/tokenize_workers.py", "models/chat_template.py"),  # a ChatEncoder of toolkit/sample_types.py
    ("train/loop.py", "tasks/language.py"),  # a Task of train/task.py
    ("train/step.py", "tasks/language.py"),
    ("train/trainer.py", "tasks/language.py"),
}
"""Calls without an import: caller's file, called file."""
SIZES = [(10, 0), (19, 4), (9, 2), (11, 0)]
"""Files of each path, and how often it comes back to one: a change that lengthens one says what it buys."""
Row = tuple[int, str, tuple[str, ...], int]
"""Number, file, its functions, number of the caller's row or 0."""


def paths(text: str) -> list[list[Row]]:
    """Return the rows of each table."""
    rows = [
        (int(number), file, tuple(re.findall(r"[\w.]+", functions)), int(caller or 0))
        for number, file, functions, caller in ROW.findall(text)
    ]
    starts = [index for index, row in enumerate(rows) if row[0] == 1]
    return [rows[start:end] for start, end in zip(starts, [*starts[1:], len(rows)], strict=True)]


PATHS = paths(PAGE.read_text(encoding="utf-8"))


def definitions(file: str) -> dict[str, ast.AST]:
    """Return a module's functions, classes and methods by name, `Class.method`."""
    nodes = dict[str, ast.AST]()
    for node in ast.parse((ROOT / "toolkit" / file).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            nodes[node.name] = node
        if isinstance(node, ast.ClassDef):
            nodes |= {f"{node.name}.{inner.name}": inner for inner in node.body if isinstance(inner, ast.FunctionDef)}
    return nodes


def called_in(function: ast.AST) -> set[str]:
    """Return the names of the functions, methods and classes that a function calls, or hands to what it calls."""
    names = set[str]()
    for call in ast.walk(function):
        if isinstance(call, ast.Call):
            for node in (call.func, *call.args, *(keyword.value for keyword in call.keywords)):
                names |= {node.id} if isinstance(node, ast.Name) else set()
                names |= {node.attr} if isinstance(node, ast.Attribute) else set()
    return names


def calls(caller_file: str, callers: tuple[str, ...], called: str) -> bool:
    """Whether one of some functions of a file calls a function or a method, by its last name."""
    nodes = definitions(caller_file)
    return any(called.rpartition(".")[2] in called_in(nodes[caller]) for caller in callers)


def test_the_paths_are_in_both_languages() -> None:
    assert paths(chinese(PAGE).read_text(encoding="utf-8")) == PATHS
    sizes = []
    for rows in PATHS:
        assert [number for number, *_ in rows] == list(range(1, len(rows) + 1))
        files = {file for _, file, *_ in rows}
        sizes.append((len(files), len(rows) - len(files)))
    assert sizes == SIZES


@pytest.mark.parametrize("rows", PATHS, ids=lambda rows: rows[-1][1])
def test_a_path_is_what_the_code_does(rows: list[Row]) -> None:
    for number, file, functions, caller_number in rows:
        assert set(functions) <= set(definitions(file)), f"{file} has not all of {functions}"
        for index, function in enumerate(functions[1:], start=1):
            assert calls(file, functions[:index], function), f"{file}: no function before {function} calls it"
        if not caller_number:
            continue
        assert caller_number < number, "callers come first"
        _, caller, callers, _ = rows[caller_number - 1]
        assert calls(caller, callers, functions[0]), f"{caller}: none of {callers} calls {functions[0]}"
        module = f"toolkit.{file.removesuffix('.py').replace('/', '.')}"
        is_imported = module in {*imports(ROOT / "toolkit" / caller)}
        assert is_imported != ((caller, file) in BY_INTERFACE), f"{caller} and {module}"


def test_rows_without_a_caller_begin_a_part_that_the_trainer_calls() -> None:
    first_functions = {
        functions[0] for rows in PATHS for number, _, functions, caller in rows if not caller and number > 1
    }
    assert first_functions == {"TrainLoop.begin_at", "TrainLoop.train"}
    trainer = definitions("train/trainer.py")
    assert {"TrainLoop", "train"} <= called_in(trainer["Trainer.fit"])
    assert "begin_at" in called_in(definitions("train/loop.py")["TrainLoop.__init__"])
    assert "load_data" in called_in(trainer["Trainer.in_process_group"])


def test_calls_by_interface_reach_their_files() -> None:
    assert COMMANDS["train"] == "toolkit.cli.train"
    assert {file for pair in BY_INTERFACE for file in pair} <= {file for rows in PATHS for _, file, *_ in rows}


def test_a_call_that_is_not_there_is_noticed() -> None:
    assert not calls("train/trainer.py", ("Trainer.train",), "initialize_engine")
    assert calls("train/trainer.py", ("Trainer._build_engine",), "initialize_engine")
