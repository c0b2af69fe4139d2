"""`toolkit generate`: one question, and files of them."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.speaker import SAYS, write_random, write_speaker
from toolkit.cli import main
from toolkit.evaluate import answer_files
from toolkit.evaluate.answer_files import AnswerFile
from toolkit.export.load import load_any
from toolkit.extras.cli import rounds
from toolkit.models.tokenizer_files import load_chat_encoder


@pytest.fixture(scope="module")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random(tmp_path_factory.mktemp("models") / "random")


def ask(model: Path, *words: str, code: int = 0) -> None:
    """Run the command."""
    assert main(["generate", str(model), *words]) == code


def rows(file: Path) -> list[dict[str, Any]]:
    """Return the lines of a file."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def write(file: Path, *lines: Any) -> Path:
    """Write JSON lines; texts as they are."""
    text = "".join((line if isinstance(line, str) else json.dumps(line, ensure_ascii=False)) + "\n" for line in lines)
    file.write_text(text, encoding="utf-8")
    return file


def test_one_question(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_speaker(tmp_path / "model")
    ask(model, "prompt=你好")
    assert capsys.readouterr().out == SAYS + "\n"
    assert main(["generate", f"model.path={model}", "prompt=x", "max_new_tokens=6", "system=be short"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "你吗\n", "three bytes each: a token is a byte"
    assert captured.err.strip().endswith("The answer is cut at max_new_tokens=6.")


def test_a_directory_of_runs_is_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "runs" / "first").mkdir(parents=True)
    (tmp_path / "runs" / "first" / "config.yaml").touch()
    for words in (
        ["generate", f"{tmp_path}/runs", "prompt=x"],
        ["chat", f"{tmp_path}/runs"],
        ["serve", f"{tmp_path}/runs"],
    ):
        assert main(words) == 2
        assert f"holds runs: name one of them. The newest: {tmp_path}/runs/first" in capsys.readouterr().err


def test_ports_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["board", str(tmp_path), "port=99999"]) == 2
    assert "ports end at 65535" in capsys.readouterr().err


def test_a_question_is_an_argument(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "runs/library", "Who are you?"]) == 2
    assert capsys.readouterr().err == "ConfigError: 'Who are you?': write a question as prompt='Who are you?'\n"


