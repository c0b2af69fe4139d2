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
    """Return the lines of a table. The first column is text, to the left; the others are numbers, to the right, unless
    all are `texts`, which are wrapped on a terminal that is narrower. `indent`: what each line begins with.
    """
    all_rows = [list(heads), *map(list, rows)]
    widths = [max(text_width(row[column]) for row in all_rows) for column in range(len(heads))]
    room = shutil.get_terminal_size().columns if texts and sys.stdout.isatty() else 0
    num_gaps = len(widths) - 1  # of two spaces each
    if room and len(indent) + sum(widths) + 2 * num_gaps > room:
        return _wrapped_table(all_rows, widths, indent, room)
    lines = []
    for row in all_rows:
        numbered = enumerate(zip(row, widths, strict=True))
        cells = [_padded(text, width, left=texts or column == 0) for column, (text, width) in numbered]
        lines.append(indent + "  ".join(cells).rstrip())
    return lines


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
    # `num_beside`: how many columns stand side by side; with two spaces after each they take `taken` of the `room`.
    taken, num_beside = len(indent), 0
    for width in widths[:-1]:
        if taken + width + 2 > room:
            break
        taken, num_beside = taken + width + 2, num_beside + 1
    is_last_beside = num_beside == len(widths) - 1 and room - taken >= _LEAST
    lines = []
    for row in rows:
        first = indent + "".join(
            _padded(cell, width + 2) for cell, width in zip(row[:num_beside], widths, strict=False)
        )
        if is_last_beside:
            head, *more = _wrapped(row[-1], room - taken)  # its further lines stand below its first one
            lines += [(first + head).rstrip(), *(" " * taken + line for line in more)]
            continue
        below = indent
        if num_beside:
            lines.append(first.rstrip())
            below += "    "
        lines += [below + line for cell in filter(None, row[num_beside:]) for line in _wrapped(cell, room - len(below))]
    return lines


def _wrapped(text: str, width: int) -> list[str]:
    """Return a text in lines of at most `width` columns, unless a word is longer."""
    lines = [""]
    for part in _PARTS.findall(text):
        if lines[-1] and text_width(lines[-1] + part.rstrip()) > width:
            lines.append("")
        lines[-1] += part
    return [line.rstrip() for line in lines]
