"""What died is started again by `toolkit launch` or torchrun, unless that cannot help; no exit code is lost."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ranks import BIN, REPOSITORY, alive, free_port, gone, kill_session, run, start, wait_for
from shared import FAULTY, faulty_words, losses, rows_of, tiny

from toolkit.checkpoint.directory import published_checkpoints
from toolkit.checkpoint.intact import manifest_problems

LAUNCH = [sys.executable, str(REPOSITORY / "tests" / "ranks" / "faulty_launch.py")]


def launch(*words: str) -> list[str]:
    """Return `toolkit launch` on two ranks."""
    return [*LAUNCH, "--num_gpus", "2", "--master_port", str(free_port()), *words]


def starts_of(folder: Path) -> list[tuple[int, int, str]]:
    """Return from which step each start of a run went on, the restart's number, and who started it."""
    rows = [json.loads(line) for line in (folder / "logs" / "starts.jsonl").read_text().splitlines()]
    return [(row["from_step"], row["restart"], row["by"]) for row in rows]


@pytest.mark.ranks
@pytest.mark.fault("K1", "G1")
def test_a_killed_rank_costs_a_restart_and_nothing_else(rows_file: Path, tmp_path: Path, straight: list[float]) -> None:
    fault = {"at": "each life", "step": 5, "rank": 1, "do": "kill", "note": str(tmp_path / "note"), "once": True}
    command = launch(*faulty_words(rows_file, tmp_path, "run", "run.max_restarts=2"))
    finished = run(command, cwd=tmp_path, FAULT=json.dumps(fault))
    assert (tmp_path / "note").read_text() == "each life 1\n", "the fault did not happen"
    assert finished.code == 0, finished.output[-4000:]
    folder = tmp_path / "runs" / "run"
    assert losses(folder) == straight
    [(from_step, *_)] = starts_of(folder)[1:]
    assert from_step in (2, 4)  # the checkpoint of step 4 may not have been proven yet
    assert starts_of(folder) == [(0, 0, "toolkit launch"), (from_step, 1, "toolkit launch")]
    said = f"The run died at step 5 (exit code 1). Restart 1 of 2, from the checkpoint of step {from_step}.\n"
    assert said in finished.output
    timed = rf"^Restart 1 of 2: \d+\.\d s from the death to the first new step \(step {from_step + 1}\)\.$"
    assert len(re.findall(timed, finished.output, re.MULTILINE)) == 1
    assert not (folder / "FAILED").exists()
    assert not list((tmp_path / "runs").glob(".launch-*"))
    again = run(command, cwd=tmp_path, FAULT="{}")
    assert again.code == 2
    assert "has finished already (DONE)" in again.output
    assert "Restart" not in again.output


@pytest.mark.fault("K1")
def test_a_crash_in_one_place_ends_after_the_second_time(rows_file: Path, tmp_path: Path) -> None:
    fault = {
        "at": "each life",
        "step": 5,
        "rank": 0,
        "do": "tell",
        "tell": "broken on purpose",
        "note": str(tmp_path / "note"),
    }
    command = launch(*faulty_words(rows_file, tmp_path, "run", "run.max_restarts=9", "checkpoint.every=5"))
    finished = run(command, cwd=tmp_path, FAULT=json.dumps(fault))
    assert (tmp_path / "note").read_text() == "each life 0\n" * 2
    assert finished.code == 1
    folder = tmp_path / "runs" / "run"
    last = finished.output.splitlines()[-1]
    assert last.startswith(
        f"RepeatedDeath: the run {folder} died at step 5 and, started again, at step 5, without a new checkpoint in "
        f"between (the last is of step 0)"
    )
    assert starts_of(folder) == [(0, 0, "toolkit launch"), (0, 1, "toolkit launch")]
    assert ", exit code 1\n" in (folder / "FAILED").read_text()


@pytest.mark.fault("K1")
def test_a_run_that_dies_further_on_each_time_ends_with_its_restarts(rows_file: Path, tmp_path: Path) -> None:
    """In the fifth step of each of its lives."""
    naps = [{"ranks": [0], "steps": [1, 40], "before": "step", "seconds": 0.3}]
    fault = {"at": "step", "step": 5, "rank": 1, "do": "kill", "note": str(tmp_path / "note"), "naps": naps}
    words = faulty_words(rows_file, tmp_path, "run", "run.max_restarts=2", "train.max_steps=40", "checkpoint.every=1")
    finished = run(launch(*words), cwd=tmp_path, FAULT=json.dumps(fault))
    assert (tmp_path / "note").read_text().count("step 1\n") == 3
    folder = tmp_path / "runs" / "run"
    saved = int(published_checkpoints(folder / "checkpoints")[0].name.removeprefix("step-"))
    first, second, third = starts_of(folder)
    assert 0 == first[0] < second[0] < third[0] < saved and [first[1], second[1], third[1]] == [0, 1, 2]
    assert finished.code == 1 and finished.output.splitlines()[-1] == (
        f"The run died at step {third[0] + 5} (exit code 1), after 2 restarts: no more are allowed "
        f"(run.max_restarts). The same command resumes it from the checkpoint of step {saved}."
    )


@pytest.mark.fault("K1")
def test_torchrun_starts_a_run_again_too(rows_file: Path, tmp_path: Path, straight: list[float]) -> None:
    fault = {"at": "each life", "step": 5, "rank": 1, "do": "kill", "note": str(tmp_path / "note"), "once": True}
    torchrun = [str(BIN / "torchrun"), "--nproc-per-node", "2", "--master-port", str(free_port()), "--max-restarts=1"]
    command = [*torchrun, FAULTY, *faulty_words(rows_file, tmp_path, "run", "run.max_restarts=1")]
    finished = run(command, cwd=tmp_path, FAULT=json.dumps(fault))
    assert (tmp_path / "note").read_text() == "each life 1\n", "the fault did not happen"
    assert finished.code == 0, finished.output[-4000:]
    folder = tmp_path / "runs" / "run"
    assert losses(folder) == straight
    assert [(restart, by) for _, restart, by in starts_of(folder)] == [(0, "torchrun"), (1, "torchrun")]
    assert starts_of(folder)[1][0] in (2, 4)
    assert not (folder / "FAILED").exists()


