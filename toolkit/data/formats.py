"""What a row of a data file becomes: a conversation, its turns, and which of its messages are trained. Unread keys are
counted if they are metadata, and an error if they hold text, lest it vanish.
"""

import difflib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from toolkit.config.schema import ROW_FIELDS, RowFormat, TrainOn
from toolkit.data.readers import DECODER, check_characters, parse_line
from toolkit.messages import RowError, tr

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
    RowFormat.instruction: ("instruction", "output"),
}
_LIST_FIELDS = {RowFormat.sharegpt: "conversations", RowFormat.messages: "messages"}


class RowReader:
    """Turns a source's rows into conversations. `columns`: format's name -> file's; `answered`: an answer is due."""

    def __init__(self, row_format: RowFormat, columns: Mapping[str, str], answered: bool = True) -> None:
        self.row_format, self.answered = row_format, answered
        self.skipped: Counter[str] = Counter()  # keys of messages that are not read, and in how many messages
        fields = {field for names in ROW_FIELDS.values() for field in names}
        self.renamed = {theirs: ours for ours, theirs in columns.items() if theirs != ours}
        self.names = {field: columns.get(field, field) for field in fields}

    def read(self, row: object) -> Conversation:
        """Return the conversation of one parsed row; a RowError if it lacks something or a value has a wrong type."""
        mapping = as_object(row)
        try:
            if self.row_format is RowFormat.text:
                return Conversation([_message(TEXT, _text(mapping, self.names["text"]))])
            messages = self._listed(mapping) if self.row_format in _LIST_FIELDS else self._pair(mapping)
        except MissingKey as error:
            raise self._explained(error) from None
        system = mapping.get(self.names["system"])
        if system not in (None, ""):
            if messages[0]["role"] == "system":
                raise RowError(
                    "the row has a system message twice: under '{key}' and in the list. Remove one", key="system"
                )
            messages = [_message("system", _text(mapping, self.names["system"])), *messages]
        return Conversation(messages, _tools(mapping.get(self.names["tools"]), self.names["tools"]))

    def _explained(self, error: RowError) -> RowError:
        """Return an error that blames `columns` where these asked for a key that a row lacks."""
        if not isinstance(error, MissingKey) or error.key not in self.renamed:
            return error
        return RowError(
            "`columns` reads {field} from '{key}', but the row has {keys}. Correct `columns`",
            field=self.renamed[error.key],
            key=error.key,
            keys=_quoted(error.row),
        )

    def unused(self, row: Mapping[str, object]) -> list[str]:
        """Return the keys of a row that this format does not read."""
        used = {self.names[field] for field in ROW_FIELDS[self.row_format]}
        return [str(key) for key in row if key not in used]

    def _pair(self, row: Mapping[str, Any]) -> list[Message]:
        """Question and answer, after what was said before."""
        asked, answered = (self.names[field] for field in _PAIR_FIELDS[self.row_format])
        messages: list[Message] = []
        key = self.names["history"]
        for question, answer in _history(row.get(key), key):
            messages += [_message("user", question), _message("assistant", answer)]
        more = self.names["input"]
        question = _text(row, asked)
        if self.row_format is RowFormat.instruction and row.get(more) not in (None, ""):
            question += "\n" + _text(row, more)
        messages.append(_message("user", question))
        if self.answered or row.get(answered) not in (None, ""):
            messages.append(_message("assistant", _text(row, answered)))
        return messages

    def _listed(self, row: Mapping[str, Any]) -> list[Message]:
        """A list of messages, each with from and value, or role and content."""
        key = self.names[_LIST_FIELDS[self.row_format]]
        listed = _parsed(row[key]) if key in row else _missing(row, key)
        if not isinstance(listed, list) or not listed:
            raise RowError(
                "'{key}' is {kind}, not a list of messages. Correct or remove the row", key=key, kind=_kind(listed)
            )
        messages: list[Message] = []
        for number, item in enumerate(listed, start=1):
            try:
                messages += self._item(item)
            except RowError as error:
                reason = self._explained(error)
                raise RowError("message {number} of '{key}': {reason}", number=number, key=key, reason=reason) from None
        if self.answered and not any(message["role"] == "assistant" for message in messages):
            raise RowError("'{key}' holds no answer of the assistant. Correct or remove the row", key=key)
        return messages

    def _item(self, item: object) -> list[Message]:
        """Return the messages of one item; ChatGLM3's `tool` items are a call and what came back."""
        if not isinstance(item, dict):
            raise RowError("it is {kind}, not an object. Correct or remove the row", kind=_kind(item))
        speaker, said = self.names["from"], self.names["value"]
        if speaker not in item:
            speaker, said = self.names["role"], self.names["content"]
        name = _text(item, speaker)
        role = _ROLE_NAMES.get(name)
        if role is None:
            raise RowError(
                "unknown role '{name}'; expected one of {names}", name=name[:40], names=", ".join(_ROLE_NAMES)
            )
        is_call = role == "tool" and "parameters" in item
        self.skipped.update(unread_keys(item, "call" if is_call else role, speaker, said))
        extra = _loss(item)
        if role == "function_call":
            return [{**_message("assistant", ""), "tool_calls": _calls(_parsed(item.get(said))), **extra}]
        if is_call:
            call = {"name": item.get("name"), "arguments": item["parameters"]}
            return [
                {**_message("assistant", ""), "tool_calls": _calls(call), **extra},
                _message("tool", _as_text(item.get("observation"))),
            ]
        message = {**_message(role, ""), **extra}
        if role == "assistant" and item.get("tool_calls"):
            message["tool_calls"] = _calls(_parsed(item["tool_calls"]))
            message["content"] = "" if item.get(said) in (None, "") else _content(item, said)
        else:
            # What a tool gives back may be an object, and may be nothing.
            message["content"] = _as_text(item.get(said)) if role == "tool" else _content(item, said)
        if role == "assistant" and isinstance(item.get("metadata"), str):
            message["metadata"] = item["metadata"]
        return [message]


