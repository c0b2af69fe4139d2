"""Several processes that make parts, in order, with little in flight; and what is said when one of them is killed."""

import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import NamedTuple

from toolkit import children
from toolkit.config.schema import RowFormat
from toolkit.data.encode import ChatEncoder
from toolkit.data.files import Block
from toolkit.data.parts import PartMaker, Rules
from toolkit.data.sources import DataFile
from toolkit.errors import DataError
from toolkit.messages import current_language, set_language, tr

LEAST_BYTES_FOR_PROCESSES = 8 << 20
"""Starting a process takes seconds; less data than this is tokenised at once."""
_AHEAD = 2


class Made(NamedTuple):
    """One part that is ready."""

    file_number: int
    file: DataFile
    block: Block
    """What the part is made of."""
    path: Path
    """The part."""
    is_new: bool
    """Whether it had to be made now."""


def make_parts(
    blocks: Iterable[tuple[int, DataFile, Block]], encoder: ChatEncoder, rules: Rules, folder: Path, num_workers: int
) -> Iterator[Made]:
    """Yield the parts of blocks in their order.

    Args:
        blocks: of `sources.read_blocks`.
        encoder: see `PartMaker`.
        rules: see `PartMaker`.
        folder: where parts are kept; made if it is not there.
        num_workers: processes; 1 works in this one.

    Raises:
        DataError: a process was killed.
        OSError: a part cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if num_workers == 1:
        maker = PartMaker(encoder, rules, folder)
        for number, file, block in blocks:
            path, is_new = maker.make(block, file.row_format, file.columns)
            yield Made(number, file, block, path, is_new)
        return
    executor = children.workers(num_workers, _start, encoder, rules, folder, current_language())
    try:
        yield from _in_order(executor, blocks, num_workers * _AHEAD)
    except BrokenProcessPool:
        raise DataError(
            tr(
                "A tokenising process was killed, most likely by the system for lack of memory (see `dmesg`). What was "
                "finished is kept: the same command goes on from there. With less memory: prepare.num_workers={fewer}.",
                fewer=max(1, num_workers // 2),
            )
        ) from None
    finally:
        executor.shutdown(cancel_futures=True)


def _in_order(
    executor: ProcessPoolExecutor, blocks: Iterable[tuple[int, DataFile, Block]], most: int
) -> Iterator[Made]:
    waiting: deque[tuple[int, DataFile, Block, Future[tuple[Path, bool]]]] = deque()

    def oldest() -> Made:
        number, file, block, future = waiting.popleft()
        return Made(number, file, block, *future.result())

    for number, file, block in blocks:
        future = executor.submit(_make, block, file.row_format, file.columns)
        waiting.append((number, file, block, future))
        if len(waiting) >= most:
            yield oldest()
    while waiting:
        yield oldest()


_maker: PartMaker | None = None


def _start(encoder: ChatEncoder, rules: Rules, folder: Path, language: str) -> None:
    """Prepare a process: one thread each, as there is a process for every core."""
    global _maker
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    set_language(language)
    _maker = PartMaker(encoder, rules, folder)


def _make(block: Block, row_format: RowFormat, columns: dict[str, str]) -> tuple[Path, bool]:
    assert _maker is not None
    return _maker.make(block, row_format, columns)


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0))


class Pace:
    """Says how far the work is, every few seconds.

    Args:
        total: bytes in all.
        say: receives the lines.
    """

    FIRST_S, EVERY_S = 5.0, 10.0

    def __init__(self, total: int, say: Callable[[str], None]) -> None:
        self.total, self.say = max(total, 1), say
        self.started = time.monotonic()
        self.next = self.started + self.FIRST_S
        self.new_tokens = self.new_bytes = 0
        self.line = ""

    def update(self, done: int, rows: int, new_bytes: int, new_tokens: int) -> None:
        """Tell where the work is.

        Args:
            done: bytes done, those of kept parts included.
            rows: rows done.
            new_bytes: bytes of them that were worked on now; the time left is reckoned from these.
            new_tokens: tokens of them.
        """
        self.new_bytes, self.new_tokens = new_bytes, new_tokens
        seconds = max(time.monotonic() - self.started, 1e-6)
        left = (self.total - done) / (new_bytes / seconds) if new_bytes else 0
        self.line = tr(
            "Tokenising: {rows} rows, {percent} %, {rate} tokens/s, about {minutes} min left.",
            rows=f"{rows:,}",
            percent=f"{100 * done / self.total:.0f}",
            rate=f"{new_tokens / seconds:,.0f}",
            minutes=f"{left / 60:.1f}",
        )
        if time.monotonic() >= self.next:
            self.next = time.monotonic() + self.EVERY_S
            self.say(self.line)

    def status(self) -> str:
        """Return the last line."""
        return self.line
