"""What DeepSpeed's launcher was asked for, on a made-up process tree."""

import base64
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from tests.unit.made_processes import make_processes
from toolkit.cli import main
from toolkit.launch import deepspeed
from toolkit.launch.ancestors import age_s
from toolkit.launch.deepspeed import check_launcher, hostfile_of, launcher_options, split_words, typed_options
from toolkit.launch.environment import Ranks
from toolkit.messages import LaunchError

RANKS = Ranks(0, 0, 2, 0, "deepspeed")
TWO_HOSTS = "a slots=1\nb slots=1\n"
Start = Callable[[str, int], None]


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Let this process be a rank of launch.py of a front end that works in tmp_path/work."""
    (tmp_path / "work").mkdir()

    def start(front_end: str, nodes: int) -> None:
        world = base64.urlsafe_b64encode(json.dumps({f"n{i}": [0] for i in range(nodes)}).encode()).decode()
        launch = f"/bin/python -u -m deepspeed.launcher.launch --world_info={world} --master_addr=x run.py recipe=x"
        lines = [line.split() for line in ("python -u run.py --local_rank=0", launch, front_end)]
        make_processes(monkeypatch, *lines, folder=tmp_path / "work", ages_s=(100, 200, 300))

    return start


def refused(num_nodes: int = 0) -> str:
    with pytest.raises(LaunchError) as caught:
        check_launcher(num_nodes, RANKS)
    return str(caught.value)


@pytest.mark.parametrize("option", ["--hostfile hosts", "--hostfile=hosts", "-H hosts"])
def test_missing_hostfile(option: str, tmp_path: Path, started: Start) -> None:
    started(f"/venv/bin/python /venv/bin/deepspeed {option} run.py recipe=x", 1)
    assert refused().startswith(f"the hostfile {tmp_path}/work/hosts cannot be read: No such file")


def test_malformed_hostfile(tmp_path: Path, started: Start) -> None:
    (tmp_path / "work" / "hosts").write_text("a slots=1\nb 8\n")
    started("deepspeed --hostfile hosts run.py", 1)
    assert refused().startswith(f"{tmp_path}/work/hosts:2: 'b 8': write")


def test_fewer_machines_than_the_hostfile(tmp_path: Path, started: Start) -> None:
    (tmp_path / "work" / "hosts").write_text(TWO_HOSTS)
    started("deepspeed --hostfile hosts run.py", 1)
    assert refused() == "the hostfile hosts names 2 nodes (a, b), but 1 were started."


@pytest.mark.parametrize(
    ("front_end", "nodes"),
    [
        ("deepspeed --hostfile hosts run.py", 2),
        ("deepspeed --hostfile hosts --num_nodes 1 run.py", 1),
        ("deepspeed --hostfile hosts --include a run.py", 1),
        ("deepspeed --hostfile hosts --include a@b:0 run.py", 2),
        ("deepspeed --hostfile hosts --exclude a run.py", 1),
        ("deepspeed --num_gpus 2 run.py --hostfile nosuch", 1),
        ("torchrun --nproc-per-node 2 run.py", 1),
        ("python -m deepspeed.launcher.runner --hostfile hosts run.py", 2),
    ],
)
def test_what_fits_passes(
    front_end: str, nodes: int, tmp_path: Path, started: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "work" / "hosts").write_text(TWO_HOSTS)
    monkeypatch.setattr(deepspeed, "is_here", lambda host: True)
    started(front_end, nodes)
    check_launcher(0, RANKS)


def test_another_machine_alone_would_be_forgotten(
    tmp_path: Path, started: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepSpeed 0.19.8 trains on the machine where it was typed if one host is left, whatever its name."""
    (tmp_path / "work" / "hosts").write_text(TWO_HOSTS)
    monkeypatch.setattr(deepspeed, "is_here", "a".__eq__)
    started("deepspeed --hostfile hosts --include b run.py", 1)
    assert refused().startswith("the hostfile leaves b alone, which is not this machine")


def test_ranks_that_are_not_bound_to_cores(tmp_path: Path, started: Start) -> None:
    (tmp_path / "work" / "hosts").write_text(TWO_HOSTS)
    started("deepspeed --hostfile hosts --launcher openmpi --bind_cores_to_rank run.py", 2)
    assert refused().startswith("--bind_cores_to_rank: DeepSpeed does not hand this on")


def test_cores_without_binding(started: Start) -> None:
    started("deepspeed --bind_core_list 0-1 run.py", 1)
    assert refused() == "--bind_core_list does nothing alone: add --bind_cores_to_rank."


