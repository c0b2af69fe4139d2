"""What is checked of the data before a model is loaded: the first rows of every source, and files named twice."""

import math
import os
import time
from collections.abc import Collection, Hashable, Iterator, Sequence
from itertools import islice
from typing import Any

from toolkit.config.schema import DataConfig, OnBadRow, Packing, RowFormat, SourceConfig
from toolkit.data.formats import RowReader, parse_row
from toolkit.data.readers import blocks, files_of, rows_of
from toolkit.data.sources import DataFile, with_format
from toolkit.errors import Problems
from toolkit.messages import DataError, RowError, ToolkitError, did_you_mean, joined, tr

_ROWS = 1000
"""Rows that are looked at in each file."""
_BYTES = 1 << 20
"""About as much of a file is read for them."""
_SHOWN = 3
"""Errors of one file that are reported in full."""
_MOST_S = 3.0
"""Further files are not opened once this has been spent."""


def check_sources(data: DataConfig, known: Collection[str], problems: Problems) -> str:
    """Read the first rows of every local file; return a sentence where not all were looked at, else "". `known`: places
    such as "data.sources[0]" that are known to be wrong already.
    """
    until = time.monotonic() + _MOST_S
    looked = total = 0
    for name, sources in (("data.sources", data.sources), ("data.validation", data.validation)):
        for index, source in enumerate(sources):
            place = f"{name}[{index}]"
            if source.hub or source.format is RowFormat.docstrings or place in known:
                continue
            files = problems.attempt(files_of, source) or []
            total += len(files)
            for path in files:
                if looked and time.monotonic() > until:
                    break
                looked += 1
                file = DataFile(path, index, source.format, dict(source.columns))
                problems.attempt(_check_file, file, source, place, data.on_bad_row, problems)
    if looked == total:
        return ""
    return tr(
        "The first rows of {looked} of {total} files were read; the others are read by `toolkit prepare`.",
        looked=f"{looked:,}",
        total=f"{total:,}",
    )


def _check_file(file: DataFile, source: SourceConfig, place: str, on_bad_row: OnBadRow, problems: Problems) -> None:
    """Check the columns and the first rows of one file."""
    block = next(blocks(file.path, _BYTES, file.columns.values()), None)
    rows = [(block.first + offset, row) for offset, row in islice(rows_of(block), _ROWS)] if block else []
    if block is None or not rows:
        raise DataError("{path} holds no row.", path=file.path)
    if wrong := _missing_column(source, [row for _, row in rows], place, str(file.path)):
        raise DataError(wrong)
    known = with_format(file, block)
    reader = RowReader(known.row_format, file.columns) if known else None
    errors = []
    for line, row in rows:
        try:
            parse_row(row) if reader is None else reader.read(parse_row(row))
        except RowError as error:
            errors.append(DataError(f"{file.path}:{line}: {error}."))
    if on_bad_row is OnBadRow.skip and len(errors) < len(rows):
        return  # training counts them, and stops at data.max_bad_fraction
    for wrong_row in errors[:_SHOWN]:
        problems.add(wrong_row)
    if len(errors) > _SHOWN:
        sentence = tr(
            "{path}: {count} more of its first {rows} rows cannot be used.",
            path=file.path,
            count=len(errors) - _SHOWN,
            rows=len(rows),
        )
        problems.add(DataError(sentence))


def _missing_column(source: SourceConfig, rows: list[Any], place: str, path: str) -> str:
    """Return what is wrong with `columns`: a name that no row has; "" if all are there or no row can be parsed."""
    names: dict[str, None] = {}
    for row in rows:
        try:
            names |= dict.fromkeys(_names(parse_row(row)))
        except RowError:
            continue
    for ours, theirs in source.columns.items():
        if names and theirs not in names:
            sentence = tr(
                "{place}.columns: {field} = {name}, but no row of {path} has '{name}'; there are {names}.",
                place=place,
                field=ours,
                name=theirs,
                path=path,
                names=", ".join(f"'{name}'" for name in list(names)[:10]),
            )
            return joined(sentence, did_you_mean(theirs, names))
    return ""


