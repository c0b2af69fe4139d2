"""`toolkit new`: what it writes composes, is what was planned, and fits; what does not fit is not written."""

import json
import re
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from ranks import forked, run

from tests.unit.data_tools import ByteEncoder
from toolkit.cli import main
from toolkit.config.load import load
from toolkit.config.schema import LEARNING_RATES, Device, Dtype, Packing, RunConfig, TooLong, TuningMethod
from toolkit.data import first_rows
from toolkit.data.first_rows import tokenize_first_rows
from toolkit.messages import set_language
from toolkit.models.chat import fit_tokenizer
from toolkit.models.tokenizer_files import local_encoder

ROOT = Path(__file__).parents[2]
ROW = {"messages": [{"role": "user", "content": "a question"}, {"role": "assistant", "content": "an answer " * 30}]}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chat.jsonl").write_text(f"{json.dumps(ROW)}\n" * 100)
    return tmp_path


def new(*words: str) -> int:
    usual = {"model": "chatglm3_6b", "data": "chat.jsonl", "output": "mine.yaml"}
    return main(
        ["new", *(f"{k}={v}" for k, v in usual.items() if not any(w.startswith(f"{k}=") for w in words)), *words]
    )


def written() -> RunConfig:
    return load(["recipe=mine.yaml"]).cfg


@pytest.mark.parametrize(
    ("words", "method"),
    [
        (["gpus=8x80GB"], TuningMethod.full),
        (["gpus=1xRTX 4090"], TuningMethod.lora),
        (["gpus=1x8GB"], TuningMethod.qlora),
        (["gpus=8x80GB", "tuning=lora"], TuningMethod.lora),
        (["gpus=2x24GB", "tuning=full", "host_memory=512GB"], TuningMethod.full),
        (["gpus=3x80GB", "nodes=2"], TuningMethod.full),
    ],
)
def test_the_recipe_fits_by_the_plan(words: list[str], method: TuningMethod, folder: Path, said: list[str]) -> None:
    assert new(*words) == 0
    cfg = written()
    assert (cfg.tuning.method, cfg.optim.lr, cfg.data.max_length) == (method, LEARNING_RATES[method], 256)
    assert cfg.model.name == "ChatGLM3-6B" and [source.path for source in cfg.data.sources] == ["chat.jsonl"]
    is_offloaded = cfg.zero.offload_optimizer.device is not Device.none
    assert is_offloaded == any(word.startswith("host_memory") for word in words), "only where nothing else fits"
    machine = [word for word in words if not word.startswith("tuning=")]
    assert main(["plan", "recipe=mine.yaml", *machine, "output=plan.json"]) == 0
    assert json.loads(Path("plan.json").read_text())["recipe"]["fits"]
    assert "messages; 95 training samples; about 77 tokens" in Path("mine.yaml").read_text()


def test_each_comment_is_in_both_languages(folder: Path) -> None:
    assert new("gpus=1x8GB") == 0
    comments = re.findall(r"# .*", Path("mine.yaml").read_text(encoding="utf-8"))
    chinese = [line for line in comments if re.search("[一-鿿]", line)]
    assert len(chinese) >= 8
    assert not [line for line in comments if "{{" in line or "{%" in line]


@pytest.mark.parametrize("language", ["en", "zh"])
def test_what_it_names_to_type_next_is_in_the_recipe_and_works(language: str, folder: Path, said: list[str]) -> None:
    set_language(language)
    assert new("model=glm_tiny", "data=examples", "gpus=2xcpu") == 0
    commands = said[-1].strip().splitlines()
    text = Path("mine.yaml").read_text(encoding="utf-8")
    assert [command.split()[1] for command in commands] == ["check", "show", "launch"]
    assert all(f"#   {command.strip()}\n" in text for command in commands)
    for command in commands[:2]:
        assert main(command.split()[1:]) == 0
    assert written().precision.dtype is Dtype.fp32, "CPUs"


@pytest.mark.ranks
def test_the_recipe_trains(folder: Path) -> None:
    assert new("model=glm_tiny", "gpus=2xcpu") == 0
    finished = run(
        forked(2, str(ROOT / "run.py"), "recipe=mine.yaml", "train.max_steps=2", "run.name=made"), cwd=folder
    )
    assert finished.code == 0, finished.output[-3000:]
    assert Path("runs/made/DONE").is_file()


def test_plain_texts_are_packed(folder: Path) -> None:
    assert new("data=examples_text", "gpus=8x80GB") == 0
    data = written().data
    assert (data.packing, data.too_long, data.max_length) == (Packing.packed, TooLong.split, 2048)


