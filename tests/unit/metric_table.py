"""The tables of metrics.jsonl's names in docs/tracking.md, which is where a new one is registered."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "tracking.md"
CHINESE = {
    "比例": "share",
    "次": "times",
    "步": "steps",
    "步/秒": "steps/s",
    "轮": "epochs",
    "秒": "s",
    "秒/步": "s/step",
    "字节": "bytes",
    "字符": "characters",
    "对": "pairs",
    "个回答": "answers",
    "个样本": "samples",
    "样本/秒": "samples/s",
}
"""Units of the Chinese page, and what they are on the English one."""


def _tables(page: Path) -> list[list[list[str]]]:
    """Return the cells of the tables of names: elsewhere, in metrics.jsonl, only in trackers."""
    text = page.read_text(encoding="utf-8")
    first = r"in metrics\.jsonl|only in trackers|metrics\.jsonl 中|只在跟踪工具中"
    found = re.findall(rf"^\| (?:{first}) \|.*\n\|.*\n((?:\|.*\n)+)", text, re.MULTILINE)
    return [[[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()] for table in found]


def names_elsewhere(page: Path = PAGE) -> dict[str, tuple[str, str]]:
    """Return the names that trackers and MLflow use, by those in metrics.jsonl; NAME stands for any name."""
    rows = ([re.findall(r"`(.+?)`", cell)[0] for cell in row] for row in _tables(page)[0])
    return {name: (tracked, hf) for name, tracked, hf in rows}


def documented(page: Path = PAGE) -> dict[str, str]:
    """Return each name in metrics.jsonl or in trackers with its English unit; all are explained."""
    units: dict[str, str] = {}
    _, recorded, sent = _tables(page)
    for names, unit, meaning in recorded + sent:
        for name in re.findall(r"`(\w+)`", names):
            assert meaning, f"{name} is not explained"
            assert name not in units
            units[name] = CHINESE.get(unit, unit)
    return units
