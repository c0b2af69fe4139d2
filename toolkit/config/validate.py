"""A tree of values held against the schema: unknown keys, wrong types."""

import dataclasses
import re
import typing
from collections.abc import Callable, Iterator
from enum import Enum
from functools import cache
from typing import Any

from omegaconf.errors import ValidationError
from omegaconf.nodes import BooleanNode, FloatNode, IntegerNode, StringNode

from toolkit.config.schema import AUTO, RunConfig, all_keys, types_of
from toolkit.errors import ConfigError
from toolkit.messages import did_you_mean, joined, nearest, tr
from toolkit.problems import Problems
from toolkit.tables import read_table
from toolkit.translate.key import keys_of

Place = Callable[[str], str]
"""From a dotted path to where it stands: "recipes/x.yaml:3" or "command line"."""

_NODES: dict[Any, Any] = {int: IntegerNode, float: FloatNode, bool: BooleanNode, str: StringNode}
_NODES[int | str] = IntegerNode
_NODES[bool | str] = BooleanNode


def field_type(path: str) -> Any:
    """Return the type of a dotted key of the schema, None where there is no such key. Below `ds_extra` it is Any."""
    kind: Any = RunConfig
    for part in path.split("."):
        if dataclasses.is_dataclass(kind):
            kind = types_of(typing.cast("type", kind)).get(part)
        elif typing.get_origin(kind) is list and part.isdecimal():
            kind = typing.get_args(kind)[0]
        elif kind is Any or typing.get_origin(kind) is dict:
            kind = Any
        else:
            return None
    return kind


def validate_tree(value: Any, kind: Any, path: str, place: Place, problems: Problems) -> Iterator[tuple[str, Any]]:
    """Check values against their type and yield each right leaf's path and value.

    Args:
        value: what YAML or the command line gave; wrong values are removed from its sections.
        kind: its type in the schema.
        path: dotted key of `value`; "" for the whole config.
        place: tells where a path stands.
        problems: receives the errors: unknown keys and wrong types.
    """
    if isinstance(value, str):
        refers = problems.attempt(_is_interpolation, value, path, place)
        if refers is not False:
            if refers:
                yield path, value
            return
    if dataclasses.is_dataclass(kind):
        yield from _check_section(value, typing.cast("type", kind), path, place, problems)
        return
    before = problems.count
    if typing.get_origin(kind) is list:
        if not isinstance(value, list):
            problems.add_made(_wrong, path, value, tr("a list, for example [a, b]"), place)
            return
        for index, item in enumerate(value):
            list(validate_tree(item, typing.get_args(kind)[0], f"{path}[{index}]", place, problems))
    elif typing.get_origin(kind) is dict:
        if not isinstance(value, dict):
            problems.add(_wrong(path, value, tr("a section of keys"), place))
            return
        problems.attempt(_check_free, value, path, place)
        if problems.count == before:
            yield from ((f"{path}.{key}", inner) for key, inner in value.items())
    elif kind is Any:
        problems.attempt(_check_free, value, path, place)
    else:
        problems.attempt(_scalar, value, kind, path, place)
    if problems.count == before:
        yield path, value


def build(value: Any, kind: Any, path: str, place: Place) -> Any:
    """Return values that were checked, in the types of the schema; others may have taken the place of references.

    Raises:
        ConfigError: if what a key refers to is of another type.
    """
    if dataclasses.is_dataclass(kind):
        types, prefix = types_of(typing.cast("type", kind)), f"{path}." if path else ""
        if not isinstance(value, dict):
            raise _wrong(path, value, tr("a section of keys"), place)
        if strange := [name for name in value if name not in types]:
            raise unknown_key(f"{prefix}{strange[0]}", place)
        made = {name: build(inner, types[name], prefix + name, place) for name, inner in value.items()}
        return typing.cast("type", kind)(**made)
    if typing.get_origin(kind) is list:
        if not isinstance(value, list):
            raise _wrong(path, value, tr("a list, for example [a, b]"), place)
        return [build(item, typing.get_args(kind)[0], f"{path}[{index}]", place) for index, item in enumerate(value)]
    if typing.get_origin(kind) is dict:
        if not isinstance(value, dict):
            raise _wrong(path, value, tr("a section of keys"), place)
        return {name: build(inner, typing.get_args(kind)[1], f"{path}.{name}", place) for name, inner in value.items()}
    if kind is Any or (kind in (int | str, bool | str) and isinstance(value, str)):
        return value
    return _scalar(value, kind, path, place)


def about(key: str, sentence: str) -> ConfigError:
    """Return an error that knows which key it is about."""
    error = ConfigError(sentence)
    error.keys = (key,)
    return error


def unknown_key(path: str, place: Place) -> ConfigError:
    """Return the error for a key that the schema does not have, with ours for it, or the nearest one."""
    shown = re.sub(r"\[\d+\]", "", path)
    siblings = _members(shown.rpartition(".")[0])
    # A name that is known elsewhere says what is meant; else the nearest one here.
    theirs = our_keys(shown, lambda key: field_type(key) is not None)
    meant = theirs or _nearest_key(path, shown, siblings)
    sentence = tr("{place}: unknown key '{key}'.", place=place(path), key=path)
    if meant:
        sentence = joined(sentence, tr("Did you mean '{name}'?", name="' / '".join(meant[:3])))
    elif siblings:
        sentence = joined(sentence, tr("Known here: {keys}.", keys=", ".join(siblings)))
    error = ConfigError(sentence)
    # Errors of a section that was maybe meant are errors all the same: they name other keys.
    keys = (path, *(key for key in meant if not _members(key)))
    error.keys = tuple(re.sub(r"\[\d+\].*", "", key) for key in keys)
    return error


