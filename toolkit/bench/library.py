"""The bare tokenizer library beside our encoders: its own calls, and the texts that it gets."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from toolkit.models.chat import AnyChatEncoder, FamilyChatEncoder
from toolkit.models.chatglm.tokenizers import ChatGLMTokenizer

Calls = tuple[Callable[[list[str]], Any], Callable[[list[str]], Any]]


def library_calls(encoder: AnyChatEncoder) -> Calls:
    """Return tokenizers' `encode_batch` and `encode_batch_fast`, or twice sentencepiece's `encode`, which is alone."""
    if isinstance(encoder.tokenizer, ChatGLMTokenizer):
        encode = partial(encoder.tokenizer.ice.pieces.encode, num_threads=-1)
        return encode, encode
    backend = encoder.tokenizer.backend_tokenizer
    backend.encode_special_tokens = isinstance(encoder, FamilyChatEncoder)
    return (
        partial(backend.encode_batch, add_special_tokens=False),
        partial(backend.encode_batch_fast, add_special_tokens=False),
    )


def texts_of(encoder: AnyChatEncoder, messages: Sequence[Any], tools: Sequence[Any] | None = None) -> list[str]:
    """Return the texts of a conversation that the encoder tokenises one by one."""
    if isinstance(encoder, FamilyChatEncoder):
        return [content for content, _ in encoder.format.example(messages) if isinstance(content, str)]
    return [encoder.render(messages, tools, add_generation_prompt=False)]


def fresh(text: str) -> str:
    """Return a copy: Python keeps a text's UTF-8 form once a library has asked for it; data read once has none."""
    return text.encode().decode()
