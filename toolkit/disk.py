"""Files on their way to the disk and back: what caches and checkpoints both need."""

import hashlib
import os
from pathlib import Path

_BLOCK_BYTES = 1 << 22


def flush(path: Path) -> None:
    """Make sure that a file or a folder is on the disk, not only on its way.

    Raises:
        OSError: it is not there, or the disk fails.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file's bytes in hexadecimal.

    Raises:
        OSError: it cannot be read.
    """
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def unused(path: Path) -> Path:
    """Return the path, or the first with a number before its ending that nothing has."""
    number, free = 1, path
    while free.exists():
        number += 1
        free = path.with_name(f"{path.stem}-{number}{path.suffix}")
    return free
