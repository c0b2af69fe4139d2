"""Renders conversations through a tokenizer's chat template, and finds the answers in the text.

A template begins each answer with a control token, and the next turn with another; messages hold none, as `Shield`
breaks them up. Finding answers by these (`Openings`) is faster than comparing renderings, which finds all.
"""

import math
import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError, nodes

from toolkit.messages import ModelError, RowError, reason_of, tr
from toolkit.models.sandbox import TooSlow, bound_templates, compiled, time_limit
from toolkit.models.span_tokenizer import Span, any_of
from toolkit.sample_types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

RENDERING_S = 10
"""Seconds that rendering one conversation may take; thousands of messages take some hundredths."""
_MIN_RENDERING_S = 0.5
MODES: tuple[dict[str, bool], ...] = ({}, {"enable_thinking": False}, {"enable_thinking": True})
"""Options of a template for generation. The prompt of an answer is the first of these modes' that its rendering begins
with: GLM-4.7's default begins the reasoning, that of Qwen3.5's small models ends it."""
_MOST_FORMS = 1 << 16
_FAILURES = (TemplateError, TypeError, ValueError, AttributeError, KeyError)


class Template:
    """A tokenizer's chat template, rendered within a time limit."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self.tokenizer, self.text = tokenizer, tokenizer.get_chat_template()
        self.end = str(tokenizer.eos_token)
        names = tokenizer.special_tokens_map
        self.tokens = {name: str(token) for name, token in names.items() if name != "additional_special_tokens"}
        self.deadline = math.inf
        """When several renderings together must have ended, by `time.monotonic`."""

    def render(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, add_generation_prompt: bool, **mode: bool
    ) -> str:
        """Return the text of a conversation, with `tools` that may be called, through transformers' own sandbox. Its
        public function copies every message first, which plain JSON does not need and costs more than the rendering
        (transformers 5.23). `mode`: options as in `MODES`. See `_rendered` for errors.
        """
        listed = list(tools) if tools else None
        template = self.text if listed is None else self.tokenizer.get_chat_template(tools=listed)

        def render(conversation: Sequence[Message]) -> str:
            options: dict[str, Any] = {"add_generation_prompt": add_generation_prompt, **mode, **self.tokens}
            return compiled(template).render(messages=conversation, tools=listed, documents=None, **options)

        # What `deadline` leaves, but not so little that an ordinary rendering would fail.
        seconds = min(RENDERING_S, max(_MIN_RENDERING_S, self.deadline - time.monotonic()))
        text: str = _rendered(render, messages, seconds)
        return text

    def render_marked(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> tuple[str, list[Span]]:
        """Return a conversation's text, and the spans of its characters that the template puts between
        {% generation %} and {% endgeneration %}: answers, by transformers' own rendering. See `_rendered` for errors.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        bound_templates()
        listed = list(tools) if tools else None

        def render(conversation: Sequence[Message]) -> Any:
            options: dict[str, Any] = {"return_assistant_tokens_mask": True, **self.tokens}
            options["chat_template"] = self.tokenizer.get_chat_template(tools=listed)
            return render_jinja_template(conversations=[conversation], tools=listed, **options)

        [text], [marks] = _rendered(render, messages)  # lists, as it renders several conversations
        return text, [(int(begin), int(end)) for begin, end in marks]


def _rendered(
    render: Callable[[Sequence[Message]], Any], messages: Sequence[Message], seconds: float = RENDERING_S
) -> Any:
    """Return `render(messages)`, a template's rendering, if need be with calls in another form. RowError if the
    template rejects every form, ModelError if that takes more than `seconds` together.
    """
    try:
        with time_limit(seconds):
            return _rendered_in_some_form(render, messages)
    except TooSlow:
        # No RowError, which skips the row: the next one would take as long.
        raise ModelError(
            "The chat template takes more than {seconds} s for one conversation. Give another: "
            "model.chat_template=FILE.",
            seconds=RENDERING_S,
        ) from None
    except Exception as error:  # a template is a program, in which anything may go wrong
        failure = tr("the chat template rejects the conversation: {reason}", reason=reason_of(error))
    raise RowError(failure) from None


def _rendered_in_some_form(render: Callable[[Sequence[Message]], Any], messages: Sequence[Message]) -> Any:
    """Return `render(messages)`; if that fails, the rendering with the arguments of calls as JSON text; if that fails
    too, with ids for calls. The error of the first if all fail, or if there are no calls.
    """
    try:
        return render(messages)
    except _FAILURES:
        if not any(message.get("tool_calls") for message in messages):
            raise
        from toolkit.models.served_turns import with_ids, with_text_arguments

        for in_other_form in (with_text_arguments, with_ids):
            with suppress(*_FAILURES):
                return render(in_other_form(messages))
        raise


