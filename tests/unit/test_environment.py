"""Who this process is, from every launcher's variables."""

import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from toolkit.launch import deepspeed, environment
from toolkit.launch.environment import (
    Ranks,
    check_port,
    detect,
    set_interface,
    set_rank_variables,
    strip_launcher_arguments,
)
from toolkit.messages import LaunchError

TORCH = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4"}
SRUN = {
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "8",
    "SLURM_NTASKS_PER_NODE": "4",
    "SLURM_STEP_NUM_TASKS": "8",
}
STARTED_BY = {
    "deepspeed": (TORCH | {"CROSS_SIZE": "2"}, Ranks(3, 1, 4, 0, "deepspeed")),
    "torchrun": (
        TORCH | {"LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"},
        Ranks(3, 1, 4, 2, "torchrun"),
    ),
    "openmpi": (
        {
            "OMPI_COMM_WORLD_RANK": "1",
            "OMPI_COMM_WORLD_LOCAL_RANK": "1",
            "OMPI_COMM_WORLD_SIZE": "2",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        },
        Ranks(1, 1, 2, 2, "openmpi"),
    ),
    "mpich": ({"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0"}, Ranks(1, 0, 2, 0, "mpich")),
    "mpich through DeepSpeed, which sets RANK beside it": (
        TORCH | {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"},
        Ranks(3, 1, 4, 2, "mpich"),
    ),
    "RANK set by hand": (TORCH | {"PMI_RANK": "0"}, Ranks(3, 1, 4, 0, "environment")),
    "slurm": (SRUN, Ranks(5, 1, 8, 4, "slurm")),
    "slurm with PMI-2": (SRUN | {"PMI_RANK": "5", "PMI_SIZE": "8"}, Ranks(5, 1, 8, 4, "slurm")),
    "a shell of srun with PMI-2": (
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1", "PMI_RANK": "0", "PMI_SIZE": "1"},
        Ranks(0, 0, 1, 1, "single"),
    ),
    "a batch script": (
        {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "1"},
        Ranks(0, 0, 1, 1, "single"),
    ),
    "a shell inside a Slurm allocation": (
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "1"},
        Ranks(0, 0, 1, 1, "single"),
    ),
    "python": ({}, Ranks(0, 0, 1, 1, "single")),
}


@pytest.mark.parametrize("name", STARTED_BY)
def test_detect(name: str) -> None:
    environ, expected = STARTED_BY[name]
    assert detect(environ) == expected


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RANK": "4", "LOCAL_RANK": "0", "WORLD_SIZE": "4"}, r"do not fit together: RANK=4, WORLD_SIZE=4"),
        ({"RANK": "x", "LOCAL_RANK": "0", "WORLD_SIZE": "4"}, r"RANK=x is not a number"),
        ({"RANK": "0", "LOCAL_RANK": "0"}, r"WORLD_SIZE is not set although"),
    ],
)
def test_variables_that_do_not_fit(environ: dict[str, str], message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        detect(environ)


@pytest.mark.parametrize("size", ["", "1"])
def test_one_of_several_never_trains_alone(size: str) -> None:
    environ = {"WORLD_SIZE": "2"}
    with pytest.raises(LaunchError, match=r"WORLD_SIZE=2, but RANK is not set.*deepspeed run\.py .*unset WORLD_SIZE"):
        set_rank_variables(detect(environ), environ)
    set_rank_variables(detect({}), {"WORLD_SIZE": size})


def test_apply_gives_a_single_process_a_free_port() -> None:
    environ: dict[str, str] = {}
    set_rank_variables(detect(environ), environ)
    assert (environ["RANK"], environ["WORLD_SIZE"], environ["MASTER_ADDR"]) == ("0", "1", "127.0.0.1")
    assert int(environ["MASTER_PORT"]) > 1023
    assert "OMP_NUM_THREADS" not in environ


def test_apply_shares_the_cores_and_asks_for_an_address() -> None:
    environ = {"MASTER_ADDR": "a", "MASTER_PORT": "1"}
    set_rank_variables(Ranks(0, 0, 1000, 1000, "torchrun"), environ)
    assert environ["OMP_NUM_THREADS"] == "1"
    with pytest.raises(LaunchError, match="4 ranks need MASTER_ADDR"):
        set_rank_variables(Ranks(0, 0, 4, 2, "openmpi"), {})


def test_ranks_of_one_mpirun_choose_the_same_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """Started by it, or by a shell of their own, each in a process without a word to the other."""
    code = "import os; from toolkit.launch.environment import meeting_port; print(meeting_port('OMPI_COMM_WORLD_RANK'))"
    python = [sys.executable, "-c", code]
    asked = [python, ["sh", "-c", f"{shlex.join(python)}; true"]]

    def ports(environ: dict[str, str]) -> set[int]:
        done = [subprocess.run(words, capture_output=True, text=True, env=environ, timeout=60) for words in asked]
        return {int(one.stdout) for one in done}

    environ = {**os.environ, "OMPI_COMM_WORLD_RANK": "1"}
    [port] = ports(environ)
    assert port == 10_000 + os.getpid() % 20_000
    monkeypatch.setattr(environment, "meeting_port", lambda variable: {"PMI_RANK": port}[variable])
    environ = {}
    set_rank_variables(Ranks(0, 0, 2, 2, "mpich"), environ)
    assert (environ["MASTER_ADDR"], environ["MASTER_PORT"]) == ("127.0.0.1", str(port))


def test_what_open_mpi_does_to_ranks_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3})
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    said = environment.mpi_notes("openmpi", 2, {})
    assert [line.partition(",")[0] for line in said] == [
        "Note: Open MPI kills the ranks 1 s after a Ctrl-C or SIGTERM",
        "Note: Open MPI lets this rank use 1 of 64 cores",
    ]
    assert len(environment.mpi_notes("openmpi", 2, {"OMPI_MCA_hwloc_base_binding_policy": "core"})) == 1, (
        "the user's choice"
    )
    assert len(environment.mpi_notes("openmpi", 64, {})) == 1, "its share"
    assert environment.mpi_notes("mpich", 2, {}) == []
    environ = {"MASTER_ADDR": "a", "MASTER_PORT": "1"}
    set_rank_variables(Ranks(0, 0, 2, 2, "openmpi"), environ)
    assert environ["OMP_NUM_THREADS"] == "1", "32 threads would fight for one core"


