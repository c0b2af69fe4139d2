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
    r"""Raise a RowError for a value with half a character (a lone surrogate such as \ud83d, or a byte that was not
    UTF-8, which `surrogateescape` decoded to one) or of more than LARGEST_ROW_BYTES as JSON.
    """
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
    """Raise a RowError if a row of `size` bytes is larger than can be tokenized at once."""
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
        self.text, self.at = "", 0  # what was read and not dropped yet, and the position in it
        self.at_end = False  # of the file
        self.column = 0  # of text[0]
        self.line, self.counted = 1, 0  # the line of text[counted]

    def items(self) -> Generator[tuple[int, object]]:
        """Yield (line number, value) of each item; a DataError at the first thing that is not JSON."""
        self._read_more()
        self.text = self.text.removeprefix("\ufeff")
        self.at = self.start
        self._skip_space()
        self.at += 1  # the opening bracket
        mark = self._skip_space()
        while mark != "]":
            yield self._line_of(self.at), self._value()
            mark = self._skip_space()
            if mark == ",":
                self.at += 1
                self._skip_space()
            elif mark != "]":
                self._stop(json.JSONDecodeError("Expecting ',' or ']'", self.text, self.at))
        self.at += 1
        if self.start:
            self._end_of_object()
        if self._skip_space():
            self._stop(json.JSONDecodeError("Extra data", self.text, self.at))

    def _end_of_object(self) -> None:
        """Step over what follows the array in the enclosing object; a DataError if that is a second list of rows."""
        while len(self.text) - self.at < _CHUNK_BYTES and not self.at_end:
            self._read_more()
        match = _AFTER_ROWS.match(self.text, self.at)
        if match is None:
            raise DataError(
                "{path}:{line}: there is more than one list of rows in this object. Write each into a file of its own.",
                path=self.path,
                line=self._line_of(self.at),
            )
        self.at = match.end()

    def _value(self) -> object:
        """Parse the item at the current position and step over it. An item with a NaN or a repeated key is returned as
        its text (bytes), for which `parse_line` raises the error, so that other items can still be read.
        """
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
            self._read_more()

    def _skip_space(self) -> str:
        """Step over white space and return the character after it, "" at the end of the file."""
        while True:
            match = _SPACE.match(self.text, self.at)
            self.at = match.end() if match else self.at
            if self.at < len(self.text) or self.at_end:
                return self.text[self.at : self.at + 1]
            self._read_more()

    def _read_more(self) -> None:
        """Drop the text before the position and read a chunk, at least as long as the text that remains: an item that a
        chunk cuts off is parsed again after each read, so chunks that grow keep the time linear.
        """
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
        """Return the file's line number, from 1, at a position of `text`, which must not decrease from call to call."""
        self.line += self.text.count("\n", self.counted, position)
        self.counted = position
        return self.line

    def _stop(self, error: ValueError | RecursionError, line: int = 0) -> NoReturn:
        """Raise a DataError with the file, the line (0: that of the error) and the reason of a parsing error."""
        if isinstance(error, json.JSONDecodeError):
            line = self._line_of(error.pos)
            error.colno += self.column if error.lineno == 1 else 0
        raise DataError(f"{self.path}:{line or self._line_of(self.at)}: {_json_error(error)}.")


def _refuse_constant(name: str) -> NoReturn:
    """Reject NaN and Infinity, which Python's JSON parser accepts although JSON has no such numbers."""
    raise ValueError(tr("{name} is no JSON value", name=name))


def _without_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object's (key, value) pairs as a dict; reject a repeated key: the first value would be lost."""
    members = dict(pairs)
    if len(members) != len(pairs):
        twice = _first_repeated([key for key, _ in pairs])
        raise ValueError(tr("the key '{key}' stands there twice", key=twice))
    return members


DECODER = json.JSONDecoder(parse_constant=_refuse_constant, object_pairs_hook=_without_repeated_keys)
_LENIENT = json.JSONDecoder(parse_int=str)  # Python reads no integer of more than 4,300 digits


def _first_repeated(names: Sequence[str]) -> str:
    """Return the first name that occurs more than once; there must be one."""
    return next(name for name in names if names.count(name) > 1)


