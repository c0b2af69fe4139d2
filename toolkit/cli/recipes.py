"""List the available recipes (recipe=NAME) and what each is for.

toolkit recipes
"""

import re
from pathlib import Path

from toolkit import command_line, terminal
from toolkit.config.files import known_recipes
from toolkit.messages import current_language, say, tr

_FOR_PROGRAMS = ("# @package", "# yaml-language-server")
"""Comments that Hydra and editors read."""


def run(words: list[str]) -> None:
    command_line.named_arguments(words, required=(), optional=(), usage="toolkit recipes")
    rows = [(name, about(path)) for name, path in known_recipes().items()]
    say("\n".join(terminal.text_table((tr("recipe"), tr("what it does")), rows, texts=True)))


def about(path: Path) -> str:
    """Return the first sentence of a YAML file's comment, of its Chinese lines for Chinese readers if it has some."""
    lines = [
        line[2:]
        for line in path.read_text(encoding="utf-8").splitlines()
        if line.startswith("# ") and not line.startswith(_FOR_PROGRAMS)
    ]
    if current_language() == "zh":
        lines.sort(key=lambda line: not re.match(r"[^。]*[\u4e00-\u9fff]", line))
    return re.split(r"\. |。", lines[0])[0].rstrip(".:") if lines else ""
