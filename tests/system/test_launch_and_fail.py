"""Every launcher with the same command line; and how runs end that cannot go on."""

import json
import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest
from ranks import BIN, REPOSITORY, deepspeed, forked, free_port, kill_session, run, start
from shared import losses, tiny

RUN = str(REPOSITORY / "run.py")


def words(rows_file: Path, folder: Path, name: str, *overrides: str) -> list[str]:
    """Return run.py with a tiny run of three steps."""
    return [RUN, *tiny(rows_file, folder, name, "train.max_steps=3", "checkpoint.export=true", *overrides)]


def lines_of_ours(output: str) -> list[str]:
    """Return the lines that are not the DeepSpeed or torch launcher's."""
    return [line for line in output.splitlines() if line.strip() and not re.match(r"\[\d{4}-|\[rank\d", line)]


def last_line_of_ours(output: str) -> str:
    """Return the last line that is not the DeepSpeed or torch launcher's."""
    return lines_of_ours(output)[-1]


@pytest.mark.ranks
def test_deepspeed_torchrun_and_python_train_the_same(rows_file: Path, tmp_path: Path) -> None:
    torchrun = [str(BIN / "torchrun"), "--nproc-per-node", "2", "--master-port", str(free_port())]
    for name, command in (
        ("by-deepspeed", deepspeed(2)),
        ("by-torchrun", torchrun),
        ("by-python", [sys.executable]),
    ):
        finished = run([*command, *words(rows_file, tmp_path, name)], cwd=tmp_path)
        assert finished.code == 0, finished.output[-4000:]
        assert f"toolkit generate runs/{name} " in last_line_of_ours(finished.output)
        assert (tmp_path / "runs" / name / "DONE").exists()
    by_deepspeed = losses(tmp_path / "runs" / "by-deepspeed")
    assert by_deepspeed == pytest.approx(losses(tmp_path / "runs" / "by-torchrun"), abs=1e-6)
    assert by_deepspeed == pytest.approx(losses(tmp_path / "runs" / "by-python"), abs=1e-5)
    leftovers = [
        path
        for path in Path("/dev/shm").glob("deepspeed_allreduce_buffer_*")
        if path.stat().st_mtime > time.time() - 60
    ]
    assert not leftovers

    # metrics.jsonl has the promised names.
    metrics = tmp_path / "runs" / "by-python" / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    logged = [row for row in rows if "loss" in row]
    assert [row["step"] for row in logged] == [1, 2, 3]
    assert all({"step", "loss", "lr", "grad_norm", "tokens_per_s", "skipped_steps"} <= set(row) for row in logged)
    assert all({"eval_loss", "eval_perplexity"} <= set(row) for row in rows if "loss" not in row)

    # The same name once more: nothing is overwritten.
    before = metrics.read_bytes()
    again = run(forked(0, *words(rows_file, tmp_path, "by-python")), cwd=tmp_path)
    assert again.code == 2
    assert "has finished already (DONE)" in last_line_of_ours(again.output)
    assert "Traceback" not in again.output
    assert metrics.read_bytes() == before

    # The export answers through the command that was printed.
    command = ["toolkit", "generate", f"{tmp_path}/runs/by-python", "prompt=red"]
    answered = run(forked(0, "--module", *command, "max_new_tokens=4"), cwd=tmp_path)
    assert answered.code == 0, answered.output


def test_a_user_mistake_is_told_once_with_exit_code_2(rows_file: Path, tmp_path: Path) -> None:
    finished = run(deepspeed(2, *words(rows_file, tmp_path, "typo", "zero.stag=3")), cwd=tmp_path)
    assert finished.code == 2
    told = [line for line in finished.output.splitlines() if "unknown key 'zero.stag'" in line]
    assert told == ["ConfigError: command line: unknown key 'zero.stag'. Did you mean 'zero.stage'?"]
    assert "Traceback" not in finished.output
    assert not (tmp_path / "runs").exists()


@pytest.mark.ranks
def test_a_failing_rank_ends_the_others_and_has_the_last_word(rows_file: Path, tmp_path: Path) -> None:
    sabotage = tmp_path / "sitecustomize.py"
    sabotage.write_text(
        "import os, sys\n"
        "if os.environ.get('RANK') == '1':\n"
        "    import importlib.abc\n"
        "    class Finder(importlib.abc.MetaPathFinder):\n"
        "        def find_spec(self, name, path, target=None):\n"
        "            if name == 'toolkit.train.loop':\n"
        "                import toolkit.train.step as step\n"
        "                real, calls = step.train_step, []\n"
        "                def failing(*arguments, **options):\n"
        "                    calls.append(1)\n"
        "                    if len(calls) == 2:\n"
        "                        open('failed', 'w').close()\n"
        "                        raise ZeroDivisionError('broken on purpose')\n"
        "                    return real(*arguments, **options)\n"
        "                step.train_step = failing\n"
        "    sys.meta_path.insert(0, Finder())\n"
    )
    finished = run(
        deepspeed(2, *words(rows_file, tmp_path, "broken")),
        cwd=tmp_path,
        PYTHONPATH=f"{tmp_path}{os.pathsep}{REPOSITORY}",
    )
    assert finished.code != 0
    *_, error, advice = lines_of_ours(finished.output)
    assert "ZeroDivisionError (rank 1 on " in error and "broken on purpose" in error
    assert advice.startswith("What to do: docs/debugging.md. ")
    assert finished.output.count("Traceback") == 1
    assert time.time() - (tmp_path / "failed").stat().st_mtime < 60
    folder = tmp_path / "runs" / "broken"
    assert "broken on purpose" in (folder / "FAILED").read_text()
    assert not (folder / "DONE").exists()


