"""Reading somebody's DeepSpeed JSON: strict, and with the line of each key."""

import json
import re
from pathlib import Path
from typing import Any

from toolkit.engine.ds_ignored import without_ignored
from toolkit.engine.ds_keys import name_problems
from toolkit.errors import ConfigError
from toolkit.messages import tr
from toolkit.outside import reason_of
from toolkit.problems import raise_all

_TOKEN = re.compile(r'"(?:\\.|[^"\\])*"|[{}\[\]:,]')


def read_json(path: str) -> tuple[dict[str, Any], dict[str, str], dict[str, str]]:
    """Read a DeepSpeed JSON; what DeepSpeed ignores in it is left out.

    Args:
        path: the file.

    Returns:
        The nested dictionary without nulls (which mean "not given"); dotted key -> "file:line"; and dotted key -> a
        sentence about what DeepSpeed ignores, or calls otherwise today.

    Raises:
        ConfigError: the file is missing, no JSON, holds a key twice, or names that are likely misspelt.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
        values = json.loads(text)
    except OSError as error:
        raise ConfigError(
            tr("deepspeed_json = {path} cannot be read: {reason}", path=path, reason=error.strerror or error)
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(tr("{path} is not UTF-8 (byte {position}).", path=path, position=error.start)) from error
    except json.JSONDecodeError as error:
        raise ConfigError(
            tr(
                "{path}:{line}:{column}: this is not JSON: {reason}",
                path=path,
                line=error.lineno,
                column=error.colno,
                reason=error.msg,
            )
        ) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(tr("{path} is not JSON: {reason}", path=path, reason=reason_of(error))) from error
    if not isinstance(values, dict):
        raise ConfigError(tr("{path}: a DeepSpeed JSON must be an object, {{...}}.", path=path))
    where = _lines(text, path)
    values, ignored = without_ignored(_without_nulls(values), where)
    problems = name_problems(values)
    raise_all(ConfigError(f"{where.get(key, path)}: {sentence}") for key, sentence in problems.items())
    return values, where, ignored


def _lines(text: str, path: str) -> dict[str, str]:
    """Return dotted key -> "file:line" of valid JSON, and refuse a key that stands twice in one object.

    The standard parser tells no positions and takes the last of two equal keys. Objects inside lists are not entered.
    """
    where: dict[str, str] = {}
    opened: list[str | None] = []  # the prefix of each open object; None inside lists
    here, word = "", ""
    for token in _TOKEN.finditer(text):
        mark = token.group()
        inside = opened[-1] if opened else ""
        if mark == "{":
            opened.append(None if inside is None else here and f"{here}.")
        elif mark == "[":
            opened.append(None)
        elif mark in "}]":
            opened.pop()
        elif mark == ":" and inside is not None:
            here = inside + json.loads(word)
            place = f"{path}:{text.count(chr(10), 0, token.start()) + 1}"
            if here in where:
                raise ConfigError(
                    tr("{place}: '{key}' stands twice, first at {first}.", place=place, key=here, first=where[here])
                )
            where[here] = place
        elif mark not in ":,":
            word = mark
    return where


def _without_nulls(section: dict[str, Any]) -> dict[str, Any]:
    return {
        name: _without_nulls(value) if isinstance(value, dict) else value
        for name, value in section.items()
        if value is not None
    }
