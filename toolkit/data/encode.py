"""Messages to token ids and to the mask of what is trained. The only place where text becomes tokens for training."""

import hashlib
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from toolkit.data.conversation import Message, RowError
from toolkit.errors import ModelError
from toolkit.messages import tr

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CODE_VERSION = 1
"""Part of the fingerprint; raise it when ids or masks change."""

Encoded = tuple[list[int], list[bool]]
"""Ids of one conversation, and for each whether the loss covers it."""


class ChatEncoder(Protocol):
    """What the data side knows of a tokenizer. Implementations can be pickled."""

    fingerprint: str
    """Changes whenever any ids or mask could change."""
    vocab_size: int
    """Every id is below it."""

    def encode(self, messages: Sequence[Message]) -> Encoded:
        """Return ids and mask of one conversation whose last message is the assistant's.

        Raises:
            RowError: this conversation cannot be encoded.
        """
        ...

    def encode_many(self, conversations: Sequence[Sequence[Message]]) -> list[Encoded]:
        """Return `encode` of each; faster where the tokenizer works on batches."""
        ...


class TemplateChatEncoder:
    """Encodes through a tokenizer's own chat template; the loss covers the last answer and its end token only.

    Prompt and answer are tokenised apart, so the ids of the prompt are exactly those that generation will see, and
    no token straddles the border between what is trained and what is not.

    Args:
        tokenizer: any transformers tokenizer with a chat template and an end-of-sequence token.

    Raises:
        ModelError: the tokenizer lacks one of the two.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        if not tokenizer.chat_template:
            raise ModelError(
                tr(
                    "The tokenizer '{name}' has no chat template. Name a file with one: model.chat_template=FILE.",
                    name=tokenizer.name_or_path,
                )
            )
        if tokenizer.eos_token_id is None:
            raise ModelError(
                tr(
                    "The tokenizer '{name}' has no end-of-sequence token, so a model could not learn where to stop. "
                    "Set eos_token in its tokenizer_config.json.",
                    name=tokenizer.name_or_path,
                )
            )
        self.tokenizer = tokenizer
        self.vocab_size = len(tokenizer)
        self.fingerprint = _fingerprint(tokenizer)

    def encode(self, messages: Sequence[Message]) -> Encoded:
        """Return ids and mask of one conversation; see `ChatEncoder`."""
        return self.encode_many([messages])[0]

    def encode_many(self, conversations: Sequence[Sequence[Message]]) -> list[Encoded]:
        """Return ids and mask of several conversations; see `ChatEncoder`.

        Raises:
            RowError: the template refuses one of them.
            ModelError: the template gives earlier turns another form once an answer follows.
        """
        if not conversations:
            return []
        texts = [text for messages in conversations for text in self._split(messages)]
        # verbose=False: no warning about the model's longest input; data.max_length rules.
        ids: list[list[int]] = self.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        return [self._join(prompt, answer) for prompt, answer in zip(ids[::2], ids[1::2], strict=True)]

    def _split(self, messages: Sequence[Message]) -> tuple[str, str]:
        """Return the prompt as generation sees it, and what the template adds for the last answer."""
        end = self.tokenizer.eos_token
        if end in messages[-1]["content"]:
            raise RowError(
                tr(
                    "the answer holds the text of the end token, '{end}', and would be cut there. Correct or "
                    "remove the row",
                    end=end,
                )
            )
        prompt = self._render(messages[:-1], add_generation_prompt=True)
        whole = self._render(messages, add_generation_prompt=False)
        if not whole.startswith(prompt):
            raise ModelError(
                tr(
                    "The chat template of '{name}' cannot be trained with: the conversation with its answer does not "
                    "begin with the prompt that generation would see (…{prompt}). Give a template whose turns do not "
                    "depend on later ones: model.chat_template=FILE.",
                    name=self.tokenizer.name_or_path,
                    prompt=repr(prompt[-60:]),
                )
            )
        return prompt, whole[len(prompt) :]

    def _render(self, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        from jinja2 import TemplateError

        try:
            text = self.tokenizer.apply_chat_template(
                list(messages),
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
            )
        except TemplateError as error:
            raise RowError(tr("the chat template refuses the conversation: {reason}", reason=error)) from None
        assert isinstance(text, str)
        return text

    def _join(self, prompt: list[int], answer: list[int]) -> Encoded:
        """Return ids and mask: the answer ends with exactly one end token.

        What a template writes after the end token (a newline, mostly) is dropped: generation has stopped by then, so
        the model never sees it there, and as the last tokens of the row they could not even serve as context.
        """
        end = self.tokenizer.eos_token_id
        answer = [*(answer[: answer.index(end)] if end in answer else answer), end]
        return [*prompt, *answer], [False] * len(prompt) + [True] * len(answer)


def _fingerprint(tokenizer: "PreTrainedTokenizerBase") -> str:
    """Return a hash of everything in the tokenizer that decides about ids and mask."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    vocabulary = backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    parts = [
        str(CODE_VERSION),
        type(tokenizer).__name__,
        vocabulary,
        json.dumps(tokenizer.chat_template),
        json.dumps(
            {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
            sort_keys=True,
        ),
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
