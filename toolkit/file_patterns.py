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
    followed, but each directory comes once, as links to one above would never end. DataError if there are too many
    entries: a link may lead to the whole disk. `shown`: the path as the user wrote it; `onerror`: as of `os.walk`.
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
    """Return the files that a pattern with `*`, `?`, `[…]` and `**` means; as the module glob, but within bounds."""
    parts = Path(pattern).parts
    first = next((index for index, part in enumerate(parts) if glob.has_magic(part)), None)
    if first is None:
        return []
    folder, wanted = Path(*parts[:first]), parts[first:]
    # Of several ** in a row, which mean the same as one, the last.
    wanted = tuple(part for index, part in enumerate(wanted) if wanted[index : index + 2] != ("**", "**"))

    @cache
    def fits(pattern_parts: tuple[str, ...], names: tuple[str, ...], is_folder: bool) -> bool:
        """Whether a path with these names is what parts of the pattern mean; of a folder, whether one in it may be."""
        if not names:
            return set(pattern_parts) <= {"**"} or is_folder
        if not pattern_parts:
            return False
        first, is_shown = pattern_parts[0], names[0][0] != "."
        if first == "**":  # no name, or this one and those that follow
            without = fits(pattern_parts[1:], names, is_folder)
            return without or (is_shown and fits(pattern_parts, names[1:], is_folder))
        is_same = fnmatch.fnmatchcase(names[0], first) and (is_shown or first[0] == ".")
        return is_same and fits(pattern_parts[1:], names[1:], is_folder)

    walked = walk(folder, pattern, lambda path: fits(wanted, path.parts[len(folder.parts) :], True))
    files: list[Path] = []
    for directory, names in list(walked):  # first whether there are too many
        above = directory.parts[len(folder.parts) :]
        files += [directory / name for name in names if fits(wanted, (*above, name), False)]
    return [path for path in files if os.path.isfile(path)]