def _json_error(error: ValueError | RecursionError) -> RowError:
    """Return the RowError that explains an error of parsing JSON; its positions count from 1 within the line."""
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
    """Yield (rows, bytes of the file read so far) batch by batch from a Parquet or Arrow file. `columns` are read, the
    values of others are None.
    """
    import pyarrow
    import pyarrow.parquet

    size, done = path.stat().st_size, 0
    if path.suffix.lower() == ".parquet":
        with pyarrow.parquet.ParquetFile(path) as file:
            total, names = file.metadata.num_rows, file.schema_arrow.names
            _check_row_count(total, size)
            for batch in file.iter_batches(_TABLE_BATCH_ROWS, columns=[name for name in names if name in columns]):
                done += batch.num_rows
                for rows in _table_rows_of(batch, names):
                    yield rows, size * done // max(total, 1)
        return
    with pyarrow.memory_map(str(path)) as mapped:
        _, batches = _open_arrow(mapped)
        for batch in batches:
            done += batch.num_rows
            _check_row_count(done, size)
            names = batch.schema.names
            chosen = batch.select([index for index, name in enumerate(names) if name in columns])
            for rows in _table_rows_of(chosen, names):
                yield rows, mapped.tell()


def _open_arrow(mapped: Any) -> tuple[Any, Iterable[Any]]:
    """Return schema and record batches of an Arrow file, in the file or the stream format (which `datasets` writes)."""
    import pyarrow

    try:
        reader = pyarrow.ipc.open_file(mapped)
    except pyarrow.ArrowInvalid:
        mapped.seek(0)
        stream = pyarrow.ipc.open_stream(mapped)
        return stream.schema, stream
    return reader.schema, map(reader.get_batch, range(reader.num_record_batches))


def has_objects(path: Path) -> bool:
    """Whether a Parquet or Arrow file has columns of objects (structs); false if it cannot be read."""
    import pyarrow
    import pyarrow.parquet

    with suppress(OSError, ValueError):
        if path.suffix.lower() == ".parquet":
            return "struct<" in str(pyarrow.parquet.read_schema(path).types)
        with pyarrow.memory_map(str(path)) as mapped:
            return "struct<" in str(_open_arrow(mapped)[0].types)
    return False


def _check_row_count(rows: int, size: int) -> None:
    """Raise a ValueError if a table of `size` bytes claims more rows than it can hold, which would fill the memory."""
    if rows > max(_ROWS_OF_ANY_FILE, size):
        raise ValueError(tr("it claims {rows} rows in {size} bytes", rows=f"{rows:,}", size=f"{size:,}"))


def _table_rows_of(batch: Any, names: list[str]) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows of a pyarrow RecordBatch as dicts, a few MiB at a time. `names`: all columns of the file; those
    that are not in the batch are None. The batch is validated first, as damaged ones crash pyarrow.
    """
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
    """Return a function that decodes the JSON columns of a row (dict -> dict): `datasets` stores objects with varying
    keys, such as messages, as JSON texts.
    """
    fields = [field for field in schema if _JSON in str(field.type)]
    if not fields:
        return dict
    import datasets
    import pyarrow

    features = datasets.Features.from_arrow_schema(pyarrow.schema(fields))
    return lambda row: {**row, **features.decode_example({name: row[name] for name in features})}


def _without_nulls(value: Any) -> Any:
    """Return a value without the null keys of its objects: Arrow gives all structs of a column the same keys, so a tool
    call would have the arguments of all other calls, as null.
    """
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
        files = _saved_by_datasets(path, source.split) or _data_files_below(path)
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
    files = [path for path in paths if is_visible(path) and _uncompressed_name(path.name).endswith(SUFFIXES)]
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
        elif start := _start_of_row_list(file, path, {*_FIELDS, *columns}):
            rows, item = _ArrayReader(file, path, start).items(), 1
        else:
            yield from _line_blocks(file, raw, path, least_bytes)
            return
        with closing(rows):  # before the file that it reads
            while content := list(islice(rows, _ROWS_PER_BLOCK)):
                first = content[0][0]
                yield Block(first, [(number - first, value) for number, value in content], raw.tell(), item)
                item += len(content) if item else 0


def _start_of_row_list(file: io.BufferedReader, path: Path, columns: Collection[str]) -> int:
    """Return the character at which the list of rows begins in a file like {"version": 1, "data": [{…}, …]}; 0 if the
    file has no such form, as JSON lines. `columns`: keys that rows have.
    """
    text = file.peek(4096)[:4096].decode("utf-8", "ignore").removeprefix("\ufeff")
    match = _BEFORE_ROWS.match(text)
    if match is None or json.loads(match[1]) in columns:  # the object is itself a row, with a list of messages
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
