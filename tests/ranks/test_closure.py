"""What a plain run imports of the package: a feature that its recipe does not name is not among it."""

import json
import sys
from pathlib import Path

from feature_costs import FEATURES, modules
from ranks import run

ROOT = Path(__file__).parents[2]
MOST_FILES, MOST_LINES = 113, 26_600
"""Measured: 113 files, 26,564 lines. Files are divided by what they serve: their number is a bound, and no aim."""


def test_a_plain_run_imports_what_it_uses(tmp_path: Path) -> None:
    """The recipe quickstart on one rank, without report: files that hold code, and their lines."""
    listing = tmp_path / "files.json"
    program = (
        "import atexit, json, runpy, sys\n"
        "names = lambda: [one for one in sys.modules if one.split('.')[0] == 'toolkit']\n"
        "files = lambda: sorted({sys.modules[one].__file__ for one in names() if sys.modules[one].__file__})\n"
        f"atexit.register(lambda: open({str(listing)!r}, 'w').write(json.dumps(files())))\n"
        "sys.argv[0] = 'run.py'\n"
        f"runpy.run_path({str(ROOT / 'run.py')!r}, run_name='__main__')\n"
    )
    words = [
        "recipe=quickstart",
        "report.enabled=false",
        "train.max_steps=2",
        "schedule.warmup_steps=0",
        f"run.dir={tmp_path / 'runs'}",
    ]
    finished = run([sys.executable, "-c", program, *words], cwd=tmp_path)
    assert finished.code == 0, finished.output[-4000:]
    lines = {file: len(Path(file).read_text(encoding="utf-8").splitlines()) for file in json.loads(listing.read_text())}
    with_code = {file: count for file, count in lines.items() if count}
    listed = "\n".join(f"{count:6} {Path(file).relative_to(ROOT)}" for file, count in sorted(with_code.items()))
    assert len(with_code) <= MOST_FILES, f"{len(with_code)} files\n{listed}"
    assert sum(with_code.values()) <= MOST_LINES, f"{sum(with_code.values())} lines\n{listed}"
    assert not [file for file in with_code if "toolkit/extras/" in file], listed
    optional = {str(file): feature.en for feature in FEATURES for file in modules(feature)}
    assert not {file: optional[file] for file in with_code if file in optional}