def test_cards_without_bf16_get_fp16(folder: Path) -> None:
    assert new("gpus=8xV100 32GB") == 0
    assert written().precision.dtype is Dtype.fp16


def test_other_columns_and_a_path_that_yaml_would_read_otherwise(folder: Path) -> None:
    path = folder / "a #b: ${c}.jsonl"
    path.write_text('{"q": "a", "a": "b"}\n')
    assert new(f"data={path.name}", "gpus=8x80GB", "columns={prompt: q, response: a}") == 0
    (source,) = written().data.sources
    assert (source.path, source.columns) == (path.name, {"prompt": "q", "response": "a"})


@pytest.mark.parametrize("language", ["en", "zh"])
def test_tokens_are_counted_by_the_models_tokenizer(language: str, folder: Path, said: list[str]) -> None:
    """Of Chinese the fitted tokenizer makes a token of each byte here, not of four."""
    made = fit_tokenizer(lambda: ["abc"], 264, folder)
    made.save_pretrained(folder / "model")
    (folder / "model" / "config.json").write_text(json.dumps(CONFIG | {"max_position_embeddings": 4096}))
    rows = [{"prompt": "问", "response": "答" * 60}] * 250 + [{"prompt": "问", "response": "答" * 500}]
    Path("chat.jsonl").write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    set_language(language)
    assert new("model=model", "gpus=2xcpu") == 0
    assert (written().data.max_length, written().data.too_long) == (256, TooLong.truncate)
    assert "of the first 251 samples 190 tokens (median) and 1,510 (longest), by the model's tokenizer" in said[0] or (
        "前 251 个样本按模型的分词器计算，中位数 190 个 token，最长 1,510 个" in said[0]
    )
    assert "1 of 251 samples (0.4 %) are longer" in said[1] or "251 个样本中有 1 个（0.4 %）更长" in said[1]
    assert "by its tokenizer" in Path("mine.yaml").read_text(encoding="utf-8")
    del said[:]
    # Without the weights there is no plan, but what is said of the data before is the same.
    cfg = load(["recipe=mine.yaml"]).cfg
    encoder = local_encoder(cfg.model)
    assert encoder is not None
    report, lengths = tokenize_first_rows(cfg, encoder)
    report.print_longer(cfg.data)
    assert (len(lengths), lengths[-1], report.cut) == (251, 256, 1)
    assert said[0].startswith(("1 of 251 rows (0.4 %) are longer than", "251 行中有 1 行（0.4 %）长于"))


def test_no_file_is_opened_after_the_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b", "c"):
        Path(f"{name}.jsonl").write_text(json.dumps({"prompt": "q", "response": name}) + "\n")
    cfg = load(["recipe=quickstart", "data=[a.jsonl,b.jsonl,c.jsonl]"]).cfg
    opened, real = list[str](), first_rows.blocks
    monkeypatch.setattr(first_rows, "blocks", lambda path, *rest: opened.append(path.name) or real(path, *rest))
    for look in (lambda: tokenize_first_rows(cfg, ByteEncoder()), lambda: first_rows.formats_and_sizes(cfg.data)):
        monkeypatch.setattr(first_rows, "time", mock.Mock(monotonic=mock.Mock(side_effect=[0.0, 1.0, 9.0])))
        look()
    assert opened == ["a.jsonl", "a.jsonl", "b.jsonl"], "sizes of a first file are read however late it is"


CONFIG = {
    "model_type": "qwen2",
    "vocab_size": 1024,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


def test_a_directory_of_a_model(folder: Path) -> None:
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(CONFIG))
    assert new("model=model", "gpus=2xcpu") == 0
    assert (written().model.path, written().data.max_length) == ("model", 128), "as many as it has positions"
    assert main(["check", "recipe=mine.yaml"]) == 2, "there are no weights in it"


