"""Samples read from files while they are trained (`data.streaming`): nothing is cached, memory is bounded, and a
position is a few numbers.

A step takes one sequence from each *lane*; there are as many lanes as sequences in a step, so that what a step trains
does not depend on ranks. A lane reads its own part of each source, an equal share of its bytes, in order, and begins
again at the end. It reads *blocks* of rows, tokenizes them, and makes sequences of the blocks of a *window*: enough
rows to shuffle and to pack. A window is a function of where it begins, so a lane's position is that place and how many
of the window's sequences are done.
"""

import hashlib
import signal
from bisect import bisect
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from toolkit import children
from toolkit.config.objective import data_unit
from toolkit.config.schema import Packing, RunConfig
from toolkit.data import packing
from toolkit.data.formats import reader_of
from toolkit.data.readers import Block, DataFile, place_of
from toolkit.data.sampler import Permutation
from toolkit.data.store import items_of
from toolkit.data.stream_pieces import GOLDEN, WORD, Piece, pieces_of, signatures_of, size_of
from toolkit.data.tokenize import TOLERATED_BAD_ROWS, PrepareReport, bad_row, check_part
from toolkit.data.tokenize_workers import BuiltPart, Part, PartBuilder, RowCounts
from toolkit.messages import DataError, current_language, say, tr, warn
from toolkit.sample_types import ChatEncoder

_LEAST_PACKED = 16
"""Packed sequences that a window fills at least: of these the last is padded."""
_NAMED_BAD_ROWS = 5
_SAMPLED_PARTS, _SAMPLED_TABLE_PARTS = 32, 8
"""Equal parts of a source whose first blocks are tokenized to estimate what a pass over it holds; of Parquet files,
where a block is found by decoding the rows before it in its row group.
"""
_SAMPLED_FILES = 4
"""Files of a source that are not seekable which are read for it."""


Places = list[list[int]]
"""Where a lane is in each source: a `Start`'s numbers, and how many sequences of the window there are done."""


class StreamSample(NamedTuple):
    """A sample and the row that it comes from."""

    ids: NDArray[Any]
    trained: NDArray[np.bool_]
    piece: Piece
    line: int
    """Of the file, or of the piece of a JSONL file that begins in its middle (`Piece.lines_before`)."""
    item: int
    """See `place_of`."""

    @property
    def where(self) -> str:
        """Return `place_of` the row."""
        return place_of(self.piece.named_file.path, self.line + self.piece.lines_before, self.item)


class Start(NamedTuple):
    """Where a block of a lane's part of a source begins."""

    epoch: int = 0
    piece: int = 0
    offset: int = 0
    """Bytes of a JSONL file, rows of a Parquet file, blocks of others; 0: where the piece begins."""
    line: int = 0
    """Lines of the piece before it."""


def _prepare_worker(function: Callable[..., Part], language: str) -> None:
    """Prepare a worker process to call `function`, with messages in `language`. It ignores SIGTERM and SIGINT: the run
    that got one still needs batches for its last step.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    children.keep_function(function, language)


def encode(maker: PartBuilder, file: DataFile, block: Block) -> Part:
    """Tokenize a block of a file whose format is known."""
    return maker.encode(block, reader_of(file.row_format, file.columns))


def samples_of(part: Part, piece: Piece, block: Block) -> list[StreamSample]:
    """Return the samples of a block."""
    ends = np.cumsum(part.lengths, dtype=np.int64)
    lines, items = part.lines + np.uint32(block.first), items_of(part, block)
    origins = zip(ends - part.lengths, ends, lines.tolist(), items.tolist(), strict=True)
    return [
        StreamSample(part.ids[begin:end], part.trained[begin:end], piece, *origin) for begin, end, *origin in origins
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """What a pass over a source holds, from blocks that are spread over it."""

    samples: list[StreamSample]
    """Of these blocks."""
    report: PrepareReport
    """What became of their rows."""
    times: float
    """Bytes of the source per byte of them."""
    num_sequences: float
    """In which the source's samples are trained."""


