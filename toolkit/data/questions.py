"""The rows of a data file as questions for a model: what stands before the last answer, and that answer to compare."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from toolkit.config.schema import RowFormat, SourceConfig
from toolkit.data.conversation import Conversation, Message
from toolkit.data.files import block_bytes, files_of, rows_of
from toolkit.data.formats import RowReader, parse_row
from toolkit.data.sources import DataFile, read_blocks, total_bytes
from toolkit.errors import DataError, RowError
from toolkit.messages import tr


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """One row."""

    where: str
    """file:line."""
    messages: list[Message] = field(default_factory=list)
    """What the model is given; [] if the row cannot be used."""
    tools: list[Any] | None = None
    """What it may call."""
    reference: str | None = None
    """The row's own last answer; None if it has none."""
    error: str = ""
    """Why the row cannot be used."""


def question_files(source: SourceConfig) -> list[Path]:
    """Return the files that `read_questions` reads.

    Raises:
        DataError: there is none, or the format has no questions.
    """
    if source.format in (RowFormat.text, RowFormat.docstrings):
        raise DataError(tr("format = {format} holds no questions.", format=source.format.value))
    return files_of(source)


def read_questions(source: SourceConfig) -> Iterator[Question]:
    """Yield every row of a source in order, those that cannot be used too.

    Args:
        source: `path`, `format` and `columns` as for training data; here a row needs no answer.

    Raises:
        DataError: a file cannot be read, or belongs to no known format, or to one without questions.
    """
    files = [DataFile(path, 0, source.format, dict(source.columns)) for path in question_files(source)]
    for _, file, block in read_blocks(files, [0] * len(files), block_bytes(total_bytes(files))):
        if file.row_format is RowFormat.text:
            raise DataError(tr("{path}: rows of plain text hold no questions.", path=file.path))
        # Undecided where no row of the block can be parsed: each then says so itself.
        row_format = RowFormat.prompt_response if file.row_format is RowFormat.auto else file.row_format
        reader = RowReader(row_format, file.columns, answered=False)
        for offset, row in rows_of(block):
            where = f"{file.path}:{block.first + offset}"
            try:
                yield _question(where, reader.read(parse_row(row)))
            except RowError as error:
                yield Question(where=where, error=str(error))


def _question(where: str, conversation: Conversation) -> Question:
    """Return a row's question.

    Raises:
        RowError: nothing is asked.
    """
    messages: list[Message] = [
        {key: value for key, value in message.items() if key != "loss"} for message in conversation.messages
    ]
    reference = None
    if messages[-1]["role"] == "assistant":
        last = messages.pop()
        calls = last.get("tool_calls")
        reference = json.dumps(calls, ensure_ascii=False) if calls and not last["content"] else str(last["content"])
    if all(message["role"] == "system" for message in messages):
        raise RowError(tr("nothing is asked before the answer. Correct or remove the row"))
    return Question(where=where, messages=messages, tools=conversation.tools, reference=reference)
