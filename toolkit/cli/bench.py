"""Measure on this machine what a part of the toolkit costs, beside what it costs at least.

toolkit bench data recipe=NAME [rows=1000000] [output=FILE] [key=value …]

  data             tokenising, the store's size, opening it, packing; with made-up Chinese and English rows
  rows=1000000     rows of the large data set
  output=FILE      JSON list that the result is appended to; without it the result is shown only

Works in prepare.dir/bench. Linux only.
"""

import json
from pathlib import Path

from toolkit.cli.compose import compose, positive_int
from toolkit.config.checks import check
from toolkit.errors import ConfigError
from toolkit.messages import say, tr


def run(words: list[str]) -> int:
    """Measure."""
    if not words or words[0] != "data":
        raise ConfigError(tr("what is to be measured? Known: {known}. For example: toolkit bench data", known="data"))
    composed = compose(words[1:], world_size=1, arguments=("rows", "output"))
    check(composed.loaded)
    cfg, arguments = composed.loaded.cfg, composed.arguments
    rows = positive_int(arguments, "rows") or 1_000_000
    output = Path(arguments["output"]) if arguments.get("output") else None
    earlier = _earlier(output) if output else []
    from toolkit.bench.data import compare
    from toolkit.train.run_folder import environment

    found = compare(cfg, rows, Path(cfg.prepare.dir) / "bench", say)
    result = {"command": " ".join(["toolkit bench", *words]), **found, "environment": environment(1)}
    say(json.dumps(result, indent=2))
    if output:
        output.write_text(json.dumps([*earlier, result], indent=2) + "\n", encoding="utf-8")
    return 0


def _earlier(file: Path) -> list[object]:
    """Return what the file holds, which must be kept; before hours of measuring, not after."""
    if not file.exists():
        return []
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        found = None
    if not isinstance(found, list):
        raise ConfigError(tr("output = {file} is not a list of results. Choose another file.", file=file))
    return found
