"""All errors at once, so that a user corrects a config in one go instead of one error per attempt."""

import re
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from toolkit.errors import ConfigError, ToolkitError
from toolkit.messages import tr

T = TypeVar("T")

MOST = 50
"""Errors that are told; further ones are counted: who made thousands of them made one mistake."""


class Problems:
    """Errors found so far."""

    def __init__(self) -> None:
        self.errors: list[ToolkitError] = []
        self.more = 0
        """Further ones."""
        self._texts: set[str] = set()
        self._doubtful: set[str] = set()

    @property
    def count(self) -> int:
        """All errors so far."""
        return len(self.errors) + self.more

    def add_made(self, make: Callable[..., ToolkitError], *arguments: Any) -> None:
        """Keep an error that takes time to make, or count it where no more are told."""
        if len(self.errors) < MOST:
            self.add(make(*arguments))
        else:
            self.more += 1

    def attempt(self, function: Callable[..., T], *arguments: Any) -> T | None:
        """Call a function; return its result, or None where it raised an error, which is kept.

        Where something is wrong already, any other exception follows from it: a rule met a value that cannot be.
        """
        try:
            return function(*arguments)
        except ToolkitError as error:
            self.add(error)
        except Exception:
            if not self.errors:
                raise
        return None

    def apply(self, rules: Iterable[Callable[..., Iterable[ToolkitError]]], *arguments: Any) -> None:
        """Call every rule with the same arguments; keep all errors that it yields."""

        def keep(rule: Callable[..., Iterable[ToolkitError]]) -> None:
            for error in rule(*arguments):
                self.add(error)

        for rule in rules:
            self.attempt(keep, rule)

    def add(self, error: ToolkitError) -> None:
        """Keep an error, unless it is known already or follows from a value that is wrong anyway; see `settle`."""
        self.more += error.more
        for one in error.parts or (error,):
            text = str(one)
            if text in self._texts or any(_mentions(text, key) for key in self._doubtful):
                continue
            if len(self.errors) < MOST:
                self._texts.add(text)
                self.errors.append(one)
            else:
                self.more += 1

    def settle(self) -> None:
        """From here on skip errors that mention a key which an error so far is about: its value is not known."""
        self._doubtful |= {key for error in self.errors for key in error.keys if key}

    def raise_all(self) -> None:
        """Raise what was found, as one error."""
        if not self.errors:
            return
        if self.count == 1:
            raise self.errors[0]
        kinds = {type(error) for error in self.errors}
        lines = [f"{number}. " + str(error).replace("\n", "\n   ") for number, error in enumerate(self.errors, start=1)]
        kind = kinds.pop() if len(kinds) == 1 else ConfigError
        lines += [tr("… and {count} more.", count=f"{self.more:,}")] if self.more else []
        joined = kind("\n".join([tr("{count} errors:", count=self.count), *lines]))
        joined.parts, joined.more = tuple(self.errors), self.more
        raise joined


def raise_all(errors: Iterable[ToolkitError]) -> None:
    """Raise all of some errors as one."""
    problems = Problems()
    for error in errors:
        problems.add(error)
    problems.raise_all()


def _mentions(text: str, key: str) -> bool:
    """Return whether a message is about a key; a section's name may also be an ordinary word."""
    end = r"(?!\w)" if "." in key else r"(?=\.\w|=| = |\[)"
    return re.search(rf"(?<![\w.]){re.escape(key)}{end}", text) is not None