@dataclass(frozen=True, kw_only=True, slots=True)
class TemplateTraits:
    """How a chat template writes conversations; `examine` of models/chat_template.py finds out. The defaults hold for
    every template, but take more renderings.
    """

    has_marks: bool
    """Whether it marks what is trained, by {% generation %}."""
    knows_probe: bool = False
    """Whether the answer's span is found in an ordinary question and answer."""
    frame: tuple[str, str] | None = None
    """Text before and after each answer, if both are always the same."""
    lead: tuple[str, str, bool] | None = None
    """End of the prompt for an answer, start of the answer before its content, and whether the content is stripped;
    None if they are not always the same."""
    rewrites: bool = True
    """Whether earlier answers are written in another way once another turn follows."""
    rewrites_reasoning: bool = True
    """Whether those with reasoning are."""
    turn_marks: frozenset[str] = frozenset()
    """Added tokens, special or not, by which it begins and ends turns."""
    ends: frozenset[str] = frozenset()
    """Other tokens than the end token that follow an answer: GLM-4's `<|user|>` and `<|observation|>`."""
    earlier_end: str = ""
    """Token that ends answers which others follow, in place of the end token: gpt-oss' `<|end|>`."""
    call_ends: frozenset[str] = frozenset()
    """Tokens that end calls in place of the end token: gpt-oss' `<|call|>`, Gemma 4's `<|tool_response>`."""
    no_thinking: tuple[str, str, dict[str, bool]] | None = None
    """How an answer is asked for, what follows in a prompt that asks for no reasoning, and the mode of that prompt,
    if the template leaves it out where it writes an answer: Gemma 4's empty thought."""
    thought: tuple[str, str] | None = None
    """What is written before and after an answer's reasoning in its content, if the template expects it there and
    under no key: SmolLM3's."""
    reasoning_key: str | None = "reasoning_content"
    """Key in which the template expects an answer's reasoning, None if it writes none."""
    moves_thought: bool = False
    """Whether the template has a key for reasoning and would write <think> as text: gpt-oss', Seed-OSS'."""
    matches_ids: bool = False
    """Whether the template looks for the call that a result answers by its id."""
    missing: frozenset[str] = frozenset()
    """Features of a conversation that the template drops."""


