"""Faults that need a whole run: signals, clocks, disks, memory, paths, changed data; each notes that it happened."""

import contextlib
import json
import os
import random
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ranks import deepspeed, environment, forked, gone, kill_session, run, start, wait_for
from shared import FAULTY, STEPS, faulty_words, losses, rows_of

from toolkit.checkpoint.directory import published_checkpoints
from toolkit.checkpoint.intact import manifest_problems, newest_intact


def life(folder: Path, words: list[str], fault: dict[str, Any], num_ranks: int = 2) -> Any:
    """Run once with a fault; fail if the fault did not happen."""
    note = folder / "note"
    note.unlink(missing_ok=True)
    told = json.dumps({**fault, "note": str(note)} if fault else {})
    finished = run(forked(num_ranks, FAULTY, *words), cwd=folder, FAULT=told)
    assert note.exists() == bool(fault), f"the fault did not happen:\n{finished.output[-3000:]}"
    return finished


@pytest.mark.fault("F1", "T1", "P1", "D5", "M1")
def test_a_hard_life_in_a_strange_place(rows_file: Path, tmp_path: Path, straight: list[float]) -> None:
    """Every life of one run, in a folder whose name is hard on shells, goes on from the one before."""
    folder = tmp_path / "数据 $HOME 'x' -y"
    folder.mkdir()
    rows = folder / "对话 行.jsonl"
    shutil.copyfile(rows_file, rows)
    words = [*faulty_words(rows_file, Path("."), "运行 1"), f"data.sources=[{{path: '{rows.name}'}}]"]
    run_folder = folder / "runs" / "运行 1"

    # The clock goes back a year at step 2, and a rank that is not rank 0 gets two signals at step 3.
    stopped = life(folder, words, {"at": "step", "step": 3, "rank": 1, "do": "term", "back_at": 2})
    assert "Stopped: stopped by " in stopped.output, stopped.output[-3000:]
    [newest, *_] = published_checkpoints(run_folder / "checkpoints")
    assert newest.name == "step-4", "the vote of step 3 was cast already"
    assert not manifest_problems(newest)
    assert not (run_folder / "FAILED").exists()
    os.utime(newest, (0, 0))  # its time says that it is the oldest: order is by step

    # The data is replaced by other data of the same size and time.
    before, content = rows.stat(), rows.read_text()
    place = content.index("apple")
    rows.write_text(content[:place] + "peach" + content[place + 5 :])
    os.utime(rows, ns=(before.st_atime_ns, before.st_mtime_ns))
    refused = life(folder, words, {})
    assert refused.code != 0
    assert "the prepared data" in refused.output and "the tokenizer: another vocabulary" in refused.output
    assert "checkpoint.allow_changes=[data,model.tokenizer]" in refused.output
    rows.write_text(content)

    # A rank may not have more memory than it has.
    dead = life(folder, words, {"at": "step", "step": 3, "rank": 1, "do": "memory"})
    assert dead.code != 0
    assert "DefaultCPUAllocator: can't allocate memory" in (run_folder / "FAILED").read_text(), dead.output[-3000:]
    assert "can't allocate memory" in "\n".join(dead.output.splitlines()[-40:])
    gone(str(folder), 30)

    finished = life(folder, words, {})
    assert finished.code == 0, finished.output[-3000:]
    assert losses(run_folder) == straight
    assert (run_folder / "DONE").exists()


@pytest.mark.fault("E1")
@pytest.mark.parametrize("small_disk", ["48m"], indirect=True)
def test_a_disk_that_is_full_for_a_while(
    rows_file: Path, small_disk: Path, straight: list[float], tmp_path: Path
) -> None:
    """Full from step 3 on, before a save at step 4; there is room again in step 6."""
    words = [*faulty_words(rows_file, tmp_path, "run"), f"run.dir={small_disk}/runs", "checkpoint.every=4"]
    fault = {"at": "step", "step": 3, "rank": 0, "do": "fill", "free_at": 6, "ballast": str(small_disk / "ballast")}
    finished = life(tmp_path, words, fault)
    assert finished.code == 0, finished.output[-3000:]
    folder = small_disk / "runs" / "run"
    assert "WARNING: the checkpoint step-4 could not be saved: " in finished.output, finished.output[-5000:]
    assert losses(folder) == straight
    found = published_checkpoints(folder / "checkpoints")
    assert [path.name for path in found] == ["step-8", "step-6"], "tried again, and once it succeeds no more"
    assert not [path for path in found if manifest_problems(path)]
    assert not list(folder.rglob("*.tmp"))


