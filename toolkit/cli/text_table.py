"""Tables for a terminal."""

from collections.abc import Iterable, Sequence
from unicodedata import east_asian_width


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], indent: str = "  ", *, texts: bool = False) -> list[str]:
    """Return the lines of a table: the first column is text, the others are numbers, to the right, or all `texts`."""
    listed = [list(heads), *map(list, rows)]
    widths = [max(_width(row[column]) for row in listed) for column in range(len(heads))]
    return [
        indent
        + "  ".join(
            cell + " " * (width - _width(cell)) if texts or not column else " " * (width - _width(cell)) + cell
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in listed
    ]


def _width(text: str) -> int:
    """Return the columns of a terminal that a text takes: Chinese letters take two."""
    return sum(2 if east_asian_width(letter) in "WF" else 1 for letter in text)
