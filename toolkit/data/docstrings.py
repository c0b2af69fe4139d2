"""The quickstart's data: docstrings of Python's standard library, which is parsed and never imported.

Several questions per object, so that a validation question asks in new words for what was trained.
"""

import ast
import hashlib
import json
import platform
import re
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

from toolkit.distributed.file_lock import built_once
from toolkit.messages import DataError

CODE_VERSION = 2
"""Part of the file's name; raise it when the pairs change."""

# fmt: off
_MODULES = [
    "argparse", "base64", "bisect", "calendar", "collections", "copy", "csv", "datetime", "fnmatch",
    "functools", "genericpath", "glob", "gzip", "heapq", "json", "os", "pathlib", "posixpath", "queue",
    "random", "shlex", "shutil", "statistics", "string", "subprocess", "tempfile", "textwrap",
]
# fmt: on
"""Of the standard library; few, so that a small model can learn each sentence in minutes."""
_SPOKEN_AS = {"posixpath": "os.path", "genericpath": "os.path"}
_MIN_ANSWER_CHARS = 15
_MAX_ANSWER_CHARS = 90
_PAIRS_FILE = "pairs.jsonl"

_QUESTIONS = {
    "module": (
        "What is the module `{name}` for?",
        "What is {name} for?",
        "What does the module {name} offer?",
        "What does `{name}` do?",
        "Explain `{name}`.",
        "Tell me about {name}.",
    ),
    "class": (
        "What is `{name}`?",
        "What is the class {name} for?",
        "When would I use `{name}`?",
        "What does `{name}` do?",
        "Explain `{name}`.",
        "Tell me about {name}.",
    ),
    "function": (
        "What does `{name}` do?",
        "What does {name} do?",
        "What is `{name}` for?",
        "When would I call {name}?",
        "Explain `{name}`.",
        "Tell me about {name}.",
    ),
}


def pairs_file(cache_dir: Path) -> Path:
    """Return the JSONL file of quickstart's example data: questions and answers (keys prompt, response) made of the
    docstrings of Python's standard library, written at first use.
    """
    library = Path(sysconfig.get_paths()["stdlib"])
    # The version alone does not say it: distributions ship the library whole, in parts or patched.
    build_id = hashlib.sha256(f"{sys.version} {library}".encode()).hexdigest()[:8]
    name = f"python-{platform.python_version()}-{build_id}-v{CODE_VERSION}"
    folder = cache_dir / "docstrings" / name

    with built_once(folder, lambda built: (built / _PAIRS_FILE).is_file()) as building:
        if building is not None:  # the file does not exist yet
            pairs = list(derive_pairs(library))
            if not pairs:
                raise DataError(
                    "'{folder}' holds no Python sources to take docstrings from. Use another Python installation, or "
                    "name files of your own under data.sources.",
                    folder=library,
                )
            with open(building / _PAIRS_FILE, "w", encoding="utf-8") as file:
                for question, answer in pairs:
                    file.write(json.dumps({"prompt": question, "response": answer}, ensure_ascii=False) + "\n")
    return folder / _PAIRS_FILE


def derive_pairs(library: Path) -> Iterator[tuple[str, str]]:
    """Yield (question, answer) pairs from the docstrings of a Python library directory, several questions for each
    object, in an order that depends on names only. The files are parsed, never imported.
    """
    answers: dict[str, tuple[str, str]] = {}  # dotted name -> kind (see `_documented`), answer
    files = [file for module in _MODULES for file in (library / f"{module}.py", *(library / module).glob("*.py"))]
    for path in sorted(file for file in files if file.is_file()):
        module = ".".join(path.relative_to(library).with_suffix("").parts).removesuffix(".__init__")
        if "._" in module:  # a private module, such as json.__main__
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about old escapes in the library's own files
            try:
                tree = ast.parse(path.read_bytes())
            except (SyntaxError, ValueError, RecursionError, OSError):
                continue  # a distribution's library may be patched
        for name, kind, docstring in _documented(tree, _SPOKEN_AS.get(module, module)):
            if answer := _first_sentence(docstring):
                answers.setdefault(name, (kind, answer))
    seen: set[str] = set()
    for name, (kind, answer) in sorted(answers.items()):
        if answer not in seen:  # one answer, one object: nothing to be confused with
            seen.add(answer)
            for form in _QUESTIONS[kind]:
                yield form.format(name=name), answer


def _documented(node: ast.AST, name: str) -> Iterator[tuple[str, str, str]]:
    """Yield (dotted name, kind in `_QUESTIONS`, docstring) of an AST node and of its public members, recursively."""
    if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return
    kind = {ast.Module: "module", ast.ClassDef: "class"}.get(type(node), "function")
    if docstring := ast.get_docstring(node):
        yield name, kind, docstring
    for child in [] if kind == "function" else node.body:
        child_name = getattr(child, "name", "_")  # a statement without a name is skipped like what is private
        if not child_name.startswith("_"):
            yield from _documented(child, f"{name}.{child_name}")


def _first_sentence(docstring: str) -> str:
    """Return a docstring's first sentence on one line; "" if there is none of a length that serves as an answer."""
    paragraphs = [" ".join(part.split()) for part in docstring.split("\n\n")]
    # A first paragraph such as "wrap(text, width) -> list" repeats the signature; the next one speaks.
    spoken = [part for part in paragraphs if part and not re.match(r"^[\w.]+\([^)]*\)( *-> *[^.]*)?$", part)]
    sentence = re.split(r"(?<=\.) (?=[A-Z])", spoken[0])[0].replace("``", "`") if spoken else ""
    useful = _MIN_ANSWER_CHARS <= len(sentence) <= _MAX_ANSWER_CHARS and sentence.endswith(".")
    return sentence if useful and sentence.isprintable() else ""
