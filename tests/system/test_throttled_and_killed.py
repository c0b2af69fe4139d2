"""Runs with `run.deadline` whose ranks are slowed down and killed at random: each ends in time, with its schedule.

What is promised: export and DONE before the deadline, unless the machine becomes many times slower within the seconds
that are kept for the end; and the whole schedule, where the time leaves some dozens of steps after the warm-up. SECONDS
are enough for that on two cores at a load of 10.
"""

import itertools
import json
import random
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from ranks import forked, gone, run
from shared import FAULTY, tiny

from tests import series
from toolkit.checkpoint.intact import manifest_problems
from toolkit.export.verify import verify_logits
from toolkit.train.deadline import recorded_last_steps

SECONDS = 90
"""Until the deadline: about 20 are kept for the end, and three starts take 6 on two idle cores, 20 at a load of 4."""
DURATION = f"{SECONDS}s"
PLANNED, WARMUP, PEAK = 100_000, 20, 0.003
SCHEDULES: dict[str, tuple[list[str], float]] = {
    "linear": ([], 0.0),
    "cosine": (["schedule.min_lr_ratio=0.1"], 0.1),
    "polynomial": (["schedule.power=2", "schedule.min_lr_ratio=0.1"], 0.1),
    "wsd": ([], 0.0),
}
"""By name: further overrides, and the lowest rate as a share of the peak."""


def times(draw: random.Random, now: datetime) -> tuple[str, float]:
    """Return a deadline as it is typed, a duration or a time, and when it is if the run begins now."""
    at = now.replace(microsecond=0) + timedelta(seconds=SECONDS)
    [kind] = draw.choices(("duration", "date", "time of day"), (4, 4, 1))  # the last is up to a minute later
    if kind == "time of day":
        at = (at + timedelta(seconds=59)).replace(second=0)
        return f"{at:%H:%M}", at.timestamp()
    return (DURATION if kind == "duration" else str(at)), at.timestamp()


def naps(draw: random.Random, most: int, end: int) -> list[dict[str, Any]]:
    """Return two stretches of a life in which ranks are slow: from one of its first steps on, for a while or to an end.

    A step takes about 0.03 s by itself; asleep, up to 0.3 s more.
    """
    found = []
    for _ in range(2):
        first = draw.randint(1, most)
        last = draw.choice((first + draw.randint(5, 25), end))
        place, seconds = draw.choice(("data", "step", "forward")), draw.uniform(0.02, 0.15)
        ranks = draw.choice(([0], [1], [0, 1]))
        found.append({"ranks": ranks, "steps": [first, last], "before": place, "seconds": seconds})
    return found


@pytest.mark.fault("L1")
@pytest.mark.parametrize("seed", range(20))
def test_it_ends_in_time_with_its_schedule(seed: int, rows_file: Path, tmp_path: Path, record_property: Any) -> None:
    """A rank is slow for some steps or to the end, and one is killed, once or twice; started again each time."""
    draw = random.Random(seed)
    name = draw.choice(sorted(SCHEDULES))
    more, lowest = SCHEDULES[name]
    kills = sorted(draw.sample(range(3, 60), draw.randint(1, 2)))
    note, folder = tmp_path / "note", tmp_path / "runs" / "run"
    lives = [
        {"at": "each life", "step": step, "rank": draw.randrange(2), "do": "kill", "naps": naps(draw, step, step)}
        for step in kills
    ] + [{"at": "slow", "naps": naps(draw, 200, PLANNED)}]
    saves = f"checkpoint.asynchronous={draw.choice(('true', 'false'))}"
    forked(2)  # what ranks are forked from takes its time to begin, which is not the run's
    typed, expected = times(draw, datetime.now())
    words = tiny(rows_file, tmp_path, "run", f"train.max_steps={PLANNED}", "checkpoint.every=15", "zero=stage2", saves)
    words += [
        f"schedule={name}",
        f"schedule.warmup_steps={WARMUP}",
        "checkpoint.export=true",
        *more,
        f"run.deadline='{typed}'",
    ]
    decided = set()
    for life in lives:
        finished = run(forked(2, FAULTY, *words), cwd=tmp_path, FAULT=json.dumps({**life, "note": str(note)}))
        gone(f"run.dir={tmp_path}/runs", 30)
        assert (finished.code == 0) == (life is lives[-1]), finished.output[-4000:]
        assert (folder / "deadline.json").exists(), finished.output[-4000:]
        decided |= {json.loads((folder / "deadline.json").read_text())["at"]}
    lines = note.read_text().splitlines()
    assert [line.split()[0] for line in lines].count("each") == len(kills), "a fault did not happen"
    assert len(lines) > len(kills), "nobody was slow"

    # In time, by one instant over all lives.
    [at] = decided | {json.loads(line)["at"] for line in (folder / "deadline.jsonl").read_text().splitlines()}
    assert at == expected or (typed == DURATION and 0 < at - expected < 30)
    files = [folder / "DONE", *(folder / "export").iterdir()]
    spare_s = at - max(file.stat().st_mtime for file in files)
    assert spare_s >= 0, finished.output[-4000:]
    assert "before run.deadline." in finished.output and "run.deadline was missed" not in finished.output
    assert "the export does not give the run's logits" not in finished.output
    done = json.loads((folder / "DONE").read_text())
    assert not manifest_problems(folder / "checkpoints" / f"step-{done['steps']}")
    verify_logits(folder / "export")

    # Every step once; the rate rises with the warm-up, and falls by the plan of the time to the end.
    numbered = series.metrics_jsonl(folder / "metrics.jsonl")["lr"]
    assert [step for step, _ in numbered] == list(range(1, done["steps"] + 1))
    assert WARMUP * 3 < done["steps"] < PLANNED
    rates = [rate for _, rate in numbered]
    plans = recorded_last_steps(folder)
    longest = (PEAK - PEAK / WARMUP) / WARMUP
    assert rates[0] == pytest.approx(PEAK / WARMUP) and max(rates) == pytest.approx(PEAK, rel=0.05)
    changes = [later - earlier for earlier, later in itertools.pairwise(rates)]
    top = rates.index(max(rates))
    assert all(0 <= change <= longest * 1.0001 for change in changes[:top])
    for step in range(top + 1, len(rates)):
        last = plans[max(decision for decision in plans if decision < step)]
        straight = (rates[step - 1] - lowest * PEAK) / (last - step + 1)
        # Of a half cosine, and of a parabola, no step is longer than two of the straight line from there to the end.
        assert 0 <= -changes[step - 1] <= min(2.05 * straight, PEAK / 10), (step, last)
    above = rates[-1] - lowest * PEAK
    assert 0 <= above <= -min(changes) * 1.02, "the next step would have been the schedule's end"
    record_property("schedule", name)
    record_property("killed in steps", " ".join(map(str, kills)))
    record_property("steps", done["steps"])
    record_property("seconds to spare", round(spare_s, 1))
    record_property("largest fall of the rate", f"{-min(changes) / PEAK:.2%} of the peak")
    record_property("last rate above the lowest", f"{above / PEAK:.2%} of the peak")
