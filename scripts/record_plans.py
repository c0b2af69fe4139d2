#!/usr/bin/env python3
"""Write what `toolkit plan` says of every recipe: the table in docs/recipes.md, and the heads of the recipes.

The table's first three columns (recipe, GPUs, further overrides) choose what is planned; all figures are filled in.
So they do in the table of models, whose first column is `model=NAME`: each is planned with recipe=lora.
"""

import argparse
import json
import re
import tempfile
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

from toolkit.cli import main as toolkit_main

ROOT = Path(__file__).parents[1]
TABLES = (ROOT / "docs" / "recipes.md", ROOT / "docs" / "recipes_zh.md")
GIB = 2**30
_CARD = re.compile(r"^\| `(?:model=)?\w+` \| `\d+x.*\|$", re.MULTILINE)
_HEAD = re.compile(r"(?P<title>^# Hardware.*\n)(?:#   \d+x.*\n)*", re.MULTILINE)


@dataclass(frozen=True)
class Card:
    """A recipe on some GPUs, or a model with the recipe lora."""

    recipe: str
    """Its name, or model=NAME."""
    gpus: str
    overrides: str
    device: str
    host: str
    checkpoint: str
    seconds: str
    """Of a step, estimated; "" where it is not known."""

    def row(self) -> str:
        """Return the row of the table."""
        overrides = f" `{self.overrides}` |" if self.overrides else " |"
        seconds = f" {self.seconds} |" if self.seconds else " |"
        figures = f" {self.device} | {self.host} | {self.checkpoint} |"
        return f"| `{self.recipe}` | `{self.gpus}` |{overrides}{figures}{seconds}"

    def line(self) -> str:
        """Return the line in the head of the recipe."""
        on = f"{self.gpus:<11} {self.overrides}".rstrip()
        unit = "rank" if self.gpus.endswith("cpu") else "GPU"
        return f"#   {on}: {self.device} GiB per {unit}, {self.host} GiB of host memory\n"


def plan(recipe: str, gpus: str, overrides: str) -> Card:
    """Plan one card.

    Args:
        recipe: its name, or model=NAME.
        gpus: as `toolkit plan gpus=` takes them.
        overrides: further overrides, with blanks between them.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "plan.json"
        run = ["recipe=lora", recipe] if recipe.startswith("model=") else [f"recipe={recipe}"]
        words = [*run, f"gpus={gpus}", "host_memory=1TB", f"output={file}", *overrides.split()]
        with redirect_stdout(StringIO()):
            assert toolkit_main(["plan", *words]) == 0, words
        planned = json.loads(file.read_text(encoding="utf-8"))
    mine = planned["recipe"]
    assert mine["fits"], f"{recipe} does not fit on {gpus}"
    worst = [max(sum(kinds.values()) for kinds in mine[name].values()) for name in ("device_bytes", "host_bytes")]
    device, host, checkpoint = (f"{number / GIB:.3g}" for number in (*worst, planned["checkpoint_bytes"]))
    # Neither the speed of a disk is known nor the FLOPs of every mixture of experts.
    is_known = mine["offload_param"] != "nvme" and mine["step_s"] is not None
    seconds = format(float(format(mine["step_s"], ".2g")), "g") if is_known else ""
    return Card(recipe, gpus, overrides, device, host, checkpoint, seconds)


def chosen(row: str) -> tuple[str, str, str]:
    """Return recipe, GPUs and overrides of a row of the table."""
    recipe, gpus, overrides = (cell.strip(" `") for cell in row.strip("|").split("|")[:3])
    return recipe, gpus, overrides


def rows() -> list[str]:
    """Return the rows of the English table."""
    return _CARD.findall(TABLES[0].read_text(encoding="utf-8"))


def head(text: str, cards: list[Card]) -> str:
    """Return a recipe's text with the lines of its cards below `# Hardware`."""
    lines = "".join(card.line() for card in cards)
    return _HEAD.sub(lambda found: found["title"] + lines, text, count=1)


def main() -> None:
    """Plan every card and write all files."""
    cards = [plan(*chosen(row)) for row in rows()]
    for table in TABLES:
        filled = iter(cards)
        text = _CARD.sub(lambda _, filled=filled: next(filled).row(), table.read_text(encoding="utf-8"))  # type: ignore[misc]
        table.write_text(text, encoding="utf-8")
    for path in sorted((ROOT / "recipes").glob("*.yaml")):
        mine = [card for card in cards if card.recipe == path.stem]
        path.write_text(head(path.read_text(encoding="utf-8"), mine), encoding="utf-8")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    main()
