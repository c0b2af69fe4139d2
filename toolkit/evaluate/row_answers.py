"""Answers to many questions: in batches of like length, given back in the order of the questions."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from transformers import PreTrainedModel

from toolkit.data.conversation import Message
from toolkit.data.questions import Question
from toolkit.errors import ModelError, RowError
from toolkit.evaluate.generate import Sampling, check_length, generate, text_of
from toolkit.messages import tr
from toolkit.models.chat import AnyChatEncoder

BATCHES = 8
"""In a window, whose questions are sorted by length and whose answers are given back together."""


def answers(
    model: PreTrainedModel,
    encoder: AnyChatEncoder,
    questions: Iterable[Question],
    sampling: Sampling,
    device: torch.device,
    *,
    batch_size: int,
    system: str = "",
    done: int = 0,
) -> Iterator[list[dict[str, Any]]]:
    """Yield what is known of each question after asking the model, a window of `batch_size * BATCHES` at a time.

    Each is an object with `messages` (`tools`), `answer`, `reference`, `prompt_tokens`, `tokens`, `finish` (stop, or
    length: cut at max_new_tokens) and `where`; one that could not be asked has `error` in place of an answer.

    Args:
        model: the model.
        encoder: its way of writing conversations.
        questions: all of them.
        sampling: how to choose tokens. Batches draw from seeds of their own, so that a question that comes several
            times gets several answers.
        device: where the model computes.
        batch_size: questions in a forward.
        system: system message for questions without one.
        done: leave out so many of the first, whole windows: the others get the answers that they would have got.
    """
    rows = islice(questions, done, None)
    while window := list(islice(rows, batch_size * BATCHES)):
        results: list[dict[str, Any]] = []
        prompts: dict[int, list[int]] = {}
        for place, question in enumerate(window):
            messages = with_system(question.messages, system)
            results.append(_known(question, messages))
            try:
                prompts[place] = _prompt(model, encoder, question, messages, sampling.max_new_tokens)
            except (RowError, ModelError) as error:
                results[place]["error"] = str(error)
        # The longest first: what does not fit into memory fails at once.
        order = sorted(prompts, key=lambda place: -len(prompts[place]))
        for begin in range(0, len(order), batch_size):
            places = order[begin : begin + batch_size]
            drawn = replace(sampling, seed=sampling.seed + done + begin)
            found = generate(model, encoder, [prompts[place] for place in places], drawn, device)
            for place, ids in zip(places, found, strict=True):
                results[place] |= {
                    "answer": text_of(encoder, ids),
                    "prompt_tokens": len(prompts[place]),
                    "tokens": len(ids),
                    "finish": "stop" if len(ids) < sampling.max_new_tokens else "length",
                }
        done += len(window)
        yield results


def with_system(messages: Sequence[Message], system: str) -> list[Message]:
    """Return a conversation with a system message, if one is wanted and it has none."""
    if not system or (messages and messages[0]["role"] == "system"):
        return list(messages)
    return [{"role": "system", "content": system}, *messages]


def hears_system(encoder: AnyChatEncoder) -> bool:
    """Return whether a system message changes what the model is given."""
    asked = [{"role": "user", "content": "?"}]
    try:
        return encoder.prompt(with_system(asked, "!")) != encoder.prompt(asked)
    except RowError:
        return False


def _prompt(
    model: PreTrainedModel,
    encoder: AnyChatEncoder,
    question: Question,
    messages: Sequence[Message],
    max_new_tokens: int,
) -> list[int]:
    if question.error:
        raise RowError(question.error)
    prompt = encoder.prompt(messages, question.tools)
    if not prompt:
        raise RowError(tr("the chat template makes nothing of the conversation"))
    check_length(model, len(prompt), max_new_tokens)
    return prompt


def _known(question: Question, messages: list[Message]) -> dict[str, Any]:
    known: dict[str, Any] = {"messages": messages} if question.messages else {}
    if question.tools:
        known["tools"] = question.tools
    if question.reference is not None:
        known["reference"] = question.reference
    return known | {"where": question.where}
