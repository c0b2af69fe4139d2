"""recipes/recipe.schema.json: the JSON schema of recipes, by which editors complete and check them."""

import dataclasses
import json
import typing
from enum import Enum
from typing import Annotated, Any

from annotated_types import Ge, Gt, Le, Lt

from toolkit.config.key_texts import field_default, field_texts
from toolkit.config.load import group_choices, to_plain
from toolkit.config.schema import RunConfig, SourceConfig

_TYPES = {int: "integer", float: "number", int | float: "number", bool: "boolean", str: ["string", "number"]}
_TEXT = {"type": "string"}


def recipe_schema() -> str:
    """Return the file's text."""
    whole = _section(RunConfig, field_texts())
    keys = whole["properties"]
    keys["data"]["anyOf"][0]["properties"]["validation"]["anyOf"] += [
        {"type": "number", "minimum": 0}
    ]  # rows, a fraction
    keys["data"]["anyOf"] += [_TEXT, {"type": "array"}]  # data: chat.jsonl
    keys["zero"]["anyOf"] += [{"enum": [0, 1, 2, 3]}]
    choices = {
        f"override /{group}": {"anyOf": [{"enum": names}, {"type": ["string", "array", "integer"]}]}
        for group, names in group_choices().items()
    }
    keys["defaults"] = {
        "description": "Recipes that this one builds on, choices of groups, and _self_: the recipe's own keys.",
        "type": "array",
        "items": {"anyOf": [_TEXT, {"type": "object", "properties": choices}]},
    }
    head = {"$schema": "http://json-schema.org/draft-07/schema#", "title": "Recipe"}
    return json.dumps(head | whole, indent=1, ensure_ascii=False) + "\n"


def _section(kind: type, texts: dict[str, dict[str, str]]) -> dict[str, Any]:
    hints = typing.get_type_hints(kind, include_extras=True)
    keys = {
        item.name: {
            "description": texts[kind.__name__][item.name],
            **({} if dataclasses.is_dataclass(hints[item.name]) else {"default": to_plain(field_default(item))}),
            **_or_reference(_value(hints[item.name], texts)),
        }
        for item in dataclasses.fields(kind)
    }
    return {"type": "object", "additionalProperties": False, "properties": keys}


def _or_reference(value: dict[str, Any]) -> dict[str, Any]:
    """Return that a value is of a kind, or refers to another key: ${checkpoint.every}."""
    return value if value.get("type") == _TYPES[str] else {"anyOf": [value, {"type": "string", "pattern": r"\$\{"}]}


def _value(hint: Any, texts: dict[str, dict[str, str]]) -> dict[str, Any]:
    """Return the schema of a type."""
    if typing.get_origin(hint) is Annotated:
        return _value(hint.__origin__, texts) | dict(map(_bound, hint.__metadata__))
    if dataclasses.is_dataclass(hint):
        return _section(typing.cast("type", hint), texts)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return {"enum": list(hint.__members__)}
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is list:
        item = _value(arguments[0], texts)
        if arguments[0] is SourceConfig:  # a path alone stands for {path: …}
            return {"anyOf": [{"type": "array", "items": {"anyOf": [item, _TEXT]}}, item, _TEXT]}
        return {"type": "array", "items": item}
    if typing.get_origin(hint) is dict:
        return {"type": "object"}
    if arguments and hint not in _TYPES:  # a number | str: "auto" is the only text
        return {"anyOf": [_value(arguments[0], texts), {"const": "auto"}]}
    return {"type": _TYPES[hint]}


def _bound(constraint: Any) -> tuple[str, float]:
    for kind, attribute, keyword in (
        (Ge, "ge", "minimum"),
        (Gt, "gt", "exclusiveMinimum"),
        (Le, "le", "maximum"),
        (Lt, "lt", "exclusiveMaximum"),
    ):
        if isinstance(constraint, kind):
            return keyword, getattr(constraint, attribute)
    raise TypeError(constraint)
