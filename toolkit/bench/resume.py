"""How long a run takes to its first step: started fresh, and gone on with from a checkpoint, in turns."""

import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from toolkit.errors import CheckpointError
from toolkit.messages import tr

LIMIT_S = 900.0
_QUIET = ("evaluate.at_start=false", "checkpoint.export=false", "checkpoint.keep=0", "train.log_every=1")


def compare(words: Sequence[str], ranks: int, pairs: int, folder: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Launch both in turns.

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
        CheckpointError: a launch failed.
    """
    common = [*words, *_QUIET, f"run.dir={folder}", "language=en"]
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
    shutil.rmtree(folder)  # stopping has saved a checkpoint
    return seconds


def _until(condition: Callable[[], bool], words: list[str], ranks: int) -> float:
    """Launch, wait until something is so, stop all of it, and return the seconds that were waited."""
    command = [sys.executable, "-m", "toolkit", "launch", "--num_gpus", str(ranks), *words]
    with tempfile.TemporaryFile("w+") as output:
        started = time.perf_counter()
        process = subprocess.Popen(command, stdout=output, stderr=output)  # noqa: S603
        try:
            while not condition():
                if process.poll() is not None or time.perf_counter() - started > LIMIT_S:
                    output.seek(0)
                    last = "\n".join(output.read().splitlines()[-20:])
                    raise CheckpointError(tr("the launch to be timed has failed:\n{output}", output=last))
                time.sleep(0.005)
            return round(time.perf_counter() - started, 3)
        finally:
            process.terminate()  # which stops the ranks, and waits for them
            process.wait(LIMIT_S)


def _read_s(folder: Path) -> float:
    started = time.perf_counter()
    for path in folder.rglob("*"):
        if path.is_file():
            path.read_bytes()
    return round(time.perf_counter() - started, 3)
