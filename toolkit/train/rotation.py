"""Removes old checkpoints, and makes the weights that stay of them, next to training: a thread of rank 0.

Deleting a checkpoint of 70 GB on a network disk takes minutes, and no step waits for it. What goes is renamed first:
what is half deleted cannot be taken for a checkpoint, and the next start removes what a killed process has left.
"""

import threading
from collections.abc import Callable, Collection
from pathlib import Path

from toolkit.checkpoint import directory
from toolkit.config.schema import CheckpointConfig
from toolkit.errors import CheckpointError
from toolkit.messages import tr


class Rotation:
    """Keeps what the config says of the checkpoints of a run.

    A run that is stopped does not wait for it: what is not done then is done by the next start.

    Args:
        folder: checkpoints/ of the run.
        config: how much is kept.
        export: makes an export of a checkpoint; raises CheckpointError.
        say: tells the user.
    """

    def __init__(
        self,
        folder: Path,
        config: CheckpointConfig,
        export: Callable[[Path, Path], None],
        say: Callable[[str], None],
    ) -> None:
        self.folder, self.config, self.export, self.say = folder, config, export, say
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._is_due = False
        self._also: Collection[Path] | None = None

    def request(self, also: Collection[Path] | None = None) -> None:
        """Remove what is too much; returns at once. Of several requests the last one counts.

        Args:
            also: checkpoints that stay next to the newest ones; None removes only what was discarded already.
        """
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
                directory.empty_trash(self.folder)
                if also is not None:
                    self._rotate(also)
            except Exception as error:  # whatever it is: the thread must be there for the next save
                reason = error.strerror if isinstance(error, OSError) else None
                self.say(tr("WARNING: older checkpoints could not be removed: {reason}.", reason=reason or error))

    def _rotate(self, also: Collection[Path]) -> None:
        keep, keep_weights = self.config.keep, self.config.keep_weights
        waiting = self._waiting(directory.outdated_checkpoints(self.folder, keep, also))
        directory.remove_old(self.folder, keep, [*also, *waiting], self.config.max_gib * 2**30, keep_weights)
        for checkpoint in reversed(waiting):  # the oldest first
            try:
                self.export(checkpoint, directory.weights_of(checkpoint))
            except (CheckpointError, OSError) as error:
                self.say(
                    tr(
                        "WARNING: the weights of the checkpoint {name} could not be put aside: {reason}. It stays as "
                        "it is, and it is tried again at the next save.",
                        name=checkpoint.name,
                        reason=error,
                    )
                )
                continue
            directory.remove_directory(checkpoint)
            directory.remove_old(self.folder, 0, keep_weights=keep_weights)

    def _waiting(self, outdated: list[Path]) -> list[Path]:
        """Return which of the checkpoints that may go must stay until their weights are next to them, newest first."""
        there = directory.weights_only(self.folder)
        steps = sorted({directory.step_of_any(path) for path in (*outdated, *there)}, reverse=True)
        wanted = steps if self.config.keep_weights < 0 else steps[: self.config.keep_weights]
        return [
            path
            for path in outdated
            if directory.step_of_any(path) in wanted and directory.weights_of(path) not in there
        ]
