"""Prove that a checkpoint, or every checkpoint of a run, is exactly what was written.

toolkit verify PATH

Reads every byte: sizes and SHA-256 of all files, nothing missing, nothing foreign, no path that leads out. Exit code 0
if all is whole, 74 if anything is not.
"""

import sys
import time
from pathlib import Path

from toolkit.checkpoint import folders, manifest
from toolkit.errors import CheckpointError, ConfigError
from toolkit.messages import tr


def run(words: list[str]) -> int:
    """Verify."""
    if len(words) != 1:
        raise ConfigError(tr("which checkpoint? toolkit verify PATH"))
    path = Path(words[0])
    found = [path] if (path / manifest.MANIFEST).exists() else folders.published(path / "checkpoints")
    found = found or folders.published(path)
    if not found:
        raise ConfigError(tr("{path} is no checkpoint and holds none.", path=path))
    damaged = 0
    for folder in reversed(found):
        started = time.monotonic()
        wrong = manifest.problems(folder)
        seconds = max(time.monotonic() - started, 1e-9)
        damaged += bool(wrong)
        if wrong:
            sys.stdout.write(tr("{folder}: DAMAGED", folder=folder) + "".join(f"\n  {one}" for one in wrong) + "\n")
            continue
        files = manifest.read(folder)["files"].values()
        size = sum(one["size_bytes"] for one in files) / 1e6
        sys.stdout.write(
            tr(
                "{folder}: whole, {count} files, {size} MB ({rate} MB/s).",
                folder=folder,
                count=len(files),
                size=f"{size:,.1f}",
                rate=f"{size / seconds:,.0f}",
            )
            + "\n"
        )
    if damaged:
        raise CheckpointError(tr("{count} of {total} checkpoints are damaged.", count=damaged, total=len(found)))
    return 0
