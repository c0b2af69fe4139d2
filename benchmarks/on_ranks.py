"""The part of `toolkit bench` that runs on all ranks: `toolkit bench NAME` starts it and reads what it writes.

deepspeed … benchmarks/on_ranks.py NAME FILE recipe=… [key=value …]
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.arguments import parse_checked
from toolkit.command_line import positive_int
from toolkit.config.hub import resolve_model_path
from toolkit.config.schema import RunConfig
from toolkit.launch import environment

if TYPE_CHECKING:
    from toolkit.tasks.language_data import LanguageData

Measure = Callable[[RunConfig, "LanguageData", environment.Ranks, dict[str, str], Path], dict[str, Any]]
"""Config, data, who this process is, the benchmark's own words, and a folder that all ranks see."""


def _step(
    cfg: RunConfig, prepared: "LanguageData", ranks: environment.Ranks, given: dict[str, str], folder: Path
) -> dict[str, Any]:
    from benchmarks.step import compare

    pairs, steps = positive_int(given, "pairs") or 20, positive_int(given, "steps") or 5
    return compare(cfg, prepared, ranks, pairs, steps, folder)


def _checkpoint(
    cfg: RunConfig, prepared: "LanguageData", ranks: environment.Ranks, given: dict[str, str], folder: Path
) -> dict[str, Any]:
    from benchmarks.checkpoint import compare

    return compare(cfg, prepared, ranks, positive_int(given, "repeats") or 5, folder)


def _plan(
    cfg: RunConfig, prepared: "LanguageData", ranks: environment.Ranks, given: dict[str, str], folder: Path
) -> dict[str, Any]:
    import torch
    from deepspeed.accelerator import get_accelerator

    from benchmarks.engines import build_engine
    from benchmarks.plan import compare
    from toolkit.extras.calibration import measure

    device = torch.device(get_accelerator().current_device_name())
    rates = measure(cfg, ranks.world_size, device)
    return compare(cfg, lambda: build_engine(cfg, prepared, folder), ranks, device, rates)


def _trees(
    cfg: RunConfig, prepared: "LanguageData", ranks: environment.Ranks, given: dict[str, str], folder: Path
) -> dict[str, Any]:
    from benchmarks.trees import compare

    return compare(cfg, prepared, ranks, positive_int(given, "pairs") or 5, folder)


def _experts(
    cfg: RunConfig, prepared: "LanguageData", ranks: environment.Ranks, given: dict[str, str], folder: Path
) -> dict[str, Any]:
    from benchmarks.experts import compare

    pairs, steps = positive_int(given, "pairs") or 5, positive_int(given, "steps") or 3
    counts = [int(count) for count in given.get("counts", "8,16,32,64").split(",")]
    return compare(cfg, prepared, ranks, counts, pairs, steps, folder)


MEASURES: dict[str, tuple[tuple[str, ...], Measure]] = {
    "step": (("pairs", "steps"), _step),
    "checkpoint": (("repeats",), _checkpoint),
    "plan": ((), _plan),
    "trees": (("pairs",), _trees),
    "experts": (("pairs", "steps", "counts"), _experts),
}
"""By name, the benchmark's own words and what measures."""


def main() -> None:
    """Measure on all ranks; rank 0 writes the figures."""
    words = environment.strip_launcher_arguments(sys.argv[1:])
    name, file, *words = words
    names, measure = MEASURES[name]
    ranks = environment.detect(os.environ)
    arguments = parse_checked(words, world_size=ranks.world_size, names=names)
    environment.set_rank_variables(ranks, os.environ)
    cfg = resolve_model_path(arguments.loaded).cfg
    from toolkit.distributed import process_group
    from toolkit.tasks.language_data import load_data

    prepared = load_data(cfg)
    process_group.start(cfg.distributed)
    found = measure(cfg, prepared, ranks, arguments.values, Path(file).parent)
    if ranks.rank == 0:
        Path(file).write_text(json.dumps(found), encoding="utf-8")
    process_group.stop()


if __name__ == "__main__":
    main()
