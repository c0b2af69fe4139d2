"""Encodes whole texts, where no control token opens the answers at which a text could be split: spans are found by the
tokenizer's offsets, and without offsets (a slow tokenizer) by the ids of beginnings of the text.
"""

from collections.abc import Container, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from toolkit.models.span_tokenizer import BREAKS, SPLIT, Shield, Span
from toolkit.sample_types import Encoded

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class WholeTexts:
    """Encodes texts for a `SpanTokenizer`, which has split none of them. `last_ids`: with which a text may end."""

    def __init__(
        self, tokenizer: "PreTrainedTokenizerBase", shield: Shield, end_id: int, last_ids: Container[int]
    ) -> None:
        self.tokenizer, self.shield, self.end_id, self.last_ids = tokenizer, shield, end_id, last_ids

    def encode_by_offsets(self, backend: Any, texts: Sequence[str], spans: Sequence[Sequence[Span]]) -> list[Encoded]:
        """Return ids and mask of each text by a fast tokenizer's backend."""
        batch = backend.encode_batch(texts, add_special_tokens=False)
        return [
            self._mask_by_offsets(*self._split_merged_borders(backend, encoding, text, text_spans))
            for encoding, text, text_spans in zip(batch, texts, spans, strict=True)
        ]

    def _split_merged_borders(
        self, backend: Any, encoding: Any, text: str, spans: Sequence[Span]
    ) -> tuple[Any, str, Sequence[Span]]:
        """Return an encoding, its text and its spans, in which the ids before each span are those of the prompt by
        itself, from which generation starts. A tokenizer would merge "Assistant: " and "yes" into ":", " yes".
        """
        borders = [begin for begin, _ in spans if begin and self._merges_across(backend, encoding, text, begin)]
        if not borders:
            return encoding, text, spans
        pieces = [text[begin:stop] for begin, stop in pairwise([0, *borders, len(text)])]
        # A span moves by one character for each border before it, which `SPLIT` now marks; that at its own beginning is
        # before it, one at its end is not.
        shifted = [
            (begin + sum(border <= begin for border in borders), stop + sum(border < stop for border in borders))
            for begin, stop in spans
        ]
        text = SPLIT.join(pieces)
        return self.shield.backend.encode(text, add_special_tokens=False), text, shifted

    def _merges_across(self, backend: Any, encoding: Any, text: str, border: int) -> bool:
        """Whether a token reaches across a border, or what follows the border changes the tokens before it."""
        token = encoding.char_to_token(border - 1)
        if token is None or text[border - 1].isspace():  # how white space is split depends on what follows it
            return not _begins_with(encoding.ids, backend.encode(text[:border], add_special_tokens=False).ids)
        while token < len(encoding) and (chars := encoding.token_to_chars(token)) and chars[0] < border:
            if chars[1] > border:
                return True
            token += 1
        return False

    def _mask_by_offsets(self, encoding: Any, text: str, spans: Sequence[Span]) -> Encoded:
        """Return ids and mask by the tokenizer's offsets."""
        num_tokens = len(encoding)
        tokens = [
            (_token_at(encoding, begin), num_tokens if stop == len(text) else _token_at(encoding, stop))
            for begin, stop in spans
        ]
        return self._mask_to_end(encoding.ids, tokens)

    def encode_slowly(self, text: str, spans: Sequence[Span]) -> Encoded:
        """Return ids and mask by a tokenizer without offsets: an index in the text corresponds to the number of ids
        that the text and its prefix up to there have in common.
        """
        is_covered, borders = BREAKS.search(text) is not None, [0]

        def tokens(part: str) -> list[int]:
            """Return the ids of a beginning of the text, tokenized separately before and after each of `borders`."""
            ids: list[int] = []
            for begin, stop in pairwise([*(border for border in borders if border < len(part)), len(part)]):
                if is_covered:
                    ids += self.shield.slow_ids(part[begin:stop])
                else:
                    ids += self.tokenizer(part[begin:stop], add_special_tokens=False, verbose=False)["input_ids"]
            return ids

        ids = tokens(text)
        for begin, _ in spans:  # split where the ids of the prompt by itself, from which generation starts, are others
            if not _begins_with(ids, tokens(text[:begin])):
                borders.append(begin)
                ids = tokens(text)

        def id_index(position: int) -> int:
            """Return how many ids the text and its beginning up to `position` have in common."""
            prefix_ids = tokens(text[:position])
            differs = (prefix_id != text_id for prefix_id, text_id in zip(prefix_ids, ids, strict=False))
            return next((index for index, is_other in enumerate(differs) if is_other), min(len(prefix_ids), len(ids)))

        return self._mask_to_end(ids, [(id_index(begin), id_index(stop)) for begin, stop in spans])

    def _mask_to_end(self, ids: list[int], spans: Sequence[Span]) -> Encoded:
        """Return ids and mask of trained `spans` of ids, each of which is cut after its end token, or lengthened by one
        that follows. If the last span ends the text, ids after it are cut off, and a missing end token is added.
        """
        end = self.end_id
        mask: list[bool] = []
        for begin, stop in spans:
            # A span may leave out the end token that follows it.
            last = stop + 1 if ids[stop : stop + 1] == [end] else stop
            if last == begin or ids[last - 1] != end:  # the template may write more after the end token: cut it off
                last = ids.index(end, begin, last) + 1 if end in ids[begin:last] else last
            mask += [False] * (begin - len(mask))  # between the spans
            mask += [True] * (last - begin)
        if spans and spans[-1][1] >= len(ids):
            ids = ids[: len(mask)]
            if ids[-1] not in self.last_ids:
                ids, mask = [*ids, end], [*mask, True]
        return ids, mask + [False] * (len(ids) - len(mask))


def _begins_with(ids: list[int], prompt: list[int]) -> bool:
    return ids[: len(prompt)] == prompt


def _token_at(encoding: Any, position: int) -> int:
    """Return the first token that begins at or after a character position. A token across it (one may join the end of
    an answer and what follows) belongs to what precedes.
    """
    length = len(encoding)
    for index in range(position, position + 8):  # characters that the tokenizer drops belong to no token
        token = encoding.char_to_token(index)
        if token is not None:
            while token < length and encoding.token_to_chars(token)[0] < position:
                token += 1
            return int(token)
    return length
