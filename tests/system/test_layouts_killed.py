"""A run that is killed at random moments and resumed in another layout each time: in the end it is the unbroken run.

Ranks, ZeRO stage, offload and the sizes of tensor, sequence and pipeline parallelism change from life to life.
"""

import json
import os
import random
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from ranks import alive, forked, gone, kill_session, run, start
from shared import FAULTY, STEADY, rows_of, tiny

from tests import architectures
from tests.parity import official
from tests.ranks.test_layouts import LAYOUTS
from toolkit.checkpoint.directory import published_checkpoints
from toolkit.checkpoint.fragment_reader import Fragments
from toolkit.checkpoint.intact import manifest_problems
from toolkit.models import load_tokenizer

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(2400)]
STEPS = 24
NAMES = [name for name in list(LAYOUTS)[:15] if name != "stage2-2"]
NAMES += ["tensor3-2", "sequence-tensor3-4", "pipeline-tensor-4"]
SLOW = {"naps": [{"ranks": [0], "steps": [1, STEPS], "before": "step", "seconds": 0.3}]}
"""So that a moment of a step can be met."""
BOUND = 1e-5


EXPERTS: dict[str, tuple[int, str, list[str]]] = {
    "expert1-2": (2, "expert", ["zero=stage1", "parallel.expert=2"]),
    "expert2-2": (2, "expert", ["zero=stage2", "parallel.expert=2"]),
    "expert-4": (4, "expert", ["zero=stage1", "parallel.expert=4"]),
    "halves-4": (4, "expert", ["zero=stage2", "parallel.expert=2"]),
    "whole3-2": (2, "data", ["zero=stage3"]),
    "whole1-1": (1, "data", ["zero=stage1"]),
}
"""Of a mixture of experts; with `parallel.expert` each rank has some of them."""


def words_of(layout: str, rows_file: Path, folder: Path) -> list[str]:
    """Return the overrides of the run in a layout."""
    how = [f"train.max_steps={STEPS}", "checkpoint.every=1", "checkpoint.keep=2", "optim.weight_decay=0.1", STEADY]
    model = ["model=hf", f"model.path={folder.parent}/experts"] if layout in EXPERTS else []
    return tiny(rows_file, folder, "run", *model, *how, *(LAYOUTS | EXPERTS)[layout][2])


def steps_in(metrics: Path) -> int:
    """Return how many steps were logged."""
    return metrics.read_text().count('"loss"')


def live(layout: str, rows_file: Path, folder: Path, reached: int, draw: random.Random) -> tuple[str, str]:
    """Run in a layout until some moment after the first new step, in a quarter of the lives until any moment.

    Return who was killed, "" where the run ended before, and what was printed. `reached`: the step of the newest
    checkpoint.
    """
    told = json.dumps({"at": "slow", "note": str(folder / "note"), **SLOW})
    metrics, marker = folder / "runs" / "run" / "metrics.jsonl", f"run.dir={folder}/runs"
    process = start(
        forked((LAYOUTS | EXPERTS)[layout][0], FAULTY, *words_of(layout, rows_file, folder)), folder, FAULT=told
    )
    early, began, until = draw.random() < 1 / 4, time.time(), time.monotonic() + 240
    if early:
        until = time.monotonic() + draw.uniform(0, 8)
    is_training = False
    while process.poll() is None and time.monotonic() < until:
        if not is_training and metrics.exists() and metrics.stat().st_mtime > began and steps_in(metrics) > reached:
            is_training, until = True, min(until, time.monotonic() + draw.uniform(0, 1.6))
        time.sleep(0.02)
    running = alive(marker)
    ranks = [pid for pid in running if psutil.pid_exists(pid) and psutil.Process(pid).ppid() in running]
    who = "" if process.poll() is not None else draw.choice(("all", "one")) if ranks else "all"
    if who == "one":
        os.kill(draw.choice(ranks), signal.SIGKILL)
    elif who:
        kill_session(process)
    try:
        output, _ = process.communicate(timeout=120)  # those that are left end by themselves
    except subprocess.TimeoutExpired as error:
        raise AssertionError(f"ranks outlive one that was killed in {layout}") from error
    finally:
        kill_session(process)
    gone(marker, 60)
    assert who or process.returncode == 0, output[-4000:]
    return who, output


def compare(mine: Path, whole: Path) -> float:
    """Compare two finished runs; return the largest difference of two losses."""
    rows, others = rows_of(mine), rows_of(whole)
    counted = ("step", "epoch", "tokens", "trained_tokens", "lr")
    assert [{key: row.get(key) for key in counted} for row in rows] == [
        {key: row.get(key) for key in counted} for row in others
    ]
    pairs = [
        (row[key], other[key])
        for row, other in zip(rows, others, strict=True)
        for key in ("loss", "eval_loss")
        if key in other
    ]
    last = mine / "checkpoints" / f"step-{STEPS}"
    assert not manifest_problems(last)
    one, other = Fragments(last), Fragments(whole / "checkpoints" / f"step-{STEPS}")
    assert one.names == other.names
    for name in one.names:
        assert one.numbers(name) == other.numbers(name)
        difference = (one.whole(name) - other.whole(name)).abs().max()
        assert float(difference) <= 1e-4 * float(other.whole(name).abs().max()), name
    return max(abs(left - right) for left, right in pairs)


@pytest.mark.fault("K6")
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_each_life_in_another_layout(seed: int, rows_file: Path, tmp_path: Path, record_property: Any) -> None:
    """The third chain is a mixture of experts'."""
    names, first = (list(EXPERTS), "expert2-2") if seed == 3 else (NAMES, "stage2-2")
    if seed == 3:
        tokenizer = load_tokenizer(official.write(tmp_path / "vocabulary", "glm4", tokenizer=True))
        tokenizer.save_pretrained(architectures.write(tmp_path / "experts", "glm4_moe"))
    draw, straight, killed = random.Random(seed), tmp_path / "straight", tmp_path / "killed"
    for folder in (straight, killed):
        folder.mkdir()
    finished = run(forked(2, FAULTY, *words_of(first, rows_file, straight)), cwd=straight, FAULT="{}")
    assert finished.code == 0, finished.output[-4000:]
    mine, lives, reached = killed / "runs" / "run", list[str](), 0
    while not (mine / "DONE").exists():
        before = lives[-1].split()[0] if lives else ""
        layout = draw.choice([name for name in names if name != before])
        who, output = live(layout, rows_file, killed, reached, draw)
        assert "Traceback" not in output, f"{layout}\n{output[-4000:]}"
        found = published_checkpoints(mine / "checkpoints") if (mine / "checkpoints").exists() else []
        assert not [path for path in found if manifest_problems(path)], "a checkpoint that was published is not whole"
        newest = int(found[0].name.removeprefix("step-")) if found else 0
        assert newest >= reached, "a checkpoint was lost"
        reached = newest
        lives.append(f"{layout} to step {reached}{', killed: ' * bool(who)}{who}")
    record_property("lives", "; ".join(lives))
    difference = compare(mine, straight / "runs" / "run")
    record_property("largest difference of a loss", f"{difference:.1e}")
    assert difference < BOUND
