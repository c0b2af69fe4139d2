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
from toolkit.data.rows import as_object, conversation_in, kind_of, missing_key, parsed_json, quoted_keys, required_text
from toolkit.messages import RowError, tr
from toolkit.sample_types import TEXT, Message

_MARKS = PREFERENCE_KEYS | {"completion", "label", "kto_tag", "margin"}
"""These, and those of data for KTO and reward models."""
_ANSWERS = ("chosen", "rejected")
_LABELS = {"true": 1.0, "1": 1.0, "1.0": 1.0, "false": 0.0, "0": 0.0, "0.0": 0.0}


class PairReader(RowReader):
    """Turns rows of `RowFormat.preference` into two conversations that differ in their last answer alone. What was said
    before is read as one of the other formats; an answer is a text, a message or a list of messages.
    """

    row_format, gives_pairs = RowFormat.preference, True

    def __init__(self, columns: Mapping[str, str]) -> None:
        super().__init__(self.row_format, columns)

    def read_all(self, row: object) -> list[Conversation]:
        """Return a row's [chosen, rejected] conversation, which differ in the last answer only; or raise a RowError."""
        pair = self._read_pair(as_object(row))
        plain = [_without_loss_flags(conversation) for conversation in pair]
        for messages, name in zip(plain, _ANSWERS, strict=True):
            if messages[-1]["role"] != "assistant":
                raise RowError("the {answer} conversation does not end with the assistant's answer", answer=name)
        if plain[0][:-1] != plain[1][:-1]:
            raise RowError(
                tr("the chosen and the rejected conversation must have the same messages before their last answer")
            )
        return [replace(conversation, messages=messages) for conversation, messages in zip(pair, plain, strict=True)]

    def _read_pair(self, row: Mapping[str, Any]) -> list[Conversation]:
        """Return [chosen, rejected] as the row has them, in whichever of the three ways it gives them."""
        names = self.names
        if not any(names[key] in row for key in PREFERENCE_KEYS):
            raise RowError(
                "the row has no 'chosen' and 'rejected' answer, only {keys}: preference data are pairs of answers "
                "(docs/preference.md)",
                keys=quoted_keys(row),
            )
        # "chosen" or "rejected" -> the key of the row under which a whole conversation ends with this answer.
        conversation_keys = {answer: key for answer in _ANSWERS if (key := self._conversation_key(row, answer))}
        if len(conversation_keys) == len(_ANSWERS):
            return [self._read_as(RowFormat.messages, row, messages=conversation_keys[name]) for name in _ANSWERS]
        has_rejected = "rejected" in conversation_keys or row.get(names["rejected_response"])
        if names["chosen"] not in row and has_rejected:
            # ms-swift's rows: those of the other formats, whose answer is the chosen one, and a rejected one besides.
            chosen = self._shared_conversation(row, with_answer=True)
            if "rejected" in conversation_keys:
                rejected = self._read_as(RowFormat.messages, row, messages=conversation_keys["rejected"])
            else:
                before = replace(chosen, messages=chosen.messages[:-1])
                rejected = self._with_answer(before, row, "rejected_response")
            return [chosen, rejected]
        # The messages before the answers stand once in the row.
        before = self._shared_conversation(row)
        return [self._with_answer(before, row, answer) for answer in _ANSWERS]

    def _shared_conversation(self, row: Mapping[str, Any], with_answer: bool = False) -> Conversation:
        """Return the row's messages before the chosen and the rejected answer; `with_answer`: and the chosen answer."""
        names = self.names
        for row_format, field in LIST_FIELDS.items():
            if names[field] in row:
                return self._read_as(row_format, row, with_answer)
        if isinstance(self._messages_in(row.get(names["prompt"])), list):
            return self._read_as(RowFormat.messages, row, with_answer, messages=names["prompt"])
        format_of_question = {fields[0]: row_format for row_format, fields in PAIR_FIELDS.items()}
        questions = sorted(format_of_question, key=lambda field: field not in self.columns)  # `columns` comes first
        for field in questions:
            if names[field] in row:
                return self._read_as(format_of_question[field], row, with_answer)
        return missing_key(row, names["prompt"])

    def _read_as(
        self, row_format: RowFormat, row: Mapping[str, Any], with_answer: bool = False, **columns: str
    ) -> Conversation:
        """Read a row in a format of single conversations, without the keys of labels and, unless `with_answer`, of
        answers; `columns`, field=key, are added to this reader's.
        """
        reader = RowReader(row_format, {**self.columns, **columns}, answered=with_answer)
        reader.skipped = self.skipped  # one count for both
        left_out = self._keys_left_out(with_answer) - set(columns.values())
        return reader.read({key: value for key, value in row.items() if key not in left_out})

    def _keys_left_out(self, with_answer: bool) -> set[str]:
        """Return the row's keys that `_read_as` leaves out: preferences, labels and, unless `with_answer`, answers."""
        marks = {self.names[field] for field in _MARKS.intersection(ROW_FIELDS[self.row_format])}
        return marks if with_answer else marks | {self.names[answer] for _, answer in PAIR_FIELDS.values()}

    def _with_answer(self, before: Conversation, row: Mapping[str, Any], field: str) -> Conversation:
        """Return the conversation `before`, followed by the answer in this field of the row, such as "rejected"."""
        key = self.names[field]
        if not before.messages or before.messages[-1]["role"] == "assistant":
            raise RowError(tr("the messages before the two answers must end with a question"))
        messages = list(before.messages)
        self._add_answer(row, key, messages)
        return replace(before, messages=messages)

    def _conversation_key(self, row: Mapping[str, Any], answer: str) -> str:
        """Return the row's key whose list of messages holds the answer ("chosen", "rejected") and the user's messages
        before it; "" if the answer comes without them.
        """
        keys = self.names["from"], self.names["role"]
        for name in (self.names[answer], self.names[f"{answer}_messages"]):
            items = conversation_in(row.get(name))
            if isinstance(items, list) and any(
                isinstance(item, dict) and item.get(key) in ROLES["user"] for item in items for key in keys
            ):
                return name
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
            if isinstance(margin, bool) or not math.isfinite(value):
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
        mapping = as_object(row)
        key = next((self.names[field] for field in ("label", "kto_tag") if self.names[field] in mapping), "")
        value = mapping[key] if key else missing_key(mapping, self.names["label"])
        if str(value).lower() not in _LABELS:
            raise RowError("'{key}' is {kind}, neither true nor false", key=key, kind=kind_of(value))
        if self.names["completion"] in mapping:
            conversation = self._with_answer(self._shared_conversation(mapping), mapping, "completion")
        else:
            conversation = self._shared_conversation(mapping, with_answer=True)
        if conversation.messages[-1]["role"] != "assistant":
            raise RowError(tr("the conversation does not end with the assistant's answer"))
        return [replace(conversation, messages=_without_loss_flags(conversation), value=_LABELS[str(value).lower()])]


