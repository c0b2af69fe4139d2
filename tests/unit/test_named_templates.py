"""Chat templates by name: what they write, which tokenizers they suit, what errors suggest."""

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from tests.unit.test_templates import CHATML, FOUND, PUBLISHED, chats, rendered, rendering_digest, tokenizer_of
from toolkit.config import files, schema
from toolkit.messages import ModelError, RowError
from toolkit.models import load_chat_encoder, load_tokenizer
from toolkit.models.chat import TOKENIZER, tokenizer_identity
from toolkit.models.chat_template import TemplateChatEncoder
from toolkit.models.named_templates import TEMPLATES, control_tokens, templates_taking, use_template

CHATML_TOKENS = ["<|im_start|>", CHATML]
GLM4 = FOUND.parent / "chatglm" / "tok_glm4"
"""The tokenizer of glm-4-9b-chat, with a small vocabulary and the published chat template."""


def base_tokenizer(*tokens: str) -> Any:
    """Return the tokenizer of a base model: control tokens and an end token, without a chat template."""
    tokenizer = tokenizer_of(PUBLISHED["mistral"]._replace(template="", end="<|endoftext|>"))
    tokenizer.add_tokens([*tokens], special_tokens=True)
    tokenizer.chat_template = None
    return tokenizer


def test_names_in_the_schema_and_on_disk_are_those_of_the_table() -> None:
    assert {path.stem for path in files.named_chat_template("").parent.glob("*.jinja")} == TEMPLATES.keys()
    assert f"a name ({', '.join(sorted(TEMPLATES))})" in Path(inspect.getfile(schema)).read_text("utf-8")


def _chatml(messages: list[dict[str, Any]]) -> str:
    return "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)


def _mistral(messages: list[dict[str, Any]]) -> str:
    texts = [m["content"] for m in messages]
    if messages[0]["role"] == "system":
        texts[:2] = [f"{texts[0]}\n\n{texts[1]}"]
    pairs = zip(texts[::2], texts[1::2], strict=True)
    return "<s>" + "".join(f"[INST] {asked} [/INST]{said}</s>" for asked, said in pairs)


def _alpaca(messages: list[dict[str, Any]]) -> str:
    heads = {"system": "", "user": "### Instruction:\n", "assistant": "### Response:\n"}
    ends = {"assistant": "</s>"}
    return "<s>" + "".join(f"{heads[m['role']]}{m['content']}{ends.get(m['role'], '')}\n\n" for m in messages)


@pytest.mark.parametrize(("name", "definition"), [("chatml", _chatml), ("mistral", _mistral), ("alpaca", _alpaca)])
def test_templates_without_a_published_file_write_their_definition(
    name: str, definition: Callable[[list[dict[str, Any]]], str]
) -> None:
    tokenizer = base_tokenizer(*CHATML_TOKENS, "</s>")
    tokenizer.eos_token = "</s>"
    use_template(tokenizer, name)
    compared = [messages for messages, _, has in chats(3, 200) if not has & {"tools", "reasoning"}]
    assert len(compared) > 50
    for messages in compared:
        assert rendered(tokenizer, messages, None) == definition(messages)


def test_the_others_write_what_was_compared_with_the_published_ones() -> None:
    """scripts/compare_templates.py compares them with the files themselves."""
    recorded = json.loads(FOUND.read_text("utf-8"))["named"]
    assert (
        recorded.keys() | {*("chatml", "mistral", "alpaca", "deepseek_r1", "deepseek_v3_2", "gemma4", "glm4", "glm_z1")}
        == TEMPLATES.keys()
    )
    for name, entry in recorded.items():
        assert entry["differences"] == 0 and entry["renderings"] > 1000
        family = PUBLISHED[entry["published"]]
        assert rendering_digest(family._replace(template=files.named_chat_template(name)), name) == entry["digest"]


