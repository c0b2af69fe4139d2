"""Our encoding of conversations against the bare library's batch call on the same texts, in turns on one machine."""

import copy
import gc
import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from toolkit.config.schema import RunConfig, TrainOn
from toolkit.data.formats import Conversation, mark_trained
from toolkit.data.sources import read_conversations
from toolkit.data.too_long import turns
from toolkit.messages import RowError
from toolkit.models.chat import AnyChatEncoder
from toolkit.models.chatglm.formats import FamilyChatEncoder
from toolkit.models.chatglm.tokenizers import ChatGLMTokenizer
from toolkit.tasks.language_data import build_encoder

Calls = tuple[Callable[[list[str]], Any], Callable[[list[str]], Any]]
CHUNK = 512
"""Conversations per call, as `prepare` makes them."""


def library_calls(encoder: AnyChatEncoder, num_threads: int = -1) -> Calls:
    """Return tokenizers' `encode_batch` and `encode_batch_fast`, or twice sentencepiece's `encode`, which is alone."""
    if isinstance(encoder.tokenizer, ChatGLMTokenizer):
        encode = partial(encoder.tokenizer.pieces.encode, num_threads=num_threads)
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


def compare(cfg: RunConfig, num_turns: Sequence[int], repeats: int) -> dict[str, Any]:
    """Time both on a recipe's data, as it is and joined to conversations of so many turns; one thread each."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    encoder = build_encoder(cfg)
    known = list(read_conversations(cfg.data, Path(cfg.prepare.dir)))
    sets = {"as they are": known} | {str(count): joined(known, count) for count in num_turns}
    return {
        "vocab_size": encoder.vocab_size,
        "repeats": repeats,
        "by_turns": {name: _compare(encoder, found, cfg.data.train_on, repeats) for name, found in sets.items()},
    }


def joined(conversations: Iterable[Conversation], num_turns: int) -> list[Conversation]:
    """Return conversations of so many turns, made of those that follow each other; system and tools are the first's."""
    found: list[Conversation] = []
    system, tools, parts = list[Any](), None, list[list[Any]]()
    for one in conversations:
        first, of_one = turns(one.messages)
        if not parts:
            system, tools = first, one.tools
        parts += of_one
        if len(parts) >= num_turns:
            messages = [message for part in parts[:num_turns] for message in part]
            found.append(Conversation([*system, *messages], tools))
            parts = []
    return found


def _compare(
    encoder: AnyChatEncoder, conversations: Sequence[Conversation], train_on: TrainOn, repeats: int
) -> dict[str, Any]:
    """Time conversations. Every second one is encoded beforehand: a template's answers are found faster once others
    like them were, and most rows of a file come after many.
    """
    seen, timed = (
        [one for one in part if _usable(encoder, one, train_on)] for part in (conversations[::2], conversations[1::2])
    )
    _encode(encoder, seen, train_on)
    openings = getattr(encoder, "openings", None)
    trusted = set() if openings is None else openings.trusted.copy()
    samples = [(part, one.tools) for one in timed for part in _parts(encoder, one, train_on)]
    texts = [text for messages, tools in samples for text in texts_of(encoder, messages, tools)]
    batch, fast = library_calls(encoder, 1)
    sides: dict[str, tuple[Callable[[Any], Any], Any]] = {
        "encode_batch": (partial(_in_chunks, batch), texts),
        "encode_batch_fast": (partial(_in_chunks, fast), texts),
        "ours": (partial(_encode, encoder, train_on=train_on), timed),
    }
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    gc.collect()
    gc.freeze()  # as in a tokenizing process
    for repeat in range(repeats + 1):
        for name in sides if repeat % 2 else reversed(sides):
            if openings is not None:
                openings.trusted = trusted.copy()
            call, given = sides[name]
            copied = _fresh(given)
            started = time.process_time()
            call(copied)
            if repeat:
                seconds[name].append(time.process_time() - started)
    num_tokens = sum(len(ids) for ids, _ in _encode(encoder, timed, train_on))
    ratios = {
        name: [floor / ours for floor, ours in zip(seconds[name], seconds["ours"], strict=True)]
        for name in ("encode_batch", "encode_batch_fast")
    }
    return {
        "conversations": len(timed),
        "samples": len(samples),
        "tokens": num_tokens,
        "ours_tokens_per_cpu_s": num_tokens / statistics.median(seconds["ours"]),
        **{f"speed_to_{name}": round(statistics.median(found), 3) for name, found in ratios.items()},
        **{f"speed_to_{name}_by_repeat": [round(one, 3) for one in found] for name, found in ratios.items()},
        "load_average": os.getloadavg()[0],
    }


def _parts(encoder: AnyChatEncoder, one: Conversation, train_on: TrainOn) -> list[Any]:
    return [
        part
        for marked in mark_trained(one, train_on, encoder.only_last)
        for part in encoder.divide(marked.messages, marked.tools)
    ]


def _usable(encoder: AnyChatEncoder, one: Conversation, train_on: TrainOn) -> bool:
    try:
        return bool([encoder.encode(part, one.tools) for part in _parts(encoder, one, train_on)])
    except RowError:
        return False


def _encode(encoder: AnyChatEncoder, conversations: Sequence[Conversation], train_on: TrainOn) -> list[Any]:
    """Encode as a tokenizing process does."""
    found: list[Any] = []
    for start in range(0, len(conversations), CHUNK):
        chunk = conversations[start : start + CHUNK]
        parts = [(part, one.tools) for one in chunk for part in _parts(encoder, one, train_on)]
        found += encoder.encode_many([messages for messages, _ in parts], [tools for _, tools in parts])
    return found


def _in_chunks(call: Callable[[list[str]], Any], texts: list[str]) -> None:
    for start in range(0, len(texts), CHUNK):
        call(texts[start : start + CHUNK])


def _fresh(value: Any) -> Any:
    """Copy all texts in a value."""
    if isinstance(value, str):
        return fresh(value)
    if isinstance(value, Conversation):
        return Conversation(_fresh(value.messages), copy.deepcopy(value.tools))
    if isinstance(value, dict):
        return {key: _fresh(item) for key, item in value.items()}
    return [_fresh(item) for item in value] if isinstance(value, list) else value
