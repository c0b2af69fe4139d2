#!/usr/bin/env python3
"""Write the tables of docs/status.md and its Chinese from tests/features.yaml, the tests named there and results."""

import argparse
import ast
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import gpu_page
import page_tables
import yaml

ROOT = page_tables.ROOT
TIER_OF_FOLDER = {"ranks": "ranks", "system": "nightly", "gpu": "nightly"}
"""As tests/conftest.py has it: the tier of a test without a marker; of other directories default."""
HEAD = (("feature", "CPU", "GPU", "benchmark", "test"), ("功能", "CPU", "GPU", "基准测试", "测试"))
TEXTS = {
    "CI": ("CI", "CI"),
    "nightly": ("nightly", "nightly"),
    "config": ("configuration only", "仅配置"),
    "stand-in": ("stand-in", "模拟"),
    "namespaces": ("namespaces", "网络命名空间"),
    "needs": ("with `{needs}`", "需安装 `{needs}`"),
    "no": ("no", "无"),
    "sum": (
        "{measured} of {count} features have been measured on a GPU; the newest benchmark is of {newest}.",
        "{count} 项功能中有 {measured} 项在 GPU 上实测过；最新的基准测试日期为 {newest}。",
    ),
}
Feature = Mapping[str, Any]


def sections() -> list[dict[str, Any]]:
    """Return the sections of tests/features.yaml."""
    return list(yaml.safe_load((ROOT / "tests" / "features.yaml").read_text(encoding="utf-8")))


def features() -> list[Feature]:
    """Return the features of all sections."""
    return [feature for section in sections() for feature in section["features"]]


def fill_page(page: str, language: str, files: Iterable[Path]) -> str:
    """Return a page with its tables; `language`: en or zh, `files`: the results of benchmarks."""
    return page_tables.fill(page, "status", _tables(("en", "zh").index(language), files))


def tier_of(test: str) -> str:
    """Return CI or nightly: where a test FILE::NAME runs, by its markers and its directory.

    Raises:
        ValueError: there is no such test.
    """
    file, _, name = test.partition("::")
    path = ROOT / file
    body = _parsed(path).body if path.is_file() else []
    functions = [node for node in body if isinstance(node, ast.FunctionDef) and node.name == name]
    if not functions:
        raise ValueError(f"tests/features.yaml names {test}, which does not exist. Name the test that replaced it.")
    assigned = [node for node in body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"]
    marks = map(ast.unparse, [*functions[0].decorator_list, *(node.value for node in assigned)])
    own = " ".join(mark for mark in marks if "mark.parametrize" not in mark)  # it marks single cells
    marked = [tier for tier in ("default", "ranks", "nightly") if f"pytest.mark.{tier}" in own]
    tier = marked[0] if marked else TIER_OF_FOLDER.get(path.parent.name, "default")
    return "nightly" if tier == "nightly" else "CI"


@cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def gpu_dates(files: Iterable[Path]) -> dict[str, str]:
    """Return part, stage or test of the measurements on GPUs -> date of the newest result of it that was right."""
    dates: dict[str, str] = {}
    for file in sorted(files):
        for name, (row, _) in gpu_page.newest([file]).items():
            passed = row.get("figures", {}).get("passed", ())
            right = [name] if row.get("is_right", True) else []
            dates |= dict.fromkeys((*right, *(test.rpartition("/")[2] for test in passed)), file.name[:10])
    return dates


def _state(feature: Feature, column: int) -> str:
    """Return what the tests of a feature run on."""
    tiers = [tier_of(test) for test in feature.get("tests", ())]
    if not tiers:
        return TEXTS["no"][column]
    if feature.get("needs"):
        return TEXTS["needs"][column].format(needs=feature["needs"])
    when = TEXTS["CI" if "CI" in tiers else "nightly"][column]
    how = feature.get("how", "")
    return f"{when}, {TEXTS[how][column]}" if how == "namespaces" else TEXTS[how][column] if how else when


def _tables(column: int, files: Iterable[Path]) -> str:
    on_gpu, lines, measured = gpu_dates(files), [], 0
    dates = [page_tables.newest(name).name[:10] for feature in features() for name in feature.get("records", ())]
    for section in sections():
        rows = [[*HEAD[column]], ["---"] * len(HEAD[column])]
        for feature in section["features"]:
            on = max((on_gpu[name] for name in feature.get("gpu", ()) if name in on_gpu), default="")
            records = [page_tables.newest(name).name[:10] for name in feature.get("records", ())]
            tests = feature.get("tests", ())
            shown = f"`{tests[0].partition('::')[0]}`" if tests else ""
            measured += bool(on)
            state = _state(feature, column)
            rows.append([feature["name"][column], state, on or TEXTS["no"][column], max(records, default=""), shown])
        lines += [f"## {section['title'][column]}", "", *map(page_tables.row, rows), ""]
    total = TEXTS["sum"][column].format(measured=measured, count=len(features()), newest=max(dates))
    return "\n".join([*lines, total, ""])


def main() -> None:
    """Write both pages."""
    files = list((ROOT / "benchmarks").glob("*.json"))
    page_tables.write("status", lambda page, language: fill_page(page, language, files))


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    main()
