"""A tracker that fails, hangs, cannot keep up or is taken back: what it gets, and what the user is told."""

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from toolkit.track import queue as lanes
from toolkit.track.backends import FAILED, FINISHED, Backend, TrackedRun
from toolkit.track.queue import BackendQueue


class Memory(Backend):
    """A tracker that keeps what it gets; a test says what goes wrong."""

    def __init__(self, fault: Callable[[str, int], None], redoes: bool) -> None:
        self.fault, self.redoes = fault, redoes
        self.rows: list[tuple[int, float]] = []
        self.ended = ""

    def begin(self, run: TrackedRun) -> None:
        self.fault("begin", run.step)

    def take_back(self, step: int) -> None:
        self.rows = [row for row in self.rows if row[0] <= step]

    def row(self, step: int, values: Mapping[str, float]) -> None:
        self.fault("row", step)
        self.rows.append((step, values["loss"]))

    def end(self, status: str) -> None:
        self.fault("end", 0)
        self.ended = status


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[BackendQueue, Memory, list[str]]]:
    """Return what starts a tracker in a thread."""
    monkeypatch.setattr(lanes, "PAUSES_S", (0.01, 0.01))
    monkeypatch.setattr(lanes, "BEGIN_AGAIN_S", 0.01)

    def started(
        fault: Callable[[str, int], None] = lambda what, step: None,
        redoes: bool = False,
        step: int = 0,
        rows: list[dict[str, Any]] | None = None,
    ) -> tuple[BackendQueue, Memory, list[str]]:
        client, said = Memory(fault, redoes), []
        monkeypatch.setitem(lanes.BACKENDS, "memory", lambda: client)
        run = TrackedRun(name="r", id="", folder=tmp_path, settings={}, hyperparameters={}, texts={}, step=step)
        return (
            BackendQueue("memory", run, rows or [], lambda reply: said.append(reply.get("warning", ""))),
            client,
            said,
        )

    return started


def send(lane: BackendQueue, *steps: int, loss: float = 1.0) -> None:
    for step in steps:
        lane.put("row", {"row": {"step": step, "loss": loss}})


def end(lane: BackendQueue, status: str = FINISHED, wait_s: float = 5.0) -> None:
    lane.close(status)
    lane.wait(time.monotonic() + wait_s)


def told(said: list[str]) -> list[str]:
    return [line for line in said if line]


def test_an_outage_is_told_once_and_nothing_is_missing(make: Any) -> None:
    left = [3]

    def fault(what: str, step: int) -> None:
        if step == 2 and what == "row" and left[0]:
            left[0] -= 1
            raise ConnectionError("no route to host")

    lanes.PAUSES_S = (0.01, 0.01, 0.01)
    lane, client, said = make(fault)
    send(lane, 1, 2, 3)
    while len(client.rows) < 3:
        time.sleep(0.01)
    end(lane)
    assert [step for step, _ in client.rows] == [1, 2, 3]
    assert client.ended == FINISHED
    [line] = told(said)
    assert line.startswith("memory failed: ConnectionError: no route to host. It is retried")


def test_a_row_that_is_never_taken_costs_no_other(make: Any) -> None:
    def fault(what: str, step: int) -> None:
        if (what, step) == ("row", 2):
            raise ValueError("not that one")

    lane, client, said = make(fault)
    send(lane, 1, 2, 3)
    end(lane, FAILED)
    assert [step for step, _ in client.rows] == [1, 3]
    assert client.ended == FAILED
    assert len(told(said)) == 2
    assert "(messages left: 1)" in told(said)[1]


def test_one_that_cannot_begin_begins_later(make: Any) -> None:
    left = [2]

    def fault(what: str, step: int) -> None:
        if what == "begin" and left[0]:
            left[0] -= 1
            raise PermissionError("no login")

    lane, client, said = make(fault)
    send(lane, 1)
    while not client.rows:
        time.sleep(0.01)
    end(lane)
    assert left == [0]
    assert len(told(said)) == 1


def test_one_that_hangs_is_left(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "SLOW_S", 0.05)
    monkeypatch.setattr(lanes, "MOST_WAITING", 5)
    release = threading.Event()

    def fault(what: str, step: int) -> None:
        if step == 2:
            release.wait(20)

    lane, client, said = make(fault)
    began = time.monotonic()
    send(lane, 1, 2)
    while not client.rows:
        time.sleep(0.01)
    send(lane, *range(3, 103))
    assert time.monotonic() - began < 2
    end(lane, wait_s=0.2)
    assert time.monotonic() - began < 4
    assert not lane.is_done
    assert [line.split(" ", 1)[1].split(" (")[0] for line in told(said)] == [
        "has not answered for 0 s. Training does not wait for it.",
        "did not take everything in time",
    ]
    assert "(messages left: 101)" in told(said)[1]  # 2, at which it hangs, to 102
    release.set()
    lane.thread.join(5)


@pytest.mark.parametrize("redoes", [False, True])
def test_a_run_that_goes_back_and_one_that_goes_on(make: Any, redoes: bool) -> None:
    lane, client, said = make(redoes=redoes)
    send(lane, 1, 2, 3, 4)
    lane.put("back", {"step": 2})
    send(lane, 3, 4, 5, loss=0.5)
    end(lane)
    again = 0.5 if redoes else 1.0
    assert client.rows == [(1, 1.0), (2, 1.0), (3, again), (4, again), (5, 0.5)]
    # Another session begins after step 4; an earlier row never arrived, and is in metrics.jsonl.
    file = lane.record.path
    file.write_text(file.read_text().replace('"train": 5', '"train": 2' if redoes else '"train": 3'))
    so_far = [{"step": step, "loss": 0.1} for step in (1, 2, 3, 4)]
    lane, client, said = make(redoes=redoes, step=4, rows=so_far)
    send(lane, 5)
    end(lane)
    missing = [(3, 0.1), (4, 0.1)] if redoes else [(4, 0.1)]
    assert client.rows == [*missing, (5, 1.0)]
    assert told(said) == []


def test_an_unreadable_record_is_a_new_run(make: Any, tmp_path: Path) -> None:
    (tmp_path / "trackers").mkdir()
    (tmp_path / "trackers" / "memory.json").write_text("{")
    lane, client, _ = make()
    send(lane, 1)
    end(lane)
    assert client.rows == [(1, 1.0)]
    assert len(lane.record.id) == 8
