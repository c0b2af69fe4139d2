"""What `generate` and `chat` give a model is what training gave it; and answers appear as they are."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from golden import GOLDEN, lines
from hypothesis import given, settings, strategies as st

from toolkit.evaluate.chat_session import AnswerStream
from toolkit.evaluate.generate import decode_answer, has_system_role
from toolkit.models import load_chat_encoder
from toolkit.models.chat import fit_tokenizer
from toolkit.models.chat_template import TemplateChatEncoder

FAMILIES = ["v1", "v2", "v3", "glm4", "quickstart"]
HEARS = {"v1": False, "v2": False, "v3": True, "glm4": True, "quickstart": True}
TEXT = st.text(alphabet=st.characters(codec="utf-8"), min_size=1, max_size=20).filter(str.strip)


@cache
def encoder_of(name: str, folder: Callable[[], Path]) -> Any:
    """Return a family's encoder, made once."""
    if name != "quickstart":
        return load_chat_encoder(GOLDEN / f"tok_{name}")
    return TemplateChatEncoder(fit_tokenizer(lines, 400, folder()))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Path]:
    return lambda: tmp_path_factory.mktemp("fitted")


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=60, deadline=None)
@given(texts=st.lists(TEXT, min_size=6, max_size=6), turns=st.integers(1, 3), with_system=st.booleans())
def test_training_begins_with_the_prompt(
    name: str, folder: Callable[[], Path], texts: list[str], turns: int, with_system: bool
) -> None:
    """Byte for byte, over several turns; and training starts right where the prompt ends."""
    encoder = encoder_of(name, folder)
    messages = [{"role": "system", "content": "你是助手 S"}] if with_system and HEARS[name] else []
    for turn in range(turns):
        messages += [
            {"role": "user", "content": texts[2 * turn]},
            {"role": "assistant", "content": texts[2 * turn + 1].replace("<|endoftext|>", "")},
        ]
    prompt = encoder.prompt(messages[:-1])
    ids, trained = encoder.encode(messages)
    assert ids[: len(prompt)] == prompt
    assert all(trained[len(prompt) :]) and len(ids) > len(prompt)
    # ChatGLM-6B trains <sop>, the prompt's last token; nothing else of the last question is trained.
    assert sum(trained[len(prompt) - 1 : len(prompt)]) == (name == "v1")


@pytest.mark.parametrize("name", FAMILIES)
def test_who_hears_a_system_message(name: str, folder: Callable[[], Path]) -> None:
    assert has_system_role(encoder_of(name, folder)) == HEARS[name]


def streamed(encoder: Any, ids: list[int]) -> list[str]:
    """Return the pieces in which an answer appears."""
    pieces: list[str] = []
    stream = AnswerStream(encoder, pieces.append)
    stream.put(torch.tensor([encoder.prompt([{"role": "user", "content": "?"}])]))
    for token in ids:
        stream.put(torch.tensor([token]))
    stream.end()
    assert "".join(pieces) == stream.text
    return pieces


@pytest.mark.parametrize("name", FAMILIES)
def test_answers_appear_in_whole_characters(name: str, folder: Callable[[], Path]) -> None:
    """In the end exactly the text of the whole answer: no end token, no blanks around it, no broken characters."""
    encoder = encoder_of(name, folder)
    several = 0
    for text in [*lines()[:60], "🙂 é 你好\n  indented\n", "\n 你好"]:
        if name == "quickstart":
            ids = encoder.tokenizer.encode(text, add_special_tokens=False)
        else:
            ids = encoder.tokenizer.encode_texts([text])[0]
        pieces = streamed(encoder, [*ids, encoder.stop_ids[0]])
        assert "".join(pieces) == decode_answer(encoder, ids)
        assert not any("\ufffd" in piece for piece in pieces)
        assert not "".join(pieces).startswith(("\n", " "))
        several += len(pieces) > 3
    assert several > 20
