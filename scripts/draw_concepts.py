#!/usr/bin/env python3
"""Draw the pictures of docs/concepts.md as SVG in both languages, with colours for light and for dark pages."""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import yaml

IMAGES = Path(__file__).parents[1] / "docs" / "images"
STYLE = """
svg { font: 14px system-ui, "Segoe UI", "Noto Sans", "Noto Sans CJK SC", "PingFang SC", "Microsoft YaHei", sans-serif }
.page { fill: #ffffff } text { fill: #1f2328 } .note { fill: #57606a; font-size: 12px } .strong { font-weight: 600 }
.box { fill: #f6f8fa; stroke: #8c959f } .main { fill: #ddf4ff; stroke: #0969da } .off { fill: none; stroke: #d0d7de }
.arrow { stroke: #57606a; fill: none; stroke-width: 1.5 } .head { fill: #57606a }
.a { fill: #54aeff } .b { fill: #f2a65a } .c { fill: #6bc46d } .fade { opacity: .35 }
@media (prefers-color-scheme: dark) {
.page { fill: #161b22 } text { fill: #e6edf3 } .note { fill: #9da7b3 }
.box { fill: #21262d; stroke: #768390 } .main { fill: #0c2d6b; stroke: #58a6ff } .off { stroke: #444c56 }
.arrow { stroke: #9da7b3 } .head { fill: #9da7b3 }
.a { fill: #388bfd } .b { fill: #bb6a1e } .c { fill: #2f8f46 }
}"""
TEXTS: dict[str, dict[str, Any]] = yaml.safe_load((IMAGES / "concepts.yaml").read_text(encoding="utf-8"))
"""Language -> the words of the pictures."""
"""What the pictures say, by language."""
SEGMENTS = ((2, 3), (1, 2), (2, 2))
"""Tokens of the question and of the answer of each conversation."""


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "middle") -> str:
    """Return a line of text."""
    return f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}">{escape(words)}</text>'


def rect(x: float, y: float, width: float, height: float, kind: str, radius: float = 0) -> str:
    """Return a rectangle."""
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}" class="{kind}"/>'


def arrow(points: str) -> str:
    """Return a line through some points with a head at its end."""
    return f'<path d="M{points}" class="arrow" marker-end="url(#head)"/>'


def box(x: float, y: float, lines: list[str], kind: str = "box") -> str:
    """Return a box with a title and a line below it."""
    title, note = text(x + 68, y + 24, lines[0], "strong"), text(x + 68, y + 44, lines[1], "note")
    return rect(x, y, 136, 58, kind, 8) + title + note


def flow(say: dict[str, Any]) -> Iterator[str]:
    """Draw how a recipe and data become a model."""
    for column, name in enumerate(("recipe", "check", "json", "engine", "export")):
        yield box(20 + 166 * column, 50, say[name], "main" if name == "engine" else "box")
    for column, name in enumerate(("data", "cache", "batch")):
        yield box(20 + 166 * column, 150, say[name])
    yield box(518, 150, say["kept"]) + box(684, 150, say["run"])
    for y, columns in ((79, range(4)), (179, range(2))):
        yield from (arrow(f"{156 + 166 * column},{y} h22") for column in columns)
    yield arrow("488,170 h14 q8,0 8,-8 v-46 q0,-8 6,-8") + arrow("572,108 v34") + arrow("600,142 v-26")
    yield arrow("632,108 L700,144")


def zero(say: dict[str, Any]) -> Iterator[str]:
    """Draw what ZeRO splits: a column for each rank, a block for each kind of state."""
    heights = (36, 36, 90)
    for stage, (name, split) in enumerate(zip(say["stages"], say["split"], strict=True)):
        left = 20 + 204 * stage
        yield text(left + 92, 62, name, "strong") + text(left + 92, 80, split, "note")
        for rank in range(4):
            x, y = left + 48 * rank, 92
            for kind, height, first_split in zip("abc", heights, (3, 2, 1), strict=True):
                if stage < first_split:
                    yield rect(x, y, 40, height, kind)
                else:
                    yield rect(x + 0.5, y + 0.5, 39, height - 1, "off")
                    yield rect(x, y + rank * height / 4, 40, height / 4, kind)
                y += height + 4
            yield text(x + 20, 278, str(rank), "note")
        yield text(left + 92, 296, say["rank"], "note")
    for column, (kind, words) in enumerate(zip("abc", say["parts"], strict=True)):
        yield rect(20 + 170 * column, 314, 14, 14, kind) + text(40 + 170 * column, 326, words, "", "start")
    yield rect(530.5, 314.5, 13, 13, "off") + text(550, 326, say["empty"], "", "start")


def packing(say: dict[str, Any]) -> Iterator[str]:
    """Draw a packed sequence with its loss mask, positions and attention."""
    tokens = [
        (segment, number >= question, number)
        for segment, (question, answer) in enumerate(SEGMENTS)
        for number in range(question + answer)
    ]
    for row, name in enumerate(("tokens", "trained", "positions")):
        yield text(20, 72 + 34 * row, say[name], "", "start")
    for row, (segment, is_trained, position) in enumerate(tokens):
        x = 110 + 34 * row
        yield rect(x, 52, 30, 30, "abc"[segment] + ("" if is_trained else " fade"), 4)
        yield text(x + 15, 72, say["turns"][is_trained]) + text(x + 15, 106, "✓" if is_trained else "·")
        yield text(x + 15, 140, str(position))
        for before, (other, _, _) in enumerate(tokens[: row + 1]):
            here = 110 + 14 * before, 166 + 14 * row, 13, 13
            yield rect(*here, "abc"[segment]) if other == segment else ""
        for column in range(len(tokens)):
            if column > row or tokens[column][0] != segment:
                yield rect(110.5 + 14 * column, 166.5 + 14 * row, 12, 12, "off")
    for row, words in enumerate(say["attention"]):
        yield text(300, 190 + 20 * row, words, "", "start")
    yield rect(300, 276, 14, 14, "a fade", 2) + text(322, 288, say["legend"][0], "note", "start")
    yield rect(300, 298, 14, 14, "a", 2) + text(322, 310, say["legend"][1], "note", "start")
    yield text(300, 330, say["colours"], "note", "start")


PICTURES = {"flow": (flow, 840, 228), "zero": (zero, 840, 346), "packing": (packing, 540, 354)}


def picture(name: str, language: str) -> str:
    """Return a picture's SVG."""
    draw, width, height = PICTURES[name]
    say = TEXTS[language]
    head = '<marker id="head" markerWidth="8" markerHeight="8" refX="6" refY="4" orient="auto">'
    head += '<path d="M0,0 L8,4 L0,8 z" class="head"/></marker>'
    shapes = "\n".join(filter(None, draw(say)))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="{escape(say[name])}">\n<style>{STYLE}\n</style>\n<defs>{head}</defs>\n'
        f"{rect(0, 0, width, height, 'page', 10)}\n{text(20, 30, say[name], 'strong', 'start')}\n{shapes}\n</svg>\n"
    )


def files() -> dict[Path, str]:
    """Return the text of every picture by its file."""
    tails = {"en": "", "zh": "_zh"}
    return {
        IMAGES / f"concept_{name}{tail}.svg": picture(name, language)
        for name in PICTURES
        for language, tail in tails.items()
    }


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    for file, content in files().items():
        file.write_text(content, encoding="utf-8")
