"""The search for the fastest stage and micro-batch: what is tried, what is told, what is refused."""

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from toolkit.cli import autotuner, main
from toolkit.cli.experiments import LOG, METRIC, Search, overrides

RECIPE = ["recipe=quickstart", "model=glm_tiny", "batch.global_size=8"]


class Ended:
    """A process that has ended."""

    def wait(self) -> int:
        """Wait for nothing."""
        return 0

    def send_signal(self, number: int) -> None:
        """Nobody is there to get it."""


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Replace runs: what each finds, 0 for those that fail. Those that were started are in the order of their start."""
    started: dict[str, float] = {}
    speeds = {"1 1": 10.0, "1 2": 14.0, "1 4": 0.0, "3 1": 5.0, "3 2": 7.0, "3 4": 6.0}

    def start(search: Search, words: list[str], folder: Path) -> Any:
        stage, micro = words[0].removeprefix("zero=stage"), words[-1].removeprefix("batch.micro_per_gpu=")
        started[f"{stage} {micro}"] = speed = speeds[f"{stage} {micro}"]
        if speed:
            (folder / METRIC).write_text(json.dumps({"throughput": speed}))
        (folder / LOG).write_text("begins\n" if speed else "begins\nOutOfMemory: 3 GiB are missing\n\n")
        return Ended()

    monkeypatch.setattr(autotuner, "start", start)
    monkeypatch.setattr("deepspeed.autotuning.scheduler.TIMEOUT", 0.01)
    return started


def test_everything_is_tried_and_the_fastest_is_told(
    tried: dict[str, float], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    command = ["autotune", "--num_gpus", "2", *RECIPE, "stages=3,1", f"output={tmp_path}/tuned"]
    assert main(command) == 0
    assert sorted(tried) == ["1 1", "1 2", "1 4", "3 1", "3 2", "3 4"]
    told = capfd.readouterr().out
    assert "The fastest: zero=stage1 batch.micro_per_gpu=2\n" in told
    assert "zero=stage3 batch.micro_per_gpu=2  7.00 samples/s\n" in told
    assert "zero=stage1 batch.micro_per_gpu=4  failed: OutOfMemory: 3 GiB are missing (" in told
    files = list(tmp_path.glob("tuned/results/*/ds_config.json"))
    assert len(files) == 6
    assert {json.loads(file.read_text())["train_batch_size"] for file in files} == {8}
    assert signal.getsignal(signal.SIGTERM) is before

    tried.clear()  # the same command again: what failed is tried once more, and nothing else
    assert main(command) == 0
    assert list(tried) == ["1 4"]
    assert "The fastest: zero=stage1 batch.micro_per_gpu=2\n" in capfd.readouterr().out


def test_where_nothing_runs(tried: dict[str, float], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    command = ["autotune", "--num_gpus", "2", *RECIPE, "stages=1", "micro=4", f"output={tmp_path}/tuned"]
    assert main(command) == 1
    assert list(tried) == ["1 4"]
    assert "None of them ran." in capfd.readouterr().out


def test_settings_of_an_experiment() -> None:
    zero = {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 5e7}
    found = overrides({"zero_optimization": zero, "train_micro_batch_size_per_gpu": 4})
    assert found == ["zero=stage2", "zero.overlap_comm=true", "zero.reduce_bucket_size=50000000", found[-1]]
    assert found[-1] == "batch.micro_per_gpu=4"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["zero=stage2"], "zero=stage2: that is what autotune seeks"),
        (["batch.micro_per_gpu=2"], "batch.micro_per_gpu=2: that is what autotune seeks"),
        (["plan.auto=true"], "plan.auto chooses the ZeRO stage itself"),
        (["parallel=tensor"], "autotune was not tried with model parallelism"),
        (["train.max_steps=5"], "train.max_steps = 5: an experiment takes 6 steps"),
        (["stages=1,4"], "stages: 4 is none of 0, 1, 2, 3"),
        (["micro=3"], "micro: 3 is none of 1, 2, 4"),
        (["fast=yes"], "fast = yes is none of true, false"),
        (["batch.global_size=7"], "7"),
    ],
)
def test_refused(words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["autotune", "--num_gpus", "2", *RECIPE, f"run.dir={tmp_path}/runs", *words]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_number_of_gpus_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["autotune", "--num_gpus", "two", *RECIPE, f"run.dir={tmp_path}/runs"]) == 2
    assert "--num_gpus two is not a number from 1" in capsys.readouterr().err


def test_not_on_ranks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "CROSS_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    assert main(["autotune", *RECIPE]) == 2
    assert "starts the ranks of each run itself" in capsys.readouterr().err


def test_what_runs_is_stopped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whoever interrupts the search ends the experiment as well."""
    processes = []

    def start(search: Search, words: list[str], folder: Path) -> "subprocess.Popen[bytes]":
        processes.append(subprocess.Popen(["sleep", "600"], start_new_session=True))
        return processes[-1]

    def interrupt(self: Any, progress: Any) -> None:
        while not self.running:
            pass
        raise KeyboardInterrupt

    monkeypatch.setattr(autotuner, "start", start)
    monkeypatch.setattr(autotuner._Runs, "experiment_check", interrupt)
    command = ["autotune", "--num_gpus", "2", *RECIPE, "stages=1", "micro=1", f"output={tmp_path}/tuned"]
    assert main(command) == 130
    assert [process.wait(timeout=10) for process in processes] == [-signal.SIGTERM]
