"""Rotation of checkpoints. A thread of rank 0 removes old ones, as deleting 70 GB on a network disk takes minutes. They
are renamed first, so that a half-deleted one is never taken for a checkpoint.
"""

import subprocess
import sys
import threading
from collections.abc import Collection, Sequence
from pathlib import Path

from toolkit import children
from toolkit.checkpoint import directory
from toolkit.config import schema
from toolkit.launch.environment import without_ranks
from toolkit.messages import CheckpointError, reason_of, warn

_EXPORT_S = 24 * 3600  # the largest checkpoints take hours


class Rotation:
    """Keeps the newest `checkpoint.keep` checkpoints, and exported weights of `keep_weights` older ones; what is not
    yet removed at a stop, the next start removes.
    """

    def __init__(self, folder: Path, config: schema.CheckpointConfig) -> None:
        self.folder, self.config = folder, config
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._is_due = False
        self._also_keep: Collection[Path] | None = None

    def request(self, also_keep: Collection[Path] | None = None) -> None:
        """Let the thread remove outdated checkpoints but `also_keep` (None: only what is renamed to be deleted
        already), and return at once. A collection replaces that of a request which has not begun yet.
        """
        with self._lock:
            self._is_due = True
            if also_keep is not None:
                self._also_keep = also_keep
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="rotation", daemon=True)
                self._thread.start()

    def is_busy(self, patience_s: float = 0.0) -> bool:
        """Return whether the thread still works on a request, after waiting for it at most `patience_s` seconds."""
        thread = self._thread
        if thread is not None:
            thread.join(patience_s)
        return thread is not None and thread.is_alive()

    def _run(self) -> None:
        """Carry out requests until there is none. Runs in the thread."""
        while True:
            with self._lock:
                if not self._is_due:
                    self._thread = None
                    return
                also_keep = self._also_keep
                self._is_due, self._also_keep = False, None
            try:
                try:
                    directory.empty_trash(self.folder)
                finally:  # if something there cannot be removed, the others still can
                    if also_keep is not None:
                        self._rotate(also_keep)
            except Exception as error:  # whatever it is: the thread must be there for the next save
                warn("older checkpoints could not be removed: {reason}.", reason=reason_of(error))

    def _rotate(self, also_keep: Collection[Path]) -> None:
        """Remove outdated checkpoints but `also_keep`, and export the weights of the newest `keep_weights` of them."""
        keep, keep_weights = self.config.keep, self.config.keep_weights
        outdated = directory.outdated_checkpoints(self.folder, keep, also_keep)
        exported = directory.weights_only(self.folder)
        steps = sorted({directory.step_of(path) for path in (*outdated, *exported)}, reverse=True)
        # Names of those whose weights stay, newest first, exported already or not; a negative number keeps all.
        wanted = {directory.checkpoint_name(step) for step in (steps if keep_weights < 0 else steps[:keep_weights])}
        to_export = [path for path in outdated if path.name in wanted and directory.weights_of(path) not in exported]
        try:  # a checkpoint to export is removed only after its export
            directory.remove_old(self.folder, keep, [*also_keep, *to_export], self.config.max_gib * 2**30, keep_weights)
        finally:
            self._replace_by_weights(to_export)

    def _replace_by_weights(self, checkpoints: Sequence[Path]) -> None:
        """Export the weights of `checkpoints` (newest first), and remove each one whose export succeeded."""
        for checkpoint in reversed(checkpoints):  # the oldest first
            try:
                export_in_background(checkpoint, directory.weights_of(checkpoint))
            except (CheckpointError, OSError) as error:
                warn(
                    "the weights of the checkpoint {name} could not be exported: {reason}. The checkpoint is kept, and "
                    "the export is retried at the next save.",
                    name=checkpoint.name,
                    reason=error,
                )
                continue
            directory.remove_directories([checkpoint])
            directory.remove_old(self.folder, 0, keep_weights=self.config.keep_weights)


def export_in_background(checkpoint: Path, folder: Path) -> None:
    """Verify a checkpoint and export its weights to `folder`, in a child process, as writing holds Python's lock;
    CheckpointError if that fails.
    """
    from toolkit.launch.processes import last_line

    command = [sys.executable, "-m", "toolkit.export.checkpoint", str(checkpoint), str(folder)]
    try:
        finished = children.run(command, capture_output=True, text=True, env=without_ranks(), timeout=_EXPORT_S)
    except subprocess.TimeoutExpired:
        raise CheckpointError("no answer within {seconds} s", seconds=_EXPORT_S) from None
    if finished.returncode:
        raise CheckpointError(last_line(finished.stderr))
