#!/usr/bin/env python3
"""Time saving against a bare engine.save_checkpoint and write benchmarks/DATE-checkpoint.json.

DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 deepspeed --num_gpus 2 scripts/bench_checkpoint.py recipe=quickstart
Words of its own: repeats=5 output=FILE; everything else is as for run.py.
"""

import json
import os
import shutil
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
    composed = compose(words, world_size=ranks.world_size, arguments=("repeats", "output"))
    check(composed.loaded, ranks.world_size)
    environment.apply(ranks, os.environ)
    from toolkit.bench.checkpoint import compare
    from toolkit.distributed import process_group
    from toolkit.train.prepared import prepare_data

    cfg = composed.loaded.cfg
    prepared = prepare_data(cfg, speaks=False)
    process_group.start(cfg.distributed)
    repeats = positive_int(composed.arguments, "repeats") or 5
    folder = Path(process_group.on_rank0(lambda: tempfile.mkdtemp(dir=".")))
    result = compare(cfg, prepared, ranks, repeats, folder)
    if ranks.rank == 0:
        shutil.rmtree(folder)
        command = " ".join(["deepspeed", "--num_gpus", str(ranks.world_size), "scripts/bench_checkpoint.py", *words])
        result = {"command": command, **result, "environment": versions(ranks.world_size)}
        text = json.dumps(result, indent=2) + "\n"
        output = composed.arguments.get("output") or f"benchmarks/{time.strftime('%Y-%m-%d')}-checkpoint.json"
        Path(output).write_text(text, encoding="utf-8")
        print(text)
    process_group.stop()


if __name__ == "__main__":
    main()
