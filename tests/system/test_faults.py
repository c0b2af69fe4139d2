"""Killed at any place, the same command goes on to the same end; and whatever was whole stays whole."""

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from ranks import deepspeed, forked, free_port, gone, kill_session, run, start, wait_for
from shared import FAULTY, faulty_words, losses, rows_of

from toolkit.checkpoint.directory import published_checkpoints
from toolkit.checkpoint.intact import manifest_problems

OFTEN = (
    {"at": "step", "step": 5, "rank": 0, "do": "kill"},
    {"at": "save.manifest", "step": 4, "rank": 0, "do": "killall"},
)
KILLS: list[dict[str, Any]] = [
    {"at": "step", "step": 1, "rank": 1, "do": "kill"},
    {"at": "step", "step": 5, "rank": 0, "do": "kill"},
    {"at": "step", "step": 8, "rank": 1, "do": "killall"},
    {"at": "save.shard", "step": 4, "rank": 1, "do": "kill"},
    {"at": "save.prove", "step": 4, "rank": 0, "do": "killall"},
    {"at": "save.manifest", "step": 4, "rank": 0, "do": "killall"},
    {"at": "save.rename", "step": 6, "rank": 0, "do": "killall"},
    {"at": "save.latest", "step": 6, "rank": 0, "do": "killall"},
    {"at": "rotate", "step": 3, "rank": 0, "do": "killall"},
]


@pytest.mark.fault("K1", "K2")
@pytest.mark.parametrize(
    "fault",
    [pytest.param(fault, marks=pytest.mark.ranks) if fault in OFTEN else fault for fault in KILLS],
    ids=lambda fault: f"{fault['at']}-{fault['step']}-{fault['do']}{fault['rank']}",
)
def test_the_same_command_goes_on_to_the_same_end(
    fault: dict[str, Any], rows_file: Path, tmp_path: Path, straight: list[float]
) -> None:
    note = tmp_path / "note"
    command = faulty_words(rows_file, tmp_path, "run")
    killed = run(forked(2, FAULTY, *command), cwd=tmp_path, FAULT=json.dumps({**fault, "note": str(note)}))
    assert note.read_text() == f"{fault['at']} {fault['rank']}\n", "the fault did not happen"
    folder = tmp_path / "runs" / "run"
    assert not (folder / "DONE").exists(), killed.output[-2000:]
    gone(f"run.dir={tmp_path}/runs", 30)
    for checkpoint in published_checkpoints(folder / "checkpoints"):
        assert not manifest_problems(checkpoint)
    finished = run(forked(2, FAULTY, *command), cwd=tmp_path, FAULT="{}")
    assert finished.code == 0, finished.output[-4000:]
    assert losses(folder) == straight
    assert (folder / "DONE").exists()
    assert not (folder / "FAILED").exists()
    assert not [*folder.rglob("*.tmp"), *folder.rglob("*.trash")]
    newest = published_checkpoints(folder / "checkpoints")
    assert [path.name for path in newest] == ["step-8", "step-6"]
    assert (folder / "checkpoints" / "latest").read_text() == "step-8\n"
    if fault["at"] != "step" or fault["step"] > 2:
        assert "Resuming after step " in finished.output
    if fault is not KILLS[0]:
        return
    again = run(forked(2, FAULTY, *command), cwd=tmp_path, FAULT="{}")
    assert again.code != 0
    assert "has finished already (DONE)" in again.output


