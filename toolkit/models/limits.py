"""What files of a model may ask for: sizes that a model can have, and time that a chat template may take."""

import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from toolkit.errors import ModelError
from toolkit.outside import json_object

# Key of config.json -> least and largest value, several times what the largest published models have.
_SIZES = {
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers"), (1, 4096)),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads"), (1, 1 << 16)),
    **dict.fromkeys(("num_key_value_heads", "multi_query_group_num"), (0, 1 << 16)),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "n_shared_experts"), (0, 1 << 16)),
    **dict.fromkeys(("vocab_size", "padded_vocab_size"), (1, 1 << 26)),
    **dict.fromkeys(("hidden_size", "n_embd"), (1, 1 << 24)),
    **dict.fromkeys(
        ("intermediate_size", "ffn_hidden_size", "inner_hidden_size", "head_dim", "kv_channels"), (0, 1 << 24)
    ),
    **dict.fromkeys(("pre_seq_len", "num_virtual_tokens"), (0, 1 << 20)),
    "r": (1, 1 << 16),
}
_NEEDED = ("num_hidden_layers", "num_attention_heads", "vocab_size", "hidden_size")
_MOST_GROWTH = 100
"""Times its length that a tokenizer's normalizer, or its decoder, may make a text; NFKD makes some characters 18."""


def check_sizes(config: Mapping[str, Any], file: Path) -> None:
    """Refuse a config.json whose model could not be built, or not within a day."""
    sections = [config, *(value for value in config.values() if isinstance(value, dict))]
    for section in sections:
        for key, (least, most) in _SIZES.items():
            value = section.get(key)
            if value is None and (key not in section or key not in _NEEDED):
                continue
            for one in value if isinstance(value, list) else [value]:
                if isinstance(one, bool) or not isinstance(one, int) or not least <= one <= most:
                    raise ModelError(
                        "{file}: {key} = {value} is not a whole number from {least} to {most}. Correct it, or "
                        "download the file again.",
                        file=file,
                        key=key,
                        value=repr(one)[:40],
                        least=least,
                        most=f"{most:,}",
                    )


def check_growth(file: Path) -> None:
    """Reject a tokenizer.json whose replacements make texts grow: ten of a by aaaaaaaaaa fill any memory."""
    tokenizer = json_object(file, ModelError)
    for part in ("normalizer", "decoder"):
        growth = _growth(tokenizer.get(part))
        if growth > _MOST_GROWTH:
            raise ModelError(
                "{file}: its {part} can make a text more than {times} times as long, which no tokenizer needs. Get "
                "the file from a source you trust.",
                file=file,
                part=part,
                times=_MOST_GROWTH,
            )


def _growth(step: Any) -> float:
    """Return how many times longer a step of a tokenizer can make a text, as far as its settings tell."""
    if not isinstance(step, dict):
        return 1.0
    found = 1.0
    inner_steps = step.get("normalizers") or step.get("decoders")
    for inner in inner_steps if isinstance(inner_steps, list) else []:
        found = min(found * _growth(inner), 1e9)  # some hundred of them would overflow
    if step.get("type") == "Replace":
        pattern = step.get("pattern")
        text = pattern.get("String") if isinstance(pattern, dict) else None
        matched = len(text.encode()) if isinstance(text, str) else 1  # an expression may match a single character
        content = len(str(step.get("content", "")).encode())
        found *= max(1.0, content / matched if matched else content + 1.0)
    elif step.get("type") == "Prepend":
        found *= 1.0 + len(str(step.get("prepend", "")))
    return found


class TooSlow(Exception):
    """A body took longer than it may."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Interrupt Python code that takes too long; only in a process's main thread, where signals are handled.

    Raises:
        TooSlow: it has taken longer.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise TooSlow

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
