"""Official folder to model to official folder, bit for bit; and to a directory that plain transformers loads."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from golden import GOLDEN, SETS, inputs, load
from official import write
from safetensors import SafetensorError

from toolkit.cli import main
from toolkit.export import write as export_write
from toolkit.messages import CheckpointError, ModelError
from toolkit.models import load_model, load_tokenizer, save_model
from toolkit.models.weights import WeightFiles


def bits(value: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes."""
    return value.contiguous().view(torch.uint8)


def assert_same_folder(before: Path, after: Path) -> None:
    """Every tensor in the same file with the same precision, shape and bits; every other file byte for byte."""
    one, other = WeightFiles(before), WeightFiles(after)
    assert set(one) == set(other)
    for name, info in one.items():
        assert other[name].file.name == info.file.name, name
        assert (other[name].dtype, other[name].shape) == (info.dtype, info.shape), name
        with one.open(name) as left, other.open(name) as right:
            assert torch.equal(bits(left), bits(right)), name
    weights = {info.file.name for info in one.values()}
    others = {file.name for file in before.iterdir() if file.is_file()} - weights
    for name in others:
        assert (after / name).read_bytes() == (before / name).read_bytes(), name


FOLDERS = {
    **{name: lambda path, name=name: GOLDEN / name for name in SETS},
    "v1, LayerNorms in float32, three shards": lambda path: write(path, "v1", shards=3, pickled=True, tokenizer=True),
    "v2, heads interleaved": lambda path: write(path, "v2", multi_query_attention=False, shards=1, tokenizer=True),
    "v2-32k, interpolated positions": lambda path: write(path, "v2", rope_ratio=4, tokenizer=True),
    "glm-4, no bias, pickled": lambda path: write(path, "glm4", add_qkv_bias=False, shards=2, pickled=True),
}


@pytest.mark.parametrize("kind", FOLDERS)
def test_there_and_back(kind: str, tmp_path: Path) -> None:
    folder = FOLDERS[kind](tmp_path / "in")
    model = load_model(folder)
    save_model(model, tmp_path / "back", "official")
    assert_same_folder(folder, tmp_path / "back")
    save_model(model, tmp_path / "hf")
    save_model(load_model(tmp_path / "hf"), tmp_path / "back from hf", "official")
    assert_same_folder(folder, tmp_path / "back from hf")


@pytest.mark.parametrize("name", SETS[1:])
def test_plain_transformers_loads_what_is_saved(name: str, tmp_path: Path) -> None:
    save_model(load_model(GOLDEN / name), tmp_path / "hf")
    plain, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", dtype=torch.float32, output_loading_info=True
    )
    assert not any(report.values()), report
    given = inputs(name, "plain")
    assert torch.equal(plain(**given).logits, load(name)(**given).logits)
    found = plain.generate(given["input_ids"][:, :8], max_new_tokens=8, do_sample=False)
    assert torch.equal(found, load(name).generate(given["input_ids"][:, :8], max_new_tokens=8, do_sample=False))


def test_what_transformers_itself_saves_loads_again(tmp_path: Path) -> None:
    """`save_pretrained` of ChatGLM-6B, for those who never heard of `save_model`."""
    model = load("v1")
    model.save_pretrained(tmp_path / "saved")
    given = inputs("v1", "plain")
    assert torch.equal(load_model(tmp_path / "saved")(**given).logits, model(**given).logits)
    again = type(model).from_pretrained(tmp_path / "saved")
    assert torch.equal(again(**given).logits, model(**given).logits)


