"""docs/config.md and config_zh.md, made from the schema: each key, type, default and the sentence under the field."""

import dataclasses
import inspect
import re
import typing
from collections.abc import Iterator
from enum import Enum
from typing import Any

from recipe_schema import field_default, field_texts

from toolkit import messages
from toolkit.config import schema

ENGLISH_HEADER = """# Configuration reference

[中文](config_zh.md)

Made from `toolkit/config/schema.py` by `scripts/generate_config_docs.py`; do not edit.

Set a key in a recipe (nested YAML) or on the command line (`key=value`), which takes precedence. `group=choice` selects
a file of `conf/GROUP/`; on the command line it overrides the recipe's keys, and single keys override it. Unknown names
are errors, and so are keys that have no effect in combination with the others.

Editors with the YAML language server (in VS Code the extension YAML of Red Hat) complete and check recipes by the
JSON schema named in the second line of each recipe; in your recipe write its path:
`# yaml-language-server: $schema=recipes/recipe.schema.json`.
"""
CHINESE_HEADER = """# 所有配置项

[English](config.md)

由 `scripts/generate_config_docs.py` 根据 `toolkit/config/schema.py` 生成，请勿编辑。

配置项写在配方中（嵌套的 YAML），或写在命令行中（`key=value`）；命令行优先。\
`group=choice` 选择 `conf/GROUP/` 中的一个文件；写在命令行中时覆盖配方中的配置项，命令行中的单个配置项又覆盖它。\
未知的名称会报错，与其他配置项组合后不起作用的配置项也会报错。

支持 YAML language server 的编辑器（如装有 Red Hat YAML 扩展的 VS Code）会按 schema 补全并检查配方：\
自带的配方在第二行指明了它，你的配方写上它的路径即可：`# yaml-language-server: $schema=recipes/recipe.schema.json`。
"""
WORDS = {
    "Top level": "最上层",
    "| key | type | default | meaning |": "| 配置项 | 类型 | 默认值 | 含义 |",
    "whole number, `auto`": "整数、`auto`",
    "whole number": "整数",
    "number": "数",
    "true, false": "true、false",
    "text": "文本",
    "section": "一节",
    "list of texts": "文本的列表",
    "list of numbers": "数的列表",
    "list of whole numbers": "整数的列表",
    "list of sources": "来源的列表",
    "list of sections": "节的列表",
}


def render(chinese: bool = False) -> str:
    """Return the whole page.

    Args:
        chinese: with the sentences of locale/zh.yaml, which must hold all of them.
    """

    def said(text: str) -> str:
        return (WORDS.get(text) or messages.chinese()["sentences"][text]) if chinese else text

    texts = field_texts()
    parts = [CHINESE_HEADER if chinese else ENGLISH_HEADER]
    for name, text, section in _sections(schema.RunConfig, ""):
        head = said("| key | type | default | meaning |")
        parts.append(f"\n## {name or said('Top level')}\n\n{said(text)}\n\n{head}\n| --- | --- | --- | --- |\n")
        for item, inner in _own_fields(section):
            key = f"{name}.{item.name}" if name else item.name
            kind = _type(inner)
            if chinese:
                kind = WORDS.get(kind) or kind.replace("list of ", "以下各项的列表：")
            meaning = re.sub(r"([|<*])", r"\\\1", said(texts[section.__name__][item.name]))  # Markdown's own signs
            parts.append(f"| `{key}` | {kind} | {_default(item)} | {meaning} |\n")
    return "".join(parts)


def sentences() -> set[str]:
    """Return every English sentence of the page: those of the keys, and those of the sections."""
    texts = field_texts()
    sections = list(_sections(schema.RunConfig, ""))
    keys = {texts[kind.__name__][item.name] for _, _, kind in sections for item, _ in _own_fields(kind)}
    return keys | {text for _, text, _ in sections}


def _sections(kind: type, prefix: str) -> Iterator[tuple[str, str, type]]:
    """Yield each section with fields of its own: dotted name, docstring, class."""
    if list(_own_fields(kind)):
        summary = (inspect.getdoc(kind) or "").partition(": ")[2] or (inspect.getdoc(kind) or "")
        yield prefix, summary[:1].upper() + summary[1:] if prefix else "Keys outside of any section.", kind
    for name, inner in typing.get_type_hints(kind).items():
        if dataclasses.is_dataclass(inner):
            yield from _sections(typing.cast("type", inner), f"{prefix}.{name}" if prefix else name)
        elif (
            typing.get_origin(inner) is list
            and dataclasses.is_dataclass(typing.get_args(inner)[0])
            and name != "validation"  # whose items are as those of `sources`
        ):
            yield from _sections(typing.get_args(inner)[0], f"{prefix}.{name}[i]")


def _own_fields(kind: type) -> Iterator[tuple["dataclasses.Field[Any]", Any]]:
    hints = typing.get_type_hints(kind)
    for item in dataclasses.fields(kind):
        if not dataclasses.is_dataclass(hints[item.name]):
            yield item, hints[item.name]


def _type(kind: Any) -> str:
    if isinstance(kind, type) and issubclass(kind, Enum):
        return ", ".join(f"`{name}`" for name in kind.__members__)
    words: dict[Any, str] = {
        int | str: "whole number, `auto`",
        bool | str: "true, false, `auto`",
        int: "whole number",
        float: "number",
        int | float: "number",
        bool: "true, false",
        str: "text",
    }
    if typing.get_origin(kind) is list:
        inner = typing.get_args(kind)[0]
        if inner in words:
            return f"list of {words[inner]}s"
        if dataclasses.is_dataclass(inner):
            return "list of sources" if inner is schema.SourceConfig else "list of sections"
        return f"list of {_type(inner)}"
    return words.get(kind, "section")


def _default(item: "dataclasses.Field[Any]") -> str:
    value = field_default(item)
    if isinstance(value, Enum):
        value = value.name
    elif isinstance(value, bool):
        value = str(value).lower()
    return '`""`' if value == "" else f"`{value}`"
