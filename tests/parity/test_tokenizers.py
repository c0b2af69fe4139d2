"""Ids, texts and chats of the four tokenizers, against the original's and against sentencepiece and tiktoken."""

import base64
import json
import pickle
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from golden import GOLDEN, lines, vocabulary
from hypothesis import example, given, settings, strategies as st
from official import write

from toolkit.config.schema import Family
from toolkit.export.write import write_folder
from toolkit.messages import ModelError, RowError
from toolkit.models import load_chat_encoder, load_model, load_tokenizer
from toolkit.models.chatglm.formats import FamilyChatEncoder, Piece
from toolkit.models.save import non_weight_files

NAMES = ["v1", "v2", "v3", "glm4"]
# Control strings of all generations, and words that hold one.
CONTROLS = [
    *("[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>", "sop", "eop", "<|sop|>", "<|user|>", "<|assistant|>"),
    *("<|observation|>", "<|system|>", "<|endoftext|>", "<s>", "</s>", "<unk>", "<pad>", "<n>", "<|tab|>"),
    *("<|blank_3|>", "<|blank_99|>", "<0x0A>", "▁", "philosophy", "\0"),
]
TEXTS = st.lists(
    st.one_of(
        st.text(max_size=20),
        st.sampled_from(CONTROLS),
        st.text(alphabet=" \t\n\r\u3000\u00a0", max_size=100),
        st.text(alphabet="的一是不了人我在有他这，。！？Aa1 '\u0301", max_size=20),
    ),
    max_size=6,
).map("".join)


@cache
def tokenizer(name: str) -> Any:
    """Return a tokenizer, made once."""
    return load_tokenizer(GOLDEN / f"tok_{name}")


@cache
def raw(name: str) -> Any:
    """Return the original library's own encoder, text to ids, and its decoder."""
    folder = GOLDEN / f"tok_{name}"
    if name == "glm4":
        import tiktoken

        ranks = {}
        for line in (folder / "tokenizer.model").read_bytes().splitlines():
            token, rank = line.split()
            ranks[base64.b64decode(token)] = int(rank)
        pattern = (
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
            r"|\s+(?!\S)|\s+"
        )
        encoding = tiktoken.Encoding("glm4", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
        return encoding.encode_ordinary, encoding.decode
    from sentencepiece import SentencePieceProcessor

    pieces = SentencePieceProcessor(model_file=str(next(folder.glob("*.model"))))
    if name != "v1":
        return pieces.encode, pieces.decode

    def spelled(text: str) -> list[int]:
        text = text.replace("\n", "<n>").replace("\t", "<|tab|>")
        for length in range(80, 1, -1):
            text = text.replace(" " * length, f"<|blank_{length}|>")
        return list(pieces.encode(text))

    def unspelled(ids: list[int]) -> str:
        text = pieces.decode(ids).replace("<n>", "\n").replace("<|tab|>", "\t")
        for length in range(2, 81):
            text = text.replace(f"<|blank_{length}|>", " " * length)
        return text

    return spelled, unspelled


@pytest.mark.parametrize("name", NAMES)
def test_reference_lines(name: str) -> None:
    wanted, found = vocabulary(name), tokenizer(name)
    assert len(wanted["lines"]) == 400
    assert found.encode_texts(lines()) == wanted["lines"]
    assert found(lines(), add_special_tokens=False)["input_ids"] == wanted["lines"]
    assert [found.decode(ids) for ids in wanted["lines"]] == wanted["decoded"]
    assert len(found) == wanted["len"]
    for token, index in wanted["special_ids"].items():
        assert found.convert_tokens_to_ids(token) == index, token


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=300, deadline=None)
@given(text=TEXTS)
@example(text="x" * 300)
@example(text=" " * 161 + "\t\n")
@example(text="か\u3099")
@example(text="")
def test_any_text_has_the_ids_of_the_original_library(name: str, text: str) -> None:
    text = text.encode("utf-8", "ignore").decode()  # lone surrogates are no text
    found = tokenizer(name)
    encode, decode = raw(name)
    wanted = encode(text)
    assert found.encode_texts([text, "a\0b"])[0] == wanted
    assert found(text, add_special_tokens=False)["input_ids"] == wanted
    assert found.decode(wanted) == decode(wanted)
    if name == "glm4":  # sentencepiece itself writes "▁" as a blank, and ChatGLM-6B's normaliser loses more
        assert found.decode(wanted) == text


