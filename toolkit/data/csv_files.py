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
    """Yield (number of the line where a row begins, row as a dict: column name of the header -> text) of a CSV file.
    `usual`: the separator of its columns, unless the first line shows another one. DataError if the CSV is broken.
    """
    lines_read = 0  # more than rows: a quoted value may have line breaks

    def lines() -> Iterator[str]:
        nonlocal lines_read
        for content in file:
            lines_read += 1
            # A byte that is not UTF-8 becomes a lone surrogate, for which `check_characters` rejects its row alone.
            yield (content.removeprefix(BOM) if lines_read == 1 else content).decode("utf-8", "surrogateescape")

    reader = csv.DictReader(lines(), delimiter=_delimiter(file, usual), strict=True)
    lines_before = 0  # lines of the file before the next row or, at first, the header
    try:
        names = list(reader.fieldnames or ())
        if len(set(names)) != len(names):
            twice = first_repeated(names)
            raise DataError("{path}:1: two columns are called '{name}'. Rename one.", path=path, name=twice)
        lines_before = lines_read
        for row in reader:
            yield lines_before + 1, row
            lines_before = lines_read
    except csv.Error as error:
        raise DataError(
            "{path}:{line}: broken CSV: {reason}. Correct the file.", path=path, line=lines_before + 1, reason=error
        ) from None


def _delimiter(file: io.BufferedReader, usual: str) -> str:
    """Return a CSV file's column separator: `usual` if it divides the first line (the header), else the one of comma,
    semicolon, tab and | that divides this into most columns.
    """
    start = file.peek(4096)[:65536]  # `peek` gives all that is buffered, whatever number it is asked for
    header = start.removeprefix(BOM).decode("utf-8", "replace").partition("\n")[0].strip()
    num_columns = dict.fromkeys((usual, ",", ";", "\t", "|"), 1)  # separator -> columns of the header
    for separator in num_columns:
        with suppress(csv.Error):  # a lone carriage return, of which the reader of the rows says so with its line
            num_columns[separator] = len(next(csv.reader([header], delimiter=separator), ()))
    return usual if num_columns[usual] > 1 else max(num_columns, key=num_columns.__getitem__)
