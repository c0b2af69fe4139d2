"""What `toolkit bench` runs: the arguments of each benchmark, and what measures; see docs/bench.md."""

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from benchmarks import on_ranks, results
from toolkit.arguments import Arguments, check_parsed, parse
from toolkit.command_line import named_arguments, positive_int
from toolkit.config.load import to_yaml
from toolkit.distributed.exits import run_guarded
from toolkit.messages import ConfigError, Problems, say, tr
from toolkit.tables import text_table

Measure = Callable[[Arguments, list[str], int, Path], dict[str, Any]]
"""Gets the config, the words without the benchmark's own, the number of ranks and a folder to work in."""


_JOINED = 24
"""Conversations of so many turns that `trees` trains."""


def run(words: list[str]) -> int:
    """Measure one thing.

    Args:
        words: what is to be measured, and its arguments.

    Returns:
        The exit code: 1 if a fault of the battery did not pass.

    Raises:
        ConfigError: an argument is wrong.
        LaunchError: a launch failed.
    """
    if words and words[0] == "faults":
        return _faults(words)
    if not words or words[0] not in ARGUMENTS:
        known = ", ".join([*ARGUMENTS, "faults"])
        raise ConfigError(tr("what is to be measured? Known: {known}. For example: toolkit bench data", known=known))
    name = words[0]
    own = (*ARGUMENTS[name], "output")
    problems = Problems()
    arguments = parse(words[1:], names=own, problems=problems)
    ranks = problems.attempt(positive_int, arguments.values, "ranks") or (2 if "ranks" in own else 1)
    check_parsed(arguments.loaded, ranks, problems)
    problems.raise_all()
    output = arguments.values.get("output", "")
    before = results.earlier(output)
    plain = [word for word in words[1:] if word.partition("=")[0] not in own]
    folder = Path(arguments.loaded.cfg.prepare.dir).absolute() / "bench"
    found = _MEASURES.get(name, _on_ranks)(arguments, [name, *plain], ranks, folder)
    found = {"measured": name, **found, "config": yaml.safe_load(to_yaml(arguments.loaded.cfg))}
    result = results.append_result(output, before, ["toolkit", "bench", *words], found, ranks)
    say(json.dumps(result, ensure_ascii=False))
    return 0


def _on_ranks(arguments: Arguments, words: list[str], ranks: int, folder: Path) -> dict[str, Any]:
    """Measure on ranks that are started for it; see on_ranks.py."""
    from benchmarks.processes import Launch

    work = _own(folder, words)
    work.mkdir(parents=True)
    file = work / "found.json"
    own, _ = on_ranks.MEASURES[words[0]]
    given = [f"{name}={arguments.values[name]}" for name in own if name in arguments.values]
    try:
        with Launch([on_ranks.__file__, words[0], str(file), *words[1:], *given], ranks) as launch:
            launch.wait()
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return found
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _data(arguments: Arguments, words: list[str], ranks: int, folder: Path) -> dict[str, Any]:
    from benchmarks.data import compare

    return compare(arguments.loaded.cfg, positive_int(arguments.values, "rows") or 1_000_000, folder, say)


def _encode(arguments: Arguments, words: list[str], ranks: int, folder: Path) -> dict[str, Any]:
    from benchmarks.encode import compare

    num_turns = _turns(arguments.values.get("turns") or "1,2,6,12")
    return compare(arguments.loaded.cfg, num_turns, positive_int(arguments.values, "repeats") or 5)


def _turns(given: str) -> list[int]:
    if not all(count.isdecimal() and int(count) for count in given.split(",")):
        raise ConfigError(tr("turns = {value} is not a list of numbers. Write it like this: turns=1,6", value=given))
    return [int(count) for count in given.split(",")]


