"""Conversations through a tokenizer's own chat template: for all models that have no format of their own here.

Control strings in messages stay text: `<|assistant|>` that a user types never becomes the token. Before a template sees
a message, what would become a control token is broken up by U+FDD0 and U+FDD1, which Unicode keeps for programs; the
tokenizer drops them after it has looked for control tokens. These are the special ones, and added ones by which a
template begins or ends turns; others, such as `<think>`, are content of answers.

Jinja's sandbox (3.1.6) keeps a model's template from the machine, and a time limit ends loops, but not one call such as
`'x' * 10**9`: `BoundedEnvironment` computes the size of what multiplies, pads, joins or replaces beforehand.
"""

import hashlib
import json
import re
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager, suppress
from functools import cached_property, wraps
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

from jinja2 import Environment, TemplateError, nodes, utils
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from toolkit.errors import is_failure, reason_of
from toolkit.messages import ModelError, RowError, tr

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# A token that is looked for in the raw text is found no more once the normalizer may drop what breaks it up; one that
# is looked for in the normalized text, once the pre-tokenizer may.
_BEFORE_NORMALIZER, _AFTER_NORMALIZER = "\ufdd0", "\ufdd1"
_BREAKS = re.compile(f"[{_BEFORE_NORMALIZER}{_AFTER_NORMALIZER}]")

_Value = TypeVar("_Value")


class Shield:
    """What keeps control strings in messages text. `turn_marks`: added tokens that begin and end turns."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", turn_marks: Iterable[str]) -> None:
        self._tokenizer = tokenizer
        added = {token.content: token for token in tokenizer.added_tokens_decoder.values()}
        control = {*tokenizer.all_special_tokens, *turn_marks} | {text for text, one in added.items() if one.special}
        # A token of a single character cannot be broken up; no known tokenizer has one that is special.
        self._breaks = {
            text: _AFTER_NORMALIZER if text in added and added[text].normalized else _BEFORE_NORMALIZER
            for text in control
            if len(text) > 1
        }
        self._control = re.compile(any_of(self._breaks))
        # Most texts hold none: two characters tell so much faster than some hundred tokens.
        self._hint = re.compile(any_of({text[:2] for text in self._breaks}))
        self._added = re.compile(f"({any_of(added)})")

    def cover(self, value: _Value) -> _Value:
        """Return messages or tools with every control string in them broken up; the same object if there is none."""
        return self._cover(value) if self._holds_one(value) else value

    def _holds_one(self, value: Any) -> bool:
        if isinstance(value, str):
            return self._hint.search(value) is not None and self._control.search(value) is not None
        if isinstance(value, dict):
            return any(self._holds_one(one) for pair in value.items() for one in pair)
        return isinstance(value, (list, tuple)) and any(self._holds_one(one) for one in value)

    def _cover(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._control.sub(lambda found: "".join(c + self._breaks[found[0]] for c in found[0]), value)
        if isinstance(value, dict):
            return {self._cover(key): self._cover(one) for key, one in value.items()}
        return [self._cover(one) for one in value] if isinstance(value, (list, tuple)) else value

    @cached_property
    def backend(self) -> Any:
        """A copy of a fast tokenizer's backend that drops what breaks control strings up."""
        from tokenizers import Tokenizer, normalizers, pre_tokenizers

        copy = Tokenizer.from_str(self._tokenizer.backend_tokenizer.to_str())
        drop = normalizers.Replace(_BEFORE_NORMALIZER, "")
        copy.normalizer = drop if copy.normalizer is None else normalizers.Sequence([drop, copy.normalizer])
        split = pre_tokenizers.Split(_AFTER_NORMALIZER, "removed")
        known = copy.pre_tokenizer
        copy.pre_tokenizer = split if known is None else pre_tokenizers.Sequence([split, known])
        copy.no_padding()
        copy.no_truncation()
        copy.encode_special_tokens = False
        return copy

    def slow_ids(self, text: str) -> list[int]:
        """Return the ids of a rendered text by a tokenizer that has no such backend: between the added tokens."""
        ids: list[int] = []
        for part in filter(None, self._added.split(text)):
            if self._added.fullmatch(part):
                ids.append(int(self._tokenizer.convert_tokens_to_ids(part)))
                continue
            plain = _BREAKS.sub("", part)
            ids += self._tokenizer(plain, add_special_tokens=False, split_special_tokens=True, verbose=False)[
                "input_ids"
            ]
        return ids

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "backend"}


