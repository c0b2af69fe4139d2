"""docs/config.md and config_zh.md, made from the schema: each key, type, default and the sentence under the field."""

import re
from collections.abc import Iterator

from toolkit import messages
from toolkit.config import key_texts, schema

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


def render(chinese: bool = False) -> str:
    """Return the whole page.

    Args:
        chinese: with the sentences of locale/zh.yaml, which must hold all of them.
    """
    before = messages.current_language()
    messages.set_language("zh" if chinese else "en")
    try:
        return "".join(_parts(chinese))
    finally:
        messages.set_language(before)


def _parts(chinese: bool) -> Iterator[str]:
    yield CHINESE_HEADER if chinese else ENGLISH_HEADER
    top, head = (
        ("最上层", "配置项 | 类型 | 默认值 | 含义") if chinese else ("Top level", "key | type | default | meaning")
    )
    for section in key_texts.sections():
        yield f"\n## {section.name or top}\n\n{section.about}\n\n| {head} |\n| --- | --- | --- | --- |\n"
        for key in section.keys:
            meaning = re.sub(r"([|<*])", r"\\\1", key.meaning)  # Markdown's own signs
            yield f"| `{key.name}` | {key.kind} | `{key.default}` | {meaning} |\n"


def sentences() -> set[str]:
    """Return every English sentence of the page: those of the keys, and those of the sections."""
    texts = key_texts.field_texts()
    sections = list(key_texts.section_classes(schema.RunConfig, ""))
    keys = {texts[kind.__name__][item.name] for _, _, kind in sections for item, _ in key_texts.own_fields(kind)}
    return keys | {text for _, text, _ in sections}
