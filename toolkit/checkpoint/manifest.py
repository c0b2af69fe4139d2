"""What a checkpoint or an export consists of, and the proof that it is whole: sizes and SHA-256 of all files.

Written last. No torch is needed here, so that `toolkit verify` and the choice of a checkpoint are quick.
"""

import json
import os
import zipfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from toolkit.disk import flush, sha256
from toolkit.errors import CheckpointError
from toolkit.messages import tr

MANIFEST = "manifest.json"
FORMAT = 1
"""Of the manifest; raise it when an older one can no longer be read."""

_LOADED = (".pt", ".safetensors", ".json", ".swp", ".bin", ".model", ".txt", ".jinja", ".py")
"""Endings of what is read when a checkpoint or an export is loaded: such files, and links, must be in the manifest."""


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A file of a checkpoint."""

    size_bytes: int
    sha256: str


def record(path: Path) -> FileRecord:
    """Return size and hash of a file.

    Raises:
        OSError: it cannot be read.
    """
    return FileRecord(path.stat().st_size, sha256(path))


def prove(path: Path) -> None:
    """Compare what is on the disk with the checksums that torch.save took of it in memory.

    Raises:
        OSError: they differ.
    """
    if path.suffix != ".pt":
        return
    try:
        with zipfile.ZipFile(path) as archive:
            wrong = archive.testzip()
    except zipfile.BadZipFile as error:
        raise OSError(f"{path.name}: {error}") from None
    if wrong:
        raise OSError(f"{path.name}: {wrong}")


def write(folder: Path, files: Mapping[str, FileRecord], facts: Mapping[str, Any]) -> None:
    """Write the manifest, last of all.

    Args:
        folder: the checkpoint.
        files: its files by their path in the folder.
        facts: what else is known of it.

    Raises:
        OSError: it cannot be written.
    """
    whole = {
        "format": FORMAT,
        **facts,
        "files": {name: {"size_bytes": files[name].size_bytes, "sha256": files[name].sha256} for name in sorted(files)},
    }
    path = folder / MANIFEST
    path.write_text(json.dumps(whole, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    flush(path)


def read(folder: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint.

    Raises:
        CheckpointError: there is none that can be read.
        PermissionError: this user may not read it, which says nothing about the checkpoint.
    """
    try:
        found = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except PermissionError:
        raise
    except (OSError, ValueError) as error:
        raise CheckpointError(
            tr("{folder} is no whole checkpoint: {reason}.", folder=folder, reason=_why(error))
        ) from None
    if not isinstance(found, dict) or not isinstance(found.get("files"), dict):
        raise CheckpointError(
            tr("{folder} is no whole checkpoint: {reason}.", folder=folder, reason=tr("its manifest lists no files"))
        )
    if found.get("format") != FORMAT:
        raise CheckpointError(
            tr(
                "{folder} was written by another version of this toolkit (format {found}, here {known}).",
                folder=folder,
                found=found.get("format"),
                known=FORMAT,
            )
        )
    return found


def problems(folder: Path) -> list[str]:
    """Return what is wrong with a checkpoint, nothing if it is exactly what was written; reads every byte of it.

    Raises:
        PermissionError: this user may not read it. It may be whole, so it must not be put aside as damaged.
    """
    try:
        files = read(folder)["files"]
    except CheckpointError as error:
        return [str(error)]
    wrong = []
    listed = []
    for name, known in files.items():
        if not _stays_inside(folder, name):
            wrong.append(tr("{name}: this path leads out of the checkpoint", name=name))
        elif not isinstance(known, dict):
            wrong.append(tr("{name}: the manifest says nothing of it", name=name))
        else:
            listed.append((name, known))
    workers = min(8, os.cpu_count() or 1)
    with ThreadPoolExecutor(workers) as pool:  # hashing lets other threads run
        found = pool.map(lambda one: _problem(folder, *one), listed)
        wrong += [problem for problem in found if problem]
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if (path.suffix in _LOADED or path.is_symlink()) and name != MANIFEST and name not in files:
            wrong.append(tr("{name}: the manifest does not know it", name=name))
    return wrong


def _problem(folder: Path, name: str, known: Mapping[str, Any]) -> str:
    path = folder / name
    try:
        size = path.stat().st_size
        if size != known.get("size_bytes"):
            return tr(
                "{name}: {size} bytes instead of {expected}", name=name, size=size, expected=known.get("size_bytes")
            )
        if sha256(path) != known.get("sha256"):
            return tr("{name}: its content is not what was written", name=name)
    except PermissionError:
        raise
    except OSError as error:
        return f"{name}: {_why(error)}"
    return ""


def _stays_inside(folder: Path, name: str) -> bool:
    """Whether a name of a manifest is that of a file in the folder: no way up, no link that somebody placed."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name:
        return False
    place = folder
    for part in path.parts:
        place = place / part
        if place.is_symlink():
            return False
    return True


def _why(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
