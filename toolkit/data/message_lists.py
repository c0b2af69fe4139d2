"""Rows that hold lists: of messages, as chat data do, each with its role, reasoning, calls of tools and whether it is
trained; of earlier turns; and of tools. Unread keys of messages are counted if they are metadata, and an error if they
hold text, lest it vanish.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from toolkit.config.schema import RowFormat
from toolkit.data.formats import LIST_FIELDS, RowReader, plain_message
from toolkit.data.rows import conversation_in, kind_of, parsed_json, quoted_keys, required_text, required_value
from toolkit.messages import RowError, listed, tr
from toolkit.sample_types import Message

ROLES = {
    "system": ("system", "developer"),
    "user": ("user", "human"),
    "assistant": ("assistant", "gpt", "chatgpt", "bing", "bard", "bot", "model"),
    "function_call": ("function_call", "tool_call"),
    "tool": ("observation", "function_response", "tool_response", "function", "tool"),
}
_ROLE_NAMES = {name: role for role, names in ROLES.items() for name in names}
_LOSS = {
    **dict.fromkeys(("loss", "weight", "loss_weight", "loss_scale", "train", "training", "trainable"), True),
    **dict.fromkeys(("masked", "is_masked"), False),
}
"""Keys that say whether a message is trained, and what they say if they are true: ours and ms-swift's, OpenAI's,
LLaMA-Factory's, ms-swift's other one, axolotl's (`message_field_training`) and its like; torchtune's `masked`."""
_THINK = re.compile(r"\s*(<think>.*?</think>)\s*", re.DOTALL)
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
_READ = {
    "assistant": ("tool_calls", "metadata", *_REASONING_KEYS),
    "function_call": _REASONING_KEYS,
    "tool": ("tool_call_id",),
    "call": ("name", "parameters", "observation"),
}
"""Keys that are read besides role, text and loss, by role; "call" is an item that holds a call and its result."""
METADATA = frozenset(
    {
        *("id", "uuid", "message_id", "parent_id", "conversation_id", "tool_call_id", "turn_id", "turn_identifier"),
        *("index", "rank", "score", "name", "author", "source", "model", "model_name", "metadata", "header"),
        *("timestamp", "time", "date", "created_at", "create_time", "update_time"),
        *("lang", "language", "country", "state", "hashed_ip", "status", "tag", "tags", "label", "category"),
        *("turn", "round", "step", "position", "length", "tokens", "num_tokens", "token_count", "likes", "votes"),
        *("upvotes", "rating", "ratings", "quality", "toxic", "toxicity", "redacted", "edited", "temperature", "top_p"),
    }
)
"""Keys that data sets hang on messages and that no model is meant to learn, whatever they hold."""


class MessageReader:
    """Reads the messages that rows list, with the names of keys that a reader of rows has."""

    def __init__(self, reader: RowReader) -> None:
        self.reader, self.names = reader, reader.names
        self.flags = {**_LOSS, self.names["loss"]: True}  # key of a message -> is it trained if the value is true

    def of_row(self, row: Mapping[str, Any]) -> list[Message]:
        """Return the messages of a row of {human, assistant} or other items; RowError if a due answer is missing."""
        key = self.names[LIST_FIELDS[self.reader.row_format]]
        is_paired = self.reader.row_format is RowFormat.conversation
        messages = self.listed(row, key, self._add_pair if is_paired else None)
        if self.reader.answered and not any(message["role"] == "assistant" for message in messages):
            raise RowError("'{key}' holds no answer of the assistant. Correct or remove the row", key=key)
        return messages

    def listed(
        self, row: Mapping[str, Any], key: str, add: Callable[[dict[str, Any], list[Message]], None] | None = None
    ) -> list[Message]:
        """Return the messages of the list under a row's key; `add(item, messages)` appends those of one list item, by
        default `_add_item`. RowError, with the item's number, if one cannot be used.
        """
        items = conversation_in(required_value(row, key))
        if not isinstance(items, list):
            raise RowError(
                '\'{key}\' is {kind}, not a list such as [{{"role": "user", "content": "…"}}, …]. Correct or '
                "remove the row",
                key=key,
                kind=kind_of(items),
            )
        messages: list[Message] = []
        for number, item in enumerate(items, start=1):
            try:
                (add or self._add_item)(_as_message(item), messages)
            except RowError as error:
                reason = self.reader.explained(error)
                raise RowError("message {number} of '{key}': {reason}", number=number, key=key, reason=reason) from None
        if not messages:
            raise RowError("'{key}' is empty. Fill it in or remove the row", key=key)
        return messages

    def add_answer(self, items: Sequence[object], key: str, messages: list[Message]) -> None:
        """Append the messages of an answer, the `items` under a row's key, to `messages`."""
        for item in items:
            try:
                self._add_item(_as_message(item), messages)
            except RowError as error:
                reason = self.reader.explained(error)
                raise RowError("'{key}' cannot be used: {reason}", key=key, reason=reason) from None

    def _add_pair(self, item: dict[str, Any], messages: list[Message]) -> None:
        """Append the two messages of a {human, assistant} item; the answer may be missing if none is due."""
        question, answer = self.names["human"], self.names["assistant"]
        messages.append(plain_message("user", required_text(item, question)))
        if self.reader.answered or item.get(answer) not in (None, ""):
            messages.append({**plain_message("assistant", required_text(item, answer)), **self._loss_flag(item)})
        self.reader.skipped.update(_unread_keys(item, (question, answer, *self.flags), is_answer=True))

    def _add_item(self, item: dict[str, Any], messages: list[Message]) -> None:
        """Append the message of one list item to `messages`; none for an empty system message, and two for ChatGLM3's
        `tool` item, which holds a call and its result. Unread keys are counted in `skipped`.
        """
        role_key, content_key = self.names["from"], self.names["value"]
        if role_key not in item:
            role_key, content_key = self.names["role"], self.names["content"]
        name = required_text(item, role_key)
        role = _ROLE_NAMES.get(name)
        if role is None:
            raise RowError(
                "unknown role '{name}'; expected one of {names}, or another of docs/data.md",
                name=name[:40],
                names=listed(*ROLES),
            )
        is_call = role == "tool" and "parameters" in item  # ChatGLM3's
        # As the GLM-4 repository writes them, mostly without a text.
        has_tools = role == "system" and not messages and item.get("tools") not in (None, "", [])
        keys_read = (role_key, content_key, *self.flags, *_READ.get("call" if is_call else role, ()))
        keys_read += ("tools",) if has_tools else ()
        is_answer = role in ("assistant", "function_call")
        self.reader.skipped.update(_unread_keys(item, keys_read, is_answer=is_call or is_answer))
        loss_flag = self._loss_flag(item)
        if has_tools:
            text = self._content(item, content_key)[0] if item.get(content_key) else ""
            messages.append({**plain_message("system", text), "tools": item["tools"]})
        elif role == "system" and item.get(content_key) in (None, ""):
            return  # as the row's "system", it may be empty
        elif is_call:
            call = {"name": item.get("name"), "arguments": item["parameters"]}
            messages.append({**plain_message("assistant", ""), "tool_calls": self._tool_calls(call), **loss_flag})
            messages.append(plain_message("tool", _result_text(item.get("observation"))))
        elif role == "tool":
            # What a tool gives back may be an object, and may be nothing.
            result = plain_message("tool", _result_text(item.get(content_key)))
            messages.append({**result, **loss_flag, **_call_id(item, "tool_call_id")})
        elif is_answer:
            message = {**self._assistant_message(item, content_key, role), **loss_flag}
            _append_answer(message, messages, may_join=role == "function_call")
        else:
            messages.append({**plain_message(role, self._content(item, content_key)[0]), **loss_flag})

    def _loss_flag(self, item: Mapping[str, Any]) -> dict[str, bool]:
        """Return {"loss": whether the message is trained}, from any of the keys `flags`; {} if it has none of them.
        RowError if two contradict each other, or a value is neither true nor false (nor 1 nor 0).
        """
        flags: dict[str, bool] = {}
        for key, if_true in self.flags.items():
            value = item.get(key)
            if value is None:
                continue
            if value not in (0, 1):  # as Python compares, False and True are these
                raise RowError("'{key}' is {kind}, neither true nor false", key=key, kind=kind_of(value))
            is_trained = bool(value) is if_true
            if flags.setdefault("loss", is_trained) != is_trained:
                present = {name: item[name] for name in self.flags if name in item}
                raise RowError("{keys} contradict each other", keys=quoted_keys(present))
        return flags

    def _assistant_message(self, item: dict[str, Any], content_key: str, role: str) -> dict[str, Any]:
        """Return an assistant's item as a message: text, reasoning and tool calls, which each may come under several
        keys. The content of a `function_call` item is its calls.
        """
        message, thoughts = plain_message("assistant", ""), _reasoning_of(item)
        calls: list[Any] = []
        if role == "function_call":
            value: Any = item.get(content_key)
            thinking = _THINK.match(value) if isinstance(value, str) else None
            if thinking:  # as LLaMA-Factory has it: <think>…</think> before the calls
                message["content"], value = thinking[1], value[thinking.end() :]
            calls = self._tool_calls(parsed_json(value))
            if not calls:
                raise RowError("'{key}' is empty. Fill it in or remove the row", key=content_key)
        else:
            if item.get("tool_calls"):
                calls = self._tool_calls(parsed_json(item["tool_calls"]))
            if not calls or item.get(content_key) not in (None, ""):  # with calls an answer needs no text
                message["content"], more_thoughts, more_calls = self._content(item, content_key, is_answer=True)
                thoughts, calls = thoughts + more_thoughts, calls + more_calls
        if thoughts:
            message["reasoning_content"] = "\n".join(thoughts)
        if calls:
            message["tool_calls"] = calls
        if isinstance(item.get("metadata"), str):
            message["metadata"] = item["metadata"]
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
            part_type = part.get("type") if isinstance(part, dict) else None
            if part_type == "text" or (is_answer and part_type in ("reasoning", "thinking")):
                # {"type": "thinking", "thinking": "…"}, or the text is under one of the other two keys.
                text_key = next((name for name in (part_type, "text", "value") if name in part), "text")
                self.reader.skipped.update(_unread_keys(part, ("type", text_key)))
                (texts if part_type == "text" else thoughts).append(required_text(part, text_key))
            elif is_answer and part_type == "tool_call":
                self.reader.skipped.update(_unread_keys(part, ("type", "value")))
                calls += self._tool_calls(parsed_json(part.get("value")))
            else:
                raise RowError("'{key}' holds something that is no text: only text can be trained on", key=key)
        text = "".join(texts)
        if not calls:
            required_text({key: text}, key)  # for its check: it raises if the text is blank
        return text, thoughts, calls

    def _tool_calls(self, value: object) -> list[dict[str, Any]]:
        """Return a row's tool call, or list of them, in OpenAI's form, but with the arguments as an object."""
        calls = []
        for item in value if isinstance(value, list) else [value]:
            entry = item if isinstance(item, dict) else {}
            call = entry.get("function", entry)  # OpenAI has name and arguments under "function"
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
            self.reader.skipped.update(_unread_keys(call, ("type", "id", "name", arguments_key)))
            if call is not entry:
                self.reader.skipped.update(_unread_keys(entry, ("type", "id", "function")))
            function = {"name": call["name"], "arguments": arguments}
            calls.append({"type": "function", **_call_id(entry, "id"), "function": function})
        return calls


