"""Show that the tests of CI find faults: plant those of planted_faults.yaml in a copy, one after the other.

scripts/plant_faults [NAME …] [--no-control] [--timeout SECONDS] [--json FILE] [--list]

A fault is a mistake that a maintainer could make: a place in a file, what stands there instead, and the tests of the
default tier or that of ranks which must fail by it. Without faults these tests must pass first, unless --no-control.
The exit code is 1 if a fault is not found, or a test fails without one.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from importlib.util import cache_from_source
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
TABLE = Path(__file__).with_suffix(".yaml")
CONTROL = "(none)"
"""Name of what is planted to see that tests pass."""
_FIRST = re.compile(r"^(?:FAILED|ERROR) (tests/.*?)(?: - .*)?$", re.MULTILINE)
_REASON = re.compile(r"^E +(\S.*)$", re.MULTILINE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """A mistake in one file."""

    name: str
    file: str
    old: str
    """What stands in the file, once."""
    new: str
    harm: str
    """What goes wrong for a user."""
    tests: str
    """Arguments of pytest that select the tests which must find it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """What tests said of a copy with a fault."""

    fault: str
    tests: str
    outcome: str
    """passed, failed (a test did), timeout, or broken: pytest ran no test to its end, which proves nothing."""
    seconds: float
    test: str = ""
    """The first that failed."""
    reason: str = ""
    """Why, in a line: a launch that took too long is no proof."""
    text: str = ""
    """The end of what pytest wrote, where the outcome is not the wanted one."""

    @property
    def is_right(self) -> bool:
        """Whether a fault was found, or tests passed without one."""
        return self.outcome == ("passed" if self.fault == CONTROL else "failed")

    def line(self) -> str:
        """Return the row of the table."""
        said = self.outcome if self.outcome != "failed" else f"{self.test}: {self.reason[:80]}"
        if self.fault == CONTROL:
            said = f"{'passed' if self.is_right else f'FAILS WITHOUT A FAULT, {said}'}: {self.tests}"
        elif not self.is_right:
            said = f"NOT FOUND, {said}"
        return f"{self.fault:<32} {self.seconds:>5.0f} s  {said}"


def read_table() -> list[Fault]:
    """Return the faults of the table."""
    rows = yaml.safe_load(TABLE.read_text(encoding="utf-8"))
    return [Fault(name=name, **row) for name, row in rows.items()]


def copy_checkout(target: Path) -> None:
    """Copy what git tracks, as it is in the work tree."""
    command = ["git", "ls-files", "-z"]
    listed = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name, follow_symlinks=False)


def environment(copy: Path) -> dict[str, str]:
    """Return the environment of tests that import the package from a copy, as all processes that they start do."""
    # Ops that were built for this environment need not be built for the copy.
    extensions = os.environ.get("TORCH_EXTENSIONS_DIR", str(Path(sys.prefix) / "torch_extensions"))
    ours = {"PYTHONPATH": str(copy), "TORCH_EXTENSIONS_DIR": extensions}
    return {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **os.environ, **ours}


def check_import(copy: Path) -> None:
    """Make sure that it is the copy which is tested, and not an installed package."""
    command = [sys.executable, "-c", "import toolkit; print(toolkit.__file__)"]
    found = subprocess.run(
        command, cwd="/", env=environment(copy), check=True, stdout=subprocess.PIPE, text=True
    ).stdout
    assert Path(found.strip()).is_relative_to(copy), found


def write_source(path: Path, text: str) -> None:
    """Write a file; Python tells what it has compiled of it by the second and the length, which may be the same."""
    path.write_text(text, encoding="utf-8")
    Path(cache_from_source(path)).unlink(missing_ok=True)


@contextmanager
def planted(fault: Fault, copy: Path) -> Iterator[None]:
    """Have a fault in a copy; a ValueError unless its place is there once."""
    path = copy / fault.file
    text = path.read_text(encoding="utf-8")
    if (count := text.count(fault.old)) != 1:
        raise ValueError(f"{fault.name}: {fault.file} holds its old text {count} times, not once")
    write_source(path, text.replace(fault.old, fault.new))
    try:
        yield
    finally:
        write_source(path, text)


def run_tests(fault: str, tests: str, copy: Path, timeout_s: float) -> Result:
    """Run tests in a copy up to the first that fails."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--tier=default,ranks", "-p", "no:cacheprovider"]
    command += [f"--basetemp={copy.with_name('tests')}", *shlex.split(tests)]
    started = time.monotonic()
    process = subprocess.Popen(
        command,
        cwd=copy,
        env=environment(copy),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
        outcome = {0: "passed", 1: "failed"}.get(process.returncode, "broken")
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, outcome = process.communicate()[0], "timeout"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    parts = [one.search(output) if outcome == "failed" else None for one in (_FIRST, _REASON)]
    wanted = "passed" if fault == CONTROL else "failed"
    test, reason = (one[1] if one else "" for one in parts)
    seconds = round(time.monotonic() - started, 1)
    text = "" if outcome == wanted else output[-4000:]
    return Result(fault=fault, tests=tests, outcome=outcome, seconds=seconds, test=test, reason=reason[:300], text=text)


def run_all(faults: Sequence[Fault], has_control: bool, timeout_s: float) -> Iterator[Result]:
    """Yield what tests say of each fault, and before that, once, without one."""
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        copy = Path(folder).resolve() / "copy"
        copy_checkout(copy)
        check_import(copy)
        for fault in faults:
            with planted(fault, copy):
                pass  # before anything takes minutes: is each place there?
        controlled: set[str] = set()
        for fault in faults:
            if has_control and fault.tests not in controlled:
                controlled.add(fault.tests)
                yield run_tests(CONTROL, fault.tests, copy, timeout_s)
            with planted(fault, copy):
                yield run_tests(fault.name, fault.tests, copy, timeout_s)


def main(words: Sequence[str] | None = None) -> int:
    """Plant what is asked for, and say what became of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    table = {fault.name: fault for fault in read_table()}
    parser.add_argument("names", nargs="*", metavar="NAME", help="faults of the table; default: all")
    parser.add_argument("--no-control", action="store_true", help="do not run the tests without a fault first")
    parser.add_argument("--timeout", type=float, default=600, help="seconds of one run of tests (600)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    parser.add_argument("--list", action="store_true", help="say what there is, and run nothing")
    options = parser.parse_args(words)
    if unknown := [name for name in options.names if name not in table]:
        parser.error(f"unknown: {', '.join(unknown)}; --list names all")
    faults = [table[name] for name in options.names] or list(table.values())
    if options.list:
        for fault in faults:
            print(f"{fault.name}: {fault.file}\n  {fault.harm}\n  found by: {fault.tests}")
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # or tests would go on, and the copy stay
    results: list[Result] = []
    for result in run_all(faults, not options.no_control, options.timeout):
        results.append(result)
        print(result.line(), result.text, sep="\n" if result.text else "", flush=True)
        if options.json:
            options.json.write_text(json.dumps([asdict(one) for one in results], indent=2) + "\n", encoding="utf-8")
    found = sum(one.is_right for one in results if one.fault != CONTROL)
    print(f"{found} of {len(faults)} faults found in {sum(one.seconds for one in results):.0f} s")
    return int(not all(one.is_right for one in results))
