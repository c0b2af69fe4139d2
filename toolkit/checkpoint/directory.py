"""What a checkpoint's directory holds, without torch, for speed; which are published, outdated, removed or moved aside.
The manifest, written last, with sizes and digests, proves that all files are complete.
"""

import hashlib
import json
import math
import re
import shutil
import struct
import zlib
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from toolkit.disk import flush, unused_path
from toolkit.messages import LARGEST_JSON_BYTES, parsed_json, tr

LATEST, GOOD = "latest", "good"
"""Files that name a checkpoint: the newest, and the newest that a good step has followed."""
PREFIX = "step-"
_WEIGHTS = "-weights"
_NAME = re.compile(rf"{PREFIX}(\d+)({_WEIGHTS})?")  # 1: the step, 2: of exported weights the suffix
TRASH = ".trash"


def checkpoint_name(step: int) -> str:
    """Return the directory name of the checkpoint of an optimizer step."""
    return f"{PREFIX}{step}"


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


def publish_checkpoint(temporary: Path, target: Path) -> None:
    """Rename a finished checkpoint to `target` and write that into `latest`; a reader never sees an incomplete one."""
    if target.exists():  # this step was saved before, and the run has been resumed from another checkpoint
        target.rename(unused_path(target.with_name(target.name + ".replaced")))
    temporary.rename(target)
    flush(target.parent)
    write_name(LATEST, target)


def write_name(file: str, checkpoint: Path) -> None:
    """Write a checkpoint's name atomically into `file`, "latest" or "good", next to it."""
    temporary = checkpoint.parent / f"{file}.tmp"
    temporary.write_text(checkpoint.name + "\n", encoding="utf-8")
    flush(temporary)
    temporary.replace(checkpoint.parent / file)
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
        is_protected = folder in (*complete[:1], *also)
        has_no_room = most_bytes and used_bytes + size > most_bytes and not is_protected
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
        return folder.rename(unused_path(folder.with_name(folder.name + TRASH)))
    return None


def remove_directories(folders: Iterable[Path]) -> None:
    """Remove checkpoints, those that are still there; takes minutes where they are large and the disk is slow. If some
    cannot be removed, the others are all the same, and the first OSError is raised at the end.
    """
    failed: OSError | None = None
    for folder in folders:
        try:
            trash = folder if folder.suffix == TRASH else discard_checkpoint(folder)
            if trash is not None:
                shutil.rmtree(trash)
        except OSError as error:
            failed = failed or error
    if failed:
        raise failed


def empty_trash(checkpoints: Path) -> None:
    """Remove the checkpoints that `discard_checkpoint` renamed, in this process or before a restart."""
    remove_directories(checkpoints.glob(f"*{TRASH}"))


MANIFEST = "manifest.json"
BLOCK_BYTES = 1 << 20
FORMAT = 2
"""Of the manifest; raise it when an older one can no longer be read."""


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
            while size > 0 and (block := file.read(int(min(size, BLOCK_BYTES)))):
                digest.update(block)
                checksum = zlib.crc32(block, checksum)
                size, position = size - len(block), position + len(block)
            return checksum

        for name, begin, size, checksum in members_of(path):
            crc_of_next(begin - position)  # what is between members counts for the digest alone
            if position != begin or crc_of_next(size) != checksum:
                raise OSError(f"{path.name}: {name}")
        crc_of_next(math.inf)
    return FileRecord(position, digest.hexdigest())


FRAGMENTS, CHECKSUMS = "fragments-", "crc32"
"""Begin of the names of files of fragments; the tensor in each that has the CRC-32 of its header and all others."""


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """Return the header of a safetensors file, and where its data begin; ValueError or OSError if it has none."""
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8).ljust(8, b"\0"))  # padded, as it needs 8 bytes
        if not 0 < length < min(path.stat().st_size, LARGEST_JSON_BYTES):
            raise ValueError(tr("it has no header"))
        header = parsed_json(file.read(length))
        if not isinstance(header, dict):
            raise ValueError(tr("it has no header"))
        return header, 8 + length


def members_of(path: Path) -> list[tuple[str, int, int, int]]:
    """Return name, first byte, size in bytes and CRC-32 of the header and of each tensor of a file of fragments; [] of
    other files. OSError if the file's header is damaged.
    """
    if not path.name.startswith(FRAGMENTS):
        return []
    try:
        header, data_begin = read_header(path)
        begin, end = header[CHECKSUMS]["data_offsets"]
        with open(path, "rb") as file:
            file.seek(data_begin + begin)
            checksums = struct.unpack(f"<{(end - begin) // 8}q", file.read(end - begin))
        names = [name for name in header if name not in ("__metadata__", CHECKSUMS)]
        # From where the data begin; the header is what precedes it.
        ranges = [(-data_begin, 0), *(header[name]["data_offsets"] for name in names)]
        members = zip(["header", *names], ranges, checksums, strict=True)
        return [(name, data_begin + first, last - first, checksum) for name, (first, last), checksum in members]
    except (ValueError, KeyError, TypeError, struct.error) as error:
        raise OSError(f"{path.name}: {error}") from None


def write_manifest(folder: Path, files: Mapping[str, FileRecord], facts: Mapping[str, Any]) -> None:
    """Write a checkpoint's manifest: `facts`, and size and hash of each file. Written last, it marks completion."""
    manifest = {"format": FORMAT, **facts, "files": {name: asdict(files[name]) for name in sorted(files)}}
    path = folder / MANIFEST
    path.write_text(json.dumps(manifest, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    flush(path)


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
