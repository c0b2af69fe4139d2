"""Rounds for real: answers are sampled, scored and learned from, by processes of their own; stopped, and resumed."""

import json
import signal
import sys
import time
from pathlib import Path

import psutil
from ranks import free_port, kill_session, run, start, wait_for

from tests.unit.speaker import write_random
from toolkit.evaluate.answer_files import BATCHES_IN_WINDOW
from toolkit.evaluate.rewards import read_lines


def rounds_command(folder: Path, prompts: int, *words: str) -> list[str]:
    """Write a model that babbles and so many prompts; return the command that trains it by DPO."""
    write_random(folder / "model")
    rows = [{"prompt": f"{number} and so on"} for number in range(prompts)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [sys.executable, "-m", "toolkit", "rounds", *words[:2], "--master_port", str(free_port()), *words[2:]]
    command += ["recipe=zero1", "model.init=pretrained", f"model.path={folder}/model", "model.name=babbler"]
    command += ["preference=dpo", f"prompts={folder}/prompts.jsonl", "reward=regex", "pattern=[a-e]", "samples=4"]
    command += ["max_new_tokens=12", "run.name=rounds", f"run.dir={folder}/runs", f"prepare.dir={folder}/cache"]
    command += ["batch.global_size=8", "data.validation_fraction=0", "data.max_length=128", "report.enabled=false"]
    command += ["evaluate.prompts=[]", "evaluate.ngram_baselines=false", "train.rehearse=false"]
    return [*command, "checkpoint.verify_export=false", "precision=fp32"]


def test_the_mean_reward_rises_and_nothing_is_done_twice(tmp_path: Path) -> None:
    words = ["--num_gpus", "2", "rounds=2", "batch_size=8", "train.epochs=6", "batch.micro_per_gpu=4", "optim.lr=0.003"]
    command = rounds_command(tmp_path, 32, *words, "train.log_every=1", "checkpoint.every=1")
    folder = tmp_path / "runs" / "rounds"
    process = start(command, cwd=tmp_path)
    try:
        metrics = folder / "round-1" / "run" / "metrics.jsonl"
        until = time.monotonic() + 300
        while not metrics.exists() or len(metrics.read_text().splitlines()) < 3:
            assert process.poll() is None and time.monotonic() < until
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=120)
    finally:
        kill_session(process)
    assert process.returncode == 75, output[-3000:]
    answers = (folder / "round-1" / "samples.jsonl").read_bytes()
    assert len(answers.splitlines()) == 128 > 8 * BATCHES_IN_WINDOW, "each of two processes gave some"

    finished = run(command, cwd=tmp_path, timeout_s=900)
    assert finished.code == 0, finished.output[-3000:]
    assert (folder / "round-1" / "samples.jsonl").read_bytes() == answers
    starts = (folder / "round-1" / "run" / "logs" / "starts.jsonl").read_text().splitlines()
    assert [json.loads(line)["from_step"] > 0 for line in starts] == [False, True]
    found = json.loads((folder / "rounds.json").read_text())
    rewards = [found[name]["mean_reward"] for name in ("round-1", "round-2", "result")]
    assert 0 < rewards[0] < rewards[1] - 0.05 and rewards[1] <= rewards[2] + 0.05 and rewards[2] > rewards[0] + 0.1, (
        rewards
    )
    assert found["round-1"]["pairs"] + found["round-1"]["ties"] == 32
    assert "result" in finished.output
    assert (folder / "round-2" / "run" / "export" / "config.json").is_file()


def served(session: int) -> list[psutil.Process]:
    """Return the servers below a process."""
    below = psutil.Process(session).children(recursive=True)
    return [process for process in below if "toolkit.evaluate.server" in process.cmdline()[1:3]]


def test_each_rounds_model_answers_by_a_server(tmp_path: Path) -> None:
    """transformers' own, of a base model with the adapter of the last round; stopped, and then a server is killed."""
    words = ["--num_gpus", "1", "rounds=1", "batch_size=2", "train.epochs=1", "tuning=lora", "server=transformers"]
    command = rounds_command(tmp_path, 16, *words)
    folder = tmp_path / "runs" / "rounds"
    log = folder / "round-1" / "samples.jsonl.server.log"
    process = start(command, cwd=tmp_path)
    try:
        wait_for(lambda: served(process.pid), within_s=240)
        [server] = served(process.pid)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 75, output[-3000:]
        wait_for(lambda: not server.is_running())
    finally:
        kill_session(process)
    process = start([*command, "timeout_s=60"], cwd=tmp_path)
    try:
        wait_for(lambda: log.exists() and "POST /v1/completions" in log.read_text(), within_s=240)
        served(process.pid)[0].kill()
        output, _ = process.communicate(timeout=900)
    finally:
        kill_session(process)
    assert process.returncode == 0, output[-3000:]
    assert "the server is down" in output
    for number in (1, 2):
        answers = read_lines(folder / f"round-{number}" / "samples.jsonl")
        assert len(answers) == 64 and not [row for row in answers if "answer" not in row]
        assert len({row["answer"] for row in answers}) > 32
    assert (folder / "round-1" / "run" / "export" / "adapter_config.json").is_file()
    assert f"serve {folder}/round-2/merged" in output and not (folder / "round-2" / "merged").exists()