@pytest.mark.fault("K1")
def test_a_run_that_began_in_another_ones_checkpoint_is_resumed_too(
    rows_file: Path, tmp_path: Path, straight: list[float]
) -> None:
    """From there, as long as it has none of its own: the rows of steps that are done again do not count twice."""
    old = faulty_words(rows_file, tmp_path, "old", "checkpoint.keep=0")
    assert run(forked(2, FAULTY, *old), cwd=tmp_path, FAULT="{}").code == 0
    source = tmp_path / "runs" / "old" / "checkpoints" / "step-4"
    folder, note = tmp_path / "runs" / "run", tmp_path / "note"
    command = faulty_words(rows_file, tmp_path, "run", f"resume={source}")
    killed = {"rank": 0, "do": "killall", "note": str(note)}
    faults: list[dict[str, Any]] = [{"at": "step", "step": 2}, {"at": "save.latest", "step": 6}, {}]
    for fault, begun in zip(faults, (source, source, folder / "checkpoints" / "step-6"), strict=True):
        finished = run(forked(2, FAULTY, *command), cwd=tmp_path, FAULT=json.dumps(fault and fault | killed))
        assert f"from {begun}.\n" in finished.output, finished.output[-3000:]
    assert note.read_text() == "step 0\nsave.latest 0\n"
    assert finished.code == 0
    assert losses(folder) == straight[4:]


@pytest.mark.fault("K3")
@pytest.mark.parametrize("victim", ["launcher", "front end"])
def test_no_rank_outlives_its_launcher(victim: str, rows_file: Path, tmp_path: Path) -> None:
    command = faulty_words(rows_file, tmp_path, "orphans", "train.max_steps=1000000", "checkpoint.every=0")
    process = start(deepspeed(2, FAULTY, *command), cwd=tmp_path, FAULT="{}")
    metrics = tmp_path / "runs" / "orphans" / "metrics.jsonl"
    try:
        wait_for(lambda: metrics.exists() and len(rows_of(metrics.parent)) > 2)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(children[0]) if victim == "launcher" else process.pid, signal.SIGKILL)
        gone(f"run.dir={tmp_path}/runs", 30)
    finally:
        process.kill()
        process.communicate(timeout=30)
        kill_session(process)
    [newest] = published_checkpoints(metrics.parent / "checkpoints")
    assert not manifest_problems(newest)
    assert not (metrics.parent / "DONE").exists()


@pytest.mark.ranks
@pytest.mark.fault("P1", "X1", "R2")
def test_a_file_stops_the_run_and_only_one_process_may_work_in_it(
    rows_file: Path, tmp_path: Path, straight: list[float]
) -> None:
    endless = faulty_words(rows_file, tmp_path, "run", "train.max_steps=1000000", "checkpoint.every=0")
    process = start(forked(2, FAULTY, *endless), cwd=tmp_path, FAULT="{}")
    folder = tmp_path / "runs" / "run"
    try:
        wait_for(lambda: (folder / "metrics.jsonl").exists())
        (folder / "run.lock").unlink()
        second = run(forked(2, FAULTY, *endless), cwd=tmp_path, FAULT="{}")
        assert second.code != 0
        assert f'another process works in {folder}: {{"pid": ' in second.output
        wait_for(lambda: (folder / "run.lock").stat().st_size > 0)  # the process that holds the folder signs it again
        (folder / "stop").touch()
        output, _ = process.communicate(timeout=60)
    finally:
        kill_session(process)
    assert "stopped by the file 'stop' after step " in output, output[-2000:]
    assert not (folder / "stop").exists()
    [newest] = published_checkpoints(folder / "checkpoints")
    assert not manifest_problems(newest)
    # A run of another length is another run; the key that differs is named, and the run stays as it was.
    settings = {name: (folder / name).read_text() for name in ("config.yaml", "ds_config.json", "environment.json")}
    shorter = run(forked(2, FAULTY, *faulty_words(rows_file, tmp_path, "run")), cwd=tmp_path, FAULT="{}")
    assert shorter.code != 0
    assert "train.max_steps: 1000000 -> 8" in shorter.output
    assert "checkpoint.allow_changes=[train.max_steps]" in shorter.output
    assert {name: (folder / name).read_text() for name in settings} == settings


