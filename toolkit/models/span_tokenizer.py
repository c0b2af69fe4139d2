"""Tokenizes rendered conversations: control strings that people wrote stay text, and spans of characters become masks.

Control strings in messages, such as `<|user|>`, are broken up by characters that keep them from becoming tokens.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from toolkit.sample_types import Encoded

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from toolkit.models.answer_spans import Openings
    from toolkit.models.whole_texts import WholeTexts

Span = tuple[int, int]
"""Index of an answer's first character in the text of a conversation, and of the one after its last, end included."""
MERGED_CHARS = 32
"""Characters before and after a border that may change how a tokenizer splits the text there."""
# A token that is searched in the raw text is broken up by a character that the normalizer drops; one that is searched
# in the normalized text, by a character that the pre-tokenizer drops.
_BREAK_RAW, _BREAK_NORMALIZED = "\ufdd0", "\ufdd1"
SPLIT = _BREAK_NORMALIZED
"""A border in a text: `Shield.backend` drops it, and tokenizes the text before and after it separately."""
BREAKS = re.compile(f"[{_BREAK_RAW}{_BREAK_NORMALIZED}]")

_Value = TypeVar("_Value")


class Shield:
    """Breaks up control strings in messages: special tokens, and the added tokens `turn_marks` around turns."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", turn_marks: Iterable[str]) -> None:
        self._tokenizer = tokenizer
        added = {token.content: token for token in tokenizer.added_tokens_decoder.values()}
        special_texts = {text for text, token in added.items() if token.special}
        control = {*tokenizer.all_special_tokens, *turn_marks} | special_texts
        # A token of a single character cannot be broken up; no known tokenizer has one that is special.
        self._breaks = {
            text: _BREAK_NORMALIZED if text in added and added[text].normalized else _BREAK_RAW
            for text in control
            if len(text) > 1
        }
        self._control = re.compile(any_of(self._breaks))
        # Most texts have none: a search for the first two characters is much faster than for some hundred tokens.
        self._hint = re.compile(any_of({text[:2] for text in self._breaks}))
        self._added = re.compile(f"({any_of(added)})")

    def cover(self, value: _Value) -> _Value:
        """Return messages or tools with every control string in them broken up; the same object if there is none."""
        return self._cover(value) if self._holds_control(value) else value

    def control_at(self, text: str, position: int = 0) -> str:
        """Return the control string at a position of a text, "" if there is none."""
        control = self._control.match(text, position)
        return control[0] if control else ""

    def _holds_control(self, value: Any) -> bool:
        """Whether a JSON value has a control string in one of its texts or keys."""
        if isinstance(value, str):
            return self._hint.search(value) is not None and self._control.search(value) is not None
        if isinstance(value, dict):
            return any(self._holds_control(inner) for pair in value.items() for inner in pair)
        return isinstance(value, (list, tuple)) and any(self._holds_control(inner) for inner in value)

    def _cover(self, value: Any) -> Any:
        """Return a copy of a JSON value in which every control string of its texts and keys is broken up."""
        if isinstance(value, str):
            # The break follows each character of a control string.
            return self._control.sub(lambda match: "".join(char + self._breaks[match[0]] for char in match[0]), value)
        if isinstance(value, dict):
            return {self._cover(key): self._cover(inner) for key, inner in value.items()}
        return [self._cover(inner) for inner in value] if isinstance(value, (list, tuple)) else value

    @cached_property
    def backend(self) -> Any:
        """A copy of a fast tokenizer's backend that drops the characters which break control strings up."""
        from tokenizers import Tokenizer, normalizers, pre_tokenizers

        copy = Tokenizer.from_str(self._tokenizer.backend_tokenizer.to_str())
        drop = normalizers.Replace(_BREAK_RAW, "")
        copy.normalizer = drop if copy.normalizer is None else normalizers.Sequence([drop, copy.normalizer])
        split = pre_tokenizers.Split(_BREAK_NORMALIZED, "removed")
        pre_tokenizer = copy.pre_tokenizer
        order = [split] if pre_tokenizer is None else [split, pre_tokenizer]
        if isinstance(pre_tokenizer, pre_tokenizers.Metaspace):  # else it would put a blank before each part
            order.reverse()
        copy.pre_tokenizer = pre_tokenizers.Sequence(order)
        copy.no_padding()
        copy.no_truncation()
        copy.encode_special_tokens = False
        return copy

    def slow_ids(self, text: str) -> list[int]:
        """Return the ids of a rendered text by a slow tokenizer, which tokenizes what is between added tokens."""
        ids: list[int] = []
        for part in filter(None, self._added.split(text)):
            if self._added.fullmatch(part):
                ids.append(int(self._tokenizer.convert_tokens_to_ids(part)))
                continue
            text_without_breaks = BREAKS.sub("", part)
            ids += self._tokenizer(
                text_without_breaks, add_special_tokens=False, split_special_tokens=True, verbose=False
            )["input_ids"]
        return ids

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "backend"}


