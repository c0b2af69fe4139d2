"""YAML files read as data, with the line of every key; and where conf/, recipes/ and examples/data/ are."""

import dataclasses
import functools
import importlib
import os
import re
import typing
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from toolkit.config.dotted_keys import types_of
from toolkit.config.schema import DataConfig, RowFormat
from toolkit.messages import ConfigError, ToolkitError, file_bytes, joined, reading, reason_of, tr

PACKAGE = Path(__file__).resolve().parents[1]
LARGEST_FILE_BYTES = 1_000_000
DEEPEST_NESTING = 50
_TEXT = "tag:yaml.org,2002:str"
_CONVERTED = [f"tag:yaml.org,2002:{name}" for name in ("bool", "int", "float", "merge", "value")]
"""What YAML makes of texts without quotes."""
_NO_NUMBER = r"(?![-+]?[0-9_.]+:|[-+]?0[0-9_]+$|[-+]?0x\w{17})"
"""What YAML 1.1 takes for a number and nobody means as one: 1:30 (90), 012 (10); and what has more than 64 bits."""


def _resolvers(resolvers: list[tuple[str, re.Pattern[str]]]) -> Iterator[tuple[str, re.Pattern[str]]]:
    """Yield PyYAML's (tag, pattern) of what texts without quotes mean, for `Loader`: without dates and `_NO_NUMBER`."""
    for tag, pattern in resolvers:
        kind = tag.rpartition(":")[2]
        if kind in ("int", "float"):
            yield tag, re.compile(_NO_NUMBER + pattern.pattern, pattern.flags)
        elif kind != "timestamp":
            yield tag, pattern


