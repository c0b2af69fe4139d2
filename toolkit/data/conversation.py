"""What a row of a data file becomes: a list of messages, and the rules that turn each format into them."""

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass

from toolkit.config.schema import RowFormat
from toolkit.errors import RowError
from toolkit.messages import tr

Message = dict[str, str]
"""One turn: `role` (system, user or assistant) and `content`."""


@dataclass(frozen=True, slots=True)
class Row:
    """One conversation; `where` is "file:line" of its beginning."""

    messages: list[Message]
    where: str


@dataclass(frozen=True, slots=True)
class _Keys:
    """The keys of a format: the parts that are joined to the question, and the answer."""

    question: str
    question_more: str
    answer: str


_FORMATS = {
    RowFormat.prompt_response: _Keys("prompt", "", "response"),
    RowFormat.instruction: _Keys("instruction", "input", "output"),
}


def detect_format(row: Mapping[str, object]) -> RowFormat:
    """Return the format of a file from the keys of its first row.

    Raises:
        RowError: no known format has these keys.
    """
    for complete in (True, False):
        for row_format, keys in _FORMATS.items():
            found = [key in row for key in (keys.question, keys.answer)]
            if all(found) if complete else any(found):
                return row_format
    raise RowError(
        tr(
            "the keys {keys} belong to no known format. Known are prompt, response (history) and instruction, output "
            "(input, history); rename the keys accordingly",
            keys=_quoted(row),
        )
    )


def to_messages(row: object, row_format: RowFormat) -> list[Message]:
    """Return the messages of one parsed row; the last one is the assistant's.

    Args:
        row: the parsed JSON value.
        row_format: prompt_response or instruction.

    Raises:
        RowError: the row lacks something, or holds something of the wrong type.
    """
    mapping = as_object(row)
    keys = _FORMATS[row_format]
    messages: list[Message] = []
    for question, answer in _history(mapping.get("history")):
        messages += [_message("user", question), _message("assistant", answer)]
    question = _text(mapping, keys.question)
    more = mapping.get(keys.question_more)
    if keys.question_more and more not in (None, ""):
        question += "\n" + _text(mapping, keys.question_more)
    return [
        *messages,
        _message("user", question),
        _message("assistant", _text(mapping, keys.answer)),
    ]


def as_object(row: object) -> dict[str, object]:
    """Return the row if it is a JSON object.

    Raises:
        RowError: it is something else.
    """
    if isinstance(row, dict):
        return row
    raise RowError(
        tr(
            'the row is {kind}, not an object. Each row must look like {{"prompt": …, "response": …}}',
            kind=_kind(row),
        )
    )


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _history(history: object) -> list[tuple[str, str]]:
    """Return earlier turns as pairs; absent, null and [] mean none."""
    if history in (None, []):
        return []
    mend = tr("Write it as a list of [question, answer] pairs of texts that are not empty")
    if not isinstance(history, list):
        raise RowError(tr("'history' is {kind}. {mend}", kind=_kind(history), mend=mend))
    pairs = []
    for number, pair in enumerate(history, start=1):
        if not isinstance(pair, list) or len(pair) != 2:
            raise RowError(
                tr(
                    "item {number} of 'history' is no pair. {mend}",
                    number=number,
                    mend=mend,
                )
            )
        for text in pair:
            if not isinstance(text, str) or not text.strip():
                kind = _kind(text)
                raise RowError(
                    tr(
                        "item {number} of 'history' holds {kind}. {mend}",
                        number=number,
                        kind=kind,
                        mend=mend,
                    )
                )
            _check_characters(text, "history")
        pairs.append((pair[0], pair[1]))
    return pairs


def _text(row: Mapping[str, object], key: str) -> str:
    """Return the text under a key that must be there and not be empty."""
    if key not in row:
        near = difflib.get_close_matches(key, [name for name in row if isinstance(name, str)], n=1)
        if near:
            raise RowError(
                tr(
                    "no key '{key}'; the row has {keys}. Rename '{near}' to '{key}'",
                    key=key,
                    keys=_quoted(row),
                    near=near[0],
                )
            )
        raise RowError(
            tr(
                "no key '{key}'; the row has {keys}. Add it or remove the row",
                key=key,
                keys=_quoted(row),
            )
        )
    value = row[key]
    if not isinstance(value, str):
        raise RowError(
            tr(
                "'{key}' is {kind}, not a text. Correct or remove the row",
                key=key,
                kind=_kind(value),
            )
        )
    if not value.strip():
        raise RowError(tr("'{key}' is empty. Fill it in or remove the row", key=key))
    _check_characters(value, key)
    return value


def _check_characters(text: str, key: str) -> None:
    r"""Refuse halves of surrogate pairs (an escape such as \ud83d alone), which no tokenizer can encode."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RowError(
            tr(
                "'{key}' holds half of a character (\\u{code} at position {position}). Correct or remove the row",
                key=key,
                code=f"{ord(text[error.start]):04x}",
                position=error.start + 1,
            )
        ) from None


def _kind(value: object) -> str:
    """Return what a JSON value is, as a person would say it."""
    if value is None:
        return "null"
    if isinstance(value, str):
        return tr("a text") if value.strip() else tr("an empty text")
    if isinstance(value, bool | int | float):
        return json.dumps(value)
    return tr("a list") if isinstance(value, list) else tr("an object")


def _quoted(row: Mapping[str, object]) -> str:
    """Return the keys of a row for a message, not more than a screen line of them."""
    names = [f"'{name[:40]}'" for name in list(row)[:8]]
    return ", ".join(names + ["…"] * (len(row) > 8)) or tr("no keys at all")
