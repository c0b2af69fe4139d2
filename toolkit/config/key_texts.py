"""What the schema says of its keys: meaning, type, default; for docs/config.md, recipe.schema.json and `help`."""

import ast
import dataclasses
import inspect
import typing
from collections.abc import Iterator
from enum import Enum
from functools import cache
from typing import Any, NamedTuple

from toolkit.config import schema
from toolkit.messages import chinese, current_language, tr


class Key(NamedTuple):
    """A key of the schema, with its texts in the user's language."""

    name: str
    """Dotted; the items of a list have [i]: data.sources[i].path."""
    kind: str
    default: str
    meaning: str


class Section(NamedTuple):
    """A section of the schema: its dotted name, "" for the top level, what it is for, and its own keys."""

    name: str
    about: str
    keys: list[Key]


def sections() -> list[Section]:
    """Return all sections with keys of their own, in the user's language."""
    texts = field_texts()
    return [
        Section(
            name,
            said(about),
            [
                Key(
                    f"{name}.{item.name}" if name else item.name,
                    type_text(inner),
                    default_text(item),
                    said(texts[kind.__name__][item.name]),
                )
                for item, inner in own_fields(kind)
            ],
        )
        for name, about, kind in section_classes(schema.RunConfig, "")
    ]


def said(sentence: str) -> str:
    """Return a sentence of the schema in the user's language."""
    return chinese()["sentences"].get(sentence, sentence) if current_language() == "zh" else sentence


@cache
def field_texts() -> dict[str, dict[str, str]]:
    """Return class of the schema -> field -> the string literal below it, which documents it."""
    texts: dict[str, dict[str, str]] = {}
    for node in ast.parse(inspect.getsource(schema)).body:
        if isinstance(node, ast.ClassDef):
            for field, text in zip(node.body, node.body[1:], strict=False):  # each statement and the next one
                if (
                    isinstance(field, ast.AnnAssign)
                    and isinstance(text, ast.Expr)
                    and isinstance(field.target, ast.Name)
                ):
                    texts.setdefault(node.name, {})[field.target.id] = str(ast.literal_eval(text.value))
    return texts


def field_default(item: "dataclasses.Field[Any]") -> Any:
    """Return the default of a field."""
    return item.default if item.default is not dataclasses.MISSING else item.default_factory()  # type: ignore[operator]


def section_classes(kind: type, prefix: str) -> Iterator[tuple[str, str, type]]:
    """Yield each section with own fields: dotted name (`prefix`: that of `kind`), purpose by its docstring, class."""
    if list(own_fields(kind)):
        docstring = inspect.getdoc(kind) or ""  # such as "`distributed`: communication between ranks."
        purpose = docstring.partition(": ")[2] or docstring
        yield prefix, purpose[:1].upper() + purpose[1:] if prefix else "Keys outside of any section.", kind
    for name, inner in typing.get_type_hints(kind).items():
        if dataclasses.is_dataclass(inner):
            yield from section_classes(typing.cast("type", inner), f"{prefix}.{name}" if prefix else name)
        elif (
            typing.get_origin(inner) is list
            and dataclasses.is_dataclass(typing.get_args(inner)[0])
            and name != "validation"  # whose items are as those of `sources`
        ):
            yield from section_classes(typing.get_args(inner)[0], f"{prefix}.{name}[i]")


def own_fields(kind: type) -> Iterator[tuple["dataclasses.Field[Any]", Any]]:
    """Yield the fields of a section that are no sections themselves, with their types."""
    hints = typing.get_type_hints(kind)
    for item in dataclasses.fields(kind):
        if not dataclasses.is_dataclass(hints[item.name]):
            yield item, hints[item.name]


def type_text(kind: Any) -> str:
    """Return what a value of a type looks like, in Markdown, in the user's language."""
    if isinstance(kind, type) and issubclass(kind, Enum):
        return ", ".join(f"`{name}`" for name in kind.__members__)
    if typing.get_origin(kind) is list:
        inner = typing.get_args(kind)[0]
        lists = {
            int: tr("list of whole numbers"),
            float: tr("list of numbers"),
            str: tr("list of texts"),
            schema.SourceConfig: tr("list of sources"),
        }
        if inner in lists:
            return lists[inner]
        if dataclasses.is_dataclass(inner):
            return tr("list of sections")
        return tr("list of {choices}", choices=type_text(inner))
    words: dict[Any, str] = {
        int | str: tr("whole number, `auto`"),
        bool | str: tr("true, false, `auto`"),
        int: tr("whole number"),
        float: tr("number"),
        int | float: tr("number"),
        bool: tr("true, false"),
        str: tr("text"),
    }
    return words.get(kind) or tr("section")


def default_text(item: "dataclasses.Field[Any]") -> str:
    """Return the default of a field as it is typed."""
    value = field_default(item)
    if isinstance(value, Enum):
        value = value.name
    elif isinstance(value, bool):
        value = str(value).lower()
    return '""' if value == "" else str(value)