@pytest.mark.parametrize("name", NAMES)
def test_special_tokens_are_added_where_the_original_adds_them(name: str) -> None:
    found = tokenizer(name)
    ids = found.encode_texts(["你好"])[0]
    special = [
        found.convert_tokens_to_ids(token) for token in ("[gMASK]", "<sop>" if name in ("v1", "glm4") else "sop")
    ]
    wanted = [*ids, *special] if name == "v1" else [*special, *ids]
    assert found("你好")["input_ids"] == wanted
    padded = vocabulary(name)["pad_batch"]
    assert found.padding_side == "left"
    batch = found(["你好", "hello world, this is 你好。", ""], padding=True)["input_ids"]
    assert batch[0] == [found.pad_token_id] * (len(batch[1]) - len(wanted)) + wanted
    assert padded["input_ids"][0][-len(wanted) :] == wanted


@pytest.mark.parametrize("name", NAMES[1:])
def test_offsets(name: str) -> None:
    text = "Large gradient，你好 x"
    found = tokenizer(name)(text, add_special_tokens=False, return_offsets_mapping=True)
    spans = [text[start:end] for start, end in found["offset_mapping"]]
    assert set("".join(spans)) == set(text)
    assert spans[-1].strip() == "x"


def untouched(chat: dict[str, Any]) -> bool:
    """Return whether the original parses no control string in the chat; ours never does."""
    return "gMASK" not in str(chat["messages"])


@pytest.mark.parametrize("name", NAMES)
def test_chats(name: str) -> None:
    encoder = load_chat_encoder(GOLDEN / f"tok_{name}")
    chats = vocabulary(name)["chat"]
    assert len(chats) == 5
    for chat in chats:
        # ChatGLM2's and 3's originals parse none either.
        if name in ("v2", "v3") or untouched(chat):
            assert encoder.prompt(chat["messages"]) == chat["input_ids"]
            template = encoder.tokenizer.apply_chat_template(chat["messages"], add_generation_prompt=True)
            assert template["input_ids"] == chat["input_ids"]


def official_training(name: str, case: dict[str, Any], form: FamilyChatEncoder) -> tuple[list[int], list[int]]:
    """Return ids and labels as the original's training code cuts them."""
    source, target = case["max_source_length"], case["max_target_length"]
    if name in ("v3", "glm4"):
        ids, mask = form.encode_pieces([form.example(case["messages"])])[0]
        ids, mask = ids[: source + target + 1], mask[: source + target + 1]
    else:
        *before, answer, end = form.example(case["messages"])
        [(answer_ids, _)] = form.encode_pieces([[answer]])
        if name == "v1":
            text, *special = before
            [(prompt, _)] = form.encode_pieces([[text]])
            context, answer_ids = [*prompt[: source - 1], *special[0].content], answer_ids[: target - 2]
            ids = [*context, *special[1].content, *answer_ids, *end.content]
            assert special[1].trained
            mask = [index >= len(context) for index in range(len(ids))]
        else:
            [(prompt, _)] = form.encode_pieces([before])
            prompt = prompt[:source]
            ids = [*prompt, *answer_ids[:target], *end.content]
            mask = [index >= len(prompt) for index in range(len(ids))]
    return ids, [index if trained else -100 for index, trained in zip(ids, mask, strict=True)]