class AnswerFinder:
    """Finds the answers `trained_indices` of conversations in their text, None if it cannot."""

    def __init__(self, template: Template, traits: TemplateTraits, openings: "Openings | None" = None) -> None:
        self.template, self.traits, self.openings = template, traits, openings

    def by_openings(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, trained_indices: Sequence[int], rendered: str
    ) -> tuple[str, list[Span]] | None:
        """Return the same as `by_comparison`, by one rendering if both agreed on such conversations before. `rendered`:
        the conversation's text if it is known, else "".
        """
        answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        # Openings are of answers alone; with `no_thinking` a prompt holds what the conversation's text lacks.
        if self.openings is None or self.traits.no_thinking or not set(trained_indices) <= set(answers):
            return self.by_comparison(messages, tools, trained_indices)
        text = rendered or self.template.render(messages, tools, add_generation_prompt=False)
        spans = self.openings.find(messages, text)
        if spans is None:
            return self.by_comparison(messages, tools, trained_indices)
        located = text, [span for index, span in zip(answers, spans, strict=True) if index in trained_indices]
        forms = self.openings.forms(messages, tools, self.traits.reasoning_key)
        if forms <= self.openings.trusted:
            return located
        compared = self.by_comparison(messages, tools, trained_indices)
        if compared == located:
            self.openings.trust(forms)
        return compared

    def by_comparison(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, trained_indices: Sequence[int]
    ) -> tuple[str, list[Span]] | None:
        """Return a conversation's text and the spans of its messages `trained_indices`; None if the template writes
        turns in another way once others follow. An answer is what the rendering up to it has after its prompt.
        """
        rendered = self.template.render(messages, tools, add_generation_prompt=False)
        spans = []
        for index in trained_indices:
            span = self._span_by_comparison(messages, tools, index, rendered)
            if span is None:
                # Such templates leave a part of the last answer's prompt out where they write the answer.
                is_last_alone = trained_indices == [len(messages) - 1]
                if is_last_alone and (self.traits.earlier_end or self.traits.no_thinking):
                    from toolkit.models import served_turns

                    return served_turns.after_prompt(self.template, self.traits, messages, tools, rendered)
                return None
            spans.append(span)
        return rendered, spans

    def _span_by_comparison(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, index: int, rendered: str
    ) -> Span | None:
        """Return the span of one message in a conversation's text `rendered`; None if this does not begin with the
        rendering up to that message, or with the prompt for it.
        """
        up_to_answer = rendered
        if index < len(messages) - 1:
            up_to_answer = self.template.render(messages[: index + 1], tools, add_generation_prompt=False)
        stop = self.answer_end(rendered, up_to_answer)
        if stop is None:
            return None
        begin = self._answer_begin(messages[index], up_to_answer)
        if begin is None:
            begin = self.prompt_length(messages[:index], tools, rendered, messages[index]["role"] == "assistant")
        return None if begin is None else (begin, stop)

    def answer_end(self, text: str, up_to_answer: str) -> int | None:
        """Return where an answer ends in a conversation's text: the length of `up_to_answer`, the rendering that ends
        with it, if `text` begins with that, else None. `text` may lack its end token: Phi-3's template writes one after
        the last answer only.
        """
        if text.startswith(up_to_answer):
            return len(up_to_answer)
        shorter = up_to_answer.removesuffix(self.template.end)
        if shorter == up_to_answer or not text.startswith(shorter):
            return None
        # With another token at its end the answer is not what generation would produce.
        has_earlier_end = self.traits.earlier_end and text.startswith(self.traits.earlier_end, len(shorter))
        return None if has_earlier_end else len(shorter)

    def prompt_length(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, text: str, for_answer: bool
    ) -> int | None:
        """Return the length of the prompt that the template makes of `messages`, in the first of `MODES` in which
        `text` begins with it; None if there is none. `for_answer`: whether the prompt ends with what asks for an
        answer; without that only the default mode is tried.
        """
        for mode in MODES if for_answer else MODES[:1]:
            prompt = self.template.render(messages, tools, for_answer, **mode)
            if text.startswith(prompt):
                return len(prompt)
        return None

    def _answer_begin(self, message: Message, text: str) -> int | None:
        """Return where an answer begins in a text that ends with it and its `frame`, else None; saves a rendering."""
        if not self.traits.frame or message["role"] != "assistant" or message.get("tool_calls"):
            return None
        opening, ending = self.traits.frame
        begin = len(text) - len(ending) - len(message["content"])
        is_framed = begin >= 0 and text.endswith(message["content"] + ending) and text.endswith(opening, 0, begin)
        return begin if is_framed else None

    def by_marks(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, trained_indices: Sequence[int]
    ) -> tuple[str, list[Span]] | None:
        """Return a conversation's text and the spans of its messages `trained_indices` by the template's marks
        ({% generation %}); None if it does not mark each answer once.
        """
        answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        text, marks = self.template.render_marked(messages, tools)
        # A template that joins messages marks fewer answers than there are.
        if len(marks) != len(answers) or not set(trained_indices) <= set(answers):
            return None
        return text, [mark for index, mark in zip(answers, marks, strict=True) if index in trained_indices]

    def groups(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None,
        trained_indices: list[int],
        merged: Collection[int] = (),
    ) -> list[tuple[list[int], str]]:
        """Divide trained answers into groups: of each the indices of its answers, and a text in which generation would
        produce all of them, which ends with the last. `merged`: answers that can only be the last of their text, as the
        tokenizer would merge their first characters with the prompt.
        """
        texts = {
            index: self.template.render(messages[: index + 1], tools, add_generation_prompt=False)
            for index in trained_indices
        }
        groups: list[tuple[list[int], str]] = []
        remaining = trained_indices
        while remaining:  # the last answer, with those before it that its text has as generation would produce them
            last = remaining[-1]
            # Whether its text begins with its prompt. Else `served_turns.after_prompt` gives it a text of its own.
            has_prompt = self.traits.no_thinking is None
            if self.traits.earlier_end and has_prompt:
                has_prompt = self.prompt_length(messages[:last], tools, texts[last], for_answer=True) is not None
            candidates = [index for index in remaining[:-1] if has_prompt and index not in merged]
            included = [index for index in candidates if self.answer_end(texts[last], texts[index]) is not None]
            included.append(last)
            remaining = [index for index in remaining if index not in included]
            groups.insert(0, (included, texts[last]))
        return groups


