"""The rows of data files, in blocks, with line (or row) numbers. No file is held as a whole."""

import codecs
import io
import json
import re
import zlib
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any, NamedTuple

from toolkit.config.files import TABLE_SUFFIXES
from toolkit.config.schema import ROW_FIELDS, RowFormat
from toolkit.data.formats import Conversation, reader_of
from toolkit.data.rows import parse_row
from toolkit.messages import DataError, RowError, reading, reason_of, tr

BOM = b"\xef\xbb\xbf"
CHUNK_BYTES = 1 << 20
_TEXT = r'"(?:[^"\\]|\\.)*"'
MEMBER = rf"{_TEXT}\s*:\s*(?:{_TEXT}|[-+.\w]+)"
"""A key and its value, a text, a number or a constant, in a JSON object."""
_BEFORE_ROWS = re.compile(rf"\s*\{{\s*(?:{MEMBER}\s*,\s*)*({_TEXT})\s*:\s*(?=\[\s*\{{)")
"""What is around the rows in `{"version": 1, "data": [{…}, …], "count": 2}`."""

_COMPRESSED = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
LARGEST_LINE_BYTES = 1 << 28
_LEAST_BLOCK_BYTES = 1 << 20
_MOST_BLOCKS = 2048
_ROWS_PER_BLOCK = 2048

FIELDS = {field for fields in ROW_FIELDS.values() for field in fields}


@dataclass(frozen=True, slots=True)
class DataFile:
    """One file of a source."""

    path: Path
    source: int
    """Number of its source: training sources from 0, then validation sources."""
    row_format: RowFormat
    """As given; `auto` is decided by the first row."""
    columns: dict[str, str]
    max_rows: int = 0
    """Most rows that are used of its source, the first ones; 0: all."""


@dataclass(frozen=True, slots=True)
class Block:
    """Some rows that follow each other in a file."""

    first: int
    """Line (or row) number of the first."""
    content: bytes | list[tuple[int, Any]]
    """Lines of JSON as they stand in the file; or parsed rows, each with its line number minus `first`."""
    position: int
    """Bytes of the file that were read so far, for the progress."""
    first_item: int = 0
    """Number of the first among the items of a JSON array; 0 for other files."""
    shares_lines: bool = False
    """Whether several of these items begin on one line, here or in an earlier block."""

    def line_and_item(self, offset: int, ordinal: int, *, in_error: bool = False) -> tuple[int, int]:
        """Return the line of a row, `offset` after the first, and its number among the items of a JSON array if they
        share lines, or `in_error`; else 0. `ordinal`: rows of the block before it.
        """
        is_named = self.shares_lines or (in_error and self.first_item)
        return self.first + offset, self.first_item + ordinal if is_named else 0


class FileBlock(NamedTuple):
    """A block of rows, and the file that it is of."""

    file_number: int
    """The index of the file among those that are read."""
    file: DataFile
    block: Block


def read_blocks(files: Sequence[DataFile], limits: Sequence[int] = ()) -> Iterator[FileBlock]:
    """Yield the blocks of rows of all files, in order; a file's format `auto` is replaced by the detected one. No more
    is read of a source than its files' `max_rows`. `limits`, one per file: stop reading the file once so many rows were
    read from all limited files (0: no limit).
    """
    least_bytes = block_bytes(total_bytes(files))
    limited_rows, rows_of_source = 0, Counter[int]()  # rows read so far: of all limited files, and of each source
    for number, file in enumerate(files):
        with_known_format: DataFile | None = None
        limit = limits[number] if limits else 0
        blocks_of_file = blocks(file.path, least_bytes, file.columns.values())
        while True:
            rows_left = [limit - limited_rows] if limit else []
            rows_left += [file.max_rows - rows_of_source[file.source]] if file.max_rows else []
            if rows_left and min(rows_left) <= 0:
                break
            block = next(blocks_of_file, None)
            if block is None:
                break
            if rows_left:
                from toolkit.data.first_rows import first_rows_of

                block, count = first_rows_of(block, min(rows_left))
                rows_of_source[file.source] += count
                limited_rows += count if limit else 0
            if with_known_format is None:
                with_known_format = with_format(file, block)
            yield FileBlock(number, with_known_format or file, block)


