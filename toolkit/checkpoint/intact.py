"""Finds a checkpoint whose every byte is what was written, to resume or export it, and reads its manifest and state."""

import errno
import os
import time
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from toolkit.checkpoint.directory import (
    BLOCK_BYTES,
    FORMAT,
    MANIFEST,
    PREFIX,
    STATE,
    RunState,
    discard_checkpoint,
    members_of,
    published_checkpoints,
    step_of,
    weights_only,
)
from toolkit.disk import proves_nothing, sha256, unused_path
from toolkit.messages import CheckpointError, OtherFormat, clauses, file_bytes, parsed_json, reason_of, say, tr, warn


def newest_intact(checkpoints: Path) -> Path | None:
    """Return the newest intact checkpoint; every byte is read, and a damaged one is renamed, with a warning.
    OSError if the newest one cannot be read now or by this user, OtherFormat if another version wrote it.
    """

    def set_aside(folder: Path, wrong: list[str]) -> None:
        aside = unused_path(folder.with_name(folder.name + ".damaged"))
        try:
            folder.rename(aside)
        except OSError:
            aside = folder
        warn(
            "the checkpoint {folder} is damaged and skipped ({reason}). It is kept as {aside}.",
            folder=folder,
            reason=clauses(wrong[:3]),
            aside=aside.name,
        )

    return _first_intact(published_checkpoints(checkpoints), set_aside)


def _first_intact(folders: Sequence[Path], on_damaged: Callable[[Path, list[str]], None]) -> Path | None:
    """Return the first of some checkpoints whose files match its manifest; `on_damaged` gets those before it, and what
    is wrong with each.
    """
    for folder in folders:
        wrong = manifest_problems(folder)
        if not wrong:
            return folder
        on_damaged(folder, wrong)
    return None


def move_aside_after(checkpoint: Path) -> None:
    """Rename the checkpoints and weights of later steps than `checkpoint`, from which the run is resumed again."""
    for path in [*published_checkpoints(checkpoint.parent), *weights_only(checkpoint.parent)]:
        if step_of(path) > step_of(checkpoint):
            with suppress(FileNotFoundError):  # it was old enough to be removed meanwhile
                path.rename(unused_path(path.with_name(path.name + ".replaced")))


def discard_unfinished(checkpoints: Path) -> None:
    """Discard the temporary directories of interrupted saves. Only the process that holds the run's lock may."""
    for pattern in (f"{PREFIX}*.tmp", f".{PREFIX}*.tmp"):  # of a checkpoint, and of weights
        for path in checkpoints.glob(pattern):
            discard_checkpoint(path)


_LOADED = (".pt", ".safetensors", ".json", ".swp", ".bin", ".model", ".txt", ".jinja", ".py")
"""Endings of what is read when a checkpoint or an export is loaded: such files, and links, must be in the manifest."""


def _damaged_tensors(path: Path) -> str:
    """Return the names of a fragments file's tensors with a wrong checksum, such as " (a, b)"; "" if none is known."""
    wrong = []
    with suppress(OSError), open(path, "rb") as file:
        for name, begin, size, checksum in members_of(path):
            file.seek(begin)
            crc = 0
            while size and (block := file.read(min(size, BLOCK_BYTES))):
                crc, size = zlib.crc32(block, crc), size - len(block)
            if size or crc != checksum:  # the file ends too early, or has other bytes
                wrong.append(name)
    shown = ", ".join(wrong[:3]) + (" …" if len(wrong) > 3 else "")
    return f" ({shown})" if wrong else ""


_PAUSE_S = 5.0
_T = TypeVar("_T")


def _read(path: Path, read: Callable[[Path], _T]) -> _T:
    """Return `read(path)`, retried once after an EIO, which a network file system's client gets on eviction, too."""
    try:
        return read(path)
    except OSError as error:
        error.filename = str(path)  # a failed read has none
        if error.errno != errno.EIO:
            raise
    time.sleep(_PAUSE_S)
    return read(path)


