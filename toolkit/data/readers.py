"""Which files a source means, and their rows in blocks, with line (or row) numbers. No file is held as a whole."""

import csv
import io
import json
import os
import re
import zlib
from collections.abc import Collection, Generator, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any

from toolkit.config.files import DATA_SUFFIXES, PACKED_SUFFIXES, TABLE_SUFFIXES, located
from toolkit.config.schema import ROW_FIELDS, SourceConfig
from toolkit.data.json_rows import UTF16_MARKS, first_repeated, json_error, parse_line
from toolkit.disk import matching, walk
from toolkit.messages import DataError, RowError, json_object, reading, tr

BOM = b"\xef\xbb\xbf"
_CHUNK_BYTES = 1 << 20
_TEXT = r'"(?:[^"\\]|\\.)*"'
_FACT = rf"{_TEXT}\s*:\s*(?:{_TEXT}|[-+.\w]+)"
_BEFORE_ROWS = re.compile(rf"\s*\{{\s*(?:{_FACT}\s*,\s*)*({_TEXT})\s*:\s*(?=\[\s*\{{)")
"""What is around the rows in `{"version": 1, "data": [{…}, …], "count": 2}`."""


_COMPRESSED = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
_LARGEST_LINE_BYTES = 1 << 28
_MOST_UNPACKED = 200
"""Times its packed size that a file may unpack to; texts and even repeated rows reach 3 to 100."""
_UNPACKED_OF_ANY_FILE_BYTES = 64 << 20
_LEAST_BLOCK_BYTES = 1 << 20
_MOST_BLOCKS = 2048
_ROWS_PER_BLOCK = 2048

_FIELDS = {field for fields in ROW_FIELDS.values() for field in fields}

csv.field_size_limit(_LARGEST_LINE_BYTES)


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
    """Number of the first among the items of a JSON array, several of which may share a line; 0 for other files."""


def files_of(source: SourceConfig) -> list[Path]:
    """Return the files of a source with a path, in a fixed order; a DataError if there is none or one is empty."""
    path = Path(located(source.path))
    if os.path.isdir(path):
        files = _saved_by_datasets(path, source.split) or _data_files_below(path)
        if not files:
            raise DataError(
                "The directory '{path}' holds no data file. Known are {suffixes}, also with .gz or .zst.",
                path=path,
                suffixes=", ".join(DATA_SUFFIXES),
            )
    elif os.path.isfile(path):  # not the method of paths, which raises of a name that is too long
        files = [path]
    else:
        files = sorted(matching(source.path))
        if not files or not source.path:
            raise DataError(
                "There is no data file '{path}' (looked in {folder}). Correct `path` under data.sources or "
                "data.validation.",
                path=source.path,
                folder=Path.cwd(),
            )
    for file in files:
        suffixes = file.suffixes[-2:]
        if len(suffixes) == 2 and suffixes[0].lower() in TABLE_SUFFIXES and suffixes[1].lower() in PACKED_SUFFIXES:
            raise DataError("'{path}' is packed twice: Parquet and Arrow compress by themselves. Unpack it.", path=file)
        if file.stat().st_size == 0:
            raise DataError("The data file '{path}' is empty.", path=file)
    return files


def _data_files_below(folder: Path) -> list[Path]:
    """Return the files with a data suffix below a directory, sorted; links are followed, hidden files skipped."""

    def raise_error(error: OSError) -> None:
        raise DataError(
            "Cannot read '{path}': {reason}.", path=error.filename, reason=error.strerror or error
        ) from error

    def is_visible(path: Path) -> bool:
        return not path.name.startswith(".")

    walked = walk(folder, str(folder), is_visible, raise_error)
    paths = (directory / name for directory, names in walked for name in names)
    files = [path for path in paths if is_visible(path) and _uncompressed_name(path.name).endswith(DATA_SUFFIXES)]
    for path in files:
        if not os.path.exists(path):
            raise DataError("Cannot read '{path}': {reason}.", path=path, reason=tr("the link leads nowhere"))
    return sorted(path for path in files if os.path.isfile(path))


def _uncompressed_name(name: str) -> str:
    """Return a file's name in lower case, without .gz or .zst."""
    return name.lower().removesuffix(".gz").removesuffix(".zst")


def _saved_by_datasets(folder: Path, split: str) -> list[Path]:
    """Return the Arrow files of a dataset that `save_to_disk` of `datasets` wrote, [] if the directory is none."""
    if (folder / "dataset_dict.json").is_file():
        splits = _json_list(folder / "dataset_dict.json", "splits", str)
        if split not in splits:
            raise DataError(
                "The dataset '{path}' has no split '{split}'; it has {splits}. Choose one with `split`.",
                path=folder,
                split=split,
                splits=", ".join(splits),
            )
        folder = folder / split
    if not (folder / "state.json").is_file():
        return []
    files = _json_list(folder / "state.json", "_data_files", dict)
    if not files:
        raise DataError("{path} holds no row.", path=folder)
    names = [str(item.get("filename", "")) for item in files]
    if any(name in ("", "..") or Path(name).name != name for name in names):
        raise DataError("{file} names files outside of its directory: rejected.", file=folder / "state.json")
    return [folder / name for name in names]


