"""Short forms of the section `data`, in a recipe and on the command line.

A text stands for a source (`data.sources=[a.jsonl]`), a number or a percentage for validation data that is split off
(`data.validation=5%`), a key of a source in `data` itself for that of the only source (`data.path=a.jsonl`).
"""

import os
import re
from fractions import Fraction
from typing import Any

from toolkit.config import dotted_keys, files, schema
from toolkit.config.validate import Locator, TreeReader, error_about
from toolkit.messages import ConfigError, Problems, tr

SOURCE_KEYS = {
    name: kind
    for name, kind in dotted_keys.types_of(schema.SourceConfig).items()
    if name not in dotted_keys.types_of(schema.DataConfig)
}
"""Key of a source that may stand in `data` itself -> its type: data.path, data.columns."""


def as_sources(value: Any) -> Any:
    """Return a source, or a list of sources, as a list of sections: "a.jsonl" becomes [{"path": "a.jsonl"}]. What is no
    source is returned as it is, for the schema to judge; so is a reference to another key, `${…}`.
    """
    is_one_source = isinstance(value, dict) or (isinstance(value, str) and "${" not in value)
    listed = [value] if is_one_source else value
    if not isinstance(listed, list):
        return value
    return [files.source_of(item) if isinstance(item, str) and "${" not in item else item for item in listed]


def validation_split(value: Any, location: str) -> dict[str, Any]:
    """Return the keys of `data` that a number of rows (500) or a fraction (0.05, "5%") as `data.validation` stands for:
    all of them, lest a lower layer decides one; {} where `value` names sources. ConfigError for a number that is
    neither.
    """
    number, text = value, value.strip() if isinstance(value, str) else ""
    if re.fullmatch(r"\d+(\.\d+)?\s*%", text):
        number = float(Fraction(text.rstrip("% ")) / 100)
    elif re.fullmatch(r"\d+(\.\d+)?", text) and not os.path.exists(text):
        number = float(text) if "." in text else int(text)
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        return {}
    is_count = isinstance(number, int) and number >= 1
    if not is_count and not 0 <= number < 1:
        raise error_about(
            tr(
                "{place}: 'data.validation' = {value} must be a number of rows (500), a fraction below 1 (0.05 or 5%), "
                "or files.",
                place=location,
                value=value,
            ),
            "data.validation",
        )
    fraction = schema.DataConfig().validation_fraction if is_count else number  # not read next to a count
    return {"validation": [], "validation_rows": number if is_count else 0, "validation_fraction": float(fraction)}


def expand(data: dict[str, Any], location: str) -> None:
    """Replace the short forms of `validation` and `sources` in a section `data`, in place; `location`: for messages."""
    if "validation" in data and (split := validation_split(data["validation"], location)):
        data.update(split)
    data.update({name: as_sources(data[name]) for name in ("sources", "validation") if name in data})


def read_source(values: dict[str, Any], locate: Locator, problems: Problems) -> dict[str, Any]:
    """Return those `values` of the only source (name of its key -> value) that the schema allows; the errors of the
    others are added to `problems`.
    """
    valid: dict[str, Any] = {}
    for name, value in values.items():
        problems_of_key = Problems()
        TreeReader(locate, problems_of_key).read(value, SOURCE_KEYS[name], f"data.{name}")
        if not problems_of_key.errors:
            valid[name] = value
        for error in problems_of_key.errors:
            error.keys = (*error.keys, "data.sources[0]")  # so that checks of rows leave this source out
            problems.add(error)
    return valid


def set_source(tree: dict[str, Any], values: dict[str, Any], location: str) -> None:
    """Set `values`, keys of a source, in the only source of the config `tree`; if they name the data themselves (`path`
    or `hub`), they replace all sources. ConfigError, with `location`, if there are several sources to set, or none.
    """
    if not values:
        return
    data = tree.setdefault("data", {})
    sources = [{}] if {"path", "hub"} & values.keys() else data.get("sources", [])
    if not isinstance(sources, list) or len(sources) != 1 or not isinstance(sources[0], dict):
        raise ConfigError(
            "{place}: data.{name} is for a single source, but data.sources has {count}. Add data.path=FILE, or write "
            "it into each: data.sources=[{{path: FILE, {name}: …}}, …]",
            place=location,
            name=next(iter(values)),
            count=len(sources),
        )
    data["sources"] = [{**sources[0], **values}]


def two_sources(name: str, location: str) -> ConfigError:
    """Return the error for `data.path` or `data.hub` (`name`) next to `data.sources`."""
    return ConfigError(
        "{place}: data.{name} and data.sources both name data. Keep one of them.", place=location, name=name
    )


def is_path(value: Any) -> bool:
    """Return whether a value looks like a file or directory, not like a name of a choice."""
    return isinstance(value, str) and "${" not in value and (bool(re.search(r"[./*]", value)) or os.path.exists(value))
