"""The search for the fastest stage and micro-batch: what is tried, what is told, what is refused."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from toolkit.cli import main
from toolkit.jobs import sweep as sweeping
from toolkit.jobs.sweep import DONE, FAILED, STOPPED, SweepDir, SweepJob, SweepPlan
from toolkit.launch.processes import SignalRequests
from toolkit.plan.machine import parse_machine

RECIPE = ["recipe=quickstart", "model=glm_tiny", "batch.global_size=8"]
SPEEDS = {
    "stage1 1": 10.0,
    "stage1 2": 14.0,
    "stage1 4": 0.0,
    "stage3 1": 5.0,
    "stage3 2": 7.0,
    "stage3 4": 6.0,
    "stage2_offload 1": 3.0,
    "stage3_offload 1": 2.0,
}
"""Config group and micro-batch -> tokens per second; 0: it fails."""


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace runs by what SPEEDS says; what was started, in order."""
    started: list[str] = []

    def launch(
        plan: SweepPlan, sweep: SweepDir, job: SweepJob, special: Sequence[str], requests: SignalRequests
    ) -> None:
        group, micro = special[0].removeprefix("zero="), special[1].removeprefix("batch.micro_per_gpu=")
        started.append(f"{group} {micro}")
        folder = sweep.run_dir(job)
        folder.mkdir(exist_ok=True)
        if speed := SPEEDS[f"{group} {micro}"]:
            rows = [{"step": step, "loss": 1.0, "tokens_per_s": speed} for step in range(1, 9)]
            (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
            (folder / "DONE").write_text("{}")
        else:
            (folder / "FAILED").write_text("OutOfMemory: 3 GiB are missing\n")
        job.state = DONE if speed else FAILED
        sweep.save()

    monkeypatch.setattr(sweeping, "launch", launch)
    monkeypatch.setattr("toolkit.jobs.autotune.this_machine", lambda nodes: None)
    return started


def test_everything_is_tried_and_the_fastest_is_told(
    tried: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Also after a micro-batch that failed: a later stage may have the room for it."""
    command = ["autotune", "--num_gpus", "2", *RECIPE, "stages=3,1", f"run.dir={tmp_path}", "sweep=tuned"]
    assert main(command) == 0
    assert sorted(tried) == ["stage1 1", "stage1 2", "stage1 4", "stage3 1", "stage3 2", "stage3 4"]
    told = capfd.readouterr().out
    assert "The fastest: zero=stage1 batch.micro_per_gpu=2\n" in told
    assert "At most 6 experiments, in " in told

    tried.clear()  # the same command again: what failed is tried once more, and nothing else
    assert main(command) == 0
    assert tried == ["stage1 4"]
    assert "The fastest: zero=stage1 batch.micro_per_gpu=2\n" in capfd.readouterr().out

    assert main([*command, "optim.lr=0.1"]) == 2, "speeds of other settings are no answer"
    assert "began with other settings" in capfd.readouterr().err


def test_where_nothing_runs(tried: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["autotune", "--num_gpus", "2", *RECIPE, "stages=1", "micro=4", f"run.dir={tmp_path}"]) == 1
    assert tried == ["stage1 4"]
    assert "None of them ran." in capfd.readouterr().out


def test_what_has_no_room_is_left_out_alone(
    tried: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each micro-batch at each stage by its own plan."""
    from toolkit.arguments import parse
    from toolkit.plan.memory import plan_rank
    from toolkit.plan.outline import outline_of

    peaks = {}
    for stage in (1, 3):
        for micro in (1, 2, 4):
            words = [*RECIPE, f"zero=stage{stage}", f"batch.micro_per_gpu={micro}"]
            cfg = parse(words).loaded.cfg
            memory = plan_rank(outline_of(cfg), cfg, 2)
            peaks[f"stage{stage} {micro}"] = memory.peak(memory.worst)
    room = peaks["stage1 2"]
    assert peaks["stage1 4"] > room
    machine = replace(parse_machine("2x80GB", 1, ""), memory_bytes=room, context_bytes=0)
    monkeypatch.setattr("toolkit.jobs.autotune.this_machine", lambda nodes: machine)
    monkeypatch.setenv("DS_ACCELERATOR", "cuda")
    assert main(["autotune", "--num_gpus", "2", *RECIPE, "stages=1,3", f"run.dir={tmp_path}"]) == 0
    assert sorted(tried) == sorted(name for name, peak in peaks.items() if peak <= machine.usable_bytes)
    assert "zero=stage1 batch.micro_per_gpu=4  skipped: by plan a rank needs " in capfd.readouterr().out
    tried.clear()
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")  # no rank is on a GPU, whose memory decides nothing then
    assert main(["autotune", "--num_gpus", "2", *RECIPE, "stages=1", f"run.dir={tmp_path}/cpu"]) == 0
    assert tried == ["stage1 1", "stage1 2", "stage1 4"]


def test_what_the_recipe_offloads_stays_there(tried: list[str], tmp_path: Path) -> None:
    words = ["recipe=zero2_offload", "model=glm_tiny", "batch.global_size=8", "micro=1", f"run.dir={tmp_path}"]
    assert main(["autotune", "--num_gpus", "2", *words]) == 0
    assert tried == ["stage2_offload 1", "stage3_offload 1"]


def test_secrets_stay_out(tried: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = [*RECIPE, "stages=1", "micro=1", "+ds_extra.comet.api_key=verysecretvalue", f"run.dir={tmp_path}"]
    assert main(["autotune", "--num_gpus", "2", *words]) == 0
    [written] = tmp_path.rglob("sweep.json")
    assert "verysecretvalue" not in written.read_text() + capfd.readouterr().out


def test_a_signal_stops_the_search(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def launch(
        plan: SweepPlan, sweep: SweepDir, job: SweepJob, special: Sequence[str], requests: SignalRequests
    ) -> None:
        job.state, requests.last = STOPPED, 15

    monkeypatch.setattr(sweeping, "launch", launch)
    assert main(["autotune", "--num_gpus", "2", *RECIPE, "stages=1", f"run.dir={tmp_path}", "sweep=tuned"]) == 75
    told = capfd.readouterr()
    assert "stopped by SIGTERM" in told.err
    assert "toolkit autotune --num_gpus 2 recipe=quickstart" in told.err
    assert told.out.count("zero=stage1") == 2, "begun and shown; no other is begun"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["zero=stage2"], "zero=stage2: that is what autotune seeks"),
        (["batch.micro_per_gpu=2"], "batch.micro_per_gpu=2: that is what autotune seeks"),
        (["plan.auto=true"], "plan.auto chooses the ZeRO stage itself"),
        (["parallel=tensor"], "autotune was not tried with model parallelism"),
        (["zero.offload_optimizer.device=nvme"], "autotune knows plain ZeRO stages"),
        (["stages=1,4"], "stages: 4 is none of 0, 1, 2, 3"),
        (["micro=3"], "micro: 3 is none of 1, 2, 4"),
        (["batch.global_size=7"], "batch.global_size = 7"),
    ],
)
def test_refused(words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["autotune", "--num_gpus", "2", *RECIPE, f"run.dir={tmp_path}/runs", *words]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_number_of_gpus_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["autotune", "--num_gpus", "two", *RECIPE, f"run.dir={tmp_path}/runs"]) == 2
    assert "--num_gpus two: write a positive whole number" in capsys.readouterr().err


def test_not_on_ranks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "CROSS_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    assert main(["autotune", *RECIPE]) == 2
    assert "starts the ranks itself" in capsys.readouterr().err
