"""The table of metrics.jsonl's names in docs/tracking.md, which is where a new one is registered."""

from pathlib import Path
from typing import NamedTuple

PAGE = Path(__file__).parents[2] / "docs" / "tracking.md"


class Metric(NamedTuple):
    """A row of the table."""

    unit: str
    tracked_name: str
    hf_name: str


def documented(page: Path = PAGE) -> dict[str, Metric]:
    """Return each name in metrics.jsonl with its unit and its names elsewhere; all are explained."""
    table = {}
    for line in page.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 5 and cells[0].startswith("`"):
            assert cells[4], f"{cells[0]} is not explained"
            assert cells[0] not in table
            table[cells[0].strip("`")] = Metric(*(cell.strip("`") for cell in cells[1:4]))
    return table
