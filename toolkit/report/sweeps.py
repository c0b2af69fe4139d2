"""A sweep's folder, of which a report compares the runs."""

from collections.abc import Sequence
from pathlib import Path

from toolkit.errors import RunFolderError
from toolkit.messages import tr

_IS_SWEEP, _HAS_METRICS = "sweep.json", "metrics.jsonl"


def is_sweep(folder: Path) -> bool:
    """Whether a folder is a sweep's."""
    return (folder / _IS_SWEEP).is_file()


def runs_of(folder: Path) -> list[Path]:
    """Return the folders of a sweep's runs that have metrics, by their names."""
    return sorted(path.parent for path in folder.glob(f"*/{_HAS_METRICS}") if path.stat().st_size)


def unfolded(paths: Sequence[Path]) -> list[Path]:
    """Return run folders, in the place of a sweep's folder those of its runs.

    Raises:
        RunFolderError: no run of a sweep has metrics yet.
    """
    found: list[Path] = []
    for path in paths:
        runs = runs_of(path) if is_sweep(path) else [path]
        if not runs:
            raise RunFolderError(tr("{folder}: no run of this sweep has metrics yet.", folder=path))
        found += runs
    return found
