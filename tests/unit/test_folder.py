"""What is wrong with a model folder, told before anything is loaded."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from toolkit.errors import ModelError
from toolkit.models.folder import read_config


def good(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "llama"}')
    save_file({"a": np.ones((3, 4), dtype=np.float32)}, folder / "model.safetensors")


def config(content: str) -> Callable[[Path], None]:
    return lambda folder: (folder / "config.json").write_text(content) and None


def weights(content: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / "model.safetensors").write_bytes(content) and None


def index(names: list[str]) -> Callable[[Path], None]:
    content = json.dumps({"weight_map": {str(i): name for i, name in enumerate(names)}})
    return lambda folder: (folder / "model.safetensors.index.json").write_text(content) and None


def cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-5])


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


WRONG = {
    "no config": (lambda folder: (folder / "config.json").unlink(), "holds no config.json"),
    "broken config": (config("{"), "config.json is not JSON"),
    "not an object": (config("[]"), "config.json is not a JSON object"),
    "chatglm by name only": (
        config('{"model_type": "chatglm"}'),
        "has model_type chatglm, but the keys of no known ChatGLM",
    ),
    "shards without index": (
        lambda folder: (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors"),
        "holds shards (model-00001-of-00002.safetensors …) but not the index that lists them",
    ),
    "remote code": (config('{"model_type": "x", "auto_map": {}}'), "names Python code to run (auto_map)"),
    "hidden remote code": (config('{"_attn_implementation_internal": "x/y"}'), "names Python code to run"),
    "missing shard": (index(["a.safetensors", "model.safetensors"]), "lacks ['a.safetensors'], which its index lists"),
    "index that leaves": (index(["../x.safetensors"]), "names files outside of its folder"),
    "pickle": (pickled, "pytorch_model.bin, a pickle; of other models than ChatGLM only safetensors are read"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "holds no weights"),
    "lfs pointer": (
        weights(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"),
        "is a git-lfs pointer, not the weights: run `git lfs pull` in",
    ),
    "cut short": (cut, "bytes where its header says"),
    "empty": (weights(b""), "is cut short (0 bytes)"),
    "a huge header": (weights(b"\xff" * 8 + b"{}"), "is cut short (10 bytes)"),
    "no safetensors": (weights(b"\x04\0\0\0\0\0\0\0abcd"), "is not a safetensors file"),
}


def test_a_good_folder(tmp_path: Path) -> None:
    good(tmp_path)
    assert read_config(str(tmp_path)) == {"model_type": "llama"}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named(name: str, tmp_path: Path) -> None:
    good(tmp_path)
    spoil, message = WRONG[name]
    spoil(tmp_path)
    with pytest.raises(ModelError) as caught:
        read_config(str(tmp_path))
    assert message in str(caught.value)