def detect_format(row: Mapping[str, object], columns: Mapping[str, str]) -> RowFormat:
    """Return the format of a file from the keys of its first row; a RowError if no known format has these keys."""

    def there(field: str) -> bool:
        return columns.get(field, field) in row

    for row_format, field in _LIST_FIELDS.items():
        if there(field):
            return row_format
    for complete in (True, False):
        for row_format, fields in _PAIR_FIELDS.items():
            if all(map(there, fields)) if complete else any(map(there, fields)):
                return row_format
    if there("text"):
        return RowFormat.text
    absent = [theirs for theirs in columns.values() if theirs not in row]
    if absent:
        raise RowError(
            "`columns` names '{name}', but the row has {keys}. Correct `columns`", name=absent[0], keys=_quoted(row)
        )
    raise RowError(
        "the keys {keys} belong to no known format. Known are prompt, response (history); instruction, output "
        "(input, history); conversations; messages; text. Say which is which with `columns`, for example "
        "columns: {{prompt: {first}, response: …}}",
        keys=_quoted(row),
        first=next(iter(row), "…"),
    )


def parse_row(row: object) -> object:
    """Return the value of a row, which may be a line of JSON still."""
    if isinstance(row, bytes):
        return parse_line(row)
    check_characters(row)
    return row


def as_object(row: object) -> dict[str, Any]:
    """Return the row if it is a JSON object, else raise a RowError."""
    if isinstance(row, dict):
        if None in row:  # what csv.DictReader does with fields beyond the first line's
            raise RowError(tr("the row has more fields than the first line names. Correct or remove the row"))
        return row
    raise RowError(
        'the row is {kind}, not an object. Each row must look like {{"prompt": …, "response": …}}', kind=_kind(row)
    )


def _message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def _loss(item: Mapping[str, Any]) -> dict[str, bool]:
    """Return whether a message is trained: `loss`, or OpenAI's `weight` of 0 or 1; {} where nothing is said."""
    for key in ("loss", "weight"):
        value = item.get(key)
        if value is None:
            continue
        if value not in (0, 1, True, False) or isinstance(value, str):
            raise RowError("'{key}' is {kind}, neither true nor false", key=key, kind=_kind(value))
        return {"loss": bool(value)}
    return {}


def _calls(value: object) -> list[dict[str, Any]]:
    """Return tool calls as OpenAI writes them, with the arguments as an object."""
    calls = []
    for item in value if isinstance(value, list) else [value]:
        call = item.get("function", item) if isinstance(item, dict) else item
        if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
            raise RowError(
                'a call of a tool must look like {{"name": …, "arguments": {{…}}}}, and this is {kind}',
                kind=_kind(item),
            )
        arguments = _parsed(call.get("arguments", call.get("parameters", {})))
        if not isinstance(arguments, dict):
            raise RowError(
                "the arguments of '{name}' are {kind}, not an object", name=call["name"], kind=_kind(arguments)
            )
        calls.append({"type": "function", "function": {"name": call["name"], "arguments": arguments}})
    return calls


def _tools(value: object, key: str) -> list[Any] | None:
    """Return tools as OpenAI writes them; absent, null, "" and [] mean none."""
    value = _parsed(value)
    if value in (None, "", []):
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise RowError("'{key}' is {kind}, not a list of tools", key=key, kind=_kind(value))
    return [tool if "function" in tool else {"type": "function", "function": tool} for tool in value]