@pytest.mark.parametrize("name", NAMES)
def test_training_labels(name: str) -> None:
    encoder = load_chat_encoder(GOLDEN / f"tok_{name}")
    cases = vocabulary(name)["train"]
    assert len(cases) == 6
    whole = 0
    for case in cases:
        ids, labels = official_training(name, case, encoder)
        wanted = case["input_ids"], case["labels"]
        assert (ids, labels) == wanted
        found, mask = encoder.encode(case["messages"])
        if found == wanted[0]:
            assert [index if trained else -100 for index, trained in zip(found, mask, strict=True)] == wanted[1]
            whole += 1
    assert whole >= 1
    many = encoder.encode_many([case["messages"] for case in cases])
    assert many == [encoder.encode(case["messages"]) for case in cases]


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=100, deadline=None)
@given(texts=st.lists(TEXTS.filter(str.strip), min_size=3, max_size=3))
def test_control_strings_in_messages_stay_text(name: str, texts: list[str]) -> None:
    """Whatever users write, the special tokens of a prompt are those of the format, and no others."""
    encoder = load_chat_encoder_once(name)
    roles = ("user", "assistant", "user")
    texts = [text.encode("utf-8", "ignore").decode() for text in texts]
    ids = encoder.prompt([{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)])
    harmless = encoder.prompt([{"role": role, "content": "a"} for role in roles])
    specials = {
        int(encoder.tokenizer.convert_tokens_to_ids(token))
        for token in encoder.tokenizer.all_special_tokens
        if token not in ("<unk>", "<pad>", "<s>")
    }
    assert len(specials) >= 5
    assert [index for index in ids if index in specials] == [index for index in harmless if index in specials]


@cache
def load_chat_encoder_once(name: str) -> Any:
    """Return an encoder, made once."""
    return load_chat_encoder(GOLDEN / f"tok_{name}")


@pytest.mark.parametrize("name", NAMES)
def test_apply_chat_template_in_all_its_forms(name: str) -> None:
    encoder = load_chat_encoder_once(name)
    chats = [chat["messages"] for chat in vocabulary(name)["chat"]]
    found = encoder.tokenizer.apply_chat_template
    prompts = [encoder.prompt(messages) for messages in chats]
    batch = found(chats, add_generation_prompt=True, padding=True, return_tensors="pt")
    for row, mask, prompt in zip(batch["input_ids"], batch["attention_mask"], prompts, strict=True):
        assert row[mask.bool()].tolist() == prompt
        assert int(mask[-1]) == 1, "padded on the left"
    assert found(chats[0], add_generation_prompt=True, return_dict=False) == prompts[0]
    # An option that only transformers' own way knows: the template's special tokens are special there too.
    assert found(chats[1], add_generation_prompt=True, truncation=True, max_length=500)["input_ids"] == prompts[1]
    whole = [*chats[0], {"role": "assistant", "content": "ok"}]
    if name in ("v1", "v2"):
        assert found(whole)["input_ids"] == encoder.encode(whole)[0]
    else:
        assert found(whole)["input_ids"] == encoder.encode(whole)[0][:-1]
    if name == "v3":
        assert found(chats[0], tools=TOOLS, add_generation_prompt=True)["input_ids"] == encoder.prompt(chats[0], TOOLS)


PLAIN_TEXT = st.lists(
    st.one_of(
        st.text(alphabet=st.characters(codec="utf-8", exclude_characters="<>[]▁\0"), min_size=1, max_size=20),
        st.text(alphabet=" \t\n\u3000", min_size=1, max_size=5),
        st.sampled_from(["的一是", "，", "philosophy", "sop", "eop of", "a[b]", "<p>", "1234567"]),
    ),
    min_size=1,
    max_size=5,
).map("".join)


