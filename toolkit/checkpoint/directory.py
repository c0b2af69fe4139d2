"""What a checkpoint's directory holds, without torch, for speed; which are published, outdated, removed or moved aside.
The manifest, written last, with sizes and digests, proves that all files are complete.
"""

import errno
import hashlib
import json
import math
import os
import re
import shutil
import struct
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from toolkit.disk import flush, proves_nothing, sha256, unused_path
from toolkit.messages import (
    LARGEST_JSON_BYTES,
    CheckpointError,
    OtherFormat,
    clauses,
    file_bytes,
    parsed_json,
    reason_of,
    say,
    tr,
    warn,
)

LATEST, GOOD = "latest", "good"
"""Files that name a checkpoint: the newest, and the newest that a good step has followed."""
_PREFIX = "step-"
_WEIGHTS = "-weights"
_NAME = re.compile(rf"{_PREFIX}(\d+)({_WEIGHTS})?")
_TRASH = ".trash"


def checkpoint_name(step: int) -> str:
    """Return the directory name of the checkpoint of an optimizer step."""
    return f"{_PREFIX}{step}"


def weights_of(checkpoint: Path) -> Path:
    """Return the directory of a checkpoint's exported weights, which remain when the checkpoint is removed."""
    return checkpoint.with_name(checkpoint.name + _WEIGHTS)


def step_of(folder: Path) -> int:
    """Return the step in the name of a checkpoint's directory or of its exported weights', -1 for other names."""
    match = _NAME.fullmatch(folder.name)
    return int(match[1]) if match else -1


def published_checkpoints(checkpoints: Path, suffix: str = "") -> list[Path]:
    """Return the published checkpoints (or weights, by `suffix`), newest step first; not by time, as clocks jump."""
    if not checkpoints.is_dir():
        return []
    names = {path: _NAME.fullmatch(path.name) for path in checkpoints.iterdir()}
    published = [path for path, name in names.items() if name and (name[2] or "") == suffix and path.is_dir()]
    return sorted(published, key=step_of, reverse=True)


def weights_only(checkpoints: Path) -> list[Path]:
    """Return the directories of exported weights whose checkpoints may be removed already, newest step first."""
    return published_checkpoints(checkpoints, _WEIGHTS)


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


def publish_checkpoint(temporary: Path, target: Path) -> None:
    """Rename a finished checkpoint to `target` and write that into `latest`; a reader never sees an incomplete one."""
    if target.exists():  # of this step there was one that could not be used, or that another session went on from
        target.rename(unused_path(target.with_name(target.name + ".replaced")))
    temporary.rename(target)
    flush(target.parent)
    write_name(LATEST, target)


def write_name(file: str, checkpoint: Path) -> None:
    """Write a checkpoint's name atomically into `file`, "latest" or "good", next to it."""
    new = checkpoint.parent / f"{file}.tmp"
    new.write_text(checkpoint.name + "\n", encoding="utf-8")
    flush(new)
    new.replace(checkpoint.parent / file)
    flush(checkpoint.parent)


def known_good(checkpoints: Path) -> Path | None:
    """Return the checkpoint recorded as `good`, after which a step had finite loss and gradient; None if missing."""
    try:
        name = (checkpoints / GOOD).read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return None
    return next((path for path in published_checkpoints(checkpoints) if path.name == name), None)


def outdated_checkpoints(checkpoints: Path, keep: int, also: Collection[Path] = ()) -> list[Path]:
    """Return the checkpoints beyond the newest `keep` that are not among `also`, newest first; 0 keeps all."""
    return [path for path in published_checkpoints(checkpoints)[keep:] if path not in also] if keep else []


def remove_old(
    checkpoints: Path, keep: int, also: Collection[Path] = (), most_bytes: float = 0, keep_weights: int = 0
) -> None:
    """Remove all checkpoints but the newest `keep` (0: no such limit) and `also`, such as the best; and of the exported
    weights all but the newest `keep_weights` (0, -1: no limit). If what stays has more than `most_bytes` (0: no limit),
    the oldest are removed, too, but never the newest checkpoint or `also`.
    """
    complete, exported = published_checkpoints(checkpoints), weights_only(checkpoints)
    outdated = {*outdated_checkpoints(checkpoints, keep, also), *(exported[keep_weights:] if keep_weights > 0 else ())}
    used_bytes, to_remove = 0, []
    for folder in sorted([*complete, *exported], key=step_of, reverse=True):
        size = _directory_bytes(folder) if most_bytes else 0
        has_no_room = most_bytes and used_bytes + size > most_bytes and folder not in (*complete[:1], *also)
        if folder in outdated or has_no_room:
            to_remove.append(folder)
        else:
            used_bytes += size
    remove_directories(to_remove)


def _directory_bytes(folder: Path) -> int:
    """Return the bytes of all files in a directory, which may lose some meanwhile."""
    total = 0
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):
            total += path.stat().st_size if path.is_file() else 0
    return total


