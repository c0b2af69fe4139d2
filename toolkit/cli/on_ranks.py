"""A benchmark that runs under a launcher: what all of them do before and after they measure."""

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.cli import results
from toolkit.cli.compose import compose
from toolkit.config.checks import check
from toolkit.config.schema import RunConfig
from toolkit.launch import environment

if TYPE_CHECKING:
    from toolkit.train.prepared import Prepared

Measure = Callable[[RunConfig, "Prepared", environment.Ranks, dict[str, str], Path], dict[str, Any]]
"""Config, data, who this process is, the benchmark's own words, and a folder that all ranks see and that is removed."""


def measure_on_ranks(name: str, arguments: Sequence[str], measure: Measure) -> None:
    """Measure on all ranks; rank 0 writes to benchmarks/DATE-NAME.json, or the word `output`.

    Args:
        name: of the script, scripts/bench_NAME.py.
        arguments: the benchmark's own words beside `output`; everything else is as for run.py.
        measure: a collective that returns the figures.
    """
    ranks = environment.detect(os.environ)
    words = environment.strip_launcher_arguments(sys.argv[1:])
    composed = compose(words, world_size=ranks.world_size, arguments=(*arguments, "output"))
    check(composed.loaded, ranks.world_size)
    environment.apply(ranks, os.environ)
    from toolkit.distributed import process_group
    from toolkit.train.prepared import prepare_data

    cfg = composed.loaded.cfg
    output = composed.arguments.get("output") or f"benchmarks/{time.strftime('%Y-%m-%d')}-{name}.json"
    before = results.earlier(output)
    prepared = prepare_data(cfg, speaks=False)
    process_group.start(cfg.distributed)
    folder = Path(process_group.on_rank0(lambda: tempfile.mkdtemp(dir=".")))
    result = measure(cfg, prepared, ranks, composed.arguments, folder)
    if ranks.rank == 0:
        shutil.rmtree(folder)
        command = ["deepspeed", "--num_gpus", str(ranks.world_size), f"scripts/bench_{name}.py", *words]
        print(json.dumps(results.keep(output, before, command, result, ranks.world_size), indent=2))
    process_group.stop()