def any_of(texts: Iterable[str]) -> str:
    """Return a pattern that finds any of some texts, the longest first; nothing if there are none."""
    return "|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True)) or r"(?!)"


Encoded = tuple[list[int], list[bool]]
Span = tuple[int, int]
"""First character of an answer, with its end, in the text of a conversation; and the one after its last."""


class SpanTokenizer:
    """Tokenizes texts covered by `shield`; returns which tokens belong to spans. Where `frame`, around every answer,
    begins with a special token, answers are found among the ids: several times as fast as by positions.
    """

    def __init__(
        self, tokenizer: "PreTrainedTokenizerBase", frame: tuple[str, str] | None, shield: Shield | None = None
    ) -> None:
        self.tokenizer, self.shield = tokenizer, shield or Shield(tokenizer, ())
        # Looked up once: each property of a tokenizer takes microseconds.
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
        """Return ids of each text and whether each belongs to a span; the last span ends with the end token, and so the
        text. What follows (a newline, mostly) is dropped: generation has stopped by then.
        """
        if not self.tokenizer.is_fast:
            return [self._slow(text, marks) for text, marks in zip(texts, spans, strict=True)]
        found: dict[int, Encoded] = {}
        is_covered = [_BREAKS.search(text) is not None for text in texts]
        for side in (False, True):
            chosen = [index for index, covered in enumerate(is_covered) if covered is side]
            if not chosen:
                continue
            backend = self.shield.backend if side else self._backend()
            framed = [index for index in chosen if self._is_framed(texts[index], spans[index])]
            batch = backend.encode_batch_fast([texts[index] for index in framed], add_special_tokens=False)
            for index, encoding in zip(framed, batch, strict=True):
                if encoded := self._between(encoding.ids, texts[index], spans[index]):
                    found[index] = encoded
            others = [index for index in chosen if index not in found]
            batch = backend.encode_batch([texts[index] for index in others], add_special_tokens=False)
            for index, encoding in zip(others, batch, strict=True):
                found[index] = self._by_offsets(encoding, texts[index], spans[index])
        return [found[index] for index in range(len(texts))]

    def _backend(self) -> Any:
        backend = self.tokenizer.backend_tokenizer
        backend.no_padding()
        backend.no_truncation()
        backend.encode_special_tokens = False  # a template writes them as text
        return backend

    def _is_framed(self, text: str, spans: Sequence[Span]) -> bool:
        """Return whether each span is in the frame, or is the whole text."""
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
        """Return ids and mask of a framed text; None if it has not as many mark tokens as mark texts."""
        if spans == [(0, len(text))]:
            return ids, [True] * len(ids)
        if not spans:
            return ids, [False] * len(ids)
        first, length = self.ask_ids[0], len(self.ask_ids)
        if ids.count(first) != text.count(self.mark):
            return None
        mask: list[bool] = []
        index, seen = -1, 0
        for begin, _ in spans:
            for _ in range(text.count(self.mark, seen, begin)):
                index = ids.index(first, index + 1)
            seen = begin
            start = index + length
            if ids[index:start] != self.ask_ids:
                return None
            stop = ids.index(self.end_id, start) + 1
            mask += [False] * (start - len(mask))
            mask += [True] * (stop - start)
        if spans[-1][1] == len(text):
            return ids[: len(mask)], mask
        return ids, mask + [False] * (len(ids) - len(mask))

    def _by_offsets(self, encoding: Any, text: str, spans: Sequence[Span]) -> Encoded:
        """Return ids and mask by the characters that the tokenizer returns for each token."""
        num_tokens = len(encoding)
        tokens = [
            (_token_at(encoding, begin), num_tokens if stop == len(text) else _token_at(encoding, stop))
            for begin, stop in spans
        ]
        return self._ended(encoding.ids, tokens)

    def _slow(self, text: str, spans: Sequence[Span]) -> Encoded:
        """The same for a tokenizer without offsets: by the ids that the text's beginnings share with it."""

        def tokens(part: str) -> list[int]:
            if _BREAKS.search(text):
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
    for index in range(position, position + 8):  # characters that the tokenizer drops belong to no token
        token = encoding.char_to_token(index)
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
    """Encodes through a tokenizer's own chat template; control strings in messages stay text.

    Answers are located by comparing the rendered conversation up to an answer with that including it; a template's own
    marks ({% generation %}) must agree, else it is an error. Templates that change earlier answers (dropping their
    reasoning, for example) and have no marks train the last answer only.
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
        self.vocab_size, self.stop_ids = len(tokenizer), [int(tokenizer.eos_token_id)]
        self.answer_ids: list[int] = []  # what is trained begins where the assistant speaks
        backend = getattr(tokenizer, "backend_tokenizer", None)
        parts = [
            str(CODE_VERSION),
            type(tokenizer).__name__,
            backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True),
            json.dumps(tokenizer.chat_template),
            json.dumps({name: str(token) for name, token in tokenizer.special_tokens_map.items()}, sort_keys=True),
        ]
        self.fingerprint = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
        self.template = tokenizer.get_chat_template()
        self.tokens = {name: str(token) for name, token in tokenizer.special_tokens_map.items() if name != _OTHERS}
        self.has_marks = "{% generation" in self.template or "{%- generation" in self.template
        self.only_last = False
        self.knows_probe = False
        """Whether it renders an ordinary conversation as training needs it."""
        self.frame: tuple[str, str] | None = None
        """What precedes and follows each answer, where both are always the same."""
        self._probe()
        self.turn_marks = self._turn_marks()
        self.shield = Shield(tokenizer, self.turn_marks)
        self.span_tokenizer = SpanTokenizer(tokenizer, self.frame, self.shield)

    def encode(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> Encoded:
        """Return ids and mask of one conversation; see `toolkit.data.tokenize_workers.ChatEncoder`."""
        return self.encode_many([messages], [tools])[0]

    def encode_many(
        self, conversations: Sequence[Sequence[Message]], tools: Sequence[Sequence[Any] | None] | None = None
    ) -> list[Encoded]:
        """Return ids and mask of several conversations; RowError if the template rejects one, ModelError if it changes
        the last question once its answer follows.
        """
        if not conversations:
            return []
        texts: list[str] = []
        spans: list[list[Span]] = []
        for messages, given in zip(conversations, tools or [None] * len(conversations), strict=True):
            messages, given = self.shield.cover(messages), self.shield.cover(given)
            if messages[0]["role"] == "text":
                begin = self.tokenizer.bos_token if getattr(self.tokenizer, "add_bos_token", False) else ""
                text = f"{begin or ''}{messages[0]['content']}{self.tokenizer.eos_token}"
                trained = [(0, len(text))]
            else:
                text, trained = self._spans(messages, given)
            texts.append(text)
            spans.append(trained)
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

    def _probe(self) -> None:
        """Look at how the template renders answers; reject marks that are not what generation would write."""
        try:
            compared = self._compared(_PROBE, None)
        except RowError:  # it knows other conversations only; each is looked at by itself
            return
        if compared is None:
            self.only_last = not self.has_marks
            return
        self.knows_probe = True
        text, spans = compared
        asks = self.render(_PROBE[:3], None, True).removeprefix(self.render(_PROBE[:3], None, False))
        answers = [(text[begin:end], m["content"]) for (begin, end), m in zip(spans, _PROBE[1::2], strict=True)]
        endings = {answer.removeprefix(content) for answer, content in answers}
        if asks and len(endings) == 1 and all(answer.startswith(content) for answer, content in answers):
            self.frame = asks, endings.pop()
        if not self.has_marks:
            return
        marked_text, marks = self._marked(_PROBE, None)
        end = self.tokenizer.eos_token  # which may be unmarked
        marked, written = (
            [marked_text[begin:stop].split(end)[0].strip() for begin, stop in found] for found in (marks, spans)
        )
        if marked != written:
            raise ModelError(
                "The chat template of '{name}' marks {marked} as what the assistant says, but generation would "
                "write {written}. Correct its {{% generation %}} marks, or give another: model.chat_template=FILE.",
                name=self.tokenizer.name_or_path,
                marked=marked,
                written=written,
            )

    def _turn_marks(self) -> set[str]:
        """Return the added tokens, special or not, by which the template begins and ends turns; not `<think>`."""
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

    def _spans(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> tuple[str, list[Span]]:
        """Return the text of a conversation and the spans of its trained messages."""
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
        """Return a conversation's text and the spans of `wanted` (None: answers); None if it rewrites turns."""
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
        """Return where the answer begins in the text that ends with it, framed as in the probe; spares a rendering."""
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

    def render(self, messages: Sequence[Message], tools: Sequence[Any] | None, add_generation_prompt: bool) -> str:
        """Return the template's text, through transformers' own sandbox. Its public function copies every message
        first, which plain JSON does not need and costs more than the rendering (transformers 5.23).
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


def _rendered(render: Callable[[Sequence[Message]], Any], messages: Sequence[Message]) -> Any:
    """Return a template's rendering, a call's arguments as text if it wants that; RowError if it fails."""
    bound_templates()
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
        failure = tr("the chat template rejects the conversation: {reason}", reason=reason_of(error))
    raise RowError(failure) from None


def _with_text_arguments(message: Message) -> Message:
    """Return a message whose calls have their arguments as JSON text, the form of OpenAI's API."""
    calls = []
    for call in message.get("tool_calls") or []:
        function = call["function"]
        arguments = json.dumps(function["arguments"], ensure_ascii=False)
        calls.append({**call, "function": {**function, "arguments": arguments}})
    return {**message, "tool_calls": calls} if calls else message


