"""Which GPUs take part: the same as DeepSpeed's launcher takes, and what it would do in silence refused."""

import argparse
import os
import socket
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from toolkit.cli import main
from toolkit.launch import deepspeed, hostfile, variables
from toolkit.launch.hostfile import check_visible_devices, is_here, rank_table, select_gpus
from toolkit.messages import LaunchError

HOSTS = {"node1": 4, "node2": 4, "gpu-3": 2}
WRONG = {
    ("--include", "gpu3"): "--include gpu3: the hostfile has no gpu3. Did you mean 'gpu-3'?",
    ("--include", "node1:4"): "--include node1:4: node1 has no GPU 4; its slots are 0 to 3. Write HOST or HOST:0,1.",
    ("--exclude", "node1:a"): "--exclude node1:a: node1 has no GPU a; its slots are 0 to 3. Write HOST or HOST:0,1.",
    ("--exclude", "node1@node2@gpu-3"): "the launcher's options leave no machine of the hostfile.",
    ("--num_nodes", "4"): "--num_nodes 4, but the hostfile names 3: node1, node2, gpu-3.",
    ("--num_nodes", "0"): "--num_nodes 0: write a positive whole number.",
    ("--num_gpus", "3"): "--num_gpus 3, but gpu-3 has 2 slots.",
}


@pytest.mark.parametrize("option", WRONG)
def test_what_deepspeed_would_misread(option: tuple[str, str]) -> None:
    with pytest.raises(LaunchError) as caught:
        select_gpus(HOSTS, dict([option]))
    assert str(caught.value) == WRONG[option]


def test_contradictions() -> None:
    for options in ({"--include": "node1", "--exclude": "node2"}, {"-i": "node1", "--num_gpus": "1"}):
        with pytest.raises(LaunchError, match="give one of --include"):
            select_gpus(HOSTS, options)


def parts() -> st.SearchStrategy[str]:
    """Node specifications that are right for HOSTS."""
    one = st.sampled_from(sorted(HOSTS)).flatmap(
        lambda host: st.lists(st.integers(0, HOSTS[host] - 1), max_size=4).map(
            lambda gpus: host + (":" + ",".join(map(str, gpus)) if gpus else "")
        )
    )
    return st.lists(one, min_size=1, max_size=4).map("@".join)


@settings(deadline=None)  # DeepSpeed is imported in the first round
@given(parts(), st.sampled_from(["--include", "--exclude"]))
def test_filters_are_deepspeeds(specification: str, option: str) -> None:
    from deepspeed.launcher.runner import parse_inclusion_exclusion

    include, exclude = (specification, "") if option == "--include" else ("", specification)
    theirs = dict(parse_inclusion_exclusion(HOSTS, include, exclude))
    try:
        ours = select_gpus(HOSTS, {option: specification})
    except LaunchError:
        ours = {}
    assert list(ours.items()) == list(theirs.items())


@pytest.mark.parametrize(("nodes", "gpus"), [(-1, -1), (2, -1), (-1, 2), (1, 3), (3, 1)])
def test_numbers_are_deepspeeds(nodes: int, gpus: int) -> None:
    from deepspeed.launcher.runner import apply_num_nodes_and_gpus, parse_inclusion_exclusion

    theirs = apply_num_nodes_and_gpus(parse_inclusion_exclusion(HOSTS, "", ""), nodes, gpus)
    assert select_gpus(HOSTS, {"--num_nodes": str(nodes), "--num_gpus": str(gpus)}) == dict(theirs)


def test_ranks_are_counted_in_the_order_of_the_hostfile() -> None:
    resources = select_gpus(HOSTS, {"--include": "gpu-3@node1:0,2,3"})
    assert rank_table(resources) == [("node1", "0,2-3", "0-2"), ("gpu-3", "0-1", "3-4")]


def test_a_choice_that_would_be_written_over() -> None:
    check_visible_devices({"a": [0]}, {"CUDA_VISIBLE_DEVICES": ""})
    with pytest.raises(LaunchError, match=r"CUDA_VISIBLE_DEVICES=2,3 has no effect .* --include a:2,3@b:2,3\."):
        check_visible_devices({"a": [0], "b": [0]}, {"CUDA_VISIBLE_DEVICES": "2,3"})


def test_names() -> None:
    assert is_here("localhost") and is_here(socket.gethostname()) and is_here("127.0.1.1")
    assert not is_here("nosuch.invalid")


