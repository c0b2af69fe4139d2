"""What the data tests share: files, a run, and an encoder whose ids can be worked out by hand."""

import json
from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from toolkit.config.schema import RunConfig, SourceConfig
from toolkit.messages import RowError
from toolkit.sample_types import Encoded, Message

END = 1


class ByteEncoder:
    """Each byte is its value + 2, an end token follows each answer; what the assistant says is trained."""

    drops_system = drops_tools = False
    can_cut = True
    after_text: Sequence[int] = ()
    text_key: Sequence[int] = ()

    def __init__(self, vocab_size: int = 258, only_last: bool = False) -> None:
        self.fingerprint, self.vocab_size, self.only_last = "bytes", vocab_size, only_last
        self.calls = 0
        self.seen: list[tuple[list[Message], Any]] = []
        """Messages and tools of every conversation encoded."""

    def encode(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> Encoded:
        """Return ids and mask."""
        if "REFUSED" in messages[-1]["content"]:
            raise RowError("refused by the encoder")
        self.seen.append((list(messages), tools))
        ids: list[int] = []
        mask: list[bool] = []
        for message in messages:
            part = [byte + 2 for byte in message["content"].encode()]
            answers = message["role"] in ("assistant", "text")
            part += [END] * answers
            ids += part
            mask += [bool(message.get("loss", answers))] * len(part)
        return ids, mask

    def prompt(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> list[int]:
        """Return the ids of messages, and a colon, after which an answer would begin."""
        return [*self.encode(messages, tools)[0], ord(":") + 2]

    def divide(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> list[list[Message]]:
        """Return the conversation."""
        return [list(messages)]

    def encode_many(
        self, conversations: Sequence[Sequence[Message]], tools: Sequence[Sequence[Any] | None] | None = None
    ) -> list[Encoded]:
        """Return `encode` of each."""
        self.calls += 1
        given = tools or [None] * len(conversations)
        return [self.encode(*one) for one in zip(conversations, given, strict=True)]


class UntrainedEncoder(ByteEncoder):
    """Marks nothing as trained."""

    def encode(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> Encoded:
        """Return ids and an empty mask."""
        ids, trained = super().encode(messages, tools)
        return ids, [False] * len(trained)


def trained_stretches(ids: Sequence[int], trained: Sequence[bool]) -> list[list[int]]:
    """Return the ids of each stretch that is trained."""
    pairs = zip(ids, trained, strict=True)
    return [[token for token, _ in stretch] for kept, stretch in groupby(pairs, itemgetter(1)) if kept]


def text_of(ids: Sequence[int]) -> str:
    """Return the text of a `ByteEncoder`'s ids, with $ for the end token."""
    return b"".join(b"$" if token == END else bytes([token - 2]) for token in ids).decode(errors="replace")


def write_rows(path: Path, rows: Sequence[object]) -> str:
    """Write JSONL and return the path as text."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def pairs(count: int, length: int = 3) -> list[dict[str, str]]:
    """Return rows whose answers are all different."""
    return [{"prompt": f"q{number}", "response": f"{number:0{length}d}"} for number in range(count)]


def run_config(folder: Path, *paths: str) -> RunConfig:
    """Return a run over data files, with its cache in the folder and no validation split."""
    cfg = RunConfig()
    cfg.prepare.dir = str(folder / "cache")
    cfg.data.sources = [SourceConfig(path=path) for path in paths]
    cfg.data.validation_fraction = 0.0
    return cfg
