"""Files of a source that are no data: empty ones in a directory, and texts that are not JSON."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path

from toolkit.config.files import DATA_SUFFIXES
from toolkit.data.rows import UTF16_MARKS
from toolkit.messages import DataError, warn

_LOOKED_AT_BYTES = 4096


def without_empty(files: Sequence[Path]) -> list[Path]:
    """Return the files that are not empty; a DataError if all are."""
    sizes = {file: file.stat().st_size for file in files}
    if not any(sizes.values()):
        raise DataError("The data file '{path}' is empty.", path=files[0])
    for file, size in sizes.items():
        if not size:
            _warn_of_empty(file)
    return [file for file, size in sizes.items() if size]


@cache
def _warn_of_empty(file: Path) -> None:
    """Print once for each file, though files are looked for several times."""
    warn("The data file '{path}' is empty: it is skipped.", path=file)


def check_is_json(file: Path) -> None:
    """Raise a DataError for a file of an unknown kind that does not begin as JSON does, such as a plain text."""
    with file.open("rb") as opened:
        start = opened.read(_LOOKED_AT_BYTES)
    content = start.removeprefix(b"\xef\xbb\xbf").lstrip()
    if content and content[:1] not in b"{[" and content[:2] not in UTF16_MARKS:
        raise DataError(
            '\'{path}\' is no data file: plain text is not a format. Write each text as a line {{"text": "…"}} of a '
            ".jsonl file. Known are {suffixes}, also with .gz or .zst.",
            path=file,
            suffixes=", ".join(DATA_SUFFIXES),
        )