def test_deepseek_v3_2_writes_what_the_models_program_writes() -> None:
    """encoding/encoding_dsv32.py of deepseek-ai/DeepSeek-V3.2, as copied by github.com/vllm-project/vllm (026ddf88)."""
    begin, end = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
    tokenizer = base_tokenizer("<｜User｜>", "<｜Assistant｜>", begin, end)
    use_template(tokenizer, "deepseek_v3_2")
    num_thoughts = 0
    for messages, tools, _ in chats(4, 300):
        if tools or any("</think>" in m["content"] for m in messages):
            continue
        last = max(index for index, message in enumerate(messages) if message["role"] == "user")
        expected = begin
        for index, message in enumerate(messages):
            thought = message.get("reasoning_content") if index > last else None
            num_thoughts += bool(thought)
            opening = {"system": "", "user": "<｜User｜>", "assistant": "<｜Assistant｜>"}[message["role"]]
            opening += {"assistant": f"<think>{thought}</think>" if thought else "</think>"}.get(message["role"], "")
            expected += opening + message["content"] + (end if message["role"] == "assistant" else "")
        assert rendered(tokenizer, messages, None) == expected
        for thinks, asks in ((False, "</think>"), (True, "<think>")):
            prompt = rendered(tokenizer, messages[:-1], None, add_generation_prompt=True, enable_thinking=thinks)
            assert prompt.endswith(f"<｜User｜>{messages[last]['content']}<｜Assistant｜>{asks}")
    assert num_thoughts > 20


def _glm4_turns(messages: list[dict[str, Any]], tools: list[Any] | None) -> list[dict[str, Any]]:
    """Return a conversation as glm-4-9b-chat's template expects it: tools in the first system message, calls as texts
    under the tool's name.
    """
    turns: list[dict[str, Any]] = [{"role": "system", "content": "", "tools": tools}] if tools else []
    for message in messages:
        role = "observation" if message["role"] == "tool" else message["role"]
        turns.append({"role": role, "content": message["content"], "metadata": message.get("metadata", "")})
        for call in message.get("tool_calls", []):
            arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
            turns.append({"role": role, "content": arguments, "metadata": call["function"]["name"]})
    return turns


def test_glm4_writes_and_trains_what_glm_4_9b_chat_does(tmp_path: Path) -> None:
    """Its published template writes the same text; its own format, compared with the original tokenizer in
    tests/parity, has the same ids and mask.
    """
    official = json.loads((GLM4 / "tokenizer_config.json").read_text("utf-8"))["chat_template"]
    (tmp_path / "official.jinja").write_text(official, "utf-8")
    published, tokenizer = (load_tokenizer(GLM4, chat_template=name) for name in (f"{tmp_path}/official.jinja", "glm4"))
    own, encoder = load_chat_encoder(GLM4, original_labels=False), TemplateChatEncoder(tokenizer)
    call = {"role": "assistant", "content": '{"q": "天气"}', "metadata": "search"}
    called = [{"role": "user", "content": "问"}, call]
    found, compared = set[str](), 0
    for messages, tools, has in [(called, None, {"metadata"}), *chats(5, 1000)]:
        if any("reasoning_content" in message for message in messages):
            continue
        compared, found = compared + 1, found | has
        assert rendered(tokenizer, messages, tools) == rendered(published, _glm4_turns(messages, tools), None)
        prompt = rendered(published, _glm4_turns(messages[:-1], tools), None, add_generation_prompt=True)
        assert rendered(tokenizer, messages[:-1], tools, add_generation_prompt=True) == prompt
        if messages[-1].get("loss", True):
            assert encoder.divide(messages, tools) == own.divide(messages, tools)
            assert encoder.encode(messages, tools) == own.encode(messages, tools)
    assert compared > 600 and {"metadata", "system", "tools", "parallel", "text beside calls"} <= found
    with pytest.raises(RowError, match="no tool of type python here"):
        encoder.encode(called, [{"type": "python"}])


