"""Runs that end before a time: what the time is, how many steps fit, and schedules that end with them."""

import errno
import json
import time
from datetime import datetime, timedelta
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from toolkit.config.load import load
from toolkit.config.rules import check_rules, parse_deadline
from toolkit.config.schema import RunConfig, ScheduleName
from toolkit.messages import ConfigError, tr
from toolkit.track import metrics
from toolkit.train import deadline
from toolkit.train.deadline import Deadline, deadline_of, recorded_last_steps
from toolkit.train.schedule import Schedule

NOW = datetime(2026, 11, 25, 14, 30)
PEAK, TOTAL, WARMUP = 1e-3, 100, 10


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("18:00", NOW.replace(hour=18, minute=0)),
        ("14:30", NOW + timedelta(days=1)),
        ("9:05", datetime(2026, 11, 26, 9, 5)),
        ("2026-11-27 08:00", datetime(2026, 11, 27, 8)),
        ("2h30m", NOW + timedelta(hours=2, minutes=30)),
        ("1d 12h", NOW + timedelta(days=1, hours=12)),
        ("1.5h", NOW + timedelta(minutes=90)),
        ("90s", NOW + timedelta(seconds=90)),
        ("1080", None),
        ("25:00", None),
        ("tomorrow", None),
        ("2h30", None),
        ("99999999999d", None),
    ],
)
def test_a_deadline_is_a_time_of_day_a_date_or_a_duration(text: str, expected: datetime | None) -> None:
    assert parse_deadline(text, NOW) == expected


def test_a_time_needs_no_quotes_in_yaml(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("defaults: [zero1, _self_]\nrun: {deadline: 18:00}\n")
    loaded = load([f"recipe={recipe}"])
    check_rules(loaded, files=False)
    assert loaded.cfg.run.deadline == "18:00"
    recipe.write_text("defaults: [zero1, _self_]\nrun: {deadline: 1800}\n")
    with pytest.raises(ConfigError, match=r'mine\.yaml:2: run\.deadline = 1800 is no time: .* \("18:00"\)'):
        check_rules(load([f"recipe={recipe}"]), files=False)


def made(name: ScheduleName) -> tuple[torch.optim.Optimizer, Schedule]:
    cfg = RunConfig()
    cfg.schedule.name, cfg.schedule.decay_ratio, cfg.schedule.min_lr_ratio = name, 0.2, 0.0
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], PEAK)
    return optimizer, Schedule(optimizer, cfg.schedule, PEAK, TOTAL, WARMUP)


def follow(name: ScheduleName, plans: dict[int, int], steps: int) -> list[float]:
    """Return the rate of each step; `plans`: steps that are left, by the steps done when that is found."""
    optimizer, schedule = made(name)
    seen = []
    for done in range(steps):
        if done in plans:
            schedule.fit(plans[done])
        seen.append(optimizer.param_groups[0]["lr"])
        schedule.step()
    return seen


FALLING = (ScheduleName.linear, ScheduleName.cosine, ScheduleName.polynomial, ScheduleName.wsd)


@pytest.mark.parametrize("name", FALLING)
@pytest.mark.parametrize("plans", [{40: 30}, {3: 47}, {40: 30, 55: 25}, {85: 5}, {20: 70, 21: 30, 40: 12}])
def test_a_shorter_schedule_ends_with_the_run_and_has_no_jump(name: ScheduleName, plans: dict[int, int]) -> None:
    end = max(plans) + plans[max(plans)]
    rates = follow(name, plans, end + 1)
    assert rates[:WARMUP] == follow(name, {}, WARMUP), "a warm-up keeps its steps"
    assert rates[end] < 0.02 * PEAK
    assert rates[end] < rates[end - 1], "it ends with the last step, not before"
    fewest = min(left for done, left in plans.items())
    falls = [before - after for before, after in zip(rates[WARMUP + 1 :], rates[WARMUP + 2 :], strict=False)]
    assert min(falls) > -1e-12, "it does not rise again"
    assert max(falls) < 1.7 * PEAK / min(fewest, 20), "no step falls further than a steady fall of so few steps does"


def test_of_a_flat_schedule_the_flat_part_goes_first() -> None:
    """The fall of wsd keeps its 20 steps, as long as there are as many."""
    whole = follow(ScheduleName.wsd, {}, TOTAL)
    rates = follow(ScheduleName.wsd, {30: 35}, 65)
    assert rates[:45] == [*whole[:WARMUP], *[PEAK] * 35]
    assert rates[45:] == pytest.approx(whole[80:], rel=1e-9)


@pytest.mark.parametrize("name", list(ScheduleName))
def test_time_for_all_steps_changes_no_bit(name: ScheduleName) -> None:
    assert follow(name, {done: TOTAL - done for done in range(5, TOTAL)}, TOTAL) == follow(name, {}, TOTAL)


