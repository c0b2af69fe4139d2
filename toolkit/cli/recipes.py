"""List the available recipes (recipe=NAME) and what each is for.

toolkit recipes [TEXT]

  TEXT   only those with it in their names
"""

import re
from difflib import get_close_matches
from pathlib import Path

from toolkit import command_line
from toolkit.config.files import known_recipes
from toolkit.messages import ConfigError, current_language, joined, say, tr
from toolkit.tables import text_table

_FOR_PROGRAMS = ("# @package", "# yaml-language-server")
"""Comments that Hydra and editors read."""


def run(words: list[str]) -> None:
    """Print the recipes, or those with a text in their names, in a table."""
    values = command_line.named_arguments(words, required=(), optional=(), usage="toolkit recipes", bare="text")
    rows: list[tuple[str, ...]] = [(name, about(path)) for name, path in known_recipes().items()]
    rows = with_text(rows, values.get("text", ""), "toolkit recipes")
    say("\n".join(text_table((tr("recipe"), tr("what it does")), rows, texts=True)))


def with_text(rows: list[tuple[str, ...]], text: str, command: str) -> list[tuple[str, ...]]:
    """Return the rows of a table that have `text`, in any case, in one of their columns but the last, which is no name.
    ConfigError if none has; `command`, which lists all rows, is for the message.
    """
    matching = [row for row in rows if any(text.lower() in name.lower() for name in row[:-1])]
    if matching:
        return matching
    nearest = ", ".join(get_close_matches(text, [row[0] for row in rows], n=5, cutoff=0.4))
    advice = tr("The nearest: {names}.", names=nearest) if nearest else ""
    raise ConfigError(joined(tr("No name in `{command}` has '{text}'.", command=command, text=text), advice))


def about(path: Path) -> str:
    """Return the first sentence of a YAML file's comment, for Chinese readers of its Chinese lines if any; or ""."""
    lines = [
        line[2:]
        for line in path.read_text(encoding="utf-8").splitlines()
        if line.startswith("# ") and not line.startswith(_FOR_PROGRAMS)
    ]
    if current_language() == "zh":  # lines with Chinese in their first sentence come first
        lines.sort(key=lambda line: not re.match(r"[^。]*[\u4e00-\u9fff]", line))
    return re.split(r"\. |。", lines[0])[0].rstrip(".:") if lines else ""
