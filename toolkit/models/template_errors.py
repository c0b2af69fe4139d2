"""Errors of rows that a chat template cannot be trained with."""

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from toolkit.messages import ModelError, RowError, shortened, tr
from toolkit.models.answer_spans import MODES
from toolkit.models.chat_template import EXCERPT_CHARS, has_reasoning
from toolkit.sample_types import Message

if TYPE_CHECKING:
    from toolkit.models.chat_template import TemplateChatEncoder


def untrainable(encoder: "TemplateChatEncoder", messages: Sequence[Message], trained: Sequence[int]) -> Exception:
    """Return the error that says why the answers with the indices `trained` cannot be found in a conversation's text: a
    RowError, or a ModelError if the template cannot be trained with at all.
    """
    for index in trained:
        if not has_reasoning(messages[index]) and (opening := _thinking_opening(encoder, messages[:index])):
            return RowError(
                "message {number}: the chat template's prompt for an answer ends with {asks}, which asks for "
                "reasoning, and the answer has none. Write it into its `reasoning_content`, or give a template "
                "that does not ask: model.chat_template=FILE",
                number=index + 1,
                asks=repr(shortened(opening, EXCERPT_CHARS)),
            )
    if trained != [len(messages) - 1]:
        return RowError(
            tr(
                "the chat template writes an earlier answer of this conversation otherwise once another turn "
                "follows, so it cannot be trained with the rest. Train last answers only: data.train_on=last"
            )
        )
    if encoder.traits.knows_probe:
        return RowError(
            tr(
                "the chat template writes the answer of this conversation otherwise than the prompt that "
                "generation would see asks for it"
            )
        )
    return ModelError(
        "The chat template of '{name}' cannot be trained with: the conversation with its answer does not "
        "begin with the prompt that generation would see. Give a template whose turns do not depend on "
        "later ones: model.chat_template=FILE.",
        name=encoder.tokenizer.name_or_path,
    )


def _thinking_opening(encoder: "TemplateChatEncoder", messages: Sequence[Message]) -> str:
    """Return the end of the prompt for an answer if it begins the reasoning in every mode, else ""."""
    opening = ""
    with suppress(RowError):
        before = encoder.render(messages, None, add_generation_prompt=False)
        for mode in MODES:
            opening = encoder.render(messages, None, add_generation_prompt=True, **mode).removeprefix(before)
            if "<think>" not in opening.rpartition("</think>")[2]:
                return ""
    return opening


def lost_part(number: int, part: str, setting: str) -> RowError:
    """Return the error that a template has no place for a part of the message `number`, counted from 1. `part`: a
    feature that templates may drop (`_FEATURES` of chat_template.py), or "reasoning"; `setting`: what gives another.
    """
    kinds = {
        "tool_calls": tr("calls of tools"),
        "text": tr("a text beside calls of tools"),
        "parallel": tr("several calls of tools in one message"),
        "tool": tr("results of tools"),
        "reasoning": tr("the reasoning of an answer"),
    }
    return RowError(
        "message {number}: the chat template has no place for {what}, which would be lost. Write it into "
        "the text of the message as the model is to write it, or give another template: {setting}",
        number=number,
        setting=setting,
        what=kinds[part],
    )