@pytest.mark.fault("P1")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_leaves_a_clear_state(number: signal.Signals, rows_file: Path, tmp_path: Path) -> None:
    command = words(rows_file, tmp_path, "stopped", "train.max_steps=100000", "train.log_every=5")
    process = start(deepspeed(2, *command), cwd=tmp_path)
    metrics = tmp_path / "runs" / "stopped" / "metrics.jsonl"
    try:
        for _ in range(600):
            if metrics.exists() and len(metrics.read_text().splitlines()) > 3:
                break
            time.sleep(0.2)
        # A terminal's Ctrl-C reaches the whole foreground group; `kill` of a launcher reaches only that process.
        if number is signal.SIGINT:
            os.killpg(process.pid, number)
        else:
            [launcher] = [int(pid) for pid in _children(process.pid)]
            os.kill(launcher, number)
        output, _ = process.communicate(timeout=60)
    finally:
        kill_session(process)
    assert re.search(
        rf"Stopped: stopped by ({number.name}|a signal to another rank|SIG\w+) after step \d+ of 100000", output
    ), output[-3000:]
    # DeepSpeed's launcher gets the signal too, and prints a KeyboardInterrupt, maybe before the ranks speak.
    traces = re.findall(r"Traceback \(most recent call last\):\n((?:  .*\n)+)", output)
    assert not [trace for trace in traces if "/toolkit/" in trace or "run.py" in trace], output[-3000:]
    folder = tmp_path / "runs" / "stopped"
    [latest] = (folder / "checkpoints" / "latest").read_text().split()
    assert (folder / "checkpoints" / latest).is_dir()
    assert not (folder / "DONE").exists()
    assert not (folder / "FAILED").exists()


def _children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


@pytest.mark.fault("X2")
def test_a_taken_port_is_named(rows_file: Path, tmp_path: Path) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        command = [
            str(BIN / "deepspeed"),
            "--num_gpus",
            "2",
            "--master_port",
            str(port),
            *words(rows_file, tmp_path, "port"),
        ]
        finished = run(command, cwd=tmp_path)
    assert finished.code == 2
    assert str(port) in last_line_of_ours(finished.output)
    assert "--master_port" in last_line_of_ours(finished.output)


@pytest.mark.ranks
def test_a_missing_hostfile_is_refused(rows_file: Path, tmp_path: Path) -> None:
    command = [str(BIN / "deepspeed"), "--hostfile", "nosuch", "--num_gpus", "2", "--master_port", str(free_port())]
    finished = run([*command, *words(rows_file, tmp_path, "hosts")], cwd=tmp_path)
    assert finished.code == 2
    assert "nosuch" in last_line_of_ours(finished.output)
    assert not (tmp_path / "runs").exists()


@pytest.mark.ranks
def test_a_diverging_run_ends_with_70(rows_file: Path, tmp_path: Path) -> None:
    extra = ["optim.lr=1e18", "train.gradient_clipping=0", "schedule=constant", "schedule.warmup_steps=0"]
    command = [word for word in words(rows_file, tmp_path, "diverges", *extra) if word != "schedule=linear"]
    finished = run(forked(0, *command), cwd=tmp_path)
    assert finished.code == 70, finished.output[-3000:]
    assert "Diverged: the loss of the last 2 steps was NaN or Inf: the weights are ruined." in finished.output
    assert not (tmp_path / "runs" / "diverges" / "checkpoints" / "step-3").exists()
    assert not (tmp_path / "runs" / "diverges" / "DONE").exists()
    rows = [json.loads(line) for line in (tmp_path / "runs" / "diverges" / "metrics.jsonl").read_text().splitlines()]
    logged = [row["loss"] for row in rows if "loss" in row]
    assert logged[1:] == ["nan", "nan"], "the steps that matter are in the file, as strict JSON"


@pytest.mark.parametrize("hosts", ["localhost slots=2\n", "localhost slots=2O\n"])
def test_a_hostfile_is_read_strictly(hosts: str, rows_file: Path, tmp_path: Path) -> None:
    """DeepSpeed reads `slots=2O` as 2 and goes on; we name the line. `--no_ssh_check` because no sshd runs here."""
    (tmp_path / "hosts").write_text(hosts)
    command = [str(BIN / "deepspeed"), "--hostfile", "hosts", "--no_ssh_check", "--master_addr", "127.0.0.1"]
    command += ["--master_port", str(free_port())]
    finished = run([*command, *words(rows_file, tmp_path, "hosts", "launch.num_nodes=1")], cwd=tmp_path)
    if hosts.endswith("2\n"):
        assert finished.code == 0, finished.output[-3000:]
        assert json.loads((tmp_path / "runs" / "hosts" / "environment.json").read_text())["world_size"] == 2
    else:
        assert finished.code == 2
        assert last_line_of_ours(finished.output).endswith("hosts:1: slots=2O is no number of GPUs from 1 to 9999.")
