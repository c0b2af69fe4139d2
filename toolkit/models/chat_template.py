"""Encodes conversations through a tokenizer's own chat template, for all models but official ChatGLMs.

Control strings in messages stay text: `<|assistant|>` that a user types never becomes the token. Before a template gets
a message, control strings in it are broken up by U+FDD0 and U+FDD1, which Unicode reserves for programs; the tokenizer
drops them after it has searched for control tokens. These are special tokens, and added ones by which a template begins
or ends turns; others, such as `<think>`, are content of answers.
"""

import hashlib
import json
import math
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from toolkit.messages import ModelError, RowError, is_failure, reason_of, shortened, tr
from toolkit.models.answer_spans import MODES, RENDERING_S, AnswerFinder, Openings, Template, TemplateTraits
from toolkit.models.sandbox import compiled, time_limit
from toolkit.models.span_tokenizer import MERGED_CHARS, Shield, Span, SpanTokenizer, any_of
from toolkit.sample_types import Encoded, Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CODE_VERSION = 9
"""Part of the fingerprint; increase it when ids or masks change."""
PROBE: list[dict[str, Any]] = [
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "First answer."},
    {"role": "user", "content": "Two?"},
    {"role": "assistant", "content": "Second answer."},
]


EXCERPT_CHARS = 40
WORD = "Zygote"
"""A word that is searched in renderings."""


