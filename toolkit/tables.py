"""Tables of the package that are data files, in YAML next to the code that uses them."""

from pathlib import Path
from typing import Any


def read_table(path: str) -> Any:
    """Return what a data file of the package holds.

    `path` is relative to the package.
    """
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # a tenth of the time where PyYAML has libyaml
    return yaml.load((Path(__file__).parent / path).read_text(encoding="utf-8"), loader)  # noqa: S506