def _history(history: object, key: str) -> list[tuple[str, str]]:
    """Return earlier turns as pairs; absent, null and [] mean none."""
    history = _parsed(history)
    if history in (None, [], ""):
        return []
    mend = tr("Write it as a list of [question, answer] pairs of texts that are not empty")
    if not isinstance(history, list):
        raise RowError("'{key}' is {kind}. {mend}", key=key, kind=_kind(history), mend=mend)
    pairs = []
    for number, pair in enumerate(history, start=1):
        if not isinstance(pair, list) or len(pair) != 2:
            raise RowError("item {number} of '{key}' is no pair. {mend}", number=number, key=key, mend=mend)
        for text in pair:
            if not isinstance(text, str) or not text.strip():
                raise RowError(
                    "item {number} of '{key}' holds {kind}. {mend}", number=number, key=key, kind=_kind(text), mend=mend
                )
        pairs.append((pair[0], pair[1]))
    return pairs


def _content(item: Mapping[str, Any], key: str) -> str:
    """Return a message's text; OpenAI's lists of parts are joined."""
    value = item.get(key)
    if not isinstance(value, list):
        return _text(item, key)
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text":
            raise RowError("'{key}' holds something that is no text: only text can be trained on", key=key)
    return _text({key: "".join(_text(part, "text") for part in value)}, key)


def _as_text(value: object) -> str:
    """Return a tool's result as text: as it is, or as JSON."""
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _parsed(value: object) -> object:
    """Return what a text holds if it is a JSON list or object, as many data sets write them; else the value."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            found = DECODER.decode(value)
        except (ValueError, RecursionError):
            return value
        check_characters(found)
        return found
    return value


def _text(row: Mapping[str, Any], key: str) -> str:
    """Return the text under a key that must be there and not be empty."""
    value = row[key] if key in row else _missing(row, key)
    if not isinstance(value, str):
        raise RowError("'{key}' is {kind}, not a text. Correct or remove the row", key=key, kind=_kind(value))
    if not value.strip():
        raise RowError("'{key}' is empty. Fill it in or remove the row", key=key)
    return value


class MissingKey(RowError):
    """A row lacks a key."""

    def __init__(self, text: str, row: Mapping[str, Any], key: str) -> None:
        super().__init__(text)
        self.row, self.key = row, key


def _missing(row: Mapping[str, Any], key: str) -> Any:
    near = difflib.get_close_matches(key, [name for name in row if isinstance(name, str)], n=1)
    text = tr("no key '{key}'; the row has {keys}. Add it or remove the row", key=key, keys=_quoted(row))
    if near:
        text = tr(
            "no key '{key}'; the row has {keys}. Rename '{near}' to '{key}'", key=key, keys=_quoted(row), near=near[0]
        )
    raise MissingKey(text, row, key)


def _kind(value: object) -> str:
    """Return what a JSON value is, as a person would say it."""
    if value is None:
        return "null"
    if isinstance(value, str):
        return tr("a text") if value.strip() else tr("an empty text")
    if isinstance(value, bool | int | float):
        return json.dumps(value)
    return tr("a list") if isinstance(value, list) else tr("an object")


def _quoted(row: Mapping[str, Any]) -> str:
    """Return the keys of a row for a message, not more than a screen line of them."""
    names = [f"'{name[:40]}'" for name in list(row)[:8]]
    return ", ".join(names + ["…"] * (len(row) > 8)) or tr("no keys at all")


METADATA = frozenset(
    {
        *("id", "uuid", "message_id", "parent_id", "conversation_id", "tool_call_id", "turn_id", "turn_identifier"),
        *("index", "rank", "score", "name", "author", "source", "model", "model_name", "metadata", "header"),
        *("timestamp", "time", "date", "created_at", "create_time", "update_time"),
        *("lang", "language", "country", "state", "hashed_ip", "status", "tag", "tags", "label", "category"),
    }
)
"""Keys that data sets hang on messages and that no model is meant to learn, whatever they hold."""


_READ = {
    "assistant": ("loss", "weight", "tool_calls", "metadata"),
    "call": ("loss", "weight", "name", "parameters", "observation"),
}
"""Keys that are read besides role and text, by role; "call" is an item that holds a call and its result."""


def unread_keys(item: Mapping[str, object], role: str, speaker: str, said: str) -> Iterator[str]:
    """Yield the skipped keys of a message; RowError for one with text, a list or an object (`reasoning_content`)."""
    read = (speaker, said, *_READ.get(role, ("loss", "weight")))
    for key, value in item.items():
        if key in read:
            continue
        has_text = bool(value.strip()) if isinstance(value, str) else isinstance(value, (list, dict)) and bool(value)
        if has_text and key not in METADATA and value != item.get(said):
            raise RowError(
                "the key '{key}' is not read, and what it holds would be lost. Write it into the message's text "
                "(reasoning as the model writes it, for example <think>…</think> before the answer), calls into "
                "the assistant's 'tool_calls', tools into the row's 'tools', or remove the key",
                key=key[:40],
            )
        yield key
