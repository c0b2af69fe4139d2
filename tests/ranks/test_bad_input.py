"""What users get wrong: one message that says what, where and what to do; exit code 2; nothing made, nothing lost."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from ranks import REPOSITORY, TIMEOUT_S, Finished, forked, free_port, kill_session, run, start
from shared import tiny

from toolkit.cli import main
from toolkit.distributed import process_group, signals

RUN = str(REPOSITORY / "run.py")
GOOD = '{"prompt": "red", "response": "blue"}\n'


def rows(text: str | bytes) -> Callable[[Path], list[str]]:
    """Return a maker of overrides that train on a file with this content."""

    def make(folder: Path) -> list[str]:
        file = folder / "bad.jsonl"
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
        return [f"data.sources=[{{path: {file}}}]"]

    return make


def words(*overrides: str) -> Callable[[Path], list[str]]:
    """Return a maker of these overrides, {folder} filled in."""
    return lambda folder: [word.replace("{folder}", str(folder)) for word in overrides]


def model_folder(change: Callable[[Path], None]) -> Callable[[Path], list[str]]:
    """Return a maker of a tiny model folder that is then spoilt."""

    def make(folder: Path) -> list[str]:
        import transformers

        target = folder / "model"
        config = transformers.LlamaConfig(
            vocab_size=300, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1
        )
        transformers.LlamaForCausalLM(config).save_pretrained(target)
        change(target)
        return ["model=hf", f"model.path={target}"]

    return make


def official(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "chatglm", "quantization_bit": 4, "rmsnorm": True}))


def plain_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")


def without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def half_downloaded(folder: Path) -> None:
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[: len(content) // 2])


def read_only(folder: Path) -> list[str]:
    (folder / "file").write_text("not a folder")
    return [f"run.dir={folder}/file"]


def existing(folder: Path) -> list[str]:
    (folder / "runs" / "tiny").mkdir(parents=True)
    (folder / "runs" / "tiny" / "notes.txt").touch()  # what is empty is taken for the folder of a start that died
    return []


CASES: dict[str, tuple[Callable[[Path], list[str]], str]] = {
    "typo": (words("optim.learning=1"), r"command line: unknown key 'optim\.learning'"),
    "wrong type": (words("train.max_steps=ten"), r"'train\.max_steps' = ten must be a whole number"),
    "second recipe": (words("recipe=chatglm"), r"several recipes, quickstart, chatglm: give one\."),
    "missing data file": (words("data.sources=[{path: nosuch.jsonl}]"), r"nosuch\.jsonl: there is no such file"),
    "empty data file": (rows(""), r"bad\.jsonl' is empty"),
    "broken JSON": (rows(GOOD * 2 + '{"prompt": "x", \n'), r"bad\.jsonl:3"),
    "row without response": (rows(GOOD + '{"prompt": "x"}\n'), r"bad\.jsonl:2: .*response"),
    "not UTF-8": (
        rows(GOOD.encode() + '{"prompt": "你好", "response": "x"}\n'.encode("gbk")),
        r"bad\.jsonl:2: .*(UTF-8|utf-8)",
    ),
    "batch": (
        words("batch.global_size=6", "batch.micro_per_gpu=4"),
        r"6 is not a multiple of batch\.micro_per_gpu \(4\).*Use 4 or 8",
    ),
    "nvme path missing": (words("zero=stage3_nvme"), r"needs zero\.offload_optimizer\.nvme_path=FOLDER"),
    "nvme path wrong": (
        words("zero=stage3_nvme", "zero.offload_optimizer.nvme_path={folder}/nosuch"),
        r"nosuch is not a directory that can be written to",
    ),
    "stage 3 key under stage 1": (
        words("zero=stage1", "zero.stage3_max_live_parameters=5"),
        r"zero\.stage3_max_live_parameters = 5 has no effect: zero\.stage is 1",
    ),
    "parameters offloaded under stage 1": (
        words("zero=stage1", "zero.offload_param.device=cpu"),
        r"zero\.offload_param\.device = cpu needs zero\.stage = 3, but it is 1",
    ),
    "run folder exists": (existing, r"runs/tiny already exists and is not touched"),
    "run.dir is a file": (read_only, r"run\.dir = .*file: .*cannot be written to"),
    "model path missing": (words("model=hf"), r"model\.path is empty"),
    "no weights for chatglm": (
        words("model=chatglm3_6b"),
        r"hf download zai-org/chatglm3-6b`.*modelscope download .*model\.path=DIR",
    ),
    "hub name": (
        words("model=hf", "model.path=zai-org/chatglm3-6b"),
        r"zai-org/chatglm3-6b is neither a directory here nor in the cache",
    ),
    "unknown ChatGLM": (model_folder(official), r"has model_type chatglm, but the keys of no known ChatGLM"),
    "family without official tokenizer": (
        lambda folder: [*model_folder(plain_tokenizer)(folder), "model.family=chatglm3"],
        r"model\.family = chatglm3 has no effect: the tokenizer in",
    ),
    "model without weights": (model_folder(without_weights), r"holds no weights"),
    "half a download": (model_folder(half_downloaded), r"bytes where its header says \d+: download it again|cut short"),
    "tokenizer missing": (model_folder(lambda folder: None), r"tokenizer"),
    "nothing fits": (words("data.max_length=8"), r"longer than data\.max_length"),
    "nodes": (words("launch.num_nodes=2"), r"launch\.num_nodes = 2, but 1 node was started"),
    "old habit": (words("--deepspeed", "--deepspeed_config", "ds.json"), r"deepspeed_json=ds\.json"),
    "interface": (words("distributed.interface=nosuch0"), r"no such network interface"),
}
IN_GROUP = ("run folder exists",)
"""Cases that are told in a process group, of which a process has one; the others are told before."""


@pytest.fixture
def train(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., Finished]:
    """Return what runs run.py's command in this process, which keeps its own handlers of signals."""
    monkeypatch.setattr(signals, "install_signals", lambda: None)
    monkeypatch.setattr(process_group, "start", lambda config: pytest.fail("that is for IN_GROUP"))

    def run_here(cwd: Path, *words: str) -> Finished:
        monkeypatch.chdir(cwd)
        code = main(["train", *words])
        return Finished(code, "".join(capfd.readouterr()))

    return run_here


