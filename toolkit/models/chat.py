"""The chat format of a model directory: a ChatGLM's own, or that of a chat template."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from toolkit.config.schema import Family
from toolkit.errors import ModelError
from toolkit.models.chat_template import Encoded, Message, TemplateChatEncoder
from toolkit.models.chatglm.formats import FORMATS, with_tools
from toolkit.models.chatglm.tokenizers import ChatGLMTokenizer, GlmTokenizer
from toolkit.models.chatglm.vocabulary import no_cycles
from toolkit.models.tokenizer import load_tokenizer

CODE_VERSION = 3
"""Part of the fingerprint; raise it when ids or masks change."""


class FamilyChatEncoder:
    """A ChatGLM's own format, exactly as the original builds it; control strings in messages stay text.

    `original_labels` trains exactly what the original trains; False leaves out ChatGLM-6B's <sop> and observations.
    """

    def __init__(self, tokenizer: GlmTokenizer | ChatGLMTokenizer, original_labels: bool = True) -> None:
        if not tokenizer.has_chat_format:
            raise ModelError(
                "nothing in {folder} tells whether its tokenizer is ChatGLM2's or ChatGLM3's, whose vocabulary is "
                "the same. Say model.family=chatglm2 or model.family=chatglm3.",
                folder=tokenizer.name_or_path,
            )
        self.tokenizer = tokenizer
        self.format = FORMATS[tokenizer.family](tokenizer, original_labels)
        self.vocab_size = len(tokenizer)
        self.only_last = self.drops_system = self.format.only_last
        # ChatGLM-6B finds its positions from the <sop> of each sample.
        self.can_cut = tokenizer.family is not Family.chatglm
        digest = hashlib.sha256(f"{CODE_VERSION} {tokenizer.family.value} {len(tokenizer)} {original_labels}".encode())
        digest.update(tokenizer.vocabulary.read_bytes())
        digest.update((tokenizer.own_template or "").encode())  # glm-4 describes tools in its words
        self.fingerprint = digest.hexdigest()

    def encode(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> Encoded:
        """Return ids and mask of one conversation; see `toolkit.data.encode.ChatEncoder`."""
        return self.encode_many([messages], [tools])[0]

    def encode_many(
        self, conversations: Sequence[Sequence[Message]], tools: Sequence[Sequence[Any] | None] | None = None
    ) -> list[Encoded]:
        """Return ids and mask of several conversations; see `toolkit.data.encode.ChatEncoder`."""
        pairs = zip(conversations, tools or [None] * len(conversations), strict=True)
        with no_cycles():
            return self.format.encode(self.format.example(with_tools(*pair)) for pair in pairs)

    def prompt(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> list[int]:
        """Return the ids that generation starts from."""
        return self.format.encode([self.format.prompt(with_tools(messages, tools))])[0][0]

    @property
    def stop_ids(self) -> list[int]:
        """Return the ids at which an answer ends."""
        return self.format.stop_ids

    @property
    def answer_ids(self) -> list[int]:
        """Return the ids after which the assistant speaks, where a token of its own says so."""
        return [int(self.tokenizer.convert_tokens_to_ids(token)) for token in self.format.asks]


AnyChatEncoder = FamilyChatEncoder | TemplateChatEncoder
"""What turns conversations into ids, for training and for generation."""


def load_chat_encoder(
    path: str | Path, *, family: Family | str = Family.auto, chat_template: str = "", original_labels: bool = True
) -> AnyChatEncoder:
    """Return what turns conversations into ids and the mask of what is trained, for a model directory."""
    return chat_encoder(load_tokenizer(path, family=family, chat_template=chat_template), original_labels)


def chat_encoder(tokenizer: Any, original_labels: bool = True) -> AnyChatEncoder:
    """Return the chat encoder of a loaded tokenizer; see `load_chat_encoder`."""
    if isinstance(tokenizer, GlmTokenizer | ChatGLMTokenizer) and tokenizer.has_own_template:
        return FamilyChatEncoder(tokenizer, original_labels)
    if not original_labels:
        raise ModelError(
            "model.original_labels = false has no effect: the tokenizer '{name}' does not use a ChatGLM's own chat "
            "format. Remove it.",
            name=tokenizer.name_or_path,
        )
    return TemplateChatEncoder(tokenizer)
