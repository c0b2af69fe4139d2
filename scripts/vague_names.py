#!/usr/bin/env python3
"""List the functions that bind a variable whose name says nothing of what it is, and how many of all these are.

python scripts/vague_names.py [PATH …]     files or directories below toolkit/; default: all of it
"""

import argparse
import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VAGUE = {"found", "one", "given", "place", "known", "own", "mine", "whole", "said", "kept"}
"""Say what the thing is instead: `checkpoint`, `parameter`, `overrides`, `position` (CONTRIBUTING.md, Layers)."""
Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(path: Path) -> Iterator[Function]:
    """Yield every function of a file, those in classes and functions included."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, Function):
            yield node


def bound_names(function: Function) -> set[str]:
    """Return the names that a function binds: arguments, assignments, loops, comprehensions, `with` and `except`."""
    names = set[str]()
    stack: list[ast.AST] = [function.args, *function.body]
    while stack:
        node = stack.pop()
        if isinstance(node, Function | ast.ClassDef):
            continue  # counted for itself
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.ExceptHandler) and node.name:
            names.add(node.name)
        stack += ast.iter_child_nodes(node)
    return names


def main(paths: list[Path]) -> None:
    """Print a line for each such function, then the counts."""
    places = paths or [ROOT / "toolkit"]
    files = sorted(file for place in places for file in ([place] if place.is_file() else place.rglob("*.py")))
    total, vague, by_name = 0, 0, Counter[str]()
    for file in files:
        for function in functions(file):
            total += 1
            if names := sorted(bound_names(function) & VAGUE):
                vague += 1
                by_name.update(names)
                print(f"{file.resolve().relative_to(ROOT)}:{function.lineno} {function.name}: {', '.join(names)}")
    shares = ", ".join(f"{name} {count}" for name, count in by_name.most_common())
    print(f"{vague} of {total} functions ({100 * vague / max(1, total):.1f} %): {shares}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", type=Path, metavar="PATH", help="files or directories below toolkit/")
    main(parser.parse_args().paths)
