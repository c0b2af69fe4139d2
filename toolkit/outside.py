"""Files that others have written: whatever one makes a reader raise becomes one message that names the file."""

import errno
import json
import os
import pwd
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from toolkit.errors import RowError, ToolkitError
from toolkit.messages import joined, tr

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
