#!/usr/bin/env python3
"""Write the table of docs/model_types.md and its Chinese from the newest benchmarks/*-types.json."""

import argparse
import json
import math
import re
import string
from collections import Counter
from collections.abc import Mapping
from functools import cache
from typing import Any

import page_tables

from toolkit.messages import read_table

WAYS = {
    "full": ("full", "全参数"),
    "lora": ("LoRA", "LoRA"),
    "packed": ("packed", "packing"),
    "zero3": ("ZeRO-3", "ZeRO-3"),
    "recomputed": ("recomputed", "激活重计算"),
    "tensor": ("tensor", "张量并行"),
    "sequence": ("sequence", "序列并行"),
}
TEXTS = {
    "type": ("type", "类型"),
    "ok": ("yes", "是"),
    "accepted": ("yes", "是"),
    "refused": ("no", "否"),
    "failed": ("**fails**", "**失败**"),
    "grouped": ("grouped", "grouped"),
    "source": (
        "The table covers {count} types of {versions}. First losses are within {loss} of a plain "
        "transformers loop, gradient norms within {norm}, and logits of exports within {logits} of their standard "
        "deviation. The results are from `{command}`, run {run} with DeepSpeed {deepspeed} and torch {torch}.",
        "上表包括 {versions} 的 {count} 种类型。首步 loss 与普通 transformers 循环相差不超过 {loss}，"
        "梯度范数相差不超过 {norm}，导出模型的 logits 的差异不超过其标准差的 {logits} 倍。"
        "结果由 `{command}` {run} 测得，使用 DeepSpeed {deepspeed} 和 torch {torch}。",
    ),
    "of some": ("{} ({} of them)", "{}（其中 {} 种）"),
    "comma": (", ", "、"),
    "day": ("on {}", "于 {}"),
    "days": ("from {} to {}", "于 {} 至 {}"),
    "why": ("The numbers in the table stand for these reasons:", "表中编号对应的原因："),
    "not built": (
        "These types were not tested, because no tiny model of them could be built: ",
        "以下类型无法构造微型模型，因此没有测试：",
    ),
}


def newest() -> dict[str, Any]:
    """Return the newest file's result."""
    (result,) = json.loads(page_tables.newest("types").read_text(encoding="utf-8"))
    return dict(result)


def fill_page(page: str, language: str, result: Mapping[str, Any]) -> str:
    """Return a page with its table; `language`: en or zh."""
    return page_tables.fill(page, "types", _table(language, result))


def _table(language: str, result: Mapping[str, Any]) -> str:
    column = ("en", "zh").index(language)
    types = {kind: row for kind, row in result["types"].items() if "not built" not in row}
    reasons: dict[str, int] = {}
    lines = [[TEXTS["type"][column], *(names[column] for names in WAYS.values())], ["---"] * (1 + len(WAYS))]
    for kind, row in types.items():
        cells = [f"`{kind}`"]
        for way in WAYS:
            cell = row[way]
            text = TEXTS[cell["state"]][column]
            if reason := _general(cell.get("reason", ""), kind, language):
                text += f" ({reasons.setdefault(reason, len(reasons) + 1)})"
            cells.append(text)
        lines.append(cells)
    figures = {
        name: _bound(max(cell.get(name, 0) for row in types.values() for cell in row.values()))
        for name in ("loss", "norm", "logits")
    }
    days = sorted(run["started"][:10] for run in result["runs"])
    span = TEXTS["day" if days[0] == days[-1] else "days"][column].format(*dict.fromkeys((days[0], days[-1])))
    counts = Counter(run["transformers"] for run in result["runs"] for kind in run["types"] if kind in types)
    versions = [
        TEXTS["of some"][column].format(*pair) if len(counts) > 1 else pair[0] for pair in sorted(counts.items())
    ]
    source = TEXTS["source"][column].format(
        count=len(types),
        versions=f"transformers {TEXTS['comma'][column].join(versions)}",
        command=result["command"],
        run=span,
        **result["environment"]["packages"],
        **figures,
    )
    absent = sorted(set(result["types"]) - set(types))
    listed = [f"{number}. {reason}" for reason, number in reasons.items()]
    not_built = TEXTS["not built"][column] + TEXTS["comma"][column].join(f"`{kind}`" for kind in absent)
    return "\n".join(
        [*map(page_tables.row, lines), "", source, "", TEXTS["why"][column], "", *listed, "", not_built, ""]
    )


def _bound(value: float) -> str:
    """Return a number that is not below a value, with one digit."""
    power = 10.0 ** math.floor(math.log10(value))
    return f"{math.ceil(value / power) * power:.0e}"


def _general(reason: str, kind: str, language: str) -> str:
    """Return a reason in a language, with `…` for the names in it that differ from type to type."""
    reason = (_translated(reason) if language == "zh" else reason).replace(f"model_type = {kind}", "model_type = …")
    reason = re.sub(r"'[\w.-]+'|\b\w+(ForCausalLM|ForConditionalGeneration|LMHeadModel)\b", "…", reason)
    return re.sub(r"\b\w+(\.\w+){3,}", "…", reason)  # of parameters


@cache
def _patterns() -> list[tuple[re.Pattern[str], str]]:
    """Return a pattern for each message, the most specific first, and its Chinese."""
    pairs = []
    for text, chinese in read_table("locale/zh.yaml")["messages"].items():
        parts = [
            re.escape(literal) + ("" if field is None else f"(?P<{field.replace('.', '_')}_{number}>.+?)")
            for number, (literal, field, _, _) in enumerate(string.Formatter().parse(text))
        ]
        size = len(re.sub(r"\{.*?\}", "", text))
        if size > 8:  # not what is mostly its values
            pairs.append((size, "".join(parts), chinese))
    return [(re.compile(pattern, re.DOTALL), chinese) for _, pattern, chinese in sorted(pairs, reverse=True)]


def _translated(text: str) -> str:
    """Return the Chinese of a message, and of the messages in it; a text that is none as it is."""
    for pattern, chinese in _patterns():
        if match := pattern.fullmatch(text):
            for name, value in match.groupdict().items():
                chinese = chinese.replace(f"{{{name.rpartition('_')[0]}}}", _translated(value))
            return chinese
    return text


def main() -> None:
    """Write both pages."""
    page_tables.write("model_types", lambda page, language: fill_page(page, language, newest()))


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    main()
