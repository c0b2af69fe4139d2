"""One row of a data file: JSON parsed strictly, its keys and values, and how a message names them. What Python's parser
would take or lose in silence is an error of that row.
"""

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from toolkit.messages import RowError, current_language, listed, tr

LARGEST_ROW_BYTES = 1 << 24
"""Of one row, as JSON: to tokenize it takes about a hundred times as much memory."""
_HALF = re.compile(rb"\\u[dD][89a-fA-F]")
_SPEAKER = re.compile(r"\n\n(Human|Assistant):")


def parse_row(row: object) -> object:
    """Return a row's value: a line of JSON (bytes) is parsed, other values are checked for broken characters."""
    if isinstance(row, bytes):
        return parse_line(row)
    check_characters(row)
    return row


def parse_line(line: bytes) -> object:
    """Return the value of one line; a RowError if it is too long, not UTF-8, not JSON, or names a key twice."""
    _check_size(len(line))
    try:
        value = DECODER.decode(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise _json_error(error) from None
    if _HALF.search(line):  # a line in UTF-8 can hold half a character as an escape alone
        check_characters(value)
    return value


def check_characters(value: object) -> None:
    r"""Raise a RowError for a value with half a character (a lone surrogate such as \ud83d, or a byte that was not
    UTF-8, which `surrogateescape` decoded to one) or of more than LARGEST_ROW_BYTES as JSON.
    """
    try:
        _check_size(len(json.dumps(value, ensure_ascii=False, default=str).encode("utf-8")))
    except UnicodeEncodeError as error:
        code, around = ord(error.object[error.start]), error.object[max(error.start - 20, 0) : error.start]
        if 0xDC80 <= code <= 0xDCFF:
            raise RowError(
                "not UTF-8: byte 0x{byte}. If the file is in GBK, convert it: `iconv -f GB18030 -t UTF-8 FILE > NEW`",
                byte=f"{code - 0xDC00:02x}",
            ) from None
        raise RowError(
            "half of a character (\\u{code}) after '{around}'. Correct or remove the row",
            code=f"{code:04x}",
            around=around,
        ) from None
    except RecursionError as error:
        raise _json_error(error) from None


def _check_size(size: int) -> None:
    """Raise a RowError if a row of `size` bytes is larger than can be tokenized at once."""
    if size > LARGEST_ROW_BYTES:
        raise RowError(
            "a row of {size} MiB; at most {most} MiB can be tokenized at once. Split its text over several rows",
            size=size >> 20,
            most=LARGEST_ROW_BYTES >> 20,
        )


def _reject_constant(name: str) -> NoReturn:
    """Reject NaN and Infinity, which Python's JSON parser accepts although JSON has no such numbers."""
    raise ValueError(tr("{name} is no JSON value", name=name))


def _without_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object's (key, value) pairs as a dict. ValueError for a repeated key: a value would be lost."""
    members = dict(pairs)
    if len(members) != len(pairs):
        twice = first_repeated([key for key, _ in pairs])
        raise ValueError(tr("the key '{key}' stands there twice", key=twice))
    return members


DECODER = json.JSONDecoder(parse_constant=_reject_constant, object_pairs_hook=_without_repeated_keys)
LENIENT_DECODER = json.JSONDecoder(parse_int=str)  # Python reads no integer of more than 4,300 digits


def _json_error(error: ValueError | RecursionError) -> RowError:
    """Return the RowError that explains an error of parsing JSON."""
    from toolkit.data.broken_json import json_error  # read in errors alone

    return json_error(error)


def first_repeated(names: Sequence[str]) -> str:
    """Return the first name that occurs more than once; there must be one."""
    return next(name for name in names if names.count(name) > 1)


def as_object(row: object) -> dict[str, Any]:
    """Return the row if it is a JSON object, else raise a RowError."""
    if isinstance(row, dict):
        if None in row:  # what csv.DictReader does with fields beyond the first line's
            raise RowError(tr("the row has more fields than the first line names. Correct or remove the row"))
        return row
    raise RowError(
        'the row is {kind}, not an object. Each row must look like {{"prompt": …, "response": …}}', kind=kind_of(row)
    )


def parsed_json(value: object) -> object:
    """Return the list or object that a text holds as JSON, as columns of many datasets do; other values unchanged."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            parsed = DECODER.decode(value)
        except (ValueError, RecursionError):
            return value
        check_characters(parsed)
        return parsed
    return value


def conversation_in(value: object) -> object:
    """Return the messages that a text holds, as JSON or as in Anthropic's HH-RLHF; other values unchanged."""
    if not isinstance(value, str) or not _SPEAKER.match(value):
        return parsed_json(value)
    parts = _SPEAKER.split(value)[1:]  # role, content, role, content, …
    return [
        {"role": role.lower(), "content": content.strip()}
        for role, content in zip(parts[::2], parts[1::2], strict=True)
    ]


def is_conversation(value: object) -> bool:
    """Return whether a value is a list of messages by the keys of its first item, whatever it is called."""
    first = value[0] if isinstance(value, list) and value else None
    return isinstance(first, dict) and (first.keys() >= {"role", "content"} or first.keys() >= {"from", "value"})


def required_text(row: Mapping[str, Any], key: str) -> str:
    """Return the row's text under a key; raise a RowError if it is missing, not a text, or blank."""
    value = required_value(row, key)
    if not isinstance(value, str):
        raise RowError("'{key}' is {kind}, not a text. Correct or remove the row", key=key, kind=kind_of(value))
    if not value.strip():
        raise RowError("'{key}' is empty. Fill it in or remove the row", key=key)
    return value


class MissingKey(RowError):
    """A row lacks a key."""

    def __init__(self, text: str, row: Mapping[str, Any], key: str) -> None:
        super().__init__(text)
        self.row, self.key = row, key


def required_value(row: Mapping[str, Any], key: str) -> Any:
    """Return the row's value under a key; raise a MissingKey if the row has no such key."""
    if key in row:
        return row[key]
    raise missing_key_error(row, key)


def missing_key_error(row: Mapping[str, Any], key: str) -> MissingKey:
    """Return the error for a row without `key`; its message names the most similar key of the row, if one is near."""
    near = difflib.get_close_matches(key, [name for name in row if isinstance(name, str)], n=1)
    text = tr(
        "no key '{key}'; the row has {keys}. Add it, remove the row, or map another key: data.columns={{{key}:NAME}}",
        key=key,
        keys=quoted_keys(row),
    )
    if near:
        text = tr(
            "no key '{key}'; the row has {keys}. Rename '{near}' to '{key}'",
            key=key,
            keys=quoted_keys(row),
            near=near[0],
        )
    return MissingKey(text, row, key)


def kind_of(value: object) -> str:
    """Return what a JSON value is, for an error message: "a text", "a list", "null", or a number itself."""
    if isinstance(value, str):
        return tr("a text") if value.strip() else tr("an empty text")
    if value is None or isinstance(value, bool | int | float):
        space = " " if current_language() == "zh" else ""  # between Chinese and code
        return space + json.dumps(value)
    return tr("a list") if isinstance(value, list) else tr("an object")


def quoted_keys(row: Mapping[str, Any]) -> str:
    """Return the keys of a row, quoted, for an error message: at most eight, of 40 characters each."""
    names = [f"'{name[:40]}'" for name in list(row)[:8]]
    names += ["…"] if len(row) > 8 else []
    return listed(*names) or tr("no keys at all")
