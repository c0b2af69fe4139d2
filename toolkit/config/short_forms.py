"""Short forms that people type, written out: `data=chat.jsonl`, `data.sources=[a.jsonl,b.jsonl]`, `zero=3`."""

import os
import re
from collections.abc import Collection
from typing import Any

_STAGES = (0, 1, 2, 3)
_SOURCES = ("sources", "validation")


def sources(value: Any) -> Any:
    """Return a list of sources in which a path alone stands for `{path: …}`; anything else as it is."""
    listed = [value] if isinstance(value, str) and "${" not in value else value
    if not isinstance(listed, list):
        return value
    return [{"path": item} if isinstance(item, str) and "${" not in item else item for item in listed]


def in_recipe(values: dict[str, Any]) -> None:
    """Write out the short forms in a recipe's content, in place."""
    data, zero = values.get("data"), values.get("zero")
    if is_path(data) or isinstance(data, list):
        values["data"] = {"sources": sources(data)}
    elif isinstance(data, dict):
        data.update({name: sources(data[name]) for name in _SOURCES if name in data})
    if zero in _STAGES and not isinstance(zero, bool):
        values["zero"] = {"stage": zero}


def choice(group: str, value: Any) -> Any:
    """Return the choice of a group that a value stands for: `zero=3` is `zero=stage3`."""
    return f"stage{value}" if group == "zero" and value in _STAGES and not isinstance(value, bool) else value


def argument(key: str, value: Any, choices: Collection[str]) -> str:
    """Return an argument of the command line written out; "" where it is no short form.

    Args:
        key: its key.
        value: its value.
        choices: the files of the group `data`.
    """
    if key in [f"data.{name}" for name in _SOURCES] and sources(value) != value:
        return f"{key}={_written(sources(value))}"
    is_list = isinstance(value, list) and all(isinstance(item, str | dict) for item in value)
    if key == "data" and (is_list or (is_path(value) and value not in choices)):
        return f"data.sources={_written(sources(value))}"
    written = choice(key, value)
    return "" if written is value else f"{key}={written}"


def is_path(value: Any) -> bool:
    """Return whether a value looks like a file or directory, not like a name of a choice."""
    return isinstance(value, str) and "${" not in value and (bool(re.search(r"[./*]", value)) or os.path.exists(value))


def _written(value: Any) -> str:
    """Return a value in Hydra's grammar, texts in quotes."""
    if isinstance(value, list):
        return "[" + ",".join(map(_written, value)) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{name}: {_written(inner)}" for name, inner in value.items()) + "}"
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, str):
        return "null" if value is None else str(value)
    # Hydra's grammar: a backslash counts only in front of a quote, or of another one there.
    text = re.sub(r"(\\*)'", r"\1\1\\'", value)
    return "'" + re.sub(r"(\\+)$", r"\1\1", text) + "'"