@pytest.mark.ranks
@pytest.mark.fault("P1")
def test_evaluations_that_a_stop_prevented_are_made_up_for(rows_file: Path, tmp_path: Path) -> None:
    """Stopped at a step that is to be evaluated, and at the last step; the third life only evaluates and exports."""
    words = faulty_words(rows_file, tmp_path, "run", "evaluate.every=2")
    folder = tmp_path / "runs" / "run"

    def evaluated() -> list[int]:
        return [int(row["step"]) for row in rows_of(folder) if "eval_loss" in row]

    for calls, stop in ((3, 4), (3, 8)):  # a signal counts from the vote of the next step on
        note = tmp_path / f"note-{stop}"
        fault = {"at": "step", "step": calls, "rank": 0, "do": "term", "note": str(note)}
        stopped = run(forked(1, FAULTY, *words), cwd=tmp_path, FAULT=json.dumps(fault))
        assert note.exists()
        assert f"after step {stop} of 8, as all ranks agreed" in stopped.output, stopped.output[-3000:]
        assert evaluated() == [step for step in (2, 4, 6, 8) if step < stop]
    finished = run(forked(1, FAULTY, *words, "run.display=plain"), cwd=tmp_path, FAULT="{}")
    assert finished.code == 0, finished.output[-3000:]
    assert evaluated() == [2, 4, 6, 8]
    done = json.loads((folder / "DONE").read_text())
    assert done["last_eval_loss"] == rows_of(folder)[-1]["eval_loss"]


@pytest.mark.fault("H2")
def test_a_rank_that_waits_long_for_its_data_is_no_hang(rows_file: Path, tmp_path: Path) -> None:
    """Four times as long as a step may take; the other rank waits for it in a collective, which is no hang either."""
    nap = {"ranks": [1], "steps": [5, 5], "before": "data", "seconds": 40}
    command = faulty_words(rows_file, tmp_path, "run", "distributed.hang_after_s=10")
    note = tmp_path / "note"
    fault = {"at": "slow", "naps": [nap], "note": str(note)}
    finished = run(forked(2, FAULTY, *command), cwd=tmp_path, FAULT=json.dumps(fault))
    assert note.read_text() == "data 1\n"
    assert finished.code == 0, finished.output[-3000:]
    assert not list((tmp_path / "runs" / "run" / "logs").glob("hang-rank-*"))


def test_a_run_whose_folder_is_removed_says_so_and_saves_what_it_has(rows_file: Path, tmp_path: Path) -> None:
    endless = faulty_words(rows_file, tmp_path, "run", "train.max_steps=1000000", "checkpoint.every=0")
    process = start(forked(2, FAULTY, *endless), cwd=tmp_path, FAULT="{}")
    folder = tmp_path / "runs" / "run"
    try:
        wait_for(lambda: (folder / "metrics.jsonl").exists())
        folder.rename(tmp_path / "away")
        output, _ = process.communicate(timeout=120)
    finally:
        kill_session(process)
    assert process.returncode != 0
    assert output.count(f"RunFolderError: the run directory {folder} was removed, moved or replaced") == 1, output[
        -3000:
    ]
    [saved] = published_checkpoints(tmp_path / "runs" / "run.rescued" / "checkpoints")
    assert f"is saved: resume={saved} continues from it" in output
    assert not manifest_problems(saved)
    assert not folder.exists()


@pytest.mark.ranks
@pytest.mark.fault("C2")
def test_a_damaged_checkpoint_is_passed_over(rows_file: Path, tmp_path: Path, straight: list[float]) -> None:
    note = tmp_path / "note"
    command = faulty_words(rows_file, tmp_path, "run")
    fault = {"at": "step", "step": 8, "rank": 0, "do": "killall", "note": str(note)}
    run(forked(2, FAULTY, *command), cwd=tmp_path, FAULT=json.dumps(fault))
    assert note.exists()
    folder = tmp_path / "runs" / "run"
    newest, before = published_checkpoints(folder / "checkpoints")
    file = newest / "fragments-00001.safetensors"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)
    finished = run(forked(2, FAULTY, *command), cwd=tmp_path, FAULT="{}")
    assert finished.code == 0, finished.output[-3000:]
    said = rf"{newest} is damaged and skipped \({file.name}: its content is not what was written \([a-z_]+:[\w.]+\)\)"
    assert re.search(said, finished.output), "the parameter is named"
    assert f"Resuming after step {before.name.removeprefix('step-')} from {before}" in finished.output
    assert losses(folder) == straight
    assert (folder / "checkpoints" / f"{newest.name}.damaged").is_dir()


