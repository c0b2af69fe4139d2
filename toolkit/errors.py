"""How several errors become one message, and what is said of another library's or the system's."""

import errno
import json
import os
import pwd
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from toolkit.messages import ConfigError, RowError, ToolkitError, joined, tr

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


_LARGEST_JSON_BYTES = 256 << 20
"""Of a file that is one JSON object; the largest in use are tokenizers and the indices of weights, below 64 MiB."""
_REASON_CHARS = 300


@contextmanager
def reading(file: Path | str, error: type[ToolkitError], mend: str = "") -> Iterator[None]:
    """Turn whatever the body raises while it reads a file into one message.

    The body holds calls of libraries on the file and little else, so that no mistake of ours hides in it. `mend`: a
    sentence that says what to do. An error that already names its position passes.
    """
    try:
        yield
    except (ToolkitError, RowError):
        raise
    except BaseException as problem:
        if not is_failure(problem):
            raise
        text = tr("Cannot read '{path}': {reason}.", path=file, reason=reason_of(problem))
        raise error(joined(text, mend)) from problem


def is_failure(problem: BaseException) -> bool:
    """Whether something went wrong, rather than that the process is to end.

    A panic of a Rust library (tokenizers, safetensors) is no Exception (pyo3 0.26).
    """
    return isinstance(problem, Exception) or type(problem).__name__ == "PanicException"


def reason_of(problem: BaseException) -> str:
    """Return what went wrong in one line."""
    if isinstance(problem, RecursionError):
        return tr("it is nested too deeply")
    if isinstance(problem, MemoryError):
        return tr("it needs more memory than there is")
    if isinstance(problem, OSError) and problem.strerror:
        return problem.strerror
    if isinstance(problem, KeyError):
        return tr("no key '{key}'", key=str(problem.args[0]) if problem.args else "")
    lines = str(problem).strip().splitlines()
    reason = lines[0][:_REASON_CHARS].rstrip(".") if lines else ""
    return reason or type(problem).__name__


def system_text(error: OSError) -> str:
    """Return what to say of a system's error: the file, and whose it is where this user may not use it."""
    if error.filename is None:
        return str(error)
    file, reason = os.fsdecode(error.filename), error.strerror or ""
    if error.errno in (errno.EACCES, errno.EPERM):
        path = Path(file).absolute()
        for place in (path, *path.parents):
            with suppress(OSError):  # hidden by a directory above
                found = place.stat()
                return tr(
                    "{file}: {reason}. {place} belongs to user {owner} (mode {mode}), and this process runs as user "
                    "{user}. Ask for access, or choose another directory: run.dir, prepare.dir, data.sources, "
                    "model.path or TMPDIR.",
                    file=file,
                    reason=reason,
                    place=place,
                    owner=user_name(found.st_uid),
                    mode=f"{found.st_mode & 0o7777:o}",
                    user=user_name(os.geteuid()),
                )
    return tr("{file}: {reason}.", file=file, reason=reason)


def user_name(number: int) -> str:
    """Return a user's name; the number where it has none, as in containers."""
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


def json_object(file: Path, error: type[ToolkitError]) -> dict[str, Any]:
    """Return the JSON object in a file."""
    with reading(file, error):
        size = file.stat().st_size
        if size > _LARGEST_JSON_BYTES:
            raise ValueError(tr("{size} MiB are too many for one JSON object", size=size >> 20))
        content = file.read_text(encoding="utf-8-sig")
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as problem:
        raise error(tr("{file} is not JSON: {reason}", file=file, reason=reason_of(problem))) from problem
    if not isinstance(value, dict):
        raise error(tr("{file} is not a JSON object.", file=file))
    return value
