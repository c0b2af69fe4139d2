"""What a row of a data file becomes: a conversation, its turns, and which of its messages are trained. Unread keys are
counted if they are metadata, and an error if they hold text, lest it vanish.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from toolkit.config.schema import ROW_FIELDS, RowFormat, TrainOn
from toolkit.data.readers import check_characters, parse_line
from toolkit.data.row_values import (
    REASONING_KEYS,
    MissingKey,
    as_object,
    call_id,
    columns_for,
    conversation_in,
    earlier_turns,
    kind_of,
    listed_tools,
    missing_key,
    parsed_json,
    quoted_keys,
    reasoning_of,
    required_text,
    result_text,
    unread_keys,
)
from toolkit.messages import RowError, tr

Message = Mapping[str, Any]
"""One turn: `role` and `content`; an assistant's may have `tool_calls` (as OpenAI writes them, arguments as an object),
`reasoning_content` and `metadata`, a tool's `tool_call_id`; `loss`, if there, says whether it is trained. Roles:
system, user, assistant, tool; and text, a plain text that is a conversation's only message."""

TEXT = "text"


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages, and the tools that the assistant may call."""

    messages: list[Message]
    tools: list[Any] | None = None
    value: float | None = None
    """What the row says of its answer: 1 good, 0 bad; of a pair the margin."""
    label: str | None = None
    """What a classifier is to find."""
    is_read: bool = False
    """Whether the whole is read, and nothing of it is trained to be written."""

    @property
    def is_text(self) -> bool:
        """Whether this is a plain text."""
        return bool(self.messages) and self.messages[0]["role"] == TEXT


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


def mark_trained(conversation: Conversation, train_on: TrainOn, only_last: bool) -> Iterator[Conversation]:
    """Yield a conversation with `loss` set at its messages as `data.train_on` says. `only_last`, for formats that train
    the last message only: one conversation for each trained answer, ending with it.
    """
    if conversation.is_text:
        yield conversation
        return
    messages = conversation.messages
    answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    # Nothing is learned from what follows the last answer, such as a question that nobody answers.
    messages = messages[: answers[-1] + 1] if answers else []
    if train_on is TrainOn.auto and not any("loss" in message for message in messages):
        yield conversation if len(messages) == len(conversation.messages) else replace(conversation, messages=messages)
        return
    chosen: dict[int, bool] = {}
    if train_on is not TrainOn.auto:
        default = {TrainOn.all: answers, TrainOn.last: answers[-1:], TrainOn.marked: []}[train_on]
        chosen = {index: index in default for index in range(len(messages))}
    chosen.update({index: bool(message["loss"]) for index, message in enumerate(messages) if "loss" in message})
    if not only_last:
        marked: list[Message] = [
            {**m, "loss": chosen[index]} if index in chosen else m for index, m in enumerate(messages)
        ]
        yield replace(conversation, messages=marked)
        return
    trained = [index for index in answers if chosen.get(index, train_on is TrainOn.auto and index == answers[-1])]
    plain: list[Message] = [{name: value for name, value in message.items() if name != "loss"} for message in messages]
    for index in trained:
        yield replace(conversation, messages=plain[: index + 1])


_ROLES = {
    "system": ("system", "developer"),
    "user": ("user", "human"),
    "assistant": ("assistant", "gpt", "chatgpt", "bing", "bard", "model"),
    "function_call": ("function_call", "tool_call"),
    "tool": ("observation", "function_response", "tool_response", "function", "tool"),
}
_ROLE_NAMES = {name: role for role, names in _ROLES.items() for name in names}
_PAIR_FIELDS = {
    RowFormat.prompt_response: ("prompt", "response"),
    RowFormat.query_response: ("query", "response"),
    RowFormat.instruction: ("instruction", "output"),
}
_LIST_FIELDS = {
    RowFormat.sharegpt: "conversations",
    RowFormat.messages: "messages",
    RowFormat.conversation: "conversation",
}
_PREFERENCE = frozenset({"chosen", "rejected", "chosen_messages", "rejected_messages", "rejected_response"})
"""Columns of data for DPO and its like."""
_MARKS = _PREFERENCE | {"completion", "label", "kto_tag", "margin"}
"""These, and those of data for KTO and reward models."""


class RowReader:
    """Turns a source's rows into conversations. `columns`: format's name -> file's; `answered`: an answer is due."""

    row_format: RowFormat
    gives_pairs = False
    """Whether a row becomes two samples that are used together or not at all."""

    def __init__(self, row_format: RowFormat, columns: Mapping[str, str], answered: bool = True) -> None:
        # Undecided where no row of a block can be parsed: each is rejected before a format is needed.
        self.row_format = RowFormat.prompt_response if row_format is RowFormat.auto else row_format
        self.answered = answered
        self.skipped: Counter[str] = Counter()  # keys of messages that are not read, and in how many messages
        fields = {field for names in ROW_FIELDS.values() for field in names}
        self.renamed = {theirs: ours for ours, theirs in columns.items() if theirs != ours}
        self.names = {field: columns.get(field, field) for field in fields}
        self.columns = columns
        self.flags = {**_LOSS, self.names["loss"]: True}

    def read(self, row: object) -> Conversation:
        """Return the conversation of one parsed row; a RowError if it lacks something or a value has a wrong type."""
        mapping = as_object(row)
        _check_trainable(mapping, self.columns)
        try:
            if self.row_format is RowFormat.text:
                return Conversation([_message(TEXT, required_text(mapping, self.names["text"]))])
            messages = self._listed(mapping) if self.row_format in _LIST_FIELDS else self._pair(mapping)
        except MissingKey as error:
            raise self._explained(error) from None
        system = mapping.get(self.names["system"])
        if system not in (None, ""):
            if messages[0]["role"] == "system":
                raise RowError(
                    "the row has a system message twice: under '{key}' and in the list. Remove one", key="system"
                )
            messages = [_message("system", required_text(mapping, self.names["system"])), *messages]
        return Conversation(messages, listed_tools(mapping.get(self.names["tools"]), self.names["tools"]))

    def read_all(self, row: object) -> list[Conversation]:
        """Return what is learned from one parsed row: here one conversation."""
        return [self.read(row)]

    def _explained(self, error: RowError) -> RowError:
        """Return an error that blames `columns` where these asked for a key that a row lacks."""
        if not isinstance(error, MissingKey) or error.key not in self.renamed:
            return error
        return RowError(
            "`columns` reads {field} from '{key}', but the row has {keys}. Correct `columns`",
            field=self.renamed[error.key],
            key=error.key,
            keys=quoted_keys(error.row),
        )

    def unused(self, row: Mapping[str, object]) -> list[str]:
        """Return the keys of a row that this format does not read."""
        used = {self.names[field] for field in ROW_FIELDS[self.row_format]}
        used.update(self._pair_keys(row) if self.row_format in _PAIR_FIELDS else ())
        return [str(key) for key in row if key not in used]

    def _pair(self, row: Mapping[str, Any]) -> list[Message]:
        """Question and answer, after what was said before."""
        asked, answered = self._pair_keys(row)
        messages: list[Message] = []
        key = self.names["history"]
        for question, answer in earlier_turns(row.get(key), key):
            messages += [_message("user", question), _message("assistant", answer)]
        more = self.names["input"]
        if self.row_format is RowFormat.prompt_response and isinstance(self._heard(row.get(asked)), list):
            messages += self._items(row, asked, self._add_item)
        else:
            question = required_text(row, asked)
            if self.row_format is RowFormat.instruction and row.get(more) not in (None, ""):
                question += "\n" + required_text(row, more)
            messages.append(_message("user", question))
        if self.answered or row.get(answered) not in (None, ""):
            self._add_answer(row, answered, messages)
        return messages

    def _pair_keys(self, row: Mapping[str, Any]) -> tuple[str, str]:
        """Return the keys of question and answer, which TRL calls `completion`."""
        asked, answered = _PAIR_FIELDS[self.row_format]
        is_completion = answered == "response" and answered not in self.columns and answered not in row
        return self.names[asked], "completion" if is_completion and "completion" in row else self.names[answered]

    def _add_answer(self, row: Mapping[str, Any], key: str, messages: list[Message]) -> None:
        """Add an answer: a text, a message or a list of messages."""
        said = self._heard(row[key]) if key in row else missing_key(row, key)
        items = said if isinstance(said, list) else [said]
        if not any(isinstance(item, dict) for item in items):
            messages.append(_message("assistant", required_text(row, key)))
            return
        for item in items:
            try:
                if not isinstance(item, dict):
                    raise RowError("it is {kind}, not an object. Correct or remove the row", kind=kind_of(item))
                self._add_item(item, messages)
            except RowError as error:
                raise RowError("'{key}' cannot be used: {reason}", key=key, reason=self._explained(error)) from None

    def _heard(self, value: object) -> object:
        """Return the messages that a text holds, else the value: an answer may be JSON of its own."""
        found = conversation_in(value)
        items = found if isinstance(found, list) else [found]
        keys = {self.names["from"], self.names["role"]}
        is_heard = items and all(isinstance(item, dict) and keys.intersection(item) for item in items)
        return found if is_heard else value

    def _listed(self, row: Mapping[str, Any]) -> list[Message]:
        """A list of messages, each with from and value, or role and content; or of pairs with human and assistant."""
        key = self.names[_LIST_FIELDS[self.row_format]]
        is_paired = self.row_format is RowFormat.conversation
        messages = self._items(row, key, self._add_pair if is_paired else self._add_item)
        if self.answered and not any(message["role"] == "assistant" for message in messages):
            raise RowError("'{key}' holds no answer of the assistant. Correct or remove the row", key=key)
        return messages

    def _items(
        self, row: Mapping[str, Any], key: str, add: Callable[[dict[str, Any], list[Message]], None]
    ) -> list[Message]:
        """Return the messages of a list in a row."""
        listed = conversation_in(row[key]) if key in row else missing_key(row, key)
        if not isinstance(listed, list) or not listed:
            raise RowError(
                "'{key}' is {kind}, not a list of messages. Correct or remove the row", key=key, kind=kind_of(listed)
            )
        messages: list[Message] = []
        for number, item in enumerate(listed, start=1):
            try:
                if not isinstance(item, dict):
                    raise RowError("it is {kind}, not an object. Correct or remove the row", kind=kind_of(item))
                add(item, messages)
            except RowError as error:
                reason = self._explained(error)
                raise RowError("message {number} of '{key}': {reason}", number=number, key=key, reason=reason) from None
        if not messages:
            raise RowError("'{key}' is empty. Fill it in or remove the row", key=key)
        return messages

    def _add_pair(self, item: dict[str, Any], messages: list[Message]) -> None:
        """Add a question and its answer, which the last pair may lack where none is due."""
        asked, answered = self.names["human"], self.names["assistant"]
        messages.append(_message("user", required_text(item, asked)))
        if self.answered or item.get(answered) not in (None, ""):
            messages.append({**_message("assistant", required_text(item, answered)), **self._loss(item)})
        self.skipped.update(unread_keys(item, (asked, answered, *self.flags), is_answer=True))

    def _add_item(self, item: dict[str, Any], messages: list[Message]) -> None:
        """Add the messages of one item; ChatGLM3's `tool` items are a call and what came back."""
        speaker, said = self.names["from"], self.names["value"]
        if speaker not in item:
            speaker, said = self.names["role"], self.names["content"]
        name = required_text(item, speaker)
        role = _ROLE_NAMES.get(name)
        if role is None:
            raise RowError(
                "unknown role '{name}'; expected one of {names}", name=name[:40], names=", ".join(_ROLE_NAMES)
            )
        is_call = role == "tool" and "parameters" in item
        read = (speaker, said, *self.flags, *_READ.get("call" if is_call else role, ()))
        self.skipped.update(unread_keys(item, read, is_answer=is_call or role in ("assistant", "function_call")))
        extra = self._loss(item)
        if role == "system" and item.get(said) in (None, ""):
            return  # as under the row's "system"
        if is_call:
            call = {"name": item.get("name"), "arguments": item["parameters"]}
            messages.append({**_message("assistant", ""), "tool_calls": self._calls(call), **extra})
            messages.append(_message("tool", result_text(item.get("observation"))))
            return
        if role == "tool":
            # What a tool gives back may be an object, and may be nothing.
            result = {**_message("tool", result_text(item.get(said))), **extra}
            messages.append({**result, **call_id(item, "tool_call_id")})
            return
        if role not in ("assistant", "function_call"):
            messages.append({**_message(role, self._content(item, said)[0]), **extra})
            return
        message = self._answer(item, said, role)
        if isinstance(item.get("metadata"), str):
            message["metadata"] = item["metadata"]
        last = messages[-1] if messages else {}
        # Calls that follow an answer, or each other, are of one turn: the model writes them at once.
        is_more = role == "function_call" and last.get("role") == "assistant" and last.get("loss") == extra.get("loss")
        if is_more and not message["content"] and "reasoning_content" not in message:
            messages[-1] = {**last, "tool_calls": [*last.get("tool_calls", []), *message["tool_calls"]]}
            return
        messages.append({**message, **extra})

    def _loss(self, item: Mapping[str, Any]) -> dict[str, bool]:
        """Return whether a message is trained; {} where nothing is said."""
        found: dict[str, bool] = {}
        for key, meaning in self.flags.items():
            value = item.get(key)
            if value is None:
                continue
            if value not in (0, 1, True, False) or isinstance(value, str):
                raise RowError("'{key}' is {kind}, neither true nor false", key=key, kind=kind_of(value))
            is_trained = bool(value) is meaning
            if found.setdefault("loss", is_trained) != is_trained:
                raise RowError(
                    "{keys} contradict each other", keys=quoted_keys({k: 0 for k in self.flags if k in item})
                )
        return found

    def _answer(self, item: dict[str, Any], said: str, role: str) -> dict[str, Any]:
        """Return what the assistant said, thought and called."""
        message = _message("assistant", "")
        thoughts = list(dict.fromkeys(thought for key in REASONING_KEYS if (thought := reasoning_of(item, key))))
        if len(thoughts) > 1:
            raise RowError(
                "{keys} contradict each other", keys=quoted_keys({k: 0 for k in REASONING_KEYS if k in item})
            )
        calls: list[Any] = []
        if role == "function_call":
            value: Any = item.get(said)
            if isinstance(value, str) and (block := _THINK.match(value)):  # LLaMA-Factory's way of thinking aloud
                message["content"], value = block[1], value[block.end() :]
            calls = self._calls(parsed_json(value))
        else:
            called = item.get("tool_calls")
            calls = self._calls(parsed_json(called)) if called else []
            if not calls or item.get(said) not in (None, ""):
                message["content"], more_thoughts, more_calls = self._content(item, said, is_answer=True)
                thoughts, calls = thoughts + more_thoughts, calls + more_calls
        if thoughts:
            message["reasoning_content"] = "\n".join(thoughts)
        if calls:
            message["tool_calls"] = calls
        return message

    def _content(self, item: Mapping[str, Any], key: str, is_answer: bool = False) -> tuple[str, list[str], list[Any]]:
        """Return a message's text; of a list of parts, joined, also what an answer thinks and calls."""
        value = item.get(key)
        if not isinstance(value, list):
            return required_text(item, key), [], []
        texts: list[str] = []
        thoughts: list[str] = []
        calls: list[Any] = []
        for part in value:
            kind = part.get("type") if isinstance(part, dict) else None
            if kind == "text" or (is_answer and kind in ("reasoning", "thinking")):
                held = next((name for name in (kind, "text", "value") if name in part), "text")
                self.skipped.update(unread_keys(part, ("type", held)))
                (texts if kind == "text" else thoughts).append(required_text(part, held))
            elif is_answer and kind == "tool_call":
                self.skipped.update(unread_keys(part, ("type", "value")))
                calls += self._calls(parsed_json(part.get("value")))
            else:
                raise RowError("'{key}' holds something that is no text: only text can be trained on", key=key)
        text = "".join(texts)
        return (text if calls else required_text({key: text}, key)), thoughts, calls

    def _calls(self, value: object) -> list[dict[str, Any]]:
        """Return tool calls as OpenAI writes them, with the arguments as an object."""
        calls = []
        for item in value if isinstance(value, list) else [value]:
            whole = item if isinstance(item, dict) else {}
            call = whole.get("function", whole)
            if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
                raise RowError(
                    'a call of a tool must look like {{"name": …, "arguments": {{…}}}}, and this is {kind}',
                    kind=kind_of(item),
                )
            given = "parameters" if "arguments" not in call and "parameters" in call else "arguments"
            arguments = {} if call.get(given) in (None, "") else parsed_json(call[given])
            if not isinstance(arguments, dict):
                raise RowError(
                    "the arguments of '{name}' are {kind}, not an object", name=call["name"], kind=kind_of(arguments)
                )
            self.skipped.update(unread_keys(call, ("type", "id", "name", given)))
            if call is not whole:
                self.skipped.update(unread_keys(whole, ("type", "id", "function")))
            function = {"name": call["name"], "arguments": arguments}
            calls.append({"type": "function", **call_id(whole, "id"), "function": function})
        return calls


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
        whole = {answer: key for answer in _ANSWERS if (key := self._whole(mapping, answer))}
        if names["chosen"] not in mapping and ("rejected" in whole or mapping.get(names["rejected_response"])):
            # ms-swift: the chosen answer ends the conversation, or is what the other formats call it.
            chosen = self._before(mapping, is_answered=True)
            if "rejected" in whole:
                rejected = self._read(mapping, RowFormat.messages, messages=whole["rejected"])
            else:
                rejected = self._answered(replace(chosen, messages=chosen.messages[:-1]), mapping, "rejected_response")
            pair = [chosen, rejected]
        elif len(whole) == len(_ANSWERS):
            pair = [self._read(mapping, RowFormat.messages, messages=whole[answer]) for answer in _ANSWERS]
        else:
            before = self._before(mapping)
            pair = [self._answered(before, mapping, answer) for answer in _ANSWERS]
        plain = [_unmarked(one) for one in pair]
        for messages, name in zip(plain, _ANSWERS, strict=True):
            if messages[-1]["role"] != "assistant":
                raise RowError("the {answer} conversation does not end with the assistant's answer", answer=name)
        if plain[0][:-1] != plain[1][:-1]:
            raise RowError(
                tr("the chosen and the rejected conversation must have the same messages before their last answer")
            )
        return [replace(one, messages=messages) for one, messages in zip(pair, plain, strict=True)]

    def _before(self, row: Mapping[str, Any], is_answered: bool = False) -> Conversation:
        """Return what was said before the last answer; `is_answered`: with the chosen one."""
        names = self.names
        for row_format, field in _LIST_FIELDS.items():
            if names[field] in row:
                return self._read(row, row_format, is_answered)
        if isinstance(self._heard(row.get(names["prompt"])), list):
            return self._read(row, RowFormat.messages, is_answered, messages=names["prompt"])
        asked = {fields[0]: row_format for row_format, fields in _PAIR_FIELDS.items()}
        fields = sorted(asked, key=lambda field: field not in self.columns)  # what `columns` names comes first
        found = next((asked[field] for field in fields if names[field] in row), None)
        return missing_key(row, names["prompt"]) if found is None else self._read(row, found, is_answered)

    def _read(
        self, row: Mapping[str, Any], row_format: RowFormat, is_answered: bool = False, **columns: str
    ) -> Conversation:
        """Return a row's conversation in one of the other formats; `columns`: beside those of this reader."""
        reader = RowReader(row_format, {**self.columns, **columns}, answered=is_answered)
        reader.skipped = self.skipped
        others = self._others(is_answered) - set(columns.values())
        return reader.read({key: value for key, value in row.items() if key not in others})

    def _others(self, is_answered: bool) -> set[str]:
        """Return the keys of a row that are not of the conversation."""
        others = {self.names[field] for field in _MARKS.intersection(ROW_FIELDS[self.row_format])}
        return others if is_answered else others | {self.names[answer] for _, answer in _PAIR_FIELDS.values()}

    def _answered(self, before: Conversation, row: Mapping[str, Any], answer: str) -> Conversation:
        """Return what was said with an answer of the row behind it."""
        key = self.names[answer]
        if not before.messages or before.messages[-1]["role"] == "assistant":
            raise RowError(tr("the messages before the two answers must end with a question"))
        messages = list(before.messages)
        self._add_answer(row, key, messages)
        return replace(before, messages=messages)

    def _whole(self, row: Mapping[str, Any], answer: str) -> str:
        """Return the key of a whole conversation, with its question, that ends with an answer; "" if none does."""
        keys = self.names["from"], self.names["role"]
        for name in (self.names[answer], self.names[f"{answer}_messages"]):
            items = conversation_in(row.get(name))
            if isinstance(items, list) and any(
                isinstance(item, dict) and item.get(key) in _ROLES["user"] for item in items for key in keys
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
        return [replace(one, value=value) for one in super().read_all(row)]


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
            whole = self._answered(self._before(mapping), mapping, "completion")
        else:
            whole = self._before(mapping, is_answered=True)
        if whole.messages[-1]["role"] != "assistant":
            raise RowError(tr("the conversation does not end with the assistant's answer"))
        return [replace(whole, messages=_unmarked(whole), value=_LABELS[str(value).lower()])]


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
        whole = self._read(mapping, RowFormat.text) if is_text else self._before(mapping)
        return [replace(whole, messages=_unmarked(whole), label=label, is_read=True)]

    def _others(self, is_answered: bool) -> set[str]:
        return {self.names["label"]}  # an answer that is there is read


class TextPairReader(PairReader):
    """Turns rows of `RowFormat.embed` into texts: `query`, `positive`, and those of `negatives`, a list or one text."""

    row_format = RowFormat.embed

    def read_all(self, row: object) -> list[Conversation]:
        """Return the texts; a RowError as `RowReader`."""
        mapping, key = as_object(row), self.names["negatives"]
        _check_trainable(mapping, self.columns)
        texts = [required_text(mapping, self.names[field]) for field in ("query", "positive")]
        negatives = parsed_json(mapping.get(key))
        if negatives is not None and not isinstance(negatives, str | list):
            raise RowError("'{key}' is {kind}, neither a list of texts nor a text", key=key, kind=kind_of(negatives))
        items = [negatives] if isinstance(negatives, str) else negatives or []
        texts += [required_text({f"{key}[{place}]": text}, f"{key}[{place}]") for place, text in enumerate(items)]
        if texts[1] in texts[2:]:
            raise RowError("'{key}' holds the positive itself. Correct or remove the row", key=key)
        return [Conversation([_message(TEXT, text)], is_read=True) for text in texts]


def _unmarked(conversation: Conversation) -> list[Message]:
    """Return messages that do not say whether they are trained."""
    return [{key: value for key, value in message.items() if key != "loss"} for message in conversation.messages]


def reader_of(row_format: RowFormat, columns: Mapping[str, str]) -> RowReader:
    """Return the reader of a format's rows."""
    for reader in (PairReader, MarginReader, LabelReader, ClassReader, TextPairReader):
        if reader.row_format is row_format:
            return reader(columns)
    return RowReader(row_format, columns)


def detect_format(row: Mapping[str, object], columns: Mapping[str, str]) -> RowFormat:
    """Return the format of a file from the keys of its first row; a RowError if no known format has these keys."""

    def there(field: str) -> bool:
        return columns.get(field, field) in row

    _check_trainable(row, columns)
    if _is_table(row):
        raise RowError(
            "a whole table in one object ({keys}), as pandas' to_json() writes it. Write one row per "
            "line:  to_json(FILE, orient='records', lines=True, force_ascii=False)",
            keys=quoted_keys(row),
        )
    for row_format, field in _LIST_FIELDS.items():
        if there(field):
            return row_format
    for complete in (True, False):
        for row_format, fields in _PAIR_FIELDS.items():
            if all(map(there, fields)) if complete else any(map(there, fields)):
                return row_format
    if there("text"):
        return RowFormat.text
    as_object(row)  # a CSV's first row may have more fields than names
    absent = [theirs for theirs in columns.values() if theirs not in row]
    if absent:
        raise RowError(
            "`columns` names '{name}', but the row has {keys}. Write {columns} or the like",
            name=absent[0],
            keys=quoted_keys(row),
            columns=columns_for(row),
        )
    raise RowError(
        "the keys {keys} belong to no known format. Known are prompt, response (history); query, response; "
        "instruction, output (input, history); conversations; messages; conversation; text. Say which is which: add "
        "{columns} to the command line",
        keys=quoted_keys(row),
        columns=columns_for(row),
    )


def _is_table(row: Mapping[str, object]) -> bool:
    """Return whether a row is a whole table: lists of values by column, or objects by column or by number."""
    values = list(row.values())
    if len(row) < 2 or len({type(value) for value in values}) > 1:
        return False
    if isinstance(values[0], dict):
        numbered = [row, *(value for value in values if isinstance(value, dict))]
        return any(keys and all(str(key).isdecimal() for key in keys) for keys in numbered)
    lists = [value for value in values if isinstance(value, list)]
    return bool(lists) and not any(isinstance(item, dict | list) for value in lists for item in value) and any(lists)


def parse_row(row: object) -> object:
    """Return the value of a row, which may be a line of JSON still."""
    if isinstance(row, bytes):
        return parse_line(row)
    check_characters(row)
    return row


def _message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


_LOSS = {
    **dict.fromkeys(("loss", "weight", "loss_weight", "loss_scale", "train", "training", "trainable"), True),
    **dict.fromkeys(("masked", "is_masked"), False),
}
"""Keys that say whether a message is trained, and what they say if they are true: ours and ms-swift's, OpenAI's,
LLaMA-Factory's, ms-swift's other one, axolotl's (`message_field_training`) and its like; torchtune's `masked`."""
_THINK = re.compile(r"\s*(<think>.*?</think>)\s*", re.DOTALL)


_MEDIA = ("image", "images", "video", "videos", "audio", "audios")


def _check_trainable(row: Mapping[str, Any], columns: Mapping[str, str]) -> None:
    """Raise a RowError for a row with images, with a better and a worse answer, or with one that is marked as bad."""
    for key in _MEDIA:
        if row.get(key) not in (None, "", [], {}) and key not in columns.values():
            raise RowError(
                "'{key}' is not empty, and images, videos and sounds cannot be trained on: what stands for them in the "
                "text would be trained as text. Remove the row",
                key=key,
            )
    if not _PREFERENCE.isdisjoint(row) and _PREFERENCE.isdisjoint(columns.values()):
        found = {key: row[key] for key in row if key in _PREFERENCE and row[key] not in (None, "", [])}
        if found:
            raise RowError(
                "preference data ({keys}) needs preference=dpo or another loss of pairs. To train the better answers "
                "alone, map them (columns: {{response: chosen}}, columns: {{messages: chosen}}) or write "
                "them into a file of their own",
                keys=quoted_keys(found),
            )
    for key in ("label", "kto_tag"):
        # As a text, as in CSV, a label may be anything.
        if row.get(key) is False or (key == "kto_tag" and str(row.get(key)).lower() == "false"):
            raise RowError(
                "preference data: '{key}' is false, which marks a bad answer, and it would be trained as a good one. "
                "Use preference=kto, remove such rows, or skip them: data.on_bad_row=skip data.max_bad_fraction=1",
                key=key,
            )


_READ = {
    "assistant": ("tool_calls", "metadata", *REASONING_KEYS),
    "function_call": REASONING_KEYS,
    "tool": ("tool_call_id",),
    "call": ("name", "parameters", "observation"),
}
"""Keys that are read besides role, text and loss, by role; "call" is an item that holds a call and its result."""
