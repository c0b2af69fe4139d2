"""Conversations as models are served them: ids and masks against transformers' own rendering, over generated ones.

The templates below are short ones of our own with the habits of published families; where a folder with the originals
is at hand (TOOLKIT_TEMPLATES), those are tried too.
"""

import hashlib
import json
import os
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.unit.data_tools import run_config, trained_stretches, write_rows
from toolkit.config.schema import TooLong, TrainOn
from toolkit.data.tokenize import build_caches
from toolkit.messages import ModelError, RowError, reason_of
from toolkit.models.chat_template import TemplateChatEncoder

_LAST = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}"
)
_SPLIT = (
    "{% set why = m.reasoning_content or '' %}{% set text = m.content %}{% if '</think>' in text %}"
    "{% set why = text.split('</think>')[0].split('<think>')[-1].strip() %}"
    "{% set text = text.split('</think>')[-1].lstrip() %}{% endif %}"
)
_CALLS = "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
# Reasoning stays in the last turn; the last answer has a block of it, be it empty (Qwen3).
QWEN = (
    _LAST + "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}{% for m in messages %}"
    "{% if m.role == 'assistant' %}" + _SPLIT + "<|im_start|>assistant\n"
    "{% if loop.index0 > ns.last and (loop.last or why) %}<think>\n{{ why }}\n</think>\n\n{% endif %}{{ text }}"
) + (
    _CALLS + "{% elif m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# No token ends an answer but the next role's; reasoning stays in the last turn, elsewhere is an empty block.
GLM45 = (
    "[gMASK]<sop>" + _LAST + "{% if tools %}<|system|>\n{{ tools | tojson }}{% endif %}{% for m in messages %}"
    "{% if m.role == 'assistant' %}" + _SPLIT + "<|assistant|>\n"
    "<think>{{ why if loop.index0 > ns.last }}</think>{% if text.strip() %}\n{{ text.strip() }}{% endif %}" + _CALLS
) + (
    "{% else %}<|{{ 'observation' if m.role == 'tool' else m.role }}|>\n{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# The prompt begins the reasoning, or ends it (GLM-4.7).
GLM47 = (
    GLM45.replace("<|assistant|>\n<think>{{ why if loop.index0 > ns.last }}</think>", "<|assistant|>WHY")
    .replace("WHY", "{{ '<think>' ~ why ~ '</think>' if why and loop.index0 > ns.last else '</think>' }}")
    .replace("%}<|assistant|>{% endif %}", "%}<|assistant|>THINK{% endif %}")
    .replace("THINK", "{{ '</think>' if enable_thinking is defined and not enable_thinking else '<think>' }}")
)
GLM4 = (
    "[gMASK]<sop>{% if tools %}<|system|>\n{{ tools | tojson }}{% endif %}{% for m in messages %}"
    "<|{{ 'observation' if m.role == 'tool' else m.role }}|>{% for c in m.tool_calls or [] %}{{ c.function.name }}\n"
    "{{ c.function.arguments | tojson }}{% else %}\n{{ m.content }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# The prompt ends with an empty thought, which answers are written without (Gemma 4).
GEMMA4 = (
    "<s>{% set thinks = enable_thinking is defined and enable_thinking %}"
    "{% if thinks %}<|turn>system\n<|think|>\n<turn|>\n{% endif %}"
    "{% for m in messages %}<|turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<turn|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|turn>model\n{{ '' if thinks else '<|channel>thought\n<channel|>' }}"
    "{% endif %}"
)
# Answers end in another way if others follow, calls in a third; the answer removes reasoning before calls (gpt-oss).
HARMONY = (
    "{% if tools %}<|start|>developer<|message|>{{ tools | tojson }}<|end|>{% endif %}{% for m in messages %}"
    "{% if m.role == 'assistant' %}{% set ns = namespace(later=false) %}{% for other in messages[loop.index:] %}"
    "{% if other.role == 'assistant' and not other.tool_calls %}{% set ns.later = true %}{% endif %}{% endfor %}"
    "{% if m.thinking and not ns.later and (loop.last or m.tool_calls) %}"
    "<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}{% if m.tool_calls %}"
    "{% if m.content %}<|start|>assistant<|channel|>commentary<|message|>{{ m.content }}<|end|>{% endif %}"
    "<|start|>assistant to={{ m.tool_calls[0].function.name }}<|message|>"
    "{{ m.tool_calls[0].function.arguments | tojson }}<|call|>{% else %}"
) + (
    "<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
    "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}{% endif %}{% else %}"
    "<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
# Reasoning is in the content, and marks include the prompt (SmolLM3).
SMOL = (
    "{% set off = '/no_think' in messages[0].content or (enable_thinking is defined and not enable_thinking) %}"
    "<|im_start|>system\n{{ off }}<|im_end|>\n{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}"
    "<|im_start|>assistant\n{{ '<think>\n\n</think>\n' if off }}{{ m.content.lstrip('\n') }}<|im_end|>\n"
    "{% endgeneration %}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{{ '<think>\n\n</think>\n' if off }}{% endif %}"
)


class Family(NamedTuple):
    """What is known of a template."""

    template: str | Path
    end: str
    no_place: frozenset[str] = frozenset()
    """What a conversation may not have with it."""
    kept: Path | None = None
    """The template to train with where its own removes the reasoning of every answer."""
    no_thinking: str = ""
    """What its prompt for an answer without reasoning has and its rendering of the answer lacks."""
    stops: tuple[str, ...] = ()
    """Tokens that end calls of tools."""
    thought: str = ""
    """What holds reasoning in the content of an answer, where the template has no key for it."""
    thought_end: str = "</think>"
    """What ends the reasoning of an answer."""


FOLDER = Path(os.environ.get("TOOLKIT_TEMPLATES") or Path(__file__).parents[3] / "shared" / "templates")
FOUND = Path(__file__).parents[1] / "golden" / "templates.json"
"""What scripts/compare_templates.py found."""
KEPT = Path(__file__).parents[2] / "toolkit" / "models" / "templates"
CHATML, LLAMA, EOS_R1 = "<|im_end|>", "<|eot_id|>", "<｜end▁of▁sentence｜>"
THINKS, TOOLS, BESIDE = frozenset({"reasoning"}), frozenset({"tools"}), frozenset({"text beside calls"})
FINAL = "<|channel|>final<|message|>"
PARALLEL, THINKS_BESIDE = frozenset({"parallel"}), frozenset({"reasoning and text beside calls"})
OURS = {
    "qwen": Family(QWEN, CHATML),
    "glm-4.5": Family(GLM45, "<|endoftext|>"),
    "glm-4.7": Family(GLM47, "<|endoftext|>"),
    "glm-4": Family(GLM4, "<|user|>", THINKS | BESIDE),
    "plain": Family(PLAIN, CHATML, THINKS | TOOLS),
    "gemma-4": Family(GEMMA4, "<turn|>", THINKS | TOOLS, no_thinking="<|channel>thought\n<channel|>"),
    "harmony": Family(HARMONY, "<|return|>", PARALLEL, stops=("<|call|>",), thought_end=FINAL),
    "smol": Family(SMOL, CHATML, TOOLS, thought="<think>\n{}\n</think>\n"),
}
PUBLISHED = {
    "gemma3": Family(FOLDER / "gemma3.jinja", "<end_of_turn>", THINKS | TOOLS),
    "glm4moe": Family(FOLDER / "glm4moe.jinja", "<|endoftext|>"),
    "llama3": Family(FOLDER / "llama3.jinja", LLAMA, THINKS | TOOLS),
    "llama3_1": Family(FOLDER / "llama3_1.jinja", LLAMA, THINKS | BESIDE | {"parallel"}),
    "llama3_2": Family(FOLDER / "llama3_2.jinja", LLAMA, THINKS | BESIDE | {"parallel"}),
    "phi3": Family(FOLDER / "phi3.jinja", "<|endoftext|>", THINKS | TOOLS),
    "qwen2_5": Family(FOLDER / "qwen2_5.jinja", CHATML, THINKS),
    "qwen3": Family(FOLDER / "qwen3.jinja", CHATML),
    "qwen3_5_nothink": Family(FOLDER / "qwen3_5_nothink.jinja", CHATML),
    "qwen3_5_think": Family(FOLDER / "qwen3_5_think.jinja", CHATML),
    "qwen3_instruct_2507": Family(FOLDER / "qwen3_instruct_2507.jinja", CHATML, THINKS),
    # Not in the folder that we were given; anyone may put them there (tests/golden/templates.json has their sources).
    "glm4_0414": Family(FOLDER / "glm4_0414.jinja", "<|user|>", THINKS | TOOLS),
    "glm_z1": Family(FOLDER / "glm_z1.jinja", "<|user|>", TOOLS, KEPT / "glm_z1.jinja"),
    "glm46": Family(FOLDER / "glm46.jinja", "<|endoftext|>"),
    "glm47": Family(FOLDER / "glm47.jinja", "<|endoftext|>"),
    "glm5": Family(FOLDER / "glm5.jinja", "<|endoftext|>"),
    "glm_ocr": Family(FOLDER / "glm_ocr.jinja", "<|endoftext|>"),
    "deepseek_r1": Family(FOLDER / "deepseek_r1.jinja", EOS_R1, TOOLS, KEPT / "deepseek_r1.jinja"),
    "mistral": Family(FOLDER / "mistral.jinja", "</s>", THINKS | BESIDE | {"system"}),
    "mistral_small_3_1": Family(FOLDER / "mistral_small_3_1.jinja", "</s>", THINKS | BESIDE),
    "mistral_small_3_2": Family(FOLDER / "mistral_small_3_2.jinja", "</s>", THINKS | BESIDE),
    "ministral_3": Family(FOLDER / "ministral_3.jinja", "</s>", THINKS),
    "smollm2": Family(FOLDER / "smollm2.jinja", CHATML, THINKS | TOOLS),
    "smollm3": Family(FOLDER / "smollm3.jinja", CHATML, TOOLS, thought="<think>\n{}\n</think>\n"),
    "olmo3": Family(FOLDER / "olmo3.jinja", CHATML, THINKS),
    "gpt_oss": Family(
        FOLDER / "gpt_oss.jinja", "<|return|>", PARALLEL | THINKS_BESIDE, stops=("<|call|>",), thought_end=FINAL
    ),
    "seed_oss": Family(FOLDER / "seed_oss.jinja", "<seed:eos>", thought_end="</seed:think>"),
    "gemma4": Family(
        FOLDER / "gemma4.jinja",
        "<turn|>",
        THINKS | BESIDE,
        no_thinking="<|channel>thought\n<channel|>",
        stops=("<|tool_response>",),
    ),
    "gemma4_thinking": Family(
        *(FOLDER / "gemma4.jinja", "<turn|>", TOOLS, KEPT / "gemma4.jinja", "<|channel>thought\n<channel|>"),
        thought_end="<channel|>",
    ),
    "qwen3_6": Family(FOLDER / "qwen3_6.jinja", CHATML),
}
KNOWN = OURS | {name: one for name, one in PUBLISHED.items() if Path(one.template).is_file()}
MARKS = (
    r"<\|[a-z_]+\|>|<｜[^｜'\"]+｜>|\[gMASK\]|<sop>|<(?:start|end)_of_turn>|\[/?[A-Z_]+\]"
    r"|<\|[a-z_]+>|<[a-z_]+\|>|<\|\"\|>|</?seed:[a-z_:]+>"
)
ANSWER_MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")


def tokenizer_of(family: Family) -> Any:
    """Return a byte-level tokenizer with the tokens that a template names."""
    text = family.template if isinstance(family.template, str) else family.template.read_text("utf-8")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    names = sorted({*re.findall(MARKS, text), "<|user|>", "<|observation|>", family.end})
    backend.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in (*names, "<s>")])
    backend.add_tokens([AddedToken(name, normalized=False, special=False) for name in ANSWER_MARKS if name in text])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token=family.end, chat_template=text)


SAID = ["Yes.", "你好！", " a b ", "one\n\ntwo", "1 < 2", '{"a": 1}', "x" * 40, "No\n", "\nLater.", "🙂"]
_PROPERTIES = {"city": {"type": "string", "description": "Where"}, "days": {"type": "number"}}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "?",
        "parameters": {"type": "object", "properties": _PROPERTIES, "required": ["city"]},
    },
}
Chat = tuple[list[dict[str, Any]], list[Any] | None, set[str]]


