#!/usr/bin/env python3
"""Time our loop against a bare DeepSpeed loop and write benchmarks/DATE-step.json.

DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 deepspeed --num_gpus 2 scripts/bench_step.py recipe=quickstart
Words of its own: pairs=20 steps=5 output=FILE; everything else is as for run.py.
"""

from pathlib import Path
from typing import Any

from toolkit.cli.compose import positive_int
from toolkit.cli.on_ranks import measure_on_ranks


def measure(cfg: Any, prepared: Any, ranks: Any, given: dict[str, str], folder: Path) -> dict[str, Any]:
    """Measure."""
    from toolkit.bench.step import compare

    pairs, steps = positive_int(given, "pairs") or 20, positive_int(given, "steps") or 5
    return compare(cfg, prepared, ranks, pairs, steps, folder)


if __name__ == "__main__":
    measure_on_ranks("step", ["pairs", "steps"], measure)
