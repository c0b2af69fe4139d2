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
    ROLES,
    TEXT,
    Conversation,
    Message,
    RowReader,
    check_trainable,
    plain_message,
)
from toolkit.data.row_values import as_object, conversation_in, kind_of, missing_key, parsed_json, required_text
from toolkit.messages import RowError, tr

_MARKS = PREFERENCE_KEYS | {"completion", "label", "kto_tag", "margin"}
"""These, and those of data for KTO and reward models."""
_ANSWERS = ("chosen", "rejected")


class PairReader(RowReader):
    """Turns rows of `RowFormat.preference` into two conversations that differ in their last answer alone. What was said
    before is read as one of the other formats; an answer is a text, a message or a list of messages.
    """

    row_format, gives_pairs = RowFormat.preference, True

    def __init__(self, columns: Mapping[str, str]) -> None:
        super().__init__(self.row_format, columns)

    def read_all(self, row: object) -> list[Conversation]:
        """Return the conversation with the chosen answer and the one with the rejected; a RowError as `RowReader`."""
        mapping, names = as_object(row), self.names
        answer_keys = {answer: key for answer in _ANSWERS if (key := self._conversation_key(mapping, answer))}
        if names["chosen"] not in mapping and ("rejected" in answer_keys or mapping.get(names["rejected_response"])):
            # ms-swift: the chosen answer ends the conversation, or is what the other formats call it.
            chosen = self._before(mapping, is_answered=True)
            if "rejected" in answer_keys:
                rejected = self._read(mapping, RowFormat.messages, messages=answer_keys["rejected"])
            else:
                before = replace(chosen, messages=chosen.messages[:-1])
                rejected = self._with_answer(before, mapping, "rejected_response")
            pair = [chosen, rejected]
        elif len(answer_keys) == len(_ANSWERS):
            pair = [self._read(mapping, RowFormat.messages, messages=answer_keys[answer]) for answer in _ANSWERS]
        else:
            before = self._before(mapping)
            pair = [self._with_answer(before, mapping, answer) for answer in _ANSWERS]
        plain = [_unmarked(conversation) for conversation in pair]
        for messages, name in zip(plain, _ANSWERS, strict=True):
            if messages[-1]["role"] != "assistant":
                raise RowError("the {answer} conversation does not end with the assistant's answer", answer=name)
        if plain[0][:-1] != plain[1][:-1]:
            raise RowError(
                tr("the chosen and the rejected conversation must have the same messages before their last answer")
            )
        return [replace(conversation, messages=messages) for conversation, messages in zip(pair, plain, strict=True)]

    def _before(self, row: Mapping[str, Any], is_answered: bool = False) -> Conversation:
        """Return the conversation before the two answers, or with `is_answered` up to the chosen one, inclusive."""
        names = self.names
        for row_format, field in LIST_FIELDS.items():
            if names[field] in row:
                return self._read(row, row_format, is_answered)
        if isinstance(self._messages_in(row.get(names["prompt"])), list):
            return self._read(row, RowFormat.messages, is_answered, messages=names["prompt"])
        asked = {fields[0]: row_format for row_format, fields in PAIR_FIELDS.items()}
        fields = sorted(asked, key=lambda field: field not in self.columns)  # what `columns` names comes first
        row_format_asked = next((asked[field] for field in fields if names[field] in row), None)
        return (
            missing_key(row, names["prompt"])
            if row_format_asked is None
            else self._read(row, row_format_asked, is_answered)
        )

    def _read(
        self, row: Mapping[str, Any], row_format: RowFormat, is_answered: bool = False, **columns: str
    ) -> Conversation:
        """Read a row, without the keys of the two answers, in a format of single conversations; `columns`, field=key,
        are added to this reader's.
        """
        reader = RowReader(row_format, {**self.columns, **columns}, answered=is_answered)
        reader.skipped = self.skipped
        others = self._others(is_answered) - set(columns.values())
        return reader.read({key: value for key, value in row.items() if key not in others})

    def _others(self, is_answered: bool) -> set[str]:
        """Return the keys of a row that are not of the conversation."""
        others = {self.names[field] for field in _MARKS.intersection(ROW_FIELDS[self.row_format])}
        return others if is_answered else others | {self.names[answer] for _, answer in PAIR_FIELDS.values()}

    def _with_answer(self, before: Conversation, row: Mapping[str, Any], answer: str) -> Conversation:
        """Return the conversation `before` with the row's answer of this field at its end."""
        key = self.names[answer]
        if not before.messages or before.messages[-1]["role"] == "assistant":
            raise RowError(tr("the messages before the two answers must end with a question"))
        messages = list(before.messages)
        self._add_answer(row, key, messages)
        return replace(before, messages=messages)

    def _conversation_key(self, row: Mapping[str, Any], answer: str) -> str:
        """Return the key under which an answer stands together with the conversation before it; "" if none has that."""
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
        """Return the two conversations; a RowError as `RowReader`."""
        mapping, key = as_object(row), self.names["margin"]
        margin = mapping.get(key)
        try:
            value = 0.0 if margin in (None, "") else float(margin)
            if isinstance(margin, bool) or not math.isfinite(value):
                raise ValueError
        except (ValueError, TypeError, OverflowError):
            raise RowError("'{key}' is {kind}, not a number", key=key, kind=kind_of(margin)) from None
        return [replace(conversation, value=value) for conversation in super().read_all(row)]


