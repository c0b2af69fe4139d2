"""Chat templates to ids and masks, hand-checked, and the fitted tokenizer they are checked with."""

import itertools
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import LlamaTokenizer, PreTrainedTokenizerFast

from tests.unit.data_tools import run_config, trained_stretches, write_rows
from toolkit.config import files
from toolkit.config.load import load
from toolkit.config.schema import RowFormat, SourceConfig, TooLong
from toolkit.data.store import read_manifest
from toolkit.data.tokenize import build_caches
from toolkit.messages import ModelError, RowError
from toolkit.models.chat import END, PAD, SPECIAL_TOKENS, fit_tokenizer
from toolkit.models.chat_template import TemplateChatEncoder
from toolkit.models.span_tokenizer import SpanTokenizer
from toolkit.models.tokenizer_files import load_tokenizer
from toolkit.models.whole_texts import WholeTexts
from toolkit.tasks.language_data import build_encoder

TEXTS = ["hello world, 你好世界", "the quick brown fox", "hello fox"] * 20
CHATML = (
    "{% for m in messages %}{{ '<|user|>' if m['role'] == 'user' else '<|assistant|>' }}{{ m['content'] }}"
    "{{ '<|endoftext|>\\n\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
NO_END = CHATML.replace("<|endoftext|>\\n\\n", "")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cache = tmp_path_factory.mktemp("cache")
    fit_tokenizer(lambda: TEXTS, 300, cache)
    return next(path for path in (cache / "tokenizers").iterdir() if path.is_dir())


@pytest.fixture
def tokenizer(folder: Path) -> Any:
    return load_tokenizer(str(folder))


def chat(*contents: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[index % 2], "content": content} for index, content in enumerate(contents)]


def text_of(tokenizer: Any, ids: list[int]) -> str:
    decoded = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    assert isinstance(decoded, str)
    return decoded


def test_fitted_tokenizer(tokenizer: Any) -> None:
    assert 264 < len(tokenizer) <= 300
    assert (tokenizer.eos_token, tokenizer.pad_token) == (END, PAD)
    assert tokenizer.convert_tokens_to_ids(SPECIAL_TOKENS) == list(range(8))
    text = "  Ünïcode\t🙂 \n 你好 never seen"
    assert text_of(tokenizer, tokenizer(text)["input_ids"]) == text


def test_fitted_once_per_content(tmp_path: Path, said: list[str]) -> None:
    reads: list[int] = []

    def texts() -> Iterator[str]:
        reads.append(1)
        yield from TEXTS

    first = fit_tokenizer(texts, 290, tmp_path)
    again = fit_tokenizer(texts, 290, tmp_path)
    assert len(reads) == 3  # fingerprint, fit, fingerprint
    assert again.get_vocab() == first.get_vocab()
    fit_tokenizer(lambda: TEXTS[1:], 290, tmp_path)
    assert len([path for path in (tmp_path / "tokenizers").iterdir() if path.is_dir()]) == 2
    assert said == []


def test_a_fitted_tokenizer_takes_a_template_of_ones_own(tmp_path: Path) -> None:
    template, rows = tmp_path / "own.jinja", tmp_path / "rows.jsonl"
    template.write_text("{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}")
    rows.write_text('{"prompt": "Hi", "response": "Yo"}\n')
    words = [f"data.sources=[{{path: {rows}}}]", f"prepare.dir={tmp_path}", f"model.chat_template={template}"]
    encoder = build_encoder(load(["recipe=zero1", "model=glm_tiny", *words]).cfg)
    ids, _ = encoder.encode([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}])
    assert encoder.tokenizer.decode(ids) == f"user: Hi\nassistant: Yo\n{END}"


def test_vocabulary_must_hold_all_bytes(tmp_path: Path) -> None:
    with pytest.raises(ModelError) as error:
        fit_tokenizer(lambda: TEXTS, 200, tmp_path)
    assert str(error.value) == (
        "model.shape.vocab_size = 200 is too small for a fitted tokenizer: all bytes and the special tokens need 264."
    )