@pytest.mark.fault("E1")
@pytest.mark.parametrize("at", ["save.shard", "save.manifest"])
def test_a_full_disk_costs_a_checkpoint_and_not_the_run(
    at: str, rows_file: Path, tmp_path: Path, straight: list[float]
) -> None:
    note = tmp_path / "note"
    fault = {"at": at, "step": 4, "rank": 1 if at == "save.shard" else 0, "do": "fail", "note": str(note)}
    # Steps that take so long that the save has failed before the run's last one, on a busy machine, too.
    fault["naps"] = [{"ranks": [0, 1], "steps": [5, 7], "before": "step", "seconds": 0.7}]
    command = faulty_words(rows_file, tmp_path, "run", "checkpoint.keep=0", "checkpoint.every=4")
    finished = run(forked(2, FAULTY, *command), cwd=tmp_path, FAULT=json.dumps(fault))
    assert note.exists()
    assert finished.code == 0, finished.output[-3000:]
    assert "WARNING: the checkpoint step-4 could not be saved: No space left on device" in finished.output
    folder = tmp_path / "runs" / "run"
    assert losses(folder) == straight
    names = [path.name for path in published_checkpoints(folder / "checkpoints")]
    assert names[0] == "step-8"
    assert len(names) == 2
    assert names[1] in ("step-5", "step-6", "step-7"), "it is tried again soon, and once it succeeds no more"
    assert not list(folder.rglob("*.tmp"))


@pytest.mark.fault("H1", "H2")
@pytest.mark.parametrize("do", ["stop", pytest.param("hang", marks=pytest.mark.ranks)])
def test_a_rank_that_hangs_is_noticed_and_named(
    do: str, rows_file: Path, tmp_path: Path, straight: list[float]
) -> None:
    """A stopped process, and one that is alive but never comes to the collective that the other waits in."""
    note = tmp_path / "note"
    fault = {"at": "step", "step": 6, "rank": 1, "do": do, "note": str(note)}
    command = faulty_words(rows_file, tmp_path, "run", "distributed.hang_after_s=10")
    started = time.monotonic()
    finished = run(forked(2, FAULTY, *command), cwd=tmp_path, FAULT=json.dumps(fault))
    assert note.exists()
    assert finished.code != 0
    assert time.monotonic() - started < 90
    folder = tmp_path / "runs" / "run"
    said = (folder / "FAILED").read_text()
    assert "step 6 has taken 1" in said
    assert ("No sign of life from rank 1 (pid " if do == "stop" else "All ranks are alive and in the same step") in said
    assert "Hang: step 6 has taken" in finished.output
    stacks = (folder / "logs" / "hang-rank-0.txt").read_text()
    assert "rows x tokens: [(1, " in stacks
    assert "train_step" in stacks
    if do == "hang":
        assert "faulty_run.py" in (folder / "logs" / "hang-rank-1.txt").read_text()
    gone(f"run.dir={tmp_path}/runs", 20)
    again = run(forked(2, FAULTY, *command), cwd=tmp_path, FAULT="{}")
    assert again.code == 0, again.output[-3000:]
    assert losses(folder) == straight


# test_battery.py holds the lock to it twenty times without whole runs
@pytest.mark.fault("X1")
def test_two_runs_started_at_once(rows_file: Path, tmp_path: Path) -> None:
    command = faulty_words(rows_file, tmp_path, "run")
    both = [
        subprocess.Popen(
            [*forked(1, FAULTY), *command],
            cwd=tmp_path,
            env=start_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for _ in range(2)
    ]
    outputs = [process.communicate(timeout=120)[0] for process in both]
    codes = [process.returncode for process in both]
    assert sorted(code == 0 for code in codes) == [False, True], outputs
    refused = outputs[[code == 0 for code in codes].index(False)]
    assert "another process works in" in refused or "has finished already (DONE)" in refused


def start_environment() -> dict[str, str]:
    """Return the environment of a launch without a fault."""
    from ranks import environment

    return environment(FAULT="{}", MASTER_PORT=str(free_port()))
