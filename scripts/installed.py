#!/usr/bin/env python3
"""Say what this Python lacks of what pyproject.toml asks for, and exit with 2 then; nothing is installed.

scripts/installed.py [PACKAGE …]   PACKAGE: wanted, too, in any version
"""

import argparse
import re
import shlex
import sys
from importlib import metadata
from pathlib import Path

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"


def lacking(*others: str) -> dict[str, str]:
    """Return requirement -> what is there instead, of those that are missing or of a version that is not accepted."""
    try:
        from packaging.requirements import Requirement
        from packaging.version import Version
    except ImportError:
        return {"packaging": "nothing"}
    text = PYPROJECT.read_text(encoding="utf-8")
    (listed,) = re.findall(r"^dependencies = \[\n(.*?)^\]", text, re.DOTALL | re.MULTILINE)
    wrong = {}
    for wanted in map(Requirement, [*re.findall(r'"(.+)"', listed), *others]):
        try:
            version = metadata.version(wanted.name)
        except metadata.PackageNotFoundError:
            wrong[str(wanted)] = "nothing"
            continue
        # A vendor's build of torch 2.10 is called 2.10.0a0+b4e4ee8.nv25.12.
        if not wanted.specifier.contains(Version(version).base_version):
            wrong[str(wanted)] = version
    return wrong


def check(*others: str) -> None:
    """Exit with 2 and one message where something is missing."""
    if wrong := lacking(*others):
        listed = ", ".join(f"{wanted} (there is {version})" for wanted, version in wrong.items())
        install = shlex.join([sys.executable, "-m", "pip", "install", *wrong])
        print(f"{sys.executable} lacks {listed}. Nothing was installed. To do so:  {install}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", nargs="*", metavar="PACKAGE", help="wanted, too, in any version")
    check(*parser.parse_args().packages)
