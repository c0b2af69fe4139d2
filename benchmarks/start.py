"""How long a run takes to its first step: next to a bare DeepSpeed script, and resumed next to fresh; in turns.

From the command on, with Python's start and all imports; data is tokenized and ops are compiled before.
"""

import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.processes import Launch
from benchmarks.sides import QUIET, Sides
from toolkit.config.schema import RunConfig
from toolkit.messages import tr


def compare_with_bare(
    cfg: RunConfig, words: Sequence[str], ranks: int, pairs: int, folder: Path, say: Callable[[str], None]
) -> dict[str, Any]:
    """Start a run and a bare DeepSpeed script in turns.

    Args:
        cfg: checked config.
        words: recipe and overrides that give it.
        ranks: of each launch, on this machine.
        pairs: launches of each; one more of each warms up.
        folder: where they work; made here and removed.
        say: hears what comes next.

    Returns:
        Seconds from the command to the end of the first step, of both; `ratio`: median of ours / bare, pair by pair.

    Raises:
        ConfigError: the recipe does something that a bare script does not.
        LaunchError: a launch failed.
    """
    seconds: dict[str, list[float]] = {"ours": [], "bare": []}
    try:
        sides = Sides(cfg, words, ranks, folder)
        for pair in range(pairs + 1):
            say(tr("pair {number} of {pairs}", number=pair, pairs=pairs))
            for name, begin in (("ours", sides.ours), ("bare", sides.bare)):
                launch, steps = begin()
                with launch:
                    seconds[name].append(launch.until(lambda steps=steps: steps() > 0))  # type: ignore[misc]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    ours, bare = seconds["ours"][1:], seconds["bare"][1:]
    return {
        "ranks": ranks,
        "ours_s": ours,
        "bare_s": bare,
        "ours_median_s": statistics.median(ours),
        "bare_median_s": statistics.median(bare),
        "ratio": statistics.median(one / floor for one, floor in zip(ours, bare, strict=True)),
    }


def compare_with_resumed(
    words: Sequence[str], ranks: int, pairs: int, folder: Path, say: Callable[[str], None]
) -> dict[str, Any]:
    """Launch a fresh run and one that resumes from a checkpoint in turns.

    Args:
        words: recipe and overrides.
        ranks: of each launch, on this machine.
        pairs: launches of each.
        folder: where they work; made here and removed.
        say: hears what comes next.

    Returns:
        Seconds from the command to the row of the first step, of both; seconds that plainly reading the checkpoint's
        files takes; bytes of the checkpoint; `ratio`: median of (resumed - reading) / fresh, pair by pair.

    Raises:
        LaunchError: a launch failed.
    """
    common = [*words, *QUIET, f"run.dir={folder}"]
    fresh: list[float] = []
    resumed: list[float] = []
    reading: list[float] = []
    try:
        say(tr("a run that saves"))
        checkpoint = folder / "base" / "checkpoints" / "step-2"
        _until(lambda: checkpoint.is_dir(), [*common, "run.name=base", "checkpoint.every=2"], ranks)
        for pair in range(pairs):
            say(tr("pair {number} of {pairs}", number=pair + 1, pairs=pairs))
            fresh.append(_first_step_s([*common, f"run.name=fresh{pair}"], ranks, folder / f"fresh{pair}"))
            again = [*common, f"run.name=resumed{pair}", f"resume={checkpoint}"]
            resumed.append(_first_step_s(again, ranks, folder / f"resumed{pair}"))
            reading.append(_read_s(checkpoint))
        size = sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file())
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    ratios = [(late - read) / early for early, late, read in zip(fresh, resumed, reading, strict=True)]
    return {
        "ranks": ranks,
        "fresh_s": fresh,
        "resumed_s": resumed,
        "reading_s": reading,
        "checkpoint_bytes": size,
        "fresh_median_s": statistics.median(fresh),
        "resumed_median_s": statistics.median(resumed),
        "ratio": statistics.median(ratios),
    }


def _first_step_s(words: list[str], ranks: int, folder: Path) -> float:
    """Return the seconds from the command to its first row of metrics.jsonl."""
    metrics = folder / "metrics.jsonl"
    seconds = _until(lambda: metrics.exists() and metrics.stat().st_size > 0, words, ranks)
    shutil.rmtree(folder)
    return seconds


def _until(condition: Callable[[], bool], words: list[str], ranks: int) -> float:
    """Launch, wait until something is so, end all of it, and return the seconds that were waited."""
    with Launch(words, ranks, launcher=("toolkit", "launch")) as launch:
        return launch.until(condition)


def _read_s(folder: Path) -> float:
    started = time.perf_counter()
    for path in folder.rglob("*"):
        if path.is_file():
            path.read_bytes()
    return round(time.perf_counter() - started, 3)
