"""A run that is stopped and goes on, written by all trackers at once and read back through their own libraries."""

import json
import math
import os
import resource
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests import series
from toolkit.config.load import to_plain
from toolkit.config.schema import TrackConfig
from toolkit.messages import console, write_to_stdout
from toolkit.track import queue as tracking
from toolkit.track.backends import ANSWERS, FINISHED, SAMPLES, STOPPED
from toolkit.track.metrics import MetricsLog, hf_name, tracked_name
from toolkit.track.queue import Trackers
from toolkit.train.run_dir import trim_metrics

KEY = "5ecre7" * 7
PACKAGES = ("tensorboard", "wandb", "mlflow", "swanlab", "trackio")
CHECKPOINT, STOPPED_AT, LAST = 6, 8, 12


def settings(**changes: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the sections of `track` for trackers without a network."""
    track = to_plain(TrackConfig())
    names = ("csv", *PACKAGES) if not changes else tuple(changes)
    chosen = {name: track[name] | changes.get(name, {}) for name in names}
    for name in {"wandb", "swanlab"} & set(chosen):
        chosen[name].setdefault("mode", "offline")
        chosen[name]["mode"] = changes.get(name, {}).get("mode", "offline")
    return chosen


def steps_of(folder: Path, trackers: Trackers, first: int, last: int, shift: float) -> None:
    """Log steps as the loop does: each second one is evaluated, the fourth holds what is no number."""
    log = MetricsLog(folder / "metrics.jsonl", trackers.row)
    if not first:
        log.append({"step": 0, "eval_loss": 9.0})
    for step in range(first + 1, last + 1):
        loss = math.nan if step == 4 else 8 - step / 10 + shift
        log.append({"step": step, "loss": loss, "lr": 1e-3 / step, "grad_norm": math.inf if step == 4 else 1.0})
        if step % 2 == 0:
            trackers.answers(step, ANSWERS, [{"prompt": f"Q {step}", "output": KEY, "reference": "R"}])
            log.append({"step": step, "eval_loss": 7 - step / 10 + shift, "eval_loss/a (b)": 1.0})


def begun(folder: Path, step: int, chosen: dict[str, dict[str, Any]]) -> Trackers:
    """Begin a session."""
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(f"optim:\n  lr: 0.1\n# {KEY}\n")
    trackers = Trackers(patience_s=60)
    hyperparameters = {"optim.lr": 0.1, "data.sources": ["a"], "commit": "abc", "launch.env.WANDB_API_KEY": KEY}
    trackers.begin(folder, chosen, hyperparameters, step)
    return trackers


def has(folder: Path, name: str, step: int) -> None:
    """Wait until a tracker has a step."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        file = folder / "trackers" / f"{name}.json"
        if file.exists() and json.loads(file.read_text())["eval"] == step:
            return
        time.sleep(0.05)
    raise AssertionError(f"{name} has not been handed step {step}")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A run folder after two sessions: stopped two steps after its checkpoint, and gone on from there."""
    for name in PACKAGES:
        pytest.importorskip(name)
    folder, said = tmp_path_factory.mktemp("runs") / "mine", list[str]()
    variables = {"TRACKIO_DIR": f"{folder}/trackio", "WANDB_API_KEY": KEY, "SWANLAB_API_KEY": KEY, "HF_TOKEN": KEY}
    old = {name: os.environ.get(name) for name in variables}
    os.environ |= variables
    console.write = said.append
    try:
        trackers = begun(folder, 0, settings())
        steps_of(folder, trackers, 0, CHECKPOINT, 0.0)
        length = (folder / "metrics.jsonl").stat().st_size
        steps_of(folder, trackers, CHECKPOINT, STOPPED_AT, 0.0)
        process = trackers._process
        for name in settings():
            has(folder, name, STOPPED_AT)
        trackers.end(STOPPED)
        assert process is not None
        process.wait(60)
        # Rows that no tracker got any more: the machine died before the checkpoint of a later step was gone back to.
        trim_metrics(folder, length)
        trackers = begun(folder, CHECKPOINT, settings())
        steps_of(folder, trackers, CHECKPOINT, LAST, 0.5)
        trackers.answers(LAST, SAMPLES, [{"prompt": "P", "answer": "A"}])
        trackers.summary(LAST, {"train_runtime": 3.0})
        trackers.end(FINISHED)
    finally:
        console.write = write_to_stdout
        for name, value in old.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
    return folder, said


def truth(folder: Path, redone: bool) -> series.Series:
    """Return metrics.jsonl; where a tracker cannot take back what it has, with the first values of repeated steps."""
    found = series.metrics_jsonl(folder / "metrics.jsonl")
    if not redone:
        for name in ("loss", "eval_loss"):
            again = range(CHECKPOINT + 1, STOPPED_AT + 1)
            found[name] = [(step, value - 0.5 if step in again else value) for step, value in found[name]]
    return found


def test_nothing_was_wrong(run: tuple[Path, list[str]]) -> None:
    folder, said = run
    assert said == []
    steps = [step for step, _ in series.metrics_jsonl(folder / "metrics.jsonl")["loss"]]
    assert steps == list(range(1, LAST + 1))


@pytest.mark.parametrize("name", ["csv", *PACKAGES])
@pytest.mark.filterwarnings("ignore")
def test_the_series_are_those_of_metrics_jsonl(
    name: str, run: tuple[Path, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = run
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    found = {
        "csv": lambda: series.csv_file(folder / "metrics.csv"),
        "tensorboard": lambda: series.tensorboard(folder / "tensorboard"),
        "wandb": lambda: series.wandb(folder / "wandb"),
        "mlflow": lambda: series.mlflow(str(folder.parent / "mlruns"))[1],
        "swanlab": lambda: series.swanlab(folder / "swanlab"),
        "trackio": lambda: series.trackio(folder / "trackio"),
    }[name]()
    named = {"csv": str, "mlflow": hf_name}.get(name, tracked_name)
    expected = truth(folder, redone=name in ("csv", "tensorboard"))
    for metric, values in expected.items():
        there = named(metric)
        if name == "mlflow":
            there = there.replace("/", ".").replace("(", "_").replace(")", "_")
        if name == "swanlab":  # has no place for what is no number
            values = [(step, value) for step, value in values if math.isfinite(value)]
            found[there] = [(step, value) for step, value in found[there] if math.isfinite(value)]
        assert series.same(sorted(found[there]), values), f"{metric}: {found.get(there)}"
    if name not in ("csv", "wandb"):
        assert found[named("train_runtime")] == [(LAST, 3.0)]


@pytest.mark.filterwarnings("ignore")
def test_what_else_is_recorded(run: tuple[Path, list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _ = run
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow import MlflowClient

    found, _ = series.mlflow(str(folder.parent / "mlruns"))
    assert found.data.params["optim.lr"] == "0.1"
    assert found.data.tags["mlflow.source.git.commit"] == "abc"
    assert found.info.run_name == "mine"
    assert found.info.status == "FINISHED"
    files = {one.path for one in MlflowClient(str(folder.parent / "mlruns")).list_artifacts(found.info.run_id)}
    assert files == {"config.yaml", "answers", "samples"}
    [text] = (folder.parent / "mlruns").rglob("samples/step-12.jsonl")
    assert json.loads(text.read_text()) == {"prompt": "P", "answer": "A"}
    [one] = (folder / "wandb").glob(f"offline-run-*/files/media/table/samples_{LAST}_*.json")
    assert json.loads(one.read_text())["data"] == [["P", "A", ""]]
    ids = {path.name: json.loads(path.read_text())["id"] for path in (folder / "trackers").iterdir()}
    assert len(set(ids.values())) == len(PACKAGES) + 1
    assert len(list((folder / "wandb").glob(f"offline-run-*-{ids['wandb.json']}"))) == 2


def test_secrets_are_nowhere(run: tuple[Path, list[str]]) -> None:
    folder, _ = run
    files = [path for path in folder.parent.rglob("*") if path.is_file() and path.name != "config.yaml"]
    files = [path for path in files if path.suffix not in (".db-shm", ".db-wal")]  # come and go with who reads
    assert len(files) > 30
    written = b"".join(path.read_bytes() for path in files)
    assert b"Q 12" in written
    assert b"WANDB_API_KEY" in written
    assert KEY.encode() not in written


def test_no_process_is_left(run: tuple[Path, list[str]]) -> None:
    folder, _ = run
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            assert str(folder) not in path.read_text()
        except OSError:
            continue


def test_two_runs_of_one_name(tmp_path: Path, said: list[str]) -> None:
    pytest.importorskip("trackio")
    os.environ["TRACKIO_DIR"] = str(tmp_path / "trackio")
    try:
        for place in ("a", "b"):
            folder = tmp_path / place / "same"
            trackers = begun(folder, 0, settings(trackio={}))
            steps_of(folder, trackers, 0, 2, 0.0)
            trackers.end(FINISHED)
            assert said == []
    finally:
        del os.environ["TRACKIO_DIR"]
    [values] = [values for name, values in series.trackio(tmp_path / "trackio").items() if name == "train/loss"]
    assert len(values) == 4
    import sqlite3

    [file] = (tmp_path / "trackio").glob("*.db")
    with sqlite3.connect(file) as database:
        names = {name for (name,) in database.execute("SELECT DISTINCT run_name FROM metrics")}
    assert len(names) == 2
    assert all(name.startswith("same-") for name in names)


@pytest.mark.filterwarnings("ignore")
def test_two_runs_of_one_name_in_one_folder_of_events(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    for place in ("a", "b"):
        trackers = begun(tmp_path / place / "same", 0, settings(tensorboard={"dir": str(tmp_path / "events")}))
        steps_of(tmp_path / place / "same", trackers, 0, 2, 0.0)
        trackers.patience_s = 60
        trackers.end(FINISHED)
    folders = list((tmp_path / "events").iterdir())
    assert len(folders) == 2
    for folder in folders:
        assert folder.name.startswith("same-")
        assert [step for step, _ in series.tensorboard(folder)["train/loss"]] == [1, 2]


def test_a_tracker_without_login_is_told_and_waited_for_by_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    for name in ("wandb", "swanlab"):
        pytest.importorskip(name)
    for name in ("WANDB_API_KEY", "SWANLAB_API_KEY", "WANDB_MODE", "SWANLAB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = tmp_path / "runs" / "mine"
    trackers = begun(folder, 0, settings(wandb={"mode": "online"}, swanlab={"mode": "online"}))
    trackers.patience_s = 30
    trackers.wait_begun()
    assert sorted(line.split()[1] for line in said) == ["swanlab", "wandb"], said
    assert all(" failed: " in line and "metrics.jsonl has everything" in line for line in said)
    began = time.monotonic()
    steps_of(folder, trackers, 0, LAST, 0.0)
    assert time.monotonic() - began < 1.0
    trackers.patience_s = 2
    trackers.end(FINISHED)
    assert time.monotonic() - began < 8.0
    assert len(said) == 4
    assert all("did not take everything in time" in line for line in said[2:])
    assert len(series.metrics_jsonl(folder / "metrics.jsonl")["loss"]) == LAST


@pytest.mark.parametrize("small_disk", ["16k"], indirect=True)
def test_a_full_disk_leaves_no_half_row(small_disk: Path, said: list[str]) -> None:
    folder = small_disk / "mine"
    trackers = begun(folder, 0, settings(csv={}))
    trackers.wait_begun()
    for step in range(1, 2000):
        trackers.row({"step": step, "loss": 1.23456789})
    trackers.patience_s = 10
    trackers.end(FINISHED)
    lines = (folder / "metrics.csv").read_text().splitlines()
    assert 100 < len(lines) < 1500
    assert all(line.endswith(",1.23456789") for line in lines[1:])
    assert said[0].startswith("WARNING: csv failed: OSError: [Errno 28] No space left on device. It is retried")
    assert "did not take everything in time" in said[1]


def test_a_process_that_dies_is_told_once(tmp_path: Path, said: list[str]) -> None:
    trackers = begun(tmp_path / "mine", 0, settings(csv={}))
    trackers.wait_begun()
    assert trackers._process is not None
    trackers._process.kill()
    trackers._process.wait(10)
    steps_of(tmp_path / "mine", trackers, 0, 4, 0.0)
    trackers.end(FINISHED)
    assert said == [
        "WARNING: trackers: the process has ended, see logs/trackers.log. Training continues; metrics.jsonl has "
        "everything."
    ]


def test_a_process_that_stands_still_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    monkeypatch.setattr(tracking, "MOST_WAITING_BYTES", 100_000)
    trackers = begun(tmp_path / "mine", 0, settings(csv={}))
    trackers.wait_begun()
    process = trackers._process
    assert process is not None
    process.send_signal(signal.SIGSTOP)
    began = time.monotonic()
    for step in range(1, 5000):
        trackers.row({"step": step, "loss": 1.0})
    assert time.monotonic() - began < 120  # waiting for it would take hours; other work may run beside
    assert len(trackers._waiting) <= 100_000
    assert said == ["WARNING: the trackers take nothing any more. metrics.jsonl has it all."]
    trackers.patience_s = 0.5
    began = time.monotonic()
    trackers.end(FINISHED)
    assert time.monotonic() - began < 25  # the patience without the line above is 30
    assert process.wait(10) == -signal.SIGKILL
    assert said[1:] == ["WARNING: trackers: no answer. Training continues; metrics.jsonl has everything."]


def test_a_process_with_many_open_files(tmp_path: Path, said: list[str]) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2048:
        pytest.skip("1,024 files cannot be open here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    many = [os.open(os.devnull, os.O_RDONLY) for _ in range(1024)]
    try:
        trackers = begun(tmp_path / "mine", 0, settings(csv={}))
        process = trackers._process
        assert process is not None and process.stdout is not None
        assert process.stdout.fileno() >= 1024
        trackers.wait_begun()
        steps_of(tmp_path / "mine", trackers, 0, 4, 0.0)
        trackers.end(FINISHED)
    finally:
        for number in many:
            os.close(number)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert said == []
    assert [step for step, _ in series.csv_file(tmp_path / "mine" / "metrics.csv")["loss"]] == [1, 2, 3, 4]
