"""Python code in model folders: which files there are, and whether they may run. Needs no torch."""

import fcntl
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_trusted: set[str] = set()
"""SHA-256 of the files that this process may run; by content, so that checkpoints and exports may have copies."""


def code_files(folder: Path) -> list[Path]:
    """Return the Python files of a folder and of those in it; any of them may run where its code is trusted."""
    return sorted(folder.rglob("*.py"))


def trust(folder: Path) -> None:
    """Let the Python files of a folder run in this process, as they are now."""
    _trusted.update(map(_digest, code_files(folder)))


def is_trusted(folder: Path) -> bool:
    """Return whether there is code in a folder, and all of it may run."""
    files = code_files(folder)
    return bool(files) and all(_digest(file) in _trusted for file in files)


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


@contextmanager
def alone() -> Iterator[None]:
    """Keep this machine's other processes out: transformers (5.23) copies code and imports it without a lock."""
    from transformers.utils.hub import HF_MODULES_CACHE

    place = Path(HF_MODULES_CACHE)
    place.mkdir(parents=True, exist_ok=True)
    with (place / "toolkit.lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
