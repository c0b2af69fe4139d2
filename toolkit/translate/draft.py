"""What another program's config says, and our settings that come of it; keys.yaml has what becomes of each key."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

from toolkit.messages import ConfigError, read_table, translated


@dataclass(frozen=True, slots=True)
class Key:
    """One key of another program."""

    default: Any = None
    """What it means there when it is not given; a config that says the same needs no word."""
    to: str = ""
    """Our keys, joined by ", "; "" where there is none."""
    says: str = ""
    """Name of the sentence about it in keys.yaml: what differs here, or why there is no such key."""
    made: bool = False
    """Its value is computed together with others, not copied."""
    is_harmless: bool = False
    """Leaving it out changes nothing that is trained, so it is not counted as lost."""


_table = cache(partial(read_table, "translate/keys.yaml"))


@cache
def keys_of(program: str) -> dict[str, Key]:
    """Return a program's keys by name."""
    own = {name: Key(**row) for name, row in _table()[program].items()}
    return own if program == "trainer" else keys_of("trainer") | own


def names_of(what: str) -> dict[str, Any]:
    """Return a table of names of values: the other program's -> ours."""
    found: dict[str, Any] = _table()["names"][what]
    return found


def sentence(name: str) -> str:
    """Return a sentence by its name in the tables, in the user's language; "" for none."""
    return translated(_table()["sentences"][name]) if name else ""


@dataclass(kw_only=True, slots=True)
class ForeignConfig:
    """One config of another program, read and not yet understood."""

    program: str
    """Whose config it is, as a person says it."""
    keys: Mapping[str, Key]
    """All keys of that program."""
    shown: str
    """The file, as messages name it."""
    folder: Path
    """Where it lies: paths in it may be relative to that."""
    values: dict[str, Any]
    """What it gives, without nulls."""
    lines: dict[str, int] = field(default_factory=dict)
    """Line of each key, where known."""
    world_size: int | None = None
    """Number of ranks that it is started on."""

    def get(self, name: str) -> Any:
        """Return a key's value, the program's default where it is not given."""
        value = self.values.get(name)
        return self.keys[name].default if value is None else value

    def has(self, name: str) -> bool:
        """Say whether a key is given."""
        return self.values.get(name) is not None

    def place(self, name: str) -> str:
        """Return "file:line" of a key, or the file."""
        line = self.lines.get(name)
        return f"{self.shown}:{line}" if line else self.shown

    def number(self, name: str, kind: type = float) -> Any:
        """Return a key's value as a number; an error if it is none."""
        return typed(self.get(name), kind, f"{self.place(name)}: {name}")

    def flag(self, name: str) -> bool:
        """Return a key's value as true or false, false for null; an error if it is neither."""
        value = self.get(name)
        return value is not None and bool(typed(value, bool, f"{self.place(name)}: {name}"))

    def names(self, name: str) -> list[str]:
        """Return a key's value, a list or a text with commas, as a list."""
        value = self.get(name)
        listed = value if isinstance(value, list) else [] if value is None else str(value).split(",")
        return [str(item).strip() for item in listed]


@dataclass(kw_only=True, slots=True)
class RecipeDraft:
    """Settings of ours on their way into a recipe, and what there is to say about them."""

    given: ForeignConfig
    values: dict[str, tuple[Any, str]] = field(default_factory=dict)
    """Our key -> (value, the keys that it comes from; "" for a default of the other program)."""
    groups: dict[str, str] = field(default_factory=dict)
    """Groups that are chosen by name: {model: chatglm_6b}."""
    lost: dict[str, str] = field(default_factory=dict)
    """Key of the other program -> why its value cannot be had here; beside what the tables say."""
    notes: list[str] = field(default_factory=list)

    def put(self, key: str, value: Any, *sources: str) -> None:
        """Set a key of ours; of the keys that say so those that are given, none for the other program's default."""
        self.values[key] = (value, ", ".join(filter(self.given.has, sources)))


def typed(value: Any, kind: Any, place: str) -> Any:
    """Return a value of a file or a command line as a type of the schema; an error if it cannot be read as that."""
    wrong = ConfigError(
        "{place} = {value} must be of type {kind}.", place=place, value=value, kind=getattr(kind, "__name__", kind)
    )
    try:
        if kind is bool:
            return {"true": True, "false": False, "1": True, "0": False}[str(value).lower()]
        if kind in (int, float):
            number = float(value)
            if isinstance(value, bool) or (kind is int and not number.is_integer()):
                raise wrong
            return kind(number)
    except (KeyError, ValueError, TypeError, OverflowError) as error:
        raise wrong from error
    return str(value) if kind is str else value
