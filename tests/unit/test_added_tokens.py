"""`model.add_tokens`: what the tokenizer makes of them, which rows they get, and what cannot have any."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from official import write
from safetensors.torch import load_file

from tests.unit.test_named_templates import base_tokenizer
from toolkit.arguments import parse_checked
from toolkit.config.hub import resolve_model_path
from toolkit.config.schema import TuningConfig, TuningMethod
from toolkit.messages import ConfigError, ModelError
from toolkit.models import added_tokens, chat, directory, fine_tuning, load, load_weights, tokenizer_files
from toolkit.models.named_templates import control_tokens, use_template
from toolkit.plan.lookup import outline_of

ADDED = ["<|im_start|>", "<|im_end|>", "<ANS>"]
WORDS = ["red", "green", "blue", "apple", "pear", "plum", "runs", "walks", "sleeps"]
TEXTS = [(" ".join((WORDS * 3)[at : at + 4]), f"<ANS> {WORDS[at % 9]} {WORDS[at * 5 % 9]}") for at in range(18)]


def base_model(folder: Path, kind: str = "llama", is_tied: bool = False, spare: int = 0, **sizes: Any) -> Path:
    """Write a model of two layers without a chat template, and its tokenizer, which lacks the tokens of `ADDED`."""
    tokenizer = chat.fit_tokenizer(lambda: [" ".join(WORDS)] * 9, 300, folder.with_name("fitted"))
    tokenizer.chat_template = None
    config = transformers.AutoConfig.for_model(
        kind,
        vocab_size=len(tokenizer) + spare,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        tie_word_embeddings=is_tied,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=None,
        **sizes,
    )
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        model.get_input_embeddings().weight.add_(0.01)  # a mean that is not 0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def resolved(folder: Path, *more: str, config_only: bool = False) -> Any:
    """Return the config with the directory that has the tokens."""
    words = ["recipe=quickstart", "model=hf", f"model.path={folder}", f"prepare.dir={folder}-cache"]
    words += [f"model.add_tokens={json.dumps(ADDED)}", "model.chat_template=chatml", *more]
    return resolve_model_path(parse_checked(words).loaded, config_only=config_only).cfg


@pytest.mark.parametrize("is_tied", [False, True])
def test_new_rows_are_the_mean_and_old_ones_are_unchanged(tmp_path: Path, is_tied: bool) -> None:
    base = base_model(tmp_path / "base", is_tied=is_tied)
    cfg = resolved(base)
    made = Path(cfg.model.path)
    before, after = (load_file(folder / "model.safetensors") for folder in (base, made))
    assert before.keys() == after.keys()
    grown = [name for name in before if before[name].shape != after[name].shape]
    assert grown == sorted(["lm_head.weight", "model.embed_tokens.weight"][is_tied:])
    for name, value in before.items():
        assert torch.equal(after[name][: len(value)], value)
    for name in grown:
        mean = before[name].float().mean(dim=0)
        assert torch.equal(after[name][len(before[name]) :], mean.expand(3, -1).to(before[name].dtype))
    model = transformers.AutoModelForCausalLM.from_pretrained(made)
    assert model.config.vocab_size == len(before["model.embed_tokens.weight"]) + 3
    again = resolved(base)
    assert again.model.path == cfg.model.path and resolved(made).model.path == str(made)


def test_each_token_is_one_id_and_control_tokens_are_those_of_the_template(tmp_path: Path) -> None:
    base = base_model(tmp_path / "base")
    cfg = resolved(base)
    plain = transformers.AutoTokenizer.from_pretrained(cfg.model.path)
    for token in ADDED:
        index = plain.convert_tokens_to_ids(token)
        assert plain(f"red{token} apple", add_special_tokens=False)["input_ids"].count(index) == 1
        assert plain.decode([index]) == token
    assert [
        token in plain.all_special_tokens or plain.added_tokens_decoder[plain.convert_tokens_to_ids(token)].special
        for token in ADDED
    ] == [True, True, False]
    encoder = tokenizer_files.load_chat_encoder(cfg.model.path, chat_template="chatml")
    turns = [{"role": "user", "content": "red<|im_end|>"}, {"role": "assistant", "content": "<ANS> blue"}]
    ids, trained = encoder.encode(turns)
    start, end, answer = plain.convert_tokens_to_ids(ADDED)
    assert [list(ids).count(index) for index in (start, end, answer)] == [2, 2, 1]  # one in a row stays text
    assert trained[list(ids).index(answer)]
    before, after = (
        tokenizer_files.load_chat_encoder(folder, chat_template="alpaca") for folder in (base, cfg.model.path)
    )
    assert before.fingerprint != after.fingerprint  # of which the tokenized cache's name is made


def test_the_token_that_a_template_begins_with_is_a_control_token(tmp_path: Path) -> None:
    """Its file names that token `bos_token`."""
    added = json.dumps(control_tokens("llama3"))
    cfg = resolved(base_model(tmp_path / "base"), "model.chat_template=llama3", f"model.add_tokens={added}")
    encoder = tokenizer_files.load_chat_encoder(cfg.model.path, chat_template="llama3")
    begin = encoder.tokenizer.convert_tokens_to_ids("<|begin_of_text|>")
    assert encoder.tokenizer.added_tokens_decoder[begin].special
    ids = encoder.prompt([{"role": "user", "content": "<|begin_of_text|>"}])
    assert ids[0] == begin and ids.count(begin) == 1


def test_spare_rows_are_taken_first_and_all_files_are_links(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = base_model(tmp_path / "base", spare=3)
    made = Path(resolved(base).model.path)
    assert "spare rows" in capsys.readouterr().out
    assert (made / "model.safetensors").is_symlink()
    assert directory.added_tokens(made) == {token: 300 + at for at, token in enumerate(ADDED)}
    assert load.load_empty(made).config.vocab_size == 303
    some = Path(resolved(base_model(tmp_path / "some", spare=1)).model.path)
    assert load_file(some / "model.safetensors")["lm_head.weight"].shape[0] == 303


def test_only_files_with_embeddings_are_written_again(tmp_path: Path) -> None:
    base = base_model(tmp_path / "base")
    transformers.AutoModelForCausalLM.from_pretrained(base).save_pretrained(tmp_path / "cut", max_shard_size="20KB")
    tokenizer_files.load_tokenizer(base).save_pretrained(tmp_path / "cut")
    made = Path(resolved(tmp_path / "cut").model.path)
    files = sorted(made.glob("*.safetensors"))
    assert 0 < sum(file.is_symlink() for file in files) < len(files)
    index = json.loads((made / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(value.nbytes for file in files for value in load_file(file).values())
    transformers.AutoModelForCausalLM.from_pretrained(made)


@pytest.mark.parametrize("more", [[], ["tuning=lora"], ["tuning=lora", "tuning.save_modules=[embed_tokens,lm_head]"]])
@pytest.mark.parametrize("is_tied", [False, True])
def test_the_plan_counts_what_is_trained(tmp_path: Path, more: list[str], is_tied: bool) -> None:
    """Without weights of the new directory, as for `check` and `plan`."""
    cfg = resolved(base_model(tmp_path / "base", is_tied=is_tied), *more, config_only=True)
    assert not [*Path(cfg.model.path).glob("*.safetensors")]
    model = load.load_empty(cfg.model.path)
    fine_tuning.apply_tuning(model, cfg.tuning, Path(cfg.model.path), tokenizer_files.load_tokenizer(cfg.model.path), 0)
    trained = {name: tuple(value.shape) for name, value in model.named_parameters() if value.requires_grad}
    outline = outline_of(cfg)
    assert {name: outline.shapes[name] for name in outline.trained} == trained


def test_methods_that_would_never_learn_the_tokens_are_errors(tmp_path: Path) -> None:
    base = base_model(tmp_path / "base")
    for method in ("ptuning_v2", "prompt"):
        with pytest.raises(ConfigError, match="new tokens would never be learned"):
            resolved(base, f"tuning={method}")
    cfg = resolved(base)
    model = load_weights.load_model(cfg.model.path)
    frozen = TuningConfig(method=TuningMethod.freeze, last_layers=1)
    with pytest.raises(ConfigError, match=r"tuning.method = freeze leaves the embeddings as they are.*tuning.patterns"):
        fine_tuning.apply_tuning(model, frozen, base, tokenizer_files.load_tokenizer(cfg.model.path), 0)
    frozen.patterns = ["embed_tokens.*", "lm_head.*"]
    fine_tuning.apply_tuning(model, frozen, base, tokenizer_files.load_tokenizer(cfg.model.path), 0)


def test_models_whose_vocabulary_is_fixed_are_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="ChatGLM's own tokenizer are fixed"):
        resolved(write(tmp_path / "v3", "v3", tokenizer=True))
    per_layer = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 308, "num_kv_shared_layers": 0}
    base = base_model(tmp_path / "gemma", "gemma3n_text", is_tied=True, **per_layer)
    with pytest.raises(ModelError, match="embeddings of each layer"):
        resolved(base)


def test_a_template_without_its_tokens_says_how_to_add_them() -> None:
    with pytest.raises(ModelError, match=r'model.add_tokens=\["<\|im_end\|>", "<\|im_start\|>"\]'):
        use_template(base_tokenizer(), "chatml")


def test_rows_of_a_table() -> None:
    table = torch.tensor([[1.0, 2.0], [3.0, 6.0]], dtype=torch.bfloat16)
    assert added_tokens.with_rows(table, 4).tolist() == [[1, 2], [3, 6], [2, 4], [2, 4]]
    assert added_tokens.with_rows(table[:, 0], 3).tolist() == [1, 3, 2]