@pytest.mark.parametrize("name", TEMPLATES)
def test_each_takes_what_the_table_says_and_trains_answers_up_to_their_end(name: str) -> None:
    tokenizer = base_tokenizer(*control_tokens(name))
    use_template(tokenizer, name)
    encoder = TemplateChatEncoder(tokenizer)
    takes = ({"system", "tools", "tool_calls"} - encoder.traits.missing) | (
        {"reasoning"} if encoder.traits.reasoning_key else set()
    )
    assert takes == TEMPLATES[name].takes - {"tool", "text", "parallel"}
    assert ("tools" in takes) == (not encoder.traits.missing & {"tool", "text"} and "tools" in TEMPLATES[name].takes)
    end = TEMPLATES[name].end
    assert not end or (tokenizer.eos_token == end and tokenizer.eos_token_id in encoder.stop_ids)
    ids, mask = encoder.encode([{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}])
    assert mask[-1] and ids[-1] in encoder.stop_ids
    assert name in templates_taking(tokenizer, TEMPLATES[name].takes)


@pytest.mark.parametrize("name", [name for name, template in TEMPLATES.items() if template.begin])
def test_conversations_begin_with_the_templates_own_token(name: str, tmp_path: Path) -> None:
    """Also where the base has another; the exported tokenizer has it as its BOS, which the exported template names."""
    begin, chat = TEMPLATES[name].begin, [{"role": "user", "content": f"q{TEMPLATES[name].begin}"}]
    tokenizer, family = base_tokenizer(*control_tokens(name)), base_tokenizer(*control_tokens(name))
    tokenizer.bos_token = "<|endoftext|>"
    family.bos_token, family.eos_token = begin, TEMPLATES[name].end
    before = tokenizer_identity(family)
    for one in (tokenizer, family):
        use_template(one, name)
    assert {part for part, digest in tokenizer_identity(family).items() if digest != before[part]} == {
        f"{TOKENIZER}chat template"
    }
    ids = TemplateChatEncoder(tokenizer).prompt(chat)
    assert ids == TemplateChatEncoder(family).prompt(chat)
    assert ids[0] == tokenizer.convert_tokens_to_ids(begin) and ids.count(ids[0]) == 1, "that in a text stays text"
    tokenizer.save_pretrained(tmp_path)
    assert rendered(PreTrainedTokenizerFast.from_pretrained(tmp_path), chat, None).startswith(begin)


def test_a_vocabulary_without_the_tokens_is_an_error_that_names_others() -> None:
    tokenizer = base_tokenizer(*CHATML_TOKENS)
    with pytest.raises(
        ModelError, match=r"llama3 writes <\|begin_of_text\|>, which is no token .*: alpaca, chatml, .*qwen3"
    ):
        use_template(tokenizer, "llama3")
    assert tokenizer.chat_template is None and tokenizer.eos_token == "<|endoftext|>"


def test_errors_about_rows_name_the_templates_that_take_them() -> None:
    tokenizer = base_tokenizer(*CHATML_TOKENS)
    with pytest.raises(ModelError, match=r"Name one: model\.chat_template=alpaca / chatml / .*FILE"):
        TemplateChatEncoder(tokenizer)
    use_template(tokenizer, "chatml")
    encoder = TemplateChatEncoder(tokenizer)
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    for lost in ({"tool_calls": [call]}, {"reasoning_content": "Hm."}):
        names = "qwen3" if "reasoning_content" in lost else "chatml_tools / qwen3"
        with pytest.raises(RowError, match=rf"model\.chat_template={names} / FILE"):
            encoder.encode([{"role": "user", "content": "q"}, {"role": "assistant", "content": "", **lost}])


def test_a_file_of_the_users_own_goes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("chatml").write_text("{% for m in messages %}{{ m.content }}{% endfor %}", encoding="utf-8")
    tokenizer: PreTrainedTokenizerFast = base_tokenizer()
    use_template(tokenizer, "chatml")
    assert (
        tokenizer.eos_token == "<|endoftext|>" and rendered(tokenizer, [{"role": "user", "content": "q"}], None) == "q"
    )
