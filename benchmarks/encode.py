"""Our encoding of conversations against the bare library's batch call on the same texts, in turns on one machine."""

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from toolkit.models.chat import AnyChatEncoder
from toolkit.models.chatglm.formats import FamilyChatEncoder
from toolkit.models.chatglm.tokenizers import ChatGLMTokenizer

Calls = tuple[Callable[[list[str]], Any], Callable[[list[str]], Any]]
CHUNK = 1000
"""Conversations per call, as `data.prepare` makes them."""


def library_calls(encoder: AnyChatEncoder) -> Calls:
    """Return tokenizers' `encode_batch` and `encode_batch_fast`, or twice sentencepiece's `encode`, which is alone."""
    if isinstance(encoder.tokenizer, ChatGLMTokenizer):
        encode = partial(encoder.tokenizer.pieces.encode, num_threads=-1)
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
        return [content for content, _ in encoder.example(messages) if isinstance(content, str)]
    return [encoder.render(messages, tools, add_generation_prompt=False)]


def fresh(text: str) -> str:
    """Return a copy: Python keeps a text's UTF-8 form once a library has asked for it; data read once has none."""
    return text.encode().decode()


def compare(
    encoder: FamilyChatEncoder, conversations: Sequence[Sequence[dict[str, Any]]], repeats: int
) -> dict[str, Any]:
    """Time both.

    The floor tokenises the same texts (those that the format tokenises one by one) with the library's own batch call:
    tokenizers' `encode_batch_fast`, or sentencepiece's `encode` for ChatGLM-6B. Ours splits conversations into texts,
    tokenises them, and joins ids and mask.

    Args:
        encoder: a ChatGLM's.
        conversations: messages of each.
        repeats: interleaved rounds; one more warms up.

    Returns:
        Seconds and tokens per second, and medians of the ratio to the floor, taken round by round: of our tokenizer on
        the texts, and of whole conversations.
    """
    chunks = [conversations[start : start + CHUNK] for start in range(0, len(conversations), CHUNK)]
    texts = [[text for messages in chunk for text in texts_of(encoder, messages)] for chunk in chunks]
    library = _library(encoder)
    assert [encoder.tokenizer.encode_texts(part) for part in texts[:1]] == [library(part) for part in texts[:1]] or (
        isinstance(encoder.tokenizer, ChatGLMTokenizer)  # sentencepiece alone does not know ChatGLM-6B's white space
    )
    seconds: dict[str, list[float]] = {"floor": [], "texts": [], "ours": []}
    sides: list[tuple[str, Callable[[Any], Any], list[Any]]] = [
        ("floor", library, texts),
        ("texts", encoder.tokenizer.encode_texts, texts),
        ("ours", encoder.encode_many, list(chunks)),
    ]
    for turn in range(repeats + 1):
        for name, call, parts in sides if turn % 2 else sides[::-1]:
            copies = [_fresh(part) for part in parts]
            started = time.perf_counter()
            for part in copies:
                call(part)
            if turn:
                seconds[name].append(time.perf_counter() - started)
    num_tokens = sum(len(ids) for chunk in chunks for ids, _ in encoder.encode_many(chunk))
    ratios = {
        side: [took / floor for took, floor in zip(seconds[side], seconds["floor"], strict=True)]
        for side in ("texts", "ours")
    }
    return {
        "family": encoder.tokenizer.family.value,
        "conversations": len(conversations),
        "tokens": num_tokens,
        "floor_s": statistics.median(seconds["floor"]),
        "ours_s": statistics.median(seconds["ours"]),
        "ours_tokens_per_s": num_tokens / statistics.median(seconds["ours"]),
        "texts_ratio_median": statistics.median(ratios["texts"]),
        "ratio_median": statistics.median(ratios["ours"]),
        "ratio_min": min(ratios["ours"]),
        "ratio_max": max(ratios["ours"]),
        "repeats": repeats,
    }


def _fresh(value: Any) -> Any:
    """Copy all texts in a value."""
    if isinstance(value, str):
        return fresh(value)
    if isinstance(value, dict):
        return {key: _fresh(item) for key, item in value.items()}
    return [_fresh(item) for item in value]


def _library(encoder: FamilyChatEncoder) -> Callable[[list[str]], list[list[int]]]:
    _, encode = library_calls(encoder)
    if isinstance(encoder.tokenizer, ChatGLMTokenizer):
        return encode
    return lambda texts: [found.ids for found in encode(texts)]
