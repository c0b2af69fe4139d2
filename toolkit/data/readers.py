"""Which files a source means, and their rows in blocks, with line (or row) numbers. No file is held as a whole.

Parquet and Arrow: every batch is validated before a value is touched. Arrow trusts a file's offsets otherwise: of 300
damaged files 11 ended the process with a segmentation fault, others with a bus error (pyarrow 25).
"""

import codecs
import csv
import io
import json
import os
import re
import zlib
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any, NoReturn

from toolkit.config.files import located
from toolkit.config.schema import ROW_FIELDS, SourceConfig
from toolkit.disk import matching, walk
from toolkit.messages import DataError, RowError, json_object, reading, tr

BOM = b"\xef\xbb\xbf"
_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_CHUNK_BYTES = 1 << 20
LARGEST_ROW_BYTES = 1 << 24
"""Of one row, as JSON: to tokenize it takes about a hundred times as much memory."""
_TEXT = r'"(?:[^"\\]|\\.)*"'
_FACT = rf"{_TEXT}\s*:\s*(?:{_TEXT}|[-+.\w]+)"
_BEFORE_ROWS = re.compile(rf"\s*\{{\s*(?:{_FACT}\s*,\s*)*({_TEXT})\s*:\s*(?=\[\s*\{{)")
_AFTER_ROWS = re.compile(rf"\s*(?:,\s*{_FACT}\s*)*\}}")
"""What is around the rows in `{"version": 1, "data": [{…}, …], "count": 2}`."""
_SPACE = re.compile(r"[ \t\n\r]*")
_HALF = re.compile(rb"\\u[dD][89a-fA-F]")