class TooSlow(Exception):
    """A body took longer than it may."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TooSlow in Python code that takes too long; only in the main thread, where signals are handled."""
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


_LARGEST = 1 << 24
"""Characters of a text, or items of a list: more than a context of several million tokens takes."""
_MOST_BITS = 1 << 16
"""Of a number. A larger one is named by its bits."""
_WIDTH = re.compile(r"\d+")
"""Of a field in a format, such as `%1000000000d`; other numbers there are few and small."""
_SEQUENCES = (str, list, tuple, bytes)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with bounds on sizes; each raises SecurityError."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        known, self.filters = self.filters, _Filters()
        self.filters.update({name: _bounded(name, one) for name, one in known.items()})
        self.globals["lipsum"] = _bounded("lipsum", utils.generate_lorem_ipsum)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute an operator, if its result is not too large."""
        if operator == "+" and isinstance(left, _SEQUENCES) and isinstance(right, _SEQUENCES):
            _check(len(left) + len(right))
        elif isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
            _check(bits, _MOST_BITS)
        elif operator == "*":
            pairs = ((left, right), (right, left))
            _check(max((len(a) * b for a, b in pairs if isinstance(a, _SEQUENCES) and isinstance(b, int)), default=0))
        elif operator == "%" and isinstance(left, str):
            _check_call("%", (left, right), {})
        return self.binop_table[operator](left, right)

    def call(self, context: Context, function: Any, *args: Any, **options: Any) -> Any:
        """Call a function or a method, if its result is not too large."""
        owner = getattr(function, "__self__", None)
        given = (owner, *args) if isinstance(owner, str) else args
        _check_call(getattr(function, "__name__", ""), given, options)
        return super().call(context, function, *args, **options)

    def concat(self, parts: Iterable[str]) -> str:
        """Join the texts of a template, a macro or `~`."""
        texts, length = [], 0
        for text in parts:
            length += len(text)
            _check(length)
            texts.append(text)
        return "".join(texts)


class _Filters(dict[str, Callable[..., Any]]):
    """Bounds replaced filters too: transformers has a `tojson` of its own (5.23)."""

    def __setitem__(self, name: str, function: Callable[..., Any]) -> None:
        super().__setitem__(name, _bounded(name, function))


class _Generator(CodeGenerator):
    """Compiles `~` to a call of `concat`."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802
        """Write `a ~ b`."""
        self.write("environment.concat(map(str, (")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write(")))")