def test_a_gpu_is_left_alone_where_ranks_leave_it(random_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert rounds._devices({}) == [str(gpu) for gpu in range(8)]
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    model = load_any(str(random_model)).model
    assert (model.device, model.dtype) == (torch.device("cpu"), torch.float32)
    assert rounds._devices({}) == [""], "one process answers on the CPU, not eight"


def test_a_template_of_a_recipe(tmp_path: Path, random_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first of `toolkit rounds` asks a model with it that has not been trained with it yet."""
    template = tmp_path / "t.jinja"
    template.write_text("{% for one in messages %}{{ one.role }}: {{ one.content }}\n{% endfor %}assistant: ")
    messages = [{"role": "user", "content": "hi"}]
    own, other = (load_any(str(random_model), chat_template=one).encoder for one in ("", str(template)))
    assert other.prompt(messages) == load_chat_encoder(random_model, chat_template=str(template)).prompt(messages)
    assert other.prompt(messages) != own.prompt(messages)
    ask(random_model, "prompt=hi", "max_new_tokens=2", f"model.chat_template={template}")
    ask(random_model, "prompt=hi", f"model.chat_template={tmp_path}/none.jinja", code=2)
    assert "none.jinja" in capsys.readouterr().err


def test_a_file_of_all_that_can_happen(tmp_path: Path, random_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = write(
        tmp_path / "in.jsonl",
        {"messages": [{"role": "user", "content": "你好"}, {"role": "assistant", "content": "再见", "loss": True}]},
        {"messages": [{"role": "system", "content": "own"}, {"role": "user", "content": "and so on " * 3}]},
        "no JSON",
        "",
        {"messages": [{"role": "user", "content": "x" * 300}]},
        {"messages": [{"role": "assistant", "content": "nobody asked"}]},
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},
                      {"role": "user", "content": "c"}]},
    )  # fmt: skip
    output = tmp_path / "out.jsonl"
    ask(random_model, f"input={asked}", f"output={output}", "max_new_tokens=8", "batch_size=2", "system=general")
    found = rows(output)
    assert [row["where"] for row in found] == [f"{asked}:{line}" for line in (1, 2, 3, 5, 6, 7)]
    assert found[0]["messages"] == [{"role": "system", "content": "general"}, {"role": "user", "content": "你好"}]
    assert [row.get("reference") for row in found] == ["再见", None, None, None, None, None]
    assert found[1]["messages"][0]["content"] == "own"
    assert "broken JSON at column 1" in found[2]["error"]
    assert "more than the 256 positions" in found[3]["error"]
    assert "nothing is asked before the answer" in found[4]["error"]
    assert len(found[5]["messages"]) == 4
    for row in (found[0], found[1], found[5]):
        assert row["tokens"] <= 8 and row["finish"] == ("length" if row["tokens"] == 8 else "stop")
    assert not list(tmp_path.glob("*.part*"))
    said = capsys.readouterr().out
    assert f"wrote {output}: 6 rows." in said
    assert "3 of 6 new rows have no answer: see their `error`." in said

    # A batch is as good as one after another, and neither order nor company changes an answer.
    ask(random_model, f"input={asked}", f"output={tmp_path}/one", "max_new_tokens=8", "batch_size=1", "system=general")
    assert rows(tmp_path / "one") == found
    before = output.read_bytes()
    ask(random_model, f"input={asked}", f"output={output}", code=2)
    assert output.read_bytes() == before


def test_the_end_token_is_a_stop(tmp_path: Path) -> None:
    model = write_speaker(tmp_path / "model")
    asked = write(tmp_path / "in.csv", "question,answer", "你好,再见", "好,")
    words = [f"input={asked}", "columns={prompt: question, response: answer}"]
    ask(model, *words, f"output={tmp_path}/out")
    found = rows(tmp_path / "out")
    assert [(row["answer"], row["finish"], row.get("reference")) for row in found] == [
        (SAYS, "stop", "再见"),
        (SAYS, "stop", None),
    ]
    ask(model, *words, f"output={tmp_path}/short", f"max_new_tokens={found[0]['tokens']}")
    assert {row["finish"] for row in rows(tmp_path / "short")} == {"length"}


def test_what_was_stopped_goes_on(
    tmp_path: Path, random_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same command continues a file, and writes what it would have written in one go; another does not."""
    monkeypatch.setattr(answer_files, "BATCHES_IN_WINDOW", 2)
    asked = write(tmp_path / "in.jsonl", *({"prompt": "the same"} for _ in range(11)))
    drawn = [f"input={asked}", "max_new_tokens=8", "batch_size=2", "temperature=5", "seed=3"]
    ask(random_model, *drawn, f"output={tmp_path}/whole")
    whole = (tmp_path / "whole").read_bytes()
    assert len({row["answer"] for row in rows(tmp_path / "whole")}) > 6, "drawn anew for each row"

    output, part = tmp_path / "out", tmp_path / "out.part"
    written: list[int] = []
    write_as_it_is = AnswerFile.write

    def stop(self: AnswerFile, window: Any) -> None:
        if len(written) == 2:
            self.file.write(b'{"half a li')
            raise KeyboardInterrupt
        written.append(len(window))
        write_as_it_is(self, window)

    monkeypatch.setattr(AnswerFile, "write", stop)
    ask(random_model, *drawn, f"output={output}", code=130)
    assert written == [4, 4] and not output.exists()
    assert whole.startswith(part.read_bytes().removesuffix(b'{"half a li'))
    assert part.read_bytes().endswith(b'{"half a li')
    assert f"The answers so far are in {part}" in capsys.readouterr().out

    monkeypatch.setattr(AnswerFile, "write", write_as_it_is)
    ask(random_model, *drawn, f"output={output}", "top_p=0.5", code=2)
    assert f"{part} was started with other settings (top_p)" in capsys.readouterr().err
    ask(random_model, *drawn[:-1], "seed=4", f"output={output}", code=2)
    assert "(seed)" in capsys.readouterr().err
    ask(random_model, *drawn, f"output={output}")
    assert f"Resuming after the 8 lines in {part}." in capsys.readouterr().out
    assert output.read_bytes() == whole
    assert not list(tmp_path.glob("*.part*"))


def test_shards_give_the_answers_of_one_process(
    tmp_path: Path, random_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Byte by byte, however many there are, of which one was stopped; more of them than there are windows, too."""
    monkeypatch.setattr(answer_files, "BATCHES_IN_WINDOW", 2)
    asked = write(tmp_path / "in.jsonl", *({"prompt": "the same"} for _ in range(11)))
    drawn = [f"input={asked}", "max_new_tokens=8", "batch_size=1", "temperature=5", "samples=2"]
    ask(random_model, *drawn, f"output={tmp_path}/whole")
    whole = (tmp_path / "whole").read_bytes()
    write_as_it_is = AnswerFile.write

    def stop(self: AnswerFile, window: Any) -> None:
        if self.file.tell():
            raise KeyboardInterrupt
        write_as_it_is(self, window)

    of_another_output = tmp_path / "out-3.other.1-of-2"
    of_another_output.touch()
    for shards in (2, 3, 12):
        output = f"output={tmp_path}/out-{shards}"
        with monkeypatch.context() as stopped:
            stopped.setattr(AnswerFile, "write", stop)
            ask(random_model, *drawn, output, f"shard=1/{shards}", code=130 if shards < 11 else 0)
        for number in range(2, shards + 1):
            ask(random_model, *drawn, output, f"shard={number}/{shards}")
        if shards < 11:
            ask(random_model, *drawn, output, code=2)
            assert (
                f"out-{shards}.1-of-{shards} is missing: run the same command with shard=1/" in capsys.readouterr().err
            )
            ask(random_model, *drawn, output, f"shard=1/{shards}")
            assert "Resuming after the 2 lines" in capsys.readouterr().out
        ask(random_model, *drawn, output, "seed=1", code=2)
        assert "is a shard of other settings" in capsys.readouterr().err
        if shards > 2:  # left by a call with another number of shards
            (tmp_path / f"out-{shards}.2-of-2").touch()
        with monkeypatch.context() as unloaded:
            unloaded.setattr(answer_files, "answer_rows", None)
            ask(random_model, *drawn, output)
        (tmp_path / f"out-{shards}.2-of-2").unlink(missing_ok=True)
        assert (tmp_path / f"out-{shards}").read_bytes() == whole
    assert list(tmp_path.glob("*-of-*")) == [of_another_output]
    for wrong in ("shard=0/2", "shard=3/2", "shard=x"):
        ask(random_model, *drawn, f"output={tmp_path}/no", wrong, code=2)
        assert "must be i/n" in capsys.readouterr().err


def test_several_answers_to_each_question(
    tmp_path: Path, random_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line each; the same again by the same command, also where it was stopped."""
    monkeypatch.setattr(answer_files, "BATCHES_IN_WINDOW", 1)
    asked = write(tmp_path / "in.jsonl", *({"prompt": text} for text in ("one", "another", "the third")))
    words = [f"input={asked}", "max_new_tokens=8", "batch_size=4", "temperature=5", "samples=3"]
    ask(random_model, *words, f"output={tmp_path}/whole")
    found = rows(tmp_path / "whole")
    assert [(row["where"].rpartition(":")[2], row["sample"]) for row in found] == [
        (str(line), sample) for line in (1, 2, 3) for sample in range(3)
    ]
    assert len({row["answer"] for row in found}) > 6
    ask(random_model, *words, f"output={tmp_path}/again")
    assert rows(tmp_path / "again") == found
    capsys.readouterr()
    ask(random_model, f"input={asked}", f"output={tmp_path}/greedy", "samples=3", code=2)
    assert "samples = 3 needs temperature" in capsys.readouterr().err
    ask(random_model, "prompt=x", "samples=3", code=2)
    assert "samples has an effect with input=FILE only" in capsys.readouterr().err


def test_one_process_writes_a_file(tmp_path: Path, random_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = write(tmp_path / "in.jsonl", {"prompt": "x"})
    with pytest.raises(KeyboardInterrupt), AnswerFile(tmp_path / "out", {}, 4):
        ask(random_model, f"input={asked}", f"output={tmp_path}/out", "max_new_tokens=8", code=2)
        raise KeyboardInterrupt
    assert "another process is writing" in capsys.readouterr().err
    assert not list(tmp_path.glob("out*")), "nothing was written, so nothing is left"
    ask(random_model, f"input={asked}", f"output={tmp_path}/no/such/folder", code=74)


def test_progress_is_in_the_language_of_the_user(
    tmp_path: Path, random_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = write(tmp_path / "in.jsonl", {"prompt": "x"})
    for language, progress, last in (("zh", "行/s", "已写出 {}：1 行。"), ("en", "row/s", "wrote {}: 1 row.")):
        output = tmp_path / language
        ask(random_model, f"input={asked}", f"output={output}", "max_new_tokens=8", f"language={language}")
        said = capsys.readouterr()
        assert progress in said.err
        assert last.format(output) in said.out + said.err


def test_a_disk_without_locks(
    tmp_path: Path, random_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(file: Any, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("toolkit.disk.fcntl.flock", refuse)
    asked = write(tmp_path / "in.jsonl", {"prompt": "x"})
    ask(random_model, f"input={asked}", f"output={tmp_path}/out", "max_new_tokens=2")
    assert "has no locks" in capsys.readouterr().out
    assert (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], 'either prompt="…", or input=FILE and output=FILE.'),
        (["prompt=x", "input=y"], 'either prompt="…", or input=FILE and output=FILE.'),
        (["input=x"], "output is missing"),
        (["input=nowhere.jsonl", "output=out"], "There is no data file 'nowhere.jsonl'"),
        (["prompt=x", "batch_size=4"], "batch_size has an effect with input=FILE only"),
        (["prompt=x", "top_p=0.5"], "top_p has no effect without temperature"),
        (["prompt=x", "temperature=hot"], "temperature = hot is not a number from 0."),
        (["prompt=x", "temperature=1", "top_p=1.5"], "top_p = 1.5 is not a number from 0 to 1."),
        (["prompt=x", "engine=vllm"], "engine = vllm is none of transformers, deepspeed."),
        (["input=x", "output=y", "format=text"], "format = text holds no questions."),
        (["input=x", "output=y", "columns=[a]"], "columns = [a] is not of the form"),
        (["input=x", "output=y", "columns={promt: a}"], "no format reads 'promt'. Did you mean 'prompt'?"),
        (["propmt=x"], "unknown argument 'propmt=x'"),
        (["--prompt", "x"], "unknown option --prompt. Write prompt=x"),
    ],
)
def test_mistakes(words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ask(tmp_path, *words, code=2)
    assert message in capsys.readouterr().err


def test_no_model_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "prompt=x"]) == 2
    assert "model.path is missing" in capsys.readouterr().err


def test_plain_texts_ask_nothing(tmp_path: Path, random_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = write(tmp_path / "in.jsonl", {"text": "once upon a time"})
    ask(random_model, f"input={asked}", f"output={tmp_path}/out", code=2)
    assert "rows of plain text hold no questions" in capsys.readouterr().err


def test_one_rank_of_deepspeeds_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ask(write_speaker(tmp_path / "model"), "prompt=x", "engine=deepspeed")
    assert capsys.readouterr().out == SAYS + "\n"
