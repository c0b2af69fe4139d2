"""docs/config.md, made from the schema: each key, its type, its default and the sentence under the field."""

import ast
import dataclasses
import inspect
import typing
from collections.abc import Iterator
from enum import Enum
from typing import Any

from toolkit.config import schema
from toolkit.config.schema import RunConfig

HEADER = """# Configuration reference

Made from `toolkit/config/schema.py` by `scripts/generate_config_docs.py`; do not edit.

Set a key in a recipe (nested YAML) or on the command line (`key=value`); the command line wins. `group=choice` takes a
file of `conf/GROUP/`. Every other name is an error, and so is a key that has no effect beside the others.
"""


def render() -> str:
    """Return the whole page."""
    texts = _field_texts()
    parts = [HEADER]
    for name, kind, text, section in _sections(RunConfig, ""):
        parts.append(
            f"\n## {name or 'Top level'}\n\n{text}\n\n| key | type | default | meaning |\n| --- | --- | --- | --- |\n"
        )
        for item, inner in _own_fields(section):
            key = f"{name}.{item.name}" if name else item.name
            meaning = texts[section.__name__][item.name].replace("|", "\\|")
            parts.append(f"| `{key}` | {_type(inner)} | {_default(item)} | {meaning} |\n")
        assert kind is section
    return "".join(parts)


def _sections(kind: type, prefix: str) -> Iterator[tuple[str, type, str, type]]:
    """Yield each section with fields of its own: dotted name, class, docstring."""
    if list(_own_fields(kind)):
        summary = (inspect.getdoc(kind) or "").partition(": ")[2] or (inspect.getdoc(kind) or "")
        yield prefix, kind, summary[:1].upper() + summary[1:] if prefix else "Keys outside of any section.", kind
    for name, inner in typing.get_type_hints(kind).items():
        if dataclasses.is_dataclass(inner):
            yield from _sections(typing.cast("type", inner), f"{prefix}.{name}" if prefix else name)
        elif (
            typing.get_origin(inner) is list
            and dataclasses.is_dataclass(typing.get_args(inner)[0])
            and name == "sources"
        ):
            yield from _sections(typing.get_args(inner)[0], f"{prefix}.{name}[i]")


def _own_fields(kind: type) -> Iterator[tuple["dataclasses.Field[Any]", Any]]:
    hints = typing.get_type_hints(kind)
    for item in dataclasses.fields(kind):
        if not dataclasses.is_dataclass(hints[item.name]):
            yield item, hints[item.name]


def _field_texts() -> dict[str, dict[str, str]]:
    """Return class -> field -> the string literal below it."""
    found: dict[str, dict[str, str]] = {}
    for node in ast.parse(inspect.getsource(schema)).body:
        if isinstance(node, ast.ClassDef):
            for field, text in zip(node.body, node.body[1:], strict=False):
                if (
                    isinstance(field, ast.AnnAssign)
                    and isinstance(text, ast.Expr)
                    and isinstance(field.target, ast.Name)
                ):
                    found.setdefault(node.name, {})[field.target.id] = str(ast.literal_eval(text.value))
    return found


def _type(kind: Any) -> str:
    if isinstance(kind, type) and issubclass(kind, Enum):
        return ", ".join(f"`{name}`" for name in kind.__members__)
    words: dict[Any, str] = {
        int | str: "whole number, `auto`",
        int: "whole number",
        float: "number",
        bool: "true, false",
        str: "text",
    }
    if typing.get_origin(kind) is list:
        inner = typing.get_args(kind)[0]
        if inner in words:
            return f"list of {words[inner]}s"
        return "list of sources" if dataclasses.is_dataclass(inner) else f"list of {_type(inner)}"
    return words.get(kind, "section")


def _default(item: "dataclasses.Field[Any]") -> str:
    value = item.default if item.default is not dataclasses.MISSING else item.default_factory()  # type: ignore[operator]
    if isinstance(value, Enum):
        value = value.name
    elif isinstance(value, bool):
        value = str(value).lower()
    return '`""`' if value == "" else f"`{value}`"
