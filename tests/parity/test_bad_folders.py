"""Official folders that are incomplete, foreign or hostile: each is told for what it is, and nothing in it runs."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from golden import GOLDEN
from official import random_weights, write

from toolkit.config.schema import Dtype, ModelConfig
from toolkit.messages import ModelError
from toolkit.models import load_model, load_tokenizer
from toolkit.models.directory import read_config
from toolkit.models.load import create_model

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"


def change_config(**changes: Any) -> Callable[[Path], None]:
    """Return what sets keys of config.json; None removes one."""

    def change(folder: Path) -> None:
        file = folder / "config.json"
        config = json.loads(file.read_text()) | changes
        file.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))

    return change


def shard(folder: Path) -> Path:
    """Return the last weight file."""
    return sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")])[-1]


def cut(folder: Path) -> None:
    file = shard(folder)
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def replaced(content: bytes) -> Callable[[Path], None]:
    return lambda folder: shard(folder).write_bytes(content) and None


WRONG: dict[str, tuple[str, dict[str, Any], Callable[[Path], None], str]] = {
    "no weights": ("v3", {"shards": 1}, lambda folder: shard(folder).unlink(), "holds no weights"),
    "missing shard": (
        "v1",
        {"pickled": True},
        lambda folder: shard(folder).unlink(),
        "which its index lists: download",
    ),
    "no index": (
        "glm4",
        {},
        lambda folder: (folder / "model.safetensors.index.json").unlink(),
        "holds shards (model-00001-of-00002.safetensors …) but not the index",
    ),
    "half a pickled shard": ("v2", {"pickled": True}, cut, "is cut short ("),
    "half a safetensors shard": ("v3", {}, cut, "download it again"),
    "empty pickled shard": ("v2", {"pickled": True}, replaced(b""), "is cut short (0 bytes)"),
    "lfs pointer": (
        "v1",
        {"pickled": True},
        replaced(POINTER),
        "is a git-lfs pointer, not the weights: run `git lfs pull`",
    ),
    "quantised": ("v2", {}, change_config(quantization_bit=4), "holds quantised weights (quantization_bit = 4"),
    "quantised v1": ("v1", {}, change_config(quantization_bit=8), "Use the repository without -int4 or -int8"),
    "linear bias": (
        "v2",
        {},
        change_config(add_bias_linear=True),
        "has add_bias_linear = True; no released ChatGLM has",
    ),
    "LayerNorm": ("v3", {}, change_config(rmsnorm=False), "has rmsnorm = False"),
    "no final norm": ("v3", {}, change_config(post_layer_norm=False), "has post_layer_norm = False"),
    "other residual": (
        "v3",
        {},
        change_config(apply_residual_connection_post_layernorm=True),
        "has apply_residual_connection_post_layernorm = True",
    ),
    "dropout": ("glm4", {}, change_config(hidden_dropout=0.1), "has hidden_dropout = 0.1"),
    "one channel": ("v1", {}, change_config(position_encoding_2d=False), "has position_encoding_2d = False"),
    "ratio of nothing": ("v2", {}, change_config(rope_ratio=0), "has rope_ratio = 0: not a positive number"),
    "ratio of an unknown model": (
        "v2",
        {},
        change_config(rope_ratio=50, _name_or_path=None),
        "has rope_ratio = 50, which ChatGLM2 takes otherwise than ChatGLM3",
    ),
    "no length": ("v2", {}, change_config(seq_length=None), "lacks seq_length"),
    "missing keys": ("v1", {}, change_config(num_layers=None, vocab_size=None), "lacks num_layers, vocab_size"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named(name: str, tmp_path: Path) -> None:
    family, options, spoil, message = WRONG[name]
    folder = write(tmp_path / "m", family, **options)
    assert read_config(str(folder))
    spoil(folder)
    with pytest.raises(ModelError) as caught:
        load_model(folder)
    assert message in str(caught.value)
    assert "m" in str(caught.value)


class Hostile:
    """Writes a file when unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return (Path.touch, (self.file,))


@pytest.mark.parametrize("legacy", [False, True])
def test_a_pickle_that_wants_to_run_code_is_refused(legacy: bool, tmp_path: Path) -> None:
    folder = write(tmp_path / "m", "v2", shards=1, pickled=True)
    weights = random_weights(json.loads((folder / "config.json").read_text()))
    trap = {**weights, "trap": Hostile(tmp_path / "executed")}
    torch.save(trap, folder / "pytorch_model.bin", _use_new_zipfile_serialization=not legacy)
    message = (
        r"is a pickle that wants to run code, which is rejected: Unsupported global: GLOBAL \w+ was not an allowed"
    )
    with pytest.raises(ModelError, match=message):
        load_model(folder)
    assert not (tmp_path / "executed").exists()
    # The trap itself works: what is refused here is what pickle would do.
    pickle.loads(pickle.dumps(Hostile(tmp_path / "executed")))
    assert (tmp_path / "executed").exists()