def _append_answer(message: Message, messages: list[Message], may_join: bool) -> None:
    """Append an assistant's message. With `may_join` (of a `function_call` item) calls without text and reasoning are
    added to the answer or the calls before them: they are of one turn, which the model writes at once.
    """
    last: Message = messages[-1] if messages else {}
    follows_answer = last.get("role") == "assistant" and last.get("loss") == message.get("loss")
    is_only_calls = not message["content"] and "reasoning_content" not in message
    if may_join and follows_answer and is_only_calls:
        messages[-1] = {**last, "tool_calls": [*last.get("tool_calls", []), *message["tool_calls"]]}
    else:
        messages.append(message)


def _as_message(item: object) -> dict[str, Any]:
    """Return an item of a list of messages if it is an object, else raise a RowError."""
    if isinstance(item, dict):
        return item
    raise RowError("it is {kind}, not an object. Correct or remove the row", kind=kind_of(item))


def earlier_turns(history: object, key: str) -> list[tuple[str, str]]:
    """Return a row's `history`, a list or its JSON, as (question, answer) pairs; null, "" and [] mean none."""
    history = parsed_json(history)
    if history in (None, [], ""):
        return []
    advice = tr("Write it as a list of [question, answer] pairs of texts that are not empty")
    if not isinstance(history, list):
        raise RowError("'{key}' is {kind}. {mend}", key=key, kind=kind_of(history), mend=advice)
    pairs = []
    for number, pair in enumerate(history, start=1):
        if not isinstance(pair, list) or len(pair) != 2:
            raise RowError("item {number} of '{key}' is no pair. {mend}", number=number, key=key, mend=advice)
        for text in pair:
            if not isinstance(text, str) or not text.strip():
                raise RowError(
                    "item {number} of '{key}' holds {kind}. {mend}",
                    number=number,
                    key=key,
                    kind=kind_of(text),
                    mend=advice,
                )
        pairs.append((pair[0], pair[1]))
    return pairs