class ClassReader(PairReader):
    """Turns rows of `RowFormat.classify` into a text or a conversation with its `label`; an answer need not end it."""

    row_format, gives_pairs = RowFormat.classify, False

    def read_all(self, row: object) -> list[Conversation]:
        """Return [conversation or text], its class name as `label`; RowError if the row has none."""
        mapping, key = as_object(row), self.names["label"]
        value = mapping[key] if key in mapping else missing_key(mapping, key)
        if not isinstance(value, str | bool | int | float) or (isinstance(value, float) and not math.isfinite(value)):
            raise RowError("'{key}' is {kind}, not a label", key=key, kind=kind_of(value))
        label = str(value).lower() if isinstance(value, bool) else str(value).strip()
        if not label:
            raise RowError("'{key}' is empty: the row has no label", key=key)
        is_text = self.names["text"] in mapping
        conversation = self._read_as(RowFormat.text, mapping) if is_text else self._shared_conversation(mapping)
        return [replace(conversation, messages=_without_loss_flags(conversation), label=label, is_input_only=True)]

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
        texts = [required_text(mapping, self.names[field]) for field in ("query", "positive")]
        negatives = parsed_json(mapping.get(key))
        if negatives is not None and not isinstance(negatives, str | list):
            raise RowError("'{key}' is {kind}, neither a list of texts nor a text", key=key, kind=kind_of(negatives))
        items = [negatives] if isinstance(negatives, str) else negatives or []
        # As if each had a key of its own, so that an error names it: negatives[2].
        named = {f"{key}[{index}]": text for index, text in enumerate(items)}
        texts += [required_text(named, name) for name in named]
        if texts[1] in texts[2:]:
            raise RowError("'{key}' holds the positive itself. Correct or remove the row", key=key)
        return [Conversation([plain_message(TEXT, text)], is_input_only=True) for text in texts]


def _without_loss_flags(conversation: Conversation) -> list[Message]:
    """Return the messages without the key `loss`, which says whether a message is trained: here the task decides."""
    return [{key: value for key, value in message.items() if key != "loss"} for message in conversation.messages]


READERS: dict[RowFormat, type[PairReader]] = {
    reader.row_format: reader for reader in (PairReader, MarginReader, LabelReader, ClassReader, TextPairReader)
}
"""Format -> its reader."""
