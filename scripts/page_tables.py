"""Tables in pages of both languages that scripts write from the newest result of a benchmark."""

from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
_END = "<!-- end -->"


def newest(measured: str) -> Path:
    """Return the newest file of results of a benchmark."""
    return max((ROOT / "benchmarks").glob(f"*-{measured}.json"))


def fill(page: str, name: str, table: str) -> str:
    """Return a page with a table in place of what is between `<!-- table NAME -->` and `<!-- end -->`."""
    mark = f"<!-- table {name} -->\n"
    head, _, rest = page.partition(mark)
    return head + mark + table + _END + rest.partition(_END)[2]


def row(cells: Sequence[str]) -> str:
    """Return a row of a Markdown table."""
    return "| " + " | ".join(cells) + " |"


def write(page: str, filled: Callable[[str, str], str]) -> None:
    """Write docs/PAGE.md and its Chinese: `filled` returns a page's new text for its old one and its language."""
    for language, name in (("en", f"{page}.md"), ("zh", f"{page}_zh.md")):
        path = ROOT / "docs" / name
        path.write_text(filled(path.read_text(encoding="utf-8"), language), encoding="utf-8")