def test_a_pickle_of_something_else_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "m", "v2", shards=1, pickled=True)
    torch.save({"a": 1}, folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match="holds something else than named tensors"):
        load_model(folder)


def test_torchs_old_format_is_read(tmp_path: Path) -> None:
    folder = write(tmp_path / "m", "v1", shards=1, pickled=True)
    weights = random_weights(json.loads((folder / "config.json").read_text()))
    torch.save(weights, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    state = load_model(folder).state_dict()
    assert all(torch.equal(state[name], value) for name, value in weights.items() if not name.endswith("inv_freq"))


@pytest.mark.parametrize("pickled", [True, False])
def test_wrong_keys_are_listed(pickled: bool, tmp_path: Path) -> None:
    folder = write(tmp_path / "m", "v3", shards=1, pickled=pickled)
    weights = random_weights(json.loads((folder / "config.json").read_text()))
    del weights["transformer.encoder.layers.1.mlp.dense_4h_to_h.weight"]
    weights["transformer.encoder.layers.7.input_layernorm.weight"] = torch.ones(48)
    weights["transformer.encoder.layers.0.self_attention.query_key_value.bias"] = torch.ones(63)
    if pickled:
        torch.save(weights, folder / "pytorch_model.bin")
    else:
        from safetensors.torch import save_file

        save_file(weights, folder / "model.safetensors")
    with pytest.raises(ModelError) as caught:
        load_model(folder)
    assert str(caught.value) == (
        f"the weights in {folder} are not those of GlmForCausalLM: missing [model.layers.1.mlp.down_proj.weight], "
        "unexpected [transformer.encoder.layers.7.input_layernorm.weight], of another shape "
        "[transformer.encoder.layers.0.self_attention.query_key_value.bias (63,) instead of (64,)]."
    )


def test_nothing_in_the_folder_is_imported_and_nothing_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AutoConfig would wait for an answer on stdin; the folder's Python files end the process when imported."""
    monkeypatch.setattr("sys.stdin", None)
    for family in ("v1", "v2", "v3", "glm4"):
        folder = write(tmp_path / family, family, tokenizer=True)
        assert "SystemExit" in (folder / "modeling_chatglm.py").read_text()
        assert "SystemExit" in (folder / "tokenization_chatglm.py").read_text()
        load_model(folder)
        load_tokenizer(folder)


def test_vocabularies_that_cannot_be_read(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.model"
    file.write_bytes(POINTER)
    with pytest.raises(ModelError, match="is a git-lfs pointer, not the vocabulary: run `git lfs pull`"):
        load_tokenizer(tmp_path)
    file.write_bytes(b"nonsense")
    with pytest.raises(ModelError, match=r"Cannot read '.*tokenizer.model': .* Download it again"):
        load_tokenizer(tmp_path)
    file.write_bytes((GOLDEN / "tok_glm4" / "tokenizer.model").read_bytes()[:-100] + b"\n=== 5\n")
    with pytest.raises(ModelError, match=r"Cannot read '.*tokenizer.model': .* Download it again"):
        load_tokenizer(tmp_path)
    file.rename(tmp_path / "ice_text.model")
    (tmp_path / "ice_text.model").write_bytes((GOLDEN / "tok_v2" / "tokenizer.model").read_bytes())
    with pytest.raises(ModelError, match="is not ChatGLM-6B's vocabulary: it has no <sop>"):
        load_tokenizer(tmp_path)
    (tmp_path / "ice_text.model").unlink()
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "ChatGLMTokenizer"}')
    with pytest.raises(ModelError, match="has an official ChatGLM tokenizer, but not its vocabulary"):
        load_tokenizer(tmp_path)


def built(folder: Path, tokenizer: Path) -> None:
    """Build as training does."""
    create_model(ModelConfig(path=str(folder)), Dtype.fp32, load_tokenizer(tokenizer), seed=0)


def test_model_and_tokenizer_of_different_revisions(tmp_path: Path) -> None:
    """What used to end as "130004 is not in list" in the middle of training."""
    folder = write(tmp_path / "m", "v1", bos_token_id=804, eos_token_id=805)
    with pytest.raises(
        ModelError, match=r"the tokenizer's <sop> is 704, the model's 804 \(bos_token_id in config.json\)"
    ):
        built(folder, GOLDEN / "tok_v1")
    built(write(tmp_path / "right", "v1"), GOLDEN / "tok_v1")


def test_model_and_tokenizer_of_different_families(tmp_path: Path) -> None:
    with pytest.raises(
        ModelError, match=r"the model ends its answers with \[2\].*the tokenizer's format of glm4 with \[956"
    ):
        built(write(tmp_path / "m", "v3"), GOLDEN / "tok_glm4")
    with pytest.raises(ModelError, match="the tokenizer has 1009 tokens, the model only 1008"):
        built(write(tmp_path / "n", "v3", padded_vocab_size=1008), GOLDEN / "tok_v3")
    built(write(tmp_path / "right", "glm4"), GOLDEN / "tok_glm4")