@pytest.mark.fault("D1", "D2", "D3")
@pytest.mark.parametrize("name", CASES)
def test_bad_input(name: str, rows_file: Path, tmp_path: Path, train: Callable[..., Finished]) -> None:
    make, expected = CASES[name]
    typed = make(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    words = [*tiny(rows_file, tmp_path, "tiny"), *typed]
    finished = run(forked(0, RUN, *words), cwd=tmp_path) if name in IN_GROUP else train(tmp_path, *words)
    assert finished.code == 2, finished.output
    assert "Traceback" not in finished.output
    last = finished.output.strip().splitlines()[-1]
    assert re.search(r"^\w+Error: ", finished.output, re.MULTILINE)
    assert re.search(expected, finished.output), finished.output
    assert len(last) < 1000
    assert set(tmp_path.glob("runs/tiny/*")) <= set(before)
    assert all(path.read_bytes() == content for path, content in before.items())


def test_a_bad_row_can_be_skipped_and_is_counted(rows_file: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    shutil.copy(rows_file, bad)
    with bad.open("a") as handle:
        handle.write('{"prompt": "x"}\nnot json\n')
    command = [
        *tiny(rows_file, tmp_path, "skips"),
        f"data.sources=[{{path: {bad}}}]",
        "data.on_bad_row=skip",
        "train.max_steps=2",
    ]
    finished = run(forked(0, RUN, *(word for word in command if word != "train.max_steps=20")), cwd=tmp_path)
    assert finished.code == 0, finished.output
    assert re.search(r"Skipped 2 rows: .*bad\.jsonl:38", finished.output)


def test_fp16_and_bf16_together(rows_file: Path, tmp_path: Path, train: Callable[..., Finished]) -> None:
    (tmp_path / "both.json").write_text(json.dumps({"fp16": {"enabled": True}, "bf16": {"enabled": True}}))
    finished = train(tmp_path, *tiny(rows_file, tmp_path, "both"), "deepspeed_json=both.json")
    assert finished.code == 2
    assert re.search(r"both\.json.*fp16.*bf16|both\.json.*bf16.*fp16", finished.output)


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("optim.lr=0.1", "optim.lr: 0.003 on rank 0 "),
        ("batch.micro_per_gpu=2", "batch.micro_per_gpu: 1 on rank 0 "),  # else they wait for each other for ever
    ],
)
def test_ranks_with_different_settings(word: str, told: str, rows_file: Path, tmp_path: Path) -> None:
    """Ranks that were started by hand, each with a command line of its own."""
    port, ranks = str(free_port()), []
    for rank, more in ((0, []), (1, [word])):
        numbers = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
        command = forked(0, RUN, *tiny(rows_file, tmp_path, "apart", *more))
        ranks.append(start(command, tmp_path, MASTER_ADDR="127.0.0.1", MASTER_PORT=port, **numbers))
    try:
        for rank in ranks:
            output, _ = rank.communicate(timeout=TIMEOUT_S)
            assert rank.returncode == 2, output[-3000:]
            assert told in output and " on rank 1 " in output, output[-3000:]
            assert "Traceback" not in output
    finally:
        for rank in ranks:
            kill_session(rank)
    assert not (tmp_path / "runs").exists()