def _names(row: Any) -> Iterator[str]:
    """Yield the keys of a row, and of the messages in its lists."""
    if not isinstance(row, dict):
        return
    for name, value in row.items():
        if isinstance(name, str):
            yield name
        for item in value[:20] if isinstance(value, list) else ():
            if isinstance(item, dict):
                yield from (key for key in item if isinstance(key, str))


def check_distinct(data: DataConfig, files: Sequence[DataFile], hashes: Sequence[str] | None = None) -> None:
    """Reject a file that two entries read, under whatever path or link; with hashes also one of the same content."""
    identities: Sequence[Hashable] = hashes or [
        (found.st_dev, found.st_ino) for found in (os.stat(file.path) for file in files)
    ]
    seen: dict[Hashable, list[DataFile]] = {}
    for file, identity in zip(files, identities, strict=True):
        # Other columns or another format make other samples of the same rows, such as a translation in both directions.
        others = seen.setdefault((identity, tuple(sorted(file.columns.items()))), [])
        for other in others:
            formats = {other.row_format, file.row_format}
            if other.source != file.source and (len(formats) == 1 or RowFormat.auto in formats):
                raise DataError(_same_file_text(data, other, file))
        if all(other.source != file.source for other in others):
            others.append(file)


def _same_file_text(data: DataConfig, first: DataFile, second: DataFile) -> str:
    training = len(data.sources)
    numbers = (first.source, second.source)
    entries = [f"data.sources[{n}]" if n < training else f"data.validation[{n - training}]" for n in numbers]
    named = f"{first.path}" if first.path == second.path else f"{first.path} = {second.path}"
    if first.source < training <= second.source:
        return tr(
            "{second} is also training data ({first}): {files}. A validation loss on trained rows says nothing. Use "
            "other rows for validation, or remove data.validation: data.validation_fraction then holds out some rows.",
            first=entries[0],
            second=entries[1],
            files=named,
        )
    return tr(
        "{first} and {second} read the same file: {files}. Remove one of them. To train its rows more often, set "
        "`weight` (weight: 2 takes each row twice per epoch).",
        first=entries[0],
        second=entries[1],
        files=named,
    )


_BYTES_PER_TOKEN = 4
"""Of a row as it is in its file, roughly, in English and in Chinese."""
_ESTIMATE_S = 1.0


def estimate(data: DataConfig, most: int) -> tuple[int, int] | None:
    """Return about how many samples and sequences an epoch has; None if there are more than `most`, or unknown."""
    until = time.monotonic() + _ESTIMATE_S
    kept = 1.0 if data.validation else 1.0 - data.validation_fraction
    rows = size = 0.0
    for source in data.sources:
        if source.hub or source.format is RowFormat.docstrings:
            return None
        weight = kept * (source.mean_weight if source.weights else source.weight)
        try:
            for path in files_of(source):
                for block in blocks(path, _BYTES, source.columns.values()):
                    found = list(rows_of(block))
                    content = block.content
                    length = len(content) if isinstance(content, bytes) else sum(len(str(row)) for _, row in found)
                    rows, size = rows + weight * len(found), size + weight * length
                    if _sequences(data, rows, size) > most or time.monotonic() > until:
                        return None
        except ToolkitError:
            return None  # told by the check of the files
    if data.max_samples:
        rows, size = (value * min(1.0, data.max_samples * kept / max(rows, 1.0)) for value in (rows, size))
    return round(rows), _sequences(data, rows, size)


def _sequences(data: DataConfig, rows: float, size: float) -> int:
    if data.packing is Packing.none:
        return math.ceil(rows)
    return math.ceil(min(rows, size / _BYTES_PER_TOKEN / data.max_length))
