"""Checks a tree of values against the schema: unknown keys, wrong types."""

import dataclasses
import math
import re
import typing
from collections.abc import Callable
from enum import Enum
from typing import Any

from omegaconf.errors import ValidationError
from omegaconf.nodes import BooleanNode, FloatNode, IntegerNode, StringNode

from toolkit.config.dotted_keys import types_of, was_removed_and_off
from toolkit.config.schema import AUTO, LARGEST_NUMBER, RunConfig
from toolkit.messages import ConfigError, Problems, joined, shortened, shortlist, tr

_LONGEST_VALUE = 40
Locator = Callable[[str], str]
"""Dotted path -> its location: "recipes/x.yaml:3" or "command line"."""
_OR_AUTO = (int | str, bool | str)
"""Types of keys that take a value or "auto"."""
_SCALARS: dict[Any, tuple[Any, Callable[[], str]]] = {
    int: (IntegerNode, lambda: tr("a whole number")),
    float: (FloatNode, lambda: tr("a number")),
    bool: (BooleanNode, lambda: tr("true or false")),
    str: (StringNode, lambda: tr("a text")),
    int | str: (IntegerNode, lambda: tr("a whole number or auto")),
    bool | str: (BooleanNode, lambda: tr("true, false or auto")),
    int | float: (FloatNode, lambda: tr("a number")),
}
"""Type of a scalar field -> OmegaConf's node that converts what YAML holds to it, or raises ValidationError; and what
messages call such a value."""


def field_type(path: str) -> Any:
    """Return the type of a dotted key of the schema, None for an unknown key; Any below `ds_extra`."""
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


class TreeReader:
    """Reads a tree of values by the schema. Errors go to `problems`; wrong values are removed from their sections."""

    def __init__(self, locate: Locator, problems: Problems, *, is_resolved: bool = False) -> None:
        self.locate, self.problems, self.is_resolved = locate, problems, is_resolved
        self.leaves: list[str] = []
        """Dotted keys of the valid values that were read; a list is one value."""

    def read(self, value: Any, kind: Any, path: str = "") -> tuple[bool, Any]:
        """Return whether a value at the dotted key `path` is right, and the value in its type `kind` of the schema,
        None if it is wrong. A reference to another key stays a text until it is resolved.
        """
        if dataclasses.is_dataclass(kind) and isinstance(value, dict):
            return self._section(value, kind, path)
        is_right, result = self.problems.attempt(self._value, value, kind, path) or (False, None)
        if is_right:
            is_free_section = typing.get_origin(kind) is dict and isinstance(value, dict)  # such as ds_extra
            self.leaves += [f"{path}.{key}" for key in value] if is_free_section else [path]
        return is_right, result

    def _section(self, value: dict[Any, Any], kind: Any, path: str) -> tuple[bool, Any]:
        """Return whether all of a section is right, and its right keys as an instance of its class. Wrong keys are
        deleted from `value`, as the caller merges that tree later.
        """
        types, result, is_all_right = types_of(kind), dict[str, Any](), True
        for key, inner in list(value.items()):
            key_path = f"{path}.{key}" if path else str(key)
            if key not in types:
                del value[key]
                if not was_removed_and_off(key_path, inner):
                    is_all_right = False
                    self.problems.add_lazily(_target_error if key == "_target_" else unknown_key, key_path, self.locate)
                continue
            is_right, right_value = self.read(inner, types[key], key_path)
            is_all_right = is_all_right and is_right
            is_section = isinstance(inner, dict) and dataclasses.is_dataclass(types[key])
            if is_right or is_section:  # a section with errors has lost its wrong keys already
                result[key] = right_value
            else:
                del value[key]
        return is_all_right, kind(**result)

    def _value(self, value: Any, kind: Any, path: str) -> tuple[bool, Any]:
        """Return whether all of a value that is no section is right, and the value in its type; ConfigError if it has
        another type.
        """
        if isinstance(value, str) and not self.is_resolved and "${" in value:
            _check_calls_no_resolver(value, path, self.locate)
            return True, value  # it refers to another key
        origin, type_arguments = typing.get_origin(kind), typing.get_args(kind)
        if origin is list:
            return self._list(value, type_arguments[0], path)
        is_section = origin is dict or dataclasses.is_dataclass(kind)
        if is_section and not isinstance(value, dict):
            raise _wrong_value(path, value, tr("a section of keys"), self.locate)
        if origin is not dict and kind is not Any:
            return True, _scalar(value, kind, path, self.locate)
        if not self.is_resolved:
            _check_free_section(value, path, self.locate)
        if kind is Any or type_arguments[1] is Any:
            return True, value
        value_kind = type_arguments[1]
        return True, {name: self._value(item, value_kind, f"{path}.{name}")[1] for name, item in value.items()}

    def _list(self, value: Any, kind: Any, path: str) -> tuple[bool, list[Any]]:
        """Return whether all items of a list are right, and the items in their type `kind`; ConfigError for no list. A
        text alone is one item, without brackets.
        """
        if isinstance(value, str) and (kind is str or issubclass(kind, Enum)):
            value = [value]
        if not isinstance(value, list):
            raise _wrong_value(path, value, tr("a list, for example [a, b]"), self.locate)
        reader = TreeReader(self.locate, self.problems, is_resolved=self.is_resolved)  # its leaves are not keys
        items = [reader.read(item, kind, f"{path}[{index}]") for index, item in enumerate(value)]
        return all(is_right for is_right, _ in items), [item for _, item in items]


