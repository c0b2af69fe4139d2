"""What a key of another program becomes here (keys.yaml): for translating configs, and for the tables of the docs."""

from dataclasses import dataclass
from functools import cache
from typing import Any

from toolkit.messages import read_table, translated


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


@cache
def _table() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = read_table("translate/keys.yaml")
    return found


@cache
def keys_of(program: str) -> dict[str, Key]:
    """Return a program's keys by name."""
    own = {name: Key(**row) for name, row in _table()[program].items()}
    return own if program == "trainer" else keys_of("trainer") | own


def sentence(name: str) -> str:
    """Return a sentence by its name in the tables, in the user's language; "" for none."""
    return translated(_table()["sentences"][name]) if name else ""
