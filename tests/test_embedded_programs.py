"""Programs that tests run in processes of their own, written as texts: no linter sees that a name in one has gone."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def programs(file: Path) -> dict[str, str]:
    """Return the texts of a test file, by name, that are Python programs which import something of the package."""
    texts = {}
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            [target] = node.targets
            if isinstance(target, ast.Name) and "import toolkit" in node.value.value.replace(
                "from toolkit", "import toolkit"
            ):
                texts[target.id] = node.value.value
    return texts


PROGRAMS = {
    f"{file.relative_to(ROOT)}::{name}": text
    for file in sorted((ROOT / "tests").rglob("*.py"))
    if file != Path(__file__)
    for name, text in programs(file).items()
}


def imported(tree: ast.Module) -> list[tuple[str, str]]:
    """Return (module, name in it or "") of each import of the package."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(name.name, "") for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [(node.module or "", name.name) for name in node.names]
    return [pair for pair in found if pair[0].partition(".")[0] == "toolkit"]


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_a_program_imports_and_names_exists(name: str) -> None:
    for module, attribute in imported(ast.parse(PROGRAMS[name])):
        loaded = importlib.import_module(module)
        if attribute and not hasattr(loaded, attribute):
            importlib.import_module(f"{module}.{attribute}")
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select=F821", "--quiet", "-"]
    checked = subprocess.run(command, input=PROGRAMS[name], capture_output=True, text=True, timeout=60)
    assert checked.returncode == 0, checked.stdout + checked.stderr
