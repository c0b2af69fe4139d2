"""Two ranks under the mpirun of Open MPI and of MPICH: by itself, and under `toolkit launch` with a rank that dies."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
from ranks import REPOSITORY, free_port, run
from shared import faulty_words, losses

HERE = REPOSITORY / "tests" / "ranks"
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
SECRETS = {"PLAIN": "nobody-sees-me", "MLFLOW_TRACKING_PASSWORD": "pass word"}
BOTH = [
    pytest.param(
        kind,
        marks=pytest.mark.skipif(
            not shutil.which(f"mpirun.{kind}"), reason=f"mpirun.{kind} is not installed: apt install {package}"
        ),
    )
    for kind, package in (("openmpi", "openmpi-bin"), ("mpich", "mpich"))
]


@pytest.mark.parametrize("kind", BOTH)
def test_mpirun_by_itself(kind: str, rows_file: Path, tmp_path: Path, straight: list[float]) -> None:
    """Nothing has to be set: the ranks of one machine agree on where to meet, before and after they start anew."""
    words = [*faulty_words(rows_file, tmp_path, "run"), "launch.env={PYTHONHASHSEED: 0, A: b}"]
    command = [f"mpirun.{kind}", "-n", "2", "--oversubscribe"][: 4 if kind == "openmpi" else 3]
    finished = run(
        [*command, sys.executable, str(HERE / "env_run.py"), *words], cwd=tmp_path, TOLD=str(tmp_path), **AS_ROOT
    )
    assert finished.code == 0, finished.output[-4000:]
    assert losses(tmp_path / "runs" / "run") == straight
    assert f", 2 ranks ({kind}). Batch: " in finished.output
    assert ("Note: Open MPI kills the ranks 1 s after" in finished.output) is (kind == "openmpi")
    told = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in (0, 1)]
    assert [one["random_hashes"] for one in told] == [0, 0]
    assert {one["environ"]["MASTER_ADDR"] for one in told} == {"127.0.0.1"}
    assert len({one["environ"]["MASTER_PORT"] for one in told}) == 1
    assert [one["environ"]["LOCAL_RANK"] for one in told] == ["0", "1"]
    assert by(tmp_path / "runs" / "run") == [kind]


@pytest.mark.parametrize("kind", BOTH)
def test_toolkit_launch_with_mpirun(kind: str, rows_file: Path, tmp_path: Path, straight: list[float]) -> None:
    """A killed rank costs a restart, and what its mpirun was told holds no secret; run.dir has a space in its name."""
    (tmp_path / "mpirun").write_text(f'#!/bin/sh\nprintf \'%s\\n\' "$@" >> words\nexec mpirun.{kind} "$@"\n')
    (tmp_path / "mpirun").chmod(0o755)
    (tmp_path / "hostfile").write_text("localhost slots=2\n")
    launch = [sys.executable, str(HERE / "faulty_launch.py"), "--hostfile", "hostfile", "--force_multi"]
    launch += ["--launcher", kind, "--master_port", str(free_port())]
    words = [*faulty_words(rows_file, tmp_path, "run"), "launch.env={PLAIN: null, MLFLOW_TRACKING_PASSWORD: null}"]
    words += ["run.max_restarts=1", f"run.dir={tmp_path}/a b"]
    fault = {"at": "each life", "step": 5, "rank": 1, "do": "kill", "note": str(tmp_path / "note"), "once": True}
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    environ = {**AS_ROOT, **SECRETS, "PATH": path, "FAULT": json.dumps(fault)}
    finished = run([*launch, *words], cwd=tmp_path, **environ)
    assert (tmp_path / "note").read_text() == "each life 1\n", "the fault did not happen"
    assert finished.code == 0, finished.output[-4000:]
    assert losses(tmp_path / "a b" / "run") == straight
    assert by(tmp_path / "a b" / "run") == ["toolkit launch"] * 2
    assert "Restart 1 of 1, from the checkpoint of step " in finished.output
    assert f", 2 ranks ({kind}). Batch: " in finished.output
    assert "Note: Open MPI" not in finished.output
    told = (tmp_path / "words").read_text().splitlines()
    assert told.count("-n") == 2, "it was started twice"
    assert ("none" in told) is (kind == "openmpi"), "--bind-to none"
    assert not [line for line in [*told, finished.output] for secret in SECRETS.values() if secret in line]
    written = [file.read_bytes() for file in (tmp_path / "a b").rglob("*") if file.is_file()]
    assert not [secret for secret in SECRETS.values() for content in written if secret.encode() in content]


def by(folder: Path) -> list[str]:
    """Return who started each part of a run."""
    return [json.loads(line)["by"] for line in (folder / "logs" / "starts.jsonl").read_text().splitlines()]
