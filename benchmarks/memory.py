"""The memory of each rank's process in the middle of training: our run beside a bare DeepSpeed script."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.processes import tree_pss, uss
from benchmarks.sides import Sides
from toolkit.config.schema import RunConfig
from toolkit.messages import tr

_MIB = 1 << 20


def compare(
    cfg: RunConfig, words: Sequence[str], ranks: int, steps: int, folder: Path, say: Callable[[str], None]
) -> dict[str, Any]:
    """Run both, one after the other, until they have done some steps, and look at their processes.

    Args:
        cfg: checked config.
        words: recipe and overrides that give it.
        ranks: of each launch, on this machine.
        steps: after which memory is read.
        folder: where they work; made here and removed.
        say: hears what comes next.

    Returns:
        By side, in MiB and rank by rank: `uss`, what no other process shares; `pss`, which counts what several share in
        parts, with the processes that a rank has started. `difference_mib`: of the largest ranks' USS.

    Raises:
        ConfigError: the recipe does something that a bare script does not.
        LaunchError: a launch failed.
    """
    found: dict[str, Any] = {}
    try:
        sides = Sides(cfg, words, ranks, folder)
        for name, begin in (("bare", sides.bare), ("ours", sides.ours)):
            say(tr("memory of {name}", name=name))
            launch, done = begin()
            with launch:
                launch.until(lambda done=done: done() >= steps)  # type: ignore[misc]
                pids = launch.ranks()
                found[name] = {
                    "uss_mib": [round(uss(pid) / _MIB) for pid in pids],
                    "pss_mib": [round(tree_pss(pid) / _MIB) for pid in pids],
                }
        row = json.loads(next((folder / "ours1" / "metrics.jsonl").open(encoding="utf-8")))
        if "planned_memory_bytes" in row:
            found["ours"]["planned_mib"] = round(row["planned_memory_bytes"] / _MIB)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    difference = max(found["ours"]["uss_mib"]) - max(found["bare"]["uss_mib"])
    return {"ranks": ranks, "steps": steps, **found, "difference_mib": difference}
