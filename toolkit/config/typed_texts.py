"""Texts in lists and sections of the command line as they were typed: run={name: 1.10}. Imported where there is one."""

import re
from typing import Any

from toolkit.config import files, schema
from toolkit.messages import ConfigError

_KEY = re.compile(r"([{,]\s*[\w.-]+):(?=\S)")
"""A key without a space behind its colon, as Hydra allows and YAML does not."""


def as_typed(key: str, value: Any, typed: str) -> Any:
    """Return a list or mapping whose texts, by the schema, are as they were typed, where Hydra has made 1.1 of 1.10.

    Args:
        key: dotted key of the schema, or a section.
        value: what Hydra read of `typed`.
        typed: the argument, what is behind its first =.
    """
    names = key.split(".")
    in_yaml = _KEY.sub(r"\1: ", typed).replace("\\'", "''")  # a quote within quotes, too
    text = "".join(f"{{{name}: " for name in names) + in_yaml + "}" * len(names)
    try:
        texts: Any = files.parse(text, key, schema.RunConfig).values  # as a recipe is read
    except ConfigError:  # in Hydra's grammar, and not in YAML's
        return value
    for name in names:
        texts = texts[name]
    return _with_texts(value, texts)


def _with_texts(value: Any, texts: Any) -> Any:
    """Return a value with texts in the place of its numbers and booleans where `texts`, of the same form, has them."""
    if isinstance(value, dict) and isinstance(texts, dict) and len(value) == len(texts):
        return {name: _with_texts(item, text) for (name, item), text in zip(value.items(), texts.values(), strict=True)}
    if isinstance(value, list) and isinstance(texts, list) and len(value) == len(texts):
        return [_with_texts(item, text) for item, text in zip(value, texts, strict=True)]
    return texts if isinstance(value, (bool, int, float)) and isinstance(texts, str) else value
