"""Conversations through a tokenizer's own chat template: for all models that have no format of their own here.

The template makes a text with spans of characters, `SpanTokenizer` token ids with a mask of it.
"""

import hashlib
import json
import re
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

from toolkit.errors import ModelError, RowError, is_failure, reason_of
from toolkit.messages import tr
from toolkit.models.shield import Shield, any_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


Encoded = tuple[list[int], list[bool]]
Span = tuple[int, int]
"""First character of an answer, with its end, in the text of a conversation; and the one after its last."""


class SpanTokenizer:
    """Tokenises whole texts and says which tokens belong to spans of them.

    `frame` is what always stands before an answer and after it, if known: where it begins with a special token, answers
    are found among the ids themselves, several times as fast as by asking the tokenizer for each token's position.
    `shield` has covered the control strings in the messages' texts.
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
        num_tokens = len(encoding)
        tokens = [
            (_token_at(encoding, begin), num_tokens if stop == len(text) else _token_at(encoding, stop))
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


CODE_VERSION = 4
"""Part of the fingerprint; raise it when ids or masks change."""

Message = Mapping[str, Any]

_OTHERS = "additional_special_tokens"
_RENDERING_S = 10
"""Most seconds for one conversation; thousands of messages take some hundredths."""
_PROBE: list[dict[str, Any]] = [
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "First answer."},
    {"role": "user", "content": "Two?"},
    {"role": "assistant", "content": "Second answer."},
]


class TemplateChatEncoder:
    """Encodes through a tokenizer's own chat template. The ids are the template's; the mask says what is trained.

    Control strings in messages and tools stay text: `toolkit.models.shield`.

    Where answers stand in the text is found by comparison: what the template writes for the conversation up to an
    answer, against what it writes with the answer. A template that marks answers itself ({% generation %}) says so; the
    two must agree on a conversation to begin with. Some templates write earlier answers otherwise once another turn
    follows (without their reasoning, for example): without marks, these train the last answer only. A template that
    marks other tokens than it writes for answers is an error.
    """

    drops_system = False
    can_cut = True

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        if not tokenizer.chat_template:
            raise ModelError(
                "The tokenizer '{name}' has no chat template. Name a file with one: model.chat_template=FILE.",
                name=tokenizer.name_or_path,
            )
        if tokenizer.eos_token_id is None:
            raise ModelError(
                "The tokenizer '{name}' has no end-of-sequence token, so a model could not learn where to stop. "
                "Set eos_token in its tokenizer_config.json.",
                name=tokenizer.name_or_path,
            )
        self.tokenizer = tokenizer
        self.vocab_size = len(tokenizer)
        self.fingerprint = _fingerprint(tokenizer)
        self.template = tokenizer.get_chat_template()
        self.tokens = {name: str(token) for name, token in tokenizer.special_tokens_map.items() if name != _OTHERS}
        self.has_marks = "{% generation" in self.template or "{%- generation" in self.template
        self.only_last = False
        self.knows_probe = False
        """Whether it writes an ordinary conversation as training needs it."""
        self.frame: tuple[str, str] | None = None
        """What the template writes between a question and an answer, and after it, where both are always the same."""
        self._probe()
        self.turn_marks = self._turn_marks()
        self.shield = Shield(tokenizer, self.turn_marks)
        self.span_tokenizer = SpanTokenizer(tokenizer, self.frame, self.shield)

    def encode(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> Encoded:
        """Return ids and mask of one conversation; see `toolkit.data.encode.ChatEncoder`."""
        return self.encode_many([messages], [tools])[0]

    def encode_many(
        self, conversations: Sequence[Sequence[Message]], tools: Sequence[Sequence[Any] | None] | None = None
    ) -> list[Encoded]:
        """Return ids and mask of several conversations; see `toolkit.data.encode.ChatEncoder`.

        Raises:
            RowError: the template refuses one of them.
            ModelError: the template gives the last question another form once its answer follows.
        """
        if not conversations:
            return []
        texts: list[str] = []
        spans: list[list[Span]] = []
        for messages, given in zip(conversations, tools or [None] * len(conversations), strict=True):
            messages, given = self.shield.cover(messages), self.shield.cover(given)
            if messages[0]["role"] == "text":
                texts.append(self._plain(str(messages[0]["content"])))
                spans.append([(0, len(texts[-1]))])
                continue
            text, found = self._spans(messages, given)
            texts.append(text)
            spans.append(found)
        try:
            return self.span_tokenizer.encode_many(texts, spans)
        except BaseException as error:
            if not is_failure(error):
                raise
            raise RowError(tr("the tokenizer fails on the text: {reason}", reason=reason_of(error))) from error

    def prompt(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> list[int]:
        """Return the ids that generation starts from."""
        text = self.render(self.shield.cover(messages), self.shield.cover(tools), add_generation_prompt=True)
        return self.span_tokenizer.encode_many([text], [[]])[0][0]

    @property
    def stop_ids(self) -> list[int]:
        """Return the ids at which an answer ends."""
        return [int(self.tokenizer.eos_token_id)]

    @property
    def answer_ids(self) -> list[int]:
        """Return none: what is trained begins where the assistant speaks."""
        return []

    def _probe(self) -> None:
        """Look at how the template writes answers."""
        try:
            compared = self._compared(_PROBE, None)
        except RowError:  # it knows other conversations only; each is looked at by itself
            return
        if compared is None:
            self.only_last = not self.has_marks
            return
        self.knows_probe, self.frame = True, self._find_frame(compared)
        if self.has_marks:
            self._check_marks(compared)

    def _find_frame(self, compared: tuple[str, list[Span]]) -> tuple[str, str] | None:
        text, spans = compared
        asks = self.render(_PROBE[:3], None, True).removeprefix(self.render(_PROBE[:3], None, False))
        answers = [text[begin:end] for begin, end in spans]
        endings = {answer.removeprefix(m["content"]) for answer, m in zip(answers, _PROBE[1::2], strict=True)}
        framed = all(answer.startswith(m["content"]) for answer, m in zip(answers, _PROBE[1::2], strict=True))
        return (asks, endings.pop()) if framed and asks and len(endings) == 1 else None

    def _turn_marks(self) -> set[str]:
        """Return the added tokens by which the template begins and ends turns, special or not.

        Those between an answer and the next question, the first of what asks for an answer (a `<think>` that follows it
        begins no turn), and the first by which a tool's turn differs from a user's.
        """
        added = re.compile(any_of(token.content for token in self.tokenizer.added_tokens_decoder.values()))
        answer = _PROBE[1]["content"]

        def between(role: str) -> list[str]:
            said = self.render([*_PROBE[:2], {"role": role, "content": "Two?"}], None, False)
            return added.findall(said.partition(answer)[2].partition("Two?")[0])

        marks: set[str] = set()
        with suppress(RowError):
            question = between("user")
            marks.update(question)
            asks = self.render(_PROBE[:1], None, True).removeprefix(self.render(_PROBE[:1], None, False))
            marks.update(added.findall(asks)[:1])
            result = between("tool")
            same = next((i for i, pair in enumerate(zip(question, result, strict=False)) if pair[0] != pair[1]), None)
            marks.update([] if same is None else [result[same]])
        return marks

    def _plain(self, text: str) -> str:
        """Return a plain text between the tokens that begin and end one."""
        begin = self.tokenizer.bos_token if getattr(self.tokenizer, "add_bos_token", False) else ""
        return f"{begin or ''}{text}{self.tokenizer.eos_token}"

    def _spans(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> tuple[str, list[Span]]:
        """Return the text of a conversation and where its trained messages stand."""
        trained = [bool(message.get("loss", message["role"] == "assistant")) for message in messages]
        if self.has_marks:
            answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
            text, marks = self._marked(messages, tools)
            # A template that joins messages marks fewer answers than there are.
            if len(marks) == len(answers) and not any(trained[i] for i in range(len(messages)) if i not in answers):
                return text, [mark for index, mark in zip(answers, marks, strict=True) if trained[index]]
        wanted = [index for index, is_trained in enumerate(trained) if is_trained]
        if self.only_last:
            wanted = [len(messages) - 1]
        compared = self._compared(messages, tools, wanted)
        if compared is None and wanted != [len(messages) - 1]:
            raise RowError(
                tr(
                    "the chat template writes an earlier answer of this conversation otherwise once another turn "
                    "follows, so it cannot be trained with the rest. Train last answers only: data.train_on=last"
                )
            )
        if compared is None and self.knows_probe:
            raise RowError(
                tr(
                    "the chat template writes the answer of this conversation otherwise than the prompt that "
                    "generation would see asks for it"
                )
            )
        if compared is None:
            raise ModelError(
                "The chat template of '{name}' cannot be trained with: the conversation with its answer does not "
                "begin with the prompt that generation would see. Give a template whose turns do not depend on "
                "later ones: model.chat_template=FILE.",
                name=self.tokenizer.name_or_path,
            )
        return compared

    def _compared(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, wanted: Iterable[int] | None = None
    ) -> tuple[str, list[Span]] | None:
        """Return a conversation's text and where some messages stand in it, None if the template rewrites turns.

        `wanted` None: the assistant's messages.
        """
        if wanted is None:
            wanted = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        rendered = self.render(messages, tools, add_generation_prompt=False)
        spans = []
        for index in wanted:
            last = index == len(messages) - 1
            after = rendered if last else self.render(messages[: index + 1], tools, add_generation_prompt=False)
            if not last and not rendered.startswith(after):
                return None
            begin = self._begin(messages[index], after)
            if begin is None:
                is_answer = messages[index]["role"] == "assistant"
                before = self.render(messages[:index], tools, add_generation_prompt=is_answer)
                if not rendered.startswith(before):
                    return None
                begin = len(before)
            spans.append((begin, len(after)))
        return rendered, spans

    def _begin(self, message: Message, text: str) -> int | None:
        """Return where an answer begins in the text that ends with it, if it stands there as in the probe.

        That is: after the same words that ask for an answer, before the same ending. Spares a rendering.
        """
        if not self.frame or message["role"] != "assistant" or message.get("tool_calls"):
            return None
        asks, ending = self.frame
        begin = len(text) - len(ending) - len(message["content"])
        is_framed = begin >= 0 and text.endswith(message["content"] + ending) and text.endswith(asks, 0, begin)
        return begin if is_framed else None

    def _marked(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> tuple[str, list[Span]]:
        """Return a conversation's text and what the template marks in it."""
        from transformers.utils.chat_template_utils import render_jinja_template

        listed = list(tools) if tools else None
        texts, marks = _rendered(
            lambda given: render_jinja_template(
                conversations=[given],
                tools=listed,
                chat_template=self.tokenizer.get_chat_template(tools=listed),
                return_assistant_tokens_mask=True,
                **self.tokens,
            ),
            messages,
        )
        return texts[0], [(int(begin), int(end)) for begin, end in marks[0]]

    def _check_marks(self, compared: tuple[str, list[Span]]) -> None:
        """Refuse a template whose marks are not what generation would write; the end token may be unmarked."""
        text, marks = self._marked(_PROBE, None)
        end = self.tokenizer.eos_token

        def said(spans: list[Span]) -> list[str]:
            return [text[begin:stop].split(end)[0].strip() for begin, stop in spans]

        if said(marks) != said(compared[1]):
            raise ModelError(
                "The chat template of '{name}' marks {marked} as what the assistant says, but generation would "
                "write {written}. Correct its {{% generation %}} marks, or give another: model.chat_template=FILE.",
                name=self.tokenizer.name_or_path,
                marked=said(marks),
                written=said(compared[1]),
            )

    def render(self, messages: Sequence[Message], tools: Sequence[Any] | None, add_generation_prompt: bool) -> str:
        """Return the template's text, through transformers' own sandbox.

        Its public function copies every message first, lest a template get at objects with methods; messages of data
        files are plain JSON, and the copy costs more than the rendering (transformers 5.23).
        """
        from transformers.utils.chat_template_utils import _compile_jinja_template

        listed = list(tools) if tools else None
        template = self.template if listed is None else self.tokenizer.get_chat_template(tools=listed)
        text: str = _rendered(
            lambda given: _compile_jinja_template(template).render(
                messages=given,
                tools=listed,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self.tokens,
            ),
            messages,
        )
        return text


