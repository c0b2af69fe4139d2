"""What `data.too_long` makes of a conversation or text that is longer than `data.max_length`."""

from collections.abc import Iterator, Sequence
from itertools import chain

from toolkit.data.formats import Conversation
from toolkit.data.tokenize_workers import PartCounts, RowPosition, trainable, with_first_untrained
from toolkit.messages import tr
from toolkit.sample_types import ChatEncoder, Encoded, Message


def turns(messages: Sequence[Message]) -> tuple[list[Message], list[list[Message]]]:
    """Return the system messages at the beginning, and the turns after them: each a user's messages and the replies."""
    start = next((index for index, message in enumerate(messages) if message["role"] != "system"), len(messages))
    parts: list[list[Message]] = []
    previous_role = ""
    for message in messages[start:]:
        if not parts or (message["role"] == "user" and previous_role != "user"):
            parts.append([])
        parts[-1].append(message)
        previous_role = message["role"]
    return list(messages[:start]), parts


class Shortener:
    """Makes samples of at most `limit` tokens of what has more."""

    def __init__(self, encoder: ChatEncoder, limit: int) -> None:
        self.encoder, self.limit = encoder, limit

    def truncated(self, conversation: Conversation, encoded: Encoded, counts: PartCounts) -> list[Encoded]:
        """Return [sample] shortened to `data.max_length`, [] if nothing that is trained is left; add to `counts` what
        is taken away. Of a text, and of what is only read, the beginning is left; of a conversation its newest turns,
        or if the newest turn alone is too long, the beginning of that.
        """
        ids, trained = encoded
        turns_dropped = 0
        if conversation.is_input_only:
            end = self.encoder.after_text if conversation.is_text else ()
            ids = [*ids[: self.limit - len(end)], *end]
            trained = trained[-self.limit :]  # the mask marks the last token alone, now as before
        elif not conversation.is_text:
            system, parts = turns(conversation.messages)
            num_turns, newest = self._most_turns(conversation, system, parts, from_end=True)
            if newest is None and len(parts) > 1:  # the newest turn alone, which is cut below
                newest = self.encoder.encode([*system, *parts[-1]], conversation.tools)
            ids, trained = newest or encoded
            turns_dropped = len(parts) - max(num_turns, 1)  # of the newest turn at least the beginning is left
        is_cut = conversation.is_input_only or len(ids) > self.limit
        ids, trained = ids[: self.limit], trained[: self.limit]
        if not any(trained):
            return []
        counts.truncated += 1
        counts.turns_dropped += turns_dropped
        counts.cut += is_cut
        return [(ids, trained)]

    def _most_turns(
        self, conversation: Conversation, system: list[Message], parts: list[list[Message]], from_end: bool = False
    ) -> tuple[int, Encoded | None]:
        """Return (how many of the turns `parts` fit into `data.max_length` after the system messages, their encoding or
        None if not even one fits), counted from the first turn or from the last. By bisection, as encoding is slow.
        """
        low, high, best = 0, len(parts), None
        while low < high:
            count = (low + high + 1) // 2
            some_turns = parts[len(parts) - count :] if from_end else parts[:count]
            encoded = self.encoder.encode([*system, *chain.from_iterable(some_turns)], conversation.tools)
            if len(encoded[0]) <= self.limit:
                low, best = count, encoded
            else:
                high = count - 1
        return low, best

    def split(
        self, conversation: Conversation, encoded: Encoded, row: RowPosition, counts: PartCounts
    ) -> list[Encoded]:
        """Return the samples into which a conversation that is too long is split; each trained token is trained in one
        of them. If only the newest turn is trained, it is one sample, of the newest turns that fit. `row`: the row's
        position, for `counts`, where tokens that no sample trains count as dropped.
        """
        system, parts = turns(conversation.messages)
        earlier = chain.from_iterable(parts[:-1])
        trains_earlier = any(message.get("loss", message["role"] == "assistant") for message in earlier)
        if conversation.is_text:
            samples = self._windows(encoded)
        elif trains_earlier and not self.encoder.only_last:
            samples = self._turn_windows(conversation)
        else:
            _, newest = self._most_turns(conversation, system, parts, from_end=True)
            samples = iter([newest]) if newest else self._windows(encoded)
        usable = [sample for sample in map(trainable, samples) if sample]
        _, trained = encoded
        num_to_train = sum(trained[1:])  # the first token of a sample is never trained
        if num_to_train > sum(sum(mask) for _, mask in usable):
            counts.drop(tr("longer than data.max_length = {limit}", limit=self.limit), row)
        counts.split += len(usable) > 1
        return usable

    def _turn_windows(self, conversation: Conversation) -> Iterator[Encoded]:
        """Yield samples that together hold all turns of a conversation, each as many whole turns as fit into
        `data.max_length`; a turn that is too long alone is cut into windows of tokens.
        """
        system, turns_left = turns(conversation.messages)
        while turns_left:
            count, window = self._most_turns(conversation, system, turns_left)
            if window is None:
                yield from self._windows(self.encoder.encode([*system, *turns_left[0]], conversation.tools))
            else:
                yield window
            turns_left = turns_left[max(count, 1) :]

    def _windows(self, encoded: Encoded) -> Iterator[Encoded]:
        """Yield pieces of a sample of at most `data.max_length` tokens, cut after an answer where one ends; none if the
        encoder's samples cannot be cut. Each begins with the last token of the piece before, to predict the next from.
        """
        ids, trained = encoded
        start = 0
        while self.encoder.can_cut and start < len(ids) - 1:
            stop = start + self.limit
            if stop < len(ids):  # rather after the last answer that ends in the piece
                ends_of_answers = (i for i in range(stop, start + 1, -1) if trained[i - 1] and not trained[i])
                stop = next(ends_of_answers, stop)
            yield with_first_untrained(ids[start:stop], trained[start:stop])
            start = stop - 1
