#!/usr/bin/env python3
"""Print what the lines of `toolkit/` are, by package: the table of docs/architecture.md, rounded to hundreds."""

import argparse
import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "toolkit"
KINDS = ("code", "messages", "docstrings", "imports", "comments", "blank")
SMALL = 2000
SAYING = {"tr", "say", "warn", "error", "fill", "about", "Diverged", "Stopped", "RunFailed"}
"""Functions and errors that a sentence for users is handed to; so is every name that ends with Error."""


def kinds_of(node: ast.AST) -> Iterator[str]:
    """Yield what a node is, if it is no code like any other."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        yield "docstrings"
    elif isinstance(node, ast.Import | ast.ImportFrom):
        yield "imports"
    elif isinstance(node, ast.Call):
        name = getattr(node.func, "id", getattr(node.func, "attr", ""))
        if name in SAYING or name.endswith("Error"):
            yield "messages"


def count(path: Path) -> Counter[str]:
    """Return how many lines of a file are of each kind, and 1 of kind `files` if it has any."""
    text = path.read_text(encoding="utf-8")
    lines = [line.strip() for line in text.splitlines()]
    kinds = ["code" if line and line[0] != "#" else "comments" if line else "blank" for line in lines]
    for node in ast.walk(ast.parse(text)):
        for kind in kinds_of(node):
            first, last = node.lineno - 1, node.end_lineno  # type: ignore[attr-defined]
            kinds[first:last] = [kind] * (last - first)
    return Counter(kinds) + Counter(files=int(bool(lines)))


def lines_of(counts: Counter[str]) -> int:
    """Return the sum of all kinds of lines."""
    return sum(counts[kind] for kind in KINDS)


def main() -> None:
    """Print a row for each package of at least SMALL lines, one for all others, then the core's and the sum."""
    sums: dict[str, Counter[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).parts
        for name in (parts[0] if len(parts) > 1 else "", "all", *(["core"] if parts[0] != "extras" else [])):
            sums[name] = sums.get(name, Counter()) + count(path)
    packages = [name for name in sums if name not in ("all", "core")]
    small = [name for name in packages if lines_of(sums[name]) < SMALL]
    sums["others"] = sum((sums.pop(name) for name in small), Counter())
    last = ("others", "core", "all")
    print(f"| package | files | lines | {' | '.join(KINDS)} |\n|{' --- |' * (3 + len(KINDS))}")
    for name in (*sorted(sums.keys() - set(last), key=lambda name: -lines_of(sums[name])), *last):
        figures = [lines_of(sums[name]), *(sums[name][kind] for kind in KINDS)]
        shown = name if name in last else f"`{name}/`" if name else "`*.py`"
        print(f"| {shown} | {sums[name]['files']} | {' | '.join(f'{round(figure, -2):,}' for figure in figures)} |")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    main()