def chats(seed: int, count: int, said: Sequence[str] = SAID) -> Iterator[Chat]:
    """Yield conversations, their tools, and what they have: turns x tools x reasoning x system x empty contents."""
    chance = random.Random(seed)
    for _ in range(count):
        has: set[str] = set()
        messages: list[dict[str, Any]] = []
        if chance.random() < 0.4:
            has.add("system")
            messages.append({"role": "system", "content": chance.choice(said)})
        thinks, calls = chance.choice(["no", "no", "field", "text", "some"]), chance.random() < 0.4
        for _ in range(chance.choice([1, 1, 2, 3, 4])):
            messages.append({"role": "user", "content": chance.choice(said)})
            for _ in range(chance.choice([0, 1, 1, 2]) if calls else 0):
                num_calls = chance.choice([1, 1, 1, 2])
                has |= {"tools", *(["parallel"] if num_calls > 1 else [])}
                arguments: dict[str, Any] = {"city": chance.choice(said), "days": chance.choice([1, 2.5, None, [1]])}
                named = [{"type": "function", "function": {"name": "weather", "arguments": arguments}}] * num_calls
                content = chance.choice(["", "", "Let me see."])
                messages.append(answer(chance, thinks, content) | {"tool_calls": named})
                has |= BESIDE if messages[-1]["content"] else set()
                is_thought = "reasoning_content" in messages[-1] or "</think>" in messages[-1]["content"]
                has |= THINKS_BESIDE if content and is_thought else set()
                messages += [{"role": "tool", "content": chance.choice(said)} for _ in named]
            messages.append(answer(chance, thinks, chance.choice(said)))
            if chance.random() < 0.1:
                messages[-1]["loss"] = False
        has |= THINKS if any("reasoning_content" in m and m.get("loss", True) for m in messages) else set()
        yield messages, [WEATHER] if calls else None, has