def test_nothing_is_written_where_nothing_fits(
    folder: Path, said: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert new("gpus=1x4GB", "model=chatglm3_6b", "tuning=full") == 2
    message = capsys.readouterr().err
    assert "nothing fits, so nothing was written. What would fit: " in message
    (remedy,) = re.findall(r"(host_memory=\d+GB) \(full\)", message) or [""]
    assert not Path("mine.yaml").exists()
    assert not remedy or new("gpus=1x4GB", "tuning=full", remedy) == 0


def test_a_shorter_length_is_named_where_it_is_enough(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    long: dict[str, Any] = {"prompt": "a", "response": "long " * 6000}
    (folder / "long.jsonl").write_text(json.dumps(long) + "\n")
    assert new("data=long.jsonl", "gpus=1x6GB") == 2
    (length,) = re.findall(r"max_length=(\d+) \(qlora\)", capsys.readouterr().err)
    assert new("data=long.jsonl", "gpus=1x6GB", f"max_length={length}") == 0
    assert written().data.max_length == int(length)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["gpus=8x80GB", "model=chatglm3_6"], "Did you mean 'chatglm3_6b'?"),
        (["gpus=8x80GB", "data=nothing.jsonl"], "There is no data file 'nothing.jsonl'"),
        (["gpus=8x80GB", "data=strange.jsonl"], "belong to no known format"),
        (["gpus=8x80GB", "data=docstrings"], "data = docstrings: no rows to look at"),
        (["gpus=8x80GB", "data=examples", "columns={prompt: q}"], "the group examples names its own"),
        (["gpus=8x80GB", "columns=["], "columns=:1: "),
        (["gpus=8x80GB", "columns=q"], "columns"),
        (["gpus=8xK9"], "no datasheet of 'K9'"),
        (["gpus=8x80GB", "max_length=100000"], "max_length = 100000: the model has 8192 positions"),
        (["gpus=8x80GB", "tuning=prompt"], "tuning = prompt is none of auto, full, lora, qlora"),
        (["gpus=8x80GB", "output=chat.jsonl"], "chat.jsonl exists already"),
        (["gpus=8x80GB", "output=no/mine.yaml"], "cannot write no/mine.yaml"),
        (["gpus=8x80GB", "data=pairs.jsonl"], "recipe=qwen3_dpo model=chatglm3_6b data=pairs.jsonl\n"),
        (["gpus=8x80GB", "preference=simpo"], "model=chatglm3_6b data=chat.jsonl preference=simpo\n"),
        (["gpus=8x80GB", "model=a/b", "preference=dpo"], "recipe=qwen3_dpo model=hf model.path=a/b data=chat.jsonl\n"),
        (["gpus=8x80GB", "rank=3"], "unknown argument 'rank=3'"),
        (["model="], "model is missing: toolkit new model=qwen3_8b"),
    ],
)
def test_mistakes_are_one_message(
    words: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "strange.jsonl").write_text('{"q": "a", "a": "b"}\n')
    (folder / "pairs.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n')
    before = (folder / "chat.jsonl").read_bytes()
    assert new(*words) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error and "/tmp" not in error.replace(str(folder), "")
    assert not (folder / "mine.yaml").exists() and (folder / "chat.jsonl").read_bytes() == before


def test_a_terminal_is_asked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    answers = iter(["qwen3-8bb", "chatglm3_6b", "nofile.jsonl", "chat.jsonl", "", "8", "8x80GB"])  # with mistakes
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda question: asked.append(question) or next(answers))
    monkeypatch.setattr("toolkit.extras.new_recipe.this_machine", lambda: None)
    assert main(["new"]) == 0
    expected = ["Model", "Model", "Data", "Data", "GPUs", "GPUs", "GPUs"]
    assert [question.split()[0] for question in asked] == expected, "each mistake is asked again at once"
    assert written().model.name == "ChatGLM3-6B"


def test_a_terminal_is_asked_for_columns(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the data has names of its own: a mistake asks for the data again, as nothing does."""
    Path("strange.jsonl").write_text('{"q": "a", "a": "b"}\n' * 20)
    asked: list[str] = []
    data = ["strange.jsonl", "", "strange.jsonl", "promt: q", "strange.jsonl", "prompt: q, response: a"]
    answers = iter(["chatglm3_6b", *data, "8x80GB"])
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda question: asked.append(question) or next(answers))
    monkeypatch.setattr("toolkit.extras.new_recipe.this_machine", lambda: None)
    assert main(["new"]) == 0
    assert [question.split()[0] for question in asked] == ["Model", *["Data", "Columns"] * 3, "GPUs"]
    assert "2xcpu" in asked[-1]
    assert written().data.sources[0].columns == {"prompt": "q", "response": "a"}


def test_the_gpus_of_this_node_are_taken(folder: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]) -> None:
    nvidia = folder / "bin" / "nvidia-smi"
    nvidia.parent.mkdir()
    nvidia.write_text("#!/bin/sh\necho 'NVIDIA GeForce RTX 4090, 24564, 8.9'\n")
    nvidia.chmod(0o755)
    assert shutil.which("sh")
    monkeypatch.setenv("PATH", f"{nvidia.parent}:/usr/bin:/bin")
    assert new() == 0
    assert any("1 x RTX 4090" in line for line in said)
