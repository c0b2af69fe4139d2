"""Data files to rows. JSONL is read line by line, so its size does not matter; a JSON array is read whole.

Every row that cannot be used is reported as "file:line: reason. What to do.", so that it can be found in an editor.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import IO, NoReturn

from toolkit.config.schema import DataConfig, OnBadRow, RowFormat, SourceConfig
from toolkit.data import docstrings
from toolkit.data.conversation import (
    Row,
    as_object,
    detect_format,
    to_messages,
)
from toolkit.errors import DataError, RowError
from toolkit.messages import tr

_BOM = b"\xef\xbb\xbf"
_EXAMPLES = 5


@dataclass(slots=True)
class BadRows:
    """Rows that were left out under `data.on_bad_row=skip`: how many, and the first few."""

    count: int = 0
    examples: list[str] = field(default_factory=list)

    def add(self, message: str) -> None:
        """Count one more; `message` says where and why."""
        self.count += 1
        if len(self.examples) < _EXAMPLES:
            self.examples.append(message)


def read_training_rows(
    data: DataConfig,
    cache_dir: Path,
    say: Callable[[str], None],
    bad_rows: BadRows | None = None,
) -> Iterator[Row]:
    """Yield the rows of `data.sources`, the first `data.max_samples` of them if that is given.

    Args:
        data: the recipe's section.
        cache_dir: where derived data (docstrings) is kept.
        say: receives messages about waiting.
        bad_rows: collects what is left out under `data.on_bad_row=skip`.

    Raises:
        DataError: see `read_rows`; also when there is no source.
    """
    if not data.sources:
        raise DataError(tr("data.sources is empty: name at least one .json or .jsonl file under data.sources."))
    rows = read_rows(data.sources, data.on_bad_row, cache_dir, say, bad_rows)
    return islice(rows, data.max_samples or None)


def read_rows(
    sources: Sequence[SourceConfig],
    on_bad_row: OnBadRow,
    cache_dir: Path,
    say: Callable[[str], None],
    bad_rows: BadRows | None = None,
) -> Iterator[Row]:
    """Yield the rows of several files, one file after another.

    Args:
        sources: the files and their formats.
        on_bad_row: error stops at the first row that cannot be used, skip leaves it out.
        cache_dir: where derived data (docstrings) is kept.
        say: receives messages about waiting.
        bad_rows: collects what skip leaves out.

    Raises:
        DataError: a file is missing, empty or unreadable, a row cannot be used, or a file has no usable row.
    """
    bad_rows = BadRows() if bad_rows is None else bad_rows
    for source in sources:
        path, row_format = locate(source, cache_dir, say)
        before, used = bad_rows.count, 0
        for row in _FileReader(path, row_format, on_bad_row, bad_rows).rows():
            used += 1
            yield row
        if not used:
            raise DataError(
                tr(
                    "{path} holds no row that can be used ({count} were refused). {examples}",
                    path=path,
                    count=bad_rows.count - before,
                    examples="\n".join(["", *bad_rows.examples]),
                ).rstrip()
            )


def locate(source: SourceConfig, cache_dir: Path, say: Callable[[str], None]) -> tuple[Path, RowFormat]:
    """Return the file of a source, derived first if need be, and the format of its rows.

    Raises:
        DataError: there is no such file, or it is empty.
    """
    if source.format is RowFormat.docstrings:
        return docstrings.pairs_file(cache_dir, say), RowFormat.prompt_response
    path = Path(source.path)
    if not source.path or not path.exists():
        raise DataError(
            tr(
                "There is no data file '{path}' (looked in {folder}). Correct `path` under data.sources or "
                "data.validation.",
                path=source.path,
                folder=Path.cwd(),
            )
        )
    if not path.is_file():
        raise DataError(
            tr(
                "'{path}' is a folder, not a file: name one .json or .jsonl file.",
                path=path,
            )
        )
    if path.stat().st_size == 0:
        raise DataError(tr("The data file '{path}' is empty.", path=path))
    return path, source.format


def content_hash(path: Path) -> str:
    """Return the SHA-256 of a file's bytes.

    Raises:
        DataError: the file cannot be read.
    """
    digest = hashlib.sha256()
    with _opened(path) as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


class _FileReader:
    """Reads one file. The format is found at the first row if it is not given."""

    def __init__(self, path: Path, row_format: RowFormat, on_bad_row: OnBadRow, bad_rows: BadRows) -> None:
        self.path, self.row_format, self.on_bad_row, self.bad_rows = (
            path,
            row_format,
            on_bad_row,
            bad_rows,
        )

    def rows(self) -> Iterator[Row]:
        """Yield the usable rows."""
        with _opened(self.path) as file:
            head = file.read(4096).removeprefix(_BOM).lstrip()
            file.seek(0)
            # Decided by content, not by name: JSONL in a .json file is common, and so is the opposite.
            values = self._array(file) if head.startswith(b"[") else self._lines(file)
            for number, value in values:
                try:
                    yield self._row(number, value)
                except RowError as error:
                    self._refuse(number, error)

    def _row(self, number: int, value: object) -> Row:
        if self.row_format is RowFormat.auto:
            row = as_object(value)
            try:
                self.row_format = detect_format(row)
            except RowError as error:  # the whole file is meant, so skipping rows would not help
                self._stop(number, error)
        return Row(to_messages(value, self.row_format), f"{self.path}:{number}")

    def _lines(self, file: IO[bytes]) -> Iterator[tuple[int, object]]:
        """Yield line number and value of each line. Split at the newline byte only: U+2028 may stand inside a text."""
        for number, line in enumerate(file, start=1):
            if number == 1:
                line = line.removeprefix(_BOM)
            if not line.strip():
                continue
            try:
                value = _DECODER.decode(line.decode("utf-8"))
            except (ValueError, RecursionError) as error:
                self._refuse(number, _reason(error))
                continue
            yield number, value

    def _array(self, file: IO[bytes]) -> Iterator[tuple[int, object]]:
        """Yield line number and value of each item. What is broken cannot be stepped over, so it always stops."""
        try:
            text = file.read().removeprefix(_BOM).decode("utf-8")
        except UnicodeDecodeError as error:
            self._stop(error.object.count(b"\n", 0, error.start) + 1, _reason(error))
        position = _after_space(text, 0) + 1
        line, counted, first = 1, 0, True
        try:
            while True:
                position = _after_space(text, position)
                if text.startswith("]", position) and first:
                    break
                line, counted = line + text.count("\n", counted, position), position
                value, position = _DECODER.raw_decode(text, position)
                yield line, value
                position, first = _after_space(text, position), False
                if text.startswith("]", position):
                    break
                if not text.startswith(",", position):
                    raise json.JSONDecodeError("Expecting ',' or ']'", text, position)
                position += 1
            position = _after_space(text, position + 1)
            if position < len(text):
                raise json.JSONDecodeError("Extra data", text, position)
        except (ValueError, RecursionError) as error:
            self._stop(
                error.lineno if isinstance(error, json.JSONDecodeError) else line,
                _reason(error),
            )

    def _refuse(self, number: int, error: RowError) -> None:
        """Stop at the row or count it, as `data.on_bad_row` says."""
        if self.on_bad_row is OnBadRow.error:
            mend = tr("Such rows are left out and counted with data.on_bad_row=skip.")
            raise DataError(f"{self.path}:{number}: {error}. {mend}")
        self.bad_rows.add(f"{self.path}:{number}: {error}.")

    def _stop(self, number: int, error: RowError) -> NoReturn:
        raise DataError(f"{self.path}:{number}: {error}.")


def _refuse_constant(name: str) -> NoReturn:
    """Refuse NaN and Infinity, which Python's reader would take although JSON has no such numbers."""
    raise ValueError(tr("{name} is no JSON value", name=name))


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)
_SPACE = re.compile(r"[ \t\n\r]*")