def turn_marks_of(tokenizer: "PreTrainedTokenizerBase") -> list[str]:
    """Return the added tokens by which a tokenizer's chat template begins and ends turns; none if it cannot be used."""
    try:
        return sorted(TemplateChatEncoder(tokenizer).turn_marks)
    except ModelError:
        return []


_Rendering = TypeVar("_Rendering")


def _rendered(render: Callable[[Sequence[Message]], _Rendering], messages: Sequence[Message]) -> _Rendering:
    """Return what a template makes of messages. Some want the arguments of a call as text: then they get it.

    Raises:
        RowError: the template refuses them, or fails.
    """
    from jinja2 import TemplateError

    from toolkit.models import template_bounds

    template_bounds.install()
    try:
        with time_limit(_RENDERING_S):
            try:
                return render(messages)
            except (TypeError, ValueError, AttributeError, KeyError):
                if not any(message.get("tool_calls") for message in messages):
                    raise
                with suppress(TemplateError, TypeError, ValueError, AttributeError, KeyError):
                    return render([_with_text_arguments(message) for message in messages])
                raise
    except TooSlow:
        # Not a row that could be skipped: the next one would take as long.
        raise ModelError(
            "The chat template takes more than {seconds} s for one conversation. Give another: "
            "model.chat_template=FILE.",
            seconds=_RENDERING_S,
        ) from None
    except Exception as error:  # a template is a program, in which anything may go wrong
        failure = tr("the chat template refuses the conversation: {reason}", reason=reason_of(error))
    raise RowError(failure) from None


def _with_text_arguments(message: Message) -> Message:
    """Return a message whose calls have their arguments as JSON text, the form of OpenAI's API."""
    calls = [
        {
            **call,
            "function": {
                **call["function"],
                "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False),
            },
        }
        for call in message.get("tool_calls") or []
    ]
    return {**message, "tool_calls": calls} if calls else message


def _fingerprint(tokenizer: "PreTrainedTokenizerBase") -> str:
    """Return a hash of everything in the tokenizer that decides about ids and mask."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    vocabulary = backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    parts = [
        str(CODE_VERSION),
        type(tokenizer).__name__,
        vocabulary,
        json.dumps(tokenizer.chat_template),
        json.dumps(
            {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
            sort_keys=True,
        ),
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


class TooSlow(Exception):
    """A body took longer than it may."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Interrupt Python code that takes too long; only in a process's main thread, where signals are handled.

    Raises:
        TooSlow: it has taken longer.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise TooSlow

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
