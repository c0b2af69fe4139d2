"""What a row of a data file becomes: a conversation, its turns, and which of its messages are trained. Unread keys are
counted if they are metadata, and an error if they hold text, lest it vanish.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from toolkit.config.schema import ROW_FIELDS, RowFormat, TrainOn
from toolkit.data.rows import (
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
from toolkit.messages import RowError, listed
from toolkit.sample_types import TEXT, Message


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages, and the tools that the assistant may call."""

    messages: list[Message]
    tools: list[Any] | None = None
    value: float | None = None
    """What the row says of its answer: 1 good, 0 bad; of a pair the margin."""
    label: str | None = None
    """What a classifier is to find."""
    is_input_only: bool = False
    """Whether the whole is read, and nothing of it is trained to be written."""

    @property
    def is_text(self) -> bool:
        """Whether this is a plain text."""
        return bool(self.messages) and self.messages[0]["role"] == TEXT


def turns(messages: Sequence[Message]) -> tuple[list[Message], list[list[Message]]]:
    """Return the system messages at the beginning, and the turns after them: each a user's messages and the replies."""
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
    """Yield the conversation once, with the key `loss` (trained or not) of its messages set by `data.train_on`. With
    `only_last` (chat formats that train the last message only) yield a copy for each trained answer, ending with it.
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


ROLES = {
    "system": ("system", "developer"),
    "user": ("user", "human"),
    "assistant": ("assistant", "gpt", "chatgpt", "bing", "bard", "model"),
    "function_call": ("function_call", "tool_call"),
    "tool": ("observation", "function_response", "tool_response", "function", "tool"),
}
_ROLE_NAMES = {name: role for role, names in ROLES.items() for name in names}
PAIR_FIELDS = {
    RowFormat.prompt_response: ("prompt", "response"),
    RowFormat.query_response: ("query", "response"),
    RowFormat.instruction: ("instruction", "output"),
}
LIST_FIELDS = {
    RowFormat.sharegpt: "conversations",
    RowFormat.messages: "messages",
    RowFormat.conversation: "conversation",
}
PREFERENCE_KEYS = frozenset({"chosen", "rejected", "chosen_messages", "rejected_messages", "rejected_response"})
"""Columns of data for DPO and its like."""


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
        self.renamed = {theirs: ours for ours, theirs in columns.items() if theirs != ours}  # file's key -> field
        self.names = {field: columns.get(field, field) for field in fields}  # field -> file's key
        self.columns = columns
        self.flags = {**_LOSS, self.names["loss"]: True}  # key of a message -> is it trained if the value is true

    def read(self, row: object) -> Conversation:
        """Return one parsed row as a conversation; raise a RowError if a key is missing or a value has a wrong type."""
        mapping = as_object(row)
        check_trainable(mapping, self.columns)
        try:
            if self.row_format is RowFormat.text:
                return Conversation([plain_message(TEXT, required_text(mapping, self.names["text"]))])
            is_list = self.row_format in LIST_FIELDS
            messages = self._listed_messages(mapping) if is_list else self._question_and_answer(mapping)
        except MissingKey as error:
            raise self._explained(error) from None
        system = mapping.get(self.names["system"])
        if system not in (None, ""):
            if messages[0]["role"] == "system":
                raise RowError(
                    "the row has a system message twice: under '{key}' and in the list. Remove one", key="system"
                )
            messages = [plain_message("system", required_text(mapping, self.names["system"])), *messages]
        key, tools = self.names["tools"], mapping.get(self.names["tools"])
        if "tools" in messages[0]:  # of GLM-4's system message
            if tools not in (None, "", []):
                raise RowError("the row has tools twice: under '{key}' and in its system message. Remove one", key=key)
            first = dict(messages[0])
            tools, key = first.pop("tools"), "tools"
            messages = messages[1:] if messages[1:] and not first["content"] else [first, *messages[1:]]
        return Conversation(messages, listed_tools(tools, key))

    def read_all(self, row: object) -> list[Conversation]:
        """Return the conversations of one parsed row: here one, in readers of preference pairs two."""
        return [self.read(row)]

    def _explained(self, error: RowError) -> RowError:
        """Return the error; if a key is missing that `data.columns` names, one that says to correct `columns`."""
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
        used.update(self._pair_keys(row) if self.row_format in PAIR_FIELDS else ())
        return [str(key) for key in row if key not in used]

    def _question_and_answer(self, row: Mapping[str, Any]) -> list[Message]:
        """Return the messages of a row with a question and an answer: its history, the question, the answer."""
        question_key, answer_key = self._pair_keys(row)
        messages: list[Message] = []
        key = self.names["history"]
        for question, answer in earlier_turns(row.get(key), key):
            messages += [plain_message("user", question), plain_message("assistant", answer)]
        input_key = self.names["input"]  # Alpaca's, a text to which the instruction applies
        if self.row_format is RowFormat.prompt_response and isinstance(self._messages_in(row.get(question_key)), list):
            messages += self._items(row, question_key, self._add_item)
        else:
            question = required_text(row, question_key)
            if self.row_format is RowFormat.instruction and row.get(input_key) not in (None, ""):
                question += "\n" + required_text(row, input_key)
            messages.append(plain_message("user", question))
        if self.answered or row.get(answer_key) not in (None, ""):
            self._add_answer(row, answer_key, messages)
        return messages

    def _pair_keys(self, row: Mapping[str, Any]) -> tuple[str, str]:
        """Return the row's keys of the question and of the answer; TRL calls the answer `completion`."""
        question, answer = PAIR_FIELDS[self.row_format]
        is_trl = answer == "response" and answer not in self.columns and answer not in row and "completion" in row
        return self.names[question], "completion" if is_trl else self.names[answer]

    def _add_answer(self, row: Mapping[str, Any], key: str, messages: list[Message]) -> None:
        """Append the answer under `key` to `messages`; the row may hold a text, a message or a list of messages."""
        answer = self._messages_in(row[key]) if key in row else missing_key(row, key)
        items = answer if isinstance(answer, list) else [answer]
        if not any(isinstance(item, dict) for item in items):
            messages.append(plain_message("assistant", required_text(row, key)))
            return
        for item in items:
            try:
                if not isinstance(item, dict):
                    raise RowError("it is {kind}, not an object. Correct or remove the row", kind=kind_of(item))
                self._add_item(item, messages)
            except RowError as error:
                raise RowError("'{key}' cannot be used: {reason}", key=key, reason=self._explained(error)) from None

    def _messages_in(self, value: object) -> object:
        """Return the messages that a text encodes as JSON; other values unchanged: JSON without roles may be a text."""
        conversation = conversation_in(value)
        items = conversation if isinstance(conversation, list) else [conversation]
        role_keys = {self.names["from"], self.names["role"]}
        has_roles = items and all(isinstance(item, dict) and role_keys.intersection(item) for item in items)
        return conversation if has_roles else value

    def _listed_messages(self, row: Mapping[str, Any]) -> list[Message]:
        """Return the messages of a row that lists messages ({from, value}, {role, content}) or {human, assistant}."""
        key = self.names[LIST_FIELDS[self.row_format]]
        is_paired = self.row_format is RowFormat.conversation
        messages = self._items(row, key, self._add_pair if is_paired else self._add_item)
        if self.answered and not any(message["role"] == "assistant" for message in messages):
            raise RowError("'{key}' holds no answer of the assistant. Correct or remove the row", key=key)
        return messages

    def _items(
        self, row: Mapping[str, Any], key: str, add: Callable[[dict[str, Any], list[Message]], None]
    ) -> list[Message]:
        """Return the messages of the list under a row's key; `add(item, messages)` appends those of one list item."""
        listed = conversation_in(row[key]) if key in row else missing_key(row, key)
        if not isinstance(listed, list):
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
        """Append the two messages of a {human, assistant} item; the answer may be missing if `self.answered` is off."""
        question, answer = self.names["human"], self.names["assistant"]
        messages.append(plain_message("user", required_text(item, question)))
        if self.answered or item.get(answer) not in (None, ""):
            messages.append({**plain_message("assistant", required_text(item, answer)), **self._loss_flag(item)})
        self.skipped.update(unread_keys(item, (question, answer, *self.flags), is_answer=True))

    def _add_item(self, item: dict[str, Any], messages: list[Message]) -> None:
        """Append the message of one list item; a `tool` item of ChatGLM3 becomes two, the call and its result."""
        speaker, content_key = self.names["from"], self.names["value"]
        if speaker not in item:
            speaker, content_key = self.names["role"], self.names["content"]
        name = required_text(item, speaker)
        role = _ROLE_NAMES.get(name)
        if role is None:
            raise RowError(
                "unknown role '{name}'; expected one of {names}, or another of docs/data.md",
                name=name[:40],
                names=listed(*ROLES),
            )
        is_call = role == "tool" and "parameters" in item
        has_tools = role == "system" and not messages and item.get("tools") not in (None, "", [])
        read = (speaker, content_key, *self.flags, *_READ.get("call" if is_call else role, ()))
        read += ("tools",) if has_tools else ()
        self.skipped.update(unread_keys(item, read, is_answer=is_call or role in ("assistant", "function_call")))
        extra = self._loss_flag(item)
        if has_tools:  # as the GLM-4 repository writes them, mostly without a text
            text = item.get(content_key) and self._content(item, content_key)[0]
            messages.append({**plain_message("system", text or ""), "tools": item["tools"]})
            return
        if role == "system" and item.get(content_key) in (None, ""):
            return  # as under the row's "system"
        if is_call:
            call = {"name": item.get("name"), "arguments": item["parameters"]}
            messages.append({**plain_message("assistant", ""), "tool_calls": self._tool_calls(call), **extra})
            messages.append(plain_message("tool", result_text(item.get("observation"))))
            return
        if role == "tool":
            # What a tool gives back may be an object, and may be nothing.
            result = {**plain_message("tool", result_text(item.get(content_key))), **extra}
            messages.append({**result, **call_id(item, "tool_call_id")})
            return
        if role not in ("assistant", "function_call"):
            messages.append({**plain_message(role, self._content(item, content_key)[0]), **extra})
            return
        message = self._assistant_message(item, content_key, role)
        if isinstance(item.get("metadata"), str):
            message["metadata"] = item["metadata"]
        last = messages[-1] if messages else {}
        # Calls that follow an answer, or each other, are of one turn: the model writes them at once.
        is_more = role == "function_call" and last.get("role") == "assistant" and last.get("loss") == extra.get("loss")
        if is_more and not message["content"] and "reasoning_content" not in message:
            messages[-1] = {**last, "tool_calls": [*last.get("tool_calls", []), *message["tool_calls"]]}
            return
        messages.append({**message, **extra})

    def _loss_flag(self, item: Mapping[str, Any]) -> dict[str, bool]:
        """Return {"loss": whether the message is trained}, from any of the keys `flags`; {} if it has none of them."""
        flags: dict[str, bool] = {}
        for key, meaning in self.flags.items():
            value = item.get(key)
            if value is None:
                continue
            if value not in (0, 1, True, False) or isinstance(value, str):
                raise RowError("'{key}' is {kind}, neither true nor false", key=key, kind=kind_of(value))
            is_trained = bool(value) is meaning
            if flags.setdefault("loss", is_trained) != is_trained:
                raise RowError(
                    "{keys} contradict each other", keys=quoted_keys({k: 0 for k in self.flags if k in item})
                )
        return flags

    def _assistant_message(self, item: dict[str, Any], content_key: str, role: str) -> dict[str, Any]:
        """Return an assistant's item as a message; the content of a `function_call` item is its tool calls."""
        message = plain_message("assistant", "")
        thoughts = list(dict.fromkeys(thought for key in REASONING_KEYS if (thought := reasoning_of(item, key))))
        if len(thoughts) > 1:
            raise RowError(
                "{keys} contradict each other", keys=quoted_keys({k: 0 for k in REASONING_KEYS if k in item})
            )
        calls: list[Any] = []
        if role == "function_call":
            value: Any = item.get(content_key)
            if isinstance(value, str) and (block := _THINK.match(value)):  # LLaMA-Factory's way of thinking aloud
                message["content"], value = block[1], value[block.end() :]
            calls = self._tool_calls(parsed_json(value))
        else:
            listed_calls = item.get("tool_calls")
            calls = self._tool_calls(parsed_json(listed_calls)) if listed_calls else []
            if not calls or item.get(content_key) not in (None, ""):
                message["content"], more_thoughts, more_calls = self._content(item, content_key, is_answer=True)
                thoughts, calls = thoughts + more_thoughts, calls + more_calls
        if thoughts:
            message["reasoning_content"] = "\n".join(thoughts)
        if calls:
            message["tool_calls"] = calls
        return message

    def _content(self, item: Mapping[str, Any], key: str, is_answer: bool = False) -> tuple[str, list[str], list[Any]]:
        """Return (text, reasoning texts, tool calls) of a message's content: a text, or a list of parts with a type, of
        which only an answer has reasoning and calls. Counts unread keys of parts in `skipped`; RowError for other
        parts, or an empty text without calls.
        """
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
                calls += self._tool_calls(parsed_json(part.get("value")))
            else:
                raise RowError("'{key}' holds something that is no text: only text can be trained on", key=key)
        text = "".join(texts)
        return (text if calls else required_text({key: text}, key)), thoughts, calls

    def _tool_calls(self, value: object) -> list[dict[str, Any]]:
        """Return a row's tool call, or list of them, in OpenAI's form, but with the arguments as an object."""
        calls = []
        for item in value if isinstance(value, list) else [value]:
            entry = item if isinstance(item, dict) else {}
            call = entry.get("function", entry)
            if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
                raise RowError(
                    'a call of a tool must look like {{"name": …, "arguments": {{…}}}}, and this is {kind}',
                    kind=kind_of(item),
                )
            arguments_key = "parameters" if "arguments" not in call and "parameters" in call else "arguments"
            arguments = {} if call.get(arguments_key) in (None, "") else parsed_json(call[arguments_key])
            if not isinstance(arguments, dict):
                raise RowError(
                    "the arguments of '{name}' are {kind}, not an object", name=call["name"], kind=kind_of(arguments)
                )
            self.skipped.update(unread_keys(call, ("type", "id", "name", arguments_key)))
            if call is not entry:
                self.skipped.update(unread_keys(entry, ("type", "id", "function")))
            function = {"name": call["name"], "arguments": arguments}
            calls.append({"type": "function", **call_id(entry, "id"), "function": function})
        return calls