def test_a_resumed_schedule_continues_where_it_was() -> None:
    rates = follow(ScheduleName.cosine, {40: 30}, 70)
    _, first = made(ScheduleName.cosine)
    for done in range(50):
        if done == 40:
            first.fit(30)
        first.step()
    optimizer, second = made(ScheduleName.cosine)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    second.fit(20)
    found = []
    for _ in range(20):
        found.append(optimizer.param_groups[0]["lr"])
        second.step()
    assert found == pytest.approx(rates[50:], rel=1e-9)


class Clock:
    """A clock that tests advance; steps of a run take what they are told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = NOW.timestamp()
        monkeypatch.setattr(deadline, "time", self)

        self.set_by = 0.0

    def time(self) -> float:
        return self.now + self.set_by

    def monotonic(self) -> float:
        return self.now - NOW.timestamp()

    CLOCK_BOOTTIME = 7

    def clock_gettime(self, which: int) -> float:
        return self.monotonic() + 1000

    def run(self, until: Deadline, step: int, seconds: float) -> int:
        """Take one step; return the step to end with that was decided before it."""
        end = until.decide(step)
        self.now += seconds
        until.add_step(seconds)
        return end


def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the list that what is said and warned of goes to."""
    lines: list[str] = []
    for name in ("say", "warn"):
        monkeypatch.setattr(deadline, name, lambda line, **values: lines.append(tr(line, **values)))
    return lines


def until(folder: Path, at: float, start: int = 0, total: int = 1000, **changes: float) -> Deadline:
    cfg = RunConfig()
    cfg.checkpoint.minutes = 0
    for name, value in changes.items():
        section, key = name.split("_")
        setattr(getattr(cfg, section), key, value)
    return Deadline(cfg, folder, at, total_steps=total, start=start, accumulation=1, sizes=(10**9, 10**9))


def test_steps_that_fit_follow_the_pace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """1000 s, of them 59.5 for the end: save and export of 10 s each, an evaluation of 10 steps, 2 steps and 20 s."""
    clock = Clock(monkeypatch)
    run = until(tmp_path, clock.now + 1000)
    lines = told(monkeypatch)
    ends = [clock.run(run, step, 1.0) for step in range(1, 11)]
    assert ends[:6] == [0] * 6, "the first step and so few say nothing"
    assert set(ends[6:]) == {940}
    assert len(lines) == 1
    assert "940 of 1,000 steps fit" in lines[0]
    ends = [clock.run(run, step, 2.0) for step in range(11, 200)]
    assert ends[-1] == pytest.approx(11 + (1000 - 10 - 59.5 - 14.5) / 2, abs=6), "half as fast: about half as many"
    assert len(lines) < 12
    while clock.run(run, step := len(ends) + 11, 2.0) > step:
        ends.append(0)
    left = NOW.timestamp() + 1000 - clock.now
    assert 0 <= left - run.end_s() < 5, "the last step ends as the time that is kept for the end begins"