def message_with_call(name: str) -> dict[str, Any]:
    """Return an assistant message without a text that calls the tool `name`."""
    call = {"type": "function", "id": "call00000", "function": {"name": name, "arguments": {"a": "b"}}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


_TOOLS: list[Any] = [{"type": "function", "function": {"name": WORD, "description": "?", "parameters": {}}}]
_RESULT = {"role": "tool", "content": WORD, "tool_call_id": "call00000"}
_TOOL_CONVERSATION = [PROBE[0], message_with_call(WORD), _RESULT, PROBE[1]]
_TWO_CALLS = [message_with_call(name)["tool_calls"][0] for name in ("other", WORD)]
_FEATURES: dict[str, tuple[list[dict[str, Any]], list[Any] | None]] = {
    "system": ([{"role": "system", "content": WORD}, PROBE[0]], None),
    "tools": (PROBE[:1], _TOOLS),
    "tool_calls": ([PROBE[0], message_with_call(WORD)], None),
    "tool": ([PROBE[0], message_with_call("other"), _RESULT], None),
    "text": ([PROBE[0], {**message_with_call("other"), "content": WORD}], None),
    "parallel": ([PROBE[0], {**message_with_call(""), "tool_calls": _TWO_CALLS}], None),
}
"""Feature of a conversation -> an example and its tools: a template that does not write `WORD` drops the feature."""
_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys of a message in which templates expect the reasoning of an answer."""
THOUGHT = re.compile(r"\s*<think>(.*?)</think>\s*", re.DOTALL)


def _template_setting(tokenizer: "PreTrainedTokenizerBase", *features: str) -> str:
    from toolkit.models.named_templates import template_setting  # for errors alone

    return template_setting(tokenizer, *features)


def examine(template: Template) -> TemplateTraits:
    """Return how a template writes conversations; ModelError for one that nothing can be trained with."""
    examination = Examination(template)
    with suppress(RowError):  # it rejects the examples; other conversations are examined one by one
        examination.run()
    return examination.traits


class Examination:
    """Finds out how a template writes conversations, by rendering examples."""

    def __init__(self, template: Template) -> None:
        self.template, self.tokenizer, self.render = template, template.tokenizer, template.render
        self.shield = Shield(self.tokenizer, ())
        has_marks = "{% generation" in template.text or "{%- generation" in template.text
        self.traits = TemplateTraits(has_marks=has_marks)

    def note(self, **traits: Any) -> None:
        """Replace these fields of `traits`."""
        self.traits = replace(self.traits, **traits)

    @property
    def finder(self) -> AnswerFinder:
        """What finds answers by all that is known."""
        return AnswerFinder(self.template, self.traits)

    def run(self) -> None:
        """Fill in `traits` by rendering examples. RowError if the template rejects an ordinary question or answer;
        traits that are not found yet keep their defaults.
        """
        self.render(PROBE[:1], None, add_generation_prompt=False)
        marks, ends = self._turn_marks()
        self.note(turn_marks=marks, ends=ends)
        self._examine_features()
        prompt = self.render(PROBE[:1], None, add_generation_prompt=True)
        reply = self.render(PROBE[:2], None, add_generation_prompt=False)
        longer = self.render(PROBE[:3], None, add_generation_prompt=False)
        # Else answers do not follow their prompt, or are written in another way once a question follows.
        is_usual = reply.startswith(prompt) and longer.startswith(reply)
        has_thought_in_content = self.traits.reasoning_key is None and "<think>" in self.template.text  # SmolLM3's
        if not is_usual or has_thought_in_content:
            from toolkit.models import served_turns

            served_turns.examine(self)
        self._examine_answers()

    def _examine_features(self) -> None:
        """Determine what of a conversation the template writes; ModelError if it leaves out what the user says."""
        reasoned = {key: [PROBE[0], {**PROBE[1], key: WORD}] for key in _REASONING}
        reasoning_key = next((key for key, chat in reasoned.items() if self._writes_word(chat, None)), None)
        missing = {feature for feature, (chat, tools) in _FEATURES.items() if not self._writes_word(chat, tools)}
        with suppress(RowError):
            chat = [PROBE[0], {**message_with_call("other"), "content": WORD}, {**_RESULT, "content": "Result."}]
            if WORD in self.render(chat, None, add_generation_prompt=False).partition("Result.")[2]:
                missing.add("text")  # Gemma 4 writes it after the result
        self.note(
            reasoning_key=reasoning_key,
            moves_thought=reasoning_key is not None and "</think>" not in self.template.text,
            matches_ids="tool_call_id" in self.template.text,
            missing=frozenset(missing),
        )
        if not self._writes_word([{"role": "user", "content": WORD}], None):
            raise ModelError(
                "The chat template of '{name}' does not write what the user says, which messages have under "
                "`content`. Give another: model.chat_template=FILE.",
                name=self.tokenizer.name_or_path,
            )

    def _writes_word(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> bool:
        """Whether the template writes the part of a conversation that holds `WORD`, rather than drop it; True if it
        rejects the conversation, as such rows become errors anyway.
        """
        try:
            return WORD in self.render(messages, tools, add_generation_prompt=False)
        except RowError:
            return True

    def _examine_answers(self) -> None:
        """Determine how the template writes answers; ModelError if its marks are not what generation would write."""
        with suppress(RowError):
            self.note(knows_probe=self.finder.by_comparison(PROBE[:2], None, [1]) is not None)
        self._examine_rewriting()
        compared = None
        with suppress(RowError):
            compared = self.finder.by_comparison(PROBE, None, [1, 3])
        if compared is None:
            return
        text, spans = compared
        question = self.render(PROBE[:1], None, add_generation_prompt=False)
        opening = text[len(question) : spans[0][0]]  # what the prompt for the first answer has after the question
        self._examine_surroundings(text, spans, opening)
        if self.traits.has_marks:
            self._examine_marks(spans, opening)

    def _examine_rewriting(self) -> None:
        """Determine whether earlier answers are written in another way once another turn follows."""
        reasoning_under_key = [m if m["role"] != "assistant" else {**m, "reasoning_content": "Why."} for m in PROBE]
        reasoning_in_text = [{**m, "content": f"<think>\nWhy.\n</think>\n\n{m['content']}"} for m in PROBE]
        # Rounds with tools at the end, and with another question after them.
        loops = (_TOOL_CONVERSATION, [*_TOOL_CONVERSATION, PROBE[2], *_TOOL_CONVERSATION[1:]])
        rewrites = [self._is_divided(PROBE, None), *(self._is_divided(loop, _TOOLS) for loop in loops)]
        rewrites_reasoning = [self._is_divided(chat, None) for chat in (reasoning_under_key, reasoning_in_text)]
        self.note(rewrites_reasoning=any(rewrites_reasoning), rewrites=any(rewrites))

    def _examine_surroundings(self, text: str, spans: list[Span], opening: str) -> None:
        """Determine `lead` and `frame`: what the template writes before and after the contents of answers. `text`: the
        rendering of the probe; `spans`: where its answers are, as generation would write them: the content, and what is
        around it; `opening`: the end of the prompt for the first answer, after the question.
        """
        prompt = text[: spans[0][0]]
        contents = [message["content"] for message in PROBE if message["role"] == "assistant"]
        answers = [(text[begin:end], content) for (begin, end), content in zip(spans, contents, strict=True)]
        before_content = {answer.partition(content)[0] for answer, content in answers}
        if len(before_content) == 1:  # all answers begin alike
            with_blank = [PROBE[0], {**PROBE[1], "content": f"\n{WORD}"}]
            is_stripped = f"\n{WORD}" not in self.render(with_blank, None, add_generation_prompt=False)
            self.note(lead=(prompt[-MERGED_CHARS:], before_content.pop(), is_stripped))
        endings = {answer.removeprefix(content) for answer, content in answers}
        ends_alike = len(endings) == 1 and all(answer.startswith(content) for answer, content in answers)
        # A prompt of another mode may have another opening.
        is_default_mode = self.render(PROBE[:1], None, True) == prompt
        if opening and is_default_mode and ends_alike:
            self.note(frame=(opening, endings.pop()))

    def _examine_marks(self, spans: list[Span], opening: str) -> None:
        """Compare the template's marks with the answers of the probe; ModelError if they differ. `spans`: where the
        answers are; `opening`: the generation prompt in front of the first.
        """
        text, marks = self.template.render_marked(PROBE, None)

        def answers_at(spans: list[Span]) -> list[str]:  # without the end token, which a template may leave unmarked
            return [text[begin:end].split(self.template.end)[0].strip() for begin, end in spans]

        marked, written = answers_at(marks), answers_at(spans)
        if marked == [(opening + answer).strip() for answer in written]:
            self.note(has_marks=False)  # SmolLM3's include the generation prompt, which is not trained
        elif marked != written:
            raise ModelError(
                "The chat template of '{name}' marks {marked} as what the assistant says, but generation would "
                "write {written}. Correct its {{% generation %}} marks, or give another: model.chat_template=FILE.",
                name=self.tokenizer.name_or_path,
                marked=marked,
                written=written,
            )

    def _is_divided(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> bool:
        """Whether a conversation must be divided into several to train its answers; False if it is rejected."""
        trained_indices = [index for index, message in enumerate(messages) if _is_trained(message)]
        try:
            listed, tools = prepared(messages, self.traits, self.shield), self.shield.cover(tools)
            return len(trained_indices) > 1 and len(self.finder.groups(listed, tools, trained_indices)) > 1
        except RowError:
            return False

    def _turn_marks(self) -> tuple[frozenset[str], frozenset[str]]:
        """Return the added tokens, special or not, by which the template begins and ends turns (not `<think>`), and
        those of them that follow an answer in place of the end token.
        """
        added_token = re.compile(any_of(token.content for token in self.tokenizer.added_tokens_decoder.values()))
        answer, ends, marks = PROBE[1]["content"], set[str](), set[str]()

        def after_answer(role: str) -> str:
            """Return what is written between an answer and the content of the role's turn after it."""
            rendered = self.render([*PROBE[:2], {"role": role, "content": "Two?"}], None, add_generation_prompt=False)
            return rendered.partition(answer)[2].partition("Two?")[0]

        def ends_of(between: str) -> set[str]:
            """Return the token that follows the answer at once, if it is not the end token."""
            token = added_token.match(between)
            return {token[0]} - {self.template.end} if token else set()

        with suppress(RowError):
            to_question = after_answer("user")
            ends |= ends_of(to_question)
            before_question = added_token.findall(to_question)
            marks.update(before_question)
            opening = self.render(PROBE[:1], None, True).removeprefix(self.render(PROBE[:1], None, False))
            marks.update(added_token.findall(opening)[:1])  # not <think> after <|assistant|>
            to_result = after_answer("tool")
            ends |= ends_of(to_result)
            # Of a result's turn that begins otherwise than a question's, the first token that differs.
            token_pairs = zip(added_token.findall(to_result), before_question, strict=False)
            marks.update([token for token, of_question in token_pairs if token != of_question][:1])
        return frozenset(marks), frozenset(ends)


def _openings(finder: AnswerFinder, shield: Shield) -> Openings | None:
    """Return what finds answers by the control tokens around them, None if the template writes none there."""
    template = finder.template
    openings, leads, answer = list[str](), set[str](), PROBE[1]["content"]
    for mode in MODES:
        question = template.render(PROBE[:1], None, add_generation_prompt=False, **mode)
        prompt = template.render(PROBE[:1], None, add_generation_prompt=True, **mode)
        openings.append(prompt.removeprefix(question))
        leads.add(shield.control_at(openings[-1]))  # such as <|assistant|>, "" without one
    is_same_in_all_modes = len(leads) == 1
    ending = template.render(PROBE[:2], None, add_generation_prompt=False).partition(answer)[2]
    for role in ("user", "tool"):  # whose turns may follow an answer
        with suppress(RowError):
            after = template.render([*PROBE[:2], {**_RESULT, "role": role}], None, False).partition(answer)[2]
            turn_start = finder.answer_end(after, ending) or 0  # after the end token, if the template writes one here
            leads.add(shield.control_at(after, turn_start))  # such as <|user|>
    if not is_same_in_all_modes or "" in leads:
        return None
    chat_template = template.tokenizer.chat_template
    templates = {template.text, *(chat_template.values() if isinstance(chat_template, dict) else ())}
    trees = [compiled(text).environment.parse(text) for text in templates]
    return Openings(openings, leads, {template.end, *finder.traits.ends}, trees)


class TemplateChatEncoder:
    """Encodes through a tokenizer's own chat template; control strings in messages stay text.

    Answers are located by comparing the rendered conversation up to an answer with that including it; a template's own
    marks ({% generation %}) must agree, else it is an error. If a template writes earlier answers in another way once
    another turn follows, they are trained in separate samples (`divide`). `train_thinking`: whether the loss covers the
    reasoning before an answer's content.
    """

    only_last = False
    can_cut = True

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", train_thinking: bool = True) -> None:
        if not tokenizer.chat_template:
            raise ModelError(
                "The tokenizer '{name}' has no chat template. Name one: {setting}.",
                name=tokenizer.name_or_path,
                setting=_template_setting(tokenizer),
            )
        if tokenizer.eos_token_id is None:
            raise ModelError(
                "The tokenizer '{name}' has no end-of-sequence token, so a model could not learn where to stop. "
                "Set eos_token in its tokenizer_config.json.",
                name=tokenizer.name_or_path,
            )
        self.tokenizer, self.train_thinking = tokenizer, train_thinking
        self.vocab_size = len(tokenizer)
        self.answer_ids: list[int] = []  # for the interface: ChatGLM's formats have such tokens
        backend = getattr(tokenizer, "backend_tokenizer", None)
        parts = [
            # One more for official ChatGLM tokenizers, whose caches need another key: spawned workers had the family's
            # own template on them until version 7.
            f"{CODE_VERSION + hasattr(tokenizer, 'own_template')} {train_thinking}",
            type(tokenizer).__name__,
            backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True),
            json.dumps(tokenizer.chat_template),
            json.dumps({name: str(token) for name, token in tokenizer.special_tokens_map.items()}, sort_keys=True),
        ]
        self.fingerprint = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
        self.template = Template(tokenizer)
        self.template.deadline = time.monotonic() + RENDERING_S  # of all of the examples together
        self.traits = examine(self.template)
        self.drops_system, self.drops_tools = "system" in self.traits.missing, "tools" in self.traits.missing
        other_ends: list[int] = tokenizer.convert_tokens_to_ids(sorted(self.traits.ends | self.traits.call_ends))
        self.stop_ids = [int(tokenizer.eos_token_id), *other_ends]
        self.shield = Shield(tokenizer, self.traits.turn_marks)
        self.finder = AnswerFinder(self.template, self.traits)
        with suppress(RowError):
            self.finder.openings = _openings(self.finder, self.shield)
        self.span_tokenizer = SpanTokenizer(tokenizer, self.finder.openings, self.shield, self.traits.call_ends)
        self._examine_special_tokens()
        self.template.deadline = math.inf

    def _examine_special_tokens(self) -> None:
        """Determine the special tokens that the tokenizer puts before and after a text: `before_text`, `after_text`."""

        def ids_of(text: str, add_special_tokens: bool) -> list[int]:
            return list(self.tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"])

        bos = self.tokenizer.bos_token if getattr(self.tokenizer, "add_bos_token", False) else None
        wrapped, bare, with_bos = ids_of(WORD, True), ids_of(WORD, False), ids_of((bos or "") + WORD, False)
        # Where the word's own ids are among `wrapped`: the last such place.
        start = next((n for n in reversed(range(len(wrapped) + 1)) if wrapped[n : n + len(bare)] == bare), 0)
        self.before_text = wrapped[:start]
        self.after_text: Sequence[int] = wrapped[start + len(bare) :]
        # Earlier versions added a BOS by add_bos_token alone: caches of other tokenizers get another key.
        self.text_key: Sequence[int] = wrapped if wrapped != with_bos else ()

    def encode(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> Encoded:
        """Return ids and mask of one conversation; see `toolkit.sample_types.ChatEncoder`."""
        return self.encode_many([messages], [tools])[0]

    def encode_many(
        self, conversations: Sequence[Sequence[Message]], tools: Sequence[Sequence[Any] | None] | None = None
    ) -> list[Encoded]:
        """Return ids and mask of several conversations; RowError if the template rejects one, ModelError if it writes a
        question in another way once its answer follows.
        """
        if not conversations:
            return []
        texts: list[str] = []
        spans: list[list[Span]] = []
        with time_limit(RENDERING_S):  # inside this limit that of each rendering costs less
            for messages, chat_tools in zip(conversations, tools or [None] * len(conversations), strict=True):
                text, trained = self._text_and_spans(messages, self.shield.cover(chat_tools))
                texts.append(text)
                spans.append(trained)
        try:
            encoded = self.span_tokenizer.encode_many(texts, spans)
        except BaseException as error:  # a panic of the Rust library is no Exception
            if not is_failure(error):
                raise
            raise RowError(tr("the tokenizer fails on the text: {reason}", reason=reason_of(error))) from error
        result = []
        for messages, (ids, mask) in zip(conversations, encoded, strict=True):
            start = self.before_text if messages[0]["role"] == "text" else []
            result.append((start + ids, [False] * len(start) + mask))
        return result

    def _text_and_spans(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> tuple[str, list[Span]]:
        """Return the rendered text of a conversation, or a plain text, and the spans that are trained."""
        if isinstance(messages, _RenderedPrefix):
            return self._trained_spans(messages.shielded, tools, messages.text)
        messages = prepared(messages, self.traits, self.shield)
        if messages[0]["role"] != "text":
            return self._trained_spans(messages, tools)
        text = f"{messages[0]['content']}{self.tokenizer.eos_token}"
        return text, [(0, len(text))]

    def divide(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> list[list[Message]]:
        """Return the conversations in which the answers are trained, each answer in one, with the tokens that
        generation would produce. That is the conversation itself, or prefixes of it if an earlier answer would have
        other tokens once another turn follows: if the template drops its reasoning, or the tokenizer merges its first
        characters with the prompt. Prefixes carry their rendering (`_RenderedPrefix`), which `encode_many` takes.
        """
        trained_indices = [index for index, message in enumerate(messages) if _is_trained(message)]
        if trained_indices in ([], [len(messages) - 1]):
            return [list(messages)]
        merged = {index for index in trained_indices if self._merges(messages[index])}
        is_rewritten = self.traits.rewrites or self.traits.no_thinking is not None
        is_rewritten = is_rewritten or (self.traits.rewrites_reasoning and any(map(has_reasoning, messages)))
        if not is_rewritten and merged <= {trained_indices[-1]}:
            return [list(messages)]
        shielded, tools = prepared(messages, self.traits, self.shield), self.shield.cover(tools)
        parts: list[list[Message]] = []
        for included, text in self.finder.groups(shielded, tools, trained_indices, merged):
            marked, marked_shielded = _up_to_last(messages, included), _up_to_last(shielded, included)
            parts.append(_RenderedPrefix(marked, marked_shielded, text))
        return parts

    def _merges(self, message: Message) -> bool:
        """Whether the tokenizer would merge the beginning of an answer with the end of the prompt before it."""
        if self.traits.lead is None or message["role"] != "assistant" or message.get("tool_calls"):
            return False
        prompt, before, is_stripped = self.traits.lead
        content = message["content"].lstrip() if is_stripped else message["content"]
        return self.span_tokenizer.merges(prompt, before + content)

    def prompt(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> list[int]:
        """Return the ids that generation starts from."""
        text = self.render(
            prepared(messages, self.traits, self.shield), self.shield.cover(tools), add_generation_prompt=True
        )
        return self.span_tokenizer.encode_many([text], [[]])[0][0]

    def render(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, add_generation_prompt: bool, **mode: bool
    ) -> str:
        """Return the template's text for messages as they are; see `Template.render`."""
        return self.template.render(messages, tools, add_generation_prompt, **mode)

    def _trained_spans(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, rendered: str = ""
    ) -> tuple[str, list[Span]]:
        """Return a conversation's text, `rendered` if that is not "", and the trained part of each of its trained
        messages. RowError or ModelError if the template does not write that, or not as it would be generated.
        """
        trained_indices = [index for index, message in enumerate(messages) if _is_trained(message)]
        # Messages with nothing but role and content.
        is_plain = all(len(message) == 2 and message["role"] != "tool" for message in messages)
        if not is_plain:
            self._check_nothing_is_lost(messages)
        located = self.finder.by_marks(messages, tools, trained_indices) if self.traits.has_marks else None
        located = located or self.finder.by_openings(messages, tools, trained_indices, rendered)
        if located is None:
            from toolkit.models.template_errors import untrainable

            raise untrainable(self, messages, trained_indices)
        text, spans = located
        for index, (begin, stop) in zip(trained_indices, spans, strict=True):
            self._check_written(messages[index], index, text[begin:stop])
        has_thought = any("</think>" in messages[index]["content"] for index in trained_indices)
        # Nothing that `_trained_part` would cut off or add.
        if is_plain and not has_thought and self.train_thinking and not self.traits.ends:
            return text, spans
        spans_by_message = zip(trained_indices, spans, strict=True)
        return text, [self._trained_part(messages, tools, index, text, span) for index, span in spans_by_message]

    def _check_written(self, message: Message, index: int, text: str) -> None:
        """Raise RowError unless `text`, which the template writes for a trained message, holds the message's content
        after the reasoning, and the names of its calls and of their arguments. `index`: of the message.
        """
        functions = [call["function"] for call in message.get("tool_calls") or ()]
        parts = [message["content"].rpartition("</think>")[2].strip()]
        parts += [str(name) for function in functions for name in (function["name"], *function["arguments"])]
        if lost := next((part for part in parts if part not in text and _as_json(part) not in text), ""):
            raise RowError(
                "message {number}: the chat template of '{name}' writes {text} where the answer has {lost}. Give one "
                "that writes what messages have under `content` and `tool_calls`: model.chat_template=FILE",
                number=index + 1,
                name=self.tokenizer.name_or_path,
                text=repr(shortened(text, EXCERPT_CHARS)),
                lost=repr(shortened(lost, EXCERPT_CHARS)),
            )

    def _check_nothing_is_lost(self, messages: Sequence[Message]) -> None:
        """Raise RowError if the template would drop a part of a message."""
        for number, message in enumerate(messages, start=1):
            calls, features = message.get("tool_calls") or [], set[str]()
            if message["role"] == "tool":
                features = {"tool"}
            elif calls:
                features = {"tool_calls"}
                if message["content"]:
                    features.add("text")
                if len(calls) > 1:
                    features.add("parallel")
            lost = max(features & self.traits.missing, default="")  # the error names one of them
            writes_reasoning = self.traits.reasoning_key is not None or self.traits.thought is not None
            if message.get("reasoning_content") and _is_trained(message) and not writes_reasoning:
                lost = "reasoning"
            if lost:
                from toolkit.models.template_errors import lost_part

                raise lost_part(number, lost, _template_setting(self.tokenizer, lost))

    def _trained_part(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, index: int, text: str, span: Span
    ) -> Span:
        """Return the part that is trained of the `span` of the message `index` in a conversation's text: without the
        reasoning if `train_thinking` is off, and with the token after the message if it ends answers but begins the
        next turn, as GLM-4's `<|user|>`. RowError if the template leaves out the reasoning.
        """
        (begin, stop), message = span, messages[index]
        block = THOUGHT.match(message["content"]) if "</think>" in message["content"] else None
        thought = str(message.get(self.traits.reasoning_key or "") or (block[1] if block else "")).strip()
        if thought and text.find(thought, begin, stop) < 0:
            raise RowError(
                "the chat template leaves out the reasoning of an answer that is to be trained. Give one that keeps "
                "it: {setting}",
                setting=_template_setting(self.tokenizer, "reasoning"),
            )
        if not self.train_thinking and message["role"] == "assistant":
            start = self._content_start(messages, tools, index, text, span, block[0] if block else "")
            if thought and start == begin:  # the content was not found: what follows the reasoning is trained
                start = text.index(thought, begin) + len(thought)
            if thought or "</think>" in text[begin:start]:  # else what precedes the content is no reasoning
                begin = start
        if self.traits.ends and self.template.end not in text[begin:stop]:
            following = [end for end in self.traits.ends if text.startswith(end, stop)]
            stop += len(following[0]) if following else 0
        return begin, stop

    def _content_start(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, index: int, text: str, span: Span, block: str
    ) -> int:
        """Return where the content of the message `index` begins in a conversation's text, after the reasoning: the
        first place in its `span` where the text with another content, U+FDD2, differs; the span's start if there is
        none. `block`: reasoning that the content begins with, which the other content keeps; "" without.
        """
        begin, stop = span
        other = {**messages[index], "content": f"{block}\ufdd2"}
        try:
            changed = self.render([*messages[:index], other, *messages[index + 1 :]], tools, False)
            # The prompt in a text by `served_turns.after_prompt` is longer, by `shift`, than in the template's own.
            is_own = changed[:begin] == text[:begin]
            shift = 0 if is_own else len(text) - len(self.render(messages, tools, False))
        except RowError:  # gpt-oss' rejects a text with both reasoning and calls
            return begin
        chars = zip(text[begin:stop], changed[begin - shift :], strict=False)
        return begin + next((offset for offset, (char, changed_char) in enumerate(chars) if char != changed_char), 0)


def prepared(messages: Sequence[Message], traits: TemplateTraits, shield: Shield) -> Sequence[Message]:
    """Return messages as the template gets them. In this order: calls and results get ids if it needs these, reasoning
    is moved into the content or out of it, its key becomes the template's, and control strings are broken up.
    """
    key = traits.reasoning_key
    if traits.matches_ids or traits.moves_thought:
        from toolkit.models import served_turns
    if traits.matches_ids and any("id" not in call for m in messages for call in m.get("tool_calls") or ()):
        messages = served_turns.with_ids(messages)
    if traits.thought:
        begin, end = traits.thought
        messages = [
            {**m, "content": f"{begin}{m['reasoning_content'].strip()}{end}{m['content']}", "reasoning_content": ""}
            if m.get("reasoning_content")
            else m
            for m in messages
        ]
    if traits.moves_thought:
        messages = [
            served_turns.with_key(message) if message["role"] == "assistant" else message for message in messages
        ]
    if key not in (None, "reasoning_content"):  # the template has a key of its own
        messages = [{key if name == "reasoning_content" else name: m[name] for name in m} for m in messages]
    return shield.cover(messages)


class _RenderedPrefix(list[Message]):
    """A prefix of a conversation (`divide`), with the messages as the template gets them (`shielded`) and their
    rendering (`text`), so that `encode_many` does not render it again.
    """

    def __init__(self, messages: Sequence[Message], shielded: Sequence[Message], text: str) -> None:
        super().__init__(messages)
        self.shielded, self.text = shielded, text


def _up_to_last(messages: Sequence[Message], trained_indices: Sequence[int]) -> list[Message]:
    """Return the messages up to the last of `trained_indices`, with `loss` for these alone."""
    shown = messages[: trained_indices[-1] + 1]
    return [{**message, "loss": index in trained_indices} for index, message in enumerate(shown)]


def _as_json(text: str) -> str:
    """Return a text as a template's `tojson` writes it, without the quotes."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def has_reasoning(message: Message) -> bool:
    """Whether a message has reasoning, under its key or in its text."""
    return "reasoning_content" in message or "</think>" in message["content"]


def _is_trained(message: Message) -> bool:
    return bool(message.get("loss", message["role"] == "assistant"))