def answer(chance: random.Random, thinks: str, content: str) -> dict[str, Any]:
    """Return an answer that thinks in one way or another, or not at all."""
    message = {"role": "assistant", "content": content}
    how = chance.choice(["no", "field", "text"]) if thinks == "some" else thinks
    thought = chance.choice(["Hm.", "想一想", "first\nsecond"])
    if how == "field":
        message["reasoning_content"] = thought
    elif how == "text":
        message["content"] = f"<think>\n{thought}\n</think>\n\n{content}"
    return message


def with_thought(message: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Return a message with its reasoning where a template of this family looks for it."""
    thought, content = message.get("reasoning_content"), message["content"]
    if thought and family.thought:
        return {**message, "content": family.thought.format(thought) + content}
    if family.thought_end != "</think>" and content.startswith("<think>"):
        thought, _, content = content.removeprefix("<think>\n").partition("\n</think>\n\n")
        return {**message, "reasoning_content": thought, "content": content}
    return {**message}


def rendered(tokenizer: Any, messages: list[dict[str, Any]], tools: Any, **mode: bool) -> str:
    """Return what transformers makes of a conversation; calls get the ids that Mistral's template asks for."""
    changed, count, results = [], 0, 0
    for message in messages:
        if message.get("tool_calls") and re.search(r"\[TOOL_CALLS\]|tool_call_id", tokenizer.chat_template):
            calls = [{**call, "id": f"call{count + n:05}"} for n, call in enumerate(message["tool_calls"])]
            count += len(calls)
            message = {**message, "tool_calls": calls}
        elif message["role"] == "tool":
            message = {**message, "tool_call_id": f"call{results:05}"}
            results += 1
        changed.append(message)
    text = tokenizer.apply_chat_template(changed, tools=tools, tokenize=False, **mode)
    assert isinstance(text, str)
    return text


def expected(
    tokenizer: Any, messages: list[dict[str, Any]], tools: Any, family: Family | None = None
) -> tuple[str, list[str]]:
    """Return a conversation's text, and the trained parts of it by their definition: what the model writes after the
    prompt that it is asked with, up to the token that ends it.
    """
    end, whole, parts = tokenizer.eos_token, rendered(tokenizer, messages, tools), []
    prompt = rendered(tokenizer, messages[:-1], tools, add_generation_prompt=True)
    if family and (family.no_thinking or family.stops) and not whole.startswith(prompt) and not family.kept:
        # Of the answer, what follows the prompt in a conversation of one question; before it, the prompt as served.
        question = [{"role": "user", "content": "q"}]
        asked = rendered(tokenizer, question, tools, add_generation_prompt=True).removesuffix(family.no_thinking)
        said = rendered(tokenizer, [*question, messages[-1]], tools)
        assert said.startswith(asked) and [m for m in messages if m.get("loss", m["role"] == "assistant")] == [
            messages[-1]
        ]
        said = said[len(asked) :]
        return prompt + said, [said[: said.index(end) + len(end)] if end in said else said.rstrip()]
    for index, message in enumerate(messages):
        if message["role"] != "assistant" or not message.get("loss", True):
            continue
        after = rendered(tokenizer, messages[: index + 1], tools)
        after = after if whole.startswith(after) else after.removesuffix(end)
        assert whole.startswith(after), "it is trained as it is written"
        prompts = (
            rendered(tokenizer, messages[:index], tools, add_generation_prompt=True, **mode)
            for mode in ({}, {"enable_thinking": False}, {"enable_thinking": True})
        )
        said = after[len(next(prompt for prompt in prompts if after.startswith(prompt))) :]
        following = re.match(r"<\|(user|observation)\|>", whole[len(after) :])
        if end in said:
            said = said[: said.index(end) + len(end)] if not said.endswith(end) else said
        elif following and not re.search(rf"({MARKS})\s*$", said):
            said += following[0]
        elif index == len(messages) - 1 and not said.endswith(family.stops if family and family.stops else "\0"):
            said += end
        parts.append(said)
    return whole, parts


def text_of(tokenizer: Any, ids: list[int]) -> str:
    text = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text


class Compared(NamedTuple):
    """What a comparison with a template's own renderings found, all of it equal."""

    conversations: int
    rejected: int
    """Of these, as they have what the template does not write."""
    samples: int
    answers: int
    digest: str
    """Of all ids and masks."""


def compared(family: Family, seed: int, count: int) -> Compared:
    """Compare training's ids and masks with what the family's own template makes of generated conversations."""
    served = tokenizer_of(family)
    tokenizer = tokenizer_of(family._replace(template=family.kept)) if family.kept else served
    encoder = TemplateChatEncoder(tokenizer)
    num_conversations = num_rejected = num_samples = num_answers = 0
    digest = hashlib.sha256()
    for messages, tools, has in chats(seed, count):
        answers = [i for i, m in enumerate(messages) if m["role"] == "assistant" and m.get("loss", True)]
        if not answers:
            continue  # such a row is dropped, and counted
        num_conversations += 1
        tools = None if family.kept else tools
        if has & family.no_place:
            with pytest.raises(RowError):
                for part in encoder.divide(messages, tools):
                    encoder.encode(part, tools)
            num_rejected += 1
            continue
        trained: list[int] = []
        for part in encoder.divide(messages, tools):
            listed = [with_thought(message, family) for message in part]
            trained += [i for i, m in enumerate(listed) if m["role"] == "assistant" and m.get("loss", True)]
            ids, mask = encoder.encode(part, tools)
            said = [text_of(tokenizer, stretch) for stretch in trained_stretches(ids, mask)]
            whole, parts = expected(tokenizer, listed, tools, family)
            assert text_of(tokenizer, ids) in (whole, whole.rstrip(), whole + family.end), listed
            assert said == parts, listed
            if family.kept:
                before = text_of(tokenizer, ids[: mask.index(True)])
                thinks = not family.no_thinking or "reasoning_content" in listed[trained[-1]]
                asks = {"add_generation_prompt": True, "enable_thinking": thinks}
                prompt = rendered(served, listed[: trained[-len(parts)]], tools, **asks)
                is_whole = family.no_thinking or "</think>" in said[0]
                assert before == prompt if is_whole else prompt.startswith(before), listed
            num_samples, num_answers = num_samples + 1, num_answers + len(parts)
            digest.update(json.dumps([ids, mask]).encode())
        assert sorted(trained) == answers, "each answer is trained once"
    if "strftime_now" in served.chat_template:  # today's date is in its prompts
        digest = hashlib.sha256()
    return Compared(num_conversations, num_rejected, num_samples, num_answers, digest.hexdigest())


def renderings(family: Family, name: str, count: int = 300) -> Iterator[str]:
    """Yield what a template writes of generated conversations and of the prompts for their last answers, in each mode
    of reasoning; `name` of the named template, which is to write the same.
    """
    tokenizer = tokenizer_of(family)
    for messages, tools, has in chats(1, count):
        if has & family.no_place or (name == "chatml_tools" and "system" not in has):  # Qwen2.5's has a default one
            continue
        for mode in ({}, {"enable_thinking": False}):
            yield rendered(tokenizer, messages, tools, **mode)
            yield rendered(tokenizer, messages[:-1], tools, add_generation_prompt=True, **mode)


def rendering_digest(family: Family, name: str) -> str:
    """Return a digest of the first renderings."""
    return hashlib.sha256(json.dumps([*renderings(family, name)]).encode()).hexdigest()


@pytest.mark.parametrize("name", KNOWN)
def test_what_is_trained_is_what_is_served(name: str) -> None:
    found = compared(KNOWN[name], len(name), 200)
    assert found.answers > 100
    recorded = json.loads(FOUND.read_text("utf-8"))["templates"].get(name)
    if recorded and recorded["sha256"] == hashlib.sha256(Path(KNOWN[name].template).read_bytes()).hexdigest():
        assert found._asdict() == recorded["few"], "raise CODE_VERSION, then scripts/compare_templates.py"


def test_thousands_of_conversations_were_compared_with_each_published_template() -> None:
    recorded = json.loads(FOUND.read_text("utf-8"))["templates"]
    assert recorded.keys() == PUBLISHED.keys()
    for one in recorded.values():
        assert one["many"]["differences"] == 0 and one["many"]["answers"] > 1000 and one["source"] and one["sha256"]


@pytest.mark.parametrize("name", KNOWN)
def test_reasoning_can_be_left_out_of_the_loss(name: str) -> None:
    family = KNOWN[name]
    tokenizer = tokenizer_of(family._replace(template=family.kept or family.template))
    everything, answers = TemplateChatEncoder(tokenizer), TemplateChatEncoder(tokenizer, train_thinking=False)
    assert everything.fingerprint != answers.fingerprint
    for messages, tools, has in chats(len(name) + 1, 60):
        if has & family.no_place:
            continue
        for part in everything.divide(messages, tools):
            ids, mask = everything.encode(part, tools)
            same_ids, fewer = answers.encode(part, tools)
            assert ids == same_ids
            whole, rest = (trained_stretches(ids, one) for one in (mask, fewer))
            said = [m for m in part if m["role"] == "assistant" and m.get("loss", True)]
            for message, one, other in zip(said, whole, rest, strict=True):
                text = text_of(tokenizer, other)
                thought = text_of(tokenizer, one).removesuffix(text)
                has_channel = family.thought_end == FINAL and message.get("tool_calls")  # in which it writes the text
                assert not thought.strip() or thought.strip().endswith(family.thought_end) or has_channel
                assert not thought or family.thought_end not in text
                answered, content = text.split(family.thought_end)[-1].strip(), message["content"].split("</think>")[-1]
                assert answered.startswith(content.strip()) or (has_channel and content.strip() in answered)


def test_each_answer_is_in_the_cache_once(tmp_path: Path, said: list[str]) -> None:
    from toolkit.tasks.language_data import _print_report  # with torch and deepspeed, which no other test here needs

    def row(turns: int) -> dict[str, Any]:
        pair = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "reasoning_content": "Hm."}]
        return {"messages": [{"role": "system", "content": "s"}, *pair * turns]}

    tokenizer = tokenizer_of(OURS["glm-4.5"])
    encoder = TemplateChatEncoder(tokenizer)
    cfg = run_config(tmp_path, write_rows(tmp_path / "d.jsonl", [row(1), row(3)]))
    cfg.data.max_length = 200
    train, _, report = build_caches(cfg, encoder)
    assert (report.divided, report.divided_samples, len(train)) == (1, 3, 4)
    trained = [trained_stretches(ids.tolist(), mask.tolist()) for ids, mask in map(train.__getitem__, range(4))]
    answered = "\n<think>Hm.</think>a<|endoftext|>"
    assert [[text_of(tokenizer, part) for part in parts] for parts in trained] == [[answered]] * 4
    assert [train.where(index) for index in range(4)] == [f"{tmp_path}/d.jsonl:{line}" for line in (1, 2, 2, 2)]
    _print_report(report, cfg.data)
    assert any(line.startswith("1 conversations became 3 samples: the chat template") for line in said)
    cfg.data.max_length, cfg.data.too_long = int(train.lengths()[-1]) - 1, TooLong.split
    shorter, _, report = build_caches(cfg, encoder)
    assert (len(shorter), report.split, report.dropped) == (4, 0, {}), "context of untrained turns leaves first"
    assert int(shorter.lengths().max()) < int(train.lengths().max())
    cfg.data.train_on = TrainOn.last
    assert len(build_caches(cfg, encoder).train) == 2


