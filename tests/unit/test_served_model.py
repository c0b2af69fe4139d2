"""`toolkit generate` by a server of its own or somebody's: what is late, dies or is nonsense costs no answer."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.unit.speaker import SAYS, write_random, write_speaker
from toolkit.cli import main
from toolkit.evaluate import answer_files, completions, served_model
from toolkit.evaluate.rewards import read_lines, write_lines
from toolkit.launch.environment import free_port

ROOT = Path(__file__).parents[2]
STAND_IN = ROOT / "tests" / "completion_server.py"
QUESTIONS, SAMPLES = 12, 2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random(tmp_path_factory.mktemp("models") / "random")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completions, "_FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(served_model, "_POLL_S", 0.05)
    monkeypatch.setattr(answer_files, "BATCHES_IN_WINDOW", 2)


def plan(folder: Path, *faults: dict[str, Any]) -> list[str]:
    """Plan the faults of each start of a server in `folder`; return the words of a command that it answers."""
    folder.mkdir(exist_ok=True)
    (folder / "plan.json").write_text(json.dumps(faults))
    write_lines(folder / "in.jsonl", [{"prompt": f"question {number}"} for number in range(QUESTIONS)])
    server = f"server={sys.executable} {STAND_IN} {folder} {{port}} {{model}}"
    asked = [f"input={folder}/in.jsonl", f"output={folder}/out.jsonl", f"samples={SAMPLES}", "temperature=1", "seed=5"]
    return [server, *asked, "max_new_tokens=8", "batch_size=8"]


def starts(folder: Path) -> list[int]:
    """Return the process ids of the servers that were started."""
    return [int(word) for word in (folder / "pids").read_text().split()]


def answered(folder: Path) -> list[tuple[Any, ...]]:
    """Return what is known of each answer, apart from where its question is."""
    return [(row["sample"], row.get("answer"), row.get("finish")) for row in read_lines(folder / "out.jsonl")]


@pytest.fixture(scope="module")
def expected(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Any, ...]]:
    """The answers of a server without faults."""
    folder = tmp_path_factory.mktemp("healthy")
    with pytest.MonkeyPatch.context() as window:
        window.setattr(answer_files, "BATCHES_IN_WINDOW", 2)
        assert main(["generate", str(model), *plan(folder, {})]) == 0
    assert len(starts(folder)) == 1 and not psutil.pid_exists(starts(folder)[0]), "it ends with the command"
    asked = read_lines(folder / "asked.jsonl")
    assert {row["seed"] for row in asked} == set(range(5, 5 + QUESTIONS * SAMPLES)), "each sample is drawn by its own"
    assert all(row["temperature"] == 1 and row["return_token_ids"] and row["stop_token_ids"] for row in asked)
    rows = answered(folder)
    assert len({row[1] for row in rows}) > QUESTIONS and {row[2] for row in rows} == {"stop"}
    return rows


FAULTS: dict[str, tuple[list[dict[str, Any]], int]] = {
    "dies, twice": ([{"dies_after": 5}, {"dies_after": 9}, {}], 3),
    "hangs": ([{"hangs_after": 7}, {}], 2),
    "nonsense now and then": ([{"nonsense_every": 5}], 1),
    "one answer is late": ([{"late": 4}], 1),
}
"""Name -> faults of each start, and how many there are."""


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_costs_no_answer(
    name: str, model: Path, expected: list[tuple[Any, ...]], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    faults, count = FAULTS[name]
    assert main(["generate", str(model), *plan(tmp_path, *faults), "timeout_s=1"]) == 0, capfd.readouterr().err
    assert answered(tmp_path) == expected
    assert len(starts(tmp_path)) == count and not any(map(psutil.pid_exists, starts(tmp_path)))
    said = capfd.readouterr()
    assert (said.out + said.err).count("the server is down") == count - 1


def test_a_question_without_a_usable_answer_costs_itself(
    model: Path, expected: list[tuple[Any, ...]], tmp_path: Path
) -> None:
    never = 7
    assert main(["generate", str(model), *plan(tmp_path, {"never": [5 + never]})]) == 0
    rows = answered(tmp_path)
    assert rows[:never] + rows[never + 1 :] == expected[:never] + expected[never + 1 :]
    assert read_lines(tmp_path / "out.jsonl")[never]["error"].startswith("JSONDecodeError"), "with the reason"
    tries = [row for row in read_lines(tmp_path / "asked.jsonl") if row["seed"] == 5 + never]
    assert len(tries) == served_model.TRIES and len(starts(tmp_path)) == 1


def test_a_server_that_stays_dead_ends_the_command_which_resumes(
    model: Path, expected: list[tuple[Any, ...]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = plan(tmp_path, {"dies_after": 17}, {"dies_after": 0})
    assert main(["generate", str(model), *words]) == 2
    said = capsys.readouterr()
    assert f"See {tmp_path}/out.jsonl.server.log. The same command resumes." in said.err
    assert len(read_lines(tmp_path / "out.jsonl.part")) == 16, "the first window"
    assert not any(map(psutil.pid_exists, starts(tmp_path)))
    plan(tmp_path, {})
    assert main(["generate", str(model), *words, "timeout_s=5"]) == 0, "which may change"
    assert "Resuming after the 16 lines" in capsys.readouterr().out
    assert answered(tmp_path) == expected


def test_shards_have_servers_of_their_own(model: Path, expected: list[tuple[Any, ...]], tmp_path: Path) -> None:
    words = plan(tmp_path, {})
    for shard in (["shard=1/2"], ["shard=2/2"], []):
        assert main(["generate", str(model), *words, *shard]) == 0
    assert answered(tmp_path) == expected and len(starts(tmp_path)) == 2, "none to join them"
    assert {file.name for file in tmp_path.glob("*.log")} == {f"out.jsonl.{n}-of-2.server.log" for n in (1, 2)}


def test_a_server_that_does_not_start_says_why(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(model), *plan(tmp_path, {"says": "error: unrecognized arguments: --tensor"})]) == 2
    assert "the server gives no answers: error: unrecognized arguments: --tensor. See" in capsys.readouterr().err
    assert not list(tmp_path.glob("out.jsonl.part*"))


@pytest.fixture
def running(model: Path, tmp_path: Path) -> Iterator[tuple[str, list[Any]]]:
    """A server that somebody else runs: its URL, and its process, after which another may be put."""
    port, processes = free_port(), []

    def start() -> None:
        command = [sys.executable, str(STAND_IN), str(tmp_path), str(port), "student"]
        processes.append(subprocess.Popen(command))

    yield f"http://127.0.0.1:{port}/v1", [start, processes]
    for process in processes:
        process.kill()
        process.wait()


def test_a_server_that_somebody_runs_is_waited_for(
    model: Path,
    expected: list[tuple[Any, ...]],
    tmp_path: Path,
    running: tuple[str, list[Any]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    url, (start, processes) = running
    words = [f"url={url}", *plan(tmp_path, {"dies_after": 5}, {})[1:]]
    assert main(["generate", str(model), *words]) == 2, "it does not run yet"
    assert "refused" in capsys.readouterr().err
    start()
    while not (tmp_path / "pids").exists():
        time.sleep(0.05)
    time.sleep(0.5)

    def restart(self: Any, failures: int) -> None:
        processes[0].wait(10)
        start()
        revive(self, failures)

    revive = served_model.ServedModel._revive
    monkeypatch.setattr(served_model.ServedModel, "_revive", restart)
    assert main(["generate", str(model), *words, "served_name=other"]) == 2
    assert "served_name = other: the server has student. Name one of them." in capsys.readouterr().err
    assert main(["generate", str(model), *words, "timeout_s=20"]) == 0, capsys.readouterr().err
    assert answered(tmp_path) == expected and len(starts(tmp_path)) == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_server_ends_with_the_command(number: int, model: Path, tmp_path: Path) -> None:
    """However that ends, and at once although a request hangs."""
    command = [sys.executable, "-m", "toolkit", "generate", str(model), *plan(tmp_path, {"hangs_after": 3})]
    process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, start_new_session=True)
    try:
        until = time.monotonic() + 120
        while not (tmp_path / "asked.jsonl").exists() or len((tmp_path / "asked.jsonl").read_text().split("\n")) < 6:
            assert process.poll() is None and time.monotonic() < until
            time.sleep(0.05)
        process.send_signal(number)
        process.wait(20)
        until = time.monotonic() + 20
        while psutil.pid_exists(starts(tmp_path)[0]):
            assert time.monotonic() < until
            time.sleep(0.05)
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("server", ["vllm --max-model-len 64", "vllm serve {model} --port {port} --max-model-len 64"])
def test_vllm_is_started_with_the_options_of_the_user(
    server: str, model: Path, expected: list[tuple[Any, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in called vllm on PATH; `toolkit serve` gives the model two names."""
    program = tmp_path / "vllm"
    program.write_text(
        f"#!{sys.executable}\nimport os, sys\nwords = sys.argv[1:]\n"
        "assert words[0] == 'serve' and words[-2:] == ['--max-model-len', '64']\n"
        "names = words[words.index('--served-model-name') + 1 : -2] if '--served-model-name' in words else words[1:2]\n"
        f"port = words[words.index('--port') + 1]\n"
        f"os.execv({sys.executable!r}, [{sys.executable!r}, {str(STAND_IN)!r}, {str(tmp_path)!r}, port, *names])\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert main(["generate", str(model), *plan(tmp_path, {})[1:], f"server={server}"]) == 0
    assert answered(tmp_path) == expected
    name = read_lines(tmp_path / "asked.jsonl")[0]["model"]
    assert name == ("model" if "{" not in server else str(model))


def test_the_server_of_transformers_answers_as_the_model_itself(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_speaker(tmp_path / "speaker")
    write_lines(tmp_path / "in.jsonl", [{"prompt": "a"}, {"prompt": "x" * 2_000_000}])
    words = [f"input={tmp_path}/in.jsonl", "max_new_tokens=40"]
    for name, more in (("own", []), ("served", ["server=transformers"])):
        assert main(["generate", f"{tmp_path}/speaker", *words, f"output={tmp_path}/{name}.jsonl", *more]) == 0
    rows = read_lines(tmp_path / "served.jsonl")
    assert rows == read_lines(tmp_path / "own.jsonl")
    assert rows[0]["answer"] == SAYS and "more than the 1000000 positions" in rows[1]["error"]
    assert main(["generate", str(model), *words, f"output={tmp_path}/no", "temperature=1", "top_k=3", more[0]]) == 2
    assert "Unexpected fields in the request: {'top_k'}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["server=vlm"], "server = vlm is neither one of auto, vllm, sglang, transformers, perhaps with options"),
        (["server=vllm serve {model}"], "nor a command with {model} and {port}, such as 'vllm serve {model} --port"),
        (["server=vllm 'serve {model} {port}"], "server = vllm 'serve {model} {port} is neither"),
        (["server=no-such-program {model} {port}"], "there is no program no-such-program here."),
        (["server=sglang"], "no program sglang is on PATH"),
        (["server=transformers", "url=http://host/v1"], "server=, url= and engine=deepspeed do not go together."),
        (["url=http://host/v1", "engine=deepspeed"], "server=, url= and engine=deepspeed do not go together."),
        (["url=host:8000/v1"], "url = host:8000/v1 must begin with http:// or https:// and hold no user."),
        (["timeout_s=3"], "timeout_s has an effect with server= or url= only. Remove it."),
        (["server=transformers", "timeout_s=0"], "timeout_s = 0 is not a positive whole number."),
        (["server=transformers", "adapter={model}"], "serves whole models. Merge the adapter first: "),
    ],
)
def test_mistakes(
    words: list[str], message: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_lines(tmp_path / "in.jsonl", [{"prompt": "a"}])
    words = [word.replace("adapter={model}", f"adapter={model}") for word in words]
    assert main(["generate", str(model), f"input={tmp_path}/in.jsonl", f"output={tmp_path}/out", *words]) == 2
    assert message in capsys.readouterr().err