def test_num_nodes(started: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    started("deepspeed run.py", 1)
    assert refused(num_nodes=4).startswith("launch.num_nodes = 4, but 1 node was started.")
    make_processes(monkeypatch, ["python", "run.py"])
    check_launcher(2, Ranks(0, 0, 8, 4, "torchrun"))
    with pytest.raises(LaunchError):
        check_launcher(3, Ranks(0, 0, 8, 4, "torchrun"))


def test_open_mpi_s_nodes_may_have_unequal_numbers_of_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its command line does not say what DeepSpeed was given, and a rank knows the ranks of its own node alone."""
    (tmp_path / "hosts").write_text("a slots=2\nb slots=1\n")
    lines = (
        "python run.py",
        "mpirun -n 3 --hostfile hosts python run.py",
        "deepspeed --hostfile hosts --launcher openmpi run.py",
    )
    make_processes(monkeypatch, *(line.split() for line in lines), folder=tmp_path)
    check_launcher(2, Ranks(0, 0, 3, 2, "openmpi"))
    with pytest.raises(LaunchError, match=r"launch.num_nodes = 3, but 2 nodes were started"):
        check_launcher(3, Ranks(0, 0, 3, 2, "openmpi"))
    with pytest.raises(LaunchError, match=r"names 2 nodes \(a, b\), but 1 were started"):
        check_launcher(0, Ranks(0, 0, 2, 2, "openmpi"))
    make_processes(monkeypatch, ["python", "run.py"], ["orted"])
    check_launcher(2, Ranks(2, 0, 3, 1, "openmpi"))


def test_nodes_that_no_launcher_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    """srun says how many ranks a node has only where it was asked for as many, but how many nodes in any case."""
    make_processes(monkeypatch, ["python", "run.py"])
    monkeypatch.setenv("SLURM_STEP_NUM_NODES", "2")
    check_launcher(2, Ranks(0, 0, 8, 0, "slurm"))
    with pytest.raises(LaunchError, match=r"launch.num_nodes = 4, but 2 nodes were started"):
        check_launcher(4, Ranks(0, 0, 8, 0, "slurm"))
    check_launcher(0, Ranks(0, 0, 8, 0, "environment"))
    with pytest.raises(LaunchError, match=r"launch.num_nodes = 2 cannot be checked: .* Set LOCAL_WORLD_SIZE for each"):
        check_launcher(2, Ranks(0, 0, 8, 0, "environment"))


def test_a_parent_that_is_hidden_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user's, where /proc is mounted with hidepid."""

    def hidden() -> None:
        raise psutil.AccessDenied(1)

    monkeypatch.setattr(psutil, "Process", lambda: SimpleNamespace(parent=hidden))
    check_launcher(0, RANKS)


def test_only_the_launchers_own_words_count() -> None:
    words = ["/usr/bin/deepspeed", "--num_gpus", "2", "--launcher_args", "-x", "run.py", "--hostfile", "mine"]
    assert launcher_options(words) == words[1:5]
    assert split_words(words[1:5]) == ({"--num_gpus": "2", "--launcher_args": "-x"}, [])
    assert launcher_options(["vim", "deepspeed.md"]) == []


def test_a_hostfile_may_be_named_among_the_overrides() -> None:
    words = ["hostfile=h", "--include", "a:0", "recipe=x", "b=1"]
    options, overrides = {"--include": "a:0", "--hostfile": "h"}, ["recipe=x", "b=1"]
    assert typed_options(words) == (["--hostfile", "h", "--include", "a:0"], options, overrides), (
        "in the order of typing"
    )
    assert typed_options([*words[1:], words[0]]) == (["--include", "a:0", "--hostfile", "h"], options, overrides)
    assert typed_options(["-H", "h", "recipe=x"]) == (["-H", "h"], {"-H": "h"}, ["recipe=x"])


def test_a_hostfile_without_a_name_is_one_that_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`hostfile=$UNSET`: DeepSpeed would train here without a word."""
    assert hostfile_of({}) is None
    assert hostfile_of({"-H": "h"}) == "h"
    monkeypatch.chdir(tmp_path)
    assert main(["doctor", "hostfile="]) == 2
    assert main(["launch", "hostfile=", "recipe=quickstart"]) == 2


@pytest.mark.parametrize(
    ("front_end", "expected_s"),
    [
        ("/venv/bin/python3.11 /venv/bin/deepspeed --num_gpus 2 run.py recipe=x", 300),
        ("/venv/bin/python -m torch.distributed.run run.py recipe=x", 300),
        ("mpirun -np 2 python run.py recipe=x", 300),
        ("/venv/bin/python /venv/bin/toolkit launch recipe=x", 200),  # it may start a run again, days later
        ("bash -c deepspeed", 200),
    ],
)
def test_a_command_is_as_old_as_its_launcher(front_end: str, expected_s: int, started: Start) -> None:
    started(front_end, 1)
    assert age_s() == pytest.approx(expected_s, abs=30)


def test_ranks_that_an_agent_starts_again_are_as_old_as_themselves(
    started: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    started("/venv/bin/torchrun run.py recipe=x", 1)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert age_s() == pytest.approx(100, abs=30)


def test_the_age_of_a_process_that_there_is() -> None:
    code = "import time; time.sleep(1); from toolkit.launch.ancestors import age_s; print(age_s())"
    begun = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert 1 <= float(done.stdout) <= time.monotonic() - begun