def read_manifest(folder: Path, expected_format: int = FORMAT) -> dict[str, Any]:
    """Return a checkpoint's manifest. CheckpointError if it is missing or damaged, OtherFormat if it is of another
    format than `expected_format`; OSError if it cannot be read now, which says nothing about it.
    """
    try:
        manifest: dict[str, Any] = parsed_json(_read(folder / MANIFEST, file_bytes), nan=True)
        if not isinstance(manifest, dict) or [type(manifest.get(key)) for key in ("files", "format")] != [dict, int]:
            raise ValueError(tr("its manifest lists no files, or has no format"))
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and proves_nothing(error):
            raise
        raise CheckpointError(
            "{folder} is not a complete checkpoint: {reason}.", folder=folder, reason=reason_of(error)
        ) from None
    if manifest.get("format") != expected_format:
        raise OtherFormat(
            "{folder} was written by another version of this toolkit (format {found}, here {known}). Format 1 can be "
            "converted:  toolkit convert-checkpoint {folder} output=DIR",
            folder=folder,
            found=manifest.get("format"),
            known=expected_format,
        )
    return manifest


def manifest_problems(folder: Path, expected_format: int = FORMAT) -> list[str]:
    """Return what is wrong with a checkpoint, of which every byte is read. OSError (a disk that cannot be read now) and
    OtherFormat do not say that it is damaged: it must not be set aside then.
    """
    try:
        files = read_manifest(folder, expected_format)["files"]
    except OtherFormat:
        raise
    except CheckpointError as error:
        return [str(error)]
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # hashing lets other threads run
        wrong = list(filter(None, pool.map(lambda entry: _file_problem(folder, *entry), files.items())))
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if (path.suffix in _LOADED or path.is_symlink()) and name != MANIFEST and name not in files:
            wrong.append(tr("{name}: the manifest does not know it", name=name))
    return wrong


def _file_problem(folder: Path, name: str, record: Any) -> str:
    """Return how a file of a checkpoint differs from its record in the manifest, "" if it does not."""
    inner = PurePosixPath(name)  # of a file in the folder: no way up, no link that somebody placed
    is_outside = inner.is_absolute() or ".." in inner.parts or not inner.parts or "\0" in name
    paths_within = (inner, *inner.parents[:-1])  # without the last parent, ".": the folder itself
    if is_outside or any((folder / path).is_symlink() for path in paths_within):
        return tr("{name}: this path leads out of the checkpoint", name=name)
    if not isinstance(record, dict):
        return tr("{name}: the manifest says nothing of it", name=name)
    path, expected = folder / name, record.get("size_bytes")
    try:
        size = _read(path, Path.stat).st_size
        if size != expected:
            return tr("{name}: {size} bytes instead of {expected}", name=name, size=size, expected=expected)
        if _read(path, sha256) != record.get("sha256"):
            return tr("{name}: its content is not what was written", name=name) + _damaged_tensors(path)
    except OSError as error:
        if proves_nothing(error):
            raise
        return f"{name}: {reason_of(error)}"
    return ""


def foreign_text(checkpoint: Path) -> str:
    """Return the notice on what is restored and what starts again from a checkpoint that another program wrote."""
    return tr(
        "{folder} comes from another program: weights, optimizer states, loss scale and step count are taken over. "
        "Data order, random states and token counts start again, and the learning rate is the recipe's at that step.",
        folder=checkpoint,
    )


def read_run_state(folder: Path) -> RunState:
    """Return the state in a checkpoint, or raise CheckpointError."""
    try:
        values = parsed_json(file_bytes(folder / STATE), nan=True)
        return RunState(**{name: value for name, value in values.items() if value is not None})
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(
            "{file} cannot be read: {reason}.", file=folder / STATE, reason=reason_of(error)
        ) from None


def resolve_checkpoint(path: Path) -> Path | None:
    """Return the checkpoint at a path, or the newest intact one of that run or checkpoints/, and print which; None if
    the path is a model's directory, or has no checkpoints. Changes nothing; CheckpointError if none is intact.
    """
    if (path / "config.json").is_file():
        return None
    is_checkpoint = (path / MANIFEST).is_file()
    candidates = [path] if is_checkpoint else published_checkpoints(path / "checkpoints") or published_checkpoints(path)

    def report(folder: Path, wrong: list[str]) -> None:
        say(tr("{folder}: DAMAGED", folder=folder) + "".join(f"\n  {problem}" for problem in wrong[:3]))

    if intact := _first_intact(candidates, report):
        if not is_checkpoint:
            say("Taking {folder}.", folder=intact)
        return intact
    if candidates:
        raise CheckpointError("{folder} holds no intact checkpoint.", folder=path)
    return None
