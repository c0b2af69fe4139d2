"""Rows that are added to a file whole, or not at all."""

import os
from pathlib import Path


def append(file: Path, content: bytes) -> None:
    """Add to the end of a file all of it, or nothing: half a row would be no row for any reader.

    Args:
        file: made if it is not there.
        content: whole rows.

    Raises:
        OSError: there is no room, or no folder; the file is as it was.
    """
    with file.open("ab", buffering=0) as handle:
        before = os.fstat(handle.fileno()).st_size
        try:
            written = handle.write(content)
            while written < len(content):
                written += handle.write(content[written:])
        except OSError:
            os.ftruncate(handle.fileno(), before)
            raise
