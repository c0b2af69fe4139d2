"""Conversations through a tokenizer's own chat template: for all models that have no format of their own here."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from toolkit.errors import ModelError, RowError
from toolkit.messages import tr

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CODE_VERSION = 1
"""Part of the fingerprint; raise it when ids or masks change."""

Message = Mapping[str, Any]
Encoded = tuple[list[int], list[bool]]


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

    def encode(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> Encoded:
        """Return ids and mask of one conversation; see `toolkit.data.encode.ChatEncoder`."""
        return self._encode([self._split(messages, tools)])[0]

    def prompt(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> list[int]:
        """Return the ids that generation starts from."""
        text = self._render(messages, tools, add_generation_prompt=True)
        ids: list[int] = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    @property
    def stop_ids(self) -> list[int]:
        """Return the ids at which an answer ends."""
        return [int(self.tokenizer.eos_token_id)]

    def encode_many(self, conversations: Sequence[Sequence[Message]]) -> list[Encoded]:
        """Return ids and mask of several conversations; see `toolkit.data.encode.ChatEncoder`.

        Raises:
            RowError: the template refuses one of them.
            ModelError: the template gives earlier turns another form once an answer follows.
        """
        return self._encode([self._split(messages, None) for messages in conversations])

    def _encode(self, pairs: list[tuple[str, str]]) -> list[Encoded]:
        """Return ids and mask of prompts and answers, tokenised in one call."""
        if not pairs:
            return []
        texts = [text for pair in pairs for text in pair]
        # verbose=False: no warning about the model's longest input; data.max_length rules.
        ids: list[list[int]] = self.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        return [self._join(prompt, answer) for prompt, answer in zip(ids[::2], ids[1::2], strict=True)]

    def _split(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> tuple[str, str]:
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
        prompt = self._render(messages[:-1], tools, add_generation_prompt=True)
        whole = self._render(messages, tools, add_generation_prompt=False)
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

    def _render(self, messages: Sequence[Message], tools: Sequence[Any] | None, add_generation_prompt: bool) -> str:
        from jinja2 import TemplateError

        try:
            text = self.tokenizer.apply_chat_template(
                list(messages),
                tools=None if tools is None else list(tools),
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
