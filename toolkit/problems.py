"""All errors at once, so that a user corrects a config in one go instead of one error per attempt."""

import re
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from toolkit.errors import ConfigError, ToolkitError
from toolkit.messages import tr

T = TypeVar("T")


class Problems:
    """Errors found so far."""

    def __init__(self) -> None:
        self.errors: list[ToolkitError] = []
        self._doubtful: set[str] = set()

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
        for one in error.parts or (error,):
            text = str(one)
            if all(text != str(other) for other in self.errors) and not any(
                _mentions(text, key) for key in self._doubtful
            ):
                self.errors.append(one)

    def settle(self) -> None:
        """From here on skip errors that mention a key which an error so far is about: its value is not known."""
        self._doubtful |= {key for error in self.errors for key in error.keys if key}

    def raise_all(self) -> None:
        """Raise what was found, as one error.

        Raises:
            ToolkitError: the only error, or one whose message numbers all of them.
        """
        if not self.errors:
            return
        if len(self.errors) == 1:
            raise self.errors[0]
        kinds = {type(error) for error in self.errors}
        lines = [f"{number}. " + str(error).replace("\n", "\n   ") for number, error in enumerate(self.errors, start=1)]
        kind = kinds.pop() if len(kinds) == 1 else ConfigError
        joined = kind("\n".join([tr("{count} errors:", count=len(self.errors)), *lines]))
        joined.parts = tuple(self.errors)
        raise joined


def raise_all(errors: Iterable[ToolkitError]) -> None:
    """Raise all of some errors as one.

    Raises:
        ToolkitError: see `Problems.raise_all`.
    """
    problems = Problems()
    for error in errors:
        problems.add(error)
    problems.raise_all()


def _mentions(text: str, key: str) -> bool:
    """Return whether a message is about a key; a section's name may also be an ordinary word."""
    end = r"(?!\w)" if "." in key else r"(?=\.\w|=| = |\[)"
    return re.search(rf"(?<![\w.]){re.escape(key)}{end}", text) is not None