def discard_checkpoint(folder: Path) -> Path | None:
    """Rename a checkpoint before its removal, so that a half-removed one never looks complete; return the new path."""
    with suppress(FileNotFoundError):
        return folder.rename(unused_path(folder.with_name(folder.name + _TRASH)))
    return None


def remove_directories(folders: Iterable[Path]) -> None:
    """Remove checkpoints, those that are still there. Takes minutes where they are large and the disk slow. What stands
    in the way of one costs no other: its OSError, the first of all, is raised at the end.
    """
    failed: OSError | None = None
    for folder in folders:
        try:
            if trash := folder if folder.suffix == _TRASH else discard_checkpoint(folder):
                shutil.rmtree(trash)
        except OSError as error:
            failed = failed or error
    if failed:
        raise failed


def empty_trash(checkpoints: Path) -> None:
    """Remove the checkpoints that `discard_checkpoint` renamed, in this process or before a restart."""
    remove_directories(checkpoints.glob(f"*{_TRASH}"))


def move_aside_after(checkpoint: Path) -> None:
    """Rename the checkpoints and weights of later steps than `checkpoint`, from which the run is resumed again."""
    for path in [*published_checkpoints(checkpoint.parent), *weights_only(checkpoint.parent)]:
        if step_of(path) > step_of(checkpoint):
            with suppress(FileNotFoundError):  # it was old enough to be removed meanwhile
                path.rename(unused_path(path.with_name(path.name + ".replaced")))


def discard_unfinished(checkpoints: Path) -> None:
    """Discard the temporary directories of interrupted saves. Only the process that holds the run's lock may."""
    for pattern in (f"{_PREFIX}*.tmp", f".{_PREFIX}*.tmp"):  # of a checkpoint, and of weights
        for path in checkpoints.glob(pattern) if checkpoints.is_dir() else []:
            if path.suffix != _TRASH:
                discard_checkpoint(path)


MANIFEST = "manifest.json"
_BLOCK_BYTES = 1 << 20
FORMAT = 2
"""Of the manifest; raise it when an older one can no longer be read."""

