"""Programs that tests run in processes of their own, written as texts: no linter sees that a name in one has gone."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.programs import missing_imports

TESTS = Path(__file__).parent


def programs(file: Path) -> dict[str, str]:
    """Return the texts of a test file, by name, that are Python programs which import something of the package."""
    texts = {}
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            [target] = node.targets
            if isinstance(target, ast.Name) and re.search(r"^\s*(from|import) toolkit", node.value.value, re.MULTILINE):
                texts[f"{file.relative_to(TESTS)}::{target.id}"] = node.value.value
    return texts


PROGRAMS = {name: text for file in sorted(TESTS.rglob("*.py")) for name, text in programs(file).items()}


def test_there_are_such_programs() -> None:
    assert len(PROGRAMS) >= 18


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_a_program_imports_and_names_exists(name: str) -> None:
    assert not missing_imports(PROGRAMS[name], name)
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select=F821", "--quiet", "-"]
    checked = subprocess.run(command, input=PROGRAMS[name], capture_output=True, text=True, timeout=60)
    assert checked.returncode == 0, checked.stdout + checked.stderr
