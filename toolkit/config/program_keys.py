"""Keys of other programs, and what becomes of each here (program_keys.yaml): import-config converts them, and a config
that uses one by mistake is told ours.
"""

from dataclasses import dataclass, replace
from functools import cache, partial
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
    """Name of the sentence about it in program_keys.yaml: what differs here, or why there is no such key."""
    made: bool = False
    """Its value is computed together with others, not copied."""
    same_as: str = ""
    """The Trainer's or TRL's name of it: it is read as that, with this default."""
    is_harmless: bool = False
    """Leaving it out changes nothing that is trained, so it is not counted as lost."""


_table = cache(partial(read_table, "config/program_keys.yaml"))


@cache
def keys_of(program: str) -> dict[str, Key]:
    """Return a program's keys by name, and those of transformers' Trainer, on which others are built. A key that is
    `same_as` one of the Trainer's or TRL's (table "hf") means the same, with its own default, and both names are keys.
    """
    keys = {name: Key(**row) for name, row in _table()[program].items()}
    for name, key in [*keys.items()]:
        if key.same_as:
            theirs = keys_of("hf")[key.same_as]
            meaning = replace(theirs, default=key.default, says=key.says or theirs.says, same_as="")
            keys[key.same_as] = meaning
            keys[name] = replace(meaning, same_as=key.same_as)  # by which import-config reads it under that name
    return keys if program == "trainer" else keys_of("trainer") | keys


def own_names(program: str) -> list[str]:
    """Return the keys of a program's own table, as it spells them."""
    return list(_table()[program])


def names_of(what: str) -> dict[str, Any]:
    """Return a table of program_keys.yaml by its name, of values: the other program's -> ours."""
    names: dict[str, Any] = _table()["names"][what]
    return names


def sentence(name: str) -> str:
    """Return a sentence by its name in the tables, in the user's language; "" for none."""
    return translated(_table()["sentences"][name]) if name else ""
