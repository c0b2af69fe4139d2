"""One process per run folder, whatever is deleted in it; and starts that a dead one must not stand in the way of."""

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from toolkit.checkpoint import directory
from toolkit.config.schema import RunConfig
from toolkit.disk import try_lock
from toolkit.distributed import presence
from toolkit.distributed.watchdog import heartbeat_file
from toolkit.launch import environment
from toolkit.messages import CheckpointError, RunFolderError
from toolkit.train import existing_run, run_dir, run_lock, trainer

HOLD = """
import sys, time
from pathlib import Path
from toolkit.train import run_lock
run_lock.lock_run_dir(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.readline()
print(run_lock.is_lost(now=True), flush=True)
sys.stdin.readline()
"""


@pytest.fixture(autouse=True)
def released() -> Iterator[None]:
    """Let go of what a test has locked."""
    yield
    run_lock.release_run_dir()


def named(folder: Path) -> RunConfig:
    """Return the config of a run `mine`."""
    cfg = RunConfig()
    cfg.run.dir, cfg.run.name = str(folder), "mine"
    return cfg


@pytest.mark.parametrize("left", ["", "logs", "run.lock"])
@pytest.mark.parametrize("mode", ["auto", "never"])
def test_a_start_that_died_early_is_in_nobodys_way(left: str, mode: str, tmp_path: Path) -> None:
    """Between mkdir and lock, or right after it, a process may be killed."""
    run = tmp_path / "mine"
    run.mkdir()
    if left == "logs":
        (run / left).mkdir()
    elif left:
        (run / left).touch()
    cfg = named(tmp_path)
    cfg.resume = mode
    if (left, mode) == ("run.lock", "never"):
        with pytest.raises(RunFolderError, match="already exists and is not touched"):
            run_dir.choose_run_dir(cfg)
        return
    assert run_dir.choose_run_dir(cfg) == run_dir.RunSource(run, None)


@pytest.mark.parametrize("left", ["notes.txt", "logs/notes.txt"])
def test_a_folder_that_holds_something_is_not_touched(left: str, tmp_path: Path) -> None:
    file = tmp_path / "mine" / left
    file.parent.mkdir(parents=True)
    file.touch()
    with pytest.raises(RunFolderError, match="already exists and is not touched"):
        run_dir.choose_run_dir(named(tmp_path))


@pytest.mark.fault("X1")
def test_a_deleted_lock_lets_nobody_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the directory's lock; by heartbeats where directories cannot be locked; and the holder puts it back."""
    monkeypatch.setattr(run_lock, "_HEARTBEAT_WAIT_S", 0.3)
    run = tmp_path / "mine"
    (run / "logs").mkdir(parents=True)
    (run / "config.yaml").touch()
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(run)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdin and holder.stdout
    over = threading.Event()

    def beat() -> None:
        beats = 0
        while not over.wait(0.01):
            beats += 1
            new = run / "logs" / ".new"
            new.write_text(json.dumps({"pid": 77, "host": "here", "beats": beats}))
            new.replace(run / "logs" / heartbeat_file(0))

    beating = threading.Thread(target=beat)
    try:
        assert holder.stdout.readline() == "held\n"
        (run / "run.lock").unlink()
        with pytest.raises(RunFolderError, match=rf"another process works in {run}: \?"):
            run_lock.lock_run_dir(run)
        beating.start()
        while not (run / "logs" / heartbeat_file(0)).exists():
            time.sleep(0.01)
        with monkeypatch.context() as without:
            without.setattr(run_lock, "_lock_directory", lambda folder: (True, None))
            with pytest.raises(RunFolderError, match=r'works in .*: \{"pid": 77, "host": "here"\}'):
                run_lock.lock_run_dir(run)
        holder.stdin.write("\n")
        holder.stdin.flush()
        assert holder.stdout.readline() == "False\n"
        assert json.loads((run / "run.lock").read_text())["pid"] == holder.pid
        with pytest.raises(RunFolderError, match=rf'"pid": {holder.pid}'):
            run_lock.lock_run_dir(run)
    finally:
        over.set()
        holder.kill()
        holder.communicate(timeout=30)
    beating.join()
    run_lock.lock_run_dir(run)  # signed by a process that is gone


def test_a_folder_that_was_taken_away_is_noticed(tmp_path: Path) -> None:
    def lock(name: str) -> Path:
        run = tmp_path / name
        run.mkdir()
        (run / "config.yaml").touch()
        run_lock.lock_run_dir(run)
        assert not run_lock.is_lost(now=True)
        run_lock.check_not_lost(run)
        return run

    removed = lock("removed")
    shutil.rmtree(removed)
    with pytest.raises(RunFolderError, match=f"the run directory {removed} was removed, moved or replaced"):
        run_lock.check_not_lost(removed)
    run_lock.release_run_dir()

    moved = lock("moved")
    moved.rename(tmp_path / "elsewhere")
    moved.mkdir()
    (moved / "run.lock").touch()
    assert run_lock.is_lost(now=True)
    run_lock.release_run_dir()

    emptied = lock("emptied")
    for path in emptied.iterdir():
        path.unlink()
    assert run_lock.is_lost(now=True)


