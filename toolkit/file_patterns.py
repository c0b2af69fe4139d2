"""Which files a pattern means, and what is below a directory, within bounds: a link may lead to the whole disk."""

import fnmatch
import glob
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

from toolkit.messages import DataError

_MOST_ENTRIES = 100_000


def walk(
    folder: Path, shown: str, enter: Callable[[Path], bool], onerror: Callable[[OSError], object] | None = None
) -> Iterator[tuple[Path, list[str]]]:
    """Yield a directory and each one below it that `enter` accepts, with the names of the files in it. Links are
    followed, but each directory comes once, as links to one above would never end. DataError for more entries than
    `_MOST_ENTRIES`. `shown`: the path as the user wrote it; `onerror`: as of `os.walk`.
    """
    seen: set[str] = set()
    count = 0
    for directory, folders, names in os.walk(folder, onerror=onerror, followlinks=True):
        real = ""
        with suppress(OSError):  # a link that has just been removed
            real = os.path.realpath(directory)
        if not real or real in seen:
            folders.clear()
            continue
        seen.add(real)
        count += len(folders) + len(names)
        if count > _MOST_ENTRIES:
            raise DataError(
                "'{path}' has more than {most} files below it. Name the directory that holds the data.",
                path=shown,
                most=f"{_MOST_ENTRIES:,}",
            )
        folders[:] = [name for name in folders if enter(Path(directory, name))]
        yield Path(directory), names


def matching(pattern: str) -> list[Path]:
    """Return the files that match a pattern with `*`, `?`, `[…]` and `**`; [] for a path without any of these. As the
    module glob, which never ends where links lead to directories above: here `walk` reads directories, within bounds.
    """
    parts = Path(pattern).parts
    num_plain = next((index for index, part in enumerate(parts) if glob.has_magic(part)), None)
    if num_plain is None:
        return []
    base, globs = Path(*parts[:num_plain]), parts[num_plain:]  # "data/*/a?.csv" -> "data", ("*", "a?.csv")
    # Several ** in a row mean the same as one: the last is kept.
    globs = tuple(part for index, part in enumerate(globs) if globs[index : index + 2] != ("**", "**"))

    def below_base(path: Path) -> tuple[str, ...]:
        return path.parts[len(base.parts) :]

    def can_hold_matches(directory: Path) -> bool:
        return _matches(globs, below_base(directory), is_prefix=True)

    # All directories are walked first: too many entries are a DataError.
    paths = [directory / name for directory, names in list(walk(base, pattern, can_hold_matches)) for name in names]
    files = [path for path in paths if _matches(globs, below_base(path)) and os.path.isfile(path)]
    _matches.cache_clear()  # which holds the names of all that were walked
    return files


@cache
def _matches(globs: tuple[str, ...], names: tuple[str, ...], is_prefix: bool = False) -> bool:
    """Whether the names of a path match the globs, one by one: ("a", "b.txt") matches ("**", "*.txt").
    `is_prefix`: names that match the first globs alone are enough, as more names may follow.
    """
    if not names:
        return is_prefix or set(globs) <= {"**"}  # ** matches no name, too
    if not globs:
        return False
    is_hidden = names[0].startswith(".")
    if globs[0] == "**":  # either it ends before this name, or it takes the name, unless that is hidden
        return _matches(globs[1:], names, is_prefix) or (not is_hidden and _matches(globs, names[1:], is_prefix))
    # As in a shell, a hidden name is matched by a glob that begins with a dot alone.
    is_match = fnmatch.fnmatchcase(names[0], globs[0]) and (not is_hidden or globs[0].startswith("."))
    return is_match and _matches(globs[1:], names[1:], is_prefix)
