"""Runs over several nodes, each a namespace of its own, through DeepSpeed's launcher and a real pdsh."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster, down, up
from ranks import BIN, REPOSITORY, alive, forked, run, wait_for
from shared import STEADY, eval_losses, losses, rows_of, tiny

from toolkit.train.existing_run import newest_step

PROMPT = "braces {a,b} ${x} $HOME `id` \"double\" 'single' * a\\b 中文"
# As Hydra reads quotes, and OmegaConf what would be an interpolation.
TYPED = '"' + PROMPT.replace('"', '\\"').replace("${", "\\${") + '"'


@pytest.fixture(scope="module")
def four(rows_file: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of four ranks on one machine."""
    folder = tmp_path_factory.mktemp("four")
    finished = run(forked(4, str(REPOSITORY / "run.py"), *tiny(rows_file, folder, "run")), cwd=folder)
    assert finished.code == 0, finished.output[-3000:]
    return losses(folder / "runs" / "run")


@pytest.fixture
def pair(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two machines that only one test needs, as it ends one of them."""
    found, reason = up(tmp_path_factory.mktemp("pair") / "fake", 2)
    assert found, reason
    yield found
    down(found)


@pytest.fixture
def typed(tmp_path: Path) -> Path:
    """A folder with a hostfile of two nodes, two ranks each."""
    (tmp_path / "hostfile").write_text("node1 slots=2\nnode2 slots=2\n")
    return tmp_path


@pytest.mark.ranks
def test_the_headline(cluster: Cluster, typed: Path, rows_file: Path, four: list[float]) -> None:
    """`deepspeed --hostfile` on two machines is one with as many ranks; each prepares in a directory of its own."""
    (typed / "cache").mkdir()
    cluster.do("node2", f"mount -t tmpfs tmpfs {typed}/cache")
    command = [str(BIN / "deepspeed"), "--hostfile", "hostfile", str(REPOSITORY / "run.py")]
    finished = cluster.run("node1", *command, *tiny(rows_file, typed, "run"), cwd=typed, timeout_s=300)
    assert finished.code == 0, finished.output[-4000:]
    folder = typed / "runs" / "run"
    assert losses(folder) == pytest.approx(four, abs=1e-6)
    assert finished.output.count("Run directory: ") == 1
    hosts = {json.loads(path.read_text())["host"] for path in (folder / "logs").glob("heartbeat-rank-*.json")}
    assert hosts == {"node1", "node2"}
    stores = [sorted(path.name for path in (typed / "cache" / "stores").iterdir())]
    other = cluster.run("node2", "ls", f"{typed}/cache/stores")
    assert sorted(other.output.split()) == stores[0]
    cluster.do("node2", f"umount {typed}/cache")


def test_a_machine_that_is_lost(typed: Path, rows_file: Path, pair: Cluster) -> None:
    """Its power is cut: the others end within a minute, and the run goes on without it, from its last checkpoint."""
    steps, secret = 60, {"CLUSTER_TOKEN": "s3cr3t-of-the-cluster"}
    words = tiny(rows_file, typed, "跑 1", "checkpoint.every=2", f"train.max_steps={steps}")
    words += [f"evaluate.prompts=[{TYPED}]", "launch.env.CLUSTER_TOKEN=null"]  # refused by ranks that it does not reach
    launch = [sys.executable, "-m", "toolkit", "launch"]
    folder = typed / "runs" / "跑 1"
    with (typed / "output").open("w+") as output:
        process = pair.start("node1", *launch, "hostfile=hostfile", *words, cwd=typed, output=output, **secret)
        try:
            wait_for(lambda: process.poll() is not None or len(list((folder / "checkpoints").glob("step-*[0-9]"))) > 1)
            pair.off("node2")
            cut = time.monotonic()
            wait_for(lambda: (folder / "FAILED").exists(), 60)
            code = process.wait(timeout=60)
            seconds = time.monotonic() - cut
        finally:
            process.kill()
        output.seek(0)
        printed = output.read()
    assert code == 124, printed[-3000:]
    assert seconds < 90
    said = (folder / "FAILED").read_text()
    assert said.startswith("rank 0 on node1 (pid "), said
    assert "No sign of life from rank 2 (pid " in said, said
    assert ", node2). Its machine, or the network to it, is gone (" in said, said
    assert printed.rstrip().endswith(f"The first error:  {said.strip()}")
    saved = len(losses(folder))
    assert saved < steps, "the run was over before"
    command = [*launch, "--exclude", "node2", "hostfile=hostfile", *words]
    again = pair.run("node1", *command, cwd=typed, timeout_s=300, **secret)
    assert again.code == 0, again.output[-3000:]
    assert "node1  GPUs 0-1  ranks 0-1" in again.output
    assert f"  Q: {PROMPT}\n" in again.output
    assert [row["step"] for row in rows_of(folder) if "loss" in row] == list(range(1, steps + 1))
    told = [
        path for path in typed.rglob("*") if path.is_file() and secret["CLUSTER_TOKEN"].encode() in path.read_bytes()
    ]
    assert not told
    first, *_, last = eval_losses(folder)
    assert last < first


STEPS = 160
# At a small rate: a larger one makes more of what is rounded differently on another number of ranks.
LONG = [f"train.max_steps={STEPS}", "checkpoint.every=20", "batch.global_size=48", "batch.micro_per_gpu=1"]
LONG += ["zero=stage2", "optim.lr=0.00005", STEADY, "evaluate.every=50"]


@pytest.fixture(scope="module")
def without_faults(rows_file: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of three ranks on one machine."""
    folder = tmp_path_factory.mktemp("three")
    command = forked(3, str(REPOSITORY / "run.py"), *tiny(rows_file, folder, "run", *LONG))
    finished = run(command, cwd=folder, timeout_s=600)
    assert finished.code == 0, finished.output[-3000:]
    return losses(folder / "runs" / "run")


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("nodes", "here", "lost"), [(3, "node1", "node2"), (3, "node3", "node1"), (2, "node1", "node2")]
)
def test_nodes_that_go_and_come(
    nodes: int,
    here: str,
    lost: str,
    rows_file: Path,
    without_faults: list[float],
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """One loses its power, and gets it again: the run resumes without it and with it, to the losses of three ranks."""
    (tmp_path / "hostfile").write_text("".join(f"node{number} slots=1\n" for number in range(1, nodes + 1)))
    words = tiny(rows_file, tmp_path, "run", *LONG, "run.max_restarts=1", f"launch.min_nodes={nodes - 1}")
    folder = tmp_path / "runs" / "run"
    with launched(tmp_path_factory.mktemp("nodes") / "fake", nodes, here, words, tmp_path) as (cluster, process):
        wait_for(lambda: process.poll() is not None or newest_step(folder) > 0, 120)
        cluster.off(lost)
        wait_for(lambda: process.poll() is not None or has_resumed(folder, nodes - 1), 300)
        cluster.on(lost)
        wait_for(lambda: process.poll() is not None or has_resumed(folder, nodes), 300)
    printed, starts = (tmp_path / "output").read_text(), starts_of(folder)
    assert [(start["world_size"], start["restart"]) for start in starts] == [(nodes, 0), (nodes - 1, 1), (nodes, 0)]
    assert starts[2]["from_step"] == starts[2]["reached_step"], "steps were done twice"
    assert re.search(rf"^Lost: {lost}: no heartbeat for \d+ s, and no answer through ssh\.$", printed, re.MULTILINE)
    for said in (r"Restart 1 of 1: \d+\.\d s from the death", r"\d+\.\d s from the stop"):
        assert len(re.findall(rf"^{said} to the first new step", printed, re.MULTILINE)) == 1
    assert "The first error" not in printed
    resumed = re.findall(r"Resuming after step ([\d,]+) from ", printed)
    assert resumed == [str(start["from_step"]) for start in starts[1:]]
    assert losses(folder) == pytest.approx(without_faults, abs=1e-5)
    assert [row["step"] for row in rows_of(folder) if "loss" in row] == list(range(1, STEPS + 1))


@pytest.mark.fault("K1", "N1")
@pytest.mark.timeout(1200)
def test_killed_ranks_of_an_elastic_launch(
    rows_file: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """One on each node in turn: no node is lost, so each time all go on, to the losses of two ranks."""
    (tmp_path / "hostfile").write_text("node1 slots=1\nnode2 slots=1\n")
    steps = [*LONG, "train.max_steps=100", "checkpoint.every=10"]
    words = tiny(rows_file, tmp_path, "run", *steps, "run.max_restarts=3", "launch.min_nodes=1")
    whole = tiny(rows_file, tmp_path_factory.mktemp("whole"), "whole", *steps, f"run.dir={tmp_path}/whole")
    finished = run(forked(2, str(REPOSITORY / "run.py"), *whole), cwd=tmp_path, timeout_s=300)
    assert finished.code == 0, finished.output[-3000:]
    folder = tmp_path / "runs" / "run"
    with launched(tmp_path_factory.mktemp("nodes") / "fake", 2, "node1", words, tmp_path) as (_, process):
        wait_for(lambda: process.poll() is not None or newest_step(folder) > 0, 120)
        for rank in (1, 0):
            saved = newest_step(folder)
            os.kill(rank_process(f"run.dir={tmp_path}/runs", rank), signal.SIGKILL)
            wait_for(lambda saved=saved: process.poll() is not None or newest_step(folder) > saved + 10, 300)
    assert [(start["world_size"], start["restart"]) for start in starts_of(folder)] == [(2, 0), (2, 1), (2, 2)]
    assert "Lost: " not in (tmp_path / "output").read_text()
    # Before the first death too: sums between machines are rounded otherwise than those within one.
    assert losses(folder) == pytest.approx(losses(tmp_path / "whole" / "whole"), abs=1e-5)


@contextmanager
def launched(
    place: Path, nodes: int, here: str, words: list[str], folder: Path
) -> Iterator[tuple[Cluster, "subprocess.Popen[bytes]"]]:
    """Launch a run of a hostfile from one of several new nodes, into the file `output`; after the block wait for its
    end, which must be a good one.
    """
    cluster, reason = up(place, nodes)
    if cluster is None:
        pytest.skip(reason)
    launch = [sys.executable, "-m", "toolkit", "launch", "hostfile=hostfile", *words]
    try:
        with (folder / "output").open("w") as output:
            process = cluster.start(here, *launch, cwd=folder, output=output)
        try:
            yield cluster, process
            code = process.wait(timeout=600)
        finally:
            process.kill()
    finally:
        down(cluster)
    assert code == 0, (folder / "output").read_text()[-5000:]


def starts_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "logs" / "starts.jsonl").read_text().splitlines()]


def rank_process(marker: str, rank: int) -> int:
    """Return the process of a rank, as this machine numbers it and not its node."""
    for pid in alive(marker):
        with suppress(OSError):
            if f"\0RANK={rank}\0" in "\0" + Path(f"/proc/{pid}/environ").read_text(errors="replace"):
                return pid
    raise AssertionError(f"no rank {rank}")


def has_resumed(folder: Path, ranks: int) -> bool:
    """Whether a run has been started on so many ranks last, and has done steps since."""
    last = starts_of(folder)[-1]
    return last["world_size"] == ranks and len(losses(folder)) > last["from_step"] + 5