def test_reasoning_that_a_template_drops_is_an_error() -> None:
    """As DeepSeek-R1's does with that of every answer."""
    dropping = PLAIN.replace("m.content", "m.content.split('</think>')[-1]")
    encoder = TemplateChatEncoder(tokenizer_of(Family(dropping, CHATML)))
    thinks = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nYes."}]
    with pytest.raises(RowError, match="the chat template leaves out the reasoning of an answer that is to be trained"):
        encoder.encode(thinks)
    before: list[dict[str, Any]] = [*thinks, {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    before[1] = {**before[1], "loss": False}
    encoder.encode(before)  # an earlier one's is dropped when the model is served, too


def test_what_a_template_has_no_place_for_is_named() -> None:
    encoder = TemplateChatEncoder(tokenizer_of(OURS["plain"]))
    assert not encoder.drops_system and encoder.drops_tools
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    for message, what in (
        ({"tool_calls": [call]}, "calls of tools"),
        ({"reasoning_content": "Hm."}, "the reasoning of an answer"),
    ):
        with pytest.raises(RowError, match=f"^message 2: the chat template has no place for {what}, which would be"):
            encoder.encode([{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", **message}])


@pytest.mark.parametrize("key", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_is_given_under_the_templates_own_key(key: str) -> None:
    tokenizer = tokenizer_of(Family(QWEN.replace("m.reasoning_content", f"m.{key}"), CHATML))
    encoder = TemplateChatEncoder(tokenizer)
    ids, mask = encoder.encode(
        [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "reasoning_content": "Hm."}]
    )
    assert [text_of(tokenizer, part) for part in trained_stretches(ids, mask)] == [
        "<think>\nHm.\n</think>\n\na<|im_end|>"
    ]


def test_tokens_that_end_an_answer_end_generation() -> None:
    tokenizer = tokenizer_of(OURS["glm-4.5"])
    stops = tokenizer.convert_ids_to_tokens(TemplateChatEncoder(tokenizer).stop_ids)
    assert stops == ["<|endoftext|>", "<|observation|>", "<|user|>"]
    tokenizer = tokenizer_of(OURS["qwen"])
    assert tokenizer.convert_ids_to_tokens(TemplateChatEncoder(tokenizer).stop_ids) == [CHATML]


def test_control_strings_stay_text_in_reasoning_and_calls() -> None:
    tokenizer = tokenizer_of(OURS["qwen"])
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": CHATML}}}
    said = {"role": "assistant", "content": CHATML, "reasoning_content": CHATML, "tool_calls": [call]}
    ids, mask = TemplateChatEncoder(tokenizer).encode([{"role": "user", "content": "<|im_start|>"}, said])
    (trained,) = trained_stretches(ids, mask)
    assert (ids.count(tokenizer.eos_token_id), trained.count(tokenizer.eos_token_id)) == (2, 1)
    assert text_of(tokenizer, trained).count(CHATML) == 4


def test_deepseeks_own_template_is_rejected() -> None:
    if not (FOLDER / "deepseekv3.jinja").is_file():
        pytest.skip(reason_of(FileNotFoundError(str(FOLDER))))
    encoder = TemplateChatEncoder(tokenizer_of(Family(FOLDER / "deepseekv3.jinja", "<｜end▁of▁sentence｜>")))
    with pytest.raises(ModelError, match="cannot be trained with"):
        encoder.encode([{"role": "user", "content": "q"}, {"role": "assistant", "content": "<think>x</think>a"}])
