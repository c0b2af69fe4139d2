"""What the data side knows of a tokenizer and of a model's way of writing conversations."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

Encoded = tuple[list[int], list[bool]]
"""Ids of one conversation, and for each whether the loss covers it."""


class ChatEncoder(Protocol):
    """Messages to token ids and to the mask of what is trained: the only place where text becomes tokens for training.

    Implementations can be pickled. `toolkit.models.load_chat_encoder` gives a model's own.
    """

    fingerprint: str
    """Changes whenever any ids or mask could change."""
    vocab_size: int
    """Every id is below it."""

    def encode(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None) -> Encoded:
        """Return ids and mask of one conversation whose last message is the assistant's.

        Raises:
            RowError: this conversation cannot be encoded.
        """
        ...

    def encode_many(self, conversations: Sequence[Sequence[Mapping[str, Any]]]) -> list[Encoded]:
        """Return `encode` of each; faster where the tokenizer works on batches."""
        ...