def test_options_for_open_mpi() -> None:
    """What is missing is added; the user's own stay, and win."""
    assert deepspeed.mpi_launcher_args({"localhost": [0]}, {}, ["-x", "A"]) == [
        "--launcher_args",
        "--bind-to none -x MASTER_ADDR=127.0.0.1 -x MASTER_PORT=29500 -x A",
    ]
    options = {"--launcher_args": "--bind-to core -x 'B=c d' -x MASTER_ADDR=x", "--master_port": "7"}
    assert deepspeed.mpi_launcher_args({"n1.invalid": [0], "n2.invalid": [0]}, options, []) == [
        "--launcher_args",
        "--bind-to core -x 'B=c d' -x MASTER_ADDR=x -x MASTER_PORT=7",
    ]
    [_, words] = deepspeed.mpi_launcher_args({"n1.invalid": [0], "localhost": [0]}, {}, [])
    assert "-x MASTER_ADDR=n1.invalid " in words


def test_the_other_mpirun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    for text, right, wrong in (
        ("HYDRA build details:", "mpich", "openmpi"),
        ("mpirun (Open MPI) 4", "openmpi", "mpich"),
    ):
        (tmp_path / "mpirun").write_text(f"#!/bin/sh\necho '{text}'\n")
        (tmp_path / "mpirun").chmod(0o755)
        deepspeed.check_mpirun(right)
        with pytest.raises(LaunchError, match=rf"--launcher {wrong} starts the `mpirun` .* is another one: "):
            deepspeed.check_mpirun(wrong)


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        (["--local_rank=3", "recipe=x"], ["recipe=x"]),
        (["--local_rank", "3", "recipe=x"], ["recipe=x"]),
        (["--local-rank=3", "recipe=x", "--cfg", "job"], ["recipe=x", "--cfg", "job"]),
    ],
)
def test_local_rank_is_swallowed(words: list[str], kept: list[str]) -> None:
    assert strip_launcher_arguments(words) == kept


@pytest.mark.parametrize(
    "words",
    [["--deepspeed", "--deepspeed_config", "my.json"], ["--deepspeed_config=my.json"], ["--deepspeed", "my.json"]],
)
def test_the_old_habit_is_told_our_key(words: list[str]) -> None:
    with pytest.raises(
        LaunchError, match=r"DeepSpeed is always on here\. Take your JSON with deepspeed_json=my\.json\."
    ):
        strip_launcher_arguments(words)


def test_interface() -> None:
    environ: dict[str, str] = {}
    set_interface("lo", environ)
    assert environ == {"NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}
    with pytest.raises(
        LaunchError, match=r"distributed\.interface = eth99: .* has no such network interface, only .*lo"
    ):
        set_interface("eth99", environ)


def test_port() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        environ = {"RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        with pytest.raises(LaunchError, match=rf"port {port} on 127\.0\.0\.1 is taken.*--master_port N"):
            check_port(environ)
        check_port(environ | {"RANK": "1"})
        check_port(environ | {"TORCHELASTIC_USE_AGENT_STORE": "True"})
        # A connection that was just closed leaves the port in TIME_WAIT, which is not taken.
        with socket.create_connection(("127.0.0.1", int(port))):
            pass
    check_port(environ)


def test_programs_beside_this_python_are_found() -> None:
    """A shell that ssh starts on another machine knows no virtual environment, and DeepSpeed needs its ninja."""
    scripts = str(Path(sys.executable).parent)
    ranks = Ranks(rank=0, local_rank=0, world_size=1, local_world_size=1, launcher="single")
    environ = {"PATH": "/usr/bin:/bin"}
    set_rank_variables(ranks, environ)
    assert environ["PATH"] == f"{scripts}:/usr/bin:/bin"
    set_rank_variables(ranks, environ)
    assert environ["PATH"] == f"{scripts}:/usr/bin:/bin"
