"""Tables of texts on a terminal that is narrower than they are: nothing is left out, and no line runs over."""

import re
from collections.abc import Sequence

from toolkit.terminal import padded, text_width

_LEAST = 24
"""Columns of a terminal below which a cell is not wrapped next to the others, but has lines of its own."""
_PARTS = re.compile(r"[\u2e80-\uffff][，。；：、）]*|[^\s\u2e80-\uffff]+[，。；：、）]*\s*|\s+")
"""A line may end after each: a Chinese letter, or a word, with the punctuation that follows."""


def wrapped_table(rows: Sequence[Sequence[str]], widths: Sequence[int], indent: str, room: int) -> list[str]:
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
        first = indent + "".join(padded(cell, width + 2) for cell, width in zip(row[:count], widths, strict=False))
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
