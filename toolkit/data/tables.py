"""Reads the rows of Parquet and Arrow files.

Every batch is validated before a value is touched. Arrow trusts a file's offsets otherwise: of 300 damaged files 11
ended the process with a segmentation fault, others with a bus error (pyarrow 25).
"""

import os
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from toolkit.data.rows import first_repeated
from toolkit.messages import tr

TABLE_VERSION = 2
"""Part of the name of a cache of such files with objects; raise it when these would come out differently."""
_JSON = "extension<arrow.json>"
_TABLE_BATCH_ROWS = 2048
_TABLE_BATCH_BYTES = 64 << 20
_BUFFER_BYTES = 1 << 20
_ROWS_OF_ANY_FILE = 1 << 20
"""A file may hold so many rows, or one for each of its bytes: constant columns pack into nothing."""


def table_rows(
    path: Path, columns: Collection[str], first: int = 0, most_rows: int = _TABLE_BATCH_ROWS
) -> Iterator[tuple[list[dict[str, Any]], int]]:
    """Yield (rows, bytes of the file read so far) batch by batch from a Parquet or Arrow file. `columns` are read, the
    values of others are None. `first`: the number, from 0, of the first row of a Parquet file that is wanted; its row
    groups before that are not read.
    """
    import pyarrow

    if path.suffix.lower() == ".parquet":
        yield from _parquet_rows(path, columns, first, most_rows)
        return
    size, done = path.stat().st_size, 0  # bytes of the file; its rows that were read
    with pyarrow.memory_map(str(path)) as mapped:
        _, batches = _open_arrow(mapped)
        for batch in batches:
            done += batch.num_rows
            _check_row_count(done, size)
            names = batch.schema.names
            read_columns = batch.select([index for index, name in enumerate(names) if name in columns])
            for rows in _rows_of_batch(read_columns, names):
                yield rows, mapped.tell()


def _parquet_rows(
    path: Path, columns: Collection[str], first: int, most_rows: int
) -> Iterator[tuple[list[dict[str, Any]], int]]:
    """Yield as `table_rows` of a Parquet file."""
    size, done = path.stat().st_size, 0  # bytes of the file; its rows before the next batch
    with parquet_file(path) as file:
        total, names = file.metadata.num_rows, file.schema_arrow.names
        _check_row_count(total, size)
        group = 0  # the first that is read: those before it end before row `first`
        while group < file.num_row_groups and done + file.metadata.row_group(group).num_rows <= first:
            done, group = done + file.metadata.row_group(group).num_rows, group + 1
        if group == file.num_row_groups:
            return
        groups, read_names = [*range(group, file.num_row_groups)], [name for name in names if name in columns]
        for full_batch in file.iter_batches(most_rows, row_groups=groups, columns=read_names):
            batch = full_batch.slice(min(max(first - done, 0), full_batch.num_rows))  # without rows before `first`
            done += full_batch.num_rows
            for rows in _rows_of_batch(batch, names):
                yield rows, size * done // max(total, 1)  # as if all rows were equally large


def parquet_file(path: Path) -> Any:
    """Open a Parquet file, or one behind a URL. About a MiB of each column is in memory at a time, not a row group."""
    import pyarrow.parquet

    source = path if os.path.exists(path) else path.open("rb")
    return pyarrow.parquet.ParquetFile(source, buffer_size=_BUFFER_BYTES, pre_buffer=False)


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


def has_struct_columns(path: Path) -> bool:
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


def _rows_of_batch(batch: Any, names: list[str]) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows of a pyarrow RecordBatch as dicts, in lists of about _TABLE_BATCH_BYTES at most. `names`: all
    columns of the file; those that are not in the batch are None. The batch is validated first, as damaged ones crash
    pyarrow; ValueError if it is not valid, or if two columns have the same name.
    """
    if len(set(names)) != len(names):
        raise ValueError(tr("two columns are called '{name}'", name=first_repeated(names)))
    batch.validate(full=True)
    decode = _json_decoder(batch.schema)
    arrow_types = {field.name: str(field.type) for field in batch.schema}
    # Objects of structs have null keys that Arrow added (see `_without_nulls`); those of JSON columns are texts there.
    structs = [name for name, arrow_type in arrow_types.items() if "struct<" in arrow_type and _JSON not in arrow_type]
    all_none = dict.fromkeys(names)
    for start in range(0, batch.num_rows, _TABLE_BATCH_ROWS):
        rows = batch.slice(start, _TABLE_BATCH_ROWS)
        # So many rows have about _TABLE_BATCH_BYTES together, if all are of equal size; rows of nulls may have no byte.
        most_rows = _TABLE_BATCH_ROWS * _TABLE_BATCH_BYTES // max(rows.nbytes, 1)
        rows_at_once = max(1, min(_TABLE_BATCH_ROWS, most_rows))
        for begin in range(0, rows.num_rows, rows_at_once):
            piece = rows.slice(begin, rows_at_once)
            if not batch.num_columns:  # no column of the file is among those that are read
                yield [all_none] * piece.num_rows
                continue
            dicts = ({**row, **{name: _without_nulls(row[name]) for name in structs}} for row in piece.to_pylist())
            yield [{**all_none, **decode(row)} for row in dicts]


def _json_decoder(schema: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return a function that decodes a row's JSON columns, in which `datasets` stores objects with varying keys."""
    fields = [field for field in schema if _JSON in str(field.type)]
    if not fields:
        return dict  # copies the row: there is nothing to decode
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
