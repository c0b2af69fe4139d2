"""How each generation of ChatGLM writes a conversation, as ids with a loss mask; and the same as chat templates.

A conversation becomes pieces: special tokens by id, and texts, each tokenized separately. Assistant messages may have
`metadata` (a tool's name) or `tool_calls`, system messages `tools`; a message of the role `text` is trained as a whole.
"""

import gc
import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, NamedTuple

from toolkit.config.schema import Family
from toolkit.messages import RowError, tr
from toolkit.sample_types import TEXT, Encoded, Message

CODE_VERSION = 3
"""Part of the fingerprint; raise it when ids or masks change."""

SOP, EOP = "<|sop|>", "<|eop|>"
"""Names, in ChatGLM2's and 3's tokenizers, of what the original calls `sop` and `eop`. As added tokens, those would be
found inside words (philosophy, people operations)."""


@contextmanager
def no_cycles() -> Iterator[None]:
    """Switch Python's search for reference cycles off, which takes up to a third of the time of making many lists."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


class Piece(NamedTuple):
    """Ids of special tokens, or a text to be tokenized separately; and whether the loss covers it."""

    content: tuple[int, ...] | str
    trained: bool = False


class FamilyChatEncoder:
    """A ChatGLM's own format, exactly as the original builds it; control strings in messages stay text.
    `original_labels` trains what the original trains; False only answers and the token that ends them, not
    ChatGLM-6B's <sop> and observations. See `toolkit.sample_types.ChatEncoder`.
    """

    stops: tuple[str, ...]
    """Tokens at which an answer ends."""
    answer_tokens: tuple[str, ...] = ()
    """Tokens after which the assistant speaks, where there are such."""
    sop: str
    """Name of the token after [gMASK]."""
    only_last = False
    can_cut = True
    after_text: Sequence[int] = ()
    text_key: Sequence[int] = ()

    def __init__(self, tokenizer: Any, original_labels: bool = True) -> None:
        self.tokenizer, self.original = tokenizer, original_labels
        self.vocab_size = len(tokenizer)
        self.drops_system = self.drops_tools = self.only_last  # the formats of numbered rounds know neither
        self._pieces: dict[tuple[str, bool], Piece] = {}
        self.stop_ids = [int(tokenizer.convert_tokens_to_ids(token)) for token in self.stops]
        self.answer_ids = [int(tokenizer.convert_tokens_to_ids(token)) for token in self.answer_tokens]

    @cached_property
    def fingerprint(self) -> str:
        """Return a hash of everything that decides about ids and mask."""
        tokenizer = self.tokenizer
        digest = hashlib.sha256(f"{CODE_VERSION} {tokenizer.family.value} {len(tokenizer)} {self.original}".encode())
        digest.update(tokenizer.vocabulary.read_bytes())
        digest.update((tokenizer.own_template or "").encode())  # glm-4 describes tools in its words
        return digest.hexdigest()

    def encode(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> Encoded:
        """Return ids and mask of one conversation whose last message is the assistant's."""
        return self.encode_many([messages], [tools])[0]

    def encode_many(
        self, conversations: Sequence[Sequence[Message]], tools: Sequence[Sequence[Any] | None] | None = None
    ) -> list[Encoded]:
        """Return ids and mask of several conversations; RowError if the format has no place for a message."""
        if any("reasoning_content" in message for messages in conversations for message in messages):
            raise RowError(
                tr(
                    "this model's format has no place for the reasoning of an answer. Write it into the text of the "
                    "answer as the model is to write it, or remove it"
                )
            )
        pairs = zip(conversations, tools or [None] * len(conversations), strict=True)
        return self.encode_pieces(self.example(with_tools(messages, chat_tools)) for messages, chat_tools in pairs)

    def divide(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> list[list[Message]]:
        """Return the conversation undivided: no answer is written in another way once another turn follows."""
        return [list(messages)]

    def prompt(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> list[int]:
        """Return the ids that generation starts from."""
        return self.encode_pieces([self.question(with_tools(messages, tools))])[0][0]

    def token(self, name: str, trained: bool = False) -> Piece:
        """Return the piece of a special token, or of a line break tokenized separately; each is looked up once."""
        key = (name, trained)
        if key not in self._pieces:
            tokenizer = self.tokenizer
            ids = tokenizer.encode_texts([name])[0] if name == "\n" else [int(tokenizer.convert_tokens_to_ids(name))]
            self._pieces[key] = Piece(tuple(ids), trained)
        return self._pieces[key]

    def question(self, messages: Sequence[Message]) -> list[Piece]:
        """Return what generation starts from: the conversation so far, and what makes the assistant speak."""
        raise NotImplementedError

    def example(self, messages: Sequence[Message]) -> list[Piece]:
        """Return a whole conversation, whose last message is the assistant's, for training."""
        raise NotImplementedError

    def conversation(self, messages: Sequence[Message]) -> list[Piece]:
        """Return a conversation without what would make the assistant speak."""
        return self.example(messages) if messages[-1]["role"] == "assistant" else self.question(messages)

    def encode_pieces(self, conversations: Iterable[list[Piece]]) -> list[Encoded]:
        """Return ids and mask of each conversation; all texts are tokenized in one call."""
        with no_cycles():
            listed = list(conversations)
            texts = [content for pieces in listed for content, _ in pieces if isinstance(content, str)]
            ids_of_texts = iter(self.tokenizer.encode_texts(texts))
            result = []
            for pieces in listed:
                ids: list[int] = []
                mask: list[bool] = []
                for content, trained in pieces:
                    part = next(ids_of_texts) if isinstance(content, str) else content
                    ids += part
                    mask += [trained] * len(part)
                result.append((ids, mask))
            return result


class _Rounds(FamilyChatEncoder):
    """ChatGLM-6B and ChatGLM2-6B: numbered rounds as one text, no system message; only the last answer is trained."""

    only_last = True

    def example(self, messages: Sequence[Message]) -> list[Piece]:
        last = messages[-1]
        if last.get("tool_calls"):
            raise RowError(tr("this model's format knows no calls of tools"))
        is_text = last["role"] == TEXT
        beginning = [self.token("[gMASK]"), self.token(self.sop)] if is_text else self.question(messages[:-1])
        return [*beginning, Piece(str(last["content"]), True), self.token(self.stops[0], True)]

    def _rounds(self, messages: Sequence[Message]) -> tuple[list[tuple[str, str]], str]:
        """Return the questions with their answers, and the question that the conversation ends with; without system
        messages. RowError if questions and answers do not take turns.
        """
        turns = [message for message in messages if message["role"] != "system"]
        # An answer that calls a tool counts as a tool's turn, which these formats do not know.
        roles = ["tool" if message.get("tool_calls") else message["role"] for message in turns]
        if roles != ["user", "assistant"] * (len(turns) // 2) + ["user"]:
            raise RowError(
                "this model's format knows questions and answers in turn only, not {roles}",
                roles=", ".join(roles) or "none",
            )
        contents = [str(message["content"]) for message in turns]  # question, answer, …, question
        return list(zip(contents[::2], contents[1::2], strict=False)), contents[-1]


class _ChatGLM(_Rounds):
    """ChatGLM-6B: `prompt [gMASK] <sop> answer <eop>`; <sop> is trained too, as in the original."""

    sop, stops, answer_tokens = "<sop>", ("<eop>",), ("<sop>",)
    can_cut = False  # positions are found from the <sop> of each sample

    def question(self, messages: Sequence[Message]) -> list[Piece]:
        """Return the question as it is if it is the first, else all rounds in one text; then `[gMASK] <sop>`."""
        history, text = self._rounds(messages)
        if history:
            rounds = [f"[Round {number}]\n问：{q}\n答：{a}\n" for number, (q, a) in enumerate(history)]
            text = "".join(rounds) + f"[Round {len(history)}]\n问：{text}\n答："
        return [Piece(text), self.token("[gMASK]"), self.token("<sop>")]

    def example(self, messages: Sequence[Message]) -> list[Piece]:
        pieces = super().example(messages)  # question, [gMASK], <sop>, answer, <eop>
        if messages[-1]["role"] != TEXT:
            pieces[2] = self.token("<sop>", self.original)
        return pieces


class _ChatGLM2(_Rounds):
    """ChatGLM2-6B: `[gMASK] sop prompt answer </s>`."""

    sop, stops = SOP, ("</s>",)

    def question(self, messages: Sequence[Message]) -> list[Piece]:
        """Return `[gMASK] sop`, then all rounds in one text, numbered from 1."""
        history, question = self._rounds(messages)
        rounds = [f"[Round {number}]\n\n问：{q}\n\n答：{a}\n\n" for number, (q, a) in enumerate(history, start=1)]
        text = "".join(rounds) + f"[Round {len(history) + 1}]\n\n问：{question}\n\n答："
        return [self.token("[gMASK]"), self.token(SOP), Piece(text)]


class _Roles(FamilyChatEncoder):
    """ChatGLM3 and glm-4: each message after its role's token. As in the original, all but system and user messages is
    trained, tools' observations too, each with the token that ends it: the next role's.
    """

    answer_tokens = ("<|assistant|>",)
    end: str
    """Token that ends the last message."""
    text_end: str
    """Token that ends a plain text."""

    def question(self, messages: Sequence[Message]) -> list[Piece]:
        return [*self.conversation(messages), self.token("<|assistant|>")]

    def example(self, messages: Sequence[Message]) -> list[Piece]:
        if messages[0]["role"] == TEXT:
            beginning = [self.token("[gMASK]"), self.token(self.sop)]
            return [*beginning, Piece(str(messages[0]["content"]), True), self.token(self.text_end, True)]
        return [*self.conversation(messages), self.token(self.end, bool(messages[-1].get("loss", True)))]

    def conversation(self, messages: Sequence[Message]) -> list[Piece]:
        """Return `[gMASK] sop`, then each turn: its role's token and its text. A role's token ends the turn before it,
        so it is trained if that turn is. What ends the last turn depends on who speaks next.
        """
        pieces = [self.token("[gMASK]"), self.token(self.sop)]
        previous_is_trained = False
        for message in messages:
            role = "observation" if message["role"] == "tool" else message["role"]
            if role not in ("system", "user", "assistant", "observation"):
                raise RowError("this model's format knows no role '{role}'", role=role)
            trained = bool(message.get("loss", role == "assistant" or (role == "observation" and self.original)))
            calls = message.get("tool_calls") or []
            turns = self._turns(message, trained) if message["content"] or not calls else []
            for call in calls:  # each is a turn under the tool's name
                function = call.get("function", call)
                called = {"content": self._call(function["arguments"]), "metadata": function["name"]}
                turns += self._turns(called, trained)
            for turn in turns:
                pieces += [self.token(f"<|{role}|>", previous_is_trained), *turn]
                previous_is_trained = trained
        return pieces

    def _turns(self, message: Message, trained: bool) -> list[list[Piece]]:
        """Return the texts of each turn that a message without calls becomes; more than one if tools take their own."""
        raise NotImplementedError

    def _call(self, arguments: Any) -> str:
        """Return how a tool is called with arguments."""
        return json.dumps(arguments, ensure_ascii=False)


class _ChatGLM3(_Roles):
    """ChatGLM3-6B: `<|role|>`, metadata and a line break, content; tools as JSON below the system message."""

    sop, end, text_end = SOP, "</s>", "</s>"
    stops = ("</s>", "<|user|>", "<|observation|>")

    def _turns(self, message: Message, trained: bool) -> list[list[Piece]]:
        """Return one turn: its metadata, of which only a line break is there if it has none, and its content."""
        content = str(message["content"])
        if message.get("tools"):
            content += "\n" + json.dumps(message["tools"], indent=4, ensure_ascii=False)
        metadata = message.get("metadata")
        heading = Piece(f"{metadata}\n", trained) if metadata else self.token("\n", trained)
        return [[heading, Piece(content, trained)]]

    def _call(self, arguments: Any) -> str:
        """Python that calls, as in the README of ChatGLM3's tools_using_demo."""
        keywords = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
        return f"```python\ntool_call({keywords})\n```"


class _Glm4(_Roles):
    """glm-4-9b: `<|role|>`, metadata, a line break and content as one text; tools take a system turn."""

    sop, end, text_end = "<sop>", "<|user|>", "<|endoftext|>"
    stops = ("<|endoftext|>", "<|user|>", "<|observation|>")

    def _turns(self, message: Message, trained: bool) -> list[list[Piece]]:
        """Return a turn that describes the tools of a system message, and one of its text, if there are such."""
        turns = []
        if message.get("tools"):
            described = self.tokenizer.describe_tools(message["tools"])
            if described is None:
                raise RowError(
                    tr(
                        "the tokenizer's directory has no chat template that describes tools to glm-4: write them out "
                        "in the content of the system message, or add the official tokenizer_config.json"
                    )
                )
            turns.append([Piece(described, trained)])
        if message["content"]:
            turns.append([Piece(f"{message.get('metadata') or ''}\n{message['content']}", trained)])
        return turns


FORMATS: dict[Family, type[FamilyChatEncoder]] = {
    Family.chatglm: _ChatGLM,
    Family.chatglm2: _ChatGLM2,
    Family.chatglm3: _ChatGLM3,
    Family.glm4: _Glm4,
}


def with_tools(messages: Sequence[Message], tools: Sequence[Any] | None) -> Sequence[Message]:
    """Return messages with the tools in the first, a system message, which is added if there is none."""
    if not tools:
        return messages
    if messages and messages[0]["role"] == "system":
        return [{**messages[0], "tools": list(tools)}, *messages[1:]]
    return [{"role": "system", "content": "", "tools": list(tools)}, *messages]


_ROUNDS = (
    "{{%- set turns = namespace(round={first}, open=false) -%}}"
    "{{%- for message in messages if message['role'] != 'system' -%}}"
    "{{%- if message['role'] == 'user' -%}}{question}{{%- set turns.open = true -%}}"
    "{{%- else -%}}{answer}{{%- set turns.round = turns.round + 1 -%}}{{%- set turns.open = false -%}}{{%- endif -%}}"
    "{{%- endfor -%}}"
)
_CHATGLM2_QUESTION = "{{ '[Round ' ~ turns.round ~ ']\\n\\n问：' ~ message['content'] ~ '\\n\\n答：' }}"
_CHATGLM2_ANSWER = "{{ message['content'] }}{% if not loop.last %}{{ '\\n\\n' }}{% else %}{{ '</s>' }}{% endif %}"
_CHATGLM_QUESTION = (
    "{% if messages | rejectattr('role', 'equalto', 'system') | list | length <= 2 %}{{ message['content'] }}"
    "{% else %}{{ '[Round ' ~ turns.round ~ ']\\n问：' ~ message['content'] ~ '\\n答：' }}{% endif %}"
    "{% if loop.last or loop.index == loop.length - 1 and loop.nextitem['role'] == 'assistant' %}"
    "{{ '[gMASK]<sop>' }}{% endif %}"
)
_CHATGLM_ANSWER = "{{ message['content'] }}{% if not loop.last %}{{ '\\n' }}{% else %}{{ '<eop>' }}{% endif %}"
_ROLE = (
    "{{ '<|' ~ (message['role'] if message['role'] != 'tool' else 'observation') ~ '|>' "
    "~ (message['metadata'] or '') ~ '\\n' }}"
)
# Between the line break and the content stands a blank: sentencepiece's own, before each text tokenized for itself.
_CHATGLM3_BODY = (
    _ROLE + "{%- set text = message['content'] -%}"
    "{%- if message['tools'] -%}"
    "{%- set text = text ~ '\\n' ~ (message['tools'] | tojson(indent=4)) -%}"
    "{%- endif -%}"
    "{%- if text -%}{{ ' ' ~ text }}{%- endif -%}"
)
_PROMPT = "{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}"

_TURNS = (
    "{{%- set chat = namespace(turns=[]) -%}}{{%- if tools -%}}"
    "{{%- if messages and messages[0]['role'] == 'system' -%}}"
    "{{%- set messages = [dict(messages[0], tools=tools)] + messages[1:] -%}}"
    "{{%- else -%}}{{%- set messages = [dict(role='system', content='', tools=tools)] + messages -%}}{{%- endif -%}}"
    "{{%- endif -%}}{{%- for one in messages -%}}"
    "{{%- set role = 'observation' if one['role'] == 'tool' else one['role'] -%}}"
    "{{%- if one['content'] or not one['tool_calls'] -%}}"
    "{{%- set chat.turns = chat.turns + [dict(one, role=role)] -%}}{{%- endif -%}}"
    "{{%- for call in one['tool_calls'] or [] -%}}{{%- set given = call['function']['arguments'] -%}}{called}"
    "{{%- set turn = dict(role=role, metadata=call['function']['name'], content=said) -%}}"
    "{{%- set chat.turns = chat.turns + [turn] -%}}{{%- endfor -%}}{{%- endfor -%}}"
    "{{%- set messages = chat.turns -%}}"
)
_CALLED = "{%- set said = given if given is string else given | tojson -%}"
_CALLED_IN_PYTHON = (
    "{%- set all = namespace(text='') -%}{%- for name in given if given is mapping -%}"
    "{%- set all.text = all.text ~ (', ' if all.text else '') ~ name ~ '=' ~ ('%r' | format(given[name])) -%}"
    "{%- endfor -%}"
    "{%- set said = given if given is string else '```python\\ntool_call(' ~ all.text ~ ')\\n```' -%}"
)
SERVED_TURNS: dict[Family, str] = {
    Family.chatglm3: _TURNS.format(called=_CALLED_IN_PYTHON),
    Family.glm4: _TURNS.format(called=_CALLED),
}
"""What a template begins with: it puts tools and calls, as a server is sent them, into the family's own turns."""

TEMPLATES: dict[Family, str] = {
    Family.chatglm: _ROUNDS.format(first=0, question=_CHATGLM_QUESTION, answer=_CHATGLM_ANSWER),
    Family.chatglm2: f"{{{{ '[gMASK]{SOP}' }}}}"
    + _ROUNDS.format(first=1, question=_CHATGLM2_QUESTION, answer=_CHATGLM2_ANSWER),
    Family.chatglm3: SERVED_TURNS[Family.chatglm3]
    + f"{{{{ '[gMASK]{SOP}' }}}}{{%- for message in messages -%}}"
    + _CHATGLM3_BODY
    + "{%- endfor -%}"
    + _PROMPT,
    Family.glm4: SERVED_TURNS[Family.glm4]
    + "{{ '[gMASK]<sop>' }}{%- for message in messages -%}"
    + "{%- if message['content'] -%}"
    + _ROLE
    + "{{ message['content'] }}{%- endif -%}{%- endfor -%}"
    + _PROMPT,
}
"""Jinja templates for programs without this package. They write text, in which control strings that users type are
parsed as special tokens; this package never goes that way."""
