"""What a tracker's thread does with disks that are full for a while, with many rows, and with too little time."""

import json
import math
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests import series
from toolkit.track import queue
from toolkit.track.backends import FINISHED, CsvFile, TrackedRun
from toolkit.track.queue import BackendQueue


def run_in(folder: Path, step: int = 0) -> TrackedRun:
    """Return what a tracker is told first."""
    return TrackedRun(
        name="mine", id="", folder=folder, settings={"dir": ""}, hyperparameters={"a": 1}, texts={"f": "t"}, step=step
    )


def rows_to(last: int) -> list[dict[str, float]]:
    """Return rows of metrics.jsonl."""
    return [{"step": step, "loss": 1.0 + step, "lr": 1e-4} for step in range(1, last + 1)]


def until(is_so: Callable[[], bool]) -> None:
    """Wait for something."""
    end = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < end, "waited for 30 s"
        time.sleep(0.02)


def recorded(folder: Path, name: str) -> int:
    """Return the last step that the record says was handed on."""
    file = folder / "trackers" / f"{name}.json"
    return int(json.loads(file.read_text())["train"]) if file.exists() else -1


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("small_disk", ["64k"], indirect=True)
def test_tensorboard_outlives_a_disk_that_is_full_for_a_while(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorboard")
    monkeypatch.setattr(queue, "PAUSES_S", (0.1,) * 200)
    said: list[Mapping[str, Any]] = []
    one = BackendQueue("tensorboard", run_in(small_disk), [], said.append)
    for row in rows_to(5):
        one.put("row", {"row": row})
    until(lambda: recorded(small_disk, "tensorboard") == 5)
    with (small_disk / "ballast").open("wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
        while True:
            file.write(bytes(1024))
    for row in rows_to(300)[5:]:
        one.put("row", {"row": row})
    until(lambda: any("No space left" in answer.get("warning", "") for answer in said))
    taken = len(series.tensorboard(small_disk / "tensorboard")["train/loss"])
    assert recorded(small_disk, "tensorboard") <= taken < 300
    (small_disk / "ballast").unlink()
    one.close(FINISHED)
    one.wait(time.monotonic() + 30)
    assert one.is_done
    expected = [(step, 1.0 + step) for step in range(1, 301)]
    assert series.same(series.tensorboard(small_disk / "tensorboard")["train/loss"], expected)
    assert recorded(small_disk, "tensorboard") == 300
    assert len(said) == 2  # it has begun; it failed


@pytest.mark.parametrize("name", ["csv", "tensorboard"])
@pytest.mark.filterwarnings("ignore")
def test_rows_of_earlier_sessions_are_written_in_one_go(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "tensorboard":
        pytest.importorskip("tensorboard")
    replaced: list[Path] = []
    original = Path.replace

    def replace(path: Path, target: Path) -> Path:
        replaced.append(path)
        return original(path, target)

    monkeypatch.setattr(Path, "replace", replace)
    began = time.monotonic()
    one = BackendQueue(name, run_in(tmp_path, 1500), rows_to(1500), lambda answer: None)
    for row in rows_to(2500)[1500:]:
        one.put("row", {"row": row})
    one.close(FINISHED)
    one.wait(began + 60)
    assert one.is_done
    assert len(replaced) <= 8 + 2 * (time.monotonic() - began)
    found = {
        "csv": lambda: series.csv_file(tmp_path / "metrics.csv")["loss"],
        "tensorboard": lambda: series.tensorboard(tmp_path / "tensorboard")["train/loss"],
    }[name]()
    assert series.same(found, [(step, 1.0 + step) for step in range(1, 2501)])
    assert recorded(tmp_path, name) == 2500


def test_a_session_that_is_too_short_leaves_the_table_and_counts_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = BackendQueue("csv", run_in(tmp_path), rows_to(3), lambda answer: None)
    first.close(FINISHED)
    first.wait(time.monotonic() + 30)
    table = (tmp_path / "metrics.csv").read_text()
    assert len(table.splitlines()) == 4
    is_asked, may_go_on = threading.Event(), threading.Event()

    def slow(*words: object) -> None:
        is_asked.set()
        may_go_on.wait(30)

    monkeypatch.setattr(CsvFile, "write", slow)
    said: list[Mapping[str, Any]] = []
    second = BackendQueue("csv", run_in(tmp_path, 5), rows_to(5), said.append)
    second.put("row", {"row": {"step": 6, "loss": 1.0}})
    assert is_asked.wait(30)
    second.close(FINISHED)
    second.wait(time.monotonic())
    may_go_on.set()
    assert "(messages left: 6)" in said[-1]["warning"]
    assert (tmp_path / "metrics.csv").read_text() == table


def test_what_was_handed_on_is_recorded_when_the_time_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "RECORD_EVERY_S", math.inf)
    may_go_on = threading.Event()
    monkeypatch.setattr(CsvFile, "answers", lambda *words: may_go_on.wait(30))
    one = BackendQueue("csv", run_in(tmp_path), [], lambda answer: None)
    one.put("row", {"row": {"step": 1, "loss": 1.0}})
    one.put("answers", {"step": 1, "name": "answers", "answers": []})
    until(lambda: one.record.steps["train"] == 1)
    one.close(FINISHED)
    one.wait(time.monotonic())
    may_go_on.set()
    assert recorded(tmp_path, "csv") == 1


def test_a_new_column_that_has_no_room_at_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*words: object) -> None:
        raise OSError(28, "No space left on device")

    client = CsvFile()
    client.begin(run_in(tmp_path))
    client.write([(1, {"loss": 1.0})])
    original = CsvFile._write
    monkeypatch.setattr(CsvFile, "_write", full)
    with pytest.raises(OSError, match="No space"):
        client.write([(2, {"eval_loss": 2.0})])
    monkeypatch.setattr(CsvFile, "_write", original)
    client.write([(2, {"eval_loss": 2.0})])
    assert (tmp_path / "metrics.csv").read_text().split() == ["step,loss,eval_loss", "1,1,", "2,,2"]
