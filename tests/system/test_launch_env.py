"""`launch.env` on real ranks: every value arrives as it was typed, every secret, and none of these is written down."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
from ranks import REPOSITORY, deepspeed, free_port, run
from shared import tiny

RUN = str(REPOSITORY / "tests" / "ranks" / "env_run.py")
LAUNCH = [sys.executable, str(REPOSITORY / "tests" / "ranks" / "faulty_launch.py")]
STRANGE = " {a} ${HOME} 'b' \"c\" 中文 * \\ \\${d} $e `f`"
IN_HYDRA = "' {a} \\${HOME} \\'b\\' \"c\" 中文 * \\ \\\\\\${d} $e `f`'"
SECRETS = {"PLAIN": "nobody-sees-me", "MLFLOW_TRACKING_PASSWORD": "pass \"word' $1"}


def told(folder: Path) -> list[dict[str, str]]:
    """Return the environments of the ranks."""
    files = sorted(folder.glob("rank-*.json"))
    return [json.loads(file.read_text())["environ"] for file in files]


@pytest.mark.ranks
def test_every_rank_has_them(rows_file: Path, tmp_path: Path) -> None:
    """One of them is read by Python when it starts; one secret was sent through ssh, one is in the environment."""
    (tmp_path / "mine.yaml").write_text(
        "defaults: [quickstart]\nlaunch:\n  env:\n    PYTHONHASHSEED: 0\n    OFF: off\n    PLAIN:\n"
        "    MLFLOW_TRACKING_PASSWORD:\n    OMP_NUM_THREADS: 1\nevaluate:\n  prompts: [nobody-sees-me]\n"
    )
    words = tiny(rows_file, tmp_path, "run", "train.max_steps=1", "schedule.warmup_steps=0", "checkpoint.export=false")
    words.remove("evaluate.prompts=[]")
    words = ["recipe=mine.yaml", *words[1:], f"launch.env.STRANGE={IN_HYDRA}", "evaluate.max_new_tokens=2"]
    sent = {"PLAIN": SECRETS["PLAIN"], "NOT_ASKED_FOR": "x"}
    environ = {"LC_TOOLKIT_ENV": json.dumps(sent), "OFF": "on", "OMP_NUM_THREADS": "2", "PYTHONHASHSEED": "random"}
    environ["MLFLOW_TRACKING_PASSWORD"] = SECRETS["MLFLOW_TRACKING_PASSWORD"]
    command = deepspeed(2, "--module", "env_run", *words)
    path = os.pathsep.join([str(Path(RUN).parent), str(REPOSITORY)])
    finished = run(command, cwd=tmp_path, TOLD=str(tmp_path), PYTHONPATH=path, **environ)
    assert finished.code == 0, finished.output[-3000:]
    for rank, given in enumerate(told(tmp_path)):
        assert given["RANK"] == str(rank)
        wanted = {**SECRETS, "STRANGE": STRANGE, "OFF": "off", "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
        assert {name: given[name] for name in wanted} == wanted
        assert not {"LC_TOOLKIT_ENV", "NOT_ASKED_FOR", "PYTHON_TOOLKIT_STARTED_ANEW"} & given.keys()
    started = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in (0, 1)]
    assert [one["random_hashes"] for one in started] == [0, 0], "Python read it"
    assert [one["words"][1:] for one in started] == [words, words]
    (tmp_path / "mine.yaml").unlink()
    assert "    STRANGE: ' {a} \\${HOME} " in (tmp_path / "runs" / "run" / "config.yaml").read_text()
    forms = {form for secret in SECRETS.values() for form in (secret, json.dumps(secret)[1:-1], repr(secret)[1:-1])}
    files = [file for file in tmp_path.rglob("*") if file.is_file() and not file.name.startswith("rank-")]
    files += list((tmp_path / "runs" / "run" / "logs").glob("rank_*.log"))
    assert len(files) > 15
    written = [finished.output, *(file.read_bytes().decode(errors="replace") for file in files)]
    assert [form for form in forms for text in written if form in text] == []


SSH = """#!/bin/sh
printf '%s\\n' "$@" "LC_TOOLKIT_ENV=$LC_TOOLKIT_ENV" "PLAIN=$PLAIN" >> told
exit 3
"""


@pytest.mark.skipif(not shutil.which("pdsh"), reason="pdsh is not installed: apt install pdsh")
def test_secrets_go_through_ssh_unseen(rows_file: Path, tmp_path: Path) -> None:
    """`toolkit launch`, DeepSpeed's front end and pdsh are real; what stands for ssh notes what it is given."""
    (tmp_path / "ssh").write_text(SSH)
    (tmp_path / "ssh").chmod(0o755)
    (tmp_path / "hostfile").write_text("node1 slots=1\nnode2 slots=1\n")
    options = ["--hostfile", "hostfile", "--no_ssh_check", "--master_addr", "node1", "--master_port", str(free_port())]
    words = [*tiny(rows_file, tmp_path, "run"), "launch.env={PLAIN: null, MLFLOW_TRACKING_PASSWORD: null, A: b}"]
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    environ = {"PATH": path, "DS_ACCELERATOR": "cpu", **SECRETS}
    finished = run([*LAUNCH, *options, *words], cwd=tmp_path, SCRIPT="env_run.py", **environ)
    assert finished.code == 1, finished.output[-3000:]
    assert "Variables of the ranks: PLAIN, MLFLOW_TRACKING_PASSWORD, A\n" in finished.output
    lines = (tmp_path / "told").read_text().splitlines()
    sent = [line.partition("=")[2] for line in lines if line.startswith("LC_TOOLKIT_ENV=")]
    assert [json.loads(one) for one in sent] == [SECRETS, SECRETS], "pdsh has started both"
    assert lines.count("SendEnv=LC_TOOLKIT_ENV") == 2
    seen = [line for line in lines if not line.startswith(("LC_TOOLKIT_ENV=", "PLAIN="))]
    assert any("deepspeed.launcher.launch" in line for line in seen)
    assert not [line for line in [*seen, finished.output] for secret in SECRETS.values() if secret in line]


def test_a_secret_that_is_not_set_is_missed_before_anything_starts(rows_file: Path, tmp_path: Path) -> None:
    words = [*tiny(rows_file, tmp_path, "run"), "launch.env.PLAIN=null"]
    finished = run([*LAUNCH, *words], cwd=tmp_path)
    assert finished.code == 2
    assert "LaunchError: launch.env: PLAIN: no value in the recipe, and none in the environment on " in finished.output
    assert "Set it where you type the command:  export NAME=value" in finished.output
    assert "Starts:" not in finished.output