def listed_tools(value: object, key: str) -> list[Any] | None:
    """Return a row's tool definitions (a list or its JSON) in OpenAI's form, None if none; `key` is for messages."""
    value = parsed_json(value)
    if value in (None, "", []):
        return None
    if not isinstance(value, list):
        raise RowError("'{key}' is {kind}, not a list of tools", key=key, kind=kind_of(value))
    tools: list[Any] = [parsed_json(tool) for tool in value]
    if wrong := [tool for tool in tools if not isinstance(tool, dict)]:
        raise RowError("'{key}' holds {kind}, which is no tool", key=key, kind=kind_of(wrong[0]))
    return [tool if "function" in tool else {"type": "function", "function": tool} for tool in tools]


def _reasoning_of(item: Mapping[str, Any]) -> list[str]:
    """Return [reasoning text] of a message, [] if all keys of it are absent, null or blank. RowError for something else
    than a text, or for other texts under two keys.
    """
    present = {key: item[key] for key in _REASONING_KEYS if key in item}
    texts: set[str] = set()
    for key, value in present.items():
        is_blank = not value.strip() if isinstance(value, str) else value is None
        if not is_blank:
            texts.add(required_text(item, key))
    if len(texts) > 1:
        raise RowError("{keys} contradict each other", keys=quoted_keys(present))
    return list(texts)