BoundedEnvironment.code_generator_class = _Generator


def bound_templates() -> None:
    """Let transformers render all chat templates of this process within the bounds."""
    from transformers.utils import chat_template_utils

    chat_template_utils.ImmutableSandboxedEnvironment = BoundedEnvironment


def _bounded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    kind = "%" if name == "format" else name  # the filter of that name, unlike the method

    @wraps(function)  # with the marks by which Jinja hands the context to some
    def within(*args: Any, **options: Any) -> Any:
        _check_call(kind, args, options)
        return function(*args, **options)

    return within


def _check_call(name: str, args: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Raise if a filter, or a method with what it is called on as first argument, would make something too large."""
    values = [value for value in (*args, *options.values()) if not isinstance(value, (Context, Environment))]
    _check(max((abs(value) for value in values if isinstance(value, int)), default=0))
    if values and name in _SIZES:
        _check(_SIZES[name](values))


def _padded(values: list[Any]) -> int:
    """Return how long a text is whose every line, or tab, may get a width, or a text, more."""
    places = sum(values[0].count(sign) for sign in "\n\t") + 1 if isinstance(values[0], str) else 1
    return _length(values[0]) + places * _longest(values[1:])


def _replaced(values: list[Any]) -> int:
    text, old, new = (str(value) for value in [*values, "", ""][:3])
    return len(text) + text.count(old) * len(new)


def _joined(values: list[Any]) -> int:
    """Of a list and what separates its items, in either order: method and filter."""
    items = next((value for value in values if isinstance(value, (list, tuple))), ())
    separator = max((len(value) for value in values if isinstance(value, str)), default=0)
    return sum(_length(item) + separator for item in items)


def _formatted(values: list[Any], sign: str = "{") -> int:
    text = str(values[0])
    widths = sum(int(width[:20]) for width in _WIDTH.findall(text))
    return len(text) + widths + text.count(sign) * _longest(values[1:])


def _longest(values: Iterable[Any]) -> int:
    """Return the largest width, or the length of the longest text, among values and what is in them."""
    longest = 0
    for value in values:
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
        longest = max(longest, abs(value) if isinstance(value, int) else _length(value), _longest(inner))
    return longest


def _length(value: Any) -> int:
    return len(value) if isinstance(value, Sized) else 20


_SIZES: dict[str, Callable[[list[Any]], int]] = {
    **dict.fromkeys(("ljust", "rjust", "center", "zfill", "expandtabs", "indent"), _padded),
    **dict.fromkeys(("format", "format_map"), _formatted),
    "%": lambda values: _formatted(values, "%"),
    "replace": _replaced,
    "join": _joined,
    "sum": lambda values: sum(map(_length, values[0])) if isinstance(values[0], (list, tuple)) else 0,
    "translate": lambda values: _length(values[0]) * _longest(values[1:]),
    "tojson": lambda values: 10**5 * _longest(values[1:]),
    "wordwrap": lambda values: _length(values[0]) * (1 + _longest(v for v in values[1:] if isinstance(v, str))),
    "lipsum": lambda values: 1000 * _longest(values),
}
"""Method or filter -> about how large its result will be, for those that can make much of little."""


def _check(size: int, most: int = _LARGEST) -> None:
    if size > most:
        raise SecurityError(
            tr(
                "it makes a text, a list or a number of {size}, and {most} are the most that a template may make",
                size=f"{size:.2g}" if size > 10**12 else f"{size:,}",
                most=f"{most:,}",
            )
        )
