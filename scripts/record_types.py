#!/usr/bin/env python3
"""Train every type that transformers calls causal, and write what became of it: the table of docs/model_types.md.

python scripts/record_types.py benchmarks/DATE-types.json [JOBS [TYPE ...]]

Of some types, their rows in the file are replaced, and `runs` says at which commit. Afterwards: scripts/types_page.py.
"""

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "ranks"), str(ROOT / "tests" / "system")]

from ranks import forked  # noqa: E402
from type_runs import Row, try_type  # noqa: E402

from benchmarks.results import append_result  # noqa: E402
from tests.model_types import KINDS  # noqa: E402
from toolkit import disk  # noqa: E402


def main(file: Path, jobs: int, kinds: Sequence[str]) -> None:
    """Write the file after each type, so that nothing is lost. `kinds`: types, all if there are none."""
    before = json.loads(file.read_text(encoding="utf-8"))[0] if file.exists() else None
    rows: dict[str, Row] = {}
    forked(0)  # one process is what all others are forks of
    with TemporaryDirectory(prefix="types-") as folder, ThreadPoolExecutor(jobs) as pool:
        tasks = {pool.submit(try_type, kind, Path(folder) / kind): kind for kind in kinds or KINDS}
        for task in as_completed(tasks):
            rows[tasks[task]] = task.result()
            states = {way: cell["state"] for way, cell in task.result().items() if isinstance(cell, dict)}
            print(tasks[task], shlex.join(f"{way}={state}" for way, state in states.items()), flush=True)
            command, measured = ["python", "scripts/record_types.py", "FILE"], {"measured": "types", "types": rows}
            result = append_result("", [], command, measured, 1)
            write(file, merged(before, result))


def merged(before: dict[str, Any] | None, result: dict[str, Any]) -> dict[str, Any]:
    """Return a result with `runs`, which say at which commit and with which transformers each type was run; rows of
    types that were not run again are those before.
    """
    environment, kinds = result["environment"], result["types"].keys()
    runs = [] if before is None else [{**run, "types": sorted({*run["types"]} - kinds)} for run in before["runs"]]
    if before is not None and _others(before["environment"]) != _others(environment):
        sys.exit(f"The file is of other versions than {_others(environment)}. Write a new one, of all types.")
    versions = {"commit": environment["commit"], "transformers": environment["packages"]["transformers"]}
    run = next((run for run in runs if versions.items() <= run.items()), None)
    if run is None:
        runs.append(run := {**versions, "started": environment["started"], "types": []})
    run["types"] = sorted({*run["types"], *kinds})
    rows = {**({} if before is None else before["types"]), **result["types"]}
    return {**result, "types": dict(sorted(rows.items())), "runs": [run for run in runs if run["types"]]}


def _others(environment: dict[str, Any]) -> dict[str, str]:
    """Return the versions of all packages but transformers."""
    return {name: version for name, version in environment["packages"].items() if name != "transformers"}


def write(file: Path, result: dict[str, Any]) -> None:
    """Write a file of one result."""
    disk.write_atomically(file, (json.dumps([result], indent=2, ensure_ascii=False) + "\n").encode())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="the file, such as benchmarks/DATE-types.json")
    parser.add_argument("jobs", nargs="?", type=int, default=2, help="types at once; default: 2")
    parser.add_argument("kinds", nargs="*", metavar="type", help="default: all")
    arguments = parser.parse_args()
    main(arguments.output, arguments.jobs, arguments.kinds)