def _nearest_key(path: str, shown: str, siblings: list[str]) -> tuple[str, ...]:
    """Return the key that is most like an unknown one: at its level, anywhere, or of the same name elsewhere."""
    prefix, _, name = path.rpartition(".")
    close = nearest(name, siblings)
    if close:
        return (f"{prefix}.{close}" if prefix else close,)
    leaf = {key.rpartition(".")[2]: key for key in reversed(all_keys())}
    found = nearest(shown, (key for key in all_keys() if not shown.startswith(f"{key}."))) or leaf.get(name)
    return (found,) if found else ()


def _members(section: str) -> list[str]:
    kind = field_type(section) if section else RunConfig
    if typing.get_origin(kind) is list:
        kind = typing.get_args(kind)[0]
    return list(types_of(typing.cast("type", kind))) if dataclasses.is_dataclass(kind) else []


def _check_section(value: Any, kind: type, path: str, place: Place, problems: Problems) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, dict):
        problems.add(_wrong(path, value, tr("a section of keys"), place))
        return
    types = types_of(kind)
    for key, inner in list(value.items()):
        below = f"{path}.{key}" if path else str(key)
        before = problems.count
        if key == "_target_":
            problems.add_made(_names_code, below, place)
        elif key not in types:
            problems.add_made(unknown_key, below, place)
        else:
            yield from validate_tree(inner, types[key], below, place, problems)
            if isinstance(inner, dict) and dataclasses.is_dataclass(types[key]):
                continue  # what is wrong below it has been removed there
        if problems.count > before:
            del value[key]


def _names_code(path: str, place: Place) -> ConfigError:
    return ConfigError("{place}: '_target_' is not allowed: a config never names code to run.", place=place(path))


def _check_free(value: Any, path: str, place: Place) -> None:
    """In a free section too nothing may name code or call a resolver."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if key == "_target_":
                raise _names_code(path, place)
            if not isinstance(key, str):
                raise unknown_key(f"{path}.{key}", place)
            _check_free(inner, f"{path}.{key}", place)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            _check_free(inner, f"{path}[{index}]", place)
    elif isinstance(value, str):
        _is_interpolation(value, path, place)
    elif value is not None and not isinstance(value, (bool, int, float)):
        raise _wrong(path, value, tr("a text"), place)


def _is_interpolation(value: str, path: str, place: Place) -> bool:
    """Return whether the value refers to another key; refuse `${resolver:…}`, which could read the environment."""
    # What is left without every plain ${other.key} may hold no "${": `${${x}:HOME}` would be a resolver too.
    if "${" in re.sub(r"\$\{[\w.\[\]]+\}", "", value):
        raise ConfigError(
            "{place}: '{key}' = {value}: only ${{other.key}} is allowed.", place=place(path), key=path, value=value
        )
    return "${" in value


def _scalar(value: Any, kind: Any, path: str, place: Place) -> Any:
    """Return a single value in its type."""
    if isinstance(kind, type) and issubclass(kind, Enum):
        if isinstance(value, str) and value in kind.__members__:
            return kind[value]
        error = tr(
            "{place}: '{key}' = {value} must be one of: {choices}.",
            place=place(path),
            key=path,
            value=value,
            choices=", ".join(kind.__members__),
        )
        raise about(path, joined(error, did_you_mean(str(value), kind.__members__)))
    if value is None or isinstance(value, (dict, list)):
        raise _wrong(path, value, _described(kind), place)
    if kind in (int | str, bool | str):  # a value, or the word for one that is found
        if value == AUTO:
            return value
        if isinstance(value, str):
            raise _wrong(path, value, _described(kind), place)
    try:
        return _NODES[kind](value=value)._value()
    except ValidationError as error:
        wanted = _described(kind)
        if kind is int and isinstance(value, float) and value.is_integer():
            wanted += " " + tr("(write {number})", number=int(value))
        raise _wrong(path, value, wanted, place) from error


def _described(kind: Any) -> str:
    words = {int: tr("a whole number"), float: tr("a number"), bool: tr("true or false"), str: tr("a text")}
    words[int | str] = tr("a whole number or auto")  # type: ignore[index]
    words[bool | str] = tr("true, false or auto")  # type: ignore[index]
    return words.get(kind) or ", ".join(kind.__members__)


def _wrong(path: str, value: Any, wanted: str, place: Place) -> ConfigError:
    shown = "null" if value is None else value
    return about(
        path,
        tr("{place}: '{key}' = {value} must be {wanted}.", place=place(path), key=path, value=shown, wanted=wanted),
    )


_PROGRAMS = ("chatglm", "hf", "factory")


def other_names() -> dict[str, str]:
    """Return what is not in the tables of `toolkit import-config`: another program's name -> our keys for it."""
    found: dict[str, str] = read_table("config/other_names.yaml")
    return found


@cache
def foreign_names() -> dict[str, tuple[str, ...]]:
    """Return another program's name -> our keys for it."""
    found = {name: key.to for program in _PROGRAMS for name, key in keys_of(program).items() if key.to}
    return {name: tuple(keys.split(", ")) for name, keys in (found | other_names()).items()}


def our_keys(path: str, is_key: Callable[[str], bool]) -> tuple[str, ...]:
    """Return our keys for another program's path: for the whole of it, within its section, or by its last part."""
    section, _, rest = path.partition(".")
    inside = tuple(f"{ours}.{rest}" for ours in foreign_names().get(section, ()) if rest and is_key(f"{ours}.{rest}"))
    return foreign_names().get(path) or inside or foreign_names().get(path.rpartition(".")[2], ())


def is_foreign(name: str) -> bool:
    """Return whether another program has an argument of this name."""
    return any(name in keys_of(program) for program in _PROGRAMS)