def error_about(sentence: str, *keys: str) -> ConfigError:
    """Return an error with the `keys` that it is about."""
    error = ConfigError(sentence)
    error.keys = keys
    return error


def unknown_key(path: str, locate: Locator) -> ConfigError:
    """Return the error for an unknown key, with the keys that were probably meant."""
    from toolkit.config import suggest  # its tables are read in errors alone

    return suggest.unknown_key(path, locate)


def members(section: str) -> list[str]:
    """Return the keys of a section of the schema ("": the top), or of the items of a list; [] for anything else."""
    kind = field_type(section) if section else RunConfig
    if typing.get_origin(kind) is list:
        kind = typing.get_args(kind)[0]
    return list(types_of(typing.cast("type", kind))) if dataclasses.is_dataclass(kind) else []


def _target_error(path: str, locate: Locator) -> ConfigError:
    """Return the error for a `_target_`."""
    return ConfigError("{place}: '_target_' is not allowed: a config never names code to run.", place=locate(path))


def _check_free_section(value: Any, path: str, locate: Locator) -> None:
    """Raise ConfigError if a value in a free section, such as ds_extra, names code, calls a resolver, has a key that is
    no text or is no JSON.
    """
    if isinstance(value, dict):
        for key, inner in value.items():
            if key == "_target_":
                raise _target_error(f"{path}.{key}", locate)
            if not isinstance(key, str):
                raise unknown_key(f"{path}.{key}", locate)
            _check_free_section(inner, f"{path}.{key}", locate)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            _check_free_section(inner, f"{path}[{index}]", locate)
    elif isinstance(value, str):
        _check_calls_no_resolver(value, path, locate)
    elif value is not None and not isinstance(value, (bool, int, float)):
        raise _wrong_value(path, value, tr("a text"), locate)


def _check_calls_no_resolver(value: str, path: str, locate: Locator) -> None:
    """Raise ConfigError for `${resolver:…}`, OmegaConf's functions, of which one reads the environment."""
    # Without every plain ${other.key} the text may have no "${": `${${x}:HOME}` would be a resolver too.
    if "${" in re.sub(r"\$\{[\w.\[\]]+\}", "", value):
        raise ConfigError(
            "{place}: '{key}' = {value}: only ${{other.key}} is allowed.", place=locate(path), key=path, value=value
        )


def _enum_member(value: Any, kind: type[Enum], path: str, locate: Locator) -> Enum:
    """Return the member of an enum that a value names; ConfigError if it names none."""
    if isinstance(value, str) and value in kind.__members__:
        return kind[value]
    sentence = tr(
        "{place}: '{key}' = {value} must be one of: {choices}.",
        place=locate(path),
        key=path,
        value=value,
        choices=shortlist(kind.__members__, tr("docs/config.md")),
    )
    from toolkit.config.suggest import choice_meant  # read in errors alone

    raise error_about(joined(sentence, choice_meant(path, str(value), kind.__members__)), path)


def _scalar(value: Any, kind: Any, path: str, locate: Locator) -> Any:
    """Return the value of the scalar key `path` in the type `kind` of its field, as YAML and the command line convert
    it; ConfigError if it cannot be converted, or is a number too large to compute with.
    """
    if kind not in _SCALARS:
        return _enum_member(value, kind, path, locate)
    if kind in _OR_AUTO and value == AUTO:
        return value
    node, describe = _SCALARS[kind]
    try:
        # OmegaConf would take null for any type; and of a key that may be auto another text is no number, not even "3".
        if value is None or isinstance(value, (dict, list)) or (kind in _OR_AUTO and isinstance(value, str)):
            raise ValidationError
        result = node(value=value)._value()  # converted: "5e-5" is 5e-05 for a FloatNode
    except ValidationError as error:
        wanted = describe()
        if kind is int and isinstance(value, float) and value.is_integer():
            wanted += " " + tr("(write {number})", number=int(value))
        raise _wrong_value(path, value, wanted, locate) from error
    if kind == int | float and result.is_integer():
        result = int(result)
    if isinstance(result, (int, float)) and LARGEST_NUMBER < abs(result) < math.inf:  # rules reject infinity and NaN
        limits = tr("a number from {least} to {most}", least=-LARGEST_NUMBER, most=LARGEST_NUMBER)
        raise _wrong_value(path, shortened(value, _LONGEST_VALUE), limits, locate)
    return result


def _wrong_value(path: str, value: Any, wanted: str, locate: Locator) -> ConfigError:
    """Return the error for the value of a key that is not what it must be; `wanted`: that, such as "a number"."""
    shown = "null" if value is None else value
    from toolkit.config.suggest import wide_advice  # read in errors alone

    text = tr("{place}: '{key}' = {value} must be {wanted}.", place=locate(path), key=path, value=shown, wanted=wanted)
    return error_about(joined(text, wide_advice(str(value))), path)
