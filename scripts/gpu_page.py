#!/usr/bin/env python3
"""Write docs/gpus.md and docs/gpus_zh.md from benchmarks/*.json: of each part the newest result on a GPU.

Without a result there are no such pages. When the pages appear, add them to docs/index.md and docs/index_zh.md.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
GIB = 2**30
PAGES = ("gpus.md", "gpus_zh.md")
"""In English and in Chinese."""

_TABLES = yaml.safe_load((ROOT / "benchmarks" / "gpu_page.yaml").read_text(encoding="utf-8"))
PARTS, STAGES, MARKS, TEXTS = (_TABLES[name] for name in ("parts", "stages", "marks", "texts"))


def newest(files: list[Path]) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Return of each part and stage the last result on a GPU that the files hold, and the whole that it belongs to."""
    found: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}
    for file in sorted(files):
        for whole in _wholes(file):
            bench = whole
            if whole.get("measured") == "gpu_first":
                found |= {name: (row, whole) for name, row in whole["stages"].items() if "skipped" not in row}
                bench = whole | (whole["stages"].get("bench", {}).get("figures", {}))
            rows = bench.get("parts", {}) if whole.get("measured") in ("gpu", "gpu_first") else {}
            found |= {name: (row, bench) for name, row in rows.items() if "tokens_per_s" in row}
    return found


def _wholes(file: Path) -> list[dict[str, Any]]:
    """Return what a file holds that was measured on a GPU; `notes` of it are of whoever measured."""
    results = json.loads(file.read_text(encoding="utf-8"))
    wholes = results if isinstance(results, list) else []
    return [whole for whole in wholes if isinstance(whole, dict) and whole.get("device") == "gpu"]


def page(files: list[Path], language: int) -> str:
    """Return the page; `language`: 0 English, 1 Chinese."""
    found, none = newest(files), TEXTS["none"][language]
    lines = [TEXTS["head"][language], "| --- | --- | --- | --- | --- | --- | --- |"]
    for name, texts in PARTS.items():
        if name in found:
            lines.append("| " + " | ".join([texts[language], *_figures(name, *found[name], language)]) + " |")
    if rest := [texts[language] for name, texts in PARTS.items() if name not in found]:
        lines += ["", TEXTS["rest"][language], "", *(f"- {part}" for part in rest)]
    first = [TEXTS["first head"][language], "| --- | --- | --- | --- |"]
    for name, texts in STAGES.items():
        cells = _outcome(*found[name], language) if name in found else [none, "", ""]
        first.append("| " + " | ".join([texts[language], *cells]) + " |")
    notes = [
        f"- {note[language]}" for file in sorted(files) for whole in _wholes(file) for note in whole.get("notes", ())
    ]
    return TEXTS["page"][language].format(table="\n".join(lines), notes="\n".join(notes), first="\n".join(first))


def _source(whole: dict[str, Any]) -> tuple[str, str]:
    """Return the GPU and the commit; a copy that is no repository has that of its wheels."""
    known = whole["environment"]
    commit = known["commit"] or whole.get("packed", {}).get("commit", "")
    return ", ".join(known["machine"]["gpus"]), str(commit)[:7]


def _figures(name: str, row: dict[str, Any], whole: dict[str, Any], language: int) -> list[str]:
    mark = whole["marks"].get(name)
    [(key, value), (_, goal)] = mark.items() if mark else [("", 0.0), ("", 0.0)]
    memory = [row.get("device_memory_peak_bytes"), row.get("planned_memory_bytes")]
    gpu, commit = _source(whole)
    layers = TEXTS["layers"][language].format(layers=row["size"]["layers"])
    return [
        f"{row['tokens_per_s']:,.0f}",
        f"{MARKS[key][language]} {value:.2f}" if mark else "",
        f"{goal:g}" if mark else "",
        *(f"{one / GIB:.1f} GiB" if one else "" for one in memory),
        f"{gpu}; {layers}; {commit}",
    ]


def _outcome(row: dict[str, Any], whole: dict[str, Any], language: int) -> list[str]:
    """Return what a stage found; of tests that were ended also what had passed."""
    figures, told = row["figures"], []
    if "passed" in figures:
        told.append(TEXTS["tests"][language].format(**{name: len(tests) for name, tests in figures.items()}))
    elif "first_loss" in figures:
        told.append(TEXTS["run"][language].format(first=figures["first_loss"], last=figures["last_loss"]))
    elif "is_right" in figures:
        told.append(TEXTS["right" if figures["is_right"] else "wrong"][language])
    if not row["is_right"]:
        told.append(f"{TEXTS['failed'][language]}: {row['failed']}")
    return ["; ".join(told).replace("|", "/"), str(row["seconds"]), "; ".join(_source(whole))]


def main() -> None:
    """Write both pages, or remove them where nothing has been measured."""
    files = list((ROOT / "benchmarks").glob("*.json"))
    for language, name in enumerate(PAGES):
        file = ROOT / "docs" / name
        if newest(files):
            file.write_text(page(files, language), encoding="utf-8")
        else:
            file.unlink(missing_ok=True)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    main()
