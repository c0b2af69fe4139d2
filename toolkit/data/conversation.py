"""A conversation, its turns, and which of its messages are trained."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from toolkit.config.schema import TrainOn

Message = Mapping[str, Any]
"""One turn: `role` and `content`; an assistant's may have `tool_calls` (as OpenAI writes them, arguments as an object)
and `metadata`; `loss`, if there, says whether it is trained. Roles: system, user, assistant, tool; and text, a plain
text that is a conversation's only message."""

TEXT = "text"


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages, and the tools that the assistant may call."""

    messages: list[Message]
    tools: list[Any] | None = None

    @property
    def is_text(self) -> bool:
        """Return whether this is a plain text."""
        return bool(self.messages) and self.messages[0]["role"] == TEXT

    def with_messages(self, messages: Sequence[Message]) -> "Conversation":
        """Return the same with other messages."""
        return replace(self, messages=list(messages))


def turns(messages: Sequence[Message]) -> tuple[list[Message], list[list[Message]]]:
    """Return the system messages at the beginning, and the rest cut before each user's message."""
    start = next((index for index, message in enumerate(messages) if message["role"] != "system"), len(messages))
    parts: list[list[Message]] = []
    for message in messages[start:]:
        if message["role"] == "user" or not parts:
            # Several messages of the user in a row are one turn.
            if parts and parts[-1][-1]["role"] == "user":
                parts[-1].append(message)
                continue
            parts.append([])
        parts[-1].append(message)
    return list(messages[:start]), parts


def marked(conversation: Conversation, train_on: TrainOn, only_last: bool) -> Iterator[Conversation]:
    """Yield what is learned from a conversation, with `loss` set at its messages as `data.train_on` says.

    Args:
        conversation: as read; a `loss` at a message decides for it.
        train_on: for messages without one. auto leaves them to the encoder.
        only_last: the model's format can train a conversation's last message only: one conversation for each trained
            answer is yielded, which ends with it.
    """
    if conversation.is_text:
        yield conversation
        return
    messages = _without_tail(conversation.messages)
    if train_on is TrainOn.auto and not any("loss" in message for message in messages):
        yield conversation if len(messages) == len(conversation.messages) else conversation.with_messages(messages)
        return
    answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    chosen: dict[int, bool] = {}
    if train_on is not TrainOn.auto:
        default = {TrainOn.all: answers, TrainOn.last: answers[-1:], TrainOn.marked: []}[train_on]
        chosen = {index: index in default for index in range(len(messages))}
    chosen.update({index: bool(message["loss"]) for index, message in enumerate(messages) if "loss" in message})
    if not only_last:
        yield conversation.with_messages(
            [
                {**message, "loss": chosen[index]} if index in chosen else message
                for index, message in enumerate(messages)
            ]
        )
        return
    trained = [index for index in answers if chosen.get(index, train_on is TrainOn.auto and index == answers[-1])]
    plain = [{name: value for name, value in message.items() if name != "loss"} for message in messages]
    for index in trained:
        yield conversation.with_messages(plain[: index + 1])


def _without_tail(messages: Sequence[Message]) -> list[Message]:
    """Leave out what follows the last answer: nothing is learned from a question that nobody answers."""
    end = len(messages)
    while end and messages[end - 1]["role"] != "assistant":
        end -= 1
    return list(messages[:end])
