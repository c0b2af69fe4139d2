"""`toolkit check`: what it must not let pass, all of it at once, and without torch."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from toolkit.cli import main

TOKENIZER = Path(__file__).parents[1] / "golden" / "chatglm" / "tok_glm4"
GOOD = '{"prompt": "a", "response": "b"}\n'
TINY = ("recipe=zero1", "model=glm_tiny", "precision=fp32")
# Content of chat.jsonl -> what is said about it.
DATA = {
    GOOD * 6 + '{"prompt": "x", "respon\n': "chat.jsonl:7: broken JSON at column 17",
    '{"prompt": "a", "response": "b"},\n' * 2: "chat.jsonl:1: the line ends with a comma, as in a JSON list: remove it",
    "{'prompt': 'a', 'response': 'b'}\n": "chat.jsonl:1: broken JSON: texts stand in double quotes, not in single ones",
    '{"input": "a", "output": "b"}\n': "or map another key: data.columns={instruction:NAME}.",
    '{"promt": "a", "response": "b"}\n': "chat.jsonl:1: no key 'prompt'; the row has 'promt', 'response'.",
    '{"question": "a", "reply": "b"}\n': "chat.jsonl:1: the keys 'question', 'reply' belong to no known format.",
    "\n\n": "chat.jsonl holds no row.",
    "": "The data file 'chat.jsonl' is empty.",
    GOOD + '{"prompt": 1, "response": "b"}\n' * 9: "chat.jsonl: 6 more of its first 10 rows cannot be used.",
}
# Arguments -> what is said.
WRONG = {
    "ds_extra.foo=1": "command line: ds_extra.foo: DeepSpeed has no key 'foo'.",
    "ds_extra.zero_optimisation.stage=3": (
        "command line: ds_extra.zero_optimisation: DeepSpeed has no key 'zero_optimisation'. Did you mean "
        "'zero_optimization'?"
    ),
    "run.dir=/proc/x": "command line: run.dir = /proc/x: /proc cannot be written to.",
    "prepare.dir=/proc/x": "command line: prepare.dir = /proc/x: /proc cannot be used by this user.",
    "resume=runs/nope": "command line: resume = runs/nope is not auto, must or never, nor a checkpoint",
    "precision=fp16": "conf/precision/fp16.yaml:2: precision.dtype = fp16 needs a GPU",
}
MISTYPED = {
    "precision=float16": "command line: unknown choice 'precision=float16'. Did you mean 'fp16'?",
    "preference=grpo": "command line: unknown choice 'preference=grpo'. There is no online reinforcement learning",
    "task=grpo": "command line: unknown choice 'task=grpo'. There is no online reinforcement learning (docs/limits.md)",
    "gpu=1xT4": "command line: unknown key 'gpu'. Did you mean 'gpus'?",
    "precision=16": "command line: unknown choice 'precision=16'. Did you mean 'fp16'?",
    "tuning=LoRA": "command line: unknown choice 'tuning=LoRA'. Did you mean 'lora'?",
    "zero=4": "command line: unknown choice 'zero=stage4'. Did you mean 'stage3'?",
    "hostfile=hosts": "command line: unknown key 'hostfile'. Other commands take it: toolkit launch hostfile=FILE",
    "data.sources.path=a.jsonl": (
        "command line: unknown key 'data.sources.path'. Did you mean 'data.sources=[{path: VALUE}]'?"
    ),
    "num_gpus=2": "command line: unknown key 'num_gpus'. Other commands take it: toolkit launch --num_gpus N",
    "data=chat.json": "command line: data.sources[0].path = chat.json: there is no such file (looked in ",
}


# Options as other programs have them -> what is said.
OPTIONS = {
    "--recipe chatglm": "ConfigError: unknown option --recipe. Write recipe=chatglm\n",
    "zero1 --lr 1e-4": "ConfigError: unknown option --lr. Write optim.lr=1e-4\n",
    "zero1 --lr -1": "ConfigError: unknown option --lr. Write optim.lr=-1\n",
    "zero1 --zero=3": "ConfigError: unknown option --zero=3. Write zero=3\n",
    "zero1 --gpus 8xT4": "ConfigError: unknown option --gpus. Write gpus=8xT4\n",
    "zero1 --bf16 --model-path my/model": (
        "ConfigError: 2 errors:\n1. unknown option --bf16. Write precision=bf16\n"
        "2. unknown option --model-path. Write model.path=my/model\n"
    ),
    "zero1 --batch-size 4": (
        "ConfigError: unknown option --batch-size. Write batch.micro_per_gpu=4 or batch.global_size=4\n"
    ),
    "zero1 --frobnicate": "ConfigError: unknown option --frobnicate. Known here: --config-dir DIR.\n",
    "zero1 --config_dir=c": "ConfigError: unknown option --config_dir=c. Did you mean '--config-dir DIR'?\n",
    "zero1 --hlep": "ConfigError: unknown option --hlep. Did you mean '--help'?\n",
    "zero1 --worldsize 2": "ConfigError: unknown option --worldsize. Write world_size=2\n",
    "zero1 model.path": "ConfigError: 'model.path' has no =. Write model.path=VALUE\n",
    **{
        f"zero1 {word}": (
            f"ConfigError: command line: cannot read '{word}': '{wide}' is full-width or a typographic quote. "
            "Write = : , { } [ ] \" ' as in code.\n"
        )
        for word, wide in (("train.max_steps＝5", "＝"), ("columns={“prompt”:q}", "“"))
    },
    **{
        f"zero1 {word}": (
            f"ConfigError: command line: cannot read '{word}': quote it for the shell, with a field of the toolkit "
            "before each name: 'columns={prompt: question, response: answer}'\n"
        )
        for word in ("columns={prompt:", "columns={问题:prompt}")
    },
    "zero1 model.pth /models/a": "ConfigError: 'model.pth' has no =. Write model.path=/models/a\n",
    "zero1 lr 1e-4": "ConfigError: 'lr' has no =. Write optim.lr=1e-4\n",
    "recipe = zero1": "ConfigError: 'recipe =': write key=value without spaces around the =.\n",
    "zero1 optim.lr= 1e-4": "ConfigError: 'optim.lr= 1e-4': write key=value without spaces around the =.\n",
    "zero1 model.path= /models": "ConfigError: 'model.path= /models': write key=value without spaces around the =.\n",
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work where there is one good file."""
    monkeypatch.chdir(tmp_path)
    Path("chat.jsonl").write_text(GOOD)
    return tmp_path