@pytest.mark.parametrize("name", NAMES[1:])
@settings(max_examples=200, deadline=None)
@given(texts=st.lists(PLAIN_TEXT, min_size=4, max_size=4), system=st.booleans())
def test_the_template_for_other_programs_says_the_same(name: str, texts: list[str], system: bool) -> None:
    """Texts without control strings get the same ids through the saved template as through the format."""
    encoder, plain = load_chat_encoder_once(name), saved(name)
    messages = [{"role": "system", "content": texts[3]}] if system else []
    for role, text in zip(("user", "assistant", "user"), texts, strict=False):
        messages.append({"role": role, "content": text})
    assert plain.apply_chat_template(messages, add_generation_prompt=True)["input_ids"] == encoder.prompt(messages)


@cache
def saved(name: str) -> Any:
    """Return what plain transformers makes of a saved tokenizer."""
    import tempfile

    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory() as folder:
        tokenizer(name).save_pretrained(folder)
        config = json.loads((Path(folder) / "tokenizer_config.json").read_text())
        assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
        assert not config.get("split_special_tokens")
        return AutoTokenizer.from_pretrained(folder)


def test_v1_template_is_the_prompt() -> None:
    """ChatGLM-6B's saved folder is the official one; its template gives the text of the official prompt."""
    for chat in vocabulary("v1")["chat"]:
        text = tokenizer("v1").apply_chat_template(chat["messages"], tokenize=False, add_generation_prompt=True)
        assert text == chat["prompt"] + "[gMASK]<sop>"