@pytest.mark.fault("K3", "P1")
def test_a_lost_launcher_is_replaced_and_a_request_to_stop_is_obeyed(rows_file: Path, tmp_path: Path) -> None:
    endless = ["train.max_steps=1000000", "checkpoint.every=100000", "run.max_restarts=2"]
    process = start(launch(*faulty_words(rows_file, tmp_path, "run", *endless)), cwd=tmp_path, FAULT="{}")
    folder = tmp_path / "runs" / "run"
    try:
        wait_for(lambda: (folder / "metrics.jsonl").exists() and len(rows_of(folder)) > 2)
        [front_end] = children(process.pid)
        [launcher] = children(front_end)
        os.kill(launcher, signal.SIGKILL)
        wait_for(
            lambda: len(starts_of(folder)) == 2 and (folder / "metrics.jsonl").stat().st_size > size_at_start(folder)
        )
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
    finally:
        kill_session(process)
    assert process.returncode == 75, output[-3000:]
    assert "stopped by SIGTERM after step " in output
    assert output.count("Restart 1 of 2, from the checkpoint of step ") == 1
    gone(f"run.dir={tmp_path}/runs", 5)
    newest = published_checkpoints(folder / "checkpoints")[0]
    assert not manifest_problems(newest)
    assert int(newest.name.removeprefix("step-")) > starts_of(folder)[1][0] > 0


def children(pid: int) -> list[int]:
    """Return the children of a process."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def size_at_start(folder: Path) -> int:
    """Return the length of metrics.jsonl from which the last start goes on."""
    newest = published_checkpoints(folder / "checkpoints")[0]
    return int(json.loads((newest / "state.json").read_text())["metrics_bytes"])


@pytest.mark.fault("P1")
def test_stopped_in_its_first_seconds_it_leaves_nothing(rows_file: Path, tmp_path: Path) -> None:
    """When the launcher is there already, and no rank yet."""
    process = start(
        launch(*faulty_words(rows_file, tmp_path, "run", "train.max_steps=1000000")), cwd=tmp_path, FAULT="{}"
    )
    marker = f"run.dir={tmp_path}/runs"
    try:
        wait_for(lambda: any("deepspeed.launcher.launch" in words_of(pid) for pid in alive(marker)))
        os.kill(process.pid, signal.SIGINT)
        process.communicate(timeout=60)
        assert process.returncode == 75
        gone(marker, 30)
        assert not (tmp_path / "runs" / "run" / "metrics.jsonl").exists(), "it was not in its first seconds"
    finally:
        kill_session(process)


def words_of(pid: int) -> list[str]:
    """Return the command line of a process, [] if it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
    except OSError:
        return []


@pytest.mark.fault("K3")
def test_no_rank_outlives_a_killed_toolkit_launch(rows_file: Path, tmp_path: Path) -> None:
    """Which runs here as where there is no checkout with a run.py."""
    endless = ["train.max_steps=1000000", "checkpoint.every=0"]
    process = start(launch(*faulty_words(rows_file, tmp_path, "run", *endless)), cwd=tmp_path, AS_MODULE="1")
    folder = tmp_path / "runs" / "run"
    try:
        wait_for(lambda: (folder / "metrics.jsonl").exists() and len(rows_of(folder)) > 2)
        process.kill()
        gone(f"run.dir={tmp_path}/runs", 30)
    finally:
        process.kill()
        process.communicate(timeout=30)
        kill_session(process)
    [newest] = published_checkpoints(folder / "checkpoints")
    assert not manifest_problems(newest)


REFUSED: dict[str, tuple[list[str], str]] = {
    "a key that is none": (["zero.stag=3"], "unknown key 'zero.stag'. Did you mean 'zero.stage'?"),
    "no name": (["run.name=''", "run.max_restarts=1"], "Add run.name=NAME."),
    "never": (["run.max_restarts=1", "checkpoint.every=2", "resume=never"], "Add resume=auto."),
}


@pytest.mark.parametrize("name", REFUSED)
def test_mistakes_are_told_before_anything_starts(name: str, rows_file: Path, tmp_path: Path) -> None:
    words, message = REFUSED[name]
    finished = run(launch(*tiny(rows_file, tmp_path, "run", *words)), cwd=tmp_path, FAULT="{}")
    assert finished.code == 2
    assert message in finished.output
    assert not (tmp_path / "runs").exists()


def test_a_hostfile_that_was_asked_for_has_to_be_there(rows_file: Path, tmp_path: Path) -> None:
    finished = run([*LAUNCH, "--hostfile", "nosuch", *tiny(rows_file, tmp_path, "run")], cwd=tmp_path, FAULT="{}")
    assert finished.code == 2
    assert finished.output.startswith("LaunchError: the hostfile nosuch cannot be read: No such file or directory.")


def test_who_starts_nothing_again_is_refused(rows_file: Path, tmp_path: Path) -> None:
    words = tiny(rows_file, tmp_path, "run", "run.max_restarts=1", "checkpoint.every=2")
    python: Any = subprocess.run(
        [sys.executable, str(REPOSITORY / "run.py"), *words], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert python.returncode == 2
    assert "nothing here would restart the run (single). Type: toolkit launch recipe=quickstart " in python.stderr
