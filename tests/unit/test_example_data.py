"""The chat samples of examples/data, read as a recipe reads them."""

from pathlib import Path

import pytest

from toolkit.config.schema import RowFormat, SourceConfig
from toolkit.data.data_paths import files_of
from toolkit.data.detection import detect_format, first_row
from toolkit.data.formats import Conversation, RowReader
from toolkit.data.readers import block_bytes, blocks, rows_of
from toolkit.data.rows import as_object, parse_row

DATA = Path(__file__).parents[2] / "examples" / "data"
LANGUAGES = ("en", "zh")


def conversations(language: str) -> list[Conversation]:
    (path,) = files_of(SourceConfig(path=str(DATA / f"chat_{language}.jsonl")))
    read = []
    for block in blocks(path, block_bytes(path.stat().st_size)):
        row_format = detect_format(as_object(first_row(block)[1]), {})
        assert row_format is RowFormat.messages
        reader = RowReader(row_format, {})
        for _, line in rows_of(block):
            row = as_object(parse_row(line))
            assert reader.unused(row) == []
            read.append(reader.read(row))
    return read


@pytest.mark.parametrize("language", LANGUAGES)
def test_samples_are_complete_conversations(language: str) -> None:
    read = conversations(language)
    assert len(read) >= 120
    several = 0
    for conversation in read:
        roles = [message["role"] for message in conversation.messages]
        spoken = roles[1:] if roles[0] == "system" else roles
        assert spoken == ["user", "assistant"] * (len(spoken) // 2), conversation.messages[0]
        several += len(spoken) > 2
        for message in conversation.messages:
            assert message["content"].strip() == message["content"]
            assert "<|" not in message["content"]
    assert several >= 0.4 * len(read)


def test_no_conversation_occurs_twice() -> None:
    first_questions = [
        next(message["content"] for message in conversation.messages if message["role"] == "user")
        for language in LANGUAGES
        for conversation in conversations(language)
    ]
    assert len(set(first_questions)) == len(first_questions)


@pytest.mark.parametrize("language", LANGUAGES)
def test_readme_counts_the_samples(language: str) -> None:
    text = (DATA / "README.md").read_text(encoding="utf-8")
    count = len(conversations(language))
    assert f"`chat_{language}.jsonl` ({count}" in text
    assert f" {count} 条" in text
