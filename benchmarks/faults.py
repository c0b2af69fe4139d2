"""The fault battery: every fault that this checkout's tests put in, and whether what must hold held."""

import sys
import tempfile
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from toolkit import children
from toolkit.messages import ConfigError, tr

TESTS = Path(__file__).parents[1] / "tests"


def run_battery(only: str = "") -> dict[str, Any]:
    """Run the battery, with its long cases, and return what was found; pytest's own lines are shown meanwhile.

    Args:
        only: identifiers of faults to run, such as "K1 K2"; "" runs all.

    Returns:
        `faults`: by identifier its cases, those passed, and of each case name, text, outcome, seconds and what it
        measured; `passed`: whether every case did.

    Raises:
        ConfigError: there are no tests of such faults.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", str(TESTS), "-m", "fault", "--tier=all", f"--junitxml={report}"]
        # A place of its own: pytest removes that of its last run but three, and others may run tests meanwhile.
        command += ["-o", "junit_family=legacy"]  # the newer one has no properties of cases
        command += [f"--basetemp={folder}/tests", f"--faults={only}"]
        children.start_tree(command, cwd=TESTS.parent).wait()
        cases = [_case(case) for case in ElementTree.parse(report).iter("testcase")]  # noqa: S314 -- written just now
    if not cases:
        raise ConfigError(tr("no fault is called {only}.", only=only))
    names = sorted({name for case in cases for name in case["faults"]})
    faults = {name: [case for case in cases if name in case["faults"]] for name in names}
    return {
        "passed": all(case["outcome"] == "passed" for case in cases),
        "faults": {
            name: {"cases": len(found), "passed": sum(case["outcome"] == "passed" for case in found), "tests": found}
            for name, found in faults.items()
        },
    }


def _case(element: ElementTree.Element) -> dict[str, Any]:
    properties = [(one.get("name", ""), one.get("value", "")) for one in element.iter("property")]
    known = dict(properties)
    outcomes = [child.tag for child in element if child.tag in ("failure", "error", "skipped")]
    return {
        "test": f"{element.get('classname', '').removeprefix('tests.')}.{element.get('name')}",
        "faults": known.pop("fault").split(),
        "text": known.pop("text", ""),
        "outcome": outcomes[0] if outcomes else "passed",
        "seconds": round(float(element.get("time", "0")), 1),
        "measured": known,
    }