@pytest.mark.fault("E1", "E3")
@pytest.mark.parametrize("small_disk", ["48m"], indirect=True)
def test_a_disk_that_stays_full_and_one_that_cannot_be_written(
    rows_file: Path, small_disk: Path, tmp_path: Path
) -> None:
    words = [*faulty_words(rows_file, tmp_path, "run"), f"run.dir={small_disk}/runs"]
    fault = {"at": "step", "step": 7, "rank": 0, "do": "fill", "free_at": 0, "ballast": str(small_disk / "ballast")}
    finished = life(tmp_path, words, fault)
    assert finished.code != 0
    assert "CheckpointError: the last checkpoint could not be saved" in finished.output, finished.output[-3000:]
    assert not (small_disk / "runs" / "run" / "DONE").exists()
    newest = newest_intact(small_disk / "runs" / "run" / "checkpoints")
    assert newest is not None and newest.name in ("step-4", "step-6")
    (small_disk / "ballast").unlink()
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    refused = life(tmp_path, words, {}, num_ranks=1)
    assert refused.code != 0
    assert f"run.dir = {small_disk}/runs: {small_disk}/runs cannot be written to" in refused.output, refused.output[
        -2000:
    ]
    assert "Traceback" not in refused.output


NAPS = [{"ranks": [0], "steps": [1, 99], "before": "step", "seconds": 0.3}]
"""So that there is time for something to happen in a step."""


@pytest.fixture
def failing_disk(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """A disk that turns read-only at the first error, as servers' do, and the file by which it is told of one."""
    image, folder = tmp_path / "image", tmp_path / "disk"
    folder.mkdir()
    image.write_bytes(b"")
    os.truncate(image, 96 << 20)
    mount = ["mount", "-o", "loop,errors=remount-ro", str(image), str(folder)]
    for command in (["mkfs.ext4", "-q", "-F", str(image)], mount):
        if shutil.which(command[0]) is None or subprocess.run(command, capture_output=True, timeout=60).returncode:
            pytest.skip("mounting a file system in a file is not allowed here")
    try:
        found = subprocess.run(["losetup", "-j", str(image)], capture_output=True, text=True, check=True, timeout=60)
        yield folder, Path("/sys/fs/ext4") / Path(found.stdout.partition(":")[0]).name / "trigger_fs_error"
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True, timeout=60)


@pytest.mark.fault("E1", "E3")
def test_a_disk_that_turns_read_only(
    rows_file: Path, failing_disk: tuple[Path, Path], tmp_path: Path, straight: list[float]
) -> None:
    """In step 5. Once it is repaired, the same command goes on from what was saved before."""
    disk, trigger = failing_disk
    words = [*faulty_words(rows_file, tmp_path, "run"), f"run.dir={disk}/runs"]
    told = json.dumps({"at": "slow", "naps": NAPS, "note": str(tmp_path / "note")})
    process = start(forked(2, FAULTY, *words), cwd=tmp_path, FAULT=told)
    folder = disk / "runs" / "run"
    try:
        wait_for(lambda: (folder / "metrics.jsonl").exists() and len(rows_of(folder)) >= 4)
        trigger.write_text("1")
        output, _ = process.communicate(timeout=120)
    finally:
        kill_session(process)
    assert process.returncode == 74, output[-3000:]
    assert "could not be saved: Read-only file system. Earlier ones are untouched" in output
    assert "metrics.jsonl cannot be written: Read-only file system" in output
    assert "CheckpointError: the last checkpoint could not be saved" in output and "Traceback" not in output
    subprocess.run(["umount", str(disk)], check=True, timeout=60)
    image = str(tmp_path / "image")
    subprocess.run(["fsck.ext4", "-fy", image], capture_output=True, timeout=60)
    subprocess.run(["mount", "-o", "loop", image, str(disk)], check=True, timeout=60)
    finished = life(tmp_path, words, {})
    assert finished.code == 0 and "Resuming after step " in finished.output, finished.output[-3000:]
    assert losses(folder) == straight


