"""What stays of old checkpoints: their weights alone, made beside training by a thread of rank 0."""

import threading
from collections.abc import Callable
from pathlib import Path

from toolkit.checkpoint import folders
from toolkit.errors import CheckpointError
from toolkit.messages import tr


class Thinning:
    """Makes an export of each checkpoint that goes, and removes the checkpoint once that is whole.

    Training never waits for it, nor does a run that is stopped: what is not done then is done by the next session.

    Args:
        folder: checkpoints/ of the run.
        keep: `checkpoint.keep_weights`.
        export: makes an export of a checkpoint; raises CheckpointError.
        say: tells the user.
    """

    def __init__(
        self, folder: Path, keep: int, export: Callable[[Path, Path], None], say: Callable[[str], None]
    ) -> None:
        self.folder, self.keep, self.export, self.say = folder, keep, export, say
        self._thread: threading.Thread | None = None

    def waiting(self, outdated: list[Path]) -> list[Path]:
        """Return which of the checkpoints that may go must stay until their weights lie beside them.

        Args:
            outdated: newest first.
        """
        if self._is_busy():
            return outdated  # with some of these; the others' turn comes at the next save
        there = folders.weights_only(self.folder)
        steps = sorted({folders.step_of_any(path) for path in (*outdated, *there)}, reverse=True)
        wanted = steps if self.keep < 0 else steps[: self.keep]
        return [
            path for path in outdated if folders.step_of_any(path) in wanted and folders.weights_of(path) not in there
        ]

    def start(self, checkpoints: list[Path]) -> None:
        """Begin with some checkpoints, oldest first, unless it is busy."""
        if checkpoints and not self._is_busy():
            self._thread = threading.Thread(target=self._run, args=(checkpoints[::-1],), name="thinning", daemon=True)
            self._thread.start()

    def wait(self) -> None:
        """Wait for the end of it."""
        if self._thread is not None:
            self._thread.join()

    def _is_busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _run(self, checkpoints: list[Path]) -> None:
        for checkpoint in checkpoints:
            try:
                self.export(checkpoint, folders.weights_of(checkpoint))
                folders.remove(checkpoint)
                folders.remove_old(self.folder, 0, keep_weights=self.keep)
            except (CheckpointError, OSError) as error:
                self.say(
                    tr(
                        "WARNING: the weights of the checkpoint {name} could not be put aside: {reason}. It stays as "
                        "it is, and it is tried again at the next save.",
                        name=checkpoint.name,
                        reason=error,
                    )
                )
