"""Questions and answers made from the docstrings of the running Python's standard library.

Real, useful text that lies on every machine, so that the quickstart needs no download. The files are only parsed,
never imported. One pair per object, so that a validation question never asks about something that was trained.
"""

import ast
import hashlib
import inspect
import json
import os
import platform
import re
import sys
import sysconfig
import warnings
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from toolkit.distributed.file_lock import build_once
from toolkit.errors import DataError
from toolkit.messages import tr

CODE_VERSION = 1
"""Part of the file's name; raise it when the pairs change."""

_SKIPPED_FOLDERS = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "__pycache__",
    "ensurepip",
}
_MIN_ANSWER_CHARS = 20
_MAX_ANSWER_CHARS = 480
_FILE = "pairs.jsonl"

_QUESTIONS = {
    "module": [
        "What is the module `{name}` for?",
        "What does the Python module {name} offer?",
    ],
    "class": [
        "What is the class `{name}` for?",
        "When would I use {name}?",
        "What is a {name}?",
    ],
    "function": [
        "What does {name} do?",
        "How do I call `{name}`?",
        "Explain `{name}`.",
    ],
}


@dataclass(frozen=True, slots=True)
class _Object:
    """Something with a docstring: its dotted name, module/class/function, its parameters as written, its docstring."""

    name: str
    kind: str
    parameters: str
    docstring: str


def pairs_file(cache_dir: Path, say: Callable[[str], None]) -> Path:
    """Return the JSONL file of the pairs (keys prompt, response), written at first use.

    Args:
        cache_dir: `prepare.dir`.
        say: receives messages about waiting for another process.

    Raises:
        DataError: the folder cannot be written, or this Python comes without the sources of its library.
    """
    library = Path(sysconfig.get_paths()["stdlib"])
    # The version alone does not say it: distributions ship the library whole, in parts or patched.
    build_id = hashlib.sha256(f"{sys.version} {library}".encode()).hexdigest()[:8]
    name = f"python-{platform.python_version()}-{build_id}-v{CODE_VERSION}"
    folder = cache_dir / "docstrings" / name

    def build(building: Path) -> None:
        pairs = list(derive_pairs(library))
        if not pairs:
            raise DataError(
                tr(
                    "'{folder}' holds no Python sources to take docstrings from. Use another Python installation, or "
                    "name files of your own under data.sources.",
                    folder=library,
                )
            )
        with open(building / _FILE, "w", encoding="utf-8") as file:
            for question, answer in pairs:
                file.write(json.dumps({"prompt": question, "response": answer}, ensure_ascii=False) + "\n")

    build_once(folder, build, lambda found: (found / _FILE).is_file(), say)
    return folder / _FILE


def derive_pairs(library: Path) -> Iterator[tuple[str, str]]:
    """Yield (question, answer), in an order that depends on names only; equal answers appear once.

    Args:
        library: folder of the standard library.
    """
    seen: set[str] = set()
    names: set[str] = set()
    for path in _sources(library):
        module = ".".join(path.relative_to(library).with_suffix("").parts).removesuffix(".__init__")
        tree = _parsed(path)
        if tree is None:
            continue
        for found in _documented(tree, module):
            description = _describe(found.docstring)
            if len(description) < _MIN_ANSWER_CHARS or description in seen or found.name in names:
                continue
            seen.add(description)
            names.add(found.name)
            yield _pair(found, description)


def _parsed(path: Path) -> ast.Module | None:
    """Return the syntax tree, None for fixtures in wrong encodings and templates that are no Python."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about old escapes in the library's own files
        try:
            return ast.parse(path.read_bytes())
        except (SyntaxError, ValueError, RecursionError, OSError):
            return None


def _pair(found: _Object, description: str) -> tuple[str, str]:
    """Return question and answer, the form chosen by the name so that it is the same everywhere."""
    forms = _QUESTIONS[found.kind]
    form = forms[zlib.crc32(found.name.encode()) % len(forms)]
    answer = f"{found.name}({found.parameters}): {description}" if "call" in form else description
    return form.format(name=found.name), answer


def _sources(library: Path) -> list[Path]:
    """Return the .py files of the library, sorted."""
    files: list[Path] = []
    for folder, folders, names in os.walk(library):
        # config-3.x holds what CPython was built with
        folders[:] = [name for name in folders if name not in _SKIPPED_FOLDERS and not name.startswith("config-")]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(files, key=lambda path: path.relative_to(library).as_posix())


def _documented(tree: ast.Module, module: str) -> Iterator[_Object]:
    """Yield what has a docstring: the module, then public functions, classes and methods in the file's order."""
    if not _is_private(module) and (docstring := ast.get_docstring(tree)):
        yield _Object(module, "module", "", docstring)
    yield from _members(tree, module, in_class=False)


def _members(parent: ast.Module | ast.ClassDef, prefix: str, in_class: bool) -> Iterator[_Object]:
    for node in parent.body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) or _is_private(node.name):
            continue
        name, docstring = f"{prefix}.{node.name}", ast.get_docstring(node)
        if isinstance(node, ast.ClassDef):
            if docstring:
                yield _Object(name, "class", "", docstring)
            yield from _members(node, name, in_class=True)
        elif docstring:
            yield _Object(name, "function", _parameters(node, in_class), docstring)


def _is_private(name: str) -> bool:
    """Whether a dotted name has a private last part; `__init__` and the like say too little on their own."""
    return name.rpartition(".")[2].startswith("_")


def _parameters(node: ast.FunctionDef | ast.AsyncFunctionDef, in_class: bool) -> str:
    """Return the parameters as they stand in the source, without annotations and `self`."""
    for argument in ast.walk(node.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    return re.sub(r"^(self|cls)(, |$)", "", ast.unparse(node.args)) if in_class else ast.unparse(node.args)


def _describe(docstring: str) -> str:
    """Return the first paragraph as running text, cut after a sentence if it is long; "" if there is nothing useful."""
    paragraphs = [" ".join(part.split()) for part in inspect.cleandoc(docstring).split("\n\n")]
    # A first paragraph such as "wrap(text, width) -> list" repeats the signature; the next one speaks.
    spoken = [part for part in paragraphs if part and not re.match(r"^[\w.]+\([^)]*\)( *-> *[^.]*)?$", part)]
    if not spoken or ">>>" in spoken[0]:
        return ""
    text = spoken[0]
    if len(text) > _MAX_ANSWER_CHARS:
        end = max(text.rfind(mark, 0, _MAX_ANSWER_CHARS) for mark in (". ", "; "))
        text = text[: end + 1] if end > 0 else ""
    return text if text.isprintable() else ""