@pytest.mark.fault("E3")
def test_a_cache_that_cannot_be_written(rows_file: Path, tmp_path: Path, straight: list[float]) -> None:
    """What is there is used; else one sentence says what to do."""
    words = faulty_words(rows_file, tmp_path, "run")
    assert life(tmp_path, faulty_words(rows_file, tmp_path, "before"), {}).code == 0
    cache = str(tmp_path / "cache")
    if subprocess.run(["mount", "--bind", cache, cache], capture_output=True, timeout=60).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", cache], check=True, timeout=60)
        assert life(tmp_path, words, {}).code == 0
        refused = life(tmp_path, [*words, "run.name=other", "data.max_length=32"], {})
    finally:
        subprocess.run(["umount", "-l", cache], check=True, timeout=60)
    assert losses(tmp_path / "runs" / "run") == straight
    assert refused.code == 2
    assert refused.output.splitlines()[-1] == (
        f"DataError: Cannot write below '{cache}/stores': Read-only file system. Choose another directory with "
        "prepare.dir=FOLDER."
    ), "and nothing below it"


@pytest.mark.fault("D5")
@pytest.mark.parametrize("workers", [0, 1])
def test_data_and_cache_that_are_removed_during_training(
    workers: int, rows_file: Path, tmp_path: Path, straight: list[float]
) -> None:
    data = tmp_path / "data"
    data.mkdir()
    shutil.copyfile(rows_file, data / "rows.jsonl")
    words = faulty_words(data / "rows.jsonl", tmp_path, "run", f"data.num_workers={workers}")
    told = json.dumps({"at": "slow", "naps": NAPS, "note": str(tmp_path / "note")})
    process = start(forked(2, FAULTY, *words), cwd=tmp_path, FAULT=told)
    folder = tmp_path / "runs" / "run"
    try:
        wait_for(lambda: (folder / "metrics.jsonl").exists() and len(rows_of(folder)) >= 2)
        shutil.rmtree(data)
        shutil.rmtree(tmp_path / "cache")
        output, _ = process.communicate(timeout=120)
    finally:
        kill_session(process)
    assert process.returncode == 0, output[-3000:]
    assert losses(folder) == straight
    refused = life(tmp_path, [*words, "run.name=other"], {})
    assert refused.code == 2 and "rows.jsonl: there is no such file" in refused.output and "Trace" not in refused.output


@pytest.mark.fault("D4")
@pytest.mark.parametrize("asynchronous", ["false", "true"])
def test_a_disk_that_is_slow(asynchronous: str, rows_file: Path, tmp_path: Path, straight: list[float]) -> None:
    """Each flush takes half a second more: training waits, and nothing is taken for a hang."""
    words = faulty_words(rows_file, tmp_path, "run", f"checkpoint.asynchronous={asynchronous}")
    finished = life(tmp_path, words, {"at": "nowhere", "flush_s": 0.5})
    assert finished.code == 0, finished.output[-3000:]
    assert losses(tmp_path / "runs" / "run") == straight
    assert not manifest_problems(newest_intact(tmp_path / "runs" / "run" / "checkpoints"))
    assert "WARNING" not in finished.output and (tmp_path / "note").read_text().count("flush") > 6


@pytest.mark.fault("T1")
def test_a_clock_that_is_set_back_moves_no_duration(rows_file: Path, tmp_path: Path) -> None:
    """After step 9 by a year, and at the next start it is right again: the deadline is in an hour all the same."""
    words = [*faulty_words(rows_file, tmp_path, "run"), "train.max_steps=16", "run.deadline=1h"]
    died = {"at": "step", "step": 13, "rank": 0, "do": "kill", "back_at": 9}
    dead = life(tmp_path, words, died)
    at = json.loads((tmp_path / "runs" / "run" / "deadline.json").read_text())["at"]
    assert dead.code != 0 and "the clock was set back by " in dead.output, dead.output[-3000:]
    assert at < time.time() - 364 * 86400, "as that clock has it"
    finished = life(tmp_path, words, {})
    assert finished.code == 0 and "before run.deadline." in finished.output, finished.output[-3000:]
    spare_s = json.loads((tmp_path / "runs" / "run" / "DONE").read_text())["deadline_spare_s"]
    assert 3000 < spare_s < 3600