def with_format(file: DataFile, block: Block) -> DataFile | None:
    """Return the file with the format that its first row shows; None if no row can be parsed, DataError if unknown."""
    if file.row_format is not RowFormat.auto:
        return file
    from toolkit.data.detection import with_detected_format

    return with_detected_format(file, block)


def usable_rows(files: Sequence[DataFile], limits: Sequence[int] = ()) -> Iterator[tuple[str, Conversation]]:
    """Yield ("file:line", conversation) of the rows of files, skipping unusable ones; `limits` as in `read_blocks`."""
    for _, file, block in read_blocks(files, limits):
        reader = reader_of(file.row_format, file.columns)
        for location, row in placed_rows(file.path, block):
            with suppress(RowError):
                yield from ((location, conversation) for conversation in reader.read_all(parse_row(row)))


def total_bytes(files: Sequence[DataFile]) -> int:
    """Return the bytes of all files on disk together."""
    return sum(file.path.stat().st_size for file in files)


def uncompressed_name(name: str) -> str:
    """Return a file's name in lower case, without .gz or .zst."""
    return name.lower().removesuffix(".gz").removesuffix(".zst")


def block_bytes(data_bytes: int) -> int:
    """Return the least bytes of a block for data of this size: at most _MOST_BLOCKS of them. A power of two, so that it
    seldom changes when data are added, and the cached parts of unchanged blocks can be reused.
    """
    size = _LEAST_BLOCK_BYTES
    while data_bytes > size * _MOST_BLOCKS:
        size *= 2
    return size


def blocks(path: Path, least_bytes: int, columns: Collection[str] = ()) -> Iterator[Block]:
    """Yield the rows of a data file of any format in blocks, the same blocks for the same content; a DataError where
    the file cannot be read. `least_bytes`: of a block of JSON lines. `columns`: column names that `data.columns` maps,
    read from Parquet and Arrow besides those of the formats; others are None.
    """
    name = uncompressed_name(path.name)
    if name.endswith(TABLE_SUFFIXES):
        from toolkit.data.tables import table_rows

        first = 1
        with reading(path, DataError):
            for batch, position in table_rows(path, {*FIELDS, *columns}):
                yield Block(first, list(enumerate(batch)), position)
                first += len(batch)
        return
    with open_data_file(path) as (file, raw):
        first_item = 0  # items of a JSON array are numbered from 1, other rows not at all
        _check_encoding(file.peek(4096)[:4096], path)
        if name.endswith((".csv", ".tsv")):
            from toolkit.data.csv_files import csv_rows

            rows = csv_rows(file, path, "\t" if name.endswith(".tsv") else ",")
        elif (start := start_of_row_list(file, path, {*FIELDS, *columns})) is not None:
            from toolkit.data.json_lists import JsonListReader

            rows, first_item = JsonListReader(file, path, start).items(), 1
        else:
            yield from _line_blocks(file, raw, path, least_bytes)
            return
        with closing(rows):  # before the file that it reads
            last_line, shares_lines = 0, False
            while content := list(islice(rows, _ROWS_PER_BLOCK)):
                # If each row has a line of its own, there is one more with the line of the last row before.
                distinct_lines = {last_line, *(line for line, _ in content)}
                shares_lines = shares_lines or len(distinct_lines) <= len(content)
                first, last_line = content[0][0], content[-1][0]
                values = [(line - first, value) for line, value in content]
                yield Block(first, values, raw.tell(), first_item, shares_lines)
                first_item += len(content) if first_item else 0


def _check_encoding(start: bytes, path: Path) -> None:
    """Raise a DataError for a file that is not text in UTF-8, by its first bytes; broken rows are left to readers."""
    with suppress(UnicodeDecodeError):
        if "\0" not in codecs.utf_8_decode(start)[0]:  # which ignores a character that is cut off
            return
    from toolkit.data.foreign_files import check_encoding

    check_encoding(path)