_LABELS = {"true": 1.0, "1": 1.0, "1.0": 1.0, "false": 0.0, "0": 0.0, "0.0": 0.0}


class LabelReader(PairReader):
    """Turns rows of `RowFormat.labeled` into a conversation whose last answer is marked good or bad: the question and
    `completion`, as TRL has it, or a conversation of one of the other formats; `label`, or LLaMA-Factory's `kto_tag`.
    """

    row_format, gives_pairs = RowFormat.labeled, False

    def read_all(self, row: object) -> list[Conversation]:
        """Return the conversation; a RowError as `RowReader`."""
        mapping = as_object(row)
        key = next((self.names[field] for field in ("label", "kto_tag") if self.names[field] in mapping), "")
        value = mapping[key] if key else missing_key(mapping, self.names["label"])
        if str(value).lower() not in _LABELS:
            raise RowError("'{key}' is {kind}, neither true nor false", key=key, kind=kind_of(value))
        if self.names["completion"] in mapping:
            conversation = self._with_answer(self._before(mapping), mapping, "completion")
        else:
            conversation = self._before(mapping, is_answered=True)
        if conversation.messages[-1]["role"] != "assistant":
            raise RowError(tr("the conversation does not end with the assistant's answer"))
        return [replace(conversation, messages=_unmarked(conversation), value=_LABELS[str(value).lower()])]


class ClassReader(PairReader):
    """Turns rows of `RowFormat.classify` into a text or a conversation with its `label`; an answer need not end it."""

    row_format, gives_pairs = RowFormat.classify, False

    def read_all(self, row: object) -> list[Conversation]:
        """Return the conversation; a RowError as `RowReader`."""
        mapping, key = as_object(row), self.names["label"]
        value = mapping[key] if key in mapping else missing_key(mapping, key)
        if not isinstance(value, str | bool | int | float) or (isinstance(value, float) and not math.isfinite(value)):
            raise RowError("'{key}' is {kind}, not a label", key=key, kind=kind_of(value))
        label = str(value).lower() if isinstance(value, bool) else str(value).strip()
        if not label:
            raise RowError("'{key}' is empty: the row has no label", key=key)
        is_text = self.names["text"] in mapping
        conversation = self._read(mapping, RowFormat.text) if is_text else self._before(mapping)
        return [replace(conversation, messages=_unmarked(conversation), label=label, is_read=True)]

    def _others(self, is_answered: bool) -> set[str]:
        return {self.names["label"]}  # an answer that is there is read


class TextPairReader(PairReader):
    """Turns rows of `RowFormat.embed` into texts: `query`, `positive`, and those of `negatives`, a list or one text."""

    row_format = RowFormat.embed

    def read_all(self, row: object) -> list[Conversation]:
        """Return the texts; a RowError as `RowReader`."""
        mapping, key = as_object(row), self.names["negatives"]
        check_trainable(mapping, self.columns)
        texts = [required_text(mapping, self.names[field]) for field in ("query", "positive")]
        negatives = parsed_json(mapping.get(key))
        if negatives is not None and not isinstance(negatives, str | list):
            raise RowError("'{key}' is {kind}, neither a list of texts nor a text", key=key, kind=kind_of(negatives))
        items = [negatives] if isinstance(negatives, str) else negatives or []
        texts += [required_text({f"{key}[{index}]": text}, f"{key}[{index}]") for index, text in enumerate(items)]
        if texts[1] in texts[2:]:
            raise RowError("'{key}' holds the positive itself. Correct or remove the row", key=key)
        return [Conversation([plain_message(TEXT, text)], is_read=True) for text in texts]


def _unmarked(conversation: Conversation) -> list[Message]:
    """Return messages that do not say whether they are trained."""
    return [{key: value for key, value in message.items() if key != "loss"} for message in conversation.messages]


READERS: dict[RowFormat, type[PairReader]] = {
    reader.row_format: reader for reader in (PairReader, MarginReader, LabelReader, ClassReader, TextPairReader)
}
"""Format -> its reader."""
