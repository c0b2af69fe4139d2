"""Texts with spans of characters to token ids with a mask: the second half of `toolkit.models.template_chat`."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from toolkit.models.shield import Shield

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Encoded = tuple[list[int], list[bool]]
Span = tuple[int, int]
"""First character of an answer, with its end, in the text of a conversation; and the one after its last."""


class SpanTokenizer:
    """Tokenises whole texts and says which tokens belong to spans of them.

    Args:
        tokenizer: any transformers tokenizer with an end-of-sequence token.
        frame: what always stands before an answer and after it, if that is known. With words before it that begin
            with a special token, answers are found among the ids themselves, several times as fast as by asking the
            tokenizer where each token stands in its text.
        shield: has covered the control strings in the texts' messages.
    """

    def __init__(
        self, tokenizer: "PreTrainedTokenizerBase", frame: tuple[str, str] | None, shield: Shield | None = None
    ) -> None:
        self.tokenizer, self.shield = tokenizer, shield or Shield(tokenizer, ())
        # Looked up once: a tokenizer takes microseconds to say.
        self.end, self.end_id = str(tokenizer.eos_token), int(tokenizer.eos_token_id)
        self.asks, self.ending = frame or ("", "")
        self.ask_ids: list[int] = []
        self.mark = ""
        """Text of the special token that `ask_ids` begin with."""
        if tokenizer.is_fast and self.asks and self.ending.startswith(self.end):
            backend = self._backend()
            ids = backend.encode(self.asks, add_special_tokens=False).ids
            mark = backend.get_added_tokens_decoder().get(ids[0]) if ids else None
            if mark is not None and self.asks.startswith(mark.content):
                self.ask_ids, self.mark = ids, mark.content

    def encode_many(self, texts: Sequence[str], spans: Sequence[Sequence[Span]]) -> list[Encoded]:
        """Return ids of each text and for each id whether it belongs to a span, up to the end token there.

        What a text holds after the end token of its last span (a newline, mostly) is left out: generation has stopped
        by then, so the model never sees it there. A span at the end of a text that has no end token gets one.
        """
        if not self.tokenizer.is_fast:
            return [self._slow(text, marks) for text, marks in zip(texts, spans, strict=True)]
        covered = [index for index, text in enumerate(texts) if self.shield.is_covered(text)]
        if not covered:
            return self._encode_fast(self._backend(), texts, spans)
        clean = sorted({*range(len(texts))} - {*covered})
        found: dict[int, Encoded] = {}
        for backend, chosen in ((self._backend(), clean), (self.shield.backend, covered)):
            encoded = self._encode_fast(backend, [texts[i] for i in chosen], [spans[i] for i in chosen])
            found |= dict(zip(chosen, encoded, strict=True))
        return [found[index] for index in range(len(texts))]

    def _encode_fast(self, backend: Any, texts: Sequence[str], spans: Sequence[Sequence[Span]]) -> list[Encoded]:
        found: dict[int, Encoded] = {}
        likely = [index for index, text in enumerate(texts) if self._is_framed(text, spans[index])]
        for index, one in zip(
            likely, backend.encode_batch_fast([texts[i] for i in likely], add_special_tokens=False), strict=True
        ):
            encoded = self._between(one.ids, texts[index], spans[index])
            if encoded:
                found[index] = encoded
        others = [index for index in range(len(texts)) if index not in found]
        for index, one in zip(
            others, backend.encode_batch([texts[i] for i in others], add_special_tokens=False), strict=True
        ):
            found[index] = self._by_offsets(one, texts[index], spans[index])
        return [found[index] for index in range(len(texts))]

    def _backend(self) -> Any:
        backend = self.tokenizer.backend_tokenizer
        backend.no_padding()
        backend.no_truncation()
        backend.encode_special_tokens = False  # a template writes them as text
        return backend

    def _is_framed(self, text: str, spans: Sequence[Span]) -> bool:
        """Return whether each span stands where the frame says, or is the whole text."""
        if spans == [(0, len(text))]:
            return text.endswith(self.end)
        if not self.ask_ids:
            return False
        for begin, stop in spans:
            end = text.find(self.end, begin)
            after = stop - end  # a span may leave out the end token that follows it
            if end < 0 or after not in (0, len(self.end), len(self.ending)) or not text.endswith(self.asks, 0, begin):
                return False
        return True

    def _between(self, ids: list[int], text: str, spans: Sequence[Span]) -> Encoded | None:
        """Return ids and mask of a framed text; None if its tokens do not stand as its characters do.

        As many tokens of the kind that precedes answers as there are such texts: then the n-th is the n-th. That the
        ids after it are the frame's own means that none of them reaches into the answer.
        """
        if spans == [(0, len(text))]:
            return ids, [True] * len(ids)
        if not spans:
            return ids, [False] * len(ids)
        first, length = self.ask_ids[0], len(self.ask_ids)
        if ids.count(first) != text.count(self.mark):
            return None
        mask: list[bool] = []
        place, seen = -1, 0
        for begin, _ in spans:
            for _ in range(text.count(self.mark, seen, begin)):
                place = ids.index(first, place + 1)
            seen = begin
            start = place + length
            if ids[place:start] != self.ask_ids:
                return None
            stop = ids.index(self.end_id, start) + 1
            mask += [False] * (start - len(mask))
            mask += [True] * (stop - start)
        if spans[-1][1] == len(text):
            return ids[: len(mask)], mask
        return ids, mask + [False] * (len(ids) - len(mask))

    def _by_offsets(self, encoding: Any, text: str, spans: Sequence[Span]) -> Encoded:
        """Return ids and mask by the places in the text that the tokenizer gives for each token."""
        whole = len(encoding)
        tokens = [
            (_token_at(encoding, begin), whole if stop == len(text) else _token_at(encoding, stop))
            for begin, stop in spans
        ]
        return self._ended(encoding.ids, tokens)

    def _slow(self, text: str, spans: Sequence[Span]) -> Encoded:
        """The same for a tokenizer that does not tell where its tokens stand: by what the texts' beginnings share."""

        def tokens(part: str) -> list[int]:
            if self.shield.is_covered(text):
                return self.shield.slow_ids(part)
            ids: list[int] = self.tokenizer(part, add_special_tokens=False, verbose=False)["input_ids"]
            return ids

        ids = tokens(text)

        def shared(position: int) -> int:
            beginning = tokens(text[:position])
            pairs = enumerate(zip(beginning, ids, strict=False))
            return next((index for index, (a, b) in pairs if a != b), min(len(beginning), len(ids)))

        return self._ended(ids, [(shared(begin), shared(stop)) for begin, stop in spans])

    def _ended(self, ids: list[int], spans: Sequence[Span]) -> Encoded:
        """Return ids and mask: what is trained of an answer goes up to its end token."""
        end = self.end_id
        mask: list[bool] = []
        for begin, stop in spans:
            # A span may leave out the end token that follows it.
            last = stop + 1 if ids[stop : stop + 1] == [end] else stop
            if last == begin or ids[last - 1] != end:
                last = ids.index(end, begin, last) + 1 if end in ids[begin:last] else last
            mask += [False] * (begin - len(mask))
            mask += [True] * (last - begin)
        if spans and spans[-1][1] >= len(ids):
            ids = ids[: len(mask)]
            if ids[-1] != end:
                ids, mask = [*ids, end], [*mask, True]
        return ids, mask + [False] * (len(ids) - len(mask))


def _token_at(encoding: Any, position: int) -> int:
    """Return the first token that begins at or after a character; one that straddles it belongs to what precedes."""
    length = len(encoding)
    for place in range(position, position + 8):  # characters that the tokenizer drops belong to no token
        token = encoding.char_to_token(place)
        if token is not None:
            while token < length and encoding.token_to_chars(token)[0] < position:
                token += 1
            return int(token)
    return length
