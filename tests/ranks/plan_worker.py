"""Run on every rank: engines of several configs one after another, each with what was planned for it.

Arguments: a JSON file with {name: overrides}, and where rank 0 writes {name: see benchmarks/plan.py}.
"""

import json
import os
import sys
from functools import partial
from pathlib import Path

from toolkit.config.load import load
from toolkit.config.rules import check_rules
from toolkit.launch import environment
from toolkit.messages import set_language


def main() -> None:
    """Measure every case."""
    set_language("en")
    words = environment.strip_launcher_arguments(sys.argv[1:])
    cases = json.loads(Path(words[0]).read_text())
    ranks = environment.detect(os.environ)
    environment.set_rank_variables(ranks, os.environ)

    from torch.nn import functional

    from benchmarks.engines import build_engine
    from benchmarks.plan import compare
    from toolkit.distributed import process_group
    from toolkit.tasks.language_data import load_data

    found = {}
    linear = functional.linear  # ZeRO-3 puts its own there, for good (0.19.8); a run has one engine
    device = None
    for name, overrides in cases.items():
        functional.linear = linear
        loaded = load(overrides)
        check_rules(loaded, ranks.world_size)
        cfg = loaded.cfg
        prepared = load_data(cfg)
        device = device or process_group.start(cfg.distributed)
        folder = Path(words[1]).parent / name
        process_group.on_rank0(partial(folder.mkdir, exist_ok=True))
        build = partial(build_engine, cfg, prepared, folder)
        found[name] = compare(cfg, build, ranks, device)
        if ranks.rank == 0:
            Path(words[1]).write_text(json.dumps(found))
    process_group.stop()


main()
