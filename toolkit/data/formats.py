"""What a row of a data file becomes: a conversation, its turns, and which of its messages are trained."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from toolkit.config.schema import ROW_FIELDS, RowFormat, TrainOn
from toolkit.data.rows import MissingKey, as_object, conversation_in, quoted_keys, required_text, required_value
from toolkit.messages import RowError
from toolkit.sample_types import TEXT, Message

if TYPE_CHECKING:
    from toolkit.data.message_lists import MessageReader


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


def mark_trained(conversation: Conversation, train_on: TrainOn, only_last: bool) -> Iterator[Conversation]:
    """Yield the conversation up to its last answer, with `loss` of its messages (whether each is trained) set by
    `data.train_on`. With `only_last`, for chat formats that train the last message only, yield in its place a copy for
    each trained answer, which ends with it. Where a message has a `loss` already, this comes before `train_on`.
    """
    if conversation.is_text:
        yield conversation
        return
    messages = conversation.messages
    answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    # Nothing is learned from what follows the last answer, such as a question that nobody answers.
    messages = messages[: answers[-1] + 1] if answers else []
    if train_on is TrainOn.auto and not any("loss" in message for message in messages):  # the chat format decides
        yield replace(conversation, messages=messages)
        return
    is_trained: dict[int, bool] = {}  # by index of the message
    if train_on is not TrainOn.auto:
        by_rule = {TrainOn.all: answers, TrainOn.last: answers[-1:], TrainOn.marked: []}[train_on]
        is_trained = {index: index in by_rule for index in range(len(messages))}
    is_trained.update({index: bool(message["loss"]) for index, message in enumerate(messages) if "loss" in message})
    if not only_last:
        marked: list[Message] = [
            {**message, "loss": is_trained[index]} if index in is_trained else message
            for index, message in enumerate(messages)
        ]
        yield replace(conversation, messages=marked)
        return
    # The format trains the last message by itself: a copy needs no marks, but must end with the answer.
    plain: list[Message] = [{name: value for name, value in message.items() if name != "loss"} for message in messages]
    for index in answers:
        is_trained_by_format = train_on is TrainOn.auto and index == answers[-1]  # where its message does not say
        if is_trained.get(index, is_trained_by_format):
            yield replace(conversation, messages=plain[: index + 1])


PAIR_FIELDS = {  # (question, answer)
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
_MEDIA = ("image", "images", "video", "videos", "audio", "audios")
_LABELED = (RowFormat.preference, RowFormat.reward, RowFormat.labeled, RowFormat.classify, RowFormat.embed)


class RowReader:
    """Turns a source's rows into conversations."""

    row_format: RowFormat
    gives_pairs = False
    """Whether a row becomes two samples that are used together or not at all."""

    def __init__(self, row_format: RowFormat, columns: Mapping[str, str], answered: bool = True) -> None:
        """Keep how rows are read. `columns`: field -> the file's key, of fields that the file calls otherwise;
        `answered`: whether a row without an answer is an error.
        """
        # `auto` remains only where no row of a block can be parsed: each is rejected before its format counts.
        self.row_format = RowFormat.prompt_response if row_format is RowFormat.auto else row_format
        self.answered, self.columns = answered, columns
        all_fields = {field for fields in ROW_FIELDS.values() for field in fields}
        self.names = {field: columns.get(field, field) for field in all_fields}
        """Field -> the file's key, of all fields."""
        self.renamed = {theirs: ours for ours, theirs in columns.items() if theirs != ours}
        """The file's key -> field, where they differ."""
        self.skipped: Counter[str] = Counter()
        """Keys of messages that are not read, and in how many messages."""

    @cached_property
    def _messages(self) -> "MessageReader":
        """What reads lists of messages in the rows."""
        from toolkit.data.message_lists import MessageReader

        return MessageReader(self)

    def read(self, row: object) -> Conversation:
        """Return one parsed row as a conversation; raise a RowError if a key is missing or a value has a wrong type."""
        mapping = as_object(row)
        check_trainable(mapping, self.columns)
        try:
            if self.row_format is RowFormat.text:
                return Conversation([plain_message(TEXT, required_text(mapping, self.names["text"]))])
            is_list = self.row_format in LIST_FIELDS
            messages = self._messages.of_row(mapping) if is_list else self._question_and_answer(mapping)
        except MissingKey as error:
            raise self.explained(error) from None
        if mapping.get(self.names["system"]) not in (None, ""):
            if messages[0]["role"] == "system":
                raise RowError(
                    "the row has a system message twice: under '{key}' and in the list. Remove one",
                    key=self.names["system"],
                )
            messages = [plain_message("system", required_text(mapping, self.names["system"])), *messages]
        return self._with_tools(mapping, messages)

    def _with_tools(self, row: Mapping[str, Any], messages: list[Message]) -> Conversation:
        """Return the messages as a conversation with the row's tools, which stand under a key of the row or, as GLM-4's
        data have it, in the system message; RowError if under both, or if they are no tools.
        """
        key, tools = self.names["tools"], row.get(self.names["tools"])
        if "tools" in messages[0]:
            if tools not in (None, "", []):
                raise RowError("the row has tools twice: under '{key}' and in its system message. Remove one", key=key)
            system = dict(messages[0])
            tools, key = system.pop("tools"), "tools"
            held_only_tools = not system["content"]
            messages = messages[1:] if held_only_tools and len(messages) > 1 else [system, *messages[1:]]
        if tools in (None, "", []):
            return Conversation(messages)
        from toolkit.data.message_lists import listed_tools

        return Conversation(messages, listed_tools(tools, key))

    def read_all(self, row: object) -> list[Conversation]:
        """Return the conversations of one parsed row: here one, in readers of preference pairs two."""
        return [self.read(row)]

    def explained(self, error: RowError) -> RowError:
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
        if self.row_format in PAIR_FIELDS:
            used.update(self._pair_keys(row))  # TRL's `completion` is no field
        return [str(key) for key in row if key not in used]

    def _question_and_answer(self, row: Mapping[str, Any]) -> list[Message]:
        """Return the messages of a row with a question and an answer: its history, the question, the answer. The
        question may be TRL's conversational prompt, a list of messages, or Alpaca's instruction, to whose text that of
        `input` is added.
        """
        question_key, answer_key = self._pair_keys(row)
        messages: list[Message] = []
        history_key, input_key = self.names["history"], self.names["input"]
        if row.get(history_key) not in (None, "", []):
            from toolkit.data.message_lists import earlier_turns

            for question, answer in earlier_turns(row[history_key], history_key):
                messages += [plain_message("user", question), plain_message("assistant", answer)]
        if self.row_format is RowFormat.prompt_response and isinstance(self._messages_in(row.get(question_key)), list):
            messages += self._messages.listed(row, question_key)
        else:
            question = required_text(row, question_key)
            if self.row_format is RowFormat.instruction and row.get(input_key) not in (None, ""):
                question += "\n" + required_text(row, input_key)
            messages.append(plain_message("user", question))
        if self.answered or row.get(answer_key) not in (None, ""):
            self._add_answer(row, answer_key, messages)
        return messages

    def _pair_keys(self, row: Mapping[str, Any]) -> tuple[str, str]:
        """Return the row's keys of the question and of the answer. TRL's name of the answer, `completion`, counts where
        neither `columns` nor the row has `response`.
        """
        question, answer = PAIR_FIELDS[self.row_format]
        has_response = answer in self.columns or answer in row
        is_trl = answer == "response" and not has_response and "completion" in row
        return self.names[question], "completion" if is_trl else self.names[answer]

    def _add_answer(self, row: Mapping[str, Any], key: str, messages: list[Message]) -> None:
        """Append the answer under `key` to `messages`; the row may hold a text, a message or a list of messages."""
        answer = self._messages_in(required_value(row, key))
        items = answer if isinstance(answer, list) else [answer]
        if not any(isinstance(item, dict) for item in items):
            messages.append(plain_message("assistant", required_text(row, key)))
            return
        self._messages.add_answer(items, key, messages)

    def _messages_in(self, value: object) -> object:
        """Return a value that is a text with a message or a list of messages as JSON parsed, other values unchanged.
        JSON without roles is unchanged too, as it may be a text to learn: '{"a": 1}'.
        """
        conversation = conversation_in(value)
        items = conversation if isinstance(conversation, list) else [conversation]
        role_keys = {self.names["from"], self.names["role"]}
        has_roles = items and all(isinstance(item, dict) and role_keys.intersection(item) for item in items)
        return conversation if has_roles else value


def reader_of(row_format: RowFormat, columns: Mapping[str, str]) -> RowReader:
    """Return the reader of a format's rows."""
    if row_format in _LABELED:
        from toolkit.data.labeled_formats import READERS

        return READERS[row_format](columns)
    return RowReader(row_format, columns)


def plain_message(role: str, content: str) -> dict[str, Any]:
    """Return a message that has a role and a text only."""
    return {"role": role, "content": content}


def check_trainable(row: Mapping[str, Any], columns: Mapping[str, str]) -> None:
    """Raise a RowError for a row with media, a preference pair or a bad answer, which would be trained as good text.
    Media and pairs whose keys `columns` (field -> the file's key) names are meant as text.
    """
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
        # `label` counts only as a boolean: the text "false", as in CSV, may be any label.
        if row.get(key) is False or (key == "kto_tag" and str(row.get(key)).lower() == "false"):
            raise RowError(
                "preference data: '{key}' is false, which marks a bad answer, and it would be trained as a good one. "
                "Use preference=kto, remove such rows, or skip them: data.on_bad_row=skip data.max_bad_fraction=1",
                key=key,
            )