def _trees(arguments: Arguments, words: list[str], ranks: int, folder: Path) -> dict[str, Any]:
    if "turns" not in arguments.values:
        return _on_ranks(arguments, words, ranks, folder)
    from benchmarks.trees import joined_file

    found = {}
    folder.mkdir(parents=True, exist_ok=True)
    for count in _turns(arguments.values["turns"]):
        file = joined_file(arguments.loaded.cfg, [count], _JOINED, folder / f"joined-{os.getpid()}.jsonl")
        try:
            own = f"data.sources=[{{path: {file}}}]"
            given = [word for word in words if not word.startswith(("data=", "data.sources="))]
            found[str(count)] = _on_ranks(arguments, [*given, own], ranks, folder)
        finally:
            file.unlink()
    return {"by_turns": found}


def _memory(arguments: Arguments, words: list[str], ranks: int, folder: Path) -> dict[str, Any]:
    from benchmarks.memory import compare

    steps = positive_int(arguments.values, "steps") or 20
    return compare(arguments.loaded.cfg, words[1:], ranks, steps, _own(folder, words), say)


def _start(arguments: Arguments, words: list[str], ranks: int, folder: Path) -> dict[str, Any]:
    from benchmarks.start import compare_with_bare

    pairs = positive_int(arguments.values, "pairs") or 5
    return compare_with_bare(arguments.loaded.cfg, words[1:], ranks, pairs, _own(folder, words), say)


def _resume(arguments: Arguments, words: list[str], ranks: int, folder: Path) -> dict[str, Any]:
    from benchmarks.start import compare_with_resumed

    pairs = positive_int(arguments.values, "pairs") or 5
    return compare_with_resumed(words[1:], ranks, pairs, _own(folder, words), say)


def _nvme(arguments: Arguments, words: list[str], ranks: int, folder: Path) -> dict[str, Any]:
    from benchmarks.nvme import measure, pieces

    path = arguments.values.get("directory") or arguments.loaded.cfg.zero.offload_optimizer.nvme_path
    if not path or not Path(path).is_dir():
        raise ConfigError(
            tr(
                "directory = {path} is not a directory here. Give one on the disk to be measured: directory=/nvme",
                path=path,
            )
        )
    num_bytes = pieces(arguments.values.get("gib", "1"))
    found = measure(Path(path), num_bytes, positive_int(arguments.values, "repeats") or 3, say)
    say(tr("Best: {overrides}", overrides=" ".join(found["overrides"]) or tr("DeepSpeed's own settings")))
    return found


def _own(folder: Path, words: list[str]) -> Path:
    """Return a folder that no other benchmark works in at the same time."""
    return folder / f"{words[0]}-{os.getpid()}"


ARGUMENTS = {
    "step": ("ranks", "pairs", "steps"),
    "data": ("rows",),
    "encode": ("turns", "repeats"),
    "memory": ("ranks", "steps"),
    "checkpoint": ("ranks", "repeats"),
    "start": ("ranks", "pairs"),
    "plan": ("ranks",),
    "resume": ("ranks", "pairs"),
    "nvme": ("directory", "gib", "repeats"),
    "trees": ("ranks", "pairs", "turns"),
    "experts": ("ranks", "pairs", "steps", "counts"),
}
"""What is measured, and the words of its own that it takes beside `output`."""
_MEASURES: dict[str, Measure] = {
    "data": _data,
    "encode": _encode,
    "memory": _memory,
    "start": _start,
    "resume": _resume,
    "nvme": _nvme,
    "trees": _trees,
}


def _faults(words: list[str]) -> int:
    from benchmarks.faults import run_battery

    arguments = named_arguments(words[1:], required=(), optional=("only", "output"), usage="toolkit bench faults")
    output = arguments.get("output", "")
    before = results.earlier(output)
    found = run_battery(arguments.get("only", ""))
    results.append_result(output, before, ["toolkit", "bench", *words], found, 1)
    rows = [(name, str(one["passed"]), str(one["cases"])) for name, one in found["faults"].items()]
    say("\n".join(text_table((tr("fault"), tr("passed"), tr("cases")), rows)))
    return 0 if found["passed"] else 1


if __name__ == "__main__":
    sys.exit(run_guarded(lambda: run(sys.argv[1:])))