def test_trained_weights_go_back_in_the_official_precision(tmp_path: Path) -> None:
    """What was changed in float32 comes out rounded to float16, in its own shard; the rest is untouched."""
    folder = write(tmp_path / "in", "v3", shards=2)
    model = load_model(folder, dtype=torch.float32)
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight += 1.0
    save_model(model, tmp_path / "out", "official")
    before, after = WeightFiles(folder), WeightFiles(tmp_path / "out")
    joint = "transformer.encoder.layers.1.self_attention.query_key_value.weight"
    for name in before:
        with before.open(name) as left, after.open(name) as right:
            assert torch.equal(left, right) == (name != joint)
    with before.open(joint) as left, after.open(joint) as right:
        assert torch.equal(right[32:48], (left[32:48].float() + 1).half())
        assert torch.equal(right[:32], left[:32])
        assert torch.equal(right[48:], left[48:])


def test_both_formats_in_one_folder(tmp_path: Path) -> None:
    """As in chatglm3-6b's repository: safetensors are read; where only the pickles were downloaded, those."""
    folder = write(tmp_path / "in", "v3", seed=1)
    write(folder, "v3", seed=2, pickled=True, shards=3)
    safe, pickled = (load_model(write(tmp_path / f"{seed}", "v3", seed=seed)).state_dict() for seed in (1, 2))
    name = "lm_head.weight"
    model = load_model(folder)
    assert torch.equal(model.state_dict()[name], safe[name])
    save_model(model, tmp_path / "out", "official")
    assert not list((tmp_path / "out").glob("*.bin*")), "other weights than the model's"
    (folder / "model-00002-of-00002.safetensors").unlink()
    model = load_model(folder)
    assert torch.equal(model.state_dict()[name], pickled[name])
    save_model(model, tmp_path / "out2", "official")
    assert sorted(file.name for file in (tmp_path / "out2").glob("*.index.json")) == ["pytorch_model.bin.index.json"]


def test_values_without_room_are_refused(tmp_path: Path) -> None:
    model = load_model(write(tmp_path / "in", "v2"), dtype=torch.float32)
    with torch.no_grad():
        model.lm_head.weight[0, 0] = 1e6
    with pytest.raises(CheckpointError, match=r"transformer\.output_layer\.weight holds values that overflow float16"):
        save_model(model, tmp_path / "out", "official")


def test_what_was_never_official_has_no_official_layout(tmp_path: Path) -> None:
    config = transformers.GlmConfig(
        vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, head_dim=8,
        pad_token_id=None, eos_token_id=1,
    )  # fmt: skip
    transformers.GlmForCausalLM(config).save_pretrained(tmp_path / "hf")
    with pytest.raises(ModelError, match="this GlmForCausalLM did not come from an official ChatGLM directory"):
        save_model(load_model(tmp_path / "hf"), tmp_path / "out", "official")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda record: record["tensors"]["transformer.output_layer.weight"].update(file="../x.bin"), "is damaged"),
        (lambda record: record["tensors"]["transformer.output_layer.weight"].update(dtype="load"), "is damaged"),
        (lambda record: record.pop("tensors"), "is damaged"),
        (
            lambda record: record["tensors"].update({"transformer.x": {"file": "a.bin", "dtype": "half"}}),
            "needs transf",
        ),
    ],
)
def test_a_record_from_elsewhere_is_not_trusted(change, message: str, tmp_path: Path) -> None:
    """It travels with an export; nothing is written outside of the folder that was asked for."""
    save_model(load("v3"), tmp_path / "hf")
    file = tmp_path / "hf" / "official" / "layout.json"
    record = json.loads(file.read_text())
    change(record)
    file.write_text(json.dumps(record))
    with pytest.raises(ModelError, match=message):
        save_model(load_model(tmp_path / "hf"), tmp_path / "out" / "deep", "official")
    assert not list(tmp_path.rglob("x.bin"))


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    for format in ("hf", "official"):
        with pytest.raises(ModelError, match="exists already: nothing was written"):
            save_model(load("v3"), tmp_path / "out", format)
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("name", ["v1", "v2", "v3", "glm4"])
def test_the_command_converts_both_ways(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path / "in", name, tokenizer=True)
    monkeypatch.setattr("sys.stdin", None)  # whoever asks a question there fails
    (tmp_path / "hf.tmp").mkdir()
    (tmp_path / "hf.tmp" / "mine").write_text("the user's")
    assert main(["export-model", f"model.path={folder}", "format=hf", f"output={tmp_path}/hf"]) == 0
    assert (tmp_path / "hf.tmp" / "mine").read_text() == "the user's"
    assert main(["export-model", f"model.path={tmp_path}/hf", "format=official", f"output={tmp_path}/back"]) == 0
    assert_same_folder(folder, tmp_path / "back")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "hf", "hf.tmp", "in"]
    capsys.readouterr()
    assert main(["export-model", f"model.path={folder}", "format=hf", f"output={tmp_path}/hf"]) == 2
    assert "exists already" in capsys.readouterr().err
    before, after = load_tokenizer(folder), load_tokenizer(tmp_path / "hf")
    text = "def f(x):\n\treturn  x  # 你好 <|user|> philosophy"
    assert before(text)["input_ids"] == after(text)["input_ids"]