class Openings:
    """Finds the answers in a rendered conversation by the control tokens that open them.

    Whether that is right may depend on features of a message and of those around it, by which a template decides how to
    write it. The `forms` of a message are these features: roles, calls and texts of the message, its neighbours and
    later messages; of a text whether it is empty, begins or ends with white space, and which of the template's
    constants it contains. Forms are trusted once a comparison of renderings has found the answers at the same spans.
    """

    def __init__(
        self, openings: Iterable[str], leads: Iterable[str], ends: Iterable[str], templates: Iterable[nodes.Template]
    ) -> None:
        """`openings`: ends of prompts for an answer, from the control token on; the first that matches counts. `leads`:
        control tokens that begin turns. `ends`: those that end answers. `templates`: parsed chat templates.
        """
        self.texts = list(dict.fromkeys(openings))
        self._openings = re.compile("|".join(map(re.escape, self.texts)))
        self._leads = re.compile(any_of(leads))
        self.closings = {*leads, *ends}
        """Control tokens at which, or before which, an answer ends."""
        self._constants = sorted(set().union(*map(_compared_constants, templates)))
        self.trusted: set[Any] = set()
        """Forms for which a comparison has found the same spans."""

    def find(self, messages: Sequence[Mapping[str, Any]], text: str) -> list[Span] | None:
        """Return the spans of all answers in a conversation's text; None unless it has an opening for each of them."""
        begins = [opening.end() for opening in self._openings.finditer(text)]
        if len(begins) != sum(message["role"] == "assistant" for message in messages):
            return None
        ends = (self._leads.search(text, begin) for begin in begins)
        return [(begin, end.start() if end else len(text)) for begin, end in zip(begins, ends, strict=True)]

    def forms(self, messages: Sequence[Mapping[str, Any]], tools: Any, reasoning_key: str | None) -> set[Any]:
        """Return the forms that occur in a conversation: of each message a tuple of the features of the message before
        it, of its own, of those of the message after it (None where there is no such message), of what occurs in later
        messages, and of whether there are tools. `reasoning_key`: as in `TemplateTraits`.
        """
        features = [None, *(self._features_of(message, reasoning_key) for message in messages), None]
        forms: set[Any] = set()
        later = frozenset[Any]()  # parts of the features of later messages, whichever has them
        for index in range(len(messages), 0, -1):
            before, own_features, after = features[index - 1 : index + 2]
            assert own_features is not None
            forms.add((before, own_features, after, later, bool(tools)))
            later = later.union(*own_features)
        return forms

    def trust(self, forms: set[Any]) -> None:
        """Trust `find` for messages of these forms from now on; a bound keeps the memory for them small."""
        if len(self.trusted) < _MOST_FORMS:
            self.trusted |= forms

    def _features_of(self, message: Mapping[str, Any], reasoning_key: str | None) -> tuple[Any, ...]:
        """Return the features of a message by which a template may decide how to write it: role, loss and whether there
        are several calls (None: no call); those of its text; and those of its reasoning, () without one.
        """
        calls, reasoning = message.get("tool_calls"), message.get(reasoning_key or "")
        several_calls = len(calls) > 1 if calls else None
        reasoning_features = self._text_features(str(reasoning)) if reasoning else ()
        apart_from_texts = message["role"], message.get("loss"), several_calls
        return apart_from_texts, self._text_features(message["content"]), reasoning_features

    def _text_features(self, text: str) -> tuple[Any, ...]:
        """Return whether a text is blank, and begins or ends with white space; and the constants in it or at an end."""
        contained = [constant for constant in self._constants if constant in text]
        marks = [(constant, text.startswith(constant), text.endswith(constant)) for constant in contained]
        return text.strip() == "", text[:1].isspace(), text[-1:].isspace(), *marks


def _compared_constants(tree: nodes.Template) -> set[str]:
    """Return the strings that a template compares texts with, splits texts by or searches in texts; not roles."""
    users = [*tree.find_all((nodes.Call, nodes.Filter, nodes.Test))]
    users += [comparison for comparison in tree.find_all(nodes.Compare) if not _asks_for_role(comparison.expr)]
    constants = (constant.value for user in users for constant in user.find_all(nodes.Const))
    return {constant for constant in constants if constant and isinstance(constant, str)}


def _asks_for_role(node: nodes.Expr) -> bool:
    """Whether an expression of a template is a message's role or type."""
    name = node.arg if isinstance(node, nodes.Getitem) else None
    asked = name.value if isinstance(name, nodes.Const) else getattr(node, "attr", "")
    return asked in ("role", "type")