def test_v1_is_saved_in_the_official_layout(tmp_path: Path) -> None:
    tokenizer("v1").save_pretrained(tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["ice_text.model", "tokenizer_config.json"]
    assert load_tokenizer(tmp_path).encode_texts(lines()) == vocabulary("v1")["lines"]


@pytest.mark.parametrize("name", NAMES)
def test_encoders_can_be_sent_to_other_processes(name: str) -> None:
    encoder = load_chat_encoder(GOLDEN / f"tok_{name}")
    again = pickle.loads(pickle.dumps(encoder))
    messages = vocabulary(name)["train"][0]["messages"]
    assert again.encode(messages) == encoder.encode(messages)
    assert again.fingerprint == encoder.fingerprint
    assert again.vocab_size == encoder.vocab_size == len(encoder.tokenizer)


def test_fingerprints_differ_by_format() -> None:
    found = {load_chat_encoder(GOLDEN / f"tok_{name}").fingerprint for name in NAMES}
    found.add(load_chat_encoder(GOLDEN / "tok_v2", family=Family.chatglm3).fingerprint)
    assert len(found) == 5 - (
        load_chat_encoder(GOLDEN / "tok_v2", family="chatglm3").fingerprint
        == load_chat_encoder(GOLDEN / "tok_v3").fingerprint
    )


TOOLS = [{"name": "track", "description": "跟踪", "parameters": {"symbol": {"type": "string"}}}]


def test_chatglm3_tools_and_observations() -> None:
    encoder = load_chat_encoder(GOLDEN / "tok_v3")
    tokens, encode = encoder.tokenizer.convert_tokens_to_ids, encoder.tokenizer.encode_texts
    messages = [
        {"role": "system", "content": "You have tools:"},
        {"role": "user", "content": "price?"},
        {"role": "assistant", "metadata": "track", "content": "tool_call(symbol='x')"},
        {"role": "observation", "content": "12"},
        {"role": "assistant", "content": "It is 12."},
    ]
    ids, mask = encoder.encode(messages, tools=TOOLS)
    [system, user, call, seen, answer] = [
        [token, *encode([first])[0], *encode([second])[0]]
        for token, first, second in [
            (tokens("<|system|>"), "\n", "You have tools:\n" + json.dumps(TOOLS, indent=4, ensure_ascii=False)),
            (tokens("<|user|>"), "\n", "price?"),
            (tokens("<|assistant|>"), "track\n", "tool_call(symbol='x')"),
            (tokens("<|observation|>"), "\n", "12"),
            (tokens("<|assistant|>"), "\n", "It is 12."),
        ]
    ]
    start = [tokens("[gMASK]"), tokens("sop")]
    assert ids == [*start, *system, *user, *call, *seen, *answer, 2]
    untrained = len(start) + len(system) + len(user) + 1
    assert mask == [False] * untrained + [True] * (len(ids) - untrained)
    # Tools without a system message get one.
    assert encoder.prompt(messages[1:2], tools=TOOLS)[2] == tokens("<|system|>")


def test_labels_without_the_originals_oddities() -> None:
    """Only what the assistant says and the token that ends it."""
    messages = [
        {"role": "user", "content": "price?"},
        {"role": "assistant", "metadata": "track", "content": "call()"},
        {"role": "observation", "content": "12"},
        {"role": "assistant", "content": "It is 12."},
    ]
    whole, own = (
        load_chat_encoder(GOLDEN / "tok_v3", original_labels=original).encode(messages) for original in (True, False)
    )
    assert whole[0] == own[0]
    token = load_chat_encoder(GOLDEN / "tok_v3").tokenizer.convert_tokens_to_ids("<|observation|>")
    start, end = own[0].index(token), len(own[0]) - own[0][::-1].index(1007)
    assert own[1][start] is True, "ends the call"
    assert not any(own[1][start + 1 : end])
    assert all(own[1][end:])
    assert all(whole[1][start:])
    chat = vocabulary("v1")["train"][0]["messages"]
    ids, mask = load_chat_encoder(GOLDEN / "tok_v1", original_labels=False).encode(chat)
    assert mask[ids.index(704)] is False
    assert mask[ids.index(704) + 1 :] == [True] * (len(ids) - ids.index(704) - 1)


def test_glm4_tools_are_told_in_the_words_of_the_official_template(tmp_path: Path) -> None:
    encoder = load_chat_encoder(GOLDEN / "tok_glm4")
    tools = [{"type": "function", "function": TOOLS[0]}]
    messages = [{"role": "user", "content": "price <|user|>?"}]
    ids = encoder.prompt(messages, tools=tools)
    official = json.loads((GOLDEN / "tok_glm4" / "tokenizer_config.json").read_text(encoding="utf-8"))["chat_template"]
    text = saved("glm4").apply_chat_template(
        [{"role": "system", "content": "", "tools": tools}, {"role": "user", "content": "price "}],
        chat_template=official,
        tokenize=False,
    )
    wanted = saved("glm4")(text, add_special_tokens=False)["input_ids"]
    assert ids[: len(wanted) - 1] == wanted[:-1]
    assert ids.count(encoder.tokenizer.convert_tokens_to_ids("<|user|>")) == 1
    shutil.copyfile(GOLDEN / "tok_glm4" / "tokenizer.model", tmp_path / "tokenizer.model")
    with pytest.raises(RowError, match="the tokenizer's directory has no chat template that describes tools to glm-4"):
        load_chat_encoder(tmp_path).prompt(messages, tools=tools)


@pytest.mark.parametrize("name", ["v1", "v2"])
def test_rounds_want_questions_and_answers_in_turn(name: str) -> None:
    encoder = load_chat_encoder(GOLDEN / f"tok_{name}")
    with pytest.raises(RowError, match="knows questions and answers in turn only, not user, user"):
        encoder.prompt([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}])
    with pytest.raises(RowError, match="not observation"):
        encoder.prompt([{"role": "observation", "content": "a"}])


def test_roles_are_known_ones() -> None:
    with pytest.raises(RowError, match="knows no role 'critic'"):
        load_chat_encoder(GOLDEN / "tok_v3").prompt([{"role": "critic", "content": "a"}])