def test_a_stop_file_of_an_earlier_start_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    cfg = named(tmp_path)
    run_dir.choose_run_dir(cfg)
    run_lock.release_run_dir()
    stop = tmp_path / "mine" / "stop"
    stop.touch()
    run_dir.choose_run_dir(cfg)
    run_lock.release_run_dir()
    assert not stop.exists()
    assert f"Removed the file {stop}, which is older than this start. To stop this run, create it again." in said
    # Of a run that its launcher starts again it is meant for this very command.
    monkeypatch.setattr(environment, "restart_number", lambda: 1)
    monkeypatch.setattr(existing_run, "check_repeated_death", lambda folder, step: None)
    stop.touch()
    run_dir.choose_run_dir(cfg)
    assert stop.exists()


def test_what_can_be_saved_of_a_removed_folder_goes_next_to_it(tmp_path: Path) -> None:
    assert run_dir.rescue(tmp_path / "a" / "mine") == tmp_path / "a" / "mine.rescued"
    assert run_dir.rescue(tmp_path / "a" / "mine") == tmp_path / "a" / "mine-2.rescued"
    (tmp_path / "file").touch()
    if os.getuid():
        tmp_path.chmod(0o500)
    with pytest.raises(RunFolderError, match=r"was removed, moved or replaced.*cannot create a run directory in"):
        run_dir.rescue(tmp_path / "file" / "mine")


@pytest.mark.parametrize("small_disk", ["16k"], indirect=True)
def test_a_full_disk_names_the_file(small_disk: Path) -> None:
    with pytest.raises(CheckpointError, match=f"cannot write {small_disk}/config.yaml: No space left on device"):
        run_dir.write_settings(small_disk, "x" * 100_000, {}, ["host"], "")
    with pytest.raises(CheckpointError, match=f"cannot write {small_disk}/DONE: "):
        run_dir.mark_done(small_disk, {"x": "y" * 100_000})


@pytest.mark.fault("X1")
def test_a_second_start_does_not_look_like_a_thief(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it watches whether ranks live, the process that holds the directory can lock a deleted run.lock again."""

    def counts(folder: Path) -> str:
        with open(folder / run_lock.LOCK, "a+") as again:
            assert try_lock(again) == (True, True)
        return "rank 0"

    monkeypatch.setattr(run_lock, "_rank_still_alive", counts)
    with pytest.raises(RunFolderError, match=r"another process works in .*: rank 0"):
        run_lock.lock_run_dir(tmp_path)


def save(checkpoints: Path, step: int) -> Path:
    """Make an intact checkpoint that holds a run's state alone."""
    made = checkpoints / directory.checkpoint_name(step)
    made.mkdir(parents=True)
    state = directory.RunState(step=step).write(made)
    directory.write_manifest(made, {state.name: directory.record_file(state)}, {"step": step})
    return made


def spoil(checkpoint: Path) -> None:
    """Damage it."""
    state = checkpoint / directory.STATE
    state.write_text(state.read_text().replace("step", "stop"))


def test_a_lost_run_does_not_start_over_the_second_time(tmp_path: Path) -> None:
    spoil(save(tmp_path / "checkpoints", 4))
    for _ in range(2):
        with pytest.raises(CheckpointError, match="holds no intact checkpoint"):
            existing_run.resumable_checkpoint(tmp_path)


@pytest.mark.parametrize("seen_after", [0, 3, None])
def test_a_node_may_see_a_new_run_directory_late(
    seen_after: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    """A file server's client remembers for a while that there was no `runs`; where it never comes, it is not shared."""
    here, there, asked = presence.me(), presence.Peer("node2", "node2", 1), [0]

    def gather(mine: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        asked[0] += 1
        return [mine, (there, seen_after is not None and asked[0] > seen_after, 0.0)]

    monkeypatch.setattr(trainer.process_group, "gather", gather)
    monkeypatch.setattr(trainer.disk, "STALE_S", 60.0 if seen_after is not None else 0.05)
    monkeypatch.setattr(trainer, "_LOOK_EVERY_S", 0.01)
    if seen_after is None:
        with pytest.raises(RunFolderError, match=f"{tmp_path} is not there on node2: checkpoints need"):
            trainer._peers_that_see(tmp_path)
    else:
        assert trainer._peers_that_see(tmp_path) == [here, there]
        assert asked == [seen_after + 1]
    assert said == ([] if seen_after == 0 else [f"Waiting until {tmp_path} can be seen on node2."])
