"""The rows of CSV files."""

import csv
import io
from collections.abc import Generator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from toolkit.data.readers import BOM, LARGEST_LINE_BYTES
from toolkit.data.rows import first_repeated
from toolkit.messages import DataError

csv.field_size_limit(LARGEST_LINE_BYTES)


def csv_rows(file: io.BufferedReader, path: Path, usual: str) -> Generator[tuple[int, Any]]:
    """Yield (line number, row as a dict by the header's names) of a CSV file whose columns are
    separated by `usual`, unless the first line shows another mark; a DataError if it is broken.
    """
    read = 0  # lines so far; a quoted value may take several

    def lines() -> Iterator[str]:
        nonlocal read
        for content in file:
            read += 1
            # A byte that is not UTF-8 becomes half of a character, which is refused row by row.
            yield (content.removeprefix(BOM) if read == 1 else content).decode("utf-8", "surrogateescape")

    reader = csv.DictReader(lines(), delimiter=_delimiter(file, usual), strict=True)
    line = 1
    try:
        names = list(reader.fieldnames or ())
        if len(set(names)) != len(names):
            twice = first_repeated(names)
            raise DataError("{path}:1: two columns are called '{name}'. Rename one.", path=path, name=twice)
        line = read
        for row in reader:
            yield line + 1, row
            line = read
    except csv.Error as error:
        raise DataError(
            "{path}:{line}: broken CSV: {reason}. Correct the file.", path=path, line=line + 1, reason=error
        ) from None


def _delimiter(file: io.BufferedReader, usual: str) -> str:
    """Return a CSV file's column separator: `usual`, unless the first line contains another one and not this."""
    first = file.peek(4096)[:65536].removeprefix(BOM).decode("utf-8", "replace").partition("\n")[0].strip()
    counts = dict.fromkeys((usual, ",", ";", "\t", "|"), 1)
    for mark in counts:
        with suppress(csv.Error):  # a lone carriage return, of which the reader of the rows says so with its line
            counts[mark] = len(next(csv.reader([first], delimiter=mark), ()))
    return usual if counts[usual] > 1 else max(counts, key=lambda mark: counts[mark])
