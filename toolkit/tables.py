"""Tables of the package that are data files, next to the code that uses them; nested ones made flat, and back."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def read_table(path: str) -> Any:
    """Return what a data file of the package holds.

    `path` is relative to the package.
    """
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # a tenth of the time where PyYAML has libyaml
    return yaml.load((Path(__file__).parent / path).read_text(encoding="utf-8"), loader)  # noqa: S506


def leaves(section: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Return (dotted key, value) of everything below `section` that is no non-empty dictionary."""
    found: list[tuple[str, Any]] = []
    for name, value in section.items():
        if isinstance(value, Mapping) and value:
            found += leaves(value, f"{prefix}{name}.")
        else:
            found.append((f"{prefix}{name}", value))
    return found


def set_leaf(section: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key in nested dictionaries; those on the way are made."""
    *parents, name = key.split(".")
    for parent in parents:
        section = section.setdefault(parent, {})
    section[name] = value
