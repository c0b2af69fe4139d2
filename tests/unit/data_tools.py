"""What the data tests share: files, a run, and an encoder whose ids can be worked out by hand."""

import json
from collections.abc import Sequence
from pathlib import Path

from toolkit.config.schema import RunConfig, SourceConfig
from toolkit.data.conversation import Message
from toolkit.data.encode import Encoded
from toolkit.errors import RowError

END = 1


class ByteEncoder:
    """Each byte is its value + 2, an end token follows the answer; the last message is trained."""

    def __init__(self, vocab_size: int = 258) -> None:
        self.fingerprint, self.vocab_size = "bytes", vocab_size
        self.calls = 0

    def encode(self, messages: Sequence[Message]) -> Encoded:
        """Return ids and mask."""
        if "REFUSED" in messages[-1]["content"]:
            raise RowError("refused by the encoder")
        prompt = [byte + 2 for message in messages[:-1] for byte in message["content"].encode()]
        answer = [byte + 2 for byte in messages[-1]["content"].encode()] + [END]
        return prompt + answer, [False] * len(prompt) + [True] * len(answer)

    def encode_many(self, conversations: Sequence[Sequence[Message]]) -> list[Encoded]:
        """Return `encode` of each."""
        self.calls += 1
        return [self.encode(messages) for messages in conversations]


class UntrainedEncoder(ByteEncoder):
    """Marks nothing as trained."""

    def encode(self, messages: Sequence[Message]) -> Encoded:
        """Return ids and an empty mask."""
        ids, trained = super().encode(messages)
        return ids, [False] * len(trained)


def write_rows(path: Path, rows: Sequence[object]) -> str:
    """Write JSONL and return the path as text."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def pairs(count: int, length: int = 3) -> list[dict[str, str]]:
    """Return rows whose answers are all different."""
    return [{"prompt": f"q{number}", "response": f"{number:0{length}d}"} for number in range(count)]


def run_config(folder: Path, *paths: str) -> RunConfig:
    """Return a run over data files, with its cache in the folder."""
    cfg = RunConfig()
    cfg.prepare.dir = str(folder / "cache")
    cfg.data.sources = [SourceConfig(path=path) for path in paths]
    return cfg