@pytest.mark.parametrize(
    ("nodes", "hosts"),
    [
        ("login1", ["login1"]),
        ("gpu[01-03,07],login1", ["gpu01", "gpu02", "gpu03", "gpu07", "login1"]),
        ("r[1-2]n[09-10]x", ["r1n09x", "r1n10x", "r2n09x", "r2n10x"]),
        ("a[8-11]", ["a8", "a9", "a10", "a11"]),
    ],
)
def test_slurms_nodes(nodes: str, hosts: list[str]) -> None:
    assert hostfile.expand_nodes(nodes) == hosts


@pytest.mark.parametrize(
    "nodes", ["", "gpu[1-", "gpu[]", "gpu[3-1]", "gpu[a-b]", "a b", "a,,b", "a,", "a[1-99999999]", "a[1-999][1-999]"]
)
def test_what_is_no_list_of_nodes(nodes: str) -> None:
    with pytest.raises(LaunchError, match="is no list of nodes"):
        hostfile.expand_nodes(nodes)


def test_a_hostfile_from_slurm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "hosts"
    assert main(["hostfile", f"output={file}"]) == 2
    assert "this is no job of Slurm, SkyPilot or dstack" in capsys.readouterr().err
    monkeypatch.setenv("SLURM_JOB_NODELIST", "gpu[1-2]")
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "8")
    assert main(["hostfile", f"output={file}"]) == 0
    assert file.read_text() == "gpu1 slots=8\ngpu2 slots=8\n"
    assert main(["hostfile", f"output={file}", "slots=4"]) == 2
    assert "exists already" in capsys.readouterr().err
    assert file.read_text() == "gpu1 slots=8\ngpu2 slots=8\n"


def test_files_with_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, here = tmp_path / "home", tmp_path / "here"
    for folder in (home, here):
        folder.mkdir()
    monkeypatch.setenv("HOME", str(home))
    assert variables.variables_of_files(here) == {}
    file = here / ".deepspeed_env"
    file.write_text("NCCL_DEBUG=INFO\nA=b=c\n")
    file.chmod(0o644)
    assert variables.variables_of_files(here) == {file: {"NCCL_DEBUG": "INFO", "A": "b=c"}}
    file.chmod(0o664)
    with pytest.raises(LaunchError, match="others than you can write it"):
        variables.variables_of_files(here)
    file.chmod(0o644)
    monkeypatch.setattr(os, "getuid", lambda: file.stat().st_uid + 1000)
    if file.stat().st_uid:
        with pytest.raises(LaunchError, match="others than you can write it"):
            variables.variables_of_files(here)
    monkeypatch.undo()
    monkeypatch.setenv("HOME", str(home))
    file.write_text("A=1\n\n# note\n")
    with pytest.raises(LaunchError, match=r"deepspeed_env:2: DeepSpeed wants NAME=value in every line"):
        variables.variables_of_files(here)
    file.write_text("LD_LIBRARY_PATH=/x y:$LD_LIBRARY_PATH:${B}\nA=it's; true & (b)\n")
    assert variables.variables_of_files(here) == {
        file: {"LD_LIBRARY_PATH": "/x y:$LD_LIBRARY_PATH:${B}", "A": "it's; true & (b)"}
    }
    for value in ("$(touch x)", "`touch x`", 'a"; touch x; "', "a\\", "${A:-$(touch x)}", "a\x0bB=$(touch x)"):
        file.write_text(f"B=1\nA={value}\n")
        with pytest.raises(LaunchError, match=r"deepspeed_env:2: the shells of all nodes would run"):
            variables.variables_of_files(here)


def test_the_launchers_program_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = {"good1": [0], "good2": [0]}
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match="several nodes need pdsh, which is not installed here"):
        deepspeed.check_backend_program(hosts, {})
    deepspeed.check_backend_program({"good1": [0]}, {})
    (tmp_path / "pdsh").write_text("#!/bin/sh\n")
    (tmp_path / "pdsh").chmod(0o755)
    deepspeed.check_backend_program(hosts, {})


