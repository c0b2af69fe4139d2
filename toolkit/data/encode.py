"""What the data side knows of a tokenizer and of a model's way of writing conversations."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

Encoded = tuple[list[int], list[bool]]
"""Ids of one conversation, and for each whether the loss covers it."""


class ChatEncoder(Protocol):
    """Messages to token ids and to the mask of what is trained: the only place where text becomes tokens for training.

    Messages are those of `toolkit.data.conversation.Message`: `loss` at a message says whether it is trained, without
    it the model family's own way decides; a plain text (role `text`) is trained as a whole, with an end token.
    Implementations can be pickled. `toolkit.models.load_chat_encoder` gives a model's own.
    """

    fingerprint: str
    """Changes whenever any ids or mask could change."""
    vocab_size: int
    """Every id is below it."""
    only_last: bool
    """Whether only the last message of a conversation can be trained."""
    drops_system: bool
    """Whether the format has no place for a system message and leaves it out."""
    can_cut: bool
    """Whether a piece from the middle of a sample's ids is a sample that the model can learn from."""

    def encode(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None) -> Encoded:
        """Return ids and mask of one conversation whose last message is the assistant's.

        Raises:
            RowError: this conversation cannot be encoded.
        """
        ...

    def encode_many(
        self,
        conversations: Sequence[Sequence[Mapping[str, Any]]],
        tools: Sequence[Sequence[Any] | None] | None = None,
    ) -> list[Encoded]:
        """Return `encode` of each; faster where the tokenizer works on batches."""
        ...