_LOADED = (".pt", ".safetensors", ".json", ".swp", ".bin", ".model", ".txt", ".jinja", ".py")
"""Endings of what is read when a checkpoint or an export is loaded: such files, and links, must be in the manifest."""


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A file of a checkpoint."""

    size_bytes: int
    sha256: str


def record_file(path: Path) -> FileRecord:
    """Return size and hash of a file, in one pass over its bytes. OSError if a tensor of fragments does not have the
    checksum that was taken in memory before it was written.
    """
    digest, position = hashlib.sha256(), 0
    with open(path, "rb") as file:

        def crc_of_next(size: float) -> int:
            """Return the CRC-32 of the next `size` bytes, or of all that are left; add them to `digest`."""
            nonlocal position
            checksum = 0
            while size > 0 and (block := file.read(int(min(size, _BLOCK_BYTES)))):
                digest.update(block)
                checksum = zlib.crc32(block, checksum)
                size, position = size - len(block), position + len(block)
            return checksum

        for name, begin, size, checksum in _members(path):
            crc_of_next(begin - position)
            if position != begin or crc_of_next(size) != checksum:
                raise OSError(f"{path.name}: {name}")
        crc_of_next(math.inf)
    return FileRecord(position, digest.hexdigest())


FRAGMENTS, CHECKSUMS = "fragments-", "crc32"
"""Begin of the names of files of fragments; the tensor in each that has the CRC-32 of its header and all others."""


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """Return the header of a safetensors file, and where its data begin; ValueError or OSError if it has none."""
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8).ljust(8, b"\0"))
        if not 0 < length < min(path.stat().st_size, LARGEST_JSON_BYTES):
            raise ValueError(tr("it has no header"))
        header = parsed_json(file.read(length))
        if not isinstance(header, dict):
            raise ValueError(tr("it has no header"))
        return header, 8 + length


def _members(path: Path) -> list[tuple[str, int, int, int]]:
    """Return name, first byte, size in bytes and CRC-32 of the header and of each tensor of a file of fragments; [] of
    other files. OSError if the file's header is damaged.
    """
    if not path.name.startswith(FRAGMENTS):
        return []
    try:
        header, data = read_header(path)
        begin, end = header[CHECKSUMS]["data_offsets"]
        with open(path, "rb") as file:
            file.seek(data + begin)
            checksums = struct.unpack(f"<{(end - begin) // 8}q", file.read(end - begin))
        names = [name for name in header if name not in ("__metadata__", CHECKSUMS)]
        ranges = [(-data, 0), *(header[name]["data_offsets"] for name in names)]
        members = zip(["header", *names], ranges, checksums, strict=True)
        return [(name, data + begin, end - begin, checksum) for name, (begin, end), checksum in members]
    except (ValueError, KeyError, TypeError, struct.error) as error:
        raise OSError(f"{path.name}: {error}") from None


def _damaged(path: Path) -> str:
    """Return a text that names the tensors of a fragments file with a wrong checksum, "" if these cannot be read."""
    wrong = []
    with suppress(OSError), open(path, "rb") as file:
        for name, begin, size, checksum in _members(path):
            file.seek(begin)
            crc = 0
            while size and (block := file.read(min(size, _BLOCK_BYTES))):
                crc, size = zlib.crc32(block, crc), size - len(block)
            wrong += [name] if size or crc != checksum else []
    return f" ({', '.join(wrong[:3])}{' …' * (len(wrong) > 3)})" if wrong else ""


def write_manifest(folder: Path, files: Mapping[str, FileRecord], facts: Mapping[str, Any]) -> None:
    """Write a checkpoint's manifest: `facts`, and size and hash of each file. Written last, it marks completion."""
    manifest = {"format": FORMAT, **facts, "files": {name: asdict(files[name]) for name in sorted(files)}}
    path = folder / MANIFEST
    path.write_text(json.dumps(manifest, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    flush(path)


_PAUSE_S = 5.0
_T = TypeVar("_T")


def _read(path: Path, read: Callable[[Path], _T]) -> _T:
    """Return `read(path)`, retried once after an EIO, which a network file system's client gets on eviction, too."""
    try:
        return read(path)
    except OSError as error:
        error.filename = str(path)
        if error.errno != errno.EIO:
            raise
    time.sleep(_PAUSE_S)
    return read(path)


def read_manifest(folder: Path, expected_format: int = FORMAT) -> dict[str, Any]:
    """Return a checkpoint's manifest; CheckpointError if none can be read, OtherFormat if it is of another format than
    `expected_format`; an OSError says nothing about it.
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
        wrong = [problem for problem in pool.map(lambda entry: _problem(folder, *entry), files.items()) if problem]
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if (path.suffix in _LOADED or path.is_symlink()) and name != MANIFEST and name not in files:
            wrong.append(tr("{name}: the manifest does not know it", name=name))
    return wrong


def _problem(folder: Path, name: str, record: Any) -> str:
    """Return how a file of a checkpoint differs from its record in the manifest, "" if it does not."""
    inner = PurePosixPath(name)  # of a file in the folder: no way up, no link that somebody placed
    is_outside = inner.is_absolute() or ".." in inner.parts or not inner.parts or "\0" in name
    if is_outside or any((folder / part).is_symlink() for part in (inner, *inner.parents[:-1])):
        return tr("{name}: this path leads out of the checkpoint", name=name)
    if not isinstance(record, dict):
        return tr("{name}: the manifest says nothing of it", name=name)
    path, expected = folder / name, record.get("size_bytes")
    try:
        size = _read(path, Path.stat).st_size
        if size != expected:
            return tr("{name}: {size} bytes instead of {expected}", name=name, size=size, expected=expected)
        if _read(path, sha256) != record.get("sha256"):
            return tr("{name}: its content is not what was written", name=name) + _damaged(path)
    except OSError as error:
        if proves_nothing(error):
            raise
        return f"{name}: {reason_of(error)}"
    return ""


STATE = "state.json"


@dataclass(kw_only=True, slots=True)
class RunState:
    """Everything the next step depends on that is not in the engine or in a random generator."""

    step: int = 0
    epoch: int = 0
    row: int = 0
    """Rows of this pass that are done, over all ranks."""
    trained_tokens: int = 0
    """Tokens whose loss counted so far."""
    total_tokens: int = 0
    """Tokens so far, padding left out."""
    first_loss: float = math.nan
    """Training loss of the first step, nats per token."""
    last_loss: float = math.nan
    skips_in_a_row: int = 0
    bad_steps: int = 0
    rewinds: int = 0
    """Times that the run went back to a checkpoint for them."""
    losses: list[float] = field(default_factory=list)
    """Of the last good steps, by which spikes are known."""
    grad_norms: list[float] = field(default_factory=list)
    evaluations: list[dict[str, float]] = field(default_factory=list)
    metrics_bytes: int = 0
    """Length of metrics.jsonl: what follows belongs to steps that are done again."""
    world_size: int = 0
    data: dict[str, str] = field(default_factory=dict)
    """Fingerprints of the stores and the way their rows were planned."""
    stream: dict[str, Any] = field(default_factory=dict)
    """With `data.streaming`: the files, and where each lane is (data/stream.py)."""
    config: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, Any] = field(default_factory=dict)

    @property
    def is_foreign(self) -> bool:
        """Whether the checkpoint was converted from another program's: of the run's state only the step is known."""
        return not self.config

    def write(self, folder: Path) -> Path:
        """Write this state as JSON into a checkpoint's directory; return the file."""
        path = folder / STATE
        path.write_text(json.dumps(asdict(self), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        return path


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
    """Return the checkpoint at a path, or the newest intact one of that run or checkpoints/, None where there is none.
    Changes nothing; CheckpointError if none is intact.
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