_LABELED = (RowFormat.preference, RowFormat.reward, RowFormat.labeled, RowFormat.classify, RowFormat.embed)


def reader_of(row_format: RowFormat, columns: Mapping[str, str]) -> RowReader:
    """Return the reader of a format's rows."""
    if row_format in _LABELED:
        from toolkit.data.labeled_formats import READERS

        return READERS[row_format](columns)
    return RowReader(row_format, columns)


def detect_format(row: Mapping[str, object], columns: Mapping[str, str]) -> RowFormat:
    """Return the format of a file by the keys of its first row, else raise; `columns`: field -> file's key."""

    def has(field: str) -> bool:
        return columns.get(field, field) in row

    check_trainable(row, columns)
    if _is_table(row):
        raise RowError(
            "a whole table in one object ({keys}), as pandas' to_json() writes it. Write one row per "
            "line:  to_json(FILE, orient='records', lines=True, force_ascii=False)",
            keys=quoted_keys(row),
        )
    for row_format, field in LIST_FIELDS.items():
        if has(field):
            return row_format
    for complete in (True, False):
        for row_format, fields in PAIR_FIELDS.items():
            if all(map(has, fields)) if complete else any(map(has, fields)):
                return row_format
    if has("text"):
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
    """Whether a row is a whole table as pandas' to_json() writes it: column -> {row number: value} or a list."""
    values = list(row.values())
    if len(row) < 2 or len({type(value) for value in values}) > 1:
        return False
    if isinstance(values[0], dict):
        numbered = [row, *(value for value in values if isinstance(value, dict))]
        return any(keys and all(str(key).isdecimal() for key in keys) for keys in numbered)
    lists = [value for value in values if isinstance(value, list)]
    return bool(lists) and not any(isinstance(item, dict | list) for value in lists for item in value) and any(lists)


