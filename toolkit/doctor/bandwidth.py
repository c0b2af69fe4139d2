"""How fast a disk writes and reads, past the memory that the system lends it."""

import mmap
import os
import tempfile
import time
from pathlib import Path

_BLOCK = 1 << 22
_BLOCKS = 64


def disk(folder: Path) -> dict[str, float | str]:
    """Write and read 256 MiB in a folder, around the page cache where the file system allows that.

    Returns:
        `write_mb_s` and `read_mb_s` in 10^6 bytes per second, or `error`.
    """
    block = mmap.mmap(-1, _BLOCK)  # direct access needs memory that begins with a page
    block.write(os.urandom(_BLOCK))
    try:
        handle, name = tempfile.mkstemp(dir=folder, prefix=".doctor-")
        os.close(handle)
        try:
            return {"write_mb_s": _pass(name, os.O_WRONLY, block), "read_mb_s": _pass(name, os.O_RDONLY, block)}
        finally:
            os.unlink(name)
    except OSError as error:
        return {"error": error.strerror or str(error)}


def _pass(name: str, mode: int, block: mmap.mmap) -> float:
    try:
        handle = os.open(name, mode | os.O_DIRECT)
    except OSError:  # tmpfs and some network file systems have no direct access
        handle = os.open(name, mode)
    try:
        started = time.perf_counter()
        for _ in range(_BLOCKS):
            if mode == os.O_WRONLY:
                os.write(handle, block)
            else:
                os.readv(handle, [block])
        if mode == os.O_WRONLY:
            os.fsync(handle)
        return _BLOCK * _BLOCKS / 1e6 / (time.perf_counter() - started)
    finally:
        os.close(handle)
