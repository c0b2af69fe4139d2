"""The tables of metrics.jsonl's names in docs/tracking.md, which is where a new one is registered."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "tracking.md"


def _tables(page: Path) -> list[list[list[str]]]:
    """Return the cells of the tables whose first column is of metrics.jsonl."""
    text = page.read_text(encoding="utf-8")
    found = re.findall(r"^\| (?:in metrics\.jsonl|metrics\.jsonl 中) \|.*\n\|.*\n((?:\|.*\n)+)", text, re.MULTILINE)
    return [[[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()] for table in found]


def names_elsewhere(page: Path = PAGE) -> dict[str, tuple[str, str]]:
    """Return the names that trackers and MLflow use, by those in metrics.jsonl; NAME stands for any name."""
    rows = ([re.findall(r"`(.+?)`", cell)[0] for cell in row] for row in _tables(page)[0])
    return {name: (tracked, hf) for name, tracked, hf in rows}


def documented(page: Path = PAGE) -> dict[str, str]:
    """Return each name in metrics.jsonl with its unit; all are explained."""
    units: dict[str, str] = {}
    for names, unit, meaning in _tables(page)[1]:
        for name in re.findall(r"`(\w+)`", names):
            assert meaning, f"{name} is not explained"
            assert name not in units
            units[name] = unit
    return units