def plain_message(role: str, content: str) -> dict[str, Any]:
    """Return a message that has a role and a text only."""
    return {"role": role, "content": content}


_LOSS = {
    **dict.fromkeys(("loss", "weight", "loss_weight", "loss_scale", "train", "training", "trainable"), True),
    **dict.fromkeys(("masked", "is_masked"), False),
}
"""Keys that say whether a message is trained, and what they say if they are true: ours and ms-swift's, OpenAI's,
LLaMA-Factory's, ms-swift's other one, axolotl's (`message_field_training`) and its like; torchtune's `masked`."""
_THINK = re.compile(r"\s*(<think>.*?</think>)\s*", re.DOTALL)


_MEDIA = ("image", "images", "video", "videos", "audio", "audios")


def check_trainable(row: Mapping[str, Any], columns: Mapping[str, str]) -> None:
    """Raise a RowError for a row with media, a preference pair or a bad answer, which would be trained as good text."""
    for key in _MEDIA:
        if row.get(key) not in (None, "", [], {}) and key not in columns.values():
            raise RowError(
                "'{key}' is not empty, and images, videos and sounds cannot be trained on: what stands for them in the "
                "text would be trained as text. Remove the row",
                key=key,
            )
    if not PREFERENCE_KEYS.isdisjoint(row) and PREFERENCE_KEYS.isdisjoint(columns.values()):
        preferences = {key: row[key] for key in row if key in PREFERENCE_KEYS and row[key] not in (None, "", [])}
        if preferences:
            raise RowError(
                "preference data ({keys}) needs preference=dpo or another loss of pairs. To train the better answers "
                "alone, map them (columns: {{response: chosen}}, columns: {{messages: chosen}}) or write "
                "them into a file of their own",
                keys=quoted_keys(preferences),
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