def test_glm_form_by_hand(tokenizer: Any) -> None:
    ids, trained = TemplateChatEncoder(tokenizer).encode(chat("a", "b", "c", "d"))
    letter = {name: tokenizer.convert_tokens_to_ids(name) for name in "abcd"}
    newline = tokenizer.convert_tokens_to_ids("Ċ")
    end, _, gmask, sop, _, user, assistant, _ = range(8)
    turn = [user, newline, letter["a"], assistant, newline, letter["b"], end]
    assert ids == [gmask, sop, *turn, user, newline, letter["c"], assistant, newline, letter["d"], end]
    # Every answer with its end token; the templates' words are not.
    assert [ids[place] for place in range(len(ids)) if trained[place]] == [letter["b"], end, letter["d"], end]
    assert trained.index(True) == ids.index(letter["b"])


def test_prompt_is_what_generation_sees(tokenizer: Any) -> None:
    messages = [{"role": "system", "content": "be kind"}, *chat("hello", "world", "the fox", "quick brown")]
    ids, trained = TemplateChatEncoder(tokenizer).encode([*messages[:-1], {**messages[-1], "loss": True}])
    prompt = tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True, return_dict=False)
    assert ids[: len(prompt)] == prompt
    assert trained[len(prompt) :] == [True] * (len(ids) - len(prompt))
    first = tokenizer.apply_chat_template(messages[:2], add_generation_prompt=True, return_dict=False)
    earlier = [place for place in range(len(prompt)) if trained[place]]
    assert earlier == list(range(len(first), len(first) + len(earlier)))
    assert text_of(tokenizer, [ids[place] for place in earlier]) == "world" + END
    assert text_of(tokenizer, ids[len(prompt) :]) == "quick brown" + END


def test_many_equals_one_by_one(tokenizer: Any) -> None:
    encoder = TemplateChatEncoder(tokenizer)
    conversations = [chat("hello", "fox " * number) for number in range(1, 20)]
    assert encoder.encode_many(conversations) == [encoder.encode(messages) for messages in conversations]
    assert encoder.encode_many([]) == []


@pytest.mark.parametrize("template", [CHATML, NO_END])
def test_answer_ends_with_one_end_token(tokenizer: Any, template: str) -> None:
    tokenizer.chat_template = template
    ids, trained = TemplateChatEncoder(tokenizer).encode(chat("hello", "fox"))
    answer = [token for token, kept in zip(ids, trained, strict=True) if kept]
    assert text_of(tokenizer, answer) == "fox" + END
    assert trained.index(True) + len(answer) == len(ids)


@pytest.mark.parametrize("template", [None, CHATML, NO_END])
def test_text_of_the_end_token_in_an_answer_ends_nothing(tokenizer: Any, template: str | None) -> None:
    tokenizer.chat_template = template or tokenizer.chat_template
    ids, trained = TemplateChatEncoder(tokenizer).encode(chat("a", f"b{END}c"))
    answer = [token for token, kept in zip(ids, trained, strict=True) if kept]
    assert text_of(tokenizer, answer) == f"b{END}c{END}"
    assert answer.count(tokenizer.eos_token_id) == 1


def test_template_may_refuse_a_row(tokenizer: Any) -> None:
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(RowError, match=r"^the chat template rejects the conversation: roles must alternate$"):
        TemplateChatEncoder(tokenizer).encode(chat("a", "b"))


def test_template_that_rewrites_earlier_turns(tokenizer: Any) -> None:
    tokenizer.chat_template = "{{ messages|length }}" + CHATML
    with pytest.raises(ModelError, match="does not begin with the prompt that generation would see") as error:
        TemplateChatEncoder(tokenizer).encode(chat("a", "b"))
    assert "model.chat_template=FILE" in str(error.value)


def test_missing_template_and_end(tokenizer: Any) -> None:
    name = tokenizer.name_or_path
    tokenizer.chat_template = None
    with pytest.raises(ModelError) as error:
        TemplateChatEncoder(tokenizer)
    assert str(error.value) == (
        f"The tokenizer '{name}' has no chat template. Name one: "
        "model.chat_template=alpaca / glm4 / glm4_5 / glm_z1 / FILE."
    )
    tokenizer.chat_template, tokenizer.eos_token = CHATML, None
    with pytest.raises(ModelError, match="has no end-of-sequence token"):
        TemplateChatEncoder(tokenizer)


def set_template(tokenizer: Any) -> None:
    tokenizer.chat_template = CHATML


def set_end(tokenizer: Any) -> None:
    tokenizer.eos_token = PAD