@pytest.mark.fault("H3")
def test_a_rank_that_is_slow(rows_file: Path, tmp_path: Path, record_property: Any) -> None:
    """Both ranks are slow alike for 60 steps; then rank 1's forward passes are, then rank 0's data."""
    naps = [
        {"ranks": [0, 1], "steps": [1, 60], "before": "step", "seconds": 0.2},
        {"ranks": [1], "steps": [61, 120], "before": "forward", "seconds": 0.07},
        {"ranks": [0], "steps": [121, 180], "before": "data", "seconds": 0.14},
    ]
    words = [*faulty_words(rows_file, tmp_path, "run"), "train.max_steps=180", "train.log_every=20"]
    finished = life(tmp_path, [*words, "checkpoint.every=0"], {"at": "slow", "naps": naps})
    assert finished.code == 0, finished.output[-3000:]
    slept = Counter((tmp_path / "note").read_text().splitlines())
    # There are two micro-batches in a step.
    assert slept == {"step 0": 60, "step 1": 60, "forward 1": 120, "data 0": 60}

    rows = [row for row in rows_of(tmp_path / "runs" / "run") if "loss" in row]
    told = [line for line in finished.output.splitlines() if "WARNING: all ranks wait for rank " in line]
    host = socket.gethostname()
    assert [re.sub(r"[\d.]+ s\b|[\d.]+ times", "N", line) for line in told] == [
        f"WARNING: all ranks wait for rank 1 on {host}: its own work takes N per step, N that of the median rank (N). "
        f"It is not the data: look at what else runs on {host}, and at the clocks and the temperature of its "
        "processors and GPUs (top, nvidia-smi).",
        f"WARNING: all ranks wait for rank 0 on {host}: its own work takes N per step, N that of the median rank (N). "
        f"Most of that it waits for its data: look at the disk or the network that {host} reads from; more "
        "data.num_workers may hide it.",
    ], "each once, and none while both were slow"
    for steps, slow in (([80, 100, 120], 1), ([140, 160, 180], 0)):
        found = [row for row in rows if row["step"] in steps]
        assert [row["slowest_rank"] for row in found] == [slow] * 3
        assert all(row["slowest_rank_s"] >= 0.14 for row in found), found
        times = found[-1]["slowest_rank_s"] / found[-1]["median_rank_s"]
        record_property(f"rank {slow}", f"{times:.1f} times the median")
    assert all(row["data_wait_rank"] == 0 and row["data_wait_s"] >= 0.14 for row in found), found


@pytest.mark.fault("K1")
@pytest.mark.parametrize("stage", ["stage1", "stage2", "stage3"])
def test_killed_at_every_step(stage: str, rows_file: Path, tmp_path: Path) -> None:
    """Twelve deaths of one run, rank 0 and rank 1 in turns, one at each step."""
    words = [*faulty_words(rows_file, tmp_path, "run"), f"zero={stage}", "train.max_steps=12", "checkpoint.every=1"]
    whole = [*faulty_words(rows_file, tmp_path, "whole"), f"zero={stage}", "train.max_steps=12", "checkpoint.every=1"]
    assert life(tmp_path, whole, {}).code == 0
    for step in range(1, 13):
        dead = life(tmp_path, words, {"at": "each life", "step": step, "rank": step % 2, "do": "kill"})
        assert dead.code != 0
        gone(f"run.name=run {stage}", 30)
    finished = life(tmp_path, words, {})
    assert finished.code == 0, finished.output[-3000:]
    assert losses(tmp_path / "runs" / "run") == losses(tmp_path / "runs" / "whole")


