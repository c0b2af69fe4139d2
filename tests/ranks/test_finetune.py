"""`from toolkit import finetune`: the command, from Python."""

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from toolkit import Run, finetune
from toolkit.arguments import parse
from toolkit.jobs.finetune import override_words
from toolkit.messages import ConfigError, RunFailed, Stopped, ToolkitError

SETTINGS: dict[str, Any] = {
    "model": "glm_tiny",
    "data": {"max_samples": 100},
    "schedule": {"warmup_steps": 2},
    "checkpoint": {"keep": 1},
}
STEPS = 150
"""Enough that a run which is interrupted at its first row of metrics is far from its end."""


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.default
@pytest.mark.parametrize(
    ("settings", "key", "value"),
    [
        ({"optim": {"lr": 1e-5}}, "optim.lr", 1e-5),
        ({"run": {"name": "身份, with 'quotes' and \\"}}, "run.name", "身份, with 'quotes' and \\"),
        ({"run.name": "007"}, "run.name", "007"),
        ({"run.name": "true"}, "run.name", "true"),
        ({"model": {"trust_remote_code": True}}, "model.trust_remote_code", True),
        ({"evaluate": {"prompts": ["a b?", "c=d, 你好"]}}, "evaluate.prompts", ["a b?", "c=d, 你好"]),
    ],
)
def test_settings_mean_themselves(settings: dict[str, Any], key: str, value: object) -> None:
    """Whatever characters they hold: they are typed as Hydra's grammar wants them."""
    loaded: Any = parse(["recipe=quickstart", *override_words(settings)]).loaded.cfg
    for name in key.split("."):
        loaded = getattr(loaded, name)
    assert loaded == value


@pytest.mark.default
def test_mistakes_are_errors_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown key 'optim\.lrr'\. Did you mean 'optim\.lr'"):
        finetune("quickstart", optim={"lrr": 1})
    with pytest.raises(ToolkitError, match=r"missing\.jsonl"):
        finetune("quickstart", data="missing.jsonl")
    with pytest.raises(ConfigError, match="gpus has no effect with hostfile"):
        finetune("quickstart", gpus=2, hostfile="hostfile")
    wrong: Any = "two"
    with pytest.raises(ConfigError, match="gpus = two is not a positive whole number"):
        finetune("quickstart", gpus=wrong)
    assert not list(tmp_path.iterdir())


@pytest.mark.ranks
def test_it_trains_on_ranks_and_answers(capsys: pytest.CaptureFixture[str]) -> None:
    run = finetune("quickstart", gpus=2, train={"max_steps": 3}, **SETTINGS)
    assert "2 ranks" in capsys.readouterr().out
    assert [row["step"] for row in run.metrics if "loss" in row][-1] == 3
    assert (run.model / "config.json").is_file() and run.report.is_file()
    chat = Run(run.directory).chat(max_new_tokens=4)
    assert isinstance(chat("What does json.dumps do?"), str)
    chat("And json.loads?")
    assert [message["role"] for message in chat.messages] == ["user", "assistant", "user", "assistant"]


@pytest.mark.ranks
def test_an_interrupt_saves_a_checkpoint_and_the_same_call_resumes(capsys: pytest.CaptureFixture[str]) -> None:
    metrics = Path("runs", "stopped", "metrics.jsonl")

    def interrupt() -> None:
        while not (metrics.is_file() and metrics.stat().st_size):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    settings = {**SETTINGS, "run": {"name": "stopped"}, "train": {"max_steps": STEPS}}
    thread = threading.Thread(target=interrupt, daemon=True)
    # A shell's background job ignores SIGINT, and so would these tests.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        thread.start()
        with pytest.raises(Stopped, match=r"(?s)exit code 75: .*Saved: .*step-"):
            finetune("quickstart", quiet=True, **settings)
    finally:
        signal.signal(signal.SIGINT, before)
    thread.join()
    assert capsys.readouterr().out == ""
    saved = int(next(Path("runs", "stopped", "checkpoints").glob("step-*")).name.removeprefix("step-"))
    run = finetune("quickstart", quiet=True, **settings)
    steps = [row["step"] for row in run.metrics if "loss" in row]
    assert 0 < saved < STEPS and steps == sorted(set(steps)) and steps[-1] == STEPS


@pytest.mark.ranks
def test_a_run_that_fails_tells_its_last_lines() -> None:
    Path("rows.jsonl").write_text('{"prompt": "a", "response": "b"}\n{"prompt": 3}\n', encoding="utf-8")
    with pytest.raises(RunFailed, match=r"(?s)exit code 2: .*rows\.jsonl:2"):
        finetune("quickstart", quiet=True, **{**SETTINGS, "data": "rows.jsonl"})