def _json_list(file: Path, key: str, item_type: type) -> list[Any]:
    """Return the list of `item_type` under a key of a JSON file of `datasets`; a DataError if it is not there."""
    value = json_object(file, DataError).get(key)
    if not isinstance(value, list) or not all(isinstance(item, item_type) for item in value):
        raise DataError("{file} has no list '{key}': save the dataset again.", file=file, key=key)
    return value


def block_bytes(total_bytes: int) -> int:
    """Return the least bytes of a block for data of this size: at most _MOST_BLOCKS of them. A power of two, so that it
    seldom changes when data are added, and the cached parts of unchanged blocks can be reused.
    """
    size = _LEAST_BLOCK_BYTES
    while total_bytes > size * _MOST_BLOCKS:
        size *= 2
    return size


def blocks(path: Path, least_bytes: int, columns: Collection[str] = ()) -> Iterator[Block]:
    """Yield the rows of a data file of any format in blocks, the same blocks for the same content; a DataError where
    the file cannot be read. `least_bytes`: of a block of JSON lines. `columns`: column names that `data.columns` maps,
    read from Parquet and Arrow besides those of the formats; others are None.
    """
    name = _uncompressed_name(path.name)
    if name.endswith(TABLE_SUFFIXES):
        from toolkit.data.tables import table_rows

        first = 1
        with reading(path, DataError):
            for batch, position in table_rows(path, {*_FIELDS, *columns}):
                yield Block(first, list(enumerate(batch)), position)
                first += len(batch)
        return
    with _opened(path) as (file, raw):
        item = 0
        if name.endswith((".csv", ".tsv")):
            rows = _csv_rows(file, path, _delimiter(file, "\t" if name.endswith(".tsv") else ","))
        elif (start := _start_of_row_list(file, path, {*_FIELDS, *columns})) is not None:
            from toolkit.data.json_lists import JsonListReader

            rows, item = JsonListReader(file, path, start).items(), 1
        else:
            yield from _line_blocks(file, raw, path, least_bytes)
            return
        with closing(rows):  # before the file that it reads
            while content := list(islice(rows, _ROWS_PER_BLOCK)):
                first = content[0][0]
                yield Block(first, [(number - first, value) for number, value in content], raw.tell(), item)
                item += len(content) if item else 0


def _start_of_row_list(file: io.BufferedReader, path: Path, columns: Collection[str]) -> int | None:
    """Return the character at which the list of rows begins in a file like {"version": 1, "data": [{…}, …]}, 0 if the
    file is a list, None if it holds JSON lines. `columns`: keys that rows have. Decided by content, not by name: JSONL
    in a .json file is common, and so is the opposite.
    """
    text = file.peek(4096)[:4096].decode("utf-8", "ignore").removeprefix("\ufeff")
    if text.lstrip(" \t\r\n").startswith("["):
        return 0
    match = _BEFORE_ROWS.match(text)
    if match is None or json.loads(match[1]) in columns:  # the object is itself a row, with a list of messages
        return None
    if "\n" not in match[0].strip():
        with _opened(path) as (again, _):
            line = again.readline(_LARGEST_LINE_BYTES)
            with suppress(ValueError, RecursionError):
                row = json.loads(line)
                if again.read(_CHUNK_BYTES).strip() or not row.keys().isdisjoint(columns):  # rows, one per line
                    return None
    return match.end()


def _delimiter(file: io.BufferedReader, usual: str) -> str:
    """Return a CSV file's column separator: `usual`, unless the first line contains another one and not this."""
    first = file.peek(4096)[:65536].removeprefix(BOM).decode("utf-8", "replace").partition("\n")[0].strip()
    counts = dict.fromkeys((usual, ",", ";", "\t", "|"), 1)
    for mark in counts:
        with suppress(csv.Error):  # a lone carriage return, of which the reader of the rows says so with its line
            counts[mark] = len(next(csv.reader([first], delimiter=mark), ()))
    return usual if counts[usual] > 1 else max(counts, key=lambda mark: counts[mark])


