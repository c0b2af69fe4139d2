"""Which rank is called slow, and which is not."""

from typing import Any

import pytest
import torch

from toolkit.train import step
from toolkit.train.step import Stopwatch
from toolkit.train.stragglers import COMPARED_STEPS, IN_A_ROW, StragglerDetector
from toolkit.train.throughput import RankTimes

HOSTS = ["a", "a", "b", "b"]


def steps(own_s: list[float], data_wait_s: list[float] | None = None, tokens: list[float] | None = None) -> RankTimes:
    """Return a window of steps that take a second each; figures are per step."""

    def of_all(values: list[float]) -> list[float]:
        return [value * COMPARED_STEPS for value in values]

    waits, lengths = data_wait_s or [0.0] * len(own_s), tokens or [100.0] * len(own_s)
    return RankTimes(COMPARED_STEPS, float(COMPARED_STEPS), of_all(own_s), of_all(waits), of_all(lengths))


def told(found: RankTimes, times: int = IN_A_ROW) -> list[str]:
    """Return what is said after each of so many windows."""
    ranks = StragglerDetector(HOSTS[: len(found.own_s)])
    return [ranks.compare(found) for _ in range(times)]


def test_a_slow_rank_is_told_of_once() -> None:
    first, second, third, fourth = told(steps([0.3, 0.3, 0.45, 0.31]), 4)
    assert (first, second, fourth) == ("", "", "")
    assert third.startswith(
        "all ranks wait for rank 2 on b: its own work takes 0.45 s per step, 1.5 times that of the median "
        "rank (0.3 s). It is not the data: look at what else runs on b,"
    )
    assert "Most of that it waits for its data" in told(steps([0.3, 0.5], [0.1, 0.25]))[-1]


def test_short_rows_are_put_together() -> None:
    ranks, one = StragglerDetector(HOSTS), RankTimes(1, 1.0, [0.1, 0.1, 0.1, 0.9], [0.0] * 4, [9.0] * 4)
    said = [bool(ranks.compare(one)) for _ in range(IN_A_ROW * COMPARED_STEPS)]
    assert said == [False] * (IN_A_ROW * COMPARED_STEPS - 1) + [True]


@pytest.mark.parametrize(
    "found",
    [
        pytest.param(steps([0.30, 0.34]), id="a little slower"),
        pytest.param(steps([0.01, 0.03]), id="nothing beside what a step takes"),
        pytest.param(steps([0.5, 0.4, 0.3, 0.2], tokens=[500.0, 400.0, 300.0, 200.0]), id="longer rows"),
        pytest.param(steps([0.3]), id="alone"),
        pytest.param(steps([0.5, 0.5, 0.5, 0.2]), id="one is fast"),
    ],
)
def test_who_is_not_slow(found: RankTimes) -> None:
    assert not any(told(found, 9))


def test_now_this_rank_and_now_that() -> None:
    ranks = StragglerDetector(HOSTS)
    for _ in range(9):
        assert not ranks.compare(steps([0.9, 0.1, 0.1, 0.1]))
        assert not ranks.compare(steps([0.1, 0.9, 0.1, 0.1]))


def test_row() -> None:
    assert steps([0.3, 0.5, 0.25], [0.1, 0.0, 0.05]).row() == pytest.approx(
        {
            "data_wait_s": 0.1,
            "data_wait_fraction": 0.1,
            "data_wait_rank": 0,
            "slowest_rank": 1,
            "slowest_rank_s": 0.5,
            "median_rank_s": 0.3,
            "fastest_rank_s": 0.25,
        }
    )
    assert steps([0.3], [0.1]).row() == pytest.approx({"data_wait_s": 0.1, "data_wait_fraction": 0.1})


def test_the_watch_of_a_gpu_is_not_that_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pairs of events, in milliseconds, on an accelerator that is none."""

    recorded: list[object] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            recorded.append(self)
            self.at_ms = {1: 0.0, 2: 500.0, 3: 2000.0, 4: 2250.0}[len(recorded)]

        def elapsed_time(self, end: "Event") -> float:
            return end.at_ms - self.at_ms

    class Accelerator:
        def __getattr__(self, name: str) -> Any:
            return {"Event": Event}[name]

    monkeypatch.setattr(step, "get_accelerator", Accelerator)
    watch = Stopwatch(torch.device("cuda", 0))
    for _ in range(4):
        watch.mark()
    assert watch.seconds() == pytest.approx(0.75)
