"""What a row can say about its training, in each family's format: chosen answers, calls of tools, plain texts."""

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from golden import GOLDEN

from tests.unit.data_tools import trained_stretches
from toolkit.config.schema import TrainOn
from toolkit.data.formats import Conversation, mark_trained
from toolkit.messages import RowError
from toolkit.models import load_chat_encoder

ROLES = ["v3", "glm4"]
CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": "one?"},
    {"role": "assistant", "content": "first"},
    {"role": "user", "content": "two?"},
    {"role": "assistant", "content": "second"},
]
CALL = {"type": "function", "function": {"name": "track", "arguments": {"symbol": "x", "days": 2}}}
TOOL_CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": "price?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "12"},
    {"role": "assistant", "content": "It is 12."},
]


@cache
def encoder(name: str) -> Any:
    """Return an encoder, made once."""
    return load_chat_encoder(GOLDEN / f"tok_{name}")


def samples(name: str, messages: list[dict[str, Any]], train_on: TrainOn) -> list[tuple[list[int], list[bool]]]:
    """Return what is learned from a conversation."""
    found = mark_trained(Conversation(list(messages)), train_on, encoder(name).only_last)
    return [encoder(name).encode(one.messages) for one in found]


def answer(name: str, content: str, end: str) -> list[int]:
    """Return the ids of an answer after its role's token, up to the token that ends it."""
    texts = ["\n", content] if name == "v3" else [f"\n{content}"]
    ids = [token for part in encoder(name).tokenizer.encode_texts(texts) for token in part]
    return [*ids, encoder(name).tokenizer.convert_tokens_to_ids(end)]


@pytest.mark.parametrize("name", ROLES)
def test_answers_are_chosen_where_each_has_its_turn(name: str) -> None:
    last = {"v3": "</s>", "glm4": "<|user|>"}[name]
    first, second = answer(name, "first", "<|user|>"), answer(name, "second", last)
    whole = encoder(name).encode(CHAT)
    for train_on, wanted in (
        (TrainOn.auto, [first, second]),
        (TrainOn.all, [first, second]),
        (TrainOn.last, [second]),
        (TrainOn.marked, []),
    ):
        (found,) = samples(name, CHAT, train_on)
        assert found[0] == whole[0]
        assert trained_stretches(*found) == wanted, train_on
    flagged = [CHAT[0], {**CHAT[1], "loss": True}, CHAT[2], {**CHAT[3], "loss": False}]
    for train_on in TrainOn:
        (found,) = samples(name, flagged, train_on)
        assert found[0] == whole[0]
        assert trained_stretches(*found) == [first], train_on


@pytest.mark.parametrize("name", ["v1", "v2"])
def test_each_trained_answer_is_a_sample_where_only_the_last_can_be(name: str) -> None:
    whole, beginning = encoder(name).encode(CHAT), encoder(name).encode(CHAT[:2])
    assert samples(name, CHAT, TrainOn.auto) == samples(name, CHAT, TrainOn.last) == [whole]
    assert samples(name, CHAT, TrainOn.all) == [beginning, whole]
    assert samples(name, CHAT, TrainOn.marked) == []
    flagged = [CHAT[0], {**CHAT[1], "loss": True}, *CHAT[2:]]
    assert samples(name, flagged, TrainOn.marked) == [beginning]
    assert len(trained_stretches(*whole)) == 1


def test_chatglm3_calls_tools_in_python() -> None:
    ids, mask = encoder("v3").encode(TOOL_CHAT)
    encode, tokens = encoder("v3").tokenizer.encode_texts, encoder("v3").tokenizer.convert_tokens_to_ids
    call = [*encode(["track\n"])[0], *encode(["```python\ntool_call(symbol='x', days=2)\n```"])[0]]
    seen = [*encode(["\n"])[0], *encode(["12"])[0]]
    assistant, observation = tokens("<|assistant|>"), tokens("<|observation|>")
    beginning = [tokens("[gMASK]"), tokens("sop"), tokens("<|user|>"), *encode(["\n"])[0], *encode(["price?"])[0]]
    assert ids == [
        *beginning,
        *[assistant, *call, observation, *seen],
        *[assistant, *answer("v3", "It is 12.", "</s>")],
    ]
    # As in the original the observation is trained too; data.train_on=all leaves it out.
    assert mask == [False] * (len(beginning) + 1) + [True] * (len(ids) - len(beginning) - 1)
    (chosen,) = samples("v3", TOOL_CHAT, TrainOn.all)
    assert trained_stretches(*chosen) == [[*call, observation], answer("v3", "It is 12.", "</s>")]


def test_glm4_calls_tools_in_json() -> None:
    ids, _ = encoder("glm4").encode(TOOL_CHAT)
    encode, tokens = encoder("glm4").tokenizer.encode_texts, encoder("glm4").tokenizer.convert_tokens_to_ids
    turns = [
        ("<|user|>", "\nprice?"),
        ("<|assistant|>", 'track\n{"symbol": "x", "days": 2}'),
        ("<|observation|>", "\n12"),
        ("<|assistant|>", "\nIt is 12."),
    ]
    told = [token for role, text in turns for token in (tokens(role), *encode([text])[0])]
    assert ids == [tokens("[gMASK]"), tokens("<sop>"), *told, tokens("<|user|>")]


@pytest.mark.parametrize("name", ["v1", "v2"])
def test_rounds_have_no_calls(name: str) -> None:
    with pytest.raises(RowError, match="questions and answers in turn only, not user, tool, tool"):
        encoder(name).encode(TOOL_CHAT)
    with pytest.raises(RowError, match="knows no calls of tools"):
        encoder(name).encode(TOOL_CHAT[:2])


@pytest.mark.parametrize(
    ("name", "before", "end"),
    [
        ("v1", ["[gMASK]", "<sop>"], "<eop>"),
        ("v2", ["[gMASK]", "sop"], "</s>"),
        ("v3", ["[gMASK]", "sop"], "</s>"),
        ("glm4", ["[gMASK]", "<sop>"], "<|endoftext|>"),
    ],
)
def test_plain_text_by_hand(name: str, before: list[str], end: str) -> None:
    ids, mask = encoder(name).encode([{"role": "text", "content": "Once upon a time <|user|>"}])
    tokens = encoder(name).tokenizer.convert_tokens_to_ids
    text = encoder(name).tokenizer.encode_texts(["Once upon a time <|user|>"])[0]
    assert ids == [*map(tokens, before), *text, tokens(end)]
    assert mask == [False, False] + [True] * (len(text) + 1)
    assert (encoder(name).after_text, encoder(name).text_key) == ((), ())
    alone = encoder(name).tokenizer("Once upon a time <|user|>")["input_ids"]
    assert alone == (ids[:-1] if name != "v1" else [*text, *ids[:2]]), "docs/tasks.md: as tokenizer(text)"


def test_the_words_for_tools_are_part_of_the_fingerprint(tmp_path: Path) -> None:
    folder = shutil.copytree(GOLDEN / "tok_glm4", tmp_path / "glm4")
    before = load_chat_encoder(folder)
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    assert before.fingerprint == encoder("glm4").fingerprint
    config["chat_template"] = config["chat_template"].replace("ChatGLM", "Somebody")
    file.write_text(json.dumps(config), encoding="utf-8")
    assert load_chat_encoder(folder).fingerprint != before.fingerprint
    file.unlink()
    assert load_chat_encoder(folder).fingerprint != before.fingerprint
