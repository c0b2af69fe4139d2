"""What evaluation asks is, to the id, what generation asks: for every family, out of the tokenized samples."""

from typing import Any

import pytest
from golden import GOLDEN, vocabulary
from test_tokenizers import NAMES, TOOLS, saved

from toolkit.evaluate.generate import decode_answer
from toolkit.evaluate.questions import split_sample
from toolkit.models import load_chat_encoder
from toolkit.models.chat_template import TemplateChatEncoder

ANSWER = "好的，  answer <|user|> 1.\n第二行"


def parts(encoder: Any, messages: list[dict[str, Any]], tools: Any = None) -> tuple[list[int], str]:
    """Return prompt and reference of a conversation as training has it."""
    ids, trained = encoder.encode(messages, tools)
    found = split_sample(ids, [False, *trained[1:]], encoder)
    assert found is not None
    return found[0], decode_answer(encoder, found[1])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("original", [True, False])
def test_each_familys_own_format(name: str, original: bool) -> None:
    encoder = load_chat_encoder(GOLDEN / f"tok_{name}", original_labels=original)
    for chat in vocabulary(name)["chat"]:
        messages = chat["messages"]
        assert parts(encoder, [*messages, {"role": "assistant", "content": ANSWER}]) == (
            encoder.prompt(messages),
            decode_answer(encoder, encoder.tokenizer.encode_texts([ANSWER])[0]),
        )
    assert split_sample(*encoder.encode([{"role": "text", "content": ANSWER}]), encoder) is None


@pytest.mark.parametrize("name", ["v3", "glm4"])
@pytest.mark.parametrize("original", [True, False])
def test_with_tools_the_last_answer_alone(name: str, original: bool) -> None:
    """The original trains observations too: call, observation and answer are one stretch that is trained."""
    encoder = load_chat_encoder(GOLDEN / f"tok_{name}", original_labels=original)
    messages = [
        {"role": "user", "content": "price?"},
        {"role": "assistant", "metadata": "track", "content": "call()"},
        {"role": "observation", "content": "12"},
    ]
    assert parts(encoder, [*messages, {"role": "assistant", "content": "It is 12."}], TOOLS) == (
        encoder.prompt(messages, TOOLS),
        "It is 12.",
    )
    call = parts(encoder, messages[:2], TOOLS)
    assert call == (encoder.prompt(messages[:1], TOOLS), "track\n call()" if name == "v3" else "track\ncall()")


@pytest.mark.parametrize("name", NAMES[1:])
def test_a_template_of_transformers(name: str) -> None:
    encoder = TemplateChatEncoder(saved(name))
    for messages in ([{"role": "user", "content": "你好"}], vocabulary(name)["chat"][1]["messages"]):
        prompt, reference = parts(encoder, [*messages, {"role": "assistant", "content": "好的。"}])
        assert prompt == encoder.prompt(messages)
        assert reference == "好的。"
    assert split_sample(*encoder.encode([{"role": "text", "content": "好的。"}]), encoder) is None