def test_a_run_that_is_late_at_once_still_reaches_the_end_of_its_schedule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decision in a step is heard after it, and the rate of the next one is written by then."""
    clock = Clock(monkeypatch)
    told(monkeypatch)
    run = until(tmp_path, clock.now + 100, total=TOTAL)
    optimizer, schedule = made(ScheduleName.linear)
    rates, step, end = [], 0, TOTAL
    while step < end:
        step += 1
        rates.append(optimizer.param_groups[0]["lr"])
        clock.now += 60 * (step == 31)
        decided = clock.run(run, step, 0.1)
        schedule.step()
        if decided:
            end = decided
            schedule.fit(end - step)
    assert step == 33, "the step after the decision's next one"
    assert rates[-1] == pytest.approx(rates[-2] / 2, rel=0.03)
    assert run.deadline_at - clock.now == pytest.approx(100 - 60 - 3.3)


def test_time_for_everything_is_said_and_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    run = until(tmp_path, clock.now + 5000)
    lines = told(monkeypatch)
    assert [clock.run(run, step, 1.0) for step in range(1, 20)][6:] == [1000] * 13
    assert len(lines) == 1
    assert "all 1,000 steps fit" in lines[0]


def test_evaluations_and_saves_between_steps_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    told(monkeypatch)
    run = until(tmp_path, clock.now + 1000, evaluate_every=10, checkpoint_every=50)
    run.costs.evaluation, run.costs.pause, run.costs.save = 5.0, 10.0, 20.0
    end = [clock.run(run, step, 1.0) for step in range(1, 9)][-1]
    each_s, left_s = 1.0 + 0.5 + 0.2, 1000 - 6 - (20 + 2 + 1.25 * (5 + 20 + 10))
    assert end == pytest.approx(6 + left_s / each_s, abs=2)


def test_a_resumed_run_knows_its_pace_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, at = Clock(monkeypatch), NOW.timestamp() + 600
    told(monkeypatch)
    first = until(tmp_path, at)
    for step in range(1, 41):
        clock.run(first, step, 1.0 if step < 20 else 3.0)
    kept = recorded_last_steps(tmp_path)
    second = until(tmp_path, at, start=30)
    assert recorded_last_steps(tmp_path) == {step: last for step, last in kept.items() if step <= 30}
    assert second.end_step == kept[max(step for step in kept if step <= 30)]
    clock.now += 100  # it took its time to start again
    assert 31 < clock.run(second, 31, 3.0) < second.total_steps
    later = until(tmp_path, at + 3600, start=30)
    assert later.end_step == later.total_steps, "another deadline is another plan"


@pytest.mark.parametrize("jump_s", [3600.0, -3600.0, 365 * 86400.0, -365 * 86400.0])
def test_a_duration_does_not_follow_a_clock_that_is_set(
    jump_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, lines = Clock(monkeypatch), told(monkeypatch)
    cfg = RunConfig()
    cfg.run.deadline = "1000s"
    monkeypatch.setattr(deadline, "datetime", Mock(wraps=datetime, now=lambda: datetime.fromtimestamp(clock.time())))
    at = deadline_of(cfg, tmp_path)
    assert at == NOW.timestamp() + 1000
    run = Deadline(cfg, tmp_path, at, total_steps=10_000, start=0, accumulation=1, sizes=(10**9, 10**9))
    before = [clock.run(run, step, 1.0) for step in range(1, 11)][-1]
    clock.set_by = jump_s
    assert clock.run(run, 11, 1.0) == before, "as if nothing had happened"
    assert [line for line in lines if "the clock was set " + ("forward" if jump_s > 0 else "back") in line]
    assert deadline_of(cfg, tmp_path) == at + jump_s == run.deadline_at, "kept for the next start"
    clock.set_by = 0  # while no run was there
    assert deadline_of(cfg, tmp_path) == at


def test_a_time_follows_a_clock_that_is_set_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, lines = Clock(monkeypatch), told(monkeypatch)
    cfg = RunConfig()
    cfg.run.deadline = "2026-11-25 14:46:40"
    run = Deadline(cfg, tmp_path, NOW.timestamp() + 1000, total_steps=10_000, start=0, accumulation=1, sizes=(0, 0))
    before = [clock.run(run, step, 1.0) for step in range(1, 11)][-1]
    clock.set_by = 500
    assert clock.run(run, 11, 1.0) == pytest.approx(before - 500, abs=3)
    assert [line for line in lines if "run.deadline = 2026-11-25 14:46:40 follows it" in line]


def test_a_full_disk_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    told(monkeypatch)
    run = until(tmp_path, clock.now + 1000)
    with monkeypatch.context() as disk:
        disk.setattr(metrics, "append_rows", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
        ends = {step: clock.run(run, step, 1.0) for step in range(1, 11)}
    assert ends[10] == 940 and recorded_last_steps(tmp_path) == {}
    run.log.finish()
    assert recorded_last_steps(tmp_path) == {7: 940}


def test_a_duration_counts_from_the_first_start(tmp_path: Path) -> None:
    cfg = RunConfig()
    assert deadline_of(cfg, tmp_path) is None
    cfg.run.deadline = "2h"
    at = deadline_of(cfg, tmp_path)
    assert at == pytest.approx(time.time() + 7200, abs=60)
    assert deadline_of(cfg, tmp_path) == at
    cfg.run.deadline = "3h"
    assert deadline_of(cfg, tmp_path) == pytest.approx(at + 3600, abs=60)


@pytest.mark.parametrize("left", ["", '{"given": "2h", "at', "\0\0"])
def test_a_deadline_that_a_full_disk_has_cut_off_counts_anew(left: str, tmp_path: Path) -> None:
    cfg = RunConfig()
    cfg.run.deadline = "2h"
    (tmp_path / "deadline.json").write_text(left)
    at = deadline_of(cfg, tmp_path)
    assert at == pytest.approx(time.time() + 7200, abs=60)
    assert deadline_of(cfg, tmp_path) == at
    assert [path.name for path in tmp_path.iterdir()] == ["deadline.json"]


def test_what_is_past_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    cfg = RunConfig()
    cfg.run.deadline = "2020-01-01 12:00"
    with pytest.raises(ConfigError, match=r"is past: it was 2020-01-01 12:00.*toolkit export-model"):
        deadline_of(cfg, tmp_path)
