"""Rows that say more of their texts than which are answers: pairs of a better and a worse answer, answers that are good
or bad, texts of a class, and texts with what is to be found for them.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from toolkit.config.schema import ROW_FIELDS, RowFormat
from toolkit.data.formats import (
    LIST_FIELDS,
    PAIR_FIELDS,
    PREFERENCE_KEYS,
    Conversation,
    RowReader,
    check_trainable,
    plain_message,
)
from toolkit.data.message_lists import ROLES
from toolkit.data.rows import (
    as_object,
    conversation_in,
    kind_of,
    missing_key_error,
    parsed_json,
    quoted_keys,
    required_text,
    required_value,
)
from toolkit.messages import RowError, tr
from toolkit.sample_types import TEXT, Message

_JUDGED_FIELDS = PREFERENCE_KEYS | {"completion", "label", "kto_tag", "margin"}
"""Fields that hold answers which are judged, or say how good they are: of pairs, of KTO and of reward models."""
_ANSWERS = ("chosen", "rejected")
_VALUE_OF_LABEL = {"true": 1.0, "1": 1.0, "1.0": 1.0, "false": 0.0, "0": 0.0, "0.0": 0.0}


class PairReader(RowReader):
    """Turns rows of `RowFormat.preference` into two conversations that differ in their last answer alone. What was said
    before is read as one of the other formats; an answer is a text, a message or a list of messages.
    """

    row_format, gives_pairs = RowFormat.preference, True

    def __init__(self, columns: Mapping[str, str]) -> None:
        super().__init__(self.row_format, columns)

    def read_all(self, row: object) -> list[Conversation]:
        """Return a row's [chosen, rejected] conversation; RowError unless they differ in a last answer alone."""
        chosen, rejected = map(_without_loss_flags, self._read_pair(as_object(row)))
        for conversation, name in zip((chosen, rejected), _ANSWERS, strict=True):
            if conversation.messages[-1]["role"] != "assistant":
                raise RowError("the {answer} conversation does not end with the assistant's answer", answer=name)
        if chosen.messages[:-1] != rejected.messages[:-1]:
            raise RowError(
                tr("the chosen and the rejected conversation must have the same messages before their last answer")
            )
        return [chosen, rejected]

    def _read_pair(self, row: Mapping[str, Any]) -> list[Conversation]:
        """Return the row's [chosen, rejected] conversation, which rows give in three ways: as two whole conversations;
        as a row of another format, whose answer is the chosen one, with a rejected answer besides (ms-swift's); or as
        the messages before the answers, which stand in the row once, and two answers.
        """
        names = self.names
        if not any(names[key] in row for key in PREFERENCE_KEYS):
            raise RowError(
                "the row has no 'chosen' and 'rejected' answer, only {keys}: preference data are pairs of answers "
                "(docs/preference.md)",
                keys=quoted_keys(row),
            )
        chosen_key, rejected_key = (self._conversation_key(row, answer) for answer in _ANSWERS)
        if chosen_key and rejected_key:
            return [self._read_as(RowFormat.messages, row, messages=key) for key in (chosen_key, rejected_key)]
        if names["chosen"] not in row and (rejected_key or row.get(names["rejected_response"])):  # ms-swift's
            chosen = self._shared_conversation(row, with_answer=True)
            if rejected_key:
                return [chosen, self._read_as(RowFormat.messages, row, messages=rejected_key)]
            before = replace(chosen, messages=chosen.messages[:-1])
            return [chosen, self._with_answer(before, row, "rejected_response")]
        before = self._shared_conversation(row)
        return [self._with_answer(before, row, answer) for answer in _ANSWERS]

    def _shared_conversation(self, row: Mapping[str, Any], with_answer: bool = False) -> Conversation:
        """Return the messages that stand once in a row for both answers, `with_answer` with the chosen one behind them.
        They are, whichever comes first, a list of messages, a prompt that is such a list, or a question.
        """
        names = self.names
        for row_format, field in LIST_FIELDS.items():
            if names[field] in row:
                return self._read_as(row_format, row, with_answer)
        if isinstance(self._messages_in(row.get(names["prompt"])), list):
            return self._read_as(RowFormat.messages, row, with_answer, messages=names["prompt"])
        format_of_question = {question: row_format for row_format, (question, _) in PAIR_FIELDS.items()}
        # A question that the user names in `columns` comes before others that the row has.
        for field in sorted(format_of_question, key=lambda field: field not in self.columns):
            if names[field] in row:
                return self._read_as(format_of_question[field], row, with_answer)
        raise missing_key_error(row, names["prompt"])

    def _read_as(
        self, row_format: RowFormat, row: Mapping[str, Any], with_answer: bool = False, **columns: str
    ) -> Conversation:
        """Read a row in a format of single conversations, which rejects preference data: labels and, unless
        `with_answer`, answers are left out first. `columns` (field=key) are added to this reader's.
        """
        reader = RowReader(row_format, {**self.columns, **columns}, answered=with_answer)
        reader.skipped = self.skipped  # the keys that it does not read are counted with this reader's
        left_out = self._keys_left_out(with_answer) - set(columns.values())
        return reader.read({key: value for key, value in row.items() if key not in left_out})

    def _keys_left_out(self, with_answer: bool) -> set[str]:
        """Return the row's keys that `_read_as` leaves out: preferences, labels and, unless `with_answer`, answers."""
        judged = {self.names[field] for field in ROW_FIELDS[self.row_format] if field in _JUDGED_FIELDS}
        return judged if with_answer else judged | {self.names[answer] for _, answer in PAIR_FIELDS.values()}

    def _with_answer(self, before: Conversation, row: Mapping[str, Any], field: str) -> Conversation:
        """Return the conversation `before`, followed by the answer in this field of the row, such as "rejected"."""
        key = self.names[field]
        if not before.messages or before.messages[-1]["role"] == "assistant":
            raise RowError(tr("the messages before the two answers must end with a question"))
        messages = list(before.messages)
        self._add_answer(row, key, messages)
        return replace(before, messages=messages)

    def _conversation_key(self, row: Mapping[str, Any], answer: str) -> str:
        """Return the row's key of a whole conversation that ends with `answer`, "" if the answer stands alone."""
        role_keys = self.names["from"], self.names["role"]
        for key in (self.names[answer], self.names[f"{answer}_messages"]):
            items = conversation_in(row.get(key))
            messages = [item for item in items if isinstance(item, dict)] if isinstance(items, list) else []
            if any(message.get(role_key) in ROLES["user"] for message in messages for role_key in role_keys):
                return key
        return ""