def test_ranks_that_would_not_be_bound_to_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through DeepSpeed's own runner: what is refused is what it drops."""
    from deepspeed.launcher.multinode_runner import PDSHRunner
    from deepspeed.launcher.runner import encode_world_info, parse_args

    here, both, bind = {"a": [0]}, {"a": [0], "b": [0]}, {"--bind_cores_to_rank": ""}
    arguments = parse_args(["--bind_cores_to_rank", "--bind_core_list=0-1", "--master_addr=a", "run.py"])
    command, *_ = PDSHRunner(arguments, encode_world_info(both)).get_cmd({}, both)
    assert "deepspeed.launcher.launch" in command and "bind" not in " ".join(command)

    monkeypatch.setenv("PATH", str(tmp_path))
    for hosts in ({}, here):
        with pytest.raises(LaunchError, match="--bind_cores_to_rank needs numactl, which is not installed here:  apt"):
            deepspeed.check_binding(hosts, bind)
    (tmp_path / "numactl").write_text("#!/bin/sh\n")
    (tmp_path / "numactl").chmod(0o755)
    for hosts, options in ((both, {}), ({}, bind), (here, bind), (both, {**bind, "--no_ssh": ""})):
        deepspeed.check_binding(hosts, options)
    deepspeed.check_binding(both, {**bind, "--bind_core_list": "0-1", "--launcher": "impi"})
    for options, launcher in (({}, "pdsh"), ({"--launcher": "OpenMPI"}, "openmpi")):
        with pytest.raises(LaunchError, match=f"nodes that it starts through {launcher}; their ranks"):
            deepspeed.check_binding(both, {**bind, **options})
    with pytest.raises(LaunchError, match="through pdsh"):
        deepspeed.check_binding(here, {**bind, "--force_multi": ""})
    with pytest.raises(LaunchError, match="--bind_core_list does nothing alone: add --bind_cores_to_rank"):
        deepspeed.check_binding({}, {"--bind_core_list": "0-1"})


def test_this_machine_alone_needs_no_ssh() -> None:
    assert deepspeed.port_of_one_node({"here": [0]}, {"--master_port": "1"}) == {}
    assert deepspeed.port_of_one_node({"here": [0], "there": [0]}, {}) == {}
    for hosts in ({}, {"here": [0]}):
        assert 1024 < int(deepspeed.port_of_one_node(hosts, {})["--master_port"]) < 65536
    assert deepspeed.options_without_ssh({"here": [0]}, {}) == ["--no_ssh_check", "--master_addr", "127.0.0.1"]
    assert deepspeed.options_without_ssh({"here": [0]}, {"--master_addr": "10.0.0.1"}) == ["--no_ssh_check"]
    assert deepspeed.options_without_ssh({"here": [0]}, {"--force_multi": ""}) == []
    assert deepspeed.options_without_ssh({"here": [0], "there": [0]}, {}) == []
    mpirun = {"--force_multi": "", "--launcher": "mpich"}
    assert deepspeed.options_without_ssh({"localhost": [0]}, mpirun) == ["--no_ssh_check", "--master_addr", "127.0.0.1"]
    assert deepspeed.options_without_ssh({"localhost": [0], "there.invalid": [0]}, mpirun) == []


WORDS = [
    "data.sources=[{path: a b.jsonl, format: x},{path:c}]",
    "data.sources=[{path:a,format:b}]",
    "evaluate.prompts=['it costs $5 now `id` \\\\ \"quoted\" 中文']",
    "a=${oc.env:HOME}",
    "b=*.py",
    "c='x'",
    "d=1;id",
    "plain=1",
]


def test_words_arrive_as_they_are(tmp_path: Path) -> None:
    """Through DeepSpeed's own preparation, and a shell, as pdsh uses one on each machine."""
    from deepspeed.launcher.multinode_runner import PDSHRunner

    hosts = {"a": [0], "b": [0]}
    runner = PDSHRunner.__new__(PDSHRunner)
    runner.args = argparse.Namespace(user_args=deepspeed.quoted_words(hosts, {}, WORDS))
    (tmp_path / "x.py").touch()
    line = " ".join(runner.parse_user_args())
    done = subprocess.run(
        ["bash", "-c", f"printf '%s\\0' {line}"], capture_output=True, text=True, cwd=tmp_path, timeout=20
    )
    assert done.stdout.split("\0")[:-1] == WORDS
    assert deepspeed.quoted_words({"a": [0]}, {}, WORDS) == WORDS
    assert deepspeed.quoted_words(hosts, {"--launcher": "openmpi"}, WORDS) == WORDS
