"""Measure on this machine what a part of the toolkit costs, beside what it costs at least.

toolkit bench step       recipe=NAME [ranks=2] [pairs=20] [steps=5]
toolkit bench data       recipe=NAME [rows=1000000]
toolkit bench memory     recipe=NAME [ranks=2] [steps=20]
toolkit bench checkpoint recipe=NAME [ranks=2] [repeats=5]
toolkit bench start      recipe=NAME [ranks=2] [pairs=5]
toolkit bench plan       recipe=NAME [ranks=2]
toolkit bench resume     recipe=NAME [ranks=2] [pairs=5]
toolkit bench nvme       recipe=NAME [folder=/nvme] [gib=1] [repeats=3]
toolkit bench faults     [only="K1 K2"]

  step             steps per second of our loop and of a bare DeepSpeed loop, in turns
  data             tokenising, the store's size, opening it, packing; with made-up Chinese and English rows
  memory           each rank's memory while it trains, and that of a bare DeepSpeed script
  checkpoint       how long training waits for a save, beside a bare engine.save_checkpoint
  start            seconds from the command to the first step, of a run and of a bare DeepSpeed script, in turns
  plan             a rank's memory and a step's time beside what is planned, on the longest rows
  resume           the same of a run that starts fresh and of one that goes on from a checkpoint
  nvme             DeepSpeed's reading and writing in a folder, by settings of zero.aio; the best as overrides
  faults           kills, full disks, signals, broken files …: what must hold after each; in a checkout, takes an hour

  ranks=2          ranks of each launch, on this machine
  folder=FOLDER    on the disk to be measured; without it zero.offload_optimizer.nvme_path; gib=1: of the file there
  pairs, repeats   how often; steps: of each block, or after which memory is read; rows: of the large data set
  output=FILE      JSON list that the result is appended to; without it the result is shown only
  key=value …      as for `toolkit train`; only=IDS: these faults only

The last line is the result, one JSON object with commit, machine, versions and config. All but `faults` work in
prepare.dir/bench, and remove it. Linux only. docs/bench.md says more.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from toolkit.cli import results
from toolkit.cli.compose import Composed, compose, named_arguments, positive_int
from toolkit.cli.on_ranks import MEASURES
from toolkit.config.checks import check
from toolkit.config.load import to_yaml
from toolkit.errors import ConfigError
from toolkit.messages import say, tr

Measure = Callable[[Composed, list[str], int, Path], dict[str, Any]]
"""Gets the config, the words without the benchmark's own, the number of ranks and a folder to work in."""


def run(words: list[str]) -> int:
    """Measure."""
    if words and words[0] == "faults":
        return _faults(words)
    if not words or words[0] not in ARGUMENTS:
        known = ", ".join([*ARGUMENTS, "faults"])
        raise ConfigError(tr("what is to be measured? Known: {known}. For example: toolkit bench data", known=known))
    name = words[0]
    own = (*ARGUMENTS[name], "output")
    composed = compose(words[1:], world_size=None, arguments=own)
    ranks = positive_int(composed.arguments, "ranks") or (2 if "ranks" in own else 1)
    check(composed.loaded, ranks)
    output = composed.arguments.get("output", "")
    before = results.earlier(output)
    plain = [word for word in words[1:] if word.partition("=")[0] not in own]
    folder = Path(composed.loaded.cfg.prepare.dir).absolute() / "bench"
    found = _MEASURES.get(name, _on_ranks)(composed, [name, *plain], ranks, folder)
    found = {"measured": name, **found, "config": yaml.safe_load(to_yaml(composed.loaded.cfg))}
    say(json.dumps(results.keep(output, before, ["toolkit", "bench", *words], found, ranks), ensure_ascii=False))
    return 0


def _on_ranks(composed: Composed, words: list[str], ranks: int, folder: Path) -> dict[str, Any]:
    """Measure on ranks that are started for it; see on_ranks.py."""
    from toolkit.bench.launches import Launch

    work = _own(folder, words)
    work.mkdir(parents=True)
    file = work / "found.json"
    given = [f"{name}={composed.arguments[name]}" for name in MEASURES[words[0]][0] if name in composed.arguments]
    try:
        with Launch(["--module", "toolkit.cli.on_ranks", words[0], str(file), *words[1:], *given], ranks) as launch:
            launch.wait()
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return found
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _data(composed: Composed, words: list[str], ranks: int, folder: Path) -> dict[str, Any]:
    from toolkit.bench.data import compare

    return compare(composed.loaded.cfg, positive_int(composed.arguments, "rows") or 1_000_000, folder, say)


def _memory(composed: Composed, words: list[str], ranks: int, folder: Path) -> dict[str, Any]:
    from toolkit.bench.memory import compare

    steps = positive_int(composed.arguments, "steps") or 20
    return compare(composed.loaded.cfg, words[1:], ranks, steps, _own(folder, words), say)


def _start(composed: Composed, words: list[str], ranks: int, folder: Path) -> dict[str, Any]:
    from toolkit.bench.start import compare

    pairs = positive_int(composed.arguments, "pairs") or 5
    return compare(composed.loaded.cfg, words[1:], ranks, pairs, _own(folder, words), say)


def _resume(composed: Composed, words: list[str], ranks: int, folder: Path) -> dict[str, Any]:
    from toolkit.bench.resume import compare

    return compare(words[1:], ranks, positive_int(composed.arguments, "pairs") or 5, _own(folder, words), say)


def _nvme(composed: Composed, words: list[str], ranks: int, folder: Path) -> dict[str, Any]:
    from toolkit.bench.nvme import measure, pieces

    path = composed.arguments.get("folder") or composed.loaded.cfg.zero.offload_optimizer.nvme_path
    if not path or not Path(path).is_dir():
        raise ConfigError(
            tr("folder = {path} is not a folder here. Give one on the disk to be measured: folder=/nvme", path=path)
        )
    num_bytes = pieces(composed.arguments.get("gib", "1"))
    found = measure(Path(path), num_bytes, positive_int(composed.arguments, "repeats") or 3, say)
    say(tr("Best: {overrides}", overrides=" ".join(found["overrides"]) or tr("DeepSpeed's own settings")))
    return found


def _own(folder: Path, words: list[str]) -> Path:
    """Return a folder that no other benchmark works in at the same time."""
    return folder / f"{words[0]}-{os.getpid()}"


ARGUMENTS = {
    "step": ("ranks", "pairs", "steps"),
    "data": ("rows",),
    "memory": ("ranks", "steps"),
    "checkpoint": ("ranks", "repeats"),
    "start": ("ranks", "pairs"),
    "plan": ("ranks",),
    "resume": ("ranks", "pairs"),
    "nvme": ("folder", "gib", "repeats"),
}
"""What is measured, and the words of its own that it takes beside `output`."""
_MEASURES: dict[str, Measure] = {"data": _data, "memory": _memory, "start": _start, "resume": _resume, "nvme": _nvme}


def _faults(words: list[str]) -> int:
    from toolkit.bench.faults import run_battery
    from toolkit.cli.text_table import table

    arguments = named_arguments(words[1:], required=(), optional=("only", "output"), usage="toolkit bench faults")
    output = arguments.get("output", "")
    before = results.earlier(output)
    found = run_battery(arguments.get("only", ""))
    results.keep(output, before, ["toolkit", "bench", *words], found, 1)
    rows = [(name, str(one["passed"]), str(one["cases"])) for name, one in found["faults"].items()]
    say("\n".join(table((tr("fault"), tr("passed"), tr("cases")), rows)))
    return 0 if found["passed"] else 1
