"""Which checkpoints stay. A thread of rank 0 removes old ones, as deleting 70 GB on a network disk takes minutes. They
are renamed first, so that a half-deleted one is never taken for a checkpoint.
"""

import threading
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from toolkit.checkpoint import directory
from toolkit.config import schema
from toolkit.messages import CheckpointError, reason_of, warn


class Rotation:
    """Keeps as many checkpoints, and weights of older ones, as configured; what a stopped run leaves, the next start
    does. `export` makes an export of a checkpoint, or raises CheckpointError.
    """

    def __init__(self, folder: Path, config: schema.CheckpointConfig, export: Callable[[Path, Path], None]) -> None:
        self.folder, self.config, self.export = folder, config, export
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._is_due = False
        self._also: Collection[Path] | None = None

    def request(self, also: Collection[Path] | None = None) -> None:
        """Remove what is too much but `also` (None: only what is discarded); at once; the last request counts."""
        with self._lock:
            self._is_due, self._also = True, self._also if also is None else also
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="rotation", daemon=True)
                self._thread.start()

    def is_busy(self, patience_s: float = 0.0) -> bool:
        """Return whether something is still to be removed, after waiting at most so many seconds for the end of it."""
        thread = self._thread
        if thread is not None:
            thread.join(patience_s)
        return thread is not None and thread.is_alive()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._is_due:
                    self._thread = None
                    return
                also, self._is_due, self._also = self._also, False, None
            try:
                try:
                    directory.empty_trash(self.folder)
                finally:  # what cannot be removed keeps nothing else on the disk
                    if also is not None:
                        self._rotate(also)
            except Exception as error:  # whatever it is: the thread must be there for the next save
                warn("older checkpoints could not be removed: {reason}.", reason=reason_of(error))

    def _rotate(self, also: Collection[Path]) -> None:
        keep, keep_weights = self.config.keep, self.config.keep_weights
        outdated, light = directory.outdated_checkpoints(self.folder, keep, also), directory.weights_only(self.folder)
        steps = sorted({directory.step_of(path) for path in (*outdated, *light)}, reverse=True)
        wanted = {directory.checkpoint_name(step) for step in (steps if keep_weights < 0 else steps[:keep_weights])}
        # These stay until their weights are next to them.
        waiting = [path for path in outdated if path.name in wanted and directory.weights_of(path) not in light]
        try:
            directory.remove_old(self.folder, keep, [*also, *waiting], self.config.max_gib * 2**30, keep_weights)
        finally:
            self._keep_weights(waiting)

    def _keep_weights(self, waiting: Sequence[Path]) -> None:
        for checkpoint in reversed(waiting):  # the oldest first
            try:
                self.export(checkpoint, directory.weights_of(checkpoint))
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
