"""Where the answers of a conversation are, in its text and in its token ids, by the control tokens around them.

A template opens each answer with a control token, and the next turn with another; what people write holds none, as
`Shield` breaks it up. That spares the renderings that `TemplateChatEncoder` compares, and the tokenizer's offsets.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from jinja2 import nodes

from toolkit.models.shield import BREAKS, SPLIT, Shield, any_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Encoded = tuple[list[int], list[bool]]
Span = tuple[int, int]
"""First character of an answer, with its end, in the text of a conversation; and the one after its last."""
_MOST_FORMS = 1 << 16
MERGED_CHARS = 32
"""So far a tokenizer is taken to look ahead when it splits what precedes an answer, and back."""


class Openings:
    """Finds the answers in a rendered conversation.

    Whether a template writes a message otherwise once others follow may depend on the message and on those. `forms` say
    of each message what that could be: its role, calls and texts, those of its neighbours and of what follows; of texts
    whether they are empty, begin or end with white space, and which of the strings that the template compares texts
    with they contain. A conversation's forms are trusted once comparing renderings found its answers where they are
    found here.
    """

    def __init__(
        self, openings: Iterable[str], leads: Iterable[str], ends: Iterable[str], templates: Iterable[nodes.Template]
    ) -> None:
        """`openings`: what the prompt for an answer ends with, beginning with a control token; of several that fit the
        first is taken. `leads`: control tokens that begin turns. `ends`: those that end answers. `templates`: parsed
        chat templates, whose constants `forms` looks for in texts.
        """
        self.texts = list(dict.fromkeys(openings))
        self._openings = re.compile("|".join(map(re.escape, self.texts)))
        self._leads = re.compile(any_of(leads))
        self.closings = {*leads, *ends}
        """What an answer ends with, or before."""
        self._constants = sorted(set().union(*map(_compared_with, templates)))
        self.trusted: set[Any] = set()
        """Forms of messages for which openings are known to find the answers."""

    def find(self, messages: Sequence[Mapping[str, Any]], text: str) -> list[Span] | None:
        """Return the spans of all answers in a conversation's text, None if there are more or fewer."""
        begins = [opening.end() for opening in self._openings.finditer(text)]
        if len(begins) != sum(message["role"] == "assistant" for message in messages):
            return None
        ends = (self._leads.search(text, begin) for begin in begins)
        return [(begin, end.start() if end else len(text)) for begin, end in zip(begins, ends, strict=True)]

    def forms(self, messages: Sequence[Mapping[str, Any]], tools: Any, reasoning_key: str | None) -> set[Any]:
        """Return the forms of a conversation's messages."""
        looks = [self._form_of(message, reasoning_key) for message in messages]
        forms: set[Any] = set()
        before = None
        later = frozenset[Any]()
        for index in range(len(looks) - 1, -1, -1):
            previous = looks[index - 1] if index else None
            forms.add((previous, looks[index], before, later, bool(tools)))
            later, before = later.union(*looks[index]), looks[index]
        return forms

    def trust(self, forms: set[Any]) -> None:
        """Note that answers of these forms are where they are found."""
        if len(self.trusted) < _MOST_FORMS:
            self.trusted |= forms

    def _form_of(self, message: Mapping[str, Any], reasoning_key: str | None) -> tuple[Any, ...]:
        """Return all that a template may look at in a message to decide how to write it."""
        calls, reasoning = message.get("tool_calls"), message.get(reasoning_key or "")
        about = message["role"], message.get("loss"), len(calls) > 1 if calls else None
        return about, self._text_features(message["content"]), self._text_features(str(reasoning)) if reasoning else ()

    def _text_features(self, text: str) -> tuple[Any, ...]:
        """Return what a template may ask about a text: its white space, which of the constants it has, and where."""
        contained = [constant for constant in self._constants if constant in text]
        marks = [(constant, text.startswith(constant), text.endswith(constant)) for constant in contained]
        return text.strip() == "", text[:1].isspace(), text[-1:].isspace(), *marks


def _compared_with(tree: nodes.Template) -> set[str]:
    """Return the strings that a template compares texts with, splits them by or looks for."""
    users = [*tree.find_all((nodes.Call, nodes.Filter, nodes.Test))]
    users += [comparison for comparison in tree.find_all(nodes.Compare) if not _asks_for_role(comparison.expr)]
    constants = (constant.value for user in users for constant in user.find_all(nodes.Const))
    return {constant for constant in constants if constant and isinstance(constant, str)}