def parse_line(line: bytes) -> object:
    """Return the value of one line; a RowError if it is too long, not UTF-8, not JSON, or names a key twice."""
    _check_size(len(line))
    try:
        value = DECODER.decode(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise _json_error(error) from None
    if _HALF.search(line):
        check_characters(value)
    return value


def check_characters(value: object) -> None:
    r"""Reject halves of characters (the escape \ud83d alone, a byte that was not UTF-8) and rows that are too long."""
    try:
        _check_size(len(json.dumps(value, ensure_ascii=False, default=str).encode("utf-8")))
    except UnicodeEncodeError as error:
        code, around = ord(error.object[error.start]), error.object[max(error.start - 20, 0) : error.start]
        if 0xDC80 <= code <= 0xDCFF:
            raise RowError(
                "not UTF-8: byte 0x{byte} after '{around}'. If the file is in GBK, convert it with `iconv -f GBK "
                "-t UTF-8`",
                byte=f"{code - 0xDC00:02x}",
                around=around,
            ) from None
        raise RowError(
            "half of a character (\\u{code}) after '{around}'. Correct or remove the row",
            code=f"{code:04x}",
            around=around,
        ) from None
    except RecursionError as error:
        raise _json_error(error) from None


def _check_size(size: int) -> None:
    if size > LARGEST_ROW_BYTES:
        raise RowError(
            "a row of {size} MiB; at most {most} MiB can be tokenized at once. Split its text over several rows",
            size=size >> 20,
            most=LARGEST_ROW_BYTES >> 20,
        )


class _ArrayReader:
    """Yields line number and value of each item of a JSON array, with no more than an item and a megabyte in memory."""

    def __init__(self, file: IO[bytes], path: Path, start: int = 0) -> None:
        self.file, self.path = file, path
        self.start = start
        """Where the array begins, if it is the value of a key in an object."""
        self.decoder = codecs.getincrementaldecoder("utf-8")()
        self.text, self.at, self.at_end = "", 0, False
        self.column = 0  # of text[0]
        self.line, self.counted = 1, 0  # the line of text[counted]

    def items(self) -> Generator[tuple[int, object]]:
        self._more()
        self.text = self.text.removeprefix("\ufeff")
        self.at = self.start
        self._next()
        self.at += 1  # the opening bracket
        mark = self._next()
        while mark != "]":
            yield self._line_of(self.at), self._value()
            mark = self._next()
            if mark == ",":
                self.at += 1
                self._next()
            elif mark != "]":
                self._stop(json.JSONDecodeError("Expecting ',' or ']'", self.text, self.at))
        self.at += 1
        if self.start:
            self._end_of_object()
        if self._next():
            self._stop(json.JSONDecodeError("Extra data", self.text, self.at))

    def _end_of_object(self) -> None:
        """Step over what follows the array in its object: facts about the file, but no other rows."""
        while len(self.text) - self.at < _CHUNK_BYTES and not self.at_end:
            self._more()
        match = _AFTER_ROWS.match(self.text, self.at)
        if match is None:
            raise DataError(
                "{path}:{line}: there is more than one list of rows in this object. Write each into a file of its own.",
                path=self.path,
                line=self._line_of(self.at),
            )
        self.at = match.end()

    def _value(self) -> object:
        """Return the next item; one with a NaN or a key twice as its text, which `parse_line` will reject."""
        decoder = DECODER
        while True:
            try:
                value, end = decoder.raw_decode(self.text, self.at)
            except json.JSONDecodeError as error:
                # Cut off, or broken? Broken is what is wrong well before the end of what has been read.
                cut = error.msg.startswith("Unterminated") or error.pos > len(self.text) - 64
                if self.at_end or not cut or len(self.text) - self.at > LARGEST_ROW_BYTES:
                    self._stop(error)
            except RecursionError as error:
                self._stop(error)
            except ValueError:
                decoder = _LENIENT  # to find where the item ends
                continue
            else:
                if end < len(self.text) or self.at_end:
                    start, self.at = self.at, end
                    return self.text[start:end].encode() if decoder is _LENIENT else value
            self._more()

    def _next(self) -> str:
        """Step over white space and return the character there, "" at the end of the file."""
        while True:
            match = _SPACE.match(self.text, self.at)
            self.at = match.end() if match else self.at
            if self.at < len(self.text) or self.at_end:
                return self.text[self.at : self.at + 1]
            self._more()

    def _more(self) -> None:
        """Drop the text before `at`, and read at least as much as remains: each read parses a cut-off item anew."""
        self._line_of(self.at)
        last = self.text.rfind("\n", 0, self.at)
        self.column = self.at - last - 1 if last >= 0 else self.column + self.at
        self.text, self.at, self.counted = self.text[self.at :], 0, 0
        block = self.file.read(max(_CHUNK_BYTES, len(self.text)))
        self.at_end = not block
        try:
            self.text += self.decoder.decode(block, final=self.at_end)
        except UnicodeDecodeError as error:
            self._stop(error, self._line_of(len(self.text)) + error.object.count(b"\n", 0, error.start))

    def _line_of(self, position: int) -> int:
        """Return the line of a position, not before that of the last call, from which on lines are counted."""
        self.line += self.text.count("\n", self.counted, position)
        self.counted = position
        return self.line

    def _stop(self, error: ValueError | RecursionError, line: int = 0) -> NoReturn:
        if isinstance(error, json.JSONDecodeError):
            line = self._line_of(error.pos)
            error.colno += self.column if error.lineno == 1 else 0
        raise DataError(f"{self.path}:{line or self._line_of(self.at)}: {_json_error(error)}.")


def _refuse_constant(name: str) -> NoReturn:
    """Reject NaN and Infinity, which Python's reader would take although JSON has no such numbers."""
    raise ValueError(tr("{name} is no JSON value", name=name))


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Reject a key that stands twice: Python's reader would keep the last value and say nothing."""
    members = dict(pairs)
    if len(members) != len(pairs):
        twice = _first_repeated([key for key, _ in pairs])
        raise ValueError(tr("the key '{key}' stands there twice", key=twice))
    return members


DECODER = json.JSONDecoder(parse_constant=_refuse_constant, object_pairs_hook=_object)
_LENIENT = json.JSONDecoder(parse_int=str)  # Python reads no integer of more than 4,300 digits


def _first_repeated(names: Sequence[str]) -> str:
    return next(name for name in names if names.count(name) > 1)


def _json_error(error: ValueError | RecursionError) -> RowError:
    """Return why bytes could not be read as JSON; positions count from 1 within the line."""
    if isinstance(error, UnicodeDecodeError):
        content, start = error.object, error.start
        return RowError(
            "not UTF-8: byte 0x{byte} at position {position} of the line. If the file is in {encoding}, convert it "
            "with `iconv -f {encoding} -t UTF-8`",
            byte=f"{content[start]:02x}",
            position=start - content.rfind(b"\n", 0, start),
            encoding="UTF-16" if content[:2] in _UTF16 else "GBK",
        )
    if isinstance(error, json.JSONDecodeError):
        return RowError(
            "broken JSON at column {column}: {reason}. A file holds one {{…}} per line, or one list [{{…}}, …]",
            column=error.colno,
            reason=error.msg,
        )
    if isinstance(error, RecursionError):
        return RowError(tr("the JSON is nested too deeply. Correct or remove the row"))
    return RowError("broken JSON: {reason}. Correct or remove the row", reason=error)


TABLE_SUFFIXES = (".parquet", ".arrow")
TABLE_VERSION = 2
"""Part of the name of a cache of such files with objects; raise it when these would come out differently."""
_JSON = "extension<arrow.json>"
_TABLE_BATCH_ROWS = 2048
_TABLE_BATCH_BYTES = 64 << 20
_ROWS_OF_ANY_FILE = 1 << 20
"""A file may hold so many rows, or one for each of its bytes: constant columns pack into nothing."""


def table_rows(path: Path, columns: Collection[str]) -> Iterator[tuple[list[dict[str, Any]], int]]:
    """Yield the rows of a Parquet or Arrow file in batches, each with the bytes of the file that were read so far."""
    import pyarrow
    import pyarrow.parquet

    size, done = path.stat().st_size, 0
    if path.suffix.lower() == ".parquet":
        with pyarrow.parquet.ParquetFile(path) as file:
            total, names = file.metadata.num_rows, file.schema_arrow.names
            _check_count(total, size)
            for batch in file.iter_batches(_TABLE_BATCH_ROWS, columns=[name for name in names if name in columns]):
                done += batch.num_rows
                for rows in _table_rows_of(batch, names):
                    yield rows, size * done // max(total, 1)
        return
    with pyarrow.memory_map(str(path)) as mapped:
        _, batches = _open_arrow(mapped)
        for batch in batches:
            done += batch.num_rows
            _check_count(done, size)
            names = batch.schema.names
            chosen = batch.select([index for index, name in enumerate(names) if name in columns])
            for rows in _table_rows_of(chosen, names):
                yield rows, mapped.tell()


def _open_arrow(mapped: Any) -> tuple[Any, Iterable[Any]]:
    """Return the schema and the batches of a file in either of Arrow's two forms; `datasets` writes the second."""
    import pyarrow

    try:
        reader = pyarrow.ipc.open_file(mapped)
    except pyarrow.ArrowInvalid:
        mapped.seek(0)
        stream = pyarrow.ipc.open_stream(mapped)
        return stream.schema, stream
    return reader.schema, map(reader.get_batch, range(reader.num_record_batches))


def has_objects(path: Path) -> bool:
    """Whether the rows of a table may hold objects, whose null keys are left out; no if it cannot be read."""
    import pyarrow
    import pyarrow.parquet

    with suppress(OSError, ValueError):
        if path.suffix.lower() == ".parquet":
            return "struct<" in str(pyarrow.parquet.read_schema(path).types)
        with pyarrow.memory_map(str(path)) as mapped:
            return "struct<" in str(_open_arrow(mapped)[0].types)
    return False


def _check_count(rows: int, size: int) -> None:
    if rows > max(_ROWS_OF_ANY_FILE, size):
        raise ValueError(tr("it claims {rows} rows in {size} bytes", rows=f"{rows:,}", size=f"{size:,}"))


def _table_rows_of(batch: Any, names: list[str]) -> Iterator[list[dict[str, Any]]]:
    """Yield a batch's rows, those of a few MiB at a time; columns that were not read are null."""
    if len(set(names)) != len(names):
        raise ValueError(tr("two columns are called '{name}'", name=_first_repeated(names)))
    batch.validate(full=True)
    decode = _json_decoder(batch.schema)
    kinds = {field.name: str(field.type) for field in batch.schema}
    objects = [name for name, kind in kinds.items() if "struct<" in kind and _JSON not in kind]
    others = dict.fromkeys(names)
    for start in range(0, batch.num_rows, _TABLE_BATCH_ROWS):
        rows = batch.slice(start, _TABLE_BATCH_ROWS)
        step = max(1, min(_TABLE_BATCH_ROWS, _TABLE_BATCH_ROWS * _TABLE_BATCH_BYTES // max(rows.nbytes, 1)))
        for begin in range(0, rows.num_rows, step):
            piece = rows.slice(begin, step)
            if batch.num_columns:
                read = [{**row, **{name: _without_nulls(row[name]) for name in objects}} for row in piece.to_pylist()]
                yield [{**others, **decode(row)} for row in read]
            else:
                yield [others] * piece.num_rows


def _json_decoder(schema: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return what makes values of JSON columns: `datasets` stores messages of varying fields as texts of JSON."""
    fields = [field for field in schema if _JSON in str(field.type)]
    if not fields:
        return dict
    import datasets
    import pyarrow

    features = datasets.Features.from_arrow_schema(pyarrow.schema(fields))
    return lambda row: {**row, **features.decode_example({name: row[name] for name in features})}


def _without_nulls(value: Any) -> Any:
    """Return a value without null keys: Arrow gives all objects the same, a tool's call the arguments of the others."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


SUFFIXES = (".jsonl", ".json", ".ndjson", ".csv", ".tsv", *TABLE_SUFFIXES)
_PACKED = (".gz", ".zst")
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
        files = _saved_by_datasets(path, source.split) or _known_files(path)
        if not files:
            raise DataError(
                "The directory '{path}' holds no data file. Known are {suffixes}, also with .gz or .zst.",
                path=path,
                suffixes=", ".join(SUFFIXES),
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
        if len(suffixes) == 2 and suffixes[0].lower() in TABLE_SUFFIXES and suffixes[1].lower() in _PACKED:
            raise DataError("'{path}' is packed twice: Parquet and Arrow compress by themselves. Unpack it.", path=file)
        if file.stat().st_size == 0:
            raise DataError("The data file '{path}' is empty.", path=file)
    return files


def _known_files(folder: Path) -> list[Path]:
    """Return the data files below a folder, behind links too; hidden ones are left out."""

    def stop(error: OSError) -> None:
        raise DataError(
            "Cannot read '{path}': {reason}.", path=error.filename, reason=error.strerror or error
        ) from error

    def enter(path: Path) -> bool:
        return not path.name.startswith(".")

    paths = (directory / name for directory, names in walk(folder, str(folder), enter, stop) for name in names)
    files = [path for path in paths if path.name[0] != "." and _bare(path.name).endswith(SUFFIXES)]
    for path in files:
        if not os.path.exists(path):
            raise DataError("Cannot read '{path}': {reason}.", path=path, reason=tr("the link leads nowhere"))
    return sorted(path for path in files if os.path.isfile(path))


def _bare(name: str) -> str:
    """Return a file's name in lower case, without the suffix of its compression."""
    return name.lower().removesuffix(".gz").removesuffix(".zst")


def _saved_by_datasets(folder: Path, split: str) -> list[Path]:
    """Return the Arrow files of a folder that `datasets` has saved (save_to_disk), [] if it is no such folder."""
    if (folder / "dataset_dict.json").is_file():
        splits = _entry(folder / "dataset_dict.json", "splits", str)
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
    files = _entry(folder / "state.json", "_data_files", dict)
    if not files:
        raise DataError("{path} holds no row.", path=folder)
    names = [str(item.get("filename", "")) for item in files]
    if any(name in ("", "..") or Path(name).name != name for name in names):
        raise DataError("{file} names files outside of its directory: rejected.", file=folder / "state.json")
    return [folder / name for name in names]


def _entry(file: Path, key: str, kind: type) -> list[Any]:
    """Return a list of a file of `datasets`."""
    value = json_object(file, DataError).get(key)
    if not isinstance(value, list) or not all(isinstance(item, kind) for item in value):
        raise DataError("{file} has no list '{key}': save the dataset again.", file=file, key=key)
    return value


def block_bytes(total_bytes: int) -> int:
    """Return the least size of a block for sources of so many bytes: a power of two, so it seldom changes with them."""
    size = _LEAST_BLOCK_BYTES
    while total_bytes > size * _MOST_BLOCKS:
        size *= 2
    return size


def blocks(path: Path, least_bytes: int, columns: Collection[str] = ()) -> Iterator[Block]:
    """Yield a file's rows, the same blocks for the same content; a DataError where it cannot be read on. `columns`:
    names read besides those of the formats; others of a Parquet or Arrow file are null in its rows.
    """
    name = _bare(path.name)
    if name.endswith(TABLE_SUFFIXES):
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
        elif file.peek(4096)[:4096].removeprefix(BOM).lstrip(b" \t\r\n")[:1] == b"[":
            # Decided by content, not by name: JSONL in a .json file is common, and so is the opposite.
            rows, item = _ArrayReader(file, path).items(), 1
        elif start := _start_of_rows(file, path, {*_FIELDS, *columns}):
            rows, item = _ArrayReader(file, path, start).items(), 1
        else:
            yield from _line_blocks(file, raw, path, least_bytes)
            return
        with closing(rows):  # before the file that it reads
            while content := list(islice(rows, _ROWS_PER_BLOCK)):
                first = content[0][0]
                yield Block(first, [(number - first, value) for number, value in content], raw.tell(), item)
                item += len(content) if item else 0


def _start_of_rows(file: io.BufferedReader, path: Path, columns: Collection[str]) -> int:
    """Return where the rows begin, in characters, if the file is one object with one list of them, else 0."""
    text = file.peek(4096)[:4096].decode("utf-8", "ignore").removeprefix("\ufeff")
    match = _BEFORE_ROWS.match(text)
    if match is None or json.loads(match[1]) in columns:  # a row with a list of messages
        return 0
    if "\n" not in match[0].strip():
        with _opened(path) as (again, _):
            line = again.readline(_LARGEST_LINE_BYTES)
            with suppress(ValueError, RecursionError):
                row = json.loads(line)
                if again.read(_CHUNK_BYTES).strip() or not row.keys().isdisjoint(columns):  # rows, one per line
                    return 0
    return match.end()


def _delimiter(file: io.BufferedReader, usual: str) -> str:
    """Return what separates a table's columns: what is usual, unless the first line has it nowhere but another."""
    first = file.peek(4096)[:65536].removeprefix(BOM).decode("utf-8", "replace").partition("\n")[0].strip()
    counts = dict.fromkeys((usual, ",", ";", "\t", "|"), 1)
    for mark in counts:
        with suppress(csv.Error):  # a lone carriage return, of which the reader of the rows says so with its line
            counts[mark] = len(next(csv.reader([first], delimiter=mark), ()))
    return usual if counts[usual] > 1 else max(counts, key=lambda mark: counts[mark])


@contextmanager
def _opened(path: Path) -> Iterator[tuple[io.BufferedReader, IO[bytes]]]:
    """Open a data file, unpacked if it is compressed; the second file tells how much of it has been read."""
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
    """What a packed file holds, up to a size at which it can only be there to fill the memory or the day."""

    def __init__(self, stream: Any, path: Path) -> None:
        self.stream, self.path = stream, path
        self.left = max(_UNPACKED_OF_ANY_FILE_BYTES, _MOST_UNPACKED * path.stat().st_size)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
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
    """Cut between lines, at lines whose checksum says so: a row put in or taken out moves the cuts around it only."""
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
    """Yield rows as objects whose keys are the first line's."""
    read, start = 0, file.peek(2)[:2]
    if start in _UTF16:
        raise DataError(f"{path}:1: {_json_error(UnicodeDecodeError('utf-8', start, 0, 1, ''))}.")

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
            twice = _first_repeated(names)
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
    """Yield each row that is not blank, with its line number minus `first`; lines are not parsed yet."""
    if isinstance(block.content, list):
        yield from block.content
        return
    # Split at the newline byte only: U+2028 may stand inside a text.
    for offset, line in enumerate(block.content.split(b"\n")):
        if line.strip():
            yield offset, line


def first_row(block: Block) -> tuple[int, object]:
    """Return the first row of a block that is an object, else the first that can be parsed, with its line."""
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
