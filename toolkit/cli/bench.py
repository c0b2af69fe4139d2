"""Measure on this machine what a part of the toolkit costs, beside what it costs at least.

toolkit bench data recipe=NAME [rows=1000000] [output=FILE] [key=value …]
toolkit bench resume recipe=NAME [ranks=2] [pairs=5] [output=FILE] [key=value …]
toolkit bench faults [only="K1 K2"] [output=FILE]

  data             tokenising, the store's size, opening it, packing; with made-up Chinese and English rows
  rows=1000000     rows of the large data set
  resume           seconds to the first step, fresh and from a checkpoint, in turns
  ranks=2          ranks of each launch, on this machine
  pairs=5          launches of each
  faults           kills, full disks, signals, broken files …: what must hold after each; in a checkout, takes an hour
  only=IDS         these faults only
  output=FILE      JSON list that the result is appended to; without it the result is shown only

`data` and `resume` work in prepare.dir/bench. Linux only.
"""

import json
from pathlib import Path

from toolkit.cli import results
from toolkit.cli.compose import compose, named_arguments, positive_int
from toolkit.config.checks import check
from toolkit.errors import ConfigError
from toolkit.messages import say, tr


def run(words: list[str]) -> int:
    """Measure."""
    measures = {"data": _data, "resume": _resume, "faults": _faults}
    if not words or words[0] not in measures:
        known = ", ".join(measures)
        raise ConfigError(tr("what is to be measured? Known: {known}. For example: toolkit bench data", known=known))
    return measures[words[0]](words)


def _data(words: list[str]) -> int:
    composed = compose(words[1:], world_size=1, arguments=("rows", "output"))
    check(composed.loaded)
    cfg, arguments = composed.loaded.cfg, composed.arguments
    rows = positive_int(arguments, "rows") or 1_000_000
    output = arguments.get("output", "")
    before = results.earlier(output)
    from toolkit.bench.data import compare

    found = compare(cfg, rows, Path(cfg.prepare.dir) / "bench", say)
    say(json.dumps(results.keep(output, before, ["toolkit", "bench", *words], found, 1), indent=2))
    return 0


def _resume(words: list[str]) -> int:
    own = ("ranks", "pairs", "output")
    composed = compose(words[1:], world_size=None, arguments=own)
    arguments = composed.arguments
    output = arguments.get("output", "")
    before = results.earlier(output)
    from toolkit.bench.resume import compare

    found = compare(
        [word for word in words[1:] if word.partition("=")[0] not in own],
        positive_int(arguments, "ranks") or 2,
        positive_int(arguments, "pairs") or 5,
        Path(composed.loaded.cfg.prepare.dir).absolute() / "bench" / "resume",
        say,
    )
    say(json.dumps(results.keep(output, before, ["toolkit", "bench", *words], found, 1), indent=2))
    return 0


def _faults(words: list[str]) -> int:
    from toolkit.bench.faults import run_battery
    from toolkit.cli.sample_view import table

    arguments = named_arguments(words[1:], required=(), optional=("only", "output"), usage="toolkit bench faults")
    output = arguments.get("output", "")
    before = results.earlier(output)
    found = run_battery(arguments.get("only", ""))
    results.keep(output, before, ["toolkit", "bench", *words], found, 1)
    rows = [(name, str(one["passed"]), str(one["cases"])) for name, one in found["faults"].items()]
    say("\n".join(table((tr("fault"), tr("passed"), tr("cases")), rows)))
    return 0 if found["passed"] else 1
