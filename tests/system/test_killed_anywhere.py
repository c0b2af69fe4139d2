"""Runs of every task that are killed at random moments, six times each: in the end each is the run that nobody killed.

A moment is drawn from the whole of a straight run, the process's start, tokenizing, the dry run, saves and the export
included. All ranks die at once, as of a node that loses its power, or one of them.
"""

import json
import os
import random
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from ranks import REPOSITORY, alive, forked, gone, kill_session, run, start
from safetensors.torch import load_file
from shared import RECOMPUTE, rows_of, tiny

from tests.ranks.test_task_layouts import TASKS as OTHER_TASKS, row
from toolkit.checkpoint.intact import manifest_problems

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1200)]
RUN = str(REPOSITORY / "run.py")
KILLS = 6
STEPS = 12
TASKS: dict[str, tuple[str, list[str]]] = {
    "language": ("rows", ["optim.lr=0.003"]),
    "language-packed": ("rows", ["data.packing=packed", "data.max_length=64"]),
    "language-curriculum": (
        "rows",
        ["data.curriculum.steps=6", "data.curriculum.start_length=12", "data.max_length=64"],
    ),
    **OTHER_TASKS,
}
LAYOUTS: dict[str, list[str]] = {
    "stage0": ["zero=stage0"],
    "stage1": ["zero=stage1", "checkpoint.asynchronous=false"],
    "stage2": ["zero=stage2", "precision=bf16"],
    "stage3": ["zero=stage3", RECOMPUTE],
    "tensor": ["parallel.tensor=2", "zero=stage1"],
    "sequence": ["parallel.sequence=2", "zero=stage2"],
    "pipeline": ["parallel.pipeline=2", "zero=stage0"],
}
WITHOUT_PIPELINE = ("general", "general-stored", "language-curriculum", "stored", "distill")
"""What a pipeline has not; that these are rejected other tests show."""
DIVIDED = ("tensor", "sequence", "pipeline")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of all kinds, and a teacher."""
    folder, draw = tmp_path_factory.mktemp("killed"), random.Random(5)
    for kind in ("pairs", "labeled", "labels", "texts", "rows", "general"):
        lines = [json.dumps(row(kind, number, draw)) + "\n" for number in range(37)]
        (folder / f"{kind}.jsonl").write_text("".join(lines))
    words = tiny(folder / "rows.jsonl", folder, "teacher", "checkpoint.export=true", "run.seed=5")
    finished = run(forked(2, RUN, *words), cwd=folder)
    assert finished.code == 0, finished.output[-4000:]
    return folder


def words_of(task: str, layout: str, folder: Path, place: Path) -> list[str]:
    """Return the overrides of a run below `place`."""
    kind, own = TASKS[task]
    rows, general = (f"path: {folder}/{name}.jsonl" for name in (kind, "general"))
    given = {"GENERAL": f"data.sources=[{{{rows}}}, {{{general}, general: true}}]"}
    own = [given.get(word, word.replace("TEACHER", f"{folder}/runs/teacher/export")) for word in own]
    how = [f"train.max_steps={STEPS}", "checkpoint.every=2", "checkpoint.export=true", "train.rehearse=true"]
    return tiny(folder / f"{kind}.jsonl", place, "run", *how, *LAYOUTS[layout], *own)


def live(words: list[str], place: Path, seconds: float, draw: random.Random) -> tuple[str, str]:
    """Run for so long, then kill; return who was killed, "" where the run ended before, and what was printed."""
    process = start(forked(2, RUN, *words), place)
    marker = f"run.dir={place}/runs"
    try:
        output, _ = process.communicate(timeout=seconds)
        assert process.returncode == 0, output[-4000:]
        return "", output
    except subprocess.TimeoutExpired:
        running = alive(marker)
        ranks = [pid for pid in running if psutil.pid_exists(pid) and psutil.Process(pid).ppid() in running]
        who = draw.choice(("all", "one"))
        if who == "all" or not ranks:
            kill_session(process)
        else:
            os.kill(draw.choice(ranks), signal.SIGKILL)
    try:
        output, _ = process.communicate(timeout=120)  # those that are left end by themselves
    finally:
        kill_session(process)
    gone(marker, 60)
    return who, output


def check_same(mine: Path, whole: Path) -> None:
    """Compare two finished runs: every row, the last checkpoint, the export."""
    compared = ("step", "loss", "lr", "grad_norm", "tokens", "eval_loss")
    rows, others = ([{key: row.get(key) for key in compared} for row in rows_of(one)] for one in (mine, whole))
    assert rows == others
    assert not manifest_problems(mine / "checkpoints" / f"step-{STEPS}")
    for file in sorted((whole / "export").glob("*.safetensors")):
        values, wanted = load_file(mine / "export" / file.name), load_file(file)
        assert values.keys() == wanted.keys()
        assert all((values[name] == wanted[name]).all() for name in wanted)


@pytest.mark.fault("K5")
@pytest.mark.parametrize("task", TASKS)
def test_in_the_end_it_is_the_same_run(task: str, folder: Path, tmp_path: Path, record_property: Any) -> None:
    draw = random.Random(task)
    names = [name for name in LAYOUTS if name != "pipeline" or task not in WITHOUT_PIPELINE]
    if task == "language-curriculum":
        names = [name for name in names if name not in DIVIDED]
    layout = draw.choice(names)
    straight = tmp_path / "straight"
    straight.mkdir()
    started = time.monotonic()
    finished = run(forked(2, RUN, *words_of(task, layout, folder, straight)), cwd=straight)
    length = time.monotonic() - started
    assert finished.code == 0, finished.output[-4000:]
    whole, kills = straight / "runs" / "run", list[str]()
    while len(kills) < KILLS:  # a chain may end before its sixth death
        killed = Path(tempfile.mkdtemp(prefix="killed-", dir=tmp_path))
        words, mine = words_of(task, layout, folder, killed), killed / "runs" / "run"
        while not (mine / "DONE").exists():
            seconds = draw.uniform(0, length) if len(kills) < KILLS else 240
            who, output = live(words, killed, seconds, draw)
            assert "Traceback" not in output, output[-4000:]
            kills += [f"{who} after {seconds:.1f} s"] if who else []
        check_same(mine, whole)
    record_property("layout", layout)
    record_property("killed", ", ".join(kills))
