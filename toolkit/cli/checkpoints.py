"""Which checkpoint a path means, for commands that only read. No torch."""

from pathlib import Path

from toolkit.checkpoint import folders, manifest
from toolkit.errors import CheckpointError
from toolkit.messages import say, tr


def checkpoint_at(path: Path) -> Path | None:
    """Return the checkpoint that a path means: itself, or the newest whole one of a run; None where there is none.

    Args:
        path: a checkpoint, checkpoints/ of a run, or a run folder. Nothing in it is changed.

    Raises:
        CheckpointError: there are checkpoints, but none is whole.
    """
    if (path / "config.json").is_file():
        return None
    is_one = (path / manifest.MANIFEST).is_file()
    found = [path] if is_one else folders.published(path / "checkpoints") or folders.published(path)
    for folder in found:
        wrong = manifest.problems(folder)
        if not wrong:
            if not is_one:
                say(tr("Taking {folder}.", folder=folder))
            return folder
        say(tr("{folder}: DAMAGED", folder=folder) + "".join(f"\n  {one}" for one in wrong[:3]))
    if found:
        raise CheckpointError(tr("{folder} holds no checkpoint that is whole.", folder=path))
    return None