class MarginReader(PairReader):
    """Turns rows of `RowFormat.reward` into the same two conversations, whose value is the row's `margin`, 0 without
    one: by how much the chosen answer's score is to be higher at least.
    """

    row_format = RowFormat.reward

    def read_all(self, row: object) -> list[Conversation]:
        """Return [chosen, rejected] conversation, both with the row's margin as `value`; RowError if not a number."""
        mapping, key = as_object(row), self.names["margin"]
        margin = mapping.get(key)
        try:
            value = 0.0 if margin in (None, "") else float(margin)
            if isinstance(margin, bool) or not math.isfinite(value):  # `float` takes these, too
                raise ValueError
        except (ValueError, TypeError, OverflowError):
            raise RowError("'{key}' is {kind}, not a number", key=key, kind=kind_of(margin)) from None
        return [replace(conversation, value=value) for conversation in super().read_all(row)]


class LabelReader(PairReader):
    """Turns rows of `RowFormat.labeled` into a conversation whose last answer is marked good or bad: the question and
    `completion`, as TRL has it, or a conversation of one of the other formats; `label`, or LLaMA-Factory's `kto_tag`.
    """

    row_format, gives_pairs = RowFormat.labeled, False

    def read_all(self, row: object) -> list[Conversation]:
        """Return [conversation], its `value` 1 for a good last answer and 0 for a bad one; RowError if unusable."""
        mapping, label_key, tag_key = as_object(row), self.names["label"], self.names["kto_tag"]
        key = tag_key if tag_key in mapping and label_key not in mapping else label_key
        label = required_value(mapping, key)
        value = _VALUE_OF_LABEL.get(str(label).lower())
        if value is None:
            raise RowError("'{key}' is {kind}, neither true nor false", key=key, kind=kind_of(label))
        if self.names["completion"] in mapping:
            conversation = self._with_answer(self._shared_conversation(mapping), mapping, "completion")
        else:
            conversation = self._shared_conversation(mapping, with_answer=True)
        if conversation.messages[-1]["role"] != "assistant":
            raise RowError(tr("the conversation does not end with the assistant's answer"))
        return [replace(_without_loss_flags(conversation), value=value)]


