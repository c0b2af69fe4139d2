"""A rank's heartbeat is what the others judge it by."""

import json
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from toolkit.distributed import failure, peers, presence, watchdog
from toolkit.distributed.watchdog import Watchdog, heartbeat_file


def test_a_heartbeat_is_whole_whenever_it_is_read(tmp_path: Path) -> None:
    """Ranks beat and read in lockstep; one that read a file cut off for writing took the other for silent."""
    (tmp_path / "logs").mkdir()
    one = Watchdog(tmp_path, 0, 1, hang_after_s=3600.0, patience_s=3600.0)
    path = tmp_path / "logs" / heartbeat_file(0)
    over = threading.Event()

    def beat() -> None:
        for number in range(2000):
            one.enter(f"phase {number}", number)
        over.set()

    writer = threading.Thread(target=beat)
    writer.start()
    read = 0
    while not over.is_set():
        assert json.loads(path.read_text(encoding="utf-8"))["pid"]
        read += 1
    writer.join()
    one.stop()
    assert read > 100


@pytest.mark.parametrize(
    ("is_waiting", "can_write", "is_lost"), [(True, True, True), (False, True, False), (True, False, False)]
)
def test_a_machine_is_lost_only_for_who_waits_and_can_write(
    is_waiting: bool, can_write: bool, is_lost: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file server that stands still, or a full disk, is no lost machine; nor is one that nobody waits for."""
    for name, value in (("_EVERY_S", 0.01), ("_LOST_BEATS", 50), ("_LOOK_EVERY", 2)):
        monkeypatch.setattr(watchdog, name, value)
    told: list[str] = []
    monkeypatch.setattr(Watchdog, "_tell", lambda self, text, _: (told.append(text), self.stop()))
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / heartbeat_file(1)).write_text(
        json.dumps({"pid": 7, "host": "far", "machine": "far", "beats": 3, "step": 5})
    )
    one = Watchdog(tmp_path, 0, 2, hang_after_s=3600.0, patience_s=3600.0)
    one.enter(watchdog.STEP, 5)
    time.sleep(0.1)  # both have counted
    if not can_write:
        logs.rename(tmp_path / "gone")
    until = time.monotonic() + (10 if is_lost else 1.5)
    while time.monotonic() < until and not told:
        if not is_waiting:
            one.enter(watchdog.STEP, 5)
        time.sleep(0.001)
    one.stop()
    assert bool(told) is is_lost
    if is_lost:
        assert told == [
            "No sign of life from rank 1 (pid 7, far). Its machine, or the network to it, is gone (step 5)."
        ]


@pytest.mark.parametrize("phase", [watchdog.START, "evaluation", "checkpoint", watchdog.STEP, watchdog.END])
def test_a_stopped_rank_of_the_same_node_is_lost_in_every_phase(
    phase: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long before the time limit of a phase; but not one that has left in good order, as the others end later."""
    for name, value in (("_EVERY_S", 0.01), ("_LOST_BEATS", 50), ("_LOOK_EVERY", 2)):
        monkeypatch.setattr(watchdog, name, value)
    told: list[tuple[str, list[int]]] = []
    monkeypatch.setattr(Watchdog, "_tell", lambda self, *what: (told.append(what), self.stop()))
    (tmp_path / "logs").mkdir()
    ranks = [Watchdog(tmp_path, rank, 3, hang_after_s=3600.0, patience_s=3600.0) for rank in range(3)]
    for one in ranks:
        one.enter(phase, 5)
    ranks[2].stop()  # leaves
    time.sleep(0.2)
    monkeypatch.setattr(ranks[1], "_beat", lambda left=False: True)  # is stopped
    until = time.monotonic() + 20
    while time.monotonic() < until and not told:
        time.sleep(0.01)
    for one in ranks:
        one.stop()
    [(text, pids)] = told
    assert re.fullmatch(rf"No sign of life from rank 1 \(pid \d+, [^,]+\). It is stopped, .* \({phase} 5\)\.", text)
    assert pids == [presence.me().pid]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Look every few milliseconds; what would end the process is collected instead."""
    for name, value in (("_EVERY_S", 0.02), ("_LOOK_S", 0.2), ("_LEAST_S", 0.1)):
        monkeypatch.setattr(watchdog, name, value)
    told: list[str] = []
    monkeypatch.setattr(Watchdog, "_tell", lambda self, text, _: (told.append(text), self.stop()))
    return told


def test_a_rank_that_waits_for_data_is_no_hang(tmp_path: Path, quick: list[str]) -> None:
    """Neither its own step before, nor that of the rank that waits for it; once it has its data, it may hang."""
    (tmp_path / "logs").mkdir()
    waits, computes = (Watchdog(tmp_path, rank, 2, hang_after_s=0.1, patience_s=3600.0) for rank in (0, 1))
    waits.enter(watchdog.STEP, 4)
    waits.enter(watchdog.DATA, 5)
    computes.enter(watchdog.STEP, 5)
    until = time.monotonic() + 2
    while time.monotonic() < until:
        assert not quick
        time.sleep(0.01)
    assert computes._is_excused
    computes.enter(watchdog.DATA, 6)
    assert not computes.taken, "what it waited for another rank says nothing of how long steps take"
    computes.enter(watchdog.STEP, 6)
    waits.enter(watchdog.STEP, 5)
    until = time.monotonic() + 30
    while time.monotonic() < until and not quick:
        time.sleep(0.01)
    for one in (waits, computes):
        one.stop()
    assert quick[0].startswith(("step 5 has taken ", "step 6 has taken "))


def test_a_run_that_ends_while_it_is_judged_ends_as_it_is(
    tmp_path: Path, quick: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "logs").mkdir()
    judged, read = threading.Event(), Watchdog._read
    monkeypatch.setattr(Watchdog, "_read", lambda self, ranks: (judged.set(), read(self, ranks))[1])
    one = Watchdog(tmp_path, 0, 1, hang_after_s=0.1, patience_s=3600.0)
    one.enter(watchdog.STEP, 5)
    assert judged.wait(60)
    one.stop()
    time.sleep(1)
    assert not quick


def test_a_wait_for_data_has_a_limit_and_words_of_its_own(tmp_path: Path, quick: list[str]) -> None:
    (tmp_path / "logs").mkdir()
    one = Watchdog(tmp_path, 0, 1, hang_after_s=0.0, patience_s=1.0)
    one.enter(watchdog.DATA, 5)
    assert one.limit() == 0.5
    until = time.monotonic() + 30
    while time.monotonic() < until and not quick:
        time.sleep(0.01)
    one.stop()
    assert re.match(r"rank 0 on \S+ has been waiting for data for \d+ s \(step 5; limit 0 s, half of ", quick[0])


def test_data_and_step_share_a_heartbeat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two files per step, written while the loop waits, would be felt on a file server."""
    (tmp_path / "logs").mkdir()
    one = Watchdog(tmp_path, 0, 1, hang_after_s=3600.0, patience_s=3600.0)
    one.enter(watchdog.DATA, 1)
    written: list[str] = []

    def beat(left: bool = False) -> bool:
        if threading.current_thread() is threading.main_thread():  # its own thread counts every second
            written.append(one.phase)
        return True

    monkeypatch.setattr(one, "_beat", beat)
    for step in range(1, 4):
        one.enter(watchdog.DATA, step)
        one.enter(watchdog.STEP, step)
    one.stop()
    one.enter("checkpoint", 3)
    assert written == ["checkpoint"]


def test_a_step_that_may_compile_or_connect_has_the_patience_of_a_first_one(tmp_path: Path) -> None:
    def limits(recompiles: bool) -> list[float]:
        one = Watchdog(tmp_path, 0, 1, hang_after_s=-1.0, patience_s=1800.0, recompiles=recompiles)
        one.hang_after_s, found = 0.0, []
        for step, before in enumerate(["", "", "", "", "evaluation", "", "checkpoint", "", "rewind", ""], start=1):
            if before:
                one.enter(before, step)
                assert one.limit() == 1800
            one.enter(watchdog.DATA, step)
            one.enter(watchdog.STEP, step)
            found.append(one.limit())
        return found

    assert limits(recompiles=True) == [1800] * 10
    assert limits(recompiles=False) == [1800, 1800, 1800, 60, 1800, 60, 1800, 60, 1800, 60]


@pytest.mark.parametrize("num_ranks", [2, 64, 256, 4096])
def test_the_run_directory_is_touched_no_more_often_on_many_ranks(
    num_ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks' heartbeats, notes and looks at the marker, in operations per second of one file server."""
    (tmp_path / "logs").mkdir()
    count = [0]

    def counted(owner: Any, name: str, operations: int) -> None:
        real = getattr(owner, name)

        def call(*arguments: Any, **options: Any) -> Any:
            count[0] += operations
            return real(*arguments, **options)

        monkeypatch.setattr(owner, name, call)

    for owner, name, operations in ((Path, "write_text", 2), (Path, "read_text", 2), (Path, "exists", 1)):
        counted(owner, name, operations)
    counted(failure.os, "replace", 1)
    slept: list[float] = []

    class Over:
        """Lets a loop run ten times without waiting."""

        def wait(self, seconds: float) -> bool:
            slept.append(seconds)
            return len(slept) > 10

        def is_set(self) -> bool:
            return len(slept) > 10

    def per_second(loop: Callable[[], None]) -> float:
        count[0], slept[:] = 0, []
        loop()
        return count[0] / sum(slept[:10])

    total = 0.0
    for rank in (0, 1):
        one = Watchdog(tmp_path, rank, num_ranks, hang_after_s=-1.0, patience_s=3600.0)
        one._over = Over()  # type: ignore[assignment]
        total += per_second(one._count) * (num_ranks - 1 if rank else 1)
    everybody = [presence.Peer("host", str(number), 1) for number in range(num_ranks)]
    note = presence.Note(tmp_path, 0, everybody[0], num_ranks)
    view = peers.Peers(note, everybody)
    clock = [0.0]
    monkeypatch.setattr(failure.time, "monotonic", lambda: clock[0])
    over = Over()

    def wait(seconds: float) -> str:
        clock[0] += seconds
        over.wait(seconds)
        return ""

    monkeypatch.setattr(view, "wait", wait)
    monkeypatch.setattr(failure, "_over", over)
    monkeypatch.setattr(failure, "_note", note)
    monkeypatch.setattr(failure, "_peers", view)
    monkeypatch.setattr(failure, "_marker", tmp_path / "FAILED")
    total += per_second(failure._wait_for_failure) * num_ranks
    assert total <= 7 * min(num_ranks, 64) + 32


def test_on_many_ranks_a_lost_machine_is_still_noticed() -> None:
    """Ten beats of each, as one alone may be late: after 40 s on 256 ranks, as on two."""
    assert [presence.stretch(number) for number in (1, 64, 256, 1024)] == [1.0, 1.0, 4.0, 16.0]


def test_of_many_ranks_a_few_judge_a_hang(tmp_path: Path, quick: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """If each of 1,024 ranks read the files of all, twice, a hang would end without a word: that takes minutes."""
    (tmp_path / "logs").mkdir()
    read: list[int] = []
    monkeypatch.setattr(Watchdog, "_read", lambda self, ranks: read.append(self.rank) or {})
    monkeypatch.setattr(failure, "_marker", tmp_path / "FAILED")
    (tmp_path / "FAILED").touch()

    def ended(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(failure.os, "_exit", ended)
    for rank in (7, 8, 1023):
        one = Watchdog(tmp_path, rank, 1024, hang_after_s=-1.0, patience_s=3600.0)
        one.enter(watchdog.STEP, 3)
        one._over = threading.Event()
        if rank == 7:
            monkeypatch.setattr(one._over, "wait", lambda seconds: False)
            one._end(100.0)
        else:
            with pytest.raises(SystemExit, match="124"):
                one._end(100.0)
        assert (tmp_path / "logs" / f"hang-rank-{rank}.txt").exists()
    assert read == [7, 7] and len(quick) == 1
    (tmp_path / "FAILED").unlink()  # no judge has found anything: they are gone themselves
    monkeypatch.setattr(watchdog, "_LOOK_S", 0.0)
    one = Watchdog(tmp_path, 9, 1024, hang_after_s=-1.0, patience_s=3600.0)
    one.enter(watchdog.STEP, 3)
    one._end(100.0)
    assert read == [7, 7, 9, 9]
