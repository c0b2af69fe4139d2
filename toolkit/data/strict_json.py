"""JSON as data files hold it: strict values, long arrays read piece by piece, and what is wrong in a person's words."""

import codecs
import json
import re
from collections.abc import Generator
from typing import IO, Any, NoReturn

from toolkit.errors import RowError
from toolkit.messages import tr

BOM = b"\xef\xbb\xbf"
_CHUNK_BYTES = 1 << 20
LARGEST_ROW_BYTES = 1 << 24
"""Of one row, as JSON: to tokenise it takes about a hundred times as much memory."""
_SPACE = re.compile(r"[ \t\n\r]*")
_HALF = re.compile(rb"\\u[dD][89a-fA-F]")


def parse_line(line: bytes) -> object:
    """Return the value of one line.

    Raises:
        RowError: it is too long, not UTF-8, not JSON, or names a key twice.
    """
    _check_size(len(line))
    try:
        value = DECODER.decode(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise reason(error) from None
    if _HALF.search(line):
        check_characters(value)
    return value


def check_characters(value: object) -> None:
    r"""Refuse halves of characters (an escape such as \ud83d alone), which no tokenizer can encode, in texts and keys.

    Raises:
        RowError: there is one; or a byte that was not UTF-8, which Python calls by such a half; or the row is too long.
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
        raise reason(error) from None


def _check_size(size: int) -> None:
    if size > LARGEST_ROW_BYTES:
        raise RowError(
            "a row of {size} MiB; at most {most} MiB can be tokenised at once. Split its text over several rows",
            size=size >> 20,
            most=LARGEST_ROW_BYTES >> 20,
        )


def array_rows(file: IO[bytes]) -> Generator[tuple[int, object]]:
    """Yield line number and value of each item of a JSON array, holding no more of it than an item and a megabyte.

    Raises:
        BrokenArray: what is broken cannot be stepped over.
    """
    return _ArrayReader(file).items()


class BrokenArray(Exception):
    """A JSON array that cannot be read on."""

    def __init__(self, line: int, error: RowError) -> None:
        super().__init__(str(error))
        self.line, self.error = line, error


class _ArrayReader:
    """Keeps the part of the text that is not used yet, and where in the file it begins."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        self.decoder = codecs.getincrementaldecoder("utf-8")()
        self.text, self.at, self.at_end = "", 0, False
        self.line, self.column = 1, 0  # of text[0]

    def items(self) -> Generator[tuple[int, object]]:
        """Yield line number and value of each item."""
        self._more()
        self.text = self.text.removeprefix("\ufeff")
        self._skip("[")
        first = True
        while True:
            if self._next() == "]" and first:
                break
            line = self._line_of(self.at)
            yield line, self._value()
            first = False
            mark = self._next()
            if mark == "]":
                break
            if mark != ",":
                self._stop(json.JSONDecodeError("Expecting ',' or ']'", self.text, self.at))
            self.at += 1
        self.at += 1
        if self._next():
            self._stop(json.JSONDecodeError("Extra data", self.text, self.at))

    def _value(self) -> object:
        """Return the value at the present position and step over it."""
        while True:
            try:
                value, end = DECODER.raw_decode(self.text, self.at)
            except json.JSONDecodeError as error:
                # Cut off, or broken? Broken is what is wrong well before the end of what has been read.
                cut = error.msg.startswith("Unterminated") or error.pos > len(self.text) - 64
                if self.at_end or not cut or len(self.text) - self.at > LARGEST_ROW_BYTES:
                    self._stop(error)
            except (ValueError, RecursionError) as error:
                self._stop(error)
            else:
                if end < len(self.text) or self.at_end:
                    self.at = end
                    return value
            self._more()

    def _next(self) -> str:
        """Step over white space and return the character there, "" at the end of the file."""
        while True:
            match = _SPACE.match(self.text, self.at)
            self.at = match.end() if match else self.at
            if self.at < len(self.text) or self.at_end:
                return self.text[self.at : self.at + 1]
            self._more()

    def _skip(self, mark: str) -> None:
        if self._next() != mark:
            self._stop(json.JSONDecodeError(f"Expecting '{mark}'", self.text, self.at))
        self.at += 1

    def _more(self) -> None:
        """Read on; what is used already is let go. Reads grow with what is kept, so that no item is tried too often."""
        used = self.text[: self.at]
        breaks = used.count("\n")
        self.column = len(used) - used.rfind("\n") - 1 if breaks else self.column + len(used)
        self.line += breaks
        self.text, self.at = self.text[self.at :], 0
        block = self.file.read(max(_CHUNK_BYTES, len(self.text)))
        self.at_end = not block
        try:
            self.text += self.decoder.decode(block, final=self.at_end)
        except UnicodeDecodeError as error:
            self._stop(error, self._line_of(len(self.text)) + error.object.count(b"\n", 0, error.start))

    def _line_of(self, position: int) -> int:
        return self.line + self.text.count("\n", 0, position)

    def _stop(self, error: ValueError | RecursionError, line: int = 0) -> NoReturn:
        if isinstance(error, json.JSONDecodeError):
            line = self.line + error.lineno - 1
            error.colno += self.column if error.lineno == 1 else 0
        raise BrokenArray(line or self._line_of(self.at), reason(error))


def _refuse_constant(name: str) -> NoReturn:
    """Refuse NaN and Infinity, which Python's reader would take although JSON has no such numbers."""
    raise ValueError(tr("{name} is no JSON value", name=name))


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse a key that stands twice: Python's reader would keep the last value and say nothing."""
    whole = dict(pairs)
    if len(whole) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in whole if keys.count(key) > 1)
        raise ValueError(tr("the key '{key}' stands there twice", key=twice))
    return whole


DECODER = json.JSONDecoder(parse_constant=_refuse_constant, object_pairs_hook=_object)


def reason(error: ValueError | RecursionError) -> RowError:
    """Return why bytes could not be read as JSON; positions count from 1 within the line."""
    if isinstance(error, UnicodeDecodeError):
        content, start = error.object, error.start
        return RowError(
            "not UTF-8: byte 0x{byte} at position {position} of the line. If the file is in {encoding}, convert it "
            "with `iconv -f {encoding} -t UTF-8`",
            byte=f"{content[start]:02x}",
            position=start - content.rfind(b"\n", 0, start),
            encoding="UTF-16" if content[:2] in (b"\xff\xfe", b"\xfe\xff") else "GBK",
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
