"""The tables of docs/coming_from.md, made from what the translation itself reads."""

from collections.abc import Mapping

from toolkit.config.program_keys import Key, keys_of, own_names, sentence
from toolkit.messages import current_language, set_language

TABLES: dict[str, Mapping[str, Key]] = {
    "chatglm": {name: key for name, key in keys_of("chatglm").items() if name not in keys_of("trainer")},
    "factory": {name: key for name, key in keys_of("factory").items() if name not in keys_of("trainer")},
    **{
        program: {name: keys_of(program)[name] for name in own_names(program)}
        for program in ("axolotl", "swift", "glm_demo", "fastchat", "firefly")
    },
    "trainer": keys_of("hf"),
}
"""Name of a table -> its keys; those of the Trainer are in its own table only."""
HEADS = {
    "en": ("key", "default", "key here", "notes"),
    "zh": ("原配置项", "默认值", "本工具的配置项", "说明"),
}
NONE = {"en": "none", "zh": "无"}


def fill_tables(page: str, language: str) -> str:
    """Return a page with its tables filled in.

    Args:
        page: holds `<!-- table NAME -->` and `<!-- end -->` around each table.
        language: en or zh.
    """
    before = current_language()
    set_language(language)
    try:
        for name, keys in TABLES.items():
            mark = f"<!-- table {name} -->\n"
            head, _, rest = page.partition(mark)
            _, end, tail = rest.partition("<!-- end -->")
            if end:
                page = head + mark + _table(keys, language) + end + tail
    finally:
        set_language(before)
    return page


def _table(keys: Mapping[str, Key], language: str) -> str:
    """Return one row for each key with a counterpart, then one for each reason that others have none."""
    rows = [_row(HEADS[language]), _row(("---",) * 4)]
    reasons: dict[str, list[str]] = {}
    for name, key in keys.items():
        if key.to:
            ours = ", ".join(f"`{part}`" for part in key.to.split(", "))
            default = "" if key.default is None else f"`{str(key.default).lower()}`"
            rows.append(_row((f"`{name}`", default, ours, sentence(key.says))))
        else:
            reasons.setdefault(key.says, []).append(f"`{name}`")
    rows += [_row((", ".join(names), "", NONE[language], sentence(says))) for says, names in reasons.items()]
    return "".join(rows)


def _row(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"