def _call_id(item: Mapping[str, Any], key: str) -> dict[str, str]:
    """Return {key: id} of a tool call, {} if it has none: some chat templates render the id."""
    value = item.get(key)
    return {key: value} if isinstance(value, str) and value else {}


def _result_text(value: object) -> str:
    """Return a tool's result as text: a text as it is, text parts ([{"type": "text", "text": "…"}]) joined, anything
    else as JSON, so that nothing is lost of parts with further entries.
    """
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    texts: list[str] = []
    for part in value if isinstance(value, list) else ():
        entries = part.items() if isinstance(part, dict) else ()
        filled = {key: entry for key, entry in entries if entry not in (None, "", [], {})}
        text = filled.pop("text" if "text" in filled else "value", "")
        if filled == {"type": "text"} and isinstance(text, str):
            texts.append(text)
    are_all_texts = isinstance(value, list) and value and len(texts) == len(value)
    return "".join(texts) if are_all_texts else json.dumps(value, ensure_ascii=False)


def _unread_keys(item: Mapping[str, object], read: Sequence[str], is_answer: bool = False) -> Iterator[str]:
    """Yield the keys of a message, content part or tool call that are not among `read`. RowError if such a key holds
    text, a list or an object, which would be lost; or in an answer a number or boolean, which may be a loss flag.
    """
    for key, value in item.items():
        if key in read:
            continue
        if is_answer and isinstance(value, bool | int | float) and key not in METADATA:
            raise RowError(
                "the key '{key}' is {value}, and nothing here reads it. If it says whether the message is trained, "
                "name it: `columns: {{loss: {key}}}`; else remove it",
                key=key[:40],
                value=kind_of(value),
            )
        holds_text = bool(value.strip()) if isinstance(value, str) else isinstance(value, (list, dict)) and bool(value)
        # Nothing is lost of a text that stands under a key that is read, too, e.g. "text" beside an equal "content".
        if holds_text and key not in METADATA and not any(value == item.get(name) for name in read):
            raise RowError(
                "the key '{key}' is not read, and what it holds would be lost. Write it into the message's text, the "
                "assistant's reasoning into its 'reasoning_content', calls into its 'tool_calls', tools into the row's "
                "'tools', or remove the key",
                key=key[:40],
            )
        yield key
