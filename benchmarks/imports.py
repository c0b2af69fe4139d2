"""What `toolkit import-config` makes of every config in checkouts of other projects; nothing of them is executed.

python -m benchmarks.imports DIRECTORY... [--output FILE.json] [--recipes DIRECTORY]

Per directory: files that may be configs (.yaml, .yml, .json, .sh), those that are converted, by program, those that are
refused, by reason, and keys that the other program does not know either. Files that are no training configs (a
docker-compose.yml, a script that installs something) count as refused. --recipes writes each recipe, and the report on
it, for a comparison with `diff -r` after a change.
"""

import argparse
import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from toolkit.extras.cli.import_config import _report
from toolkit.extras.translate import convert, read
from toolkit.messages import ConfigError

_SUFFIXES = (".yaml", ".yml", ".json", ".sh")
_LARGEST_BYTES = 40_000
"""Larger JSON files are data."""
_RANKS = 8
"""Where a file does not say on how many GPUs it is started."""


def convert_tree(root: Path, recipes: Path | None = None) -> dict[str, Any]:
    """Return the counts of a checkout, and write recipes and reports below `recipes`, if it is one."""
    converted, refused, unknown = Counter[str](), dict[str, list[str]](), Counter[str]()
    here = Path.cwd()
    os.chdir(root)  # paths in configs are relative to it
    try:
        for file in _configs():
            try:
                config, deepspeed_json = read.read_all([str(file)], None)
                config.world_size = config.world_size or _RANKS
                result = convert.convert(config, deepspeed_json)
            except ConfigError as error:
                refused.setdefault(_reason(str(error)), []).append(str(file))
                text = f"refused: {error}\n"
            else:
                converted[config.program] += 1
                unknown.update(re.sub(r"^\S+: ", "", line).partition(".")[0] for line in result.unknown)
                text = f"{result.text}\n{_report(result)}"
            if recipes:
                target = here / recipes / root.name / f"{file}.txt"
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(text, encoding="utf-8")
    finally:
        os.chdir(here)
    by_count = sorted(refused.items(), key=lambda item: -len(item[1]))
    reasons = {reason: {"files": len(files), "first": files[0]} for reason, files in by_count}
    return {
        "files": converted.total() + sum(map(len, refused.values())),
        "converted": dict(converted.most_common()),
        "refused": reasons,
        "unknown_keys": dict(unknown.most_common()),
    }


def _configs() -> Iterator[Path]:
    """Yield the files below the working directory that may be configs, in order."""
    for file in sorted(Path().rglob("*")):
        is_data = file.suffix == ".json" and file.stat().st_size > _LARGEST_BYTES
        is_hidden = any(part.startswith(".") for part in file.parts)
        if file.suffix in _SUFFIXES and file.is_file() and not is_data and not is_hidden:
            yield file


def _reason(message: str) -> str:
    """Return the first sentence of a message, without its place."""
    return re.split(r"(?<=[a-z)'])[.:] ", re.sub(r"^\S+: ", "", message))[0]


def main() -> None:
    """Print the counts of each checkout, and append them to a file of results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", nargs="+", type=Path)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--recipes", type=Path)
    words = parser.parse_args()
    trees = {root.name: convert_tree(root, words.recipes) for root in words.directory}
    for name, tree in trees.items():
        total = sum(tree["converted"].values())
        print(f"{name}: {tree['files']} files, {total} converted {tree['converted']}, {tree['files'] - total} refused")
        for reason, files in tree["refused"].items():
            print(f"  {files['files']:4} {reason}   ({files['first']})")
        if tree["unknown_keys"]:
            print("  unknown keys:", ", ".join(f"{key} ({count})" for key, count in tree["unknown_keys"].items()))
    if words.output:
        words.output.write_text(json.dumps(trees, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
