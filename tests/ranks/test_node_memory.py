"""A run that died resumes from copies in the memory of its nodes, and reads nothing from the disk for it."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from ranks import REPOSITORY, forked, run
from shared import FAULTY, STEADY, faulty_words, losses, rows_of

pytestmark = pytest.mark.timeout(1200)  # runs that are killed and started again
STEPS = 12
WORDS = [f"train.max_steps={STEPS}", "checkpoint.every=7", "checkpoint.memory_every=2", STEADY]


def test_what_nodes_keep_for_each_other(tmp_path: Path) -> None:
    """On five ranks of three nodes: see the worker."""
    worker = REPOSITORY / "tests" / "ranks" / "node_memory_worker.py"
    finished = run(forked(5, str(worker), str(tmp_path)), cwd=tmp_path)
    assert finished.code == 0, finished.output[-4000:]


def train(rows_file: Path, folder: Path, ranks: int, nodes: list[str], *words: str, **fault: Any) -> tuple[int, str]:
    """Train on ranks of made-up nodes; return exit code and output."""
    shm = [folder / node for node in nodes]
    for place in shm:
        place.mkdir(exist_ok=True)
    known = {"at": "nowhere", "note": str(folder / "note"), "opened": str(folder / "opened"), "shm": [*map(str, shm)]}
    (folder / "opened").unlink(missing_ok=True)
    command = forked(ranks, FAULTY, *faulty_words(rows_file, folder, "run", *WORDS, *words))
    finished = run(command, cwd=folder, FAULT=json.dumps(known | fault))
    return finished.code, finished.output


def opened(folder: Path) -> list[str]:
    """Return which fragments of the disk's checkpoint of step 7 the last start has read."""
    found = (folder / "opened").read_text().splitlines()
    assert found, "nothing at all was read"
    return [path for path in found if path.startswith(f"{folder}/runs/run/checkpoints/step-7/")]


def copies(folder: Path, node: str) -> dict[str, Path]:
    """Return the whole generations on a node."""
    return {path.name: path for path in (folder / node).glob("toolkit-*/step-*") if path.suffix != ".tmp"}


