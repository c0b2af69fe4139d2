#!/usr/bin/env python3
"""Time saving against a bare engine.save_checkpoint and write benchmarks/DATE-checkpoint.json.

DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 deepspeed --num_gpus 2 scripts/bench_checkpoint.py recipe=quickstart
Words of its own: repeats=5 output=FILE; everything else is as for run.py.
"""

from pathlib import Path
from typing import Any

from toolkit.cli.compose import positive_int
from toolkit.cli.on_ranks import measure_on_ranks


def measure(cfg: Any, prepared: Any, ranks: Any, given: dict[str, str], folder: Path) -> dict[str, Any]:
    """Measure."""
    from toolkit.bench.checkpoint import compare

    return compare(cfg, prepared, ranks, positive_int(given, "repeats") or 5, folder)


if __name__ == "__main__":
    measure_on_ranks("checkpoint", ["repeats"], measure)
