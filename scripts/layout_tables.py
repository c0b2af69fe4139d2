#!/usr/bin/env python3
"""Write the table of combinations in docs/parallelism.md and its Chinese from what the nightly test of them found."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "ranks")]

import page_tables  # noqa: E402
from combinations import LAYOUTS, STAGES, TUNINGS, Cell  # noqa: E402

HEADS = {"en": "layout", "zh": "布局"}
BELOW = {
    "en": "Combinations marked `–` are rejected with an error. All others train like a plain PyTorch loop: "
    "their losses differ from its losses by at most {limit:.1e} ([how this was compared](proving.md)).\n",
    "zh": "`–` 表示会报错。其余组合的 loss 与普通 PyTorch 循环相同，相差不超过 {limit:.1e}"
    "（[怎样对比的](proving_zh.md)）。\n",
}


def newest() -> dict[str, float]:
    """Return the largest difference of each cell, by its name; a later result, of a part (-k), replaces an earlier."""
    results = json.loads(page_tables.newest("combinations").read_text(encoding="utf-8"))
    return {name: value for one in results for name, value in one["cells"].items()}


def fill_page(page: str, language: str, differences: dict[str, float]) -> str:
    """Return a page with its table; `language`: en or zh."""
    rows = [[HEADS[language], *TUNINGS], ["---"] * (1 + len(TUNINGS))]
    for layout, words in LAYOUTS.items():
        accepted = [[stage for stage in STAGES if Cell(layout, stage, one).name in differences] for one in TUNINGS]
        rows.append([f"`{' '.join(words)}`", *map(_span, accepted)])
    below = BELOW[language].format(limit=max(differences.values()))
    return page_tables.fill(page, "combinations", "\n".join([*map(page_tables.row, rows), "", below]))


def _span(stages: Sequence[int]) -> str:
    """Return ZeRO stages from 0 on as a reader writes them: 0-3."""
    assert list(stages) == list(STAGES[: len(stages)]), "a gap between stages needs another way to write them"
    return f"0-{stages[-1]}" if stages else "–"


def main() -> None:
    """Write both pages."""
    page_tables.write("parallelism", lambda page, language: fill_page(page, language, newest()))


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    main()