def _asks_for_role(node: nodes.Expr) -> bool:
    name = node.arg if isinstance(node, nodes.Getitem) else None
    asked = name.value if isinstance(name, nodes.Const) else getattr(node, "attr", "")
    return asked in ("role", "type")


class SpanTokenizer:
    """Tokenizes texts covered by `shield`; returns which tokens belong to spans.

    A fast tokenizer tokenizes what stands between added tokens by itself. So texts are split before the control token
    that opens answers, pieces that several texts have in common are tokenized once, and a span that an opening precedes
    is found among the ids of its piece: faster than by the characters of each token.
    """

    def __init__(
        self, tokenizer: "PreTrainedTokenizerBase", openings: Openings | None, shield: Shield | None = None
    ) -> None:
        self.tokenizer, self.shield = tokenizer, shield or Shield(tokenizer, ())
        # Looked up once: each property of a tokenizer takes microseconds.
        self.end, self.end_id = str(tokenizer.eos_token), int(tokenizer.eos_token_id)
        self.mark = ""
        """The control token that texts are split before, "" if they are not."""
        self.opening_ids: dict[str, list[int]] = {}
        self.closing_ids: dict[str, int] = {}
        if tokenizer.is_fast and openings:
            self._choose_mark(openings)

    def _choose_mark(self, openings: Openings) -> None:
        """Look up the ids of openings and endings; set `mark` if all openings begin with a token to split texts at."""
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

    def encode_many(self, texts: Sequence[str], spans: Sequence[Sequence[Span]]) -> list[Encoded]:
        """Return ids of each text and whether each belongs to a span; the last span ends with the end token, and so the
        text. What follows (a newline, mostly) is dropped: generation has stopped by then.
        """
        if not self.tokenizer.is_fast:
            return [self._encode_slowly(text, marks) for text, marks in zip(texts, spans, strict=True)]
        encoded: dict[int, Encoded] = {}
        is_covered = [BREAKS.search(text) is not None for text in texts]
        for side in (False, True):
            chosen = [index for index, covered in enumerate(is_covered) if covered is side]
            if not chosen:
                continue
            backend = self.shield.backend if side else self._backend()
            in_pieces = self._encode_in_pieces(
                backend, [texts[index] for index in chosen], [spans[index] for index in chosen]
            )
            pairs = zip(chosen, in_pieces, strict=True)
            encoded.update((index, ids_and_mask) for index, ids_and_mask in pairs if ids_and_mask)
            others = [index for index in chosen if index not in encoded]
            batch = backend.encode_batch([texts[index] for index in others], add_special_tokens=False)
            for index, encoding in zip(others, batch, strict=True):
                apart = self._split_merged_borders(backend, encoding, texts[index], spans[index])
                encoded[index] = self._mask_by_offsets(*apart)
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
        """Yield ids and mask of each text; None where a span is not what an opening precedes."""
        if not self.mark:
            yield from [None] * len(texts)
            return
        numbers: dict[str, int] = {}
        rows = []
        for text in texts:
            pieces = text.split(self.mark)
            pieces[1:] = [self.mark + piece for piece in pieces[1:]]
            rows.append([(piece, numbers.setdefault(piece, len(numbers))) for piece in pieces])
        ids = [encoding.ids for encoding in backend.encode_batch_fast([*numbers], add_special_tokens=False)]
        for text, marks, row in zip(texts, spans, rows, strict=True):
            yield self._join_pieces(text, marks, [(piece, ids[number]) for piece, number in row])

    def _join_pieces(self, text: str, spans: Sequence[Span], pieces: Sequence[tuple[str, list[int]]]) -> Encoded | None:
        """Return ids and mask of a text from its pieces and their ids; None where a span is not what an opening
        precedes.
        """
        is_whole = spans == [(0, len(text))]
        joined: list[int] = []
        mask: list[bool] = []
        position, remaining = 0, list(reversed(() if is_whole else spans))
        for piece, ids in pieces:
            joined += ids
            mask += [is_whole] * len(ids)
            after = position + len(piece)
            if remaining and remaining[-1][0] < after:
                begin, stop = remaining.pop()
                trained = self._trained_ids(piece, ids, begin - position, stop - position)
                if trained is None:
                    return None
                start, end = (len(joined) - len(ids) + index for index in trained)
                mask[start:end] = [True] * (end - start)
            position = after
        if remaining or (is_whole and not text.endswith(self.end)):
            return None
        if spans and spans[-1][1] == len(text) and not is_whole:
            del joined[end:], mask[end:]
            if joined[-1] != self.end_id:
                joined, mask = [*joined, self.end_id], [*mask, True]
        return joined, mask

    def _trained_ids(self, piece: str, ids: list[int], begin: int, stop: int) -> tuple[int, int] | None:
        """Return the first id of a piece that belongs to the span `begin`:`stop` of its characters, and the one after
        the last; None if the piece does not begin with an opening up to there, or ends otherwise.
        """
        opening = next((text for text in self.opening_ids if len(text) == begin and piece.startswith(text)), "")
        start = len(self.opening_ids.get(opening, ()))
        control = self._closings.search(piece, begin)
        if not start or ids[:start] != self.opening_ids[opening]:
            return None
        if control is None:
            return (start, len(ids)) if stop == len(piece) else None
        is_end, after = control[0] == self.end, control.end()
        if stop not in control.span() and not (
            is_end and after < stop <= len(piece) and self.end not in piece[after:stop]
        ):
            return None
        # A span may leave out the end token that follows it.
        closing = ids.index(self.closing_ids[control[0]], start)
        return start, closing + (is_end or after <= stop)

    def merges(self, prompt: str, answer: str) -> bool:
        """Whether the tokens of a prompt's end would be others if the answer followed in the same text."""
        if not self.tokenizer.is_fast or not prompt or (prompt.endswith("\n") and not answer[:1].isspace()):
            return False
        backend, beginning = self._backend(), self.shield.cover(answer[:MERGED_CHARS])
        before, both = (backend.encode(text, add_special_tokens=False).ids for text in (prompt, prompt + beginning))
        return not _begins_with(both, before)

    def _split_merged_borders(
        self, backend: Any, encoding: Any, text: str, spans: Sequence[Span]
    ) -> tuple[Any, str, Sequence[Span]]:
        """Return an encoding with its text and spans in which each span's ids follow those of the text before it alone:
        generation starts from these. A tokenizer would merge "Assistant: " and "yes" into ":", " yes".
        """
        borders = [begin for begin, _ in spans if begin and self._merges_across(backend, encoding, text, begin)]
        if not borders:
            return encoding, text, spans
        pieces = [text[begin:stop] for begin, stop in pairwise([0, *borders, len(text)])]
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
        """Return ids and mask by the characters that the tokenizer returns for each token."""
        num_tokens = len(encoding)
        tokens = [
            (_token_at(encoding, begin), num_tokens if stop == len(text) else _token_at(encoding, stop))
            for begin, stop in spans
        ]
        return self._mask_to_end(encoding.ids, tokens)

    def _encode_slowly(self, text: str, spans: Sequence[Span]) -> Encoded:
        """Return ids and mask by a tokenizer without offsets. Where a span begins and ends in the ids is told by the
        ids that the text and its beginning up to there share.
        """
        is_covered, borders = BREAKS.search(text) is not None, [0]

        def tokens(part: str) -> list[int]:
            ids: list[int] = []
            for begin, stop in pairwise([*(border for border in borders if border < len(part)), len(part)]):
                if is_covered:
                    ids += self.shield.slow_ids(part[begin:stop])
                else:
                    ids += self.tokenizer(part[begin:stop], add_special_tokens=False, verbose=False)["input_ids"]
            return ids

        ids = tokens(text)
        for begin, _ in spans:
            if not _begins_with(ids, tokens(text[:begin])):
                borders.append(begin)
                ids = tokens(text)

        def shared(position: int) -> int:
            beginning = tokens(text[:position])
            pairs = enumerate(zip(beginning, ids, strict=False))
            return next((index for index, (a, b) in pairs if a != b), min(len(beginning), len(ids)))

        return self._mask_to_end(ids, [(shared(begin), shared(stop)) for begin, stop in spans])

    def _mask_to_end(self, ids: list[int], spans: Sequence[Span]) -> Encoded:
        """Return ids and mask of trained `spans` of ids, each cut after its end token, or lengthened by the one that
        follows it. If the last span ends the text, what follows it is cut off, and an end token is added if it lacks.
        """
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
