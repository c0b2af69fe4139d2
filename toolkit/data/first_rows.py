"""What the first rows of data files show before a model is loaded: mistakes, and how many sequences they become."""

import math
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.config.files import is_remote
from toolkit.config.schema import DataConfig, OnBadRow, Packing, RowFormat, RunConfig, SourceConfig
from toolkit.data.data_paths import files_of
from toolkit.data.formats import reader_of
from toolkit.data.readers import Block, DataFile, blocks, place_of, rows_of, with_format
from toolkit.data.rows import parse_row
from toolkit.data.sources import local_files
from toolkit.messages import DataError, Problems, RowError, ToolkitError, did_you_mean, joined, listed, tr
from toolkit.sample_types import ChatEncoder

if TYPE_CHECKING:
    from toolkit.data.tokenize import PrepareReport

_CHECKED_ROWS = 1000
"""Rows of each file that are checked before the model is loaded."""
_CHECKED_BYTES = 1 << 20
"""About as much of a file is read for them."""
_SHOWN_ERRORS = 3
"""Errors of one file that are reported in full."""
_CHECK_S = 3.0
"""Seconds after which no further file is opened."""
_TOKENIZED_BYTES = 1 << 18
"""So much of a file is tokenized to tell what it holds."""
BYTES_PER_TOKEN = 4
"""Of a row as it is in its file, roughly, in English and in Chinese."""
_ESTIMATE_S = 1.0


def check_sources(data: DataConfig, wrong_places: Collection[str], problems: Problems) -> str:
    """Check the first rows of every local file and add what is wrong to `problems`. Return a sentence if time allowed
    only some of the files, else "". `wrong_places`: sources to skip, such as "data.sources[0]", as they are wrong.
    """
    until = time.monotonic() + _CHECK_S
    num_looked_at = total = 0
    for name, sources in (("data.sources", data.sources), ("data.validation", data.validation)):
        for index, source in enumerate(sources):
            location = f"{name}[{index}]"
            is_local = source.path and not is_remote(source.path)
            if not is_local or source.format is RowFormat.docstrings or location in wrong_places:
                continue
            files = problems.attempt(files_of, source) or []
            total += len(files)
            for path in files:
                if num_looked_at and time.monotonic() > until:
                    break
                num_looked_at += 1
                file = DataFile(path, index, source.format, dict(source.columns))
                problems.attempt(_check_file, file, source, location, data.on_bad_row, problems)
    if num_looked_at == total:
        return ""
    return tr(
        "The first rows of {looked} of {total} files were read; the others are read by `toolkit prepare`.",
        looked=f"{num_looked_at:,}",
        total=f"{total:,}",
    )


def _check_file(file: DataFile, source: SourceConfig, location: str, on_bad_row: OnBadRow, problems: Problems) -> None:
    """Check the columns and the first rows of a file: raise a DataError if all of it is unusable, else add the errors
    of its rows to `problems`; with `on_bad_row` = skip only if no row is usable. `location`: its source for messages,
    such as "data.sources[0]".
    """
    block = next(blocks(file.path, _CHECKED_BYTES, file.columns.values()), None)
    num_checked = min(_CHECKED_ROWS, source.max_samples or _CHECKED_ROWS)
    rows = list(islice(rows_of(block), num_checked)) if block else []
    if block is None or not rows:
        raise DataError("{path} holds no row.", path=file.path)
    if wrong := _missing_column(source, [row for _, row in rows], location, str(file.path)):
        raise DataError(wrong)
    with_known_format = with_format(file, block)
    reader = reader_of(with_known_format.row_format, file.columns) if with_known_format else None
    errors = []
    for ordinal, (offset, row) in enumerate(rows):
        try:
            parsed = parse_row(row)
            if reader:  # there is none where no row can be parsed
                reader.read_all(parsed)
        except RowError as error:
            row_location = place_of(file.path, *block.line_and_item(offset, ordinal, in_error=True))
            errors.append(DataError("{place}: {reason}.", place=row_location, reason=error))
    if on_bad_row is OnBadRow.skip and len(errors) < len(rows):
        return  # training counts them, and stops at data.max_bad_fraction
    if with_known_format is None:  # no row can be parsed, and the first says why
        raise errors[0]
    for wrong_row in errors[:_SHOWN_ERRORS]:
        problems.add(wrong_row)
    if len(errors) > _SHOWN_ERRORS:
        sentence = tr(
            "{path}: {count} more of its first {rows} rows cannot be used.",
            path=file.path,
            count=len(errors) - _SHOWN_ERRORS,
            rows=len(rows),
        )
        problems.add(DataError(sentence))