def test_the_vocabulary_alone(tmp_path: Path) -> None:
    """Ids need nothing else; the chat format of ChatGLM2 and 3 must be said."""
    for name, file in (("v1", "ice_text.model"), ("v3", "tokenizer.model"), ("glm4", "tokenizer.model")):
        (tmp_path / name).mkdir()
        shutil.copyfile(GOLDEN / f"tok_{name}" / file, tmp_path / name / file)
        assert load_tokenizer(tmp_path / name).encode_texts(lines()) == vocabulary(name)["lines"]
    with pytest.raises(ModelError, match=r"Say model\.family=chatglm2 or model\.family=chatglm3"):
        load_chat_encoder(tmp_path / "v3")
    for family, name in (("chatglm2", "v2"), ("chatglm3", "v3")):
        encoder = load_chat_encoder(tmp_path / "v3", family=family)
        chat = vocabulary(name)["chat"][1]
        assert encoder.prompt(chat["messages"]) == chat["input_ids"]
    with pytest.raises(
        ModelError, match=r"unknown model.family 'chatglm4'. Known: auto, chatglm, chatglm2, chatglm3, glm4"
    ):
        load_tokenizer(tmp_path / "v3", family="chatglm4")
    with pytest.raises(ModelError, match=r"model.family = glm4, but .*tokenizer.model is the vocabulary of auto"):
        load_tokenizer(tmp_path / "v3", family="glm4")
    with pytest.raises(ModelError, match=r"model.family = chatglm3, but .*ice_text.model is the vocabulary of chatglm"):
        load_tokenizer(tmp_path / "v1", family="chatglm3")


@pytest.mark.parametrize(
    ("file", "text", "family"),
    [
        ("tokenizer_config.json", '{"name_or_path": "THUDM/chatglm3-6b-32k"}', "chatglm3"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"64795": {"content": "<|user|>"}}}', "chatglm3"),
        ("tokenization_chatglm.py", 'role_special_tokens = ["<|system|>", "<|user|>"]', "chatglm3"),
        ("tokenization_chatglm.py", 'prompt = "[Round {}]\\n\\n问：{}\\n\\n答："', "chatglm2"),
        ("config.json", '{"_name_or_path": "THUDM/codegeex2-6b", "padded_vocab_size": 9}', "chatglm2"),
    ],
)
def test_what_tells_chatglm2_from_chatglm3(file: str, text: str, family: str, tmp_path: Path) -> None:
    shutil.copyfile(GOLDEN / "tok_v3" / "tokenizer.model", tmp_path / "tokenizer.model")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "ChatGLMTokenizer"}')
    (tmp_path / file).write_text(text, encoding="utf-8")
    if file == "tokenizer_config.json":
        (tmp_path / "tokenization_chatglm.py").write_text("")
    assert load_tokenizer(tmp_path).family.value == family


def test_v1_of_the_first_months_has_image_tokens(tmp_path: Path) -> None:
    """150,528 rows: every id is 20,000 higher; the model's config says so."""
    folder = write(tmp_path / "m", "v1", tokenizer=True)
    config = json.loads((folder / "config.json").read_text())
    tokenizer_config = folder / "tokenizer_config.json"
    tokenizer_config.write_text(tokenizer_config.read_text().replace('"num_image_tokens": 0,', ""))
    (folder / "config.json").write_text(json.dumps(config | {"bos_token_id": 20704}))
    found = load_tokenizer(folder)
    wanted = vocabulary("v1")
    assert found.encode_texts(lines()) == [[index + 20000 for index in ids] for ids in wanted["lines"]]
    assert found.decode(found.encode_texts(["你好 x"])[0]) == "你好 x"
    assert found.bos_token_id == 20704
    model_config = json.loads((folder / "config.json").read_text())
    for key in ("mask_token_id", "gmask_token_id"):
        del model_config[key]
    (folder / "config.json").write_text(json.dumps(model_config))
    first = load_model(folder).config
    assert (first.mask_token_id, first.gmask_token_id) == tuple(found.convert_tokens_to_ids(["[MASK]", "[gMASK]"]))
    assert len(found) == 20000 + wanted["len"]


