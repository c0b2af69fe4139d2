"""`toolkit launch` without ranks: words, exit codes, what is worth a restart, and when starting again is pointless."""

import json
import signal
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore

from tests.unit.made_processes import make_processes
from toolkit.cli import main
from toolkit.distributed.meeting import agree_on_store
from toolkit.jobs import launch
from toolkit.launch import deepspeed, environment
from toolkit.launch.environment import Ranks
from toolkit.messages import LaunchError, RepeatedDeath
from toolkit.train import existing_run, run_dir

SPLIT: dict[str, tuple[list[str], list[str]]] = {
    "none": ([], ["recipe=x"]),
    "values": (["--hostfile", "h", "-i", "a@b:0,1", "--master_port=3", "--num_accelerators", "2"], ["recipe=x"]),
    "flags": (["--no_ssh_check", "--bind_cores_to_rank"], ["recipe=x", "--config-dir", "c"]),
    "a value that looks like ours": (["--launcher_args", "a=b"], ["recipe=x"]),
    "a value that looks like an option": (["--launcher_args", "-x A"], ["a.b=c"]),
}


@pytest.mark.parametrize("name", SPLIT)
def test_words(name: str) -> None:
    options, rest = SPLIT[name]
    found, left = deepspeed.split_words([*options, *rest])
    assert left == rest
    assert set(found) == {word.partition("=")[0] for word in options if word.startswith("--") or word == "-i"}
    if name == "values":
        assert found == {"--hostfile": "h", "-i": "a@b:0,1", "--master_port": "3", "--num_accelerators": "2"}


@pytest.mark.parametrize(
    "words",
    [
        ["recipe=x", "--num_gpus", "2", "optim.lr=1", "--config-dir", "c"],
        ["--num_gpus", "2", "recipe=x", "optim.lr=1", "--config-dir", "c"],
        ["recipe=x", "optim.lr=1", "--config-dir", "c", "--num_gpus", "2"],
    ],
)
def test_launcher_options_may_stand_anywhere(words: list[str]) -> None:
    mine, options, rest = deepspeed.typed_options(words)
    assert (mine, options) == (["--num_gpus", "2"], {"--num_gpus": "2"})
    assert rest == ["recipe=x", "optim.lr=1", "--config-dir", "c"]


# Misspelt options, and those of other launchers, of several commands -> what is advised.
MISSPELT = {
    "launch --lr 1e-4 --no_ssh zero1": "--lr. Write optim.lr=1e-4",
    "launch --model glm_tiny zero1": "--model. Write model=glm_tiny",
    "launch --num_gpu 1 zero1": "--num_gpu. Did you mean '--num_gpus'?",
    "launch --num-gpus=1 zero1": "--num-gpus=1. Did you mean '--num_gpus'?",
    "launch --nproc_per_node 8 zero1": "--nproc_per_node. Did you mean '--num_gpus'?",
    "launch --hostfle hosts zero1": "--hostfle. Did you mean '--hostfile'?",
    "launch --no_shh zero1": "--no_shh. Did you mean '--no_ssh'?",
    "sweep --num_gpu 1 zero1 optim.lr=1e-4,1e-5": "--num_gpu. Did you mean '--num_gpus'?",
    "doctor --reprt": "--reprt. Did you mean '--report'?",
    "train --num_gpus 2 zero1": "--num_gpus. The launcher has it: toolkit launch --num_gpus 2 …",
}