class ClassReader(PairReader):
    """Turns rows of `RowFormat.classify` into a text or a conversation with its `label`; an answer need not end it."""

    row_format, gives_pairs = RowFormat.classify, False

    def read_all(self, row: object) -> list[Conversation]:
        """Return [conversation or text], its class name as `label`; RowError if the row has none."""
        mapping, key = as_object(row), self.names["label"]
        value = required_value(mapping, key)
        if not isinstance(value, str | bool | int | float) or (isinstance(value, float) and not math.isfinite(value)):
            raise RowError("'{key}' is {kind}, not a label", key=key, kind=kind_of(value))
        label = str(value).lower() if isinstance(value, bool) else str(value).strip()  # "true" as in JSON, not "True"
        if not label:
            raise RowError("'{key}' is empty: the row has no label", key=key)
        is_text = self.names["text"] in mapping
        conversation = self._read_as(RowFormat.text, mapping) if is_text else self._shared_conversation(mapping)
        return [replace(_without_loss_flags(conversation), label=label, is_input_only=True)]

    def _keys_left_out(self, with_answer: bool) -> set[str]:
        """Return the row's keys that are not of the text to classify: an answer, if there is one, is part of it."""
        return {self.names["label"]}


class TextPairReader(PairReader):
    """Turns rows of `RowFormat.embed` into texts: `query`, `positive`, and those of `negatives`, a list or one text."""

    row_format = RowFormat.embed

    def read_all(self, row: object) -> list[Conversation]:
        """Return [query, positive, negative, …], a conversation of one text each; RowError if a text is missing."""
        mapping, key = as_object(row), self.names["negatives"]
        check_trainable(mapping, self.columns)
        query, positive = (required_text(mapping, self.names[field]) for field in ("query", "positive"))
        negatives = parsed_json(mapping.get(key))
        if negatives is not None and not isinstance(negatives, str | list):
            raise RowError("'{key}' is {kind}, neither a list of texts nor a text", key=key, kind=kind_of(negatives))
        items = [negatives] if isinstance(negatives, str) else negatives or []
        # As if each had a key of its own, so that an error names it: negatives[2].
        text_by_name = {f"{key}[{index}]": text for index, text in enumerate(items)}
        negative_texts = [required_text(text_by_name, name) for name in text_by_name]
        if positive in negative_texts:
            raise RowError("'{key}' holds the positive itself. Correct or remove the row", key=key)
        texts = [query, positive, *negative_texts]
        return [Conversation([plain_message(TEXT, text)], is_input_only=True) for text in texts]


def _without_loss_flags(conversation: Conversation) -> Conversation:
    """Return the conversation without `loss` at its messages, which says whether one is trained: the task decides."""
    messages: list[Message] = []
    for message in conversation.messages:
        messages.append({key: value for key, value in message.items() if key != "loss"})
    return replace(conversation, messages=messages)


READERS: dict[RowFormat, type[PairReader]] = {
    reader.row_format: reader for reader in (PairReader, MarginReader, LabelReader, ClassReader, TextPairReader)
}
"""Format -> its reader."""
