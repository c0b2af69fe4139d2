"""Turns that a chat template writes in another way than it serves them: what `TemplateChatEncoder` does about those."""

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from toolkit.messages import RowError
from toolkit.models.answer_spans import MODES, Template, TemplateTraits
from toolkit.models.chat_template import PROBE, WORD, message_with_call
from toolkit.models.span_tokenizer import any_of
from toolkit.sample_types import Message

if TYPE_CHECKING:
    from toolkit.models.chat_template import Examination
    from toolkit.models.span_tokenizer import Span


def examine(examination: "Examination") -> None:
    """Determine the `TemplateTraits` `earlier_end` and `call_ends` (`_examine_ends`), `no_thinking` and `thought`."""
    template, answer = examination.template, PROBE[1]["content"]
    question = template.render(PROBE[:1], None, add_generation_prompt=False)
    answered = template.render(PROBE[:2], None, add_generation_prompt=False)
    if answered.partition(answer)[2].startswith(template.end):
        _examine_ends(examination, question)
    prompts = [template.render(PROBE[:1], None, True, **mode) for mode in MODES]
    begins_with_prompt = any(answered.startswith(prompt) for prompt in prompts)
    openings = [
        prompt.removeprefix(template.render(PROBE[:1], None, False, **mode))
        for prompt, mode in zip(prompts, MODES, strict=True)
    ]
    # Qwen3's: "<|im_start|>assistant\n" with reasoning; without, "<think>\n\n</think>\n\n" follows (`no_thought`).
    thinking_opening = openings[-1]
    for mode, opening in zip(MODES[:-1], openings, strict=False):
        no_thought = opening.removeprefix(thinking_opening)
        if not thinking_opening or no_thought in ("", opening):  # this mode does not end the reasoning
            continue
        # The template leaves `no_thought` out where it writes an answer.
        if answered.startswith(question + thinking_opening) and not begins_with_prompt:
            examination.note(no_thinking=(thinking_opening, no_thought, mode))
        # Without a key for reasoning: whether it may stand in the content, in the block that `no_thought` leaves empty.
        block = re.fullmatch(r"(<think>\n?)(\n?</think>\s*)", no_thought)
        if examination.traits.reasoning_key is None and block:
            thought = f"{block[1]}Why.{block[2]}"
            chat = [PROBE[0], {**PROBE[1], "content": thought + answer}]
            if thought + answer in template.render(chat, None, add_generation_prompt=False):
                examination.note(thought=(block[1], block[2]))
        return


def _examine_ends(examination: "Examination", question: str) -> None:
    """Determine `earlier_end` and `call_ends` of a template that ends a conversation's last answer with the end token.
    `question`: the rendering of a conversation of the probe's question alone.
    """
    template = examination.template
    added_token = re.compile(any_of(token.content for token in template.tokenizer.added_tokens_decoder.values()))
    # gpt-oss ends an answer that another question follows as it ends questions: `<|end|>`, not `<|return|>`.
    followed = template.render(PROBE[:3], None, add_generation_prompt=False)
    after_answer, after_question = (
        text.partition(message["content"])[2] for text, message in ((followed, PROBE[1]), (question, PROBE[0]))
    )
    mark = added_token.match(after_answer)
    if mark and mark[0] != template.end and after_question.startswith(mark[0]):
        examination.note(earlier_end=mark[0], ends=examination.traits.ends - {mark[0]})
    with suppress(RowError):  # it rejects calls
        called = template.render([PROBE[0], message_with_call(WORD)], None, add_generation_prompt=False)
        # The added token that the call ends with, if it ends with one.
        last_tokens = [token for token in added_token.findall(called) if called.rstrip().endswith(token)][-1:]
        examination.note(call_ends=frozenset(last_tokens) - {template.end})


def after_prompt(
    template: Template,
    traits: TemplateTraits,
    messages: Sequence[Message],
    tools: Sequence[Any] | None,
    rendered: str,
) -> tuple[str, list["Span"]] | None:
    """Return the prompt for the last message with what the template writes for it, and the span of that; None if
    that is not known. The prompt holds what the rendering of the conversation leaves out: that no reasoning is
    asked for (`no_thinking`), or the reasoning before a call, which gpt-oss' drops once the answer follows.
    """
    *before, message = messages
    if message["role"] != "assistant":
        return None
    if traits.no_thinking:
        opening, no_thought, mode = traits.no_thinking
        # The rendering continues after `opening` with the answer, the prompt with `no_thought`.
        start = template.render(before, tools, False, **mode) + opening
        prompt, written = start + no_thought, rendered.removeprefix(start)
        if written == rendered or template.render(before, tools, True, **mode) != prompt:
            return None
    else:  # what is written for the message is seen where it follows one question
        prompt = template.render(before, tools, True)
        question, question_prompt = template.render(PROBE[:1], tools, False), template.render(PROBE[:1], tools, True)
        short_chat = template.render([PROBE[0], message], tools, False)
        opening, written = question_prompt.removeprefix(question), short_chat.removeprefix(question_prompt)
        is_seen = opening != "" and written != short_chat
        if not is_seen or not prompt.endswith(opening) or not rendered.endswith(opening + written):
            return None
    return prompt + written, [(len(prompt), len(prompt) + len(written))]


def with_key(message: Message) -> Message:
    """Return an answer with the <think> block that its content begins with under `reasoning_content` instead."""
    before, end, content = message["content"].partition("</think>")
    if not end or message.get("reasoning_content") or not before.lstrip().startswith("<think>"):
        return message
    thought = before.lstrip().removeprefix("<think>").strip()
    content = content.removeprefix("\n").removeprefix("\n")  # the empty line that separates them
    return {**message, "reasoning_content": thought, "content": content}


def with_text_arguments(messages: Sequence[Message]) -> list[Message]:
    """Return messages whose calls have their arguments as JSON text, the form of OpenAI's API."""
    changed: list[Message] = []
    for message in messages:
        calls = []
        for call in message.get("tool_calls") or []:
            arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
            calls.append({**call, "function": {**call["function"], "arguments": arguments}})
        changed.append({**message, "tool_calls": calls} if calls else message)
    return changed


def with_ids(messages: Sequence[Message]) -> list[Message]:
    """Return messages with ids for calls and, in order, results, as Mistral's templates need: of nine characters."""
    changed: list[Message] = []
    num_calls = num_results = 0
    for message in messages:
        calls = message.get("tool_calls") or []
        if calls:
            named = [{**call, "id": f"call{num_calls + n:05}"} for n, call in enumerate(calls)]
            num_calls += len(calls)
            message = {**message, "tool_calls": named}
        elif message["role"] == "tool":
            message = {**message, "tool_call_id": f"call{num_results:05}"}
            num_results += 1
        changed.append(message)
    return changed
