"""The nearest known name to a mistyped one."""

import difflib
from collections.abc import Iterable

from toolkit.messages import tr


def nearest(name: str, candidates: Iterable[str]) -> str | None:
    """Return the candidate most like `name`, None if none is like it."""
    found = difflib.get_close_matches(name, list(candidates), n=1, cutoff=0.6)
    return found[0] if found else None


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """Return "Did you mean 'x'?", or "" without a candidate that is like `name`."""
    found = nearest(name, candidates)
    return "" if found is None else tr("Did you mean '{name}'?", name=found)
