"""What is wrong with a model folder, told before anything is loaded."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from toolkit.checkpoint.directory import record_file, write_manifest
from toolkit.cli import eval, main
from toolkit.config.schema import ModelConfig
from toolkit.messages import ModelError
from toolkit.models.directory import code_files, has_runnable_code, is_trusted, read_config, trust_code
from toolkit.train.startup import warn_remote_code


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
    "hidden remote code": (config('{"_attn_implementation_internal": "sdpa"}'), "names Python code to run"),
    "code of another folder": (
        config('{"auto_map": {"AutoConfig": "sub/evil.M", "AutoModel": ["you/other--own.M", null], "X": "own.M"}}'),
        "names code outside of its Python files (sub/evil.M, you/other--own.M, own.M): rejected, trusted or not.",
    ),
    "a kernel": (config('{"attn_implementation": {"": "x/y"}}'), "outside of its Python files (x/y): rejected"),
    "a kernel of a part": (config('{"a": [{"_attn_implementation": "paged|x/y:z"}]}'), "files (paged|x/y:z): rejected"),
    "a kernel of an official folder": (config('{"padded_vocab_size": 9, "attn_implementation": "x/y"}'), "(x/y)"),
    "missing shard": (index(["a.safetensors", "model.safetensors"]), "lacks ['a.safetensors'], which its index lists"),
    "index that leaves": (index(["../x.safetensors"]), "names files outside of its directory"),
    "pickle": (pickled, "pytorch_model.bin, a pickle; of other models than ChatGLM only safetensors are read"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "holds no weights"),
    "lfs pointer": (
        weights(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"),
        "is a git-lfs pointer, not the weights: run `git lfs pull` in",
    ),
    "cut short": (cut, "bytes where its header says"),
    "empty": (weights(b""), "is cut short (0 bytes)"),
    "a huge header": (weights(b"\xff" * 8 + b"{}"), "is cut short (10 bytes)"),
    "no safetensors": (weights(b"\x04\0\0\0\0\0\0\0abcd"), "Cannot read '"),
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


OWN = '{"model_type": "x", "auto_map": {"AutoConfig": "own.M", "AutoTokenizer": ["own.T", null]}}'


def test_a_directory_whose_code_is_not_trusted_is_not_called_damaged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good(tmp_path)
    config(OWN)(tmp_path)
    (tmp_path / "own.py").write_text("raise SystemExit('this ran')")
    files = {file.name: record_file(file) for file in tmp_path.iterdir()}
    write_manifest(tmp_path, files, {})
    assert main(["verify", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert ": whole, " in said and "no forward: " in said and "names Python code to run (auto_map)" in said
    with (tmp_path / "own.py").open("a") as file:
        file.write(" ")
    assert main(["verify", str(tmp_path)]) == 74
    assert "own.py" in capsys.readouterr().out


def test_trust_is_in_all_files(tmp_path: Path) -> None:
    good(tmp_path)
    config(OWN)(tmp_path)
    (tmp_path / "sub").mkdir()
    for name in ("own.py", "sub/part.py"):
        (tmp_path / name).write_text(f"name = {name!r} + {tmp_path.name!r}")
    with pytest.raises(ModelError, match=r"there are \['own.py', 'sub/part.py'\]"):
        read_config(str(tmp_path))
    trust_code(str(tmp_path))
    assert read_config(str(tmp_path))["model_type"] == "x" and len(code_files(tmp_path)) == 2
    (tmp_path / "sub" / "part.py").write_text("changed = True")
    assert not is_trusted(tmp_path)
    config(OWN.replace("own.M", "sub/part.M"))(tmp_path)
    trust_code(str(tmp_path))
    with pytest.raises(ModelError, match=r"\(sub/part.M\): rejected, trusted or not"):
        read_config(str(tmp_path))


@pytest.mark.parametrize("content", ['{"model_type": "llama"}', '{"padded_vocab_size": 9, "auto_map": {"A": "b.C"}}'])
def test_trust_without_effect(content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config(content)(tmp_path)
    (tmp_path / "b.py").write_text("")
    with pytest.raises(ModelError, match=r"trust_remote_code = true has no effect: .* brings no code that would run"):
        trust_code(str(tmp_path))
    warn_remote_code(ModelConfig(path=str(tmp_path), trust_remote_code=True))
    assert not capsys.readouterr().out
    config(OWN)(tmp_path)
    assert has_runnable_code(str(tmp_path)) and has_runnable_code("me/model")
    warn_remote_code(ModelConfig(path=str(tmp_path), trust_remote_code=True))
    assert "run with all your rights" in capsys.readouterr().out
    warn_remote_code(ModelConfig(path=str(tmp_path)))
    assert not capsys.readouterr().out


def test_evaluating_warns_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    good(tmp_path)
    config(OWN)(tmp_path)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr("toolkit.jobs.evaluate.evaluate_model", lambda *_: None)
    words = ["recipe=quickstart", "model=hf", f"model.path={tmp_path}", f"output={tmp_path}/answers.jsonl"]
    eval.run([*words, "model.trust_remote_code=true"])
    assert f"the Python files of {tmp_path} run with all your rights" in " ".join(capsys.readouterr().out.split("\n"))
