"""Tables for the terminal, in columns of equal width. On a narrower one nothing is left out and no line runs over."""

import re
import shutil
import sys
from collections.abc import Iterable, Sequence
from unicodedata import east_asian_width

_LEAST = 24
"""Columns of a terminal below which a cell is not wrapped next to the others, but has lines of its own."""
_PARTS = re.compile(r"[\u2e80-\uffff][，。；：、）]*|[^\s\u2e80-\uffff]+[，。；：、）]*\s*|\s+")
"""A line may end after each: a Chinese letter, or a word, with the punctuation that follows."""


def text_table(
    heads: Sequence[str], rows: Iterable[Sequence[str]], indent: str = "  ", *, texts: bool = False
) -> list[str]:
    """Return the lines of a table: the first column is text, the others are numbers, to the right, or all `texts`. On a
    terminal that is narrower, `texts` are wrapped.
    """
    listed = [list(heads), *map(list, rows)]
    widths = [max(text_width(row[column]) for row in listed) for column in range(len(heads))]
    room = shutil.get_terminal_size().columns if texts and sys.stdout.isatty() else 0
    if room and len(indent) + sum(widths) + 2 * len(widths) - 2 > room:
        return _wrapped_table(listed, widths, indent, room)
    return [
        indent + "  ".join(_padded(*cell, left=texts or not column) for column, cell in enumerate(cells)).rstrip()
        for cells in (zip(row, widths, strict=True) for row in listed)
    ]


def text_width(text: str) -> int:
    """Return the columns of a terminal that a text takes: Chinese letters take two."""
    return sum(2 if east_asian_width(letter) in "WF" else 1 for letter in text)


def _padded(text: str, width: int, *, left: bool = True) -> str:
    """Return a text with spaces up to a width, to the left or to the right."""
    spaces = " " * (width - text_width(text))
    return text + spaces if left else spaces + text


def _wrapped_table(rows: Sequence[Sequence[str]], widths: Sequence[int], indent: str, room: int) -> list[str]:
    """Return the lines of a table of texts: the columns that fit stand side by side, the last wrapped if there is room
    for it; what does not fit follows on lines of its own, indented. `room`: the terminal's columns.
    """
    taken, count = len(indent), 0
    for width in widths[:-1]:
        if taken + width + 2 > room:
            break
        taken, count = taken + width + 2, count + 1
    is_beside = count == len(widths) - 1 and room - taken >= _LEAST
    lines = []
    for row in rows:
        first = indent + "".join(_padded(cell, width + 2) for cell, width in zip(row[:count], widths, strict=False))
        if is_beside:
            head, *more = _wrapped(row[-1], room - taken)
            lines += [(first + head).rstrip(), *(" " * taken + line for line in more)]
            continue
        lines += [first.rstrip()] if count else []
        below = indent + "    " * bool(count)
        lines += [below + line for cell in filter(None, row[count:]) for line in _wrapped(cell, room - len(below))]
    return lines


def _wrapped(text: str, width: int) -> list[str]:
    """Return a text in lines of at most `width` columns, unless a word is longer."""
    lines = [""]
    for part in _PARTS.findall(text):
        if lines[-1] and text_width(lines[-1] + part.rstrip()) > width:
            lines.append("")
        lines[-1] += part
    return [line.rstrip() for line in lines]
