"""Keys of a config by their dotted names, such as zero.stage: their values, types, bounds, and what they influence."""

import dataclasses
import typing
from collections.abc import Iterator, Mapping
from functools import cache
from operator import attrgetter
from typing import Annotated, Any

from annotated_types import BaseMetadata

from toolkit.config.schema import Influence, RunConfig


def get_value(cfg: RunConfig, key: str) -> object:
    """Return the value of a dotted key."""
    value: object = attrgetter(key)(cfg)
    return value


def leaves(section: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Return (`prefix` and dotted key, value) of each value in nested dictionaries; an empty dictionary is a value."""
    keyed: list[tuple[str, Any]] = []
    for name, value in section.items():
        has_more = isinstance(value, Mapping) and value
        keyed += leaves(value, f"{prefix}{name}.") if has_more else [(f"{prefix}{name}", value)]
    return keyed


def set_leaf(section: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key in nested dictionaries; those on the way are made."""
    *parents, name = key.split(".")
    for parent in parents:
        section = section.setdefault(parent, {})
    section[name] = value


def merge(tree: dict[str, Any], values: dict[str, Any], *path: str) -> None:
    """Merge values into the section of a tree at `path`, in place: dicts are merged, anything else is replaced."""
    for name in path:
        if not isinstance(tree.get(name), dict):
            tree[name] = {}
        tree = tree[name]
    for key, value in values.items():
        if isinstance(value, dict):
            merge(tree, value, key)
        else:
            tree[key] = value


@cache
def types_of(kind: Any) -> dict[str, Any]:
    """Return the fields of a section and their types."""
    return typing.get_type_hints(kind)


def sections(kind: type = RunConfig, prefix: str = "") -> Iterator[tuple[str, type]]:
    """Yield the prefix and the class of each section of the schema, outer ones first."""
    yield prefix, kind
    for name, inner in types_of(kind).items():
        if dataclasses.is_dataclass(inner):
            yield from sections(typing.cast("type", inner), f"{prefix}{name}.")


@cache
def all_keys() -> tuple[str, ...]:
    """Return every dotted key of the schema, sections included."""
    return tuple(prefix + name for prefix, kind in sections() for name in types_of(kind))


@cache
def bounds() -> dict[str, tuple[BaseMetadata, ...]]:
    """Return dotted key -> bounds (such as Ge(0)) of the keys that are numbers, as their fields declare them."""
    return {
        prefix + name: part.__metadata__
        for prefix, kind in sections()
        for name, hint in typing.get_type_hints(kind, include_extras=True).items()
        for part in (hint, *typing.get_args(hint))  # a number, or a number | str
        if typing.get_origin(part) is Annotated
    }


REMOVED: dict[str, tuple[object, Influence]] = {
    "checkpoint.memory_every": (0, Influence.free),
    "train.random_ltd.steps": (0, Influence.result),
    "train.random_ltd.start_share": (0.5, Influence.result),
    "train.random_ltd.first_layers": (1, Influence.result),
    "train.random_ltd.last_layers": (1, Influence.result),
}
"""Keys of earlier versions -> the value that did nothing, and what others influenced. other_names.yaml has what serves
instead."""


def was_removed_and_off(key: str, value: object) -> bool:
    """Whether a key of earlier versions, or all keys of a section, had the value that did nothing: the configs of their
    runs name all keys.
    """
    return all(name in REMOVED and REMOVED[name][0] == inner for name, inner in leaves({key: value}))


def influence_of(key: str, schema: type) -> Influence:
    """Return what a dotted key of the dataclass `schema` influences: what its field declares, else the nearest section
    that it is in declares. A key that the schema does not know influences the result, but for those in REMOVED.
    """
    influence: Influence = Influence.result
    kind: Any = schema
    for part in key.split("."):
        if not dataclasses.is_dataclass(kind):
            break  # inside a list or a mapping
        if part not in kind.__dataclass_fields__:
            return REMOVED[key][1] if key in REMOVED else Influence.result
        influence = kind.__dataclass_fields__[part].metadata.get("influence", influence)
        kind = types_of(typing.cast("type", kind))[part]
    return influence