@pytest.fixture(scope="module")
def straight(rows_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that nothing happens to."""
    folder = tmp_path_factory.mktemp("straight")
    code, output = train(rows_file, folder, 2, ["a", "a"])
    assert code == 0, output[-4000:]
    assert not list((folder / "a").iterdir()), "copies outlive the run"
    return folder


def check_same(folder: Path, straight: Path) -> None:
    """Compare losses and all that was saved at the end, bit for bit."""
    assert losses(folder / "runs" / "run") == losses(straight / "runs" / "run")
    for rank in (0, 1):
        name = f"runs/run/checkpoints/step-{STEPS}/fragments-{rank:05d}.safetensors"
        assert (folder / name).read_bytes() == (straight / name).read_bytes()


def spoil(folder: Path, node: str) -> None:
    """Flip a bit of the first rank's fragments in each whole generation on a node."""
    for path in copies(folder, node).values():
        file = path / "fragments-00000.safetensors"
        content = bytearray(file.read_bytes())
        content[-999] ^= 1
        file.write_bytes(content)


def check_disk_is_taken(rows_file: Path, folder: Path, nodes: list[str], straight: Path, what: list[str]) -> None:
    """Resume, to the end, where both generations in memory are spoiled: a state or the weight in each."""
    code, output = train(rows_file, folder, 2, nodes)
    assert code == 0, output[-4000:]
    spoiled = re.findall(r"fragments-00000\.safetensors: its content is not what was written \((\w+):", output)
    assert spoiled == what and output.count("is not whole: 1 of its ") == 2, output[-4000:]
    assert "Resuming after step 7 from " in output and len(opened(folder)) >= 4
    check_same(folder, straight)


def test_a_killed_rank_and_a_lost_node(rows_file: Path, tmp_path: Path, straight: Path) -> None:
    """It dies while it writes a copy: the one before is whole on the other node, from which one rank resumes. That is
    spoiled in the end, and the disk has another.
    """
    code, output = train(rows_file, tmp_path, 2, ["a", "b"], at="save.shard", step=10, rank=1, do="kill")
    assert code and sorted(copies(tmp_path, "a")) == sorted(copies(tmp_path, "b")) == ["step-8"], output[-4000:]
    shutil.rmtree(tmp_path / "a")
    code, output = train(rows_file, tmp_path, 1, ["b"], at="each life", step=12, rank=0, do="kill")
    assert code and "Resuming after step 8 from " in output, output[-4000:]
    assert not opened(tmp_path)
    again = losses(tmp_path / "runs" / "run")
    assert len(again) > 9 and again == pytest.approx(losses(straight / "runs" / "run")[: len(again)], abs=1e-5)
    assert sorted(copies(tmp_path, "b")) == ["step-10", "step-8"]
    spoil(tmp_path, "b")
    check_disk_is_taken(rows_file, tmp_path, ["a", "b"], straight, ["exp_avg_sq", "weight"])


@pytest.mark.nightly
def test_a_killed_rank_costs_no_read_from_the_disk(rows_file: Path, tmp_path: Path, straight: Path) -> None:
    """It dies while it writes a copy: the one before is whole. That is spoiled in the end, and the disk has another."""
    code, output = train(rows_file, tmp_path, 2, ["a", "a"], at="save.shard", step=10, rank=1, do="kill")
    assert code and (tmp_path / "note").read_text() == "save.shard 1\n", output[-4000:]
    assert sorted(copies(tmp_path, "a")) == ["step-8"] and list((tmp_path / "a").glob("*/step-10.tmp"))
    assert [path.name for path in (tmp_path / "runs" / "run" / "checkpoints").glob("step-*")] == ["step-7"]

    code, output = train(rows_file, tmp_path, 2, ["a", "a"], at="each life", step=12, rank=0, do="kill")
    assert code and "Resuming after step 8 from " in output, output[-4000:]
    assert not opened(tmp_path)
    assert sorted(copies(tmp_path, "a")) == ["step-10", "step-8"]
    spoil(tmp_path, "a")
    check_disk_is_taken(rows_file, tmp_path, ["a", "a"], straight, ["weight", "weight"])
    assert not list((tmp_path / "a").iterdir())


@pytest.mark.nightly
def test_a_lost_node_costs_no_read_from_the_disk(rows_file: Path, tmp_path: Path, straight: Path) -> None:
    """Its neighbour has what it wrote; the run resumes on one rank fewer, and then on two again, though the disk has a
    newer checkpoint: that is damaged.
    """
    code, output = train(rows_file, tmp_path, 2, ["a", "b"], at="each life", step=10, rank=1, do="kill")
    assert code and sorted(copies(tmp_path, "a")) == sorted(copies(tmp_path, "b")) == ["step-6", "step-8"], output
    shutil.rmtree(tmp_path / "a")
    code, output = train(rows_file, tmp_path, 1, ["b"], at="each life", step=12, rank=0, do="kill")
    assert code and "Resuming after step 8 from " in output, output[-4000:]
    assert not opened(tmp_path)
    saved = tmp_path / "runs" / "run" / "checkpoints"
    (saved / "step-7").rename(saved / "step-11")
    (saved / "step-11" / "state.json").write_text("{}")
    code, output = train(rows_file, tmp_path, 2, ["a", "b"])
    assert code == 0 and "Resuming after step 10 from " in output, output[-4000:]
    assert (saved / "step-11.damaged").is_dir()
    assert losses(tmp_path / "runs" / "run") == pytest.approx(losses(straight / "runs" / "run"), abs=1e-5)
    assert [row["step"] for row in rows_of(tmp_path / "runs" / "run") if "loss" in row] == list(range(1, STEPS + 1))