class Loader(yaml.SafeLoader):
    """Reads scalars as OmegaConf 2.3 does, and as the command line: 2e-5 is a number; 2026-01-01, 1:30 and 012 are
    texts. A key that stands twice is an error.
    """

    yaml_implicit_resolvers = {  # noqa: RUF012  # PyYAML declares it
        letter: list(_resolvers(resolvers)) for letter, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Return the mapping of a node; ConstructorError if a key that is a text stands twice in it."""
        names = set[str]()
        for key, _ in node.value:
            if key.tag != _TEXT:
                continue
            if key.value in names:
                problem = f"found duplicate key {key.value}"
                raise yaml.constructor.ConstructorError(
                    "while constructing a mapping", node.start_mark, problem, key.start_mark
                )
            names.add(key.value)
        return super().construct_mapping(node, deep=deep)


_WITH_EXPONENT = re.compile(r"[-+]?[0-9]+(?:_[0-9]+)*(?:\.[0-9_]*)?[eE][-+]?[0-9]+$")
Loader.add_implicit_resolver("tag:yaml.org,2002:float", _WITH_EXPONENT, list("-+0123456789"))


@dataclass(frozen=True, slots=True)
class YamlDocument:
    """One YAML file."""

    shown: str
    """The file as messages name it."""
    values: dict[str, Any]
    """Its content, scalars as OmegaConf reads them (5e-5 is a number)."""
    lines: dict[str, int]
    """Line of each key and list item, by its path within the file: "zero.stage", "data.sources[0].path"."""
    defaults: list[Any] = field(default_factory=list)
    """What a recipe builds on, taken out of its values."""

    def location(self, path: str) -> str:
        """Return "file:line" of a path, or the file alone where the path is not in it."""
        line = self.lines.get(path)
        return f"{self.shown}:{line}" if line else self.shown


def shipped_folder(name: str, installed: str = "") -> Path:
    """Return the directory conf, recipes or examples/data: that of the checkout, else the copy in the wheel, whose name
    in the package is `installed` ("": _ and the same name).
    """
    in_checkout = PACKAGE.parent / name
    is_checkout = (PACKAGE.parent / "run.py").is_file() and in_checkout.is_dir()
    return in_checkout if is_checkout else PACKAGE / (installed or f"_{name}")


def conf_folder() -> Path:
    """Return the directory of the Hydra groups."""
    return shipped_folder("conf")


def recipe_folders() -> list[Path]:
    """Return the folders of recipes in search order: the shipped one, then recipes/ in the working folder."""
    return [folder for folder in (shipped_folder("recipes"), Path.cwd() / "recipes") if folder.is_dir()]


def known_recipes() -> dict[str, Path]:
    """Return every recipe that `recipe=NAME` can name; the first folder of `recipe_folders` wins."""
    recipes: dict[str, Path] = {}
    for folder in recipe_folders():
        for path in sorted(folder.glob("*.yaml")):
            recipes.setdefault(path.stem, path)
    return recipes


def language_of(recipe: str) -> str:
    """Return the language of messages that a recipe (name or path), or one that it builds on, sets; "" if none does.

    The text is searched before anything is read as YAML: errors of the recipe itself are reported in its language.
    """
    recipes, seen, waiting = known_recipes(), set[Path](), [recipe]
    while waiting:
        name = waiting.pop()
        path = Path(name) if name.endswith((".yaml", ".yml")) or os.sep in name else recipes.get(name)
        if path is None or path in seen:
            continue
        seen.add(path)
        try:
            text = file_bytes(path, LARGEST_FILE_BYTES).decode(errors="replace")
        except (OSError, ValueError):
            continue
        if match := re.search(r"""^language *: *["']?(en|zh)\b""", text, re.MULTILINE):
            return match[1]
        # Items of lists that are one word, as recipes in `defaults`; what is no recipe is skipped above.
        waiting += re.findall(r"^ *- +([\w.-]+) *(?:#.*)?$", text, re.MULTILINE)
    return ""


def show(path: Path) -> str:
    """Return a path as messages name it: relative where it lies below the working folder or beside the package."""
    for base in (Path.cwd(), PACKAGE.parent):
        if path.resolve().is_relative_to(base):
            return str(path.resolve().relative_to(base))
    return str(path)


def read(path: Path, kind: Any = None) -> YamlDocument:
    """Read a recipe or a group file; nothing in it is executed. What is a text in `kind`, a section of the schema, is
    kept as it is typed: `1.10`, `off`, `012`. ConfigError if it cannot be read, or is too large or wrong (see `parse`).
    """
    shown = show(path)
    try:
        text = file_bytes(path, LARGEST_FILE_BYTES).decode("utf-8-sig")
    except OSError as error:
        raise ConfigError("cannot read {file}: {reason}", file=shown, reason=reason_of(error)) from error
    except ValueError as error:
        raise ConfigError("{file}: {reason}", file=shown, reason=reason_of(error)) from error
    return parse(text, shown, kind)


def parse(text: str, shown: str, kind: Any = None) -> YamlDocument:
    """Return the content of YAML text, a mapping, with the line of each key and list item; `shown` is the file's name
    in messages, `kind` the section of the schema whose texts stay as typed (see `read`). ConfigError if it is not YAML
    or not a mapping, has a key twice, is nested too deeply, or has aliases, which can make it explode.
    """
    try:
        try:
            values, lines = _parsed(text, shown, _fast_loader(), kind)
        except yaml.YAMLError:  # PyYAML's own parser says better what is wrong, and where
            values, lines = _parsed(text, shown, Loader, kind)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        reason = _yaml_advice(str(error.problem)) or error.problem
        raise ConfigError("{file}:{line}: {reason}", file=shown, line=line, reason=reason) from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a number of thousands of digits, a date that is none
        raise ConfigError("{file}: {reason}", file=shown, reason=error) from error
    if not isinstance(values, dict):
        raise ConfigError("{file} must hold `key: value` lines, not a list or a single value.", file=shown)
    return YamlDocument(shown, values, lines)


def _yaml_advice(problem: str) -> str:
    """Return what to do about mistakes that PyYAML names in the words of a parser; "" for others."""
    if "unexpected end of stream" in problem or "<stream end>" in problem:
        return tr("A quote or a bracket above is not closed.")
    if "\\t" in problem:
        return tr("Indent with spaces: YAML takes no tabs.")
    if "mapping values are not allowed" in problem or "expected <block end>" in problem:
        return tr("Check the indentation: keys of a section begin in one column.")
    return ""


def _parsed(text: str, shown: str, loader_class: Any, kind: Any) -> tuple[Any, dict[str, int]]:
    """Return a text's content, and the line of each key and list item; ConfigError for aliases and too deep nesting."""
    depth = 0
    for event in yaml.parse(text, Loader=loader_class):
        if isinstance(event, yaml.AliasEvent):
            line = event.start_mark.line + 1 if event.start_mark else 1
            raise ConfigError("{file}:{line}: YAML aliases (*name) are not allowed.", file=shown, line=line)
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > DEEPEST_NESTING:
            raise ConfigError("{file} nests deeper than {limit} levels.", file=shown, limit=DEEPEST_NESTING)
    loader, lines = loader_class(text), dict[str, int]()
    node = loader.get_single_node()
    _walk(node, "", lines, kind)
    return loader.construct_document(node) if node is not None else {}, lines


@functools.cache
def _fast_loader() -> Any:
    """Return our loader over libyaml, where PyYAML has it: 60,000 keys take 1 s instead of 6."""
    try:
        parser: Any = importlib.import_module("yaml.cyaml").CParser
    except ImportError:
        return Loader

    class Fast(parser, Loader):
        def __init__(self, text: str) -> None:  # not SafeLoader's, which would set up the parser in Python, too
            parser.__init__(self, text)
            yaml.constructor.SafeConstructor.__init__(self)
            yaml.resolver.Resolver.__init__(self)

    return Fast


def _walk(node: yaml.Node | None, path: str, lines: dict[str, int], kind: Any) -> None:
    """Add the line of each key and item below `node`, which is at `path`, to `lines`; tag as a text whatever the schema
    has as one, where YAML would make false of `off`, 1.1 of `1.10`. `kind`: the node's type in the schema, None if
    unknown.
    """
    type_arguments = typing.get_args(kind)
    if isinstance(node, yaml.MappingNode):
        fields = types_of(typing.cast("type", kind)) if dataclasses.is_dataclass(kind) else {}  # key -> its type
        kind_of_all = type_arguments[1] if typing.get_origin(kind) is dict else None  # one for all values
        kind_of_all = str if path == "launch.env" else kind_of_all  # the schema has Any, as a value may be null
        for key, value in node.value:
            if kind_of_all is str:  # a mapping of texts, whose keys are texts too
                key.tag = _TEXT
            below = f"{path}.{key.value}" if path else str(key.value)
            lines[below] = key.start_mark.line + 1
            _walk(value, below, lines, kind_of_all or fields.get(str(key.value)))
    elif isinstance(node, yaml.SequenceNode):
        item_kind = type_arguments[0] if typing.get_origin(kind) is list else None
        for index, item in enumerate(node.value):
            lines[f"{path}[{index}]"] = item.start_mark.line + 1
            _walk(item, f"{path}[{index}]", lines, item_kind)
    elif node is not None and kind is str and node.tag in _CONVERTED:
        node.tag = _TEXT


SHIPPED = ("examples/data/chat_zh.jsonl", "examples/data/chat_en.jsonl")
"""Example conversations."""
_NAMES = ("text_zh", "text_en", "pairs", "labels", "texts", "library", "library_zh")
_OTHERS = tuple(f"examples/data/{name}.jsonl" for name in _NAMES)
_SHIPPED = (*SHIPPED, *_OTHERS)
"""Paths that name a shipped file from any working directory, unless a file of that name is there."""
_USERS_FILES = {"pairs": "pairs", "labels": "labels", "texts": "pairs", "text_zh": "text", "text_en": "text"}
"""Example data -> what the pages call a file of a user's own with such rows; chat, if it is not here."""


def located(path: str) -> str:
    """Return where a file is: the path as it is, or the shipped file that it names."""
    if path in _SHIPPED and not os.path.exists(path):
        return str(shipped_folder("examples/data", "_examples") / Path(path).name)
    return path


def named_chat_template(name: str) -> Path:
    """Return the file of a chat template that comes with the toolkit, by its name; it need not exist."""
    return PACKAGE / "models" / "templates" / f"{name}.jinja"


def chat_template_file(value: str) -> Path:
    """Return the file that `model.chat_template` names: one that exists, else the toolkit's own of that name."""
    named = named_chat_template(value)
    return named if value.isidentifier() and named.is_file() and not os.path.isfile(value) else Path(value)


def check_directory(path: Path, error: type[ToolkitError] = ConfigError, argument: str = "") -> None:
    """Raise `error` if a run, checkpoint or model is not there, with the most similar one; `argument` has named it."""
    if os.path.isdir(path):
        return
    from toolkit.config.suggest import directory_meant  # read in errors alone

    sentence = tr("there is no directory {path} ({name}).", path=path, name=argument) if argument else ""
    raise error(joined(sentence or tr("there is no directory {path}.", path=path), directory_meant(path)))


def hub_id_of_group(name: str) -> str:
    """Return the repository of a model of model=NAME, "" if there is no such model, or it has none."""
    file = conf_folder() / "model" / f"{name}.yaml"
    return str(read(file).values.get("hub_id", "")) if file.is_file() else ""


_NO_TEXT = re.compile(r"true|false|null|[-+]?(?:\.?\d[\d_.]*(?:e[-+]?\d+)?|inf|nan)", re.IGNORECASE)
"""What Hydra reads as another value than a text."""


def quoted(value: str | Path) -> str:
    """Return a text or path as the value of an override, in the quotes that Hydra's grammar may need."""
    text = str(value)
    if re.fullmatch(r"[\w./+-]+", text, re.ASCII) and not _NO_TEXT.fullmatch(text):
        return text
    # Backslashes stay as they are, but before a quote or the end they are doubled; and a quote gets one: it\'s.
    escaped = re.sub(r"(\\*)('|$)", lambda match: match[1] * 2 + ("\\'" if match[2] else ""), text)
    return f"'{escaped}'"


def is_hub_name(path: str) -> bool:
    """Return whether a `model.path` names a repository on Hugging Face; a directory of that name comes first."""
    return re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", path, re.ASCII) is not None and not os.path.exists(path)


TABLE_SUFFIXES = (".parquet", ".arrow")
DATA_SUFFIXES = (".jsonl", ".json", ".ndjson", ".csv", ".tsv", *TABLE_SUFFIXES)
PACKED_SUFFIXES = (".gz", ".zst")
"""Ends of data files' names."""


def is_dataset_name(name: str) -> bool:
    """Return whether a text names a dataset on Hugging Face, not a file or directory that is, or should be, here."""
    is_file_name = name.endswith((*DATA_SUFFIXES, *PACKED_SUFFIXES, ".txt"))
    return is_hub_name(name) and not is_file_name and not os.path.isdir(name.partition("/")[0])


def is_url(path: str) -> bool:
    """Return whether a source's path is a URL."""
    return path.startswith(("https://", "http://"))


def is_remote(path: str) -> bool:
    """Return whether a source's path is a URL, or a text file with a list of them."""
    is_text_file = path.endswith(".txt") and os.path.isfile(path)
    if is_url(path) or not is_text_file:
        return is_url(path)
    with reading(path, ConfigError), open(path, "rb") as file:
        return is_url(file.read(len("https://")).decode(errors="replace"))


def source_of(text: str) -> dict[str, str]:
    """Return the keys of a source that a text alone stands for: a path, or OWNER/NAME[:SUBSET] on Hugging Face."""
    name, _, subset = text.partition(":")
    if os.path.exists(text) or not is_dataset_name(name):
        return {"path": text}
    return {"hub": name, "subset": subset} if subset else {"hub": name}


def example_data_notice(data: DataConfig) -> str:
    """Return the sentence about example data in data.sources; "" if there is none."""
    return notice_of_sources((source.path, source.format.value) for source in data.sources)


def notice_of_sources(sources: Iterable[tuple[str, str]]) -> str:
    """Return the sentence about example data among a run's sources, given as path and format; "" if there is none."""
    names = []
    for path, row_format in sources:
        if row_format == RowFormat.docstrings.value:
            names.append(tr("the docstrings of the installed Python"))
        elif path in _SHIPPED:
            names.append(path)
    if not names:
        return ""
    return tr(
        "EXAMPLE DATA: this run trains on {names}. To train on your own data, add {override}",
        names=", ".join(names),
        override=f"data={_USERS_FILES.get(Path(names[0]).stem, 'chat')}.jsonl",
    )
