"""The content of data files that are packed with gzip or Zstandard."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import pyarrow

from toolkit.messages import DataError

_MOST_UNPACKED = 200
"""Times its packed size that a file may unpack to; texts and even repeated rows reach 3 to 100."""
_UNPACKED_OF_ANY_FILE_BYTES = 64 << 20


@contextmanager
def unpacked(raw: IO[bytes], path: Path, codec: str) -> Iterator[io.BufferedReader]:
    """Open the content of a packed file; `codec`: as pyarrow calls it."""
    with pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, "r"), codec) as stream:
        yield io.BufferedReader(_Unpacked(stream, path), 1 << 20)


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