class Stream:
    """Training data that are read as they are trained; see the module."""

    def __init__(self, cfg: RunConfig, encoder: ChatEncoder, files: Sequence[DataFile]) -> None:
        self.data, self.seed, self.lanes = cfg.data, cfg.run.seed, cfg.batch.global_size
        self.is_packed = cfg.data.packing is Packing.packed
        self.unit = data_unit(cfg)[1]
        """Samples that stay together: 2, a chosen and a rejected answer; else 1."""
        self.files = list(files)
        self.sources = [[file for file in files if file.source == n] for n in range(len(cfg.data.sources))]
        # A copy, as a tokenizer must not be used by two threads at once. Nothing is written to the folder.
        self.maker = PartBuilder(deepcopy(encoder), cfg, Path())
        self.sizes = [[size_of(file) for file in of_source] for of_source in self.sources]
        self.counts = RowCounts()
        self.rows = self.bad_rows = 0
        """That this process has read, in all its passes."""
        self.bad_rows_file: Path | None = None
        self.passes: dict[int, list[float]] = {}
        """Lane -> how many times it has read its part of each source."""

    @cached_property
    def signatures(self) -> list[list[Any]]:
        """How each file is recognised when the run is resumed; see `signatures_of`."""
        return signatures_of(self.files)

    @cached_property
    def estimates(self) -> list[Estimate]:
        """What a pass over each source holds; DataError if no sampled row can be trained. The same on all ranks."""
        estimates = [self._estimate(source) for source in range(len(self.sources))]
        if not any(estimate.samples for estimate in estimates):
            raise DataError(tr("data.streaming: no row of the first files can be trained."))
        return estimates

    def _estimate(self, source: int) -> Estimate:
        """Return what a pass over a source holds, by tokenizing and packing `_sampled_blocks` as in training."""
        samples, report, num_bytes = list[StreamSample](), PrepareReport(), 0.0
        window_begin, num_sequences = 0, 0.0  # index of the window's first sample; sequences of the windows before it
        for piece, block, size in self._sampled_blocks(source):
            file = piece.file_with_format
            part = encode(self.maker, file, block)
            self._check_rows(piece, block, part)
            report.add_part(BuiltPart(0, file, block, Path(), is_new=True), part.counts)
            samples += samples_of(part, piece, block)
            num_bytes += size
            if self.is_full(samples[window_begin:]):
                num_sequences += len(self.sequences(samples[window_begin:], ""))
                window_begin = len(samples)
        if window_begin:  # there are full windows: the samples behind them are taken to be like theirs
            num_sequences *= len(samples) / window_begin
        else:
            num_sequences = len(self.sequences(samples, ""))
        times = sum(self.sizes[source]) / max(1.0, num_bytes)
        return Estimate(samples=samples, report=report, times=times, num_sequences=times * num_sequences)

    def _sampled_blocks(self, source: int) -> Iterator[tuple[Piece, Block, float]]:
        """Yield (piece, first block, bytes that this takes in the file) of each of some equal parts of a source; of a
        file that is not seekable its first blocks.
        """
        files, sizes, begun = self.sources[source], self.sizes[source], set[Path]()
        count = _SAMPLED_TABLE_PARTS if files[0].path.suffix.lower() == ".parquet" else _SAMPLED_PARTS
        for part in range(count):
            piece = pieces_of(files, sizes, part, count)[0]
            if not piece.is_seekable:
                if piece.file.path in begun or len(begun) == _SAMPLED_FILES:
                    continue
                begun.add(piece.file.path)
                piece = replace(piece, begin=0, end=piece.size)  # the whole file
            for block, num_bytes in piece.sampled_blocks():
                yield piece, block, num_bytes

    @cached_property
    def shares(self) -> list[float]:
        """Each source's share of the sequences, so that its samples come `weight` times per epoch, by the estimates."""
        sources = zip(self.estimates, self.data.sources, strict=True)
        parts = [estimate.num_sequences * source.weight for estimate, source in sources]
        return [part / sum(parts) for part in parts]

    @cached_property
    def steps_per_epoch(self) -> int:
        """Steps after which each source was read `weight` times, as far as estimated."""
        sources = zip(self.estimates, self.data.sources, strict=True)
        return max(1, round(sum(estimate.num_sequences * source.weight for estimate, source in sources) / self.lanes))

    def total_per_epoch(self, size: Callable[[StreamSample], int]) -> int:
        """Return the sum of a size over the samples of an epoch, which has those of each source `weight` times."""
        sources = zip(self.estimates, self.data.sources, strict=True)
        return round(
            sum(source.weight * estimate.times * sum(map(size, estimate.samples)) for estimate, source in sources)
        )

    @property
    def samples_per_epoch(self) -> int:
        """How many samples (pairs, where two stay together) an epoch has, as estimated."""
        return round(self.total_per_epoch(lambda _: 1) / self.unit)

    def say_estimate(self) -> None:
        """Say what the sampled rows became, and how long an epoch is by them."""
        lengths = sorted(len(sample.ids) for estimate in self.estimates for sample in estimate.samples)
        say(
            "{rows} rows from all parts of the files, tokenized: {median} tokens in the median, {longest} at most. By "
            "them an epoch is about {samples} samples, {steps} steps (an estimate).",
            rows=f"{sum(estimate.report.rows_read for estimate in self.estimates):,}",
            median=f"{lengths[len(lengths) // 2]:,}",
            longest=f"{lengths[-1]:,}",
            samples=f"{self.samples_per_epoch:,}",
            steps=f"{self.steps_per_epoch:,}",
        )
        for estimate in self.estimates:
            estimate.report.print_dropped()
            estimate.report.print_longer(self.data)

    def source_at(self, lane: int, number: int) -> int:
        """Return the source of a lane's sequence `number`. Shares hold over any stretch of a lane, up to a sequence."""
        if len(self.sources) == 1:
            return 0
        # Multiples of the golden ratio, from 0 to 1, which spread evenly; each lane begins elsewhere.
        offset = int.from_bytes(hashlib.sha256(f"{self.seed} lane {lane}".encode()).digest()[:8], "big")
        value = (number * GOLDEN + offset) % WORD / WORD
        upper_bounds = [*accumulate(self.shares)]  # the source is the first whose bound is above the value
        return bisect(upper_bounds[:-1], value)

    @contextmanager
    def executor(self) -> Iterator[Executor]:
        """Yield what tokenizes ahead: a thread, or `data.num_workers` processes."""
        count, encode_block = self.data.num_workers, partial(encode, self.maker)
        initialization = _prepare_worker, encode_block, current_language()
        pool = children.workers(count, *initialization) if count else ThreadPoolExecutor(1)
        try:
            yield pool
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def steps(
        self, step: int, positions: Mapping[int, Places]
    ) -> Generator[tuple[list[list[StreamSample]], dict[int, Places]]]:
        """Yield for each step, without end, (a sequence, which is a list of samples, of each lane; where the lanes are
        after it). `step`: steps done; `positions`: lane -> where it is.
        """
        with self.executor() as executor:
            readers_of = {  # lane -> a reader for each source
                lane: [LaneReader(self, executor, lane, source, position) for source, position in enumerate(places)]
                for lane, places in positions.items()
            }
            while True:
                taken = [readers[self.source_at(lane, step)].take() for lane, readers in readers_of.items()]
                self.passes = {lane: [reader.passes for reader in readers] for lane, readers in readers_of.items()}
                step += 1
                yield taken, {lane: [reader.position for reader in readers] for lane, readers in readers_of.items()}

    def position_of(self, lane: int, positions: Mapping[int, Places]) -> Places:
        """Return where a lane is in each source: at the beginning unless `positions` say where."""
        return positions.get(lane) or [[*Start(), 0] for _ in self.sources]

    def _check_rows(self, piece: Piece, block: Block, part: Part) -> Block:
        """Raise a DataError if a row of a block stops the run. Return the block, whose first line counts from the
        file's beginning if a row of it cannot be used, else from the piece's.
        """
        if part.counts.bad or part.counts.too_long:  # else the lines before the piece need not be counted
            block = replace(block, first=block.first + piece.lines_before)
            check_part(self.data, BuiltPart(0, piece.named_file, block, Path(), is_new=True), part)
        return block

    def count(self, piece: Piece, block: Block, part: Part) -> None:
        """Add a block's counts to the totals; warn of the first bad rows, and append all to `bad_rows_file`. DataError
        for a row that must not be skipped, or more bad rows than `data.max_bad_fraction`.
        """
        counts = part.counts
        self.rows += counts.rows
        self.counts.add(counts)
        block, path = self._check_rows(piece, block, part), piece.named_file.path
        for bad in counts.bad:
            self.bad_rows += 1
            row, reason, _ = bad
            location = place_of(path, *block.line_and_item(*row, in_error=True))
            if self.bad_rows <= _NAMED_BAD_ROWS:
                warn("{place}: {reason}. The row is skipped.", place=location, reason=reason)
            if self.bad_rows_file:
                with open(self.bad_rows_file, "a", encoding="utf-8", errors="backslashreplace") as file:
                    file.write(bad_row(path, block, *bad))
        # Only a bad row exceeds the limit, so `location` and `reason` are those of the last one of this block.
        if self.bad_rows > max(TOLERATED_BAD_ROWS, self.data.max_bad_fraction * self.rows):
            raise DataError(
                "{bad} of {rows} rows that this rank has read cannot be used, more than data.max_bad_fraction = "
                "{fraction} allows. The last is {place}: {reason}.",
                bad=f"{self.bad_rows:,}",
                rows=f"{self.rows:,}",
                fraction=self.data.max_bad_fraction,
                place=location,
                reason=reason,
            )

    def sequences(self, samples: list[StreamSample], key: str) -> list[list[StreamSample]]:
        """Return the samples of a window as sequences, in the order in which they are trained, shuffled by `key`."""
        units = [samples[begin : begin + self.unit] for begin in range(0, len(samples), self.unit)]
        if self.data.shuffle_buffer and units:
            order = Permutation(len(units), f"{self.seed} {key}")(np.arange(len(units)))
            units = [units[number] for number in order.tolist()]
        if not self.is_packed:
            return units
        samples = [sample for [sample] in units]  # pairs are not packed
        lengths = np.array([len(sample.ids) for sample in samples], np.int64)
        rows: dict[int, list[StreamSample]] = {}
        for row, sample in zip(packing.pack(lengths, self.data.max_length).tolist(), samples, strict=True):
            rows.setdefault(row, []).append(sample)  # in the order of their first samples
        return list(rows.values())

    def is_full(self, samples: list[StreamSample]) -> bool:
        """Whether a window holds enough samples: `data.shuffle_buffer`, and where they are packed `packing_window`, or
        if that is 0 the tokens of _LEAST_PACKED sequences.
        """
        wanted = max(1, self.data.shuffle_buffer, self.data.packing_window if self.is_packed else 0)
        if len(samples) // self.unit < wanted:
            return False
        if not self.is_packed or self.data.packing_window:
            return True
        return sum(len(sample.ids) for sample in samples) >= _LEAST_PACKED * self.data.max_length


