#!/usr/bin/env python3
"""Write the table of combinations in docs/parallelism.md and its Chinese from what the nightly test of them found."""

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "ranks")]

import page_tables  # noqa: E402
from combinations import LAYOUTS, OTHERS, STAGES, TUNINGS, Cell, cells  # noqa: E402

from toolkit.messages import current_language, set_language  # noqa: E402

HEADS = {"en": ("layout", "ZeRO stage", "CPU ranks"), "zh": ("布局", "ZeRO 阶段", "CPU rank 数")}
OTHER = {"en": "full, stage 0, with", "zh": "full、阶段 0，加上"}
FROM = {
    "en": "Largest difference of any loss, of six steps and two validations, to a plain PyTorch loop over whole "
    "sequences, in fp32; `–` is rejected. Commit {commit}, DeepSpeed {deepspeed}: `{command}`.\n",
    "zh": "与处理完整序列的普通 PyTorch 循环相比，六步训练和两次验证的 loss 的最大差值，fp32；`–` 表示报错。"
    "提交 {commit}，DeepSpeed {deepspeed}：`{command}`。\n",
}
WHY = {"en": "Why something is rejected:", "zh": "报错的原因："}


def newest() -> dict[str, Any]:
    """Return the newest file's first result, with the cells and commits of those that came later, of a part (-k)."""
    results: list[dict[str, Any]] = json.loads(page_tables.newest("combinations").read_text(encoding="utf-8"))
    parts = [(one["environment"]["commit"][:7], one["command"].partition(" -k ")[2]) for one in results]
    commits = ", ".join(f"{commit} (`-k {part}`)" if part else commit for commit, part in parts)
    cells = {name: value for one in results for name, value in one["cells"].items()}
    return results[0] | {"cells": cells, "commits": commits}


def fill_page(page: str, language: str, result: dict[str, Any]) -> str:
    """Return a page with its table; `language`: en or zh."""
    before = current_language()
    set_language(language)
    try:
        return page_tables.fill(page, "combinations", _tables(language, result))
    finally:
        set_language(before)


def _tables(language: str, result: dict[str, Any]) -> str:
    def shown(cell: Cell) -> str:
        return f"{result['cells'][cell.name]:.0e}" if cell.name in result["cells"] else "–"

    rows = [[*HEADS[language], *TUNINGS], ["---"] * (3 + len(TUNINGS))]
    for layout in LAYOUTS:
        for stage in STAGES:
            some = [Cell(layout, stage, tuning) for tuning in TUNINGS]
            rows.append([f"`{' '.join(LAYOUTS[layout])}`", str(stage), str(some[0].ranks), *map(shown, some)])
    others = [[OTHER[language], *(f"`{' '.join(words)}`" for words in LAYOUTS.values())], ["---"] * (1 + len(LAYOUTS))]
    others += [[f"`{other}`", *(shown(Cell(layout, 0, "full", other)) for layout in LAYOUTS)] for other in OTHERS]
    reasons = dict.fromkeys(reason for cell in cells() for reason in cell.refusals())
    deepspeed = result["environment"]["packages"]["deepspeed"]
    texts = {"commit": result["commits"], "deepspeed": deepspeed, "command": result["command"]}
    return "\n".join(
        [
            *map(page_tables.row, rows),
            "",
            *map(page_tables.row, others),
            "",
            FROM[language].format(**texts),
            WHY[language],
            "",
            *(f"- {reason}" for reason in reasons),
            "",
        ]
    )


def main() -> None:
    """Write both pages."""
    page_tables.write("parallelism", lambda page, language: fill_page(page, language, newest()))


if __name__ == "__main__":
    main()