class SpanTokenizer:
    """Tokenizes texts that are covered by `shield`, and finds the tokens of spans of characters.

    A fast tokenizer tokenizes the text between added tokens separately. So texts are split before the control token
    that opens answers, a piece that several texts have is tokenized once, and a span after an opening is found among
    the ids of its piece, which is faster than by the offsets of each token.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        openings: "Openings | None",
        shield: Shield | None = None,
        call_ends: Iterable[str] = (),
    ) -> None:
        """`call_ends`: tokens with which a text may end in place of the end token."""
        self.tokenizer, self.shield = tokenizer, shield or Shield(tokenizer, ())
        # Looked up once: each property of a tokenizer takes microseconds.
        self.end, self.end_id = str(tokenizer.eos_token), int(tokenizer.eos_token_id)
        self.last_ids = {self.end_id, *map(int, tokenizer.convert_tokens_to_ids([*call_ends]))}
        self.mark = ""
        """The control token that texts are split before, "" if they are not."""
        self.opening_ids: dict[str, list[int]] = {}
        self.closing_ids: dict[str, int] = {}
        if tokenizer.is_fast and openings:
            self._choose_mark(openings)

    def _choose_mark(self, openings: "Openings") -> None:
        """Look up the ids of openings and endings; set `mark` if all openings begin with the same added token, at which
        texts can be split before they are tokenized. Not if the tokenizer matches it in normalized text or strips space
        or looks at letters around it, nor if it is a part of another added token: a split would give other ids.
        """
        backend = self._backend()
        added = {token.content: token for token in backend.get_added_tokens_decoder().values()}
        self.opening_ids = {text: backend.encode(text, add_special_tokens=False).ids for text in openings.texts}
        self.closing_ids = {text: backend.token_to_id(text) for text in openings.closings if text in added}
        self._closings = re.compile(any_of(self.closing_ids))
        first = self.opening_ids[openings.texts[0]][:1]  # [] where a file's settings make nothing of any text
        mark = added.get(backend.id_to_token(first[0])) if first else None
        if mark is None or mark.normalized or mark.lstrip or mark.rstrip or mark.single_word:
            return
        is_alone = not any(mark.content in content and content != mark.content for content in added)
        if is_alone and all(text.startswith(mark.content) for text in openings.texts):
            self.mark = mark.content

    @cached_property
    def whole_texts(self) -> "WholeTexts":
        """What encodes texts in which no control token opens the answers, or by a slow tokenizer."""
        from toolkit.models.whole_texts import WholeTexts

        return WholeTexts(self.tokenizer, self.shield, self.end_id, self.last_ids)

    def encode_many(self, texts: Sequence[str], spans: Sequence[Sequence[Span]]) -> list[Encoded]:
        """Return the ids of each text and the mask of those in its `spans`. If the last span ends the text, both end
        with the end token: what the template writes after it (a newline, mostly) is dropped, as generation has stopped.
        """
        if not self.tokenizer.is_fast:
            return [
                self.whole_texts.encode_slowly(*text_and_spans) for text_and_spans in zip(texts, spans, strict=True)
            ]
        encoded: dict[int, Encoded] = {}
        is_covered = [BREAKS.search(text) is not None for text in texts]
        for covered_texts in (False, True):  # those with breaks need the backend that drops them
            indices = [index for index, covered in enumerate(is_covered) if covered is covered_texts]
            if not indices:
                continue
            backend = self.shield.backend if covered_texts else self._backend()
            in_pieces = self._encode_in_pieces(backend, [texts[n] for n in indices], [spans[n] for n in indices])
            pairs = zip(indices, in_pieces, strict=True)
            encoded |= {index: ids_and_mask for index, ids_and_mask in pairs if ids_and_mask is not None}
            undivided = [index for index in indices if index not in encoded]  # no opening precedes one of their spans
            if undivided:
                by_offsets = self.whole_texts.encode_by_offsets(
                    backend, [texts[n] for n in undivided], [spans[n] for n in undivided]
                )
                encoded |= zip(undivided, by_offsets, strict=True)
        return [encoded[index] for index in range(len(texts))]

    def _backend(self) -> Any:
        backend = self.tokenizer.backend_tokenizer
        backend.no_padding()
        backend.no_truncation()
        backend.encode_special_tokens = False  # a template writes them as text
        return backend

    def _encode_in_pieces(
        self, backend: Any, texts: Sequence[str], spans: Sequence[Sequence[Span]]
    ) -> Iterator[Encoded | None]:
        """Yield ids and mask of each text; None where a span follows no opening (`mark` and what leads to answers)."""
        if not self.mark:
            yield from [None] * len(texts)
            return
        pieces_of_texts = []
        for text in texts:
            before, *pieces = text.split(self.mark)  # as the tokenizer does; a piece of several texts is encoded once
            pieces_of_texts.append([before, *(self.mark + piece for piece in pieces)])
        different = list(dict.fromkeys(piece for pieces in pieces_of_texts for piece in pieces))
        encodings = backend.encode_batch_fast(different, add_special_tokens=False)
        ids_of = {piece: encoding.ids for piece, encoding in zip(different, encodings, strict=True)}
        for text, text_spans, pieces in zip(texts, spans, pieces_of_texts, strict=True):
            yield self._join_pieces(text, text_spans, [(piece, ids_of[piece]) for piece in pieces])

    def _join_pieces(self, text: str, spans: Sequence[Span], pieces: Sequence[tuple[str, list[int]]]) -> Encoded | None:
        """Return a text's ids and mask from its pieces and their ids; None where no opening precedes a span."""
        is_whole = spans == [(0, len(text))]  # a plain text, all of which is trained
        joined: list[int] = []
        mask: list[bool] = []
        position, remaining = 0, list(reversed(() if is_whole else spans))  # the next one last
        end = 0  # of the last span, in `joined`
        for piece, ids in pieces:
            piece_end, num_before = position + len(piece), len(joined)
            joined += ids
            mask += [is_whole] * len(ids)
            if remaining and remaining[-1][0] < piece_end:  # the next span begins in this piece
                begin, stop = remaining.pop()
                trained = self._trained_ids(piece, ids, begin - position, stop - position)
                if trained is None:
                    return None
                start, end = num_before + trained[0], num_before + trained[1]
                mask[start:end] = [True] * (end - start)
            position = piece_end
        if remaining or (is_whole and not text.endswith(self.end)):  # a span is left, or the end token is missing
            return None
        if spans and spans[-1][1] == len(text) and not is_whole:  # nothing follows its ids but an end token
            del joined[end:], mask[end:]
            if joined[-1] not in self.last_ids:
                joined, mask = [*joined, self.end_id], [*mask, True]
        return joined, mask

    def _trained_ids(self, piece: str, ids: list[int], begin: int, stop: int) -> tuple[int, int] | None:
        """Return the indices of the first id of the span `begin`:`stop` of a piece's characters, and of the one after
        the last; None if the piece does not begin with an opening of that length, or the span has another end.
        """
        opening = next((text for text in self.opening_ids if len(text) == begin and piece.startswith(text)), "")
        start = len(self.opening_ids.get(opening, ()))
        if not start or ids[:start] != self.opening_ids[opening]:
            return None
        control = self._closings.search(piece, begin)  # the token that ends the answer, or begins the next turn
        if control is None:
            return (start, len(ids)) if stop == len(piece) else None
        is_end, after = control[0] == self.end, control.end()
        # Such as a line break that the template writes after the end token.
        ends_with_more = is_end and after < stop <= len(piece) and self.end not in piece[after:stop]
        if stop not in control.span() and not ends_with_more:
            return None
        # A span may leave out the end token that follows it.
        closing = ids.index(self.closing_ids[control[0]], start)
        return start, closing + 1 if is_end or after <= stop else closing

    def merges(self, prompt: str, answer: str) -> bool:
        """Whether a prompt that ends with `prompt` would have other tokens if the answer followed in the same text."""
        is_separated = prompt.endswith("\n") and not answer[:1].isspace()  # with a line break only white space merges
        if not self.tokenizer.is_fast or not prompt or is_separated:
            return False
        backend, beginning = self._backend(), self.shield.cover(answer[:MERGED_CHARS])
        prompt_ids = backend.encode(prompt, add_special_tokens=False).ids
        return backend.encode(prompt + beginning, add_special_tokens=False).ids[: len(prompt_ids)] != prompt_ids


def any_of(texts: Iterable[str]) -> str:
    """Return a regular expression that matches any of some texts, the longest first; without texts it never matches."""
    return "|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True)) or r"(?!)"
