"""Reads the rows of a JSON file that is one list, or an object with a list of rows."""

import codecs
import json
import re
from collections.abc import Collection, Generator
from contextlib import suppress
from pathlib import Path
from typing import IO, NoReturn

from toolkit.data.broken_json import json_error
from toolkit.data.readers import CHUNK_BYTES, LARGEST_LINE_BYTES, MEMBER, open_data_file
from toolkit.data.rows import DECODER, LARGEST_ROW_BYTES, LENIENT_DECODER, is_conversation
from toolkit.messages import DataError

_AFTER_ROWS = re.compile(rf"\s*(?:,\s*{MEMBER}\s*)*\}}")
"""What is around the rows in `{"version": 1, "data": [{…}, …], "count": 2}`."""
_SPACE = re.compile(r"[ \t\n\r]*")


def is_first_line_a_row(path: Path, columns: Collection[str]) -> bool:
    """Whether the first line of a file is an object that is a row: it has one of `columns` or a conversation, or other
    lines follow it. False for an object that ends in a later line.
    """
    with open_data_file(path) as (file, _), suppress(ValueError, RecursionError):
        row = json.loads(file.readline(LARGEST_LINE_BYTES))
        has_column = not row.keys().isdisjoint(columns)
        return has_column or any(map(is_conversation, row.values())) or bool(file.read(CHUNK_BYTES).strip())
    return False


class JsonListReader:
    """Yields line number and value of each item of a JSON array, with no more than an item and a megabyte in memory."""

    def __init__(self, file: IO[bytes], path: Path, start: int = 0) -> None:
        self.file, self.path = file, path
        self.start = start
        """Where the array begins, if it is the value of a key in an object."""
        self.decoder = codecs.getincrementaldecoder("utf-8")()
        self.text, self.at = "", 0  # what was read and not dropped yet, and the position in it
        self.at_end = False  # of the file
        self.column = 0  # of text[0]
        self.line, self.counted = 1, 0  # the line of text[counted]

    def items(self) -> Generator[tuple[int, object]]:
        """Yield (line number, value) of each item; a DataError at the first thing that is not JSON."""
        self._read_more()
        self.text = self.text.removeprefix("\ufeff")
        self.at = self.start
        self._skip_space()
        self.at += 1  # the opening bracket
        character = self._skip_space()
        while character != "]":
            yield self._line_of(self.at), self._value()
            character = self._skip_space()
            if character == ",":
                self.at += 1
                self._skip_space()
            elif character != "]":
                self._stop(json.JSONDecodeError("Expecting ',' or ']'", self.text, self.at))
        self.at += 1
        if self.start:
            self._end_of_object()
        if self._skip_space():
            self._stop(json.JSONDecodeError("Extra data", self.text, self.at))

    def _end_of_object(self) -> None:
        """Step over what follows the array in the enclosing object; a DataError if that is a second list of rows."""
        while len(self.text) - self.at < CHUNK_BYTES and not self.at_end:
            self._read_more()  # the pattern sees a megabyte of it, which is enough for some members
        match = _AFTER_ROWS.match(self.text, self.at)
        if match is None:
            raise DataError(
                "{path}:{line}: there is more than one list of rows in this object. Write each into a file of its own.",
                path=self.path,
                line=self._line_of(self.at),
            )
        self.at = match.end()

    def _value(self) -> object:
        """Parse the item at the current position and step over it. An item that strict JSON forbids (`DECODER` raises a
        ValueError of NaN and of a repeated key) is returned as its text (bytes), for which `parse_line` raises the
        error, so that other items can still be read.
        """
        decoder = DECODER
        while True:
            try:
                value, end = decoder.raw_decode(self.text, self.at)
            except json.JSONDecodeError as error:
                # An error near the end of what was read, or of a text without end, may be of an item that is cut off.
                may_be_cut_off = error.msg.startswith("Unterminated") or error.pos > len(self.text) - 64
                if self.at_end or not may_be_cut_off or len(self.text) - self.at > LARGEST_ROW_BYTES:
                    self._stop(error)
            except RecursionError as error:
                self._stop(error)
            except ValueError:
                decoder = LENIENT_DECODER  # to find where the item ends
                continue
            else:
                if end < len(self.text) or self.at_end:  # else more may follow: 12 of a number that is 123
                    start, self.at = self.at, end
                    return self.text[start:end].encode() if decoder is LENIENT_DECODER else value
            self._read_more()

    def _skip_space(self) -> str:
        """Step over white space and return the character after it, "" at the end of the file."""
        while True:
            match = _SPACE.match(self.text, self.at)
            self.at = match.end() if match else self.at
            if self.at < len(self.text) or self.at_end:
                return self.text[self.at : self.at + 1]
            self._read_more()

    def _read_more(self) -> None:
        """Drop the text before the position and read a chunk, at least as long as the text that remains: an item that a
        chunk cuts off is parsed again after each read, so chunks that grow keep the time linear. `line` and `column`
        count what is dropped. DataError if the file is not UTF-8.
        """
        self._line_of(self.at)  # counts the lines that are dropped
        newline = self.text.rfind("\n", 0, self.at)
        self.column = self.at - newline - 1 if newline >= 0 else self.column + self.at
        self.text, self.at, self.counted = self.text[self.at :], 0, 0
        chunk = self.file.read(max(CHUNK_BYTES, len(self.text)))
        self.at_end = not chunk
        try:
            self.text += self.decoder.decode(chunk, final=self.at_end)
        except UnicodeDecodeError as error:
            self._stop(error, self._line_of(len(self.text)) + error.object.count(b"\n", 0, error.start))

    def _line_of(self, position: int) -> int:
        """Return the file's line number, from 1, at a position of `text`, which must not decrease from call to call."""
        self.line += self.text.count("\n", self.counted, position)
        self.counted = position
        return self.line

    def _stop(self, error: ValueError | RecursionError, line: int = 0) -> NoReturn:
        """Raise a DataError with the file, the line (0: that of the error) and the reason of a parsing error."""
        if isinstance(error, json.JSONDecodeError):
            line = self._line_of(error.pos)
            error.colno += self.column if error.lineno == 1 else 0  # `text` may begin within a line
        location = f"{self.path}:{line or self._line_of(self.at)}"
        raise DataError("{place}: {reason}.", place=location, reason=json_error(error))