def _missing_column(source: SourceConfig, rows: list[Any], location: str, path: str) -> str:
    """Return an error sentence for a name in the source's `columns` that none of the rows (or their messages) has as a
    key; "" if all are there or no row can be parsed. `location`, `path`: for the sentence.
    """
    names: dict[str, None] = {}  # an ordered set
    for row in rows:
        try:
            parsed = parse_row(row)
        except RowError:
            continue
        if isinstance(parsed, dict):
            # `columns` may also name keys of messages; a conversation's first ones show them.
            first_items = [item for value in parsed.values() if isinstance(value, list) for item in value[:20]]
            messages = [item for item in first_items if isinstance(item, dict)]
            names |= {key: None for mapping in (parsed, *messages) for key in mapping if isinstance(key, str)}
    for field, column in source.columns.items():
        if names and column not in names:
            sentence = tr(
                "{place}.columns: {field} = {name}, but no row of {path} has '{name}'; there are {names}.",
                place=location,
                field=field,
                name=column,
                path=path,
                names=listed(*(f"'{name}'" for name in list(names)[:10])),
            )
            return joined(sentence, did_you_mean(column, names))
    return ""


def formats_and_sizes(data: DataConfig) -> tuple[list[RowFormat], list[int]]:
    """Return (formats of local files, bytes of text of each conversation in their first rows, ascending)."""
    until = time.monotonic() + _CHECK_S
    formats, sizes = set[RowFormat](), list[int]()
    for file in local_files(data):
        if sizes and time.monotonic() > until:
            break
        block = next(blocks(file.path, _CHECKED_BYTES, file.columns.values()), None)
        if block is None or (with_known_format := with_format(file, block)) is None:
            continue
        formats.add(with_known_format.row_format)
        reader = reader_of(with_known_format.row_format, with_known_format.columns)
        for _, row in islice(rows_of(block), min(_CHECKED_ROWS, file.max_rows or _CHECKED_ROWS)):
            with suppress(RowError):
                for conversation in reader.read_all(parse_row(row)):
                    sizes.append(sum(len(str(message["content"]).encode()) for message in conversation.messages))
    return sorted(formats), sorted(sizes)


def estimated_samples(data: DataConfig, most: int) -> tuple[int, int] | None:
    """Return about (samples, sequences) of an epoch, from a second of reading rows and sizes, without a tokenizer;
    packed, several samples are a sequence. None if there are more than `most` sequences, or if the data are not local
    files that can be read in that time.
    """
    from toolkit.data.tokenize import held_out

    until = time.monotonic() + _ESTIMATE_S
    fraction = 0.0 if data.validation or data.validation_rows else data.validation_fraction  # held out of the sources
    all_rows = 0  # each counted once: validation rows are held out before weights repeat the others
    weighted_rows = weighted_bytes = 0.0  # each counted as often as its source's weight
    for source in data.sources:
        if source.hub or source.format is RowFormat.docstrings:
            return None
        weight = source.mean_weight if source.weights else source.weight
        try:
            for num_rows, num_bytes in _block_sizes(source):
                all_rows += num_rows
                weighted_rows += weight * num_rows
                weighted_bytes += weight * num_bytes
                num_so_far = _num_sequences(data, weighted_rows * (1 - fraction), weighted_bytes * (1 - fraction))
                if num_so_far > most or time.monotonic() > until:
                    return None
        except ToolkitError:
            return None  # `check_sources` tells what is wrong with the files
    # The share of the rows that is trained: within data.max_samples, and not held out.
    share = min(1.0, data.max_samples / max(weighted_rows, 1.0)) if data.max_samples else 1.0
    all_rows = max(1, round(all_rows * share))
    validation_rows = 0 if data.validation else data.validation_rows or held_out(all_rows, fraction)
    share *= max(0.0, 1.0 - validation_rows / all_rows)
    return round(weighted_rows * share), _num_sequences(data, weighted_rows * share, weighted_bytes * share)