def test_a_tokenizer_of_another_revision_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "m", "v1", tokenizer=True, bos_token_id=20704)  # tokenizer_config says 0 image tokens
    with pytest.raises(
        ModelError, match=r"is of another revision than the model next to it: <sop> is 704 there, and 20704"
    ):
        load_tokenizer(folder)


def test_another_template_on_an_official_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text(
        "{{ '[gMASK]<sop>' }}{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
    )
    encoder = load_chat_encoder(GOLDEN / "tok_glm4", chat_template=str(tmp_path / "t.jinja"))
    ids, mask = encoder.encode([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
    tokens = encoder.tokenizer.convert_tokens_to_ids(["[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<|endoftext|>"])
    assert [index for index in ids if index >= 956] == tokens
    assert mask[-2:] == [True, True]


@pytest.mark.parametrize("name", ["v1", "v3", "glm4"])
def test_processes_get_the_other_template_too(name: str, tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text(
        "{% if tools %}{{ '[gMASK]' + tools | tojson }}{% endif %}"
        "{% for m in messages %}{{ '[gMASK]' + m.role + ':' + m.content }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '[gMASK]assistant:' }}{% endif %}"
    )
    encoder = load_chat_encoder(GOLDEN / f"tok_{name}", chat_template=str(tmp_path / "t.jinja"))
    copy = pickle.loads(pickle.dumps(encoder))
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    for tools in (None, [{"name": "f", "parameters": {}}]):
        assert copy.encode(chat, tools) == encoder.encode(chat, tools)
        assert copy.prompt(chat[:1], tools) == encoder.prompt(chat[:1], tools)


@pytest.mark.parametrize("name", ["v1", "v3", "glm4"])
def test_control_strings_are_text_with_another_template_too(name: str, tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text("{% for m in messages %}{{ '[gMASK]' + m.content }}{% endfor %}")
    encoder = load_chat_encoder(GOLDEN / f"tok_{name}", chat_template=str(tmp_path / "t.jinja"))
    typed = "ab[gMASK] [MASK]<sop><eop>c<|user|>d</s>"
    ids, gmask = (
        encoder.prompt([{"role": "user", "content": typed}]),
        encoder.tokenizer.convert_tokens_to_ids("[gMASK]"),
    )
    assert ids == [gmask, *encoder.tokenizer.encode_texts([typed])[0]]


@pytest.mark.parametrize("has_own_tokenizer", [True, False])
@pytest.mark.parametrize("name", ["v1", "v3"])
def test_an_export_asks_as_training_did(name: str, has_own_tokenizer: bool, tmp_path: Path) -> None:
    """With a template of one's own, and where the weights' directory has no vocabulary (model.tokenizer)."""
    folder = write(tmp_path / "model", name, tokenizer=has_own_tokenizer)
    (tmp_path / "t.jinja").write_text("{% for m in messages %}{{ m.role + ': ' + m.content + '</s>' }}{% endfor %}\n")
    model, chat = load_model(folder), [{"role": "user", "content": "hello"}]
    for template in ("", str(tmp_path / "t.jinja")):
        encoder = load_chat_encoder(folder if has_own_tokenizer else GOLDEN / f"tok_{name}", chat_template=template)
        export = tmp_path / f"export{bool(template)}"
        write_folder(model, non_weight_files(model, encoder), export, "hf", None)
        found = load_chat_encoder(export)
        assert found.prompt(chat) == encoder.prompt(chat)
        assert {*found.stop_ids} == {*encoder.stop_ids}
        assert type(found) is type(encoder) or (name == "v3" and not has_own_tokenizer)


def test_pieces_are_tokenised_each_for_itself() -> None:
    form = load_chat_encoder(GOLDEN / "tok_v3")
    [(ids, mask)] = form.encode_pieces([[Piece("你"), Piece((7,), True), Piece("", True), Piece("好")]])
    assert ids == [*form.tokenizer.encode_texts(["你"])[0], 7, *form.tokenizer.encode_texts(["好"])[0]]
    assert mask.count(True) == 1
