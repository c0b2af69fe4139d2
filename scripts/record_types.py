#!/usr/bin/env python3
"""Train every type that transformers calls causal, and write what became of it: the table of docs/model_types.md.

python scripts/record_types.py benchmarks/DATE-types.json [JOBS [TYPE ...]]

Of some types, their rows in the file are replaced. Afterwards: scripts/types_page.py.
"""

import json
import shlex
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "ranks"), str(ROOT / "tests" / "system")]

from ranks import forked  # noqa: E402
from type_runs import try_type  # noqa: E402

from benchmarks.results import append_result  # noqa: E402
from tests.model_types import KINDS  # noqa: E402


def main(output: str, jobs: str = "2", *kinds: str) -> None:
    """Write the file after each type, so that nothing is lost."""
    file = Path(output)
    rows = json.loads(file.read_text(encoding="utf-8"))[0]["types"] if file.exists() else {}
    forked(0)  # one process is what all others are forks of
    with TemporaryDirectory(prefix="types-") as folder, ThreadPoolExecutor(int(jobs)) as pool:
        tasks = {pool.submit(try_type, kind, Path(folder) / kind): kind for kind in kinds or KINDS}
        for task in as_completed(tasks):
            rows[tasks[task]] = task.result()
            states = {way: cell["state"] for way, cell in task.result().items() if isinstance(cell, dict)}
            print(tasks[task], shlex.join(f"{way}={state}" for way, state in states.items()), flush=True)
            ordered = {"measured": "types", "types": dict(sorted(rows.items()))}
            append_result(output, [], ["python", "scripts/record_types.py", "FILE"], ordered, 1)


if __name__ == "__main__":
    main(*sys.argv[1:])