def start_of_row_list(file: io.BufferedReader, path: Path, columns: Collection[str]) -> int | None:
    """Return the character at which the list of rows begins in a file like {"version": 1, "data": [{…}, …]}, 0 if the
    file is a list, None if it holds JSON lines. `columns`: keys that rows have. Decided by content, not by name: JSONL
    in a .json file is common, and so is the opposite.
    """
    text = file.peek(4096)[:4096].decode("utf-8", "ignore").removeprefix("\ufeff")
    if text.lstrip(" \t\r\n").startswith("["):
        return 0
    match = _BEFORE_ROWS.match(text)
    if match is None:
        return None
    key_of_list = json.loads(match[1])
    if key_of_list in columns:  # the object is itself a row, with a list of messages
        return None
    from toolkit.data.json_lists import is_first_line_a_row

    begins_in_first_line = "\n" not in match[0].strip()
    return None if begins_in_first_line and is_first_line_a_row(path, columns) else match.end()


@contextmanager
def open_data_file(path: Path) -> Iterator[tuple[io.BufferedReader, IO[bytes]]]:
    """Open a data file as (decompressed content, file on disk); the second one's `tell` is the progress in bytes."""
    try:
        with path.open("rb") as raw:
            magic = raw.read(4)
            raw.seek(0)
            codec = next((name for mark, name in _COMPRESSED.items() if magic.startswith(mark)), None)
            if codec is None:
                yield raw, raw
            else:
                from toolkit.data.unpacking import unpacked

                with unpacked(raw, path, codec) as content:
                    yield content, raw
    except OSError as error:
        raise DataError("Cannot read '{path}': {reason}.", path=path, reason=reason_of(error)) from error


def _line_blocks(file: io.BufferedReader, raw: IO[bytes], path: Path, least_bytes: int) -> Iterator[Block]:
    """Yield a file of JSON lines in blocks of `least_bytes` to four times that, cut after a line whose checksum is a
    multiple of 256: so that a row added or removed moves only the cuts around it, and other blocks' caches stay valid.
    `file`: decompressed; `raw`: the file on disk, for the progress.
    """
    lines: list[bytes] = []
    size, first_line, number, at_end = 0, 1, 0, False  # bytes and first line of the block; number of the line read
    while not at_end:
        line = file.readline(LARGEST_LINE_BYTES)
        at_end = not line
        number += 1
        if len(line) == LARGEST_LINE_BYTES and not line.endswith(b"\n"):
            raise DataError(
                "{path}:{line}: a line of more than {size} MiB. A file holds one {{…}} per line, or one list "
                "[{{…}}, …].",
                path=path,
                line=number,
                size=LARGEST_LINE_BYTES >> 20,
            )
        is_blank = line == b"\n"
        if is_blank:  # take the blank lines that follow it at once: a file may hold millions
            ahead = file.peek()
            line += file.read(len(ahead) - len(ahead.lstrip(b"\n")))
            number += len(line) - 1
        lines.append(line.removeprefix(BOM) if number == 1 else line)
        size += len(line)
        is_cut = size >= 4 * least_bytes or (size >= least_bytes and not is_blank and zlib.crc32(line) % 256 == 0)
        if is_cut or at_end:
            content = b"".join(lines)
            if content.strip():  # the lines of a blank block would be looked at one by one
                yield Block(first_line, content, raw.tell())
            lines, size, first_line = [], 0, number + 1


def rows_of(block: Block) -> Iterator[tuple[int, bytes | Any]]:
    """Yield (line number minus `block.first`, row) of a block, without blank lines; JSON lines as unparsed bytes."""
    if isinstance(block.content, list):
        yield from block.content
        return
    # Split at the newline byte only: U+2028 may stand inside a text.
    for offset, line in enumerate(block.content.split(b"\n")):
        if line.strip():
            yield offset, line


def placed_rows(path: Path, block: Block) -> Iterator[tuple[str, bytes | Any]]:
    """Yield (`place_of`, row) of a block; see `rows_of`."""
    for ordinal, (offset, row) in enumerate(rows_of(block)):
        yield place_of(path, *block.line_and_item(offset, ordinal)), row


def place_of(path: Path | str, line: int, item: int) -> str:
    """Return "file:line" of a row; of an `item` of a JSON array (else 0) also its number, as one line may hold all."""
    return f"{path}:{line}" + (f" {tr('(item {number})', number=f'{item:,}')}" if item else "")