def test_a_full_disk_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """safetensors reports it as an error of its own, after some files were written."""
    real = export_write.save_model

    def full(model: object, path: Path, *rest: object, **options: object) -> None:
        real(model, path, *rest, **options)
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(export_write, "save_model", full)
    source = write(tmp_path / "in", "v3", tokenizer=True)
    assert main(["export-model", f"model.path={source}", "format=hf", f"output={tmp_path}/hf"]) == 74
    assert "No space left on device" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


PLAIN = """
import json, sys
assert not any(name.split(".")[0] == "toolkit" for name in sys.modules)
from transformers import AutoModelForCausalLM, AutoTokenizer
folder, lines, chats = sys.argv[1], *map(json.loads, sys.argv[2:])
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder)
print(json.dumps({
    "ids": tokenizer(lines, add_special_tokens=False)["input_ids"],
    "texts": [tokenizer.decode(ids) for ids in tokenizer(lines, add_special_tokens=False)["input_ids"]],
    "with_special": tokenizer(lines[0])["input_ids"],
    "chats": [tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"] for chat in chats],
    "stops": model.generation_config.eos_token_id,
    "padded": tokenizer(["a", "a b c d e f"], padding=True)["input_ids"],
    "code": sorted(name for name in sys.modules if "chatglm" in name),
}))
"""


@pytest.mark.parametrize("name", ["v2", "v3", "glm4"])
def test_a_program_without_this_package_gets_the_right_ids(name: str, tmp_path: Path) -> None:
    from golden import lines, vocabulary

    folder = write(tmp_path / "in", name, tokenizer=True)
    assert main(["export-model", f"model.path={folder}", "format=hf", f"output={tmp_path}/hf"]) == 0
    wanted = vocabulary(name)
    texts = [*lines()[:200], "philosophy and sophisticated people operations", "sop", "the sop eop says"]
    chats = [chat["messages"] for chat in wanted["chat"] if "gMASK" not in str(chat["messages"])]
    done = subprocess.run(
        [sys.executable, "-c", PLAIN, str(tmp_path / "hf"), json.dumps(texts), json.dumps(chats)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=120,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    ours = load_tokenizer(folder)
    assert found["ids"] == ours.encode_texts(texts)
    assert found["ids"][:200] == wanted["lines"][:200]
    assert found["texts"][:200] == wanted["decoded"][:200]
    assert found["with_special"] == ours(texts[0])["input_ids"]
    assert len(chats) == 4
    assert found["chats"] == [chat["input_ids"] for chat in wanted["chat"] if chat["messages"] in chats]
    stops = found["stops"] if isinstance(found["stops"], list) else [found["stops"]]
    assert stops == ours.format.stop_ids
    assert found["padded"][0][:3] == [ours.pad_token_id] * 3
    assert all("transformers" in module for module in found["code"])
