"""Exports alongside training, in a process of their own: writing weights holds Python's lock, which training needs."""

from pathlib import Path

from toolkit.launch.processes import run_module
from toolkit.messages import CheckpointError


def export_in_background(checkpoint: Path, folder: Path) -> None:
    """Verify a checkpoint and export it in transformers' layout in a child process; raises CheckpointError."""
    if reason := run_module("toolkit.export.checkpoint", str(checkpoint), str(folder)):
        raise CheckpointError(reason)
