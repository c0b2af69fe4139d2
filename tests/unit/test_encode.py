"""Chat templates to ids and masks, hand-checked, and the fitted tokenizer they are checked with."""

import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from toolkit.errors import ModelError, RowError
from toolkit.models.template_chat import TemplateChatEncoder
from toolkit.models.tokenizer import END, PAD, SPECIAL_TOKENS, fit_tokenizer, load_tokenizer

TEXTS = ["hello world, 你好世界", "the quick brown fox", "hello fox"] * 20
CHATML = (
    "{% for m in messages %}{{ '<|user|>' if m['role'] == 'user' else '<|assistant|>' }}{{ m['content'] }}"
    "{{ '<|endoftext|>\\n\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
NO_END = CHATML.replace("<|endoftext|>\\n\\n", "")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cache = tmp_path_factory.mktemp("cache")
    fit_tokenizer(lambda: TEXTS, 300, cache, pytest.fail)
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


def test_fitted_once_per_content(tmp_path: Path) -> None:
    reads: list[int] = []

    def texts() -> Iterator[str]:
        reads.append(1)
        yield from TEXTS

    first = fit_tokenizer(texts, 290, tmp_path, pytest.fail)
    again = fit_tokenizer(texts, 290, tmp_path, pytest.fail)
    assert len(reads) == 3  # fingerprint, fit, fingerprint
    assert again.get_vocab() == first.get_vocab()
    fit_tokenizer(lambda: TEXTS[1:], 290, tmp_path, pytest.fail)
    assert len([path for path in (tmp_path / "tokenizers").iterdir() if path.is_dir()]) == 2


def test_vocabulary_must_hold_all_bytes(tmp_path: Path) -> None:
    with pytest.raises(ModelError) as error:
        fit_tokenizer(lambda: TEXTS, 200, tmp_path, pytest.fail)
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
    assert trained == [False] * (len(ids) - 2) + [True, True]


def test_prompt_is_what_generation_sees(tokenizer: Any) -> None:
    messages = [{"role": "system", "content": "be kind"}, *chat("hello", "world", "the fox", "quick brown")]
    ids, trained = TemplateChatEncoder(tokenizer).encode(messages)
    prompt = tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True, return_dict=False)
    assert ids[: len(prompt)] == prompt
    assert trained == [False] * len(prompt) + [True] * (len(ids) - len(prompt))
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


def test_text_of_the_end_token_in_an_answer(tokenizer: Any) -> None:
    with pytest.raises(RowError, match=r"the answer holds the text of the end token, '<\|endoftext\|>'"):
        TemplateChatEncoder(tokenizer).encode(chat("a", f"b{END}c"))


def test_template_may_refuse_a_row(tokenizer: Any) -> None:
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(RowError, match=r"^the chat template refuses the conversation: roles must alternate$"):
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
        f"The tokenizer '{name}' has no chat template. Name a file with one: model.chat_template=FILE."
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
    with pytest.raises(ModelError, match=r"The chat template 'no.jinja' cannot be read \(No such file or directory\)"):
        load_tokenizer(folder, chat_template="no.jinja")


def test_folders_that_cannot_be_loaded(tmp_path: Path) -> None:
    def refused(match: str) -> None:
        with pytest.raises(ModelError, match=match) as error:
            load_tokenizer(str(tmp_path))
        assert "model.tokenizer" in str(error.value)

    with pytest.raises(ModelError, match=r"There is no tokenizer folder 'nowhere'.*model.tokenizer"):
        load_tokenizer("nowhere")
    refused("holds no tokenizer")
    config = tmp_path / "tokenizer_config.json"
    (tmp_path / "tokenizer.json").write_text("{ broken")
    refused("cannot be read")
    (tmp_path / "tokenizer.json").unlink()
    config.write_text('{"auto_map": {"AutoTokenizer": ["tokenization_x.XTokenizer", null]}}')
    refused(r"needs Python code from that folder \(auto_map\), which is never executed")