def _block_sizes(source: SourceConfig) -> Iterator[tuple[int, int]]:
    """Yield (rows, bytes, of tables as text) of each block of a source's files, up to its `max_samples` rows."""
    rows_left = source.max_samples or sys.maxsize
    for path in files_of(source):
        for whole_block in blocks(path, _CHECKED_BYTES, source.columns.values()):
            block, num_rows = first_rows_of(whole_block, rows_left)
            content = block.content
            size = len(content) if isinstance(content, bytes) else sum(len(str(row)) for _, row in content)
            yield num_rows, size
            rows_left -= num_rows
            if not rows_left:
                return


def first_rows_of(block: Block, count: int) -> tuple[Block, int]:
    """Return the first `count` rows of a block as a block, and how many there are."""
    rows = list(islice(rows_of(block), count))
    if not isinstance(block.content, bytes):
        return replace(block, content=rows), len(rows)
    num_lines = rows[-1][0] + 1 if rows else 0  # with the blank ones between the rows: line numbers stay
    content = b"".join(line + b"\n" for line in block.content.split(b"\n")[:num_lines])
    return replace(block, content=content), len(rows)


def _num_sequences(data: DataConfig, rows: float, size: float) -> int:
    """Return about how many sequences `rows` rows of together `size` bytes become; packed ones are full."""
    if data.packing is Packing.none:
        return round(rows)
    return math.ceil(min(rows, size / BYTES_PER_TOKEN / data.max_length))


def are_read_whole(data: DataConfig) -> bool:
    """Whether the rows that `tokenize_first_rows` tokenizes are all rows of the data, as far as sizes show it: those of
    JSONL files. Of a small file that is packed, or of another format, there may be more.
    """
    files = local_files(data)
    return all(file.path.stat().st_size <= _TOKENIZED_BYTES and file.path.suffix == ".jsonl" for file in files)


def tokenize_first_rows(cfg: RunConfig, encoder: "ChatEncoder") -> "tuple[PrepareReport, list[int]]":
    """Tokenize the first rows of every local file as training would, for some seconds, and write nothing. Return (what
    became of the rows, tokens of each sample, ascending). Raises the DataError that training would.
    """
    from toolkit.data.tokenize import PrepareReport, check_part
    from toolkit.data.tokenize_workers import BuiltPart, PartBuilder

    files = local_files(cfg.data)
    maker = PartBuilder(encoder, cfg, Path())
    until = time.monotonic() + _CHECK_S
    report, lengths = PrepareReport(), list[int]()
    for number, file in enumerate(files):
        if time.monotonic() > until:
            break
        block = next(blocks(file.path, _TOKENIZED_BYTES, file.columns.values()), None)
        if block is None:
            continue
        if file.max_rows:
            block, _ = first_rows_of(block, file.max_rows)
        with_known_format = with_format(file, block) or file
        part = maker.encode(block, reader_of(with_known_format.row_format, with_known_format.columns))
        built_part = BuiltPart(number, with_known_format, block, Path(), is_new=True)
        check_part(cfg.data, built_part, part)
        report.add_part(built_part, part.counts)
        lengths += part.lengths.tolist()
    return report, sorted(lengths)