@pytest.mark.parametrize("words", MISSPELT)
def test_wrong_options_are_explained(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2
    assert f"unknown option {MISSPELT[words]}\n" in capsys.readouterr().err


@pytest.mark.parametrize(("word", "option"), [("num_gpus=2", "--num_gpus 2"), ("nodes=2", "--num_nodes 2")])
def test_options_of_the_launcher_are_no_keys(word: str, option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", word, "recipe=zero1"]) == 2
    assert capsys.readouterr().err == f"ConfigError: '{word}' is an option here: {option}\n"


@pytest.mark.parametrize("options", [["--num_gpus", "3"], ["hostfile=hosts"], ["--hostfile", "hosts", "-e", "b:1"]])
def test_a_batch_that_does_not_fit_the_ranks_starts_nothing(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "hosts").write_text(f"a slots=1\nb slots={2 + ('-e' in options)}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("toolkit.cli.launch.launch", lambda *_: pytest.fail("it was launched"))
    assert main(["launch", *options, "recipe=quickstart"]) == 2
    assert "batch.global_size = 16 is not a multiple of batch.micro_per_gpu (8) x 3 ranks" in capsys.readouterr().err


HERE: dict[str, Any] = {"folder": "/nowhere"}
# What the ranks told, the launcher's exit code, whether somebody asked for a stop -> exit code, worth a restart
VERDICTS: list[tuple[dict[str, Any], int, bool, int, bool]] = [
    ({**HERE, "code": 1}, 1, False, 1, True),
    ({**HERE, "code": 1}, 247, False, 1, True),
    (HERE, 247, False, 1, True),  # all ranks killed at once
    (HERE, 0, False, 1, True),  # lost launcher, and 0 without DONE
    ({**HERE, "code": 75}, 0, False, 1, True),  # its ranks stopped because it was gone
    ({**HERE, "code": 75}, -signal.SIGKILL, False, 1, True),
    ({**HERE, "code": 75}, 247, False, 1, True),  # a rank was killed, the others were stopped for that
    ({**HERE, "code": 75}, 75, False, 75, False),
    ({**HERE, "code": 75}, 1, False, 75, False),  # the launcher itself got the signal
    ({**HERE, "code": 75}, -signal.SIGTERM, True, 75, False),
    ({**HERE, "code": 124}, 247, False, 124, True),
    ({**HERE, "code": 124}, 1, True, 124, False),
    ({**HERE, "code": 70}, 70, False, 70, False),
    ({**HERE, "code": 74}, 74, False, 74, False),
    ({**HERE, "code": 2}, 2, False, 2, False),
    ({**HERE, "code": 3}, 3, False, 1, True),
    ({"code": 2}, 2, False, 2, False),
    ({"code": 1}, 1, False, 1, False),  # nothing to go on with
    ({}, 2, False, 2, False),  # an option that the launcher does not know
    ({}, 1, False, 1, False),
    ({}, -signal.SIGTERM, True, 75, False),  # stopped before there were ranks
    ({"code": 130}, 130, True, 75, False),
    ({**HERE}, 241, True, 1, False),
]


@pytest.mark.parametrize(("told", "child", "asked", "code", "again"), VERDICTS)
def test_verdict(told: dict[str, Any], child: int, asked: bool, code: int, again: bool) -> None:
    assert launch.exit_code_of_run(told, child, asked) == code
    assert launch.should_restart(code, told, asked) is again


def test_done_decides(tmp_path: Path) -> None:
    (tmp_path / "DONE").touch()
    assert launch.exit_code_of_run({"folder": str(tmp_path)}, 0, False) == 0
    assert launch.exit_code_of_run({"code": 2}, 2, False) == 2, (
        "a finished run that is refused is not this one's success"
    )


def test_the_first_word_counts(tmp_path: Path) -> None:
    environ = {environment.STATUS_VARIABLE: str(environment.create_status_file(tmp_path, restart=3))}
    environment.report_status(environ, code=70)
    environment.report_status(environ, code=1, folder="f")
    told = environment.read_status(environ)
    assert (told["code"], told["folder"], told["restart"]) == (70, "f", 3)
    assert environment.restart_number(environ) == 3
    Path(environ[environment.STATUS_VARIABLE]).unlink()
    environment.report_status(environ, code=1)
    assert not list(tmp_path.iterdir()), "its reader is gone: nothing is made anew"
    assert environment.read_status({}) == {}


def test_who_starts_again_has_to_agree() -> None:
    torchrun, by_deepspeed = Ranks(0, 0, 2, 2, "torchrun"), Ranks(0, 0, 2, 0, "deepspeed")
    deepspeed.check_restarts(0, by_deepspeed, [], {})
    deepspeed.check_restarts(2, torchrun, [], {"TORCHELASTIC_MAX_RESTARTS": "2"})
    for most, given in ((2, "0"), (0, "3")):
        with pytest.raises(
            LaunchError, match=rf"torchrun starts again {given} times. Type `torchrun --max-restarts={most} "
        ):
            deepspeed.check_restarts(most, torchrun, [], {"TORCHELASTIC_MAX_RESTARTS": given})
    for launcher in ("deepspeed", "single", "openmpi", "slurm"):
        with pytest.raises(LaunchError, match=rf"\({launcher}\). Type: toolkit launch 'a=\[b\]'$"):
            deepspeed.check_restarts(1, Ranks(0, 0, 2, 0, launcher), ["a=[b]"], {})


def test_the_command_that_is_shown_has_the_options_that_were_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["/x/python3", "/x/deepspeed", "--num_gpus", "2", "--master_port=7", "run.py", "recipe=x"]
    make_processes(monkeypatch, ["python3", "run.py"], ["python3", "-m", "deepspeed.launcher.launch"], words)
    with pytest.raises(LaunchError, match=r"\. Type: toolkit launch --num_gpus 2 --master_port=7 recipe=x$"):
        deepspeed.check_restarts(1, Ranks(0, 0, 2, 0, "deepspeed"), ["recipe=x"], {})


def write(path: Path, *rows: dict[str, Any]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_two_deaths_without_a_checkpoint_are_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As under torchrun, which starts again whatever we say: every further start is refused."""
    metrics = tmp_path / "metrics.jsonl"
    run_dir.record_start(tmp_path, 0)
    write(metrics, *({"step": step} for step in (1, 2, 3, 4)))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    run_dir.record_start(tmp_path, 2)
    write(metrics, *({"step": step} for step in (1, 2, 3, 4, 5)))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    run_dir.record_start(tmp_path, 4)  # a checkpoint was gained
    for _ in range(2):
        with pytest.raises(RepeatedDeath, match=r"at step 6 and, started again, at step 6, .*last is of step 4"):
            run_dir.record_start(tmp_path, 4)
    rows = [json.loads(line) for line in (tmp_path / "logs" / "starts.jsonl").read_text().splitlines()]
    assert [(row["from_step"], row["restart"], row["reached_step"]) for row in rows] == [
        (0, 0, 0),
        (2, 1, 5),
        (4, 2, 6),
    ]
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT")
    run_dir.record_start(tmp_path, 4)  # somebody typed the command again


def test_the_last_death_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]) -> None:
    """And where another start would end in the same place, that is."""
    monkeypatch.setattr(existing_run, "newest_step", lambda folder: 4)
    write(tmp_path / "metrics.jsonl", {"step": 4})
    run_dir.record_start(tmp_path, 0)
    assert launch._announce_death(tmp_path, 1, 1, 2)
    assert not launch._announce_death(tmp_path, 1, 3, 2)
    assert said[-1] == (
        "The run died at step 5 (exit code 1), after 2 restarts: no more are allowed (run.max_restarts). The same "
        "command resumes it from the checkpoint of step 4."
    )
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    run_dir.record_start(tmp_path, 4)
    with pytest.raises(RepeatedDeath):
        launch._announce_death(tmp_path, 1, 3, 2)


REACHED: list[tuple[int, list[tuple[int, str]], int]] = [
    (0, [], 1),
    (0, [(0, "")], 1),
    (4, [], 5),
    (4, [(4, "step"), (4, "step")], 5),
    (4, [(5, "step"), (4, "checkpoint")], 5),
    (10, [(17, "step")], 17),  # not every step is logged
    (8, [(8, "checkpoint"), (8, "checkpoint")], 8),
]


@pytest.mark.parametrize(("logged", "beats", "expected"), REACHED)
def test_where_a_run_died(logged: int, beats: list[tuple[int, str]], expected: int, tmp_path: Path) -> None:
    if logged:
        write(tmp_path / "metrics.jsonl", {"step": 1}, {"step": logged})
    for rank, (step, phase) in enumerate(beats):
        write(tmp_path / "logs" / f"heartbeat-rank-{rank}.json", {"step": step, "phase": phase})
    assert existing_run.reached_step(tmp_path) == expected


def test_ranks_that_start_again_agree_on_something_new() -> None:
    store, timeout = HashStore(), timedelta(seconds=20)
    seen = set()
    for size in (3, 3, 2):
        found: dict[int, str] = {}

        def meet(rank: int, size: int = size, found: dict[int, str] = found) -> None:
            found[rank] = agree_on_store(store, rank, size, timeout)

        threads = [threading.Thread(target=meet, args=(rank,)) for rank in reversed(range(size))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert len(found) == size
        assert len(set(found.values())) == 1
        seen |= set(found.values())
    assert len(seen) == 3
    with pytest.raises(RuntimeError, match=r"no sign of rank \[1\]"):
        agree_on_store(store, 0, 2, timedelta(seconds=0.2))