class _Ahead(NamedTuple):
    """A block that is being tokenized."""

    start: Start
    piece: Piece
    block: Block
    part: "Future[Part]"


class LaneReader:
    """A lane's part of a source: gives its sequences one after another, without end."""

    def __init__(self, stream: Stream, executor: Executor, lane: int, source: int, position: Sequence[int]) -> None:
        self.stream, self.executor, self.lane, self.source = stream, executor, lane, source
        *start, self.done = position  # see `Places`
        self.start = Start(*start)
        """Of the window."""
        self.pieces = pieces_of(stream.sources[source], stream.sizes[source], lane, stream.lanes)
        self._ends = [*accumulate((piece.end - piece.begin for piece in self.pieces), initial=0)]
        self._end = self.start
        """Of the window."""
        self._blocks = self._read(self.start)
        self._ahead: deque[_Ahead] = deque()
        self._sequences: list[list[StreamSample]] | None = None
        self._is_fruitless = self.start == Start()
        """Whether no row of this pass was of use so far; not for a resumed one, whose first rows may have been."""

    @property
    def position(self) -> list[int]:
        """Return where the next sequence is: that of the window, and how many of its sequences are done."""
        return [*self.start, self.done]

    @property
    def passes(self) -> float:
        """Return how many times the part was read."""
        begin, end = self._passes_at(self.start), self._passes_at(self._end)
        return begin + (end - begin) * self.done / max(1, len(self._sequences or ()))

    def _passes_at(self, start: Start) -> float:
        """Return how many times the part was read when a block begins at `start`, by bytes."""
        done: float = self._ends[start.piece]
        if start.offset:
            piece = self.pieces[start.piece]
            done += piece.share_before(start.offset) * (piece.end - piece.begin)
        return start.epoch + done / max(1, self._ends[-1])

    def take(self) -> list[StreamSample]:
        """Return the next sequence, of this window or, if all of it are done, of the next one."""
        if self._sequences is None:
            self._sequences = self._window()
        while self.done >= len(self._sequences):  # more than once where no row of a window is of use
            self.start, self.done = self._peek().start, 0
            self._sequences = self._window()
        self.done += 1
        return self._sequences[self.done - 1]

    def _window(self) -> list[list[StreamSample]]:
        """Return the sequences of the window at `start`: of as many blocks as fill it, up to the end of the pass."""
        samples: list[StreamSample] = []
        num_used = 0
        while not self.stream.is_full(samples):
            if self._peek().start.epoch != self.start.epoch:  # the next block is of the next pass
                if self._is_fruitless:
                    self._raise_fruitless()
                self._is_fruitless = True
                break
            ahead = self._ahead.popleft()
            part = ahead.part.result()
            self.stream.count(ahead.piece, ahead.block, part)
            samples += samples_of(part, ahead.piece, ahead.block)
            self._is_fruitless = self._is_fruitless and not samples
            num_used += 1
        while len(self._ahead) < num_used:  # as many for the next window, to be tokenized while this one is trained
            self._submit()
        self._end = self._peek().start
        return self.stream.sequences(samples, f"{self.source} {self.lane} {self.start}")

    def _peek(self) -> _Ahead:
        """Return the next block without taking it."""
        if not self._ahead:
            self._submit()
        return self._ahead[0]

    def _submit(self) -> None:
        """Read a block and have it tokenized."""
        start, piece, block = next(self._blocks)
        file = piece.file_with_format
        function = children.call_function if self.stream.data.num_workers else partial(encode, self.stream.maker)
        self._ahead.append(_Ahead(start, piece, block, self.executor.submit(function, file, block)))

    def _read(self, start: Start) -> Iterator[tuple[Start, Piece, Block]]:
        """Yield (where it begins, piece, block) of all blocks from `start` on, pass after pass without end."""
        epoch, first_piece, offset, line = start
        while True:
            has_blocks = bool(first_piece or offset)  # a pass that begins in its middle had some
            for number in range(first_piece, len(self.pieces)):
                for block, next_offset, next_line in self.pieces[number].blocks(offset, line):
                    has_blocks = True
                    yield Start(epoch, number, offset, line), self.pieces[number], block
                    offset, line = next_offset, next_line
                offset = line = 0
            if not has_blocks:
                self._raise_fruitless()
            epoch, first_piece = epoch + 1, 0

    def _raise_fruitless(self) -> None:
        """Raise the DataError for a part of which a whole pass gave nothing to train."""
        names = ", ".join(str(piece.file.path) for piece in self.pieces[:3])
        raise DataError(
            "no row can be trained in part {number} of {lanes} of data.sources[{source}] ({files}): a stream is "
            "divided into batch.global_size = {lanes} parts of like size. Give more rows, a smaller "
            "batch.global_size, or data.streaming=false.",
            number=self.lane + 1,
            lanes=self.stream.lanes,
            source=self.source,
            files=names or tr("none"),
        )