def add_token(tokenizer: Any) -> None:
    tokenizer.add_tokens(["zzz"])


@pytest.mark.parametrize("change", [set_template, set_end, add_token])
def test_fingerprint(tokenizer: Any, folder: Path, change: Callable[[Any], None]) -> None:
    before = TemplateChatEncoder(tokenizer).fingerprint
    TemplateChatEncoder(tokenizer).encode(chat("a", "b"))
    assert TemplateChatEncoder(tokenizer).fingerprint == before
    assert TemplateChatEncoder(load_tokenizer(str(folder))).fingerprint == before
    change(tokenizer)
    assert TemplateChatEncoder(tokenizer).fingerprint != before


def test_encoder_can_be_pickled(tokenizer: Any) -> None:
    encoder = TemplateChatEncoder(tokenizer)
    copy = pickle.loads(pickle.dumps(encoder))
    assert copy.fingerprint == encoder.fingerprint
    assert copy.encode(chat("a", "b")) == encoder.encode(chat("a", "b"))


def test_loading_with_another_template(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text(CHATML)
    assert load_tokenizer(folder, chat_template=str(tmp_path / "t.jinja")).chat_template == CHATML
    with pytest.raises(ModelError, match=r"Cannot read 'no.jinja': No such file or directory"):
        load_tokenizer(folder, chat_template="no.jinja")


def test_folders_that_cannot_be_loaded(tmp_path: Path) -> None:
    def refused(match: str) -> None:
        with pytest.raises(ModelError, match=match) as error:
            load_tokenizer(str(tmp_path))
        assert "model.tokenizer" in str(error.value)

    with pytest.raises(ModelError, match=r"There is no tokenizer directory 'nowhere'.*model.tokenizer"):
        load_tokenizer("nowhere")
    refused("holds neither config.json nor a tokenizer")
    (tmp_path / "config.json").write_text("{}")
    refused("holds no tokenizer")
    config = tmp_path / "tokenizer_config.json"
    (tmp_path / "tokenizer.json").write_text("{ broken")
    with pytest.raises(ModelError, match=r"tokenizer\.json is not JSON"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    refused("Cannot read")
    (tmp_path / "tokenizer.json").unlink()
    config.write_text('{"auto_map": {"AutoTokenizer": ["tokenization_x.XTokenizer", null]}}')
    refused(r"needs Python code from that directory \(auto_map\), which is never executed")


MARKED = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}<|assistant|>{% generation %}{{ m['content'] }}"
    "<|endoftext|>{% endgeneration %}{% else %}<|user|>{{ m['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def spoken(tokenizer: Any, encoded: tuple[list[int], list[bool]]) -> list[str]:
    """Return the trained stretches as text."""
    return [text_of(tokenizer, part) for part in trained_stretches(*encoded)]


@pytest.mark.parametrize(
    "template",
    [CHATML, MARKED, MARKED.replace("<|endoftext|>{% endgeneration %}", "{% endgeneration %}<|endoftext|>")],
    ids=["compared", "marked", "end-unmarked"],
)
def test_every_answer_or_the_chosen_ones(tokenizer: Any, template: str) -> None:
    tokenizer.chat_template = template
    encoder = TemplateChatEncoder(tokenizer)
    assert not encoder.only_last
    messages = chat("hello", "one", "fox", "two two", "world", "three")
    assert spoken(tokenizer, encoder.encode(messages)) == ["one" + END, "two two" + END, "three" + END]
    flagged: list[dict[str, Any]] = [dict(message) for message in messages]
    flagged[1]["loss"] = flagged[5]["loss"] = False
    ids, trained = encoder.encode(flagged)
    assert spoken(tokenizer, (ids, trained)) == ["two two" + END]
    whole = tokenizer.apply_chat_template(messages, return_dict=False)
    assert ids == whole[: len(ids)]
    flagged[0]["loss"] = True
    assert "hello" in spoken(tokenizer, encoder.encode(flagged))[0]


@pytest.mark.parametrize("template", [CHATML, MARKED, NO_END])
@given(contents=st.lists(st.text("ab 你🙂\n", min_size=1, max_size=12), min_size=2, max_size=6))
@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_ids_are_the_templates_own(tokenizer: Any, template: str, contents: list[str]) -> None:
    tokenizer.chat_template = template
    messages = chat(*contents[: len(contents) // 2 * 2])
    ids, trained = TemplateChatEncoder(tokenizer).encode(messages)
    whole = tokenizer.apply_chat_template(messages, return_dict=False)
    end = tokenizer.eos_token_id
    # Up to the last end token, which is put there if the template has none.
    assert ids == (whole[: len(ids)] if end in whole else [*whole, end])
    assert trained[-1] and ids[-1] == end


@pytest.mark.parametrize(
    ("name", "frame", "asks"),
    [
        ("deepseek_r1", "kind.<｜User｜>{}<｜Assistant｜>", "<think>\n"),
        ("glm_z1", "[gMASK]<sop><|system|>\nkind.<|user|>\n{}<|assistant|>\n", "<think>"),
    ],
)
def test_the_shipped_templates_keep_the_reasoning_of_the_last_turn(
    tokenizer: Any, name: str, frame: str, asks: str
) -> None:
    tokenizer.chat_template = files.named_chat_template(name).read_text(encoding="utf-8")
    encoder = TemplateChatEncoder(tokenizer)
    thought = "<think>\nfox\n</think>\n\none"
    messages = [{"role": "system", "content": "kind."}, *chat("hello", thought, "world", "two")]
    first, second = encoder.divide(messages)
    ids, trained = encoder.encode(first)
    assert text_of(tokenizer, ids).startswith(frame.format("hello") + thought)
    (said,) = spoken(tokenizer, (ids, trained))
    assert said.startswith(thought.removeprefix(asks)), "the prompt begins the reasoning"
    ids, trained = encoder.encode(second)
    assert "fox" not in text_of(tokenizer, ids), "servers leave out the reasoning of earlier turns"
    assert spoken(tokenizer, (ids, trained))[0].startswith("two")
    assert text_of(tokenizer, encoder.prompt(messages[:2])) == frame.format("hello") + asks
    field = {"role": "assistant", "content": "one", "reasoning_content": "fox"}
    assert encoder.encode([*messages[:2], field]) == encoder.encode(first)


@pytest.fixture
def joining(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A tokenizer that joins two newlines, so that an answer's first token can begin before the answer."""
    fitted = fit_tokenizer(lambda: [*TEXTS, *["fox\n\n\nfox"] * 20], 300, tmp_path_factory.mktemp("j"))
    assert fitted.tokenize("\n\n") == ["ĊĊ"]
    return fitted


PIECES = ["a", "b ", " ", "\n", "\n\n", "你", "🙂", "<|assistant|>", "<|user|>", "<|assistant|>\n", "assistant", "Two?"]


@pytest.mark.parametrize("template", [None, CHATML, MARKED, NO_END], ids=["fitted", "chatml", "marked", "no-end"])
@given(
    contents=st.lists(st.lists(st.sampled_from(PIECES), min_size=1, max_size=5).map("".join), min_size=2, max_size=6),
    untrained=st.sets(st.integers(0, 5)),
)
@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_quick_way_to_masks_equals_the_tokenizers_offsets(
    joining: Any, template: str | None, contents: list[str], untrained: set[int]
) -> None:
    if template:
        joining.chat_template = template
    encoder = TemplateChatEncoder(joining)
    messages: list[dict[str, Any]] = chat(*contents[: len(contents) // 2 * 2])
    for index in untrained & set(range(1, len(messages), 2)):
        messages[index]["loss"] = False
    quick = encoder.encode_many([messages])
    encoder.span_tokenizer = SpanTokenizer(joining, None)
    assert quick == encoder.encode_many([messages])


def test_the_quick_way_is_taken(joining: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The offsets are asked for only where an answer's first token reaches into what precedes it."""
    encoder = TemplateChatEncoder(joining)
    asked: list[str] = []

    def by_offsets(self: WholeTexts, encoding: Any, text: str, spans: Any) -> Any:
        asked.append(text)
        return [], []

    monkeypatch.setattr(WholeTexts, "_mask_by_offsets", by_offsets)
    encoder.encode_many([chat("hello", "fox", "<|assistant|>", "two"), [{"role": "text", "content": "fox"}]])
    assert not asked
    encoder.encode(chat("hello", "\n\nfox"))
    assert len(asked) == 1


def test_marks_that_are_wrong(tokenizer: Any) -> None:
    tokenizer.chat_template = MARKED.replace(
        "<|user|>{{ m['content'] }}", "{% generation %}{{ m['content'] }}{% endgeneration %}"
    )
    with pytest.raises(ModelError, match=r"marks \['One\?', 'First answer\.', 'Two\?', 'Second answer\.'\] as what"):
        TemplateChatEncoder(tokenizer)


def test_a_template_that_drops_earlier_reasoning_takes_a_sample_for_each_turn(tokenizer: Any) -> None:
    tokenizer.chat_template = CHATML.replace(
        "{{ m['content'] }}",
        "{{ m['content'] if loop.last or m['role'] == 'user' else m['content'].split('</think>')[-1] }}",
    )
    encoder = TemplateChatEncoder(tokenizer)
    assert not encoder.only_last  # it changes nothing where there is no reasoning
    assert len(spoken(tokenizer, encoder.encode(chat("hello", "one", "fox", "two")))) == 2
    reasoned: list[dict[str, Any]] = chat("hello", "x</think>one", "fox", "two")
    with pytest.raises(RowError, match=r"Train last answers only: data\.train_on=last"):
        encoder.encode(reasoned)
    assert [spoken(tokenizer, encoder.encode(part)) for part in encoder.divide(reasoned)] == [
        ["x</think>one" + END],
        ["two" + END],
    ]
    assert spoken(tokenizer, encoder.encode([reasoned[0], {**reasoned[1], "loss": False}, *reasoned[2:]])) == [
        "two" + END
    ]
    tokenizer.chat_template = CHATML.replace(
        "{{ m['content'] }}", "{{ m['content'] ~ ('!' if loop.last and m['role'] == 'assistant' else '') }}"
    )
    encoder = TemplateChatEncoder(tokenizer)
    parts = encoder.divide(chat("hello", "one", "fox", "two"))
    assert [spoken(tokenizer, encoder.encode(part)) for part in parts] == [["one!" + END], ["two!" + END]]
    assert encoder.divide(chat("hello", "one")) == [chat("hello", "one")]


def test_plain_text_is_trained_whole(tokenizer: Any) -> None:
    ids, trained = TemplateChatEncoder(tokenizer).encode([{"role": "text", "content": "hello fox"}])
    assert text_of(tokenizer, ids) == "hello fox" + END
    assert all(trained)


def around(tokenizer: Any, single: str) -> Any:
    """Return the tokenizer with a tokenizer.json that puts something around a text, as Llama-3's does."""
    names = [token for token in single.split() if token != "$A"]
    named = [(token, tokenizer.convert_tokens_to_ids(token)) for token in names]
    steps = [
        processors.ByteLevel(trim_offsets=False),
        processors.TemplateProcessing(single=single, special_tokens=named),
    ]
    tokenizer.backend_tokenizer.post_processor = processors.Sequence(steps)
    return tokenizer


@pytest.mark.parametrize(
    ("single", "begin"),
    [
        ("$A", []),
        ("<sop> $A", ["<sop>"]),
        ("[gMASK] <sop> $A", ["[gMASK]", "<sop>"]),
        ("$A <|endoftext|>", []),
        ("<sop> $A <|pad|>", ["<sop>"]),
    ],
)
def test_texts_have_around_them_what_the_tokenizer_puts_there(
    single: str, begin: list[str], tokenizer: Any, tmp_path: Path
) -> None:
    """Trained, with the end token as ever; read, as `tokenizer(text)` is, of which truncation keeps the end."""
    encoder = pickle.loads(pickle.dumps(TemplateChatEncoder(around(tokenizer, single))))
    ids, trained = encoder.encode([{"role": "text", "content": "hello fox"}])
    first, bare = tokenizer.convert_tokens_to_ids(begin), tokenizer("hello fox", add_special_tokens=False)["input_ids"]
    assert ids == [*first, *bare, tokenizer.eos_token_id] and trained == [False] * len(first) + [True] * (len(bare) + 1)
    assert (encoder.text_key == ()) is (single == "$A"), "nothing is tokenized again where nothing changed"
    rows = [{"query": "hello fox", "positive": "你" * 30}, {"query": "the", "positive": "quick <sop> brown"}]
    cfg = run_config(tmp_path, write_rows(tmp_path / "d.jsonl", rows))
    cfg.data.sources[0].format, cfg.data.max_length, cfg.data.too_long = RowFormat.embed, 20, TooLong.truncate
    train, _, report = build_caches(cfg, encoder)
    expected = [tokenizer(text, truncation=True, max_length=20)["input_ids"] for row in rows for text in row.values()]
    marks = [(train[number][0].tolist(), np.flatnonzero(train[number][1]).tolist()) for number in range(4)]
    assert [found for found, _ in marks][:3] == expected[:3] and report.truncated == 1 and len(expected[1]) == 20
    assert len(marks[3][0]) > len(expected[3]), "a control string stays text"
    assert [mark for _, mark in marks] == [[len(found) - 1] for found, _ in marks]
    inputs = read_manifest(Path(report.folder))["inputs"]
    assert inputs.get("texts", ()) == encoder.text_key and encoder.after_text == tokenizer.convert_tokens_to_ids(
        single.split("$A")[1].split()
    )
    cfg.data.sources = [SourceConfig(path=write_rows(tmp_path / "c.jsonl", [{"prompt": "hello", "response": "fox"}]))]
    chats = build_caches(cfg, encoder).report.folder
    assert "texts" not in read_manifest(Path(chats))["inputs"], "conversations are not tokenized again"


@pytest.mark.parametrize(("legacy", "is_saved"), [(True, False), (True, True), (False, False)])
def test_llama_tokenizers_begin_texts_with_bos(legacy: bool, is_saved: bool, tmp_path: Path) -> None:
    """transformers forgets `add_bos_token` where there is a tokenizer.json, which adds it all the same."""
    letters = {letter: index for index, letter in enumerate(["<unk>", "<s>", "</s>", *"▁helo wrd"])}
    made = LlamaTokenizer(vocab=letters, merges=[], add_bos_token=True, legacy=legacy, chat_template=CHATML)
    made.save_pretrained(tmp_path)
    loaded: Any = load_tokenizer(tmp_path) if is_saved else made
    encoder = TemplateChatEncoder(loaded)
    assert encoder.encode([{"role": "text", "content": "hello world"}])[0] == [*loaded("hello world")["input_ids"], 2]
    assert loaded("hello world")["input_ids"][0] == 1 and loaded.add_bos_token is not is_saved
    assert (encoder.text_key == ()) is (legacy and not is_saved)
    chats, _ = TemplateChatEncoder(loaded).encode(chat("hello", "world"))
    assert 1 not in chats, "a conversation begins as its template says"


def test_tools_reach_the_template(tokenizer: Any) -> None:
    tokenizer.chat_template = "{% if tools %}{{ tools[0]['function']['name'] }}{% endif %}" + CHATML
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    encoder = TemplateChatEncoder(tokenizer)
    plain, with_tools = encoder.encode_many([chat("a", "b")] * 2, [None, tools])
    assert text_of(tokenizer, with_tools[0]) == "weather" + text_of(tokenizer, plain[0])


def test_slow_tokenizer_finds_the_same(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    messages = chat("hello 你", "one two", "fox", "three 🙂")
    expected = TemplateChatEncoder(tokenizer).encode(messages)
    monkeypatch.setattr(type(tokenizer), "is_fast", False)
    assert TemplateChatEncoder(tokenizer).encode(messages) == expected


CALLS: list[dict[str, Any]] = [
    {"role": "user", "content": "hello"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "fox", "arguments": {"a": "你"}}}],
    },
    {"role": "tool", "content": "two"},
    {"role": "assistant", "content": "world"},
]


def test_calls_are_trained_in_the_fitted_form(tokenizer: Any) -> None:
    encoder = TemplateChatEncoder(tokenizer)
    said = ['fox\n{"a": "你"}' + END, "world" + END]
    assert spoken(tokenizer, encoder.encode(CALLS)) == said
    assert spoken(tokenizer, encoder.encode(CALLS[:2])) == said[:1]


def test_templates_that_want_arguments_as_text_get_them(tokenizer: Any) -> None:
    tokenizer.chat_template = CHATML.replace(
        "{{ m['content'] }}",
        "{% for call in m['tool_calls'] or [] %}{{ call['function']['name'] + ' ' + call['function']['arguments'] }}"
        "{% endfor %}{{ m['content'] }}",
    )
    assert spoken(tokenizer, TemplateChatEncoder(tokenizer).encode(CALLS)) == ['fox {"a": "你"}' + END, "world" + END]


def test_a_template_that_fails_is_the_rows_trouble(tokenizer: Any) -> None:
    tokenizer.chat_template = CHATML.replace("{{ m['content'] }}", "{{ m['content'] + (m['extra'] or '') }}")
    encoder = TemplateChatEncoder(tokenizer)
    broken: list[dict[str, Any]] = [{"role": "user", "content": "a", "extra": 3}, {"role": "assistant", "content": "b"}]
    with pytest.raises(RowError, match="the chat template rejects the conversation: "):
        encoder.encode(broken)
    # One conversation that is written otherwise says nothing against the template.
    tokenizer.chat_template = CHATML.replace(
        "{{ m['content'] }}", "{{ 'X' if m['content'] == 'odd' and loop.last else '' }}{{ m['content'] }}"
    ).replace("'<|assistant|>' }}{{", "'<|assistant|>' }}{% if m['content'] == 'odd' %}?{% endif %}{{")
    encoder = TemplateChatEncoder(tokenizer)
    with pytest.raises(RowError, match="writes the answer of this conversation otherwise than the prompt"):
        encoder.encode([{"role": "user", "content": "odd"}, {"role": "assistant", "content": "odd"}])


SPEAKERS = (
    "{% for m in messages %}{{ {'user': 'User: ', 'assistant': ASKS}[m.role] ~ m.content }}"
    "{{ eos_token if m.role == 'assistant' else '' }}\n{% endfor %}{% if add_generation_prompt %}{{ ASKS }}{% endif %}"
)
"""A template without control tokens before answers: a tokenizer merges where they begin."""
ANSWERS = ["yes", "no", " yes", "\n\nyes", ":)", "1", "123", " 1", "é", "yes no", "你好"]
SPOKEN = ["Assistant: yes", "Assistant:\n\nno", "User: is it?  yes no :) 123 1", "é 你好", "Assistant:  yes"] * 50
# What splits texts in GPT-4 and most tokenizers since: white space at the end of a prompt is split by what follows.
GPT4 = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _bytes(*before: Any) -> Any:
    levels = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not before)
    return models.BPE(), None, pre_tokenizers.Sequence([*before, levels]), decoders.ByteLevel()


def _words(scheme: Any) -> Any:
    arguments = {"prepend_scheme": scheme}
    return models.BPE(), None, pre_tokenizers.Metaspace(**arguments), decoders.Metaspace(**arguments)


def _llama() -> Any:
    blanks = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    back = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return models.BPE(), blanks, None, back


KINDS: dict[str, Callable[[], Any]] = {
    "gpt2": _bytes,
    "gpt4": lambda: _bytes(pre_tokenizers.Split(Regex(GPT4), "isolated")),
    "first": lambda: _words("first"),
    "always": lambda: _words("always"),
    "llama": _llama,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_fast", [True, False], ids=["fast", "slow"])
def test_an_answer_begins_after_the_ids_of_its_prompt(kind: str, is_fast: bool) -> None:
    model, normalizer, pre_tokenizer, decoder = KINDS[kind]()
    backend = Tokenizer(model)
    backend.normalizer, backend.pre_tokenizer, backend.decoder = normalizer, pre_tokenizer, decoder
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend.train_from_iterator(
        SPOKEN, trainers.BpeTrainer(vocab_size=500, special_tokens=[END], initial_alphabet=letters, show_progress=False)
    )
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END)
    for asks in ("Assistant: ", "Assistant:", "Assistant:\n", "Assistant:  "):
        tokenizer.chat_template = SPEAKERS.replace("ASKS", repr(asks))
        encoder = TemplateChatEncoder(tokenizer)
        slow = None if is_fast else encoder.span_tokenizer.whole_texts.encode_slowly
        for first, second in itertools.product(ANSWERS, ANSWERS[:4]):
            messages = chat("Q", first, "R", second)
            trained = []
            for part in encoder.divide(messages):
                ids, mask = slow(*encoder._text_and_spans(part, None)) if slow else encoder.encode(part)
                for place, message in enumerate(part):
                    if message["role"] == "user" or message.get("loss") is False:
                        continue
                    prompt = encoder.prompt(part[:place])
                    begin = len(prompt)
                    assert ids[:begin] == prompt, (asks, first, second)
                    assert mask[begin] and not mask[begin - 1]
                    end = ids.index(tokenizer.eos_token_id, begin) + 1
                    assert all(mask[begin:end]) and not any(mask[end : end + 1])
                    if is_fast:  # in pieces a slow one puts blanks of its own before them
                        before, whole = text_of(tokenizer, [*prompt, 0]), text_of(tokenizer, ids[:end])
                        assert whole == before.removesuffix(END) + message["content"] + END
                    trained.append(place)
            assert trained == [1, 3]


def test_both_answers_of_a_pair_begin_after_the_same_prompt(folder: Path, tmp_path: Path) -> None:
    """Where a tokenizer merges "Assistant: " with what follows, too."""
    template = tmp_path / "speakers.jinja"
    template.write_text(SPEAKERS.replace("ASKS", "'Assistant: '"), encoding="utf-8")
    tokenizer = load_tokenizer(str(folder), chat_template=str(template))
    rows = [{"prompt": "hello", "chosen": "fox", "rejected": "world"}]
    write_rows(tmp_path / "pairs.jsonl", rows)
    cfg = run_config(tmp_path, str(tmp_path / "pairs.jsonl"))
    cfg.data.sources[0].format = RowFormat.preference
    store = build_caches(cfg, TemplateChatEncoder(tokenizer)).train
    (chosen, good), (rejected, bad) = ([list(part) for part in store[index]] for index in range(2))
    prompt = TemplateChatEncoder(tokenizer).prompt(chat("hello"))
    assert chosen[: len(prompt)] == rejected[: len(prompt)] == prompt
    assert good.index(True) == bad.index(True) == len(prompt)
    assert [text_of(tokenizer, ids[len(prompt) :]) for ids in (chosen, rejected)] == ["fox" + END, "world" + END]


def test_a_template_that_drops_what_is_said_is_rejected(tokenizer: Any) -> None:
    """`text` for `content`, mostly, which Jinja takes for an empty text: only the end tokens would be trained."""
    for template in (CHATML.replace("m['content']", "m.text"), "{{ 9 * 9 }}"):
        tokenizer.chat_template = template
        with pytest.raises(ModelError, match="does not write what the user says"):
            TemplateChatEncoder(tokenizer)
    tokenizer.chat_template = CHATML.replace("m['content']", "m['content'] if m['role'] == 'user' else m.text")
    lost = r"message 2: the chat template of '.*' writes '<\|endoftext\|>.*' where the answer has 'fox'"
    with pytest.raises(RowError, match=lost):
        TemplateChatEncoder(tokenizer).encode(chat("hello", "fox"))
    called = {"function": {"name": "look", "arguments": {"city": "x"}}}
    calls: list[dict[str, Any]] = [*chat("hello"), {"role": "assistant", "content": "", "tool_calls": [called]}]
    written = "{{ m['content'] }}{% for c in m.tool_calls %}{{ c.function.name }}{% endfor %}"
    tokenizer.chat_template = CHATML.replace("{{ m['content'] }}", written)
    with pytest.raises(RowError, match="where the answer has 'city'"):
        TemplateChatEncoder(tokenizer).encode(calls)
    arguments = "{{ c.function.name ~ c.function.arguments | tojson }}"
    tokenizer.chat_template = tokenizer.chat_template.replace("{{ c.function.name }}", arguments)
    assert spoken(tokenizer, TemplateChatEncoder(tokenizer).encode(calls)) == ['look{"city": "x"}' + END]


def test_a_prompt_that_asks_for_reasoning_needs_some(tokenizer: Any) -> None:
    """Such as that of Qwen3's Thinking-2507; training last answers only would change nothing."""
    asks = "{{ '<|assistant|><think>\\n' }}"
    tokenizer.chat_template = CHATML.replace("{{ '<|assistant|>' }}{% endif %}", f"{asks}{{% endif %}}")
    encoder = TemplateChatEncoder(tokenizer)
    wanted = r"message 2: the chat template's prompt for an answer ends with .*<think>\\n', which asks for reasoning"
    for messages in (chat("hello", "fox"), chat("hello", "fox", "a", "b")):
        with pytest.raises(RowError, match=wanted):
            encoder.encode(messages)
    reasoned = chat("hello", "<think>\nworld\n</think>\n\nfox")
    assert spoken(tokenizer, encoder.encode(reasoned)) == ["world\n</think>\n\nfox" + END]