def check(capsys: pytest.CaptureFixture[str], *words: str, data: str = "chat.jsonl") -> tuple[int, str]:
    """Return exit code and everything said."""
    code = main(["check", *TINY, f"data={data}", *words])
    said = capsys.readouterr()
    return code, said.out + said.err


def test_a_good_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    code, said = check(capsys)
    assert code == 0 and "zero1: config and files are in order.\n" in said


@pytest.mark.parametrize("content", DATA)
def test_first_rows(content: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("chat.jsonl").write_text(content)
    code, said = check(capsys)
    assert code == 2
    assert DATA[content] in said


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("data.max_length=8", "No trained tokens: none of the 3 rows of data.sources can be used."),
        ("data.validation=3", "data.validation = 3 rows: there are 3 rows, and none would be left to train."),
    ],
)
def test_data_of_which_nothing_is_left_to_train(word: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """As training would say, once a tokenizer is there."""
    rows = [{"prompt": f"{number}", "response": "as many words as there are " * 4} for number in range(3)]
    Path("chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = f"model.tokenizer={TOKENIZER}"
    code, said = check(capsys, tokenizer, "data.too_long=drop", word)
    assert code == 2 and message in said
    assert check(capsys, tokenizer)[0] == 0


def test_rows_that_may_be_skipped(capsys: pytest.CaptureFixture[str]) -> None:
    Path("chat.jsonl").write_text(GOOD + "{}\n")
    assert check(capsys, "data.on_bad_row=skip")[0] == 0
    Path("chat.jsonl").write_text("{}\n")
    assert check(capsys, "data.on_bad_row=skip")[0] == 2


@pytest.mark.parametrize("word", WRONG)
def test_refused(word: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toolkit.config.requirements._has_fp16", lambda _: False)
    code, said = check(capsys, word)
    assert code == 2
    assert said.startswith(f"ConfigError: {WRONG[word]}")


@pytest.mark.parametrize("word", MISTYPED)
def test_choices_and_arguments_that_are_known_elsewhere(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = check(capsys, word)
    assert code == 2 and said.startswith(f"ConfigError: {MISTYPED[word]}")


@pytest.mark.parametrize("words", OPTIONS)
def test_options_of_other_programs(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", *words.split()]) == 2
    assert capsys.readouterr().err == OPTIONS[words]


def test_a_typo_is_reported_before_the_hub_is_asked(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("toolkit.config.hub._config_folder", lambda *_: pytest.fail("the Hub was asked"))
    assert main(["check", "recipe=chatglm", "data=chat.jsonl", "optim.lrr=1"]) == 2
    assert capsys.readouterr().err == ("ConfigError: command line: unknown key 'optim.lrr'. Did you mean 'optim.lr'?\n")


def test_a_dataset_that_neither_cache_nor_network_has_is_an_error(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a model is, and together with it; in training and in validation, streamed or not."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    wanted = "'me/mine' is neither a file here nor a dataset in the cache, and Hugging Face cannot be reached (HF_HUB_"
    code, said = check(capsys, data="me/mine")
    assert code == 2 and wanted in said and "in order" not in said
    code, said = check(capsys, "data.validation=[{hub: me/mine}]", "model=hf", "model.path=me/model")
    assert code == 2 and wanted in said and "model.path = me/model is neither a directory here" in said
    streamed = ["data.streaming=true", "data.validation_fraction=0", f"model.tokenizer={TOKENIZER}"]
    code, said = check(capsys, *streamed, data="me/mine")
    assert code == 2 and "'me/mine' cannot be streamed from Hugging Face" in said
    code, said = check(capsys, "optim.lrr=1", data="me/mine")
    assert code == 2 and "me/mine" not in said, "what is wrong with the config is said first"
    datasets.load_dataset("json", data_files="chat.jsonl", cache_dir=str(tmp_path))
    made = next(tmp_path.glob("json/*/0.0.0/*/dataset_info.json")).parent
    cached = tmp_path / "me___mine" / "default" / "0.0.0" / made.name
    cached.parent.mkdir(parents=True)
    made.rename(cached)
    assert check(capsys, data="me/mine")[0] == 0


def test_fp16_of_another_machine(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cuda")
    assert check(capsys, "precision=fp16")[0] == 0


def test_fp8_without_a_gpu_is_named_before_a_step_takes_minutes(capsys: pytest.CaptureFixture[str]) -> None:
    assert "FP8" not in check(capsys)[1]
    code, said = check(capsys, "precision=fp8")
    assert code == 0 and "WARNING: precision.fp8 = tensorwise: CPUs have no FP8 products" in said


def test_columns_are_to_blame(capsys: pytest.CaptureFixture[str]) -> None:
    Path("chat.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    code, said = check(capsys, "data.sources=[{path: chat.jsonl, columns: {response: answr}}]")
    assert code == 2
    assert said == (
        "DataError: data.sources[0].columns: response = answr, but no row of chat.jsonl has 'answr'; there are "
        "'prompt', 'answer'. Did you mean 'answer'?\n"
    )


def test_all_errors_at_once(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """From the command line to the rows of a file; what follows from another error is not told."""
    monkeypatch.setattr("toolkit.config.requirements._has_fp16", lambda _: False)
    Path("bad.jsonl").write_text(GOOD * 6 + "{\n")
    code, said = check(capsys, "zero.stag=3", "optim.lr=-1", *WRONG, "batch.micro_per_gpu=0", data="bad.jsonl")
    assert code == 2
    lines = said.splitlines()
    assert lines[0] == "ConfigError: 10 errors:"
    assert [line[: line.index(" ")] for line in lines[1:]] == [f"{number}." for number in range(1, 11)]
    for expected in (*WRONG.values(), "'zero.stag'", "optim.lr = -1", "batch.micro_per_gpu = 0", "bad.jsonl:7: "):
        assert sum(expected in line for line in lines) == 1, expected


def test_a_run_reports_all_errors_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *TINY, "data=chat.jsonl", "optim.lr=-1", "resume=runs/nope", "ds_extra.foo=1"]) == 2
    assert capsys.readouterr().err.startswith("ConfigError: 3 errors:\n1. command line: optim.lr = -1.0 must be")


@pytest.mark.parametrize(
    ("command", "own"),
    [
        (["plan", "gpus=8", "calibrate=perhaps"], ["gpus = 8 should be the GPUs", "calibrate = perhaps is none of"]),
        (["sweep", "--num_gpus=2", "optim.eps=1e-8,1e-7", "run.name=x"], ["the sweep names its runs itself"]),
        (["sweep", "optim.eps=1e-8,1e-7", "trials=0"], ["trials = 0 is not a positive whole number"]),
        (
            ["eval", "output=x.txt", "data.validation_fraction=0"],
            ["x.txt must end with", "there is nothing to evaluate"],
        ),
    ],
    ids=lambda given: given[0] if given else "",
)
def test_other_commands_report_all_errors_too(
    command: list[str], own: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))  # eval sets RANK and others
    assert main([*command, *TINY, "data=chat.jsonl", "zero.stag=3", "train.log_every=0", "tuning.rank=0"]) == 2
    said = capsys.readouterr().err
    for sentence in ("unknown key 'zero.stag'", "train.log_every = 0 must", "tuning.rank = 0 must", *own):
        assert said.count(sentence) == 1, said
    assert {path.name for path in Path().iterdir()} == {"chat.jsonl"}


def test_a_model_that_cannot_be_used(capsys: pytest.CaptureFixture[str]) -> None:
    Path("model").mkdir()
    Path("model/config.json").write_text(json.dumps({"model_type": "chatglm"}))
    code, said = check(capsys, "model=hf", "model.path=model", "optim.lr=-1")
    assert code == 2
    assert "1. command line: optim.lr" in said and "2. model/config.json has model_type chatglm" in said


def test_no_torch() -> None:
    """Where no tokenizer is needed: the quickstart's is made of data that it makes itself."""
    script = "import sys; from toolkit.cli import main; code = main(sys.argv[1:]); assert 'torch' not in sys.modules"
    command = [sys.executable, "-c", script, "check", "recipe=quickstart"]
    subprocess.run(command, check=True, timeout=120)


@pytest.mark.parametrize("word", ["zero1", "recipe=zero1", "mine.yaml"])
def test_a_recipe_needs_no_key(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.yaml").write_text("defaults:\n  - zero1\n")
    assert main(["check", word, "model=glm_tiny", "data=chat.jsonl"]) == 0
    assert "config and files are in order" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["--version"], ["recipes"], ["models"]])
def test_listings(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 0
    said = capsys.readouterr().out
    assert {"--version": "toolkit 0.", "recipes": "quickstart", "models": "zai-org/chatglm3-6b"}[words[0]] in said


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_a_model_that_is_not_there_is_reported_without_torch(command: str) -> None:
    script = "import sys; from toolkit.cli import main; code = main(sys.argv[1:]); assert 'torch' not in sys.modules; "
    words = [command, "runs/nope", *(["prompt=x"] if command == "generate" else [])]
    done = subprocess.run(
        [sys.executable, "-c", script + "sys.exit(code)", *words], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2
    assert done.stderr.startswith("ModelError: there is no directory runs/nope (model.path).")


@pytest.mark.parametrize("command", ["train", "launch"])
def test_a_finished_run_is_rejected_before_torch_is_imported(command: str, tmp_path: Path) -> None:
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    (tmp_path / "runs" / "mine" / "DONE").touch()
    script = "import sys; from toolkit.cli import main; code = main(sys.argv[1:]); assert 'torch' not in sys.modules; "
    words = [command, "recipe=quickstart", f"run.dir={tmp_path}/runs", "run.name=mine"]
    done = subprocess.run(
        [sys.executable, "-c", script + "sys.exit(code)", *words], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2
    assert done.stderr.startswith(f"RunFolderError: the run {tmp_path}/runs/mine has finished already (DONE)")
    assert "\n" not in done.stderr.strip() and not done.stdout


def test_total_steps_that_contradict_the_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export-config", *TINY, "train.max_steps=10", "total_steps=20"]) == 2
    assert "train.max_steps = 10 and total_steps=20 contradict each other" in capsys.readouterr().err
    assert main(["export-config", *TINY, "total_steps=20"]) == 0


@pytest.mark.parametrize("deadline", ["'1970-01-01 08:00'", "0s"])
def test_a_deadline_that_is_past(deadline: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = check(capsys, f"run.deadline={deadline}")
    assert code == 2
    assert f"run.deadline = {deadline.strip(chr(39))} is past. Name a later time, or run.deadline= for none." in said


def test_an_error_of_a_row_ends_in_chinese_as_it_begins(capsys: pytest.CaptureFixture[str]) -> None:
    Path("chat.jsonl").write_text('{"prompt": "a"}\n')
    assert main(["check", *TINY, "data=chat.jsonl", "language=zh"]) == 2
    said = capsys.readouterr().err
    assert "chat.jsonl:1：没有键 'response'" in said and said.endswith("。\n") and "}." not in said


# A path that is no directory -> what to do instead.
NO_DIRECTORY = {
    "quickstart": "It is a recipe: train it, `toolkit train quickstart run.name=NAME`, then type runs/NAME.\n",
    "qwen3_8b": "hf download Qwen/Qwen3-8B --local-dir DIR  and write DIR; to train it: recipe=NAME model=qwen3_8b\n",
    "lora": "Did you mean 'runs/lora'?\n",
    "runs/nothing": "The newest runs there: runs/f, runs/e, runs/d, runs/c, runs/lora\n",
    "Qwen/Qwen3-8B": "Of a model on Hugging Face:  hf download Qwen/Qwen3-8B --local-dir DIR\n",
}


@pytest.mark.parametrize("path", NO_DIRECTORY)
def test_what_is_no_directory_is_explained(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    for order, name in enumerate(["a", "lora", "c", "d", "e", "f"]):
        config = Path("runs", name, "config.yaml")
        config.parent.mkdir(parents=True)
        config.touch()
        os.utime(config, (order, order))
    for command in ("chat", "export-model"):
        assert main([command, path]) == 2
        assert capsys.readouterr().err.endswith(NO_DIRECTORY[path])


def test_where_there_is_no_run_the_first_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "runs/nothing"]) == 2
    assert capsys.readouterr().err.endswith(
        "There is no run yet: train one, `toolkit train quickstart run.name=first`, then type runs/first.\n"
    )
    assert main(["chat", "runs/nothing", "language=zh"]) == 2
    assert "没有任何训练" in capsys.readouterr().err


def test_a_model_of_the_list_is_no_directory(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "qwen3_8b"]) == 2
    said = capsys.readouterr().err
    assert "qwen3_8b is a model of this list, not on this disk." in said
    assert "hf download Qwen/Qwen3-8B --exclude" in said and said.endswith("and then  toolkit models qwen3_8b\n")


def test_a_recipe_after_a_blank(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "recipe=", "quickstart"]) == 2
    assert (
        capsys.readouterr().err == "ConfigError: 'recipe= quickstart': write key=value without spaces around the =.\n"
    )
