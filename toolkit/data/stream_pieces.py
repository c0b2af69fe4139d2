"""The part of each file that a lane of a stream reads, block by block, and how a file is recognised later."""

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

from toolkit.config.files import TABLE_SUFFIXES
from toolkit.config.schema import RowFormat
from toolkit.data import readers
from toolkit.data.readers import BOM, Block, DataFile
from toolkit.data.remote import RemotePath
from toolkit.data.tables import parquet_file, table_rows
from toolkit.messages import DataError, reading, tr

_BLOCK_BYTES, _BLOCK_ROWS = 1 << 16, 256
"""Size of a block: of JSONL, and of a Parquet file."""
_LARGEST_LINE_BYTES = 1 << 28
_ENDS_BYTES = 1 << 16
"""Bytes at the beginning and at the end of a file by which it is recognised."""
_SAMPLED_BYTES = 1 << 20
"""How much of a file that is not seekable is read for an estimate."""
GOLDEN, WORD = 0x9E3779B97F4A7C15, 1 << 64
"""Multiples of the golden ratio, modulo 1, divide any stretch of numbers into shares that are off by one at most."""


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of a file that a lane reads, from `begin` to `end` of its `size` bytes: lines that begin there, a like
    share of the rows of a Parquet file, or of the blocks of a file that can only be read from its beginning.
    """

    file: DataFile
    begin: int
    end: int
    size: int

    @property
    def lines_before(self) -> int:
        """Return how many lines of the file are before the piece, by reading them; of Parquet and others 0, and of a
        URL, of which `named_file` says where the piece begins.
        """
        is_counted = self.begin and self.is_lines and not isinstance(self.file.path, RemotePath)
        return _count_lines(self.file.path, self.size, self.begin) if is_counted else 0

    @property
    def named_file(self) -> DataFile:
        """Return the file as messages name it: with the byte from which on its lines are counted, if that is not 0."""
        is_part = self.begin and self.is_lines and isinstance(self.file.path, RemotePath)
        return replace(self.file, path=RemotePath(f"{self.file.path}@{self.begin}")) if is_part else self.file

    @property
    def is_lines(self) -> bool:
        """Whether the file is plain JSONL, which can be read from any line on."""
        return _is_lines_of(self.file.path, self.size, tuple(self.file.columns.values()))

    @property
    def is_seekable(self) -> bool:
        """Whether the piece can be read without what stands before it in the file."""
        return self.is_lines or self.file.path.suffix.lower() == ".parquet"

    def sampled_blocks(self) -> Iterator[tuple[Block, float]]:
        """Yield blocks from the beginning, each with the bytes of the file that it takes: one if the piece is seekable;
        else, as compressed bytes are read in large steps, about a MiB of the file.
        """
        before = 0  # bytes of the file before the block
        for block, *_ in self.blocks(0, 0):
            if self.is_lines:
                yield block, len(block.content)
                return
            if self.is_seekable:  # Parquet: its rows times the mean bytes of all rows up to its end
                rows_to_its_end = block.first - 1 + len(block.content)
                yield block, block.position * len(block.content) / rows_to_its_end
                return
            yield block, block.position - before
            before = block.position
            if before > _SAMPLED_BYTES:
                return

    def share_before(self, offset: int) -> float:
        """Return which part of the piece is before an offset, from 0 to 1; 0 where that is not known."""
        if not offset or not self.is_seekable:
            return 0.0
        # An offset of JSONL is in bytes, of a Parquet file in rows, which are taken to be equally large.
        at = offset if self.is_lines else offset * self.size / _num_rows(self.file.path, self.size)
        return min(1.0, max(0.0, (at - self.begin) / (self.end - self.begin)))

    @property
    def file_with_format(self) -> DataFile:
        """Return the file with the format that its first row shows, as the tokenized cache reads it."""
        file = self.file
        return _with_format(file.path, self.size, file.source, tuple(sorted(file.columns.items())), file.row_format)

    def blocks(self, offset: int, line: int) -> Iterator[tuple[Block, int, int]]:
        """Yield (block, offset and line where the next begins) from a place on, see `stream.Start`; DataError if the
        file's size is not what it was when the stream was opened.
        """
        if size_of(self.file) != self.size:
            raise DataError(
                "{path} was changed while the run was reading it. Restore it, then resume the run.", path=self.file.path
            )
        if self.is_lines:
            yield from self._line_blocks(offset, line)
        elif self.file.path.suffix.lower() == ".parquet":
            with reading(self.file.path, DataError):
                yield from self._row_blocks(offset)
        else:
            for index, block in enumerate(readers.blocks(self.file.path, _BLOCK_BYTES, self.file.columns.values())):
                # As if the block were at a byte that the golden ratio gives: pieces get shares by their bytes.
                position = (index + 1) * GOLDEN % WORD * self.size // WORD
                if index >= offset and self.begin <= position < self.end:
                    yield block, index + 1, 0

    def _line_blocks(self, offset: int, line: int) -> Iterator[tuple[Block, int, int]]:
        """Yield as `blocks` of JSONL from the byte `offset` on, before which are `line` lines of the piece."""
        with readers.open_data_file(self.file.path) as (_, raw):
            end = _line_start(raw, self.end)
            offset = max(offset, _line_start(raw, self.begin))
            raw.seek(offset)
            while offset < end:
                content = raw.read(min(_BLOCK_BYTES, end - offset))
                if offset + len(content) < end:
                    content += raw.readline(_LARGEST_LINE_BYTES)
                first, line = line + 1, line + content.count(b"\n")
                text = content if offset else content.removeprefix(BOM)
                offset += len(content)
                if text.strip():
                    yield Block(first, text, offset), offset, line

    def _row_blocks(self, offset: int) -> Iterator[tuple[Block, int, int]]:
        """Yield as `blocks` of a Parquet file from row `offset` on (from 0); blocks end at multiples of _BLOCK_ROWS."""
        total = _num_rows(self.file.path, self.size)
        end = total * self.end // self.size
        offset = max(offset, total * self.begin // self.size)
        rows_of_block: list[Any] = []  # rows from `offset` on that no block had yet
        if offset >= end:
            return
        names = {*readers.FIELDS, *self.file.columns.values()}
        for rows, _ in table_rows(self.file.path, names, offset, _BLOCK_ROWS):
            for row in rows:
                rows_of_block.append(row)
                next_row = offset + len(rows_of_block)
                if next_row % _BLOCK_ROWS == 0 or next_row == end:
                    yield Block(offset + 1, list(enumerate(rows_of_block)), self.size * next_row // total), next_row, 0
                    offset, rows_of_block = next_row, []
                if next_row == end:
                    return


def _line_start(raw: Any, at: int) -> int:
    """Return where the first line begins that begins at a byte of a file or after it."""
    if not at:
        return 0
    raw.seek(at - 1)  # a line begins at `at` if the byte before is a newline
    while (line := raw.readline(_BLOCK_BYTES)) and not line.endswith(b"\n"):
        pass
    return int(raw.tell())


@lru_cache(1 << 16)
def _is_lines_of(path: Path, size: int, columns: tuple[str, ...]) -> bool:
    """See `Piece.is_lines`; `size` keeps apart what is cached of a file before and after a change."""
    name = readers.uncompressed_name(path.name)
    if name.endswith((*TABLE_SUFFIXES, ".csv", ".tsv")):
        return False
    with readers.open_data_file(path) as (file, raw):  # which are the same if the file is not compressed
        return file is raw and readers.start_of_row_list(file, path, {*readers.FIELDS, *columns}) is None


@lru_cache(1 << 16)
def _num_rows(path: Path, size: int) -> int:
    """Return the number of rows of a Parquet file of `size` bytes, by which a changed one is read again."""
    with reading(path, DataError), parquet_file(path) as file:
        return int(file.metadata.num_rows)


@lru_cache(1 << 10)
def _count_lines(path: Path, size: int, end: int) -> int:
    """Return how many lines of a file of `size` bytes (a changed one is read again) begin before the byte `end`."""
    num_newlines = 0
    with reading(path, DataError), path.open("rb") as file:
        while end > 0 and (content := file.read(min(1 << 20, end))):
            num_newlines += content.count(b"\n")
            end -= len(content)
    return num_newlines if content.endswith(b"\n") else num_newlines + 1  # with the line in which `end` is


def size_of(file: DataFile) -> int:
    """Return the bytes of a file; DataError if it is gone."""
    with reading(file.path, DataError):
        return file.path.stat().st_size


def pieces_of(files: Sequence[DataFile], sizes: Sequence[int], lane: int, lanes: int) -> list[Piece]:
    """Return what a lane reads of the files of a source, of these `sizes`: as many bytes as each other lane."""
    ends = [*accumulate(sizes, initial=0)]
    first, last = ends[-1] * lane // lanes, ends[-1] * (lane + 1) // lanes
    pieces = []
    for file, begin, end in zip(files, ends, ends[1:], strict=False):
        if first < end and begin < last:
            pieces.append(Piece(file, max(first, begin) - begin, min(last, end) - begin, end - begin))
    return pieces


def signatures_of(files: Sequence[DataFile]) -> list[list[Any]]:
    """Return name, size and a digest of the beginning and the end of each file, to see later that it is the same; of
    one behind a URL what its server calls this version.
    """
    signatures = []
    for file in files:
        if tag := getattr(file.path, "tag", ""):
            signatures.append([str(file.path), size_of(file), tag])
            continue
        with reading(file.path, DataError), file.path.open("rb") as content:
            size = content.seek(0, os.SEEK_END)
            content.seek(0)
            digest = hashlib.sha256(content.read(_ENDS_BYTES))
            content.seek(max(0, size - _ENDS_BYTES))
            digest.update(content.read(_ENDS_BYTES))
        signatures.append([file.path.name, size, digest.hexdigest()[:16]])
    return signatures


@lru_cache(1 << 16)
def _with_format(
    path: Path, size: int, source: int, columns: tuple[tuple[str, str], ...], row_format: RowFormat
) -> DataFile:
    """See `Piece.file_with_format`; `auto` stays if no row can be parsed. `size`: as in `_is_lines_of`."""
    file = DataFile(path, source, row_format, dict(columns))
    for block in readers.blocks(path, _BLOCK_BYTES, file.columns.values()):
        if with_known_format := readers.with_format(file, block):
            return with_known_format
    return file


def check_same(before: Sequence[Sequence[Any]], now: Sequence[Sequence[Any]]) -> None:
    """Raise a DataError for the first file of a checkpoint's stream that is gone or changed. See `signatures_of`."""
    if before == now:
        return
    names = [name for name, *_ in now]
    for signature in before:
        if signature not in now:
            sentence = (
                tr("{file} has changed since the checkpoint was saved", file=signature[0])
                if signature[0] in names
                else tr("{file} is gone, which the checkpoint's run was reading", file=signature[0])
            )
            break
    else:
        sentence = tr("there are files that the checkpoint's run did not read, or they are in another order")
    raise DataError(
        "the position in the stream cannot be resumed: {reason}. Put the files back as they were, or train the new "
        "ones from their beginning: checkpoint.allow_changes=[data].",
        reason=sentence,
    )
