"""How long a run takes to its first step: ours beside a bare DeepSpeed script, in turns.

Both from the command on, with Python's start and all imports; data is tokenised and ops are compiled before.
"""

import shutil
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from toolkit.bench.sides import Sides
from toolkit.config.schema import RunConfig
from toolkit.messages import tr


def compare(
    cfg: RunConfig, words: Sequence[str], ranks: int, pairs: int, folder: Path, say: Callable[[str], None]
) -> dict[str, Any]:
    """Start both in turns.

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
