"""Where checkpoints lie: names, publishing, choosing the newest whole one, and removing old ones."""

import shutil
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

from toolkit.checkpoint.manifest import problems
from toolkit.disk import flush, unused
from toolkit.messages import tr

LATEST, GOOD = "latest", "good"
"""Files that name a checkpoint: the newest, and the newest that a good step has followed."""
_PREFIX = "step-"
_WEIGHTS = "-weights"
_TRASH = ".trash"


def name_of(step: int) -> str:
    """Return the name of a step's checkpoint."""
    return f"{_PREFIX}{step}"


def step_of(folder: Path) -> int | None:
    """Return the step of a published checkpoint's name, None for anything else."""
    digits = folder.name.removeprefix(_PREFIX)
    return int(digits) if folder.name.startswith(_PREFIX) and digits.isdecimal() else None


def published(checkpoints: Path) -> list[Path]:
    """Return the checkpoints that are there, newest step first. By step, never by time: clocks jump."""
    if not checkpoints.is_dir():
        return []
    found = [(step, path) for path in checkpoints.iterdir() if (step := step_of(path)) is not None and path.is_dir()]
    return [path for _, path in sorted(found, reverse=True)]


def weights_of(checkpoint: Path) -> Path:
    """Return the place of the weights that stay when a checkpoint goes: an export, nothing to go on from."""
    return checkpoint.with_name(checkpoint.name + _WEIGHTS)


def weights_only(checkpoints: Path) -> list[Path]:
    """Return those that are there, newest step first."""
    found = [(step, path) for path in checkpoints.glob(f"{_PREFIX}*{_WEIGHTS}") if (step := step_of_any(path)) >= 0]
    return [path for _, path in sorted(found, reverse=True)]


def step_of_any(folder: Path) -> int:
    """Return the step of a checkpoint or of its weights, -1 for anything else."""
    step = step_of(folder.with_name(folder.name.removesuffix(_WEIGHTS)))
    return -1 if step is None else step


def newest_whole(checkpoints: Path, say: Callable[[str], None]) -> Path | None:
    """Return the newest checkpoint that is exactly what was written; every byte of it is read.

    A damaged one is left where it is, under another name, so that it cannot be taken for a whole one again.

    Args:
        checkpoints: checkpoints/ of a run.
        say: is told of each that was passed over.

    Raises:
        PermissionError: this user may not read the newest one.
    """
    for folder in published(checkpoints):
        wrong = problems(folder)
        if not wrong:
            return folder
        aside = unused(folder.with_name(folder.name + ".damaged"))
        try:
            folder.rename(aside)
        except OSError:
            aside = folder
        say(
            tr(
                "Warning: the checkpoint {folder} is damaged and is passed over ({reason}). It is kept as {aside}.",
                folder=folder,
                reason="; ".join(wrong[:3]),
                aside=aside.name,
            )
        )
    return None


def publish(temporary: Path, target: Path) -> None:
    """Give a finished checkpoint its name, then name it in `latest`; a reader always finds a whole one.

    Raises:
        OSError: it cannot be renamed.
    """
    if target.exists():  # of this step there was one that could not be used, or that another session went on from
        target.rename(unused(target.with_name(target.name + ".replaced")))
    temporary.rename(target)
    flush(target.parent)
    write_name(LATEST, target)


def write_name(file: str, checkpoint: Path) -> None:
    """Write a checkpoint's name into `latest` or `good` beside it.

    Raises:
        OSError: it cannot be written.
    """
    new = checkpoint.parent / f"{file}.tmp"
    new.write_text(checkpoint.name + "\n", encoding="utf-8")
    flush(new)
    new.replace(checkpoint.parent / file)
    flush(checkpoint.parent)


def known_good(checkpoints: Path) -> Path | None:
    """Return the newest checkpoint that a good step of this run has followed, as far as it is known and still there."""
    try:
        name = (checkpoints / GOOD).read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return None
    return next((path for path in published(checkpoints) if path.name == name), None)


def outdated(checkpoints: Path, keep: int, also: Collection[Path] = ()) -> list[Path]:
    """Return the checkpoints beyond the newest `keep` that are not among `also`, newest first; 0 keeps all."""
    return [path for path in published(checkpoints)[keep:] if path not in also] if keep else []


def remove_old(
    checkpoints: Path, keep: int, also: Collection[Path] = (), most_bytes: float = 0, keep_weights: int = 0
) -> None:
    """Remove all but the newest checkpoints.

    Args:
        checkpoints: checkpoints/ of a run.
        keep: how many stay; 0 keeps all.
        also: those that stay as well, such as the best one.
        most_bytes: room for all of them together, weights alone included; the oldest go first, the newest and `also`
            never. 0 is no limit.
        keep_weights: how many weights alone stay; 0 and -1 remove none.
    """
    whole, light = published(checkpoints), weights_only(checkpoints)
    old = {*outdated(checkpoints, keep, also), *(light[keep_weights:] if keep_weights > 0 else ())}
    taken = 0
    for folder in sorted([*whole, *light], key=step_of_any, reverse=True):
        size = _size(folder) if most_bytes else 0
        has_no_room = most_bytes and taken + size > most_bytes and folder not in (*whole[:1], *also)
        if folder in old or has_no_room:
            remove(folder)
        else:
            taken += size


def _size(folder: Path) -> int:
    """Return the bytes in a folder, which may be going away."""
    total = 0
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):
            total += path.stat().st_size if path.is_file() else 0
    return total


def discard(folder: Path) -> Path | None:
    """Rename what is to be removed, which takes no time: half removed, it must not look like a checkpoint.

    Returns:
        Its new name, which `empty_trash` knows; None if it is not there any more.
    """
    trash = unused(folder.with_name(folder.name + _TRASH))
    try:
        return folder.rename(trash)
    except FileNotFoundError:
        return None


def remove(folder: Path) -> None:
    """Remove a checkpoint, if it is still there. Takes minutes where it is large and the disk slow."""
    if trash := discard(folder):
        shutil.rmtree(trash)


def empty_trash(checkpoints: Path) -> None:
    """Remove what was discarded, in this life of the run or in an earlier one."""
    for path in checkpoints.glob(f"*{_TRASH}"):
        shutil.rmtree(path)


def put_aside_after(checkpoint: Path) -> None:
    """Rename what a run has saved after a checkpoint, from which it now goes another way.

    Raises:
        OSError: it cannot be renamed.
    """
    for path in [*published(checkpoint.parent), *weights_only(checkpoint.parent)]:
        if step_of_any(path) > step_of_any(checkpoint):
            with suppress(FileNotFoundError):  # it was old enough to be removed meanwhile
                path.rename(unused(path.with_name(path.name + ".replaced")))


def discard_unfinished(checkpoints: Path) -> None:
    """Discard what a save left that did not come to its end. Only whoever holds the run's lock may."""
    # Of a checkpoint, and of weights; one converted for other ranks may be that of an earlier checkpoint of its name.
    for pattern in (f"{_PREFIX}*.tmp", f".{_PREFIX}*.tmp", f"{_PREFIX}*.universal*"):
        for path in checkpoints.glob(pattern) if checkpoints.is_dir() else []:
            if not path.is_dir():  # the lock beside what is converted
                path.unlink()
            elif path.suffix != _TRASH:
                discard(path)
