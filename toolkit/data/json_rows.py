"""Parses one row of JSON, strictly: what Python's parser would take or lose in silence is an error of that row."""

import codecs
import json
import re
from collections.abc import Sequence
from typing import Any, NoReturn

from toolkit.messages import RowError, tr

UTF16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
LARGEST_ROW_BYTES = 1 << 24
"""Of one row, as JSON: to tokenize it takes about a hundred times as much memory."""
_HALF = re.compile(rb"\\u[dD][89a-fA-F]")


def parse_line(line: bytes) -> object:
    """Return the value of one line; a RowError if it is too long, not UTF-8, not JSON, or names a key twice."""
    _check_size(len(line))
    try:
        value = DECODER.decode(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise json_error(error) from None
    if _HALF.search(line):
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
                "not UTF-8: byte 0x{byte} after '{around}'. If the file is in GBK, convert it with `iconv -f GBK "
                "-t UTF-8`",
                byte=f"{code - 0xDC00:02x}",
                around=around,
            ) from None
        raise RowError(
            "half of a character (\\u{code}) after '{around}'. Correct or remove the row",
            code=f"{code:04x}",
            around=around,
        ) from None
    except RecursionError as error:
        raise json_error(error) from None


def _check_size(size: int) -> None:
    """Raise a RowError if a row of `size` bytes is larger than can be tokenized at once."""
    if size > LARGEST_ROW_BYTES:
        raise RowError(
            "a row of {size} MiB; at most {most} MiB can be tokenized at once. Split its text over several rows",
            size=size >> 20,
            most=LARGEST_ROW_BYTES >> 20,
        )


def _refuse_constant(name: str) -> NoReturn:
    """Reject NaN and Infinity, which Python's JSON parser accepts although JSON has no such numbers."""
    raise ValueError(tr("{name} is no JSON value", name=name))


def _without_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object's (key, value) pairs as a dict; reject a repeated key: the first value would be lost."""
    members = dict(pairs)
    if len(members) != len(pairs):
        twice = first_repeated([key for key, _ in pairs])
        raise ValueError(tr("the key '{key}' stands there twice", key=twice))
    return members


DECODER = json.JSONDecoder(parse_constant=_refuse_constant, object_pairs_hook=_without_repeated_keys)
LENIENT_DECODER = json.JSONDecoder(parse_int=str)  # Python reads no integer of more than 4,300 digits


def first_repeated(names: Sequence[str]) -> str:
    """Return the first name that occurs more than once; there must be one."""
    return next(name for name in names if names.count(name) > 1)


def json_error(error: ValueError | RecursionError) -> RowError:
    """Return the RowError that explains an error of parsing JSON; its positions count from 1 within the line."""
    if isinstance(error, UnicodeDecodeError):
        content, start = error.object, error.start
        return RowError(
            "not UTF-8: byte 0x{byte} at position {position} of the line. If the file is in {encoding}, convert it "
            "with `iconv -f {encoding} -t UTF-8`",
            byte=f"{content[start]:02x}",
            position=start - content.rfind(b"\n", 0, start),
            encoding="UTF-16" if content[:2] in UTF16_MARKS else "GBK",
        )
    if isinstance(error, json.JSONDecodeError):
        return RowError(
            "broken JSON at column {column}: {reason}. A file holds one {{…}} per line, or one list [{{…}}, …]",
            column=error.colno,
            reason=error.msg,
        )
    if isinstance(error, RecursionError):
        return RowError(tr("the JSON is nested too deeply. Correct or remove the row"))
    return RowError("broken JSON: {reason}. Correct or remove the row", reason=error)