@contextmanager
def _opened(path: Path) -> Iterator[tuple[io.BufferedReader, IO[bytes]]]:
    """Open a data file as (decompressed content, file on disk); the second one's `tell` is the progress in bytes."""
    try:
        with open(path, "rb") as raw:
            magic = raw.read(4)
            raw.seek(0)
            codec = next((name for mark, name in _COMPRESSED.items() if magic.startswith(mark)), None)
            if codec is None:
                yield raw, raw
            else:
                import pyarrow

                with pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, "r"), codec) as unpacked:
                    yield io.BufferedReader(_Unpacked(unpacked, path), 1 << 20), raw
    except OSError as error:
        raise DataError("Cannot read '{path}': {reason}.", path=path, reason=error.strerror or error) from error


class _Unpacked(io.RawIOBase):
    """The decompressed content of a file; a DataError once it exceeds what a real data file expands to ("zip bomb")."""

    def __init__(self, stream: Any, path: Path) -> None:
        self.stream, self.path = stream, path
        self.left = max(_UNPACKED_OF_ANY_FILE_BYTES, _MOST_UNPACKED * path.stat().st_size)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Read decompressed bytes into `buffer` and count them; a DataError above the limit, against a "zip bomb"."""
        count: int = self.stream.readinto(buffer)
        self.left -= count
        if self.left < 0:
            raise DataError(
                "'{path}' unpacks to more than {times} times its size. If that is really your data, unpack it.",
                path=self.path,
                times=_MOST_UNPACKED,
            )
        return count


def _line_blocks(file: io.BufferedReader, raw: IO[bytes], path: Path, least_bytes: int) -> Iterator[Block]:
    """Yield a file of JSON lines in blocks of `least_bytes` to four times that, cut after a line whose checksum is a
    multiple of 256: so that a row added or removed moves only the cuts around it, and other blocks' caches stay valid.
    `file`: decompressed; `raw`: the file on disk, for the progress.
    """
    lines: list[bytes] = []
    size, first, number, at_end = 0, 1, 0, False
    while not at_end:
        line = file.readline(_LARGEST_LINE_BYTES)
        at_end = not line
        number += 1
        if len(line) == _LARGEST_LINE_BYTES and not line.endswith(b"\n"):
            raise DataError(
                "{path}:{line}: a line of more than {size} MiB. A file holds one {{…}} per line, or one list "
                "[{{…}}, …].",
                path=path,
                line=number,
                size=_LARGEST_LINE_BYTES >> 20,
            )
        if is_blank := line == b"\n":  # with those that follow it: a file may hold millions
            ahead = file.peek()
            line += file.read(len(ahead) - len(ahead.lstrip(b"\n")))
            number += len(line) - 1
        lines.append(line.removeprefix(BOM) if number == 1 else line)
        size += len(line)
        is_cut = size >= 4 * least_bytes or (size >= least_bytes and not is_blank and zlib.crc32(line) % 256 == 0)
        if is_cut or at_end:
            content = b"".join(lines)
            if content.strip():  # the lines of a blank block would be looked at one by one
                yield Block(first, content, raw.tell())
            lines, size, first = [], 0, number + 1


def _csv_rows(file: io.BufferedReader, path: Path, delimiter: str) -> Generator[tuple[int, Any]]:
    """Yield (line number, row as a dict by the header's names) of a CSV file; a DataError if it is broken."""
    read, start = 0, file.peek(2)[:2]  # `read`: lines so far; a quoted value may take several
    if start in UTF16_MARKS:
        raise DataError(f"{path}:1: {json_error(UnicodeDecodeError('utf-8', start, 0, 1, ''))}.")

    def lines() -> Iterator[str]:
        nonlocal read
        for content in file:
            read += 1
            # A byte that is not UTF-8 becomes half of a character, which is refused row by row.
            yield (content.removeprefix(BOM) if read == 1 else content).decode("utf-8", "surrogateescape")

    reader = csv.DictReader(lines(), delimiter=delimiter, strict=True)
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


def rows_of(block: Block) -> Iterator[tuple[int, bytes | Any]]:
    """Yield (line number minus `block.first`, row) of a block, without blank lines; JSON lines as unparsed bytes."""
    if isinstance(block.content, list):
        yield from block.content
        return
    # Split at the newline byte only: U+2028 may stand inside a text.
    for offset, line in enumerate(block.content.split(b"\n")):
        if line.strip():
            yield offset, line


def first_row(block: Block) -> tuple[int, object]:
    """Return (line number, row) of the first row of a block that is an object, else of the first that can be parsed; a
    RowError if none can.
    """
    failure: RowError | None = None
    other: tuple[int, object] | None = None
    for offset, row in rows_of(block):
        try:
            value = parse_line(row) if isinstance(row, bytes) else row
        except RowError as error:
            failure = failure or error
            continue
        if isinstance(value, dict):
            return block.first + offset, value
        other = other or (block.first + offset, value)
    if other:
        return other
    raise failure or RowError(tr("no key at all"))