def _after_space(text: str, position: int) -> int:
    """Return the position of the next character that is not JSON's white space."""
    match = _SPACE.match(text, position)
    return match.end() if match else position


def _reason(error: ValueError | RecursionError) -> RowError:
    """Return why bytes could not be read as JSON; positions count from 1 within the line."""
    if isinstance(error, UnicodeDecodeError):
        content, start = error.object, error.start
        return RowError(
            tr(
                "not UTF-8: byte 0x{byte} at position {position} of the line. If the file is in {encoding}, convert it "
                "with `iconv -f {encoding} -t UTF-8`",
                byte=f"{content[start]:02x}",
                position=start - content.rfind(b"\n", 0, start),
                encoding="UTF-16" if content[:2] in (b"\xff\xfe", b"\xfe\xff") else "GBK",
            )
        )
    if isinstance(error, json.JSONDecodeError):
        return RowError(
            tr(
                "broken JSON at column {column}: {reason}. A file holds one {{…}} per line, or one list [{{…}}, …]",
                column=error.colno,
                reason=error.msg,
            )
        )
    if isinstance(error, RecursionError):
        return RowError(tr("the JSON is nested too deeply. Correct or remove the row"))
    return RowError(tr("broken JSON: {reason}. Correct or remove the row", reason=error))


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    """Open a data file.

    Raises:
        DataError: it cannot be read.
    """
    try:
        with open(path, "rb") as file:
            yield file
    except OSError as error:
        raise DataError(
            tr(
                "Cannot read '{path}': {reason}.",
                path=path,
                reason=error.strerror or error,
            )
        ) from error
