"""What the data side knows of a tokenizer and of a model's way of writing conversations, and of `data.max_length`."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple, Protocol

from toolkit.config.schema import TooLong
from toolkit.data.formats import Conversation, Message, turns
from toolkit.messages import tr

Encoded = tuple[list[int], list[bool]]
"""Ids of one conversation, and for each whether the loss covers it."""


class ChatEncoder(Protocol):
    """Messages to token ids and to the mask of what is trained: the only place where text becomes tokens for training.
    `loss` at a message says whether it is trained, else the model family does; a plain text (role `text`) is trained
    as a whole, with an end token. Implementations can be pickled.
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
        """Return ids and mask of one conversation whose last message is the assistant's; or raise a RowError."""
        ...

    def encode_many(
        self,
        conversations: Sequence[Sequence[Mapping[str, Any]]],
        tools: Sequence[Sequence[Any] | None] | None = None,
    ) -> list[Encoded]:
        """Return `encode` of each; faster where the tokenizer works on batches."""
        ...


class FittedConversation(NamedTuple):
    """What became of one conversation."""

    samples: list[Encoded]
    """What goes into the cache, each at most max_length tokens."""
    left_out: str = ""
    """Why nothing (or not all) of it could be used, "" if all is well."""
    truncated: bool = False
    """Whether turns were left out."""
    split: bool = False
    """Whether it became several samples."""


class LengthRule:
    """`data.too_long` for one encoder."""

    def __init__(self, encoder: ChatEncoder, max_length: int, too_long: TooLong) -> None:
        self.encoder, self.limit, self.too_long = encoder, max_length, too_long

    def fit(self, conversation: Conversation, encoded: Encoded) -> FittedConversation:
        """Return what can be used of a conversation, nothing if none is trained; RowError if it cannot be encoded."""
        if len(encoded[0]) <= self.limit:
            return _fitted(encoded)
        if self.too_long is TooLong.truncate:
            return self._truncate(conversation, encoded)
        if self.too_long is TooLong.split:
            return self._split(conversation, encoded)
        return FittedConversation([], tr("longer than data.max_length = {limit}", limit=self.limit))

    def _truncate(self, conversation: Conversation, encoded: Encoded) -> FittedConversation:
        """Leave out the oldest turns; of a plain text the end, so that its beginning stays one."""
        if conversation.is_text:
            cut = _first_unmarked(encoded[0][: self.limit], encoded[1][: self.limit])
            return FittedConversation([cut], truncated=True)
        shorter = self._most_turns(conversation, *turns(conversation.messages), newest=True)[1]
        if shorter is None:
            reason = tr("newest turn alone longer than data.max_length = {limit}", limit=self.limit)
            return FittedConversation([], reason)
        return _fitted(shorter)._replace(truncated=True)

    def _most_turns(
        self, conversation: Conversation, system: list[Message], parts: list[list[Message]], newest: bool = False
    ) -> tuple[int, Encoded | None]:
        """Return how many of the first (or newest) turns fit after the system message, by bisection, and their ids."""
        low, high, best = 0, len(parts), None
        while low < high:
            middle = (low + high + 1) // 2
            chosen = parts[len(parts) - middle :] if newest else parts[:middle]
            encoded = self.encoder.encode([*system, *chain.from_iterable(chosen)], conversation.tools)
            if len(encoded[0]) <= self.limit:
                low, best = middle, encoded
            else:
                high = middle - 1
        return low, best

    def _split(self, conversation: Conversation, encoded: Encoded) -> FittedConversation:
        """Make several samples, so that each trained token is in exactly one of them."""
        if conversation.is_text:
            samples = list(self._windows(encoded))
        elif self.encoder.only_last:
            newest = self._most_turns(conversation, *turns(conversation.messages), newest=True)[1]
            samples = [newest] if newest else list(self._windows(encoded))
        else:
            samples = list(self._turn_windows(conversation))
        kept = [sample for sample in map(_usable, samples) if sample]
        lost = sum(encoded[1][1:]) - sum(sum(mask) for _, mask in kept)
        reason = tr("longer than data.max_length = {limit}", limit=self.limit) if lost > 0 else ""
        return FittedConversation(kept, reason, split=len(kept) > 1)

    def _turn_windows(self, conversation: Conversation) -> Iterator[Encoded]:
        """Yield samples of whole turns, as many as fit; of a turn that is too long, windows of tokens."""
        system, rest = turns(conversation.messages)
        while rest:
            count, found = self._most_turns(conversation, system, rest)
            if found is None:
                yield from self._windows(self.encoder.encode([*system, *rest[0]], conversation.tools))
            else:
                yield found
            rest = rest[max(count, 1) :]

    def _windows(self, encoded: Encoded) -> Iterator[Encoded]:
        """Yield pieces of the ids; each begins with the last token of the one before it, as context for the next."""
        ids, trained = encoded
        if not self.encoder.can_cut:
            return
        for start in range(0, len(ids) - 1, self.limit - 1):
            yield _first_unmarked(ids[start : start + self.limit], trained[start : start + self.limit])


def _fitted(encoded: Encoded) -> FittedConversation:
    kept = _usable(encoded)
    return FittedConversation([kept]) if kept else FittedConversation([], tr("no token the loss covers"))


def _usable(encoded: Encoded) -> Encoded | None:
    """Return a sample if anything in it is trained; not its first token, which nothing before it could predict."""
    ids, trained = _first_unmarked(*encoded)
    return (ids, trained) if any(trained) else None


def _first_unmarked(ids: list[int], trained: list[bool]) -> Encoded:
    if trained and trained[0]:
        trained = [False, *trained[1:]]
    return ids, trained
