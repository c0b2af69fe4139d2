"""What a key of another program becomes here: the rows of the tables that translate configs, and of their docs."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Key:
    """One key of another program."""

    default: Any = None
    """What it means there when it is not given; a config that says the same needs no word."""
    to: str = ""
    """Our keys, joined by ", "; "" where there is none."""
    says: str = ""
    """Name of the sentence about it (`sentences`): what differs here, or why there is no such key."""
    made: bool = False
    """Its value is computed together with others, not copied."""
    is_harmless: bool = False
    """Leaving it out changes nothing that is trained, so it is not counted as lost."""


def same(to: str, default: Any = None, says: str = "") -> Key:
    """Return a key whose value is copied."""
    return Key(default=default, to=to, says=says)


def made(to: str, default: Any = None, says: str = "") -> Key:
    """Return a key from which, with others, one or several of ours are computed."""
    return Key(default=default, to=to, says=says, made=True)


def none(says: str, *names: str, **defaults: Any) -> dict[str, Key]:
    """Return keys without a counterpart, for one reason; names have the default None."""
    return {name: Key(default=default, says=says) for name, default in (dict.fromkeys(names) | defaults).items()}


def idle(says: str, *names: str, **defaults: Any) -> dict[str, Key]:
    """Return keys without a counterpart that change nothing of what is trained."""
    return {
        name: Key(default=default, says=says, is_harmless=True)
        for name, default in (dict.fromkeys(names) | defaults).items()
    }
