"""What the last word of a command line may become, for a shell's TAB: fast, as it is asked each time. No Hydra."""

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from toolkit.config import dotted_keys, files, schema

PATH_KEYS = re.compile(
    r"\b(recipe|data|sources|validation|hostfile|resume|path|dir|tokenizer|chat_template|adapter)$|_(path|json|file)$"
)
"""What has the name of a file or directory as its value."""


def candidates(line: str, commands: Mapping[str, str]) -> list[str]:
    """Return the words that the last word of a command line may become: of "toolkit tr" ["train"]. `line` ends at the
    cursor. `commands`: name -> module, whose docstring holds the command's usage.
    """
    words = re.sub(r"^\s*(\w+=\S*\s+)*", "", line).split()  # without variables before the program: HF_HOME=/x toolkit
    is_new_word = not words or line[-1].isspace()
    typed = "" if is_new_word else words.pop()
    choices: Iterable[str] = ()  # also for the program's own name, which the shell completes
    if len(words) == 1:
        choices = (*commands, "help", "--help", "--version")
    elif words[1:] == ["help"]:
        choices = commands
    elif len(words) > 1 and words[1] in commands:
        file = files.PACKAGE.parent / Path(*commands[words[1]].split(".")).with_suffix(".py")
        choices = _arguments(typed, ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "")
    # A name with white space would have to be quoted for the shell: it is not proposed.
    return [word for word in dict.fromkeys(choices) if word.startswith(typed) and not re.search(r"\s", word)]


def _arguments(typed: str, doc: str) -> Iterator[str]:
    """Yield arguments of a command that may stand where `typed` begins one, by the usage in its help `doc`; values if
    `typed` is NAME= or NAME=VALUE, else names, also such as do not begin with it: the caller drops those.
    """
    usage = doc.split("\n\n")[1]  # behind the sentence about what the command does
    placeholders = dict(re.findall(r"(?<![\w.])([a-z_.]+)=([^\s\]]*)", usage))  # name=PLACEHOLDER
    takes_keys = placeholders.pop("key", "") == "value"  # key=value in a usage stands for all keys of the config
    name, equals, value = typed.partition("=")
    if equals:
        placeholder = {**placeholders, "language": "en|zh"}.get(name, "")
        for choice in _values(name, value, placeholder):
            yield f"{name}={choice}"
        return
    if typed.startswith("-"):
        yield from re.findall(r"--[a-z][\w-]*", doc)
    for argument in (*placeholders, *(_groups() if takes_keys else ())):
        yield f"{argument}="
    bare = re.sub(r"\S+=\S+", "", usage)  # words that stand alone: on|off, PATH
    for choices in re.findall(r"\b\w+(?:\|\w+)+", bare):
        yield from choices.split("|")
    if re.search(r"\b(PATH|RUN|FILE)\b", bare):
        yield from _paths(typed)
    if takes_keys:
        yield from _keys_by_section(len(typed))
    yield "language="


def _keys_by_section(length: int) -> Iterator[str]:
    """Yield all config keys, each cut after the section in which its character number `length` is, with what follows
    it: optim.lr is `optim.` while its first five characters are typed, then `optim.lr=`. So TAB shows sections first.
    """
    for key in dotted_keys.all_keys():
        more, dot, _ = key[length:].partition(".")
        is_section = dot or any(other.startswith(f"{key}.") for other in dotted_keys.all_keys())
        yield key[:length] + more + ("." if is_section else "=")


def _values(name: str, value: str, placeholder: str) -> Iterator[str]:
    """Yield values that an argument `name` may have: recipes, groups' choices, enums, booleans, paths. `placeholder`:
    what its usage shows as value, such as en|zh.
    """
    section, _, field = name.rpartition(".")
    sections = dict(dotted_keys.sections())  # "optim." -> the dataclass of its keys
    section_class = sections.get(f"{section}." if section else "", schema.RunConfig)
    kind: Any = dotted_keys.types_of(section_class).get(field)  # the key's type; None for an argument that is no key
    if name == "recipe":
        yield from files.known_recipes()
    elif name in _groups():
        yield from (path.stem for path in sorted((files.conf_folder() / name).glob("*.yaml")))
    elif "|" in placeholder:
        yield from placeholder.split("|")
    elif kind is bool:
        yield from ("true", "false")
    elif isinstance(kind, type) and issubclass(kind, Enum):
        yield from (str(member.value) for member in kind)
    if PATH_KEYS.search(name) or re.match("FILE|DIR|PATH", placeholder):
        yield from _paths(value)


def _groups() -> list[str]:
    """Return the names of the config groups."""
    return sorted(path.name for path in files.conf_folder().iterdir() if path.is_dir())


def _paths(typed: str) -> Iterator[str]:
    """Yield the entries of the directory that a typed path names last, spelled as it is typed: `./da` gives `./data/`.
    Hidden ones are shown once a dot is typed, as shells do.
    """
    folder = typed.rpartition("/")[0] + "/" if "/" in typed else ""
    shows_hidden = typed.rpartition("/")[2].startswith(".")
    for path in sorted(Path(folder or ".").glob("*")):
        if shows_hidden or not path.name.startswith("."):
            yield f"{folder}{path.name}{'/' if path.is_dir() else ''}"
