"""Answers found by control tokens against answers found by comparing renderings: the same ids and masks."""

import random
import re
from collections.abc import Sequence
from typing import Any

import pytest

from tests.unit.test_templates import CHATML, KNOWN, LLAMA, OURS, PLAIN, SAID, Family, chats, tokenizer_of
from toolkit.messages import ModelError, RowError
from toolkit.models.chat_template import TemplateChatEncoder
from toolkit.models.span_tokenizer import SpanTokenizer

ADVERSARIAL = [
    *("<|im_start|>assistant\n", "<|im_end|>", "<|assistant|>", "<|user|>\nTwo?<|assistant|>", "<|endoftext|>", "<s>"),
    *("<|start_header_id|>assistant<|end_header_id|>\n\n", LLAMA, "<start_of_turn>model\n", "<end_of_turn>"),
    *("<think>", "</think>", "a</think>b", "<think>\n\n</think>\n\n", "<think></think>x", "x<think>y</think>z"),
    *("<tool_response>\nx\n</tool_response>", "</tool_response>", '<tool_call>{"name": 1}</tool_call>', "/nothink"),
    *(
        "",
        " ",
        "\n",
        "\n\n",
        "\t",
        "\u3000",
        "\u2028",
        " a",
        "a ",
        "\n\na\n\n",
        "a\n",
        "0",
        "{}",
        "None",
        "user",
        "system",
    ),
    *(
        "odd",
        "an odd one",
        "long" * 40,
        "e\u0301",
        "\u202eabc",
        "\U0001f469\u200d\U0001f4bb",
        "\ufdd0x",
        "\x00",
        "{{ x }}",
        "\ufeff",
    ),
    *SAID,
]
ODD = PLAIN.replace("{{ m.content | trim }}", "{{ m.content }}")
LOOKING = {
    "says how many messages follow": "{{ messages | length }}" + ODD,
    "marks the last": ODD.replace("<|im_end|>", "{{ '!' if loop.last }}<|im_end|>"),
    "trims all but the last": ODD.replace("m.content", "(m.content if loop.last else m.content | trim)"),
    "asks for a word": ODD.replace("m.content", "('X' if 'odd' in m.content and not loop.last else '') + m.content"),
    "asks the last for a word": "{% if 'odd' in messages[-1].content %}?{% endif %}" + ODD,
    "asks any for a word": "{% for m in messages %}{{ '?' if m.content.startswith('odd') }}{% endfor %}" + ODD,
    "asks for empty texts": ODD.replace("m.content", "(m.content or ('' if loop.last else 'nothing'))"),
    "asks the next": ODD.replace(
        "m.content", "(m.content ~ ('?' if loop.nextitem and 'odd' in loop.nextitem.content))"
    ),
    "opens otherwise": ODD.replace("{{ m.role }}\n", "{{ m.role }}{{ ' odd' if 'odd' in m.content }}\n"),
    "drops empty turns": ODD.replace(
        "<|im_start|>{{", "{% if not m.content.strip() %}{% continue %}{% endif %}<|im_start|>{{"
    ),
}


def slow_encoder(tokenizer: Any, train_thinking: bool) -> TemplateChatEncoder:
    """Return an encoder that compares renderings and asks for the characters of each token, each time."""
    encoder = TemplateChatEncoder(tokenizer, train_thinking)
    encoder.finder.openings, encoder.span_tokenizer = (
        None,
        SpanTokenizer(tokenizer, None, encoder.shield, encoder.traits.call_ends),
    )
    return encoder


def encoded(encoder: TemplateChatEncoder, parts: list[Any], tools: Any) -> Any:
    """Return ids and masks, or why there are none."""
    try:
        return encoder.encode_many(parts, [tools] * len(parts))
    except (RowError, ModelError) as error:
        return str(error)


def check(
    tokenizer: Any, seed: int, count: int, said: Sequence[str] = ADVERSARIAL, train_thinking: bool = True
) -> tuple[int, int]:
    """Compare the two on generated conversations; return how many were encoded, and how many in one rendering."""
    fast, slow = TemplateChatEncoder(tokenizer, train_thinking), slow_encoder(tokenizer, train_thinking)
    num_encoded = num_fast = 0
    for messages, tools, _ in chats(seed, count, said):
        try:
            parts = fast.divide(messages, tools)
        except RowError as error:
            with pytest.raises(RowError, match=re.escape(str(error))):
                slow.divide(messages, tools)
            continue
        known = fast.finder.openings.trusted.copy() if fast.finder.openings else set()
        plain = [[dict(message) for message in part] for part in parts]
        assert plain == slow.divide(messages, tools)
        wanted = encoded(slow, plain, tools)
        assert encoded(fast, parts, tools) == wanted, (messages, tools)
        num_encoded += not isinstance(wanted, str)
        forms = (
            [fast.finder.openings.forms(part, tools, fast.traits.reasoning_key) for part in parts]
            if fast.finder.openings
            else []
        )
        num_fast += bool(forms) and set().union(*forms) <= known
    return num_encoded, num_fast


@pytest.mark.parametrize("name", KNOWN)
def test_ids_and_masks_are_those_of_comparing(name: str) -> None:
    tokenizer = tokenizer_of(KNOWN[name])
    few = random.Random(name).sample(ADVERSARIAL, 6)  # so that what they have recurs
    counts = [check(tokenizer, 1, 150), check(tokenizer, 2, 150, few)]
    num_encoded, num_fast = map(sum, zip(*counts, strict=True))
    # Gemma 4's answers each follow a prompt that is rendered in another mode (`no_thinking`).
    assert num_encoded > 60 and (num_fast >= 5 or name in ("phi3", "gemma-4"))


@pytest.mark.parametrize("name", ["qwen", "glm-4.5", "glm-4.7"])
def test_ids_and_masks_without_reasoning_in_the_loss(name: str) -> None:
    num_encoded, _ = check(tokenizer_of(OURS[name]), 3, 100, train_thinking=False)
    assert num_encoded > 60


@pytest.mark.parametrize("habit", LOOKING)
def test_templates_that_look_at_other_messages(habit: str) -> None:
    check(tokenizer_of(Family(LOOKING[habit], CHATML)), 4, 300, ["a", "b", "odd", " a", ""])
