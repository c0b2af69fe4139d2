"""What DeepSpeed's launcher was asked for, on a made-up process tree."""

import base64
import json
import os
import time
from pathlib import Path

import pytest

from toolkit.cli import main
from toolkit.errors import LaunchError
from toolkit.launch.deepspeed import age_s, check_launcher, deepspeed_options, hostfile_of, typed_options
from toolkit.launch.environment import Ranks

RANKS = Ranks(0, 0, 2, 0, "deepspeed")
TWO_HOSTS = "a slots=1\nb slots=1\n"


def tree(folder: Path, front_end: str, nodes: int) -> Path:
    """Make a /proc with front end (10), launch.py (20) and a rank (30); the front end works in folder/work."""
    world = base64.urlsafe_b64encode(json.dumps({f"n{i}": [0] for i in range(nodes)}).encode()).decode()
    launch = f"/bin/python -u -m deepspeed.launcher.launch --world_info={world} --master_addr=x run.py recipe=x"
    (folder / "work").mkdir(exist_ok=True)
    for pid, parent, command in ((10, 1, front_end), (20, 10, launch), (30, 20, "python -u run.py --local_rank=0")):
        place = folder / "proc" / str(pid)
        place.mkdir(parents=True)
        (place / "status").write_text(f"Name:\tx\nPPid:\t{parent}\n")
        (place / "cmdline").write_bytes(b"\0".join(word.encode() for word in command.split()) + b"\0")
        (place / "cwd").symlink_to(folder / "work")
    return folder / "proc"


def refused(folder: Path, front_end: str, nodes: int, num_nodes: int = 0) -> str:
    with pytest.raises(LaunchError) as caught:
        check_launcher(num_nodes, RANKS, tree(folder, front_end, nodes), "30", is_here="a".__eq__)
    return str(caught.value)


@pytest.mark.parametrize("option", ["--hostfile hosts", "--hostfile=hosts", "-H hosts"])
def test_missing_hostfile(option: str, tmp_path: Path) -> None:
    message = refused(tmp_path, f"/venv/bin/python /venv/bin/deepspeed {option} run.py recipe=x", 1)
    assert message.startswith(f"the hostfile {tmp_path}/work/hosts cannot be read: No such file")


def test_malformed_hostfile(tmp_path: Path) -> None:
    proc_command = "deepspeed --hostfile hosts run.py"
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "hosts").write_text("a slots=1\nb 8\n")
    assert refused(tmp_path, proc_command, 1).startswith(f"{tmp_path}/work/hosts:2: 'b 8': write")


def test_fewer_machines_than_the_hostfile(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "hosts").write_text(TWO_HOSTS)
    message = refused(tmp_path, "deepspeed --hostfile hosts run.py", 1)
    assert message == "the hostfile hosts names 2 machines (a, b), but 1 were started."


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
def test_what_fits_passes(front_end: str, nodes: int, tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "hosts").write_text(TWO_HOSTS)
    check_launcher(0, RANKS, tree(tmp_path, front_end, nodes), "30", is_here=lambda host: True)


def test_another_machine_alone_would_be_forgotten(tmp_path: Path) -> None:
    """DeepSpeed 0.19.8 trains on the machine where it was typed if one host is left, whatever its name."""
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "hosts").write_text(TWO_HOSTS)
    message = refused(tmp_path, "deepspeed --hostfile hosts --include b run.py", 1)
    assert message.startswith("the hostfile leaves b alone, which is not this machine")


def test_ranks_that_are_not_bound_to_cores(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "hosts").write_text(TWO_HOSTS)
    front_end = "deepspeed --hostfile hosts --launcher openmpi --bind_cores_to_rank run.py"
    assert refused(tmp_path, front_end, 2).startswith("--bind_cores_to_rank: DeepSpeed does not hand this on")


def test_cores_without_binding(tmp_path: Path) -> None:
    message = refused(tmp_path, "deepspeed --bind_core_list 0-1 run.py", 1)
    assert message == "--bind_core_list does nothing alone: add --bind_cores_to_rank."


def test_num_nodes(tmp_path: Path) -> None:
    message = refused(tmp_path, "deepspeed run.py", 1, num_nodes=4)
    assert message.startswith("launch.num_nodes = 4, but 1 machines were started.")
    check_launcher(2, Ranks(0, 0, 8, 4, "torchrun"), Path("/nosuch"), "30")
    with pytest.raises(LaunchError):
        check_launcher(3, Ranks(0, 0, 8, 4, "torchrun"), Path("/nosuch"), "30")


def test_no_proc_file_system_is_no_error() -> None:
    check_launcher(0, RANKS, Path("/nosuch"), "30")


def test_only_the_launchers_own_words_count() -> None:
    words = ["/usr/bin/deepspeed", "--num_gpus", "2", "--launcher_args", "-x", "run.py", "--hostfile", "mine"]
    assert deepspeed_options(words) == {"--num_gpus": "2", "--launcher_args": "-x"}
    assert deepspeed_options(["vim", "deepspeed.md"]) == {}


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
def test_a_command_is_as_old_as_its_launcher(front_end: str, expected_s: int, tmp_path: Path) -> None:
    proc = tree(tmp_path, front_end, 1)
    now, ticks = time.clock_gettime(time.CLOCK_BOOTTIME), os.sysconf("SC_CLK_TCK")
    for pid, age in ((10, 300), (20, 200), (30, 100)):
        fields = ["S", *["0"] * 18, str(int((now - age) * ticks)), "0"]
        (proc / str(pid) / "stat").write_text(f"{pid} (a (name) of b) {' '.join(fields)}\n")
    assert age_s(proc, "30") == pytest.approx(expected_s, abs=30)


def test_ranks_that_an_agent_starts_again_are_as_old_as_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proc = tree(tmp_path, "/venv/bin/torchrun run.py recipe=x", 1)
    now, ticks = time.clock_gettime(time.CLOCK_BOOTTIME), os.sysconf("SC_CLK_TCK")
    (proc / "30" / "stat").write_text(f"30 (python) S {'0 ' * 18}{int((now - 100) * ticks)} 0\n")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert age_s(proc, "30") == pytest.approx(100, abs=30)
    assert age_s(tmp_path / "nowhere", "30") == 0