@pytest.mark.fault("K2")
@pytest.mark.parametrize("asynchronous", ["false", "true"])
def test_killed_at_random_instants_of_saves(asynchronous: str, rows_file: Path, tmp_path: Path) -> None:
    """Ten deaths of all ranks and the launcher, each at a random instant from the beginning of a save on."""
    draw = random.Random(asynchronous)
    words = [*faulty_words(rows_file, tmp_path, "run"), f"checkpoint.asynchronous={asynchronous}"]
    words += ["train.max_steps=60", "checkpoint.every=1"]
    whole = [word.replace("run.name=run", "run.name=whole") for word in words]
    assert life(tmp_path, whole, {}).code == 0
    folder, reached = tmp_path / "runs" / "run", 0
    for _ in range(10):
        when = {"step": draw.randint(2, 6), "after_s": draw.random() / 3}
        dead = life(tmp_path, words, {"at": "save.random", "rank": 0, "do": "killall", **when})
        assert not (folder / "DONE").exists(), dead.output[-2000:]
        gone(f"run.dir={tmp_path}/runs", 30)
        found = published_checkpoints(folder / "checkpoints")
        assert not [path for path in found if manifest_problems(path)], "a checkpoint that was published is not whole"
        newest = int(found[0].name.removeprefix("step-")) if found else 0
        assert newest >= reached, "a checkpoint was lost"
        reached = newest
    finished = life(tmp_path, words, {})
    assert finished.code == 0, finished.output[-3000:]
    assert losses(folder) == losses(tmp_path / "runs" / "whole")


SIGNALS = [
    ("SIGTERM", "launcher"),
    ("SIGTERM", "front end"),
    ("SIGTERM", "rank 0"),
    ("SIGTERM", "all"),
    ("SIGINT", "all"),
    ("SIGHUP", "all"),
    ("SIGUSR1", "rank 1"),
]


@pytest.mark.fault("P1", "P2")
@pytest.mark.parametrize(("name", "whom"), SIGNALS)
def test_signals(name: str, whom: str, rows_file: Path, tmp_path: Path, record_property: Any) -> None:
    words = faulty_words(rows_file, tmp_path, "run", "train.max_steps=1000000", "checkpoint.every=0")
    process = start(deepspeed(2, FAULTY, *words), cwd=tmp_path, FAULT="{}")
    folder = tmp_path / "runs" / "run"
    try:
        wait_for(lambda: (folder / "metrics.jsonl").exists() and len(rows_of(folder)) > 2)
        [launcher] = children(process.pid)
        beats = sorted((folder / "logs").glob("heartbeat-rank-*.json"))
        ranks = [json.loads(path.read_text())["pid"] for path in beats]
        victims = {"launcher": [launcher], "front end": [process.pid], "rank 0": ranks[:1], "rank 1": ranks[1:]}
        for pid in victims.get(whom, [process.pid, launcher, *ranks]):
            os.kill(pid, signal.Signals[name])
        record_property("seconds until all are gone", round(gone(f"run.dir={tmp_path}/runs", 150), 1))
    finally:
        kill_session(process)
        process.communicate(timeout=30)
    [newest] = published_checkpoints(folder / "checkpoints")
    assert not manifest_problems(newest)
    lost = len([row for row in rows_of(folder) if "loss" in row]) - int(newest.name.removeprefix("step-"))
    record_property("steps lost", lost)
    assert lost == 0
    assert not (folder / "DONE").exists()


def children(pid: int) -> list[int]:
    """Return the processes that a process has started."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


CHOOSE = """
import sys, time
from toolkit.config.load import load
from toolkit.messages import RunFolderError
from toolkit.train import run_dir, run_lock
folder, rounds = sys.argv[1], int(sys.argv[2])
for number in range(rounds):
    cfg = load(["recipe=quickstart", f"run.dir={folder}", f"run.name=run{number}"]).cfg
    print("ready", flush=True)
    sys.stdin.readline()
    try:
        run_dir.choose_run_dir(cfg)
        print("works", flush=True)
    except RunFolderError as error:
        print("told", error, flush=True)
    sys.stdin.readline()
    run_lock.release_run_dir()
