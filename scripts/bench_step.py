#!/usr/bin/env python3
"""Time our loop against a bare DeepSpeed loop and write benchmarks/DATE-step.json.

DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 deepspeed --num_gpus 2 scripts/bench_step.py recipe=quickstart
Words of its own: pairs=20 steps=5 output=FILE; everything else is as for run.py.
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path

from toolkit.cli.compose import compose, positive_int
from toolkit.config.checks import check
from toolkit.launch import environment
from toolkit.train.run_folder import environment as versions


def main() -> None:
    """Measure on all ranks; rank 0 writes."""
    ranks = environment.detect(os.environ)
    words = environment.strip_launcher_arguments(sys.argv[1:])
    composed = compose(words, world_size=ranks.world_size, arguments=("pairs", "steps", "output"))
    check(composed.loaded, ranks.world_size)
    environment.apply(ranks, os.environ)
    from toolkit.bench.step import compare
    from toolkit.distributed import process_group
    from toolkit.train.prepared import prepare_data

    cfg = composed.loaded.cfg
    prepared = prepare_data(cfg, speaks=False)
    process_group.start(cfg.distributed)
    pairs = positive_int(composed.arguments, "pairs") or 20
    steps = positive_int(composed.arguments, "steps") or 5
    with tempfile.TemporaryDirectory() as folder:
        result = compare(cfg, prepared, ranks, pairs, steps, Path(folder))
    if ranks.rank == 0:
        command = " ".join(["deepspeed", "--num_gpus", str(ranks.world_size), "scripts/bench_step.py", *words])
        result = {"command": command, **result, "environment": versions(ranks.world_size)}
        text = json.dumps(result, indent=2) + "\n"
        output = composed.arguments.get("output") or f"benchmarks/{time.strftime('%Y-%m-%d')}-step.json"
        Path(output).write_text(text, encoding="utf-8")
        print(text)
    process_group.stop()


if __name__ == "__main__":
    main()
