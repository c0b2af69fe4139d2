"""The three ways that README and pages promise, typed as printed: one GPU with LoRA and a server, all GPUs, a hostfile.

What is added to a command makes it small: the tiny model, few rows and steps, a free port.
"""

import contextlib
import json
import re
import shlex
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Cluster
from pages import ROOT, Block, blocks, commands
from ranks import BIN, environment, free_port, kill_session, run

SMALL = ["model=glm_tiny", "data.max_samples=40", "train.max_steps=2", "evaluate.prompts=[]"]
LANG = {"": "C.UTF-8", "_zh": "zh_CN.UTF-8"}
"""By the ending of a page's name: its reader's locale."""
SAID = {
    "": ("Starts:  ", "the logits are those of the save", "Ask it:  ", "glm-tiny, ZeRO-3, bf16, 4 ranks (deepspeed)"),
    "_zh": ("启动：  ", "logits 与保存时一致", "向模型提问：", "glm-tiny，ZeRO-3，bf16，4 个 rank（deepspeed）"),
}
NODE2 = {"": "node2  GPUs 0-1  ranks 2-3", "_zh": "node2  GPU 0-1  rank 编号 2-3"}
both_languages = pytest.mark.parametrize("tail", ["", "_zh"], ids=["en", "zh"])


def lines_of(block: Block) -> list[str]:
    """Return the commands of one block."""
    return [line for one, line in commands(block.page) if one == block]


def typed(line: str, *more: str) -> list[str]:
    """Return a command as the shell takes it apart, with the program of this environment."""
    program, *words = shlex.split(line)
    return [str(BIN / program), *words, *more]


@contextlib.contextmanager
def serving(command: list[str], folder: Path, env: dict[str, str]) -> Iterator[str]:
    """Start a server, wait until it accepts requests, and yield what it printed up to there."""
    log = folder / "serve.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            command, cwd=folder, env=env, stdout=output, stderr=output, text=True, start_new_session=True
        )
    try:
        while "Uvicorn running on" not in log.read_text(encoding="utf-8"):
            assert process.poll() is None, log.read_text(encoding="utf-8")
            time.sleep(0.2)
        yield log.read_text(encoding="utf-8")
    finally:
        kill_session(process)
        process.wait()


@both_languages
def test_lora_on_one_gpu_ends_in_a_server_that_answers(tail: str, tmp_path: Path) -> None:
    """The last request is the one that `toolkit serve` prints, sent by curl as the reader would."""
    for package in ("fastapi", "uvicorn", "openai"):
        pytest.importorskip(package, reason="the extra `serve` is not installed")
    starts, same, ask, _ = SAID[tail]
    (block,) = [one for one in blocks(ROOT / f"README{tail}.md", "bash") if "toolkit serve" in one.body]
    lines = [line for line in lines_of(block) if line.startswith("toolkit ")]
    assert [line.split()[1] for line in lines] == ["launch", "chat", "export-model", "serve"]
    launch, chat, export, serve = lines
    trained = run(typed(launch, *SMALL), cwd=tmp_path, LANG=LANG[tail])
    assert trained.code == 0, trained.output[-3000:]
    (recipe,) = re.findall(r"recipe=\S+", launch)
    assert re.search(starts + rf"deepspeed .*--master_port \d+ .*{recipe}", trained.output)
    (name,) = re.findall(r"run\.name=(\S+)", launch)
    assert (tmp_path / "runs" / name / "DONE").is_file()
    talked = subprocess.run(
        typed(chat, "max_new_tokens=4"),
        cwd=tmp_path,
        env=environment(LANG=LANG[tail]),
        input="你好\n",
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert talked.returncode == 0 and talked.stdout.strip(), talked.stderr
    merged = run(typed(export), cwd=tmp_path, LANG=LANG[tail])
    assert merged.code == 0 and same in merged.output, merged.output
    with serving(typed(serve, f"port={free_port()}"), tmp_path, environment(LANG=LANG[tail])) as printed:
        (asked,) = re.findall(f"{ask}(curl .*)", printed)
        answered = subprocess.run(shlex.split(asked), capture_output=True, text=True, timeout=240, check=True)
    answer = json.loads(answered.stdout)
    assert answer["choices"][0]["message"]["role"] == "assistant"
    assert answer["usage"]["completion_tokens"] > 0


@both_languages
def test_full_fine_tuning_on_all_gpus(tail: str, tmp_path: Path) -> None:
    """Four CPU ranks stand for eight GPUs: full parameters, ZeRO-3, bf16."""
    (line,) = re.findall(r"`(toolkit launch recipe=chatglm [^`]*)`", (ROOT / f"docs/debugging{tail}.md").read_text())
    (tmp_path / "chat.jsonl").write_text(blocks(ROOT / "docs/first_run.md", "json")[0].body * 40, encoding="utf-8")
    trained = run(typed(line, "--num_gpus", "4", *SMALL, "run.name=full"), cwd=tmp_path, LANG=LANG[tail])
    assert trained.code == 0, trained.output[-3000:]
    assert SAID[tail][3] in trained.output
    assert (tmp_path / "runs" / "full" / "export" / "model.safetensors").is_file()


@both_languages
def test_several_nodes_from_a_hostfile(tail: str, cluster: Cluster, tmp_path: Path) -> None:
    """Two nodes of two ranks; the hostfile is written by hand, as the page says."""
    (line,) = [
        line for _, line in commands(ROOT / f"README{tail}.md") if line.startswith("toolkit launch hostfile=hostfile ")
    ]
    (tmp_path / "hostfile").write_text("node1 slots=2\nnode2 slots=2\n")
    words = [*shlex.split(line)[1:], *SMALL, "run.name=nodes"]
    trained = cluster.toolkit(*words, cwd=tmp_path, timeout_s=300, LANG=LANG[tail])
    assert trained.code == 0, trained.output[-3000:]
    assert SAID[tail][3].partition("4")[0] in trained.output and NODE2[tail] in trained.output
    assert (tmp_path / "runs" / "nodes" / "DONE").is_file()


def test_the_quickstart_answers_its_questions(tmp_path: Path) -> None:
    """The answers are those that the page of the first run shows, and the loss is well below that of bigrams."""
    trained = run(typed("toolkit launch --num_gpus 2 recipe=quickstart run.name=quick"), cwd=tmp_path, timeout_s=1500)
    assert trained.code == 0, trained.output[-3000:]
    last = [json.loads(line) for line in (tmp_path / "runs/quick/samples.jsonl").read_text().splitlines()][-2:]
    (shown,) = [one.body for one in blocks(ROOT / "docs" / "first_run.md", "text") if "  Q: " in one.body]
    assert len({sample["answer"] for sample in last}) == 2
    for sample in last:
        assert f"  Q: {sample['prompt']}\n  A: {sample['answer']}\n" in shown
    [(unigram, bigram)] = re.findall(r"unigram ([\d.]+), bigram ([\d.]+)\.", trained.output)
    (reached,) = re.findall(r"^Validation loss \S+ -> ([\d.]+)", trained.output, re.MULTILINE)
    assert float(reached) < 0.5 * float(bigram) < float(unigram)