"""


@pytest.mark.fault("X1")
def test_of_two_that_want_one_folder_one_gets_it(tmp_path: Path) -> None:
    """Twenty times, both at once."""
    command = [sys.executable, "-c", CHOOSE, str(tmp_path), "20"]
    both = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment())
        for _ in range(2)
    ]
    try:
        for _ in range(20):
            for process in both:
                assert process.stdout is not None and process.stdout.readline() == "ready\n"
            answers = both_say(both)
            assert sorted(answer.split()[0] for answer in answers) == ["told", "works"], answers
            [told] = [answer for answer in answers if answer.startswith("told")]
            assert "another process works in" in told or "already exists" in told
            for process in both:
                say(process)
    finally:
        for process in both:
            process.kill()
            process.communicate(timeout=30)


def say(process: "subprocess.Popen[str]") -> None:
    """Let a process go on."""
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def both_say(processes: list["subprocess.Popen[str]"]) -> list[str]:
    """Let all go on at once; return what each says."""
    for process in processes:
        say(process)
    return [str(process.stdout and process.stdout.readline()) for process in processes]


SOAK_STEPS = 1500


@pytest.mark.fault("G1")
@pytest.mark.timeout(3600)
def test_a_run_that_is_hit_again_and_again(rows_file: Path, tmp_path: Path, record_property: Any) -> None:
    """Ranks, both ranks or the launcher killed, or a rank stopped, some seconds after each start, until the end."""
    words = ["train.log_every=1", f"train.max_steps={SOAK_STEPS}", "checkpoint.every=20", "distributed.hang_after_s=10"]
    launch = [sys.executable, "-m", "toolkit", "launch", "--num_gpus", "2"]
    whole = [*launch, *faulty_words(rows_file, tmp_path, "whole", *words)]
    began = time.monotonic()
    assert run(whole, cwd=tmp_path, timeout_s=600).code == 0
    undisturbed_s = time.monotonic() - began

    draw, hits = random.Random(1), dict.fromkeys(("rank", "ranks", "stopped", "launcher"), 0)
    began = time.monotonic()
    command = [*launch, *faulty_words(rows_file, tmp_path, "hit", *words, "run.max_restarts=99")]
    output = (tmp_path / "output").open("w+")
    process = subprocess.Popen(
        command, cwd=tmp_path, env=environment(), stdout=output, stderr=output, start_new_session=True
    )
    folder = tmp_path / "runs" / "hit"
    seen: set[int] = set()
    try:
        while process.poll() is None:
            assert time.monotonic() - began < 2400
            ranks = [rank for rank in pids(folder) if rank not in seen]
            if len(ranks) < 2:
                time.sleep(0.2)
                continue
            time.sleep(draw.uniform(1, 8))
            kind = draw.choice(sorted(hits))
            launcher = int(Path(f"/proc/{ranks[0]}/stat").read_text().rpartition(")")[2].split()[1])
            victims = {"rank": [draw.choice(ranks)], "ranks": ranks, "stopped": [draw.choice(ranks)]}
            for victim in victims.get(kind, [launcher]):
                os.kill(victim, signal.SIGSTOP if kind == "stopped" else signal.SIGKILL)
            hits[kind] += 1
            seen.update(ranks)
    except (ProcessLookupError, FileNotFoundError):  # it has just come to its end
        process.wait(60)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    seconds = time.monotonic() - began
    output.seek(0)
    said = output.read()
    output.close()
    assert process.returncode == 0, said[-4000:]
    assert sum(hits.values()) >= 3, "too few faults happened"
    assert losses(folder) == losses(tmp_path / "runs" / "whole")
    assert not [path for path in published_checkpoints(folder / "checkpoints") if manifest_problems(path)]
    waits = [float(found) for found in re.findall(r"(\d+\.\d) s from the death to the first new step", said)]
    lost = (folder / "logs" / "metrics-lost.jsonl").read_text().count("\n")
    record_property("hits", ", ".join(f"{kind} {count}" for kind, count in hits.items()))
    record_property("seconds to a new step", f"median {statistics.median(waits)}, most {max(waits)}")
    record_property("steps done twice", lost)
    record_property("goodput", f"{undisturbed_s / seconds:.0%} with a fault every {seconds / sum(hits.values()):.0f} s")


def pids(folder: Path) -> list[int]:
    """Return the ranks that say they are alive, and in a step."""
    found = []
    for path in sorted((folder / "logs").glob("heartbeat-rank-*.json")):
        with contextlib.suppress(OSError, ValueError):
            beat = json.loads(path.read_text())
            if beat["phase"] == "step" and Path(f"/proc/{beat['pid']}").exists():
                found.append(int(beat["pid"]))
    return found


assert STEPS == 8  # the steps of the faults above are chosen for it
