"""Whatever the debugging page quotes, the toolkit says, in the page's language."""

import ast
import re
from pathlib import Path

import pytest
from pages import ROOT, Block, blocks, chinese

from toolkit import messages
from toolkit.config.load import load
from toolkit.train.out_of_memory import remedies

PAGE = ROOT / "docs" / "debugging.md"
REMEDY = re.compile(r"  (\S+=\S+|…)")
"""A line of what an out-of-memory error offers."""
QUOTES = [
    (block, line)
    for page in (PAGE, chinese(PAGE))
    for block in blocks(page, "text")
    for line in block.body.splitlines()
    if not REMEDY.fullmatch(line)
]
OUTPUTS = [
    page for name in ("multinode", "tasks") for page in (PAGE.with_name(f"{name}.md"), PAGE.with_name(f"{name}_zh.md"))
]
"""Pages whose blocks are what commands print, apart from lines of numbers and tables."""
NUMBERS = re.compile(r"…?$|step \d+/|.*  accuracy [\d.]+  macro_f1 |node\d  GPU|\S+ +(ok|warn)\b")
KINDS = "|".join(["Hang", *(name for name, kind in vars(messages).items() if isinstance(kind, type))])
PLACEHOLDER = re.compile(r"\{\w+\}")


def pattern(template: str) -> str:
    """Return a template as a regular expression; braces that it writes twice stand for themselves."""
    parts = [re.escape(part.replace("{{", "{").replace("}}", "}")) for part in PLACEHOLDER.split(template)]
    return ".+?".join(parts)


def starts(template: str) -> list[str]:
    """Return a template, and its beginnings up to the end of a clause."""
    ends = [match.end() for match in re.finditer(r"[.:,;] |[。：，；]|\n|\.(?=\{)", template)]
    return [template, *(template[:end].rstrip() for end in ends)]


def said_as(line: str, language: int) -> set[str]:
    """Return the English templates that a line may be, without its kind of error and its place."""
    said = re.sub(rf"^({KINDS}): ", "", line).removesuffix("…").strip()
    texts = (said, re.sub(rf"^[\w./-]+:\d+{(': ', '：')[language]}", "", said))
    return {template for one, template in PATTERNS[language] if any(one.fullmatch(text) for text in texts)}


def patterns(language: int) -> list[tuple[re.Pattern[str], str]]:
    """Return every template of a language, and its beginnings, with the English template that each belongs to."""
    return [
        (re.compile(pattern(one), re.DOTALL), pair[0])
        for pair in messages.chinese()["messages"].items()
        for one in starts(pair[language])
        # "{what}." alone would fit anything
        if len(re.sub(r"\W", "", PLACEHOLDER.sub("", one))) >= (2 if language else 7)
    ]


PATTERNS = [patterns(language) for language in (0, 1)]


def raised() -> dict[str, str]:
    """Return the templates that are raised where they are said, with the kind of error."""
    found = {}
    for path in [*(ROOT / "toolkit").rglob("*.py"), *(ROOT / "benchmarks").glob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                kind = ast.unparse(node.exc.func).rpartition(".")[2]
                kind = {"error": "ConfigError", "RowError": "DataError"}.get(kind, kind)  # what becomes of them
                if node.exc.args and isinstance(node.exc.args[0], ast.Constant):  # an error's own template
                    found[str(node.exc.args[0].value)] = kind
                for call in ast.walk(node.exc):
                    if isinstance(call, ast.Call) and ast.unparse(call.func) == "tr":
                        found[str(ast.literal_eval(call.args[0]))] = kind
    return found


RAISED = raised()


@pytest.mark.parametrize(("block", "line"), QUOTES, ids=lambda one: str(one)[:50])
def test_each_quote_is_said(block: Block, line: str) -> None:
    found = said_as(line, int(block.page.stem.endswith("_zh")))
    assert found
    if kind := re.match(KINDS, line):
        assert kind[0] in {RAISED.get(template, kind[0]) for template in found}


@pytest.mark.parametrize("page", [PAGE, chinese(PAGE)], ids=lambda page: page.name)
def test_what_is_offered_without_memory_is_what_the_toolkit_offers(page: Path) -> None:
    (body,) = [
        block.body for block in blocks(page, "text") if "OutOfMemory: " in block.body and "8 x 2048" in block.body
    ]
    shown = [line.strip() for line in body.splitlines() if REMEDY.fullmatch(line)]
    words = ["recipe=chatglm", "zero=stage2", "batch.global_size=64", "batch.micro_per_gpu=8", "data.max_length=2048"]
    assert shown == [*remedies(load(words).cfg, 8)[:4], "…"]


@pytest.mark.parametrize("page", OUTPUTS, ids=lambda page: page.name)
def test_each_line_of_an_output_is_printed(page: Path) -> None:
    lines = [line.removeprefix("node1: ") for block in blocks(page, "text") for line in block.body.splitlines()]
    texts = [line for line in lines if not NUMBERS.match(line)]
    assert len(texts) >= 5
    assert [line for line in texts if not said_as(line, int(page.stem.endswith("_zh")))] == []


def test_both_languages_quote_the_same() -> None:
    count = [[len(block.body.splitlines()) for block in blocks(page, "text")] for page in (PAGE, chinese(PAGE))]
    assert count[0] == count[1]
    assert sum(count[0]) > 30


def test_what_is_not_said_is_found() -> None:
    assert not said_as("ConfigError: the moon is in the wrong phase.", 0)
    assert not said_as("ConfigError: mine.yaml:3: unknown word 'zero.stag'.", 0)
    assert said_as("ConfigError: mine.yaml:3: unknown key 'zero.stag'.", 0)
