"""One builder however many processes; nothing half-made is ever found; a killed builder blocks nobody."""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from toolkit.distributed import file_lock as module
from toolkit.distributed.file_lock import built_once
from toolkit.messages import DataError

SPAWN = multiprocessing.get_context("spawn")


def is_complete(folder: Path) -> bool:
    return (folder / "whole").is_file()


def build_once(target: Path, build: Callable[[Path], None], is_complete: Callable[[Path], bool]) -> bool:
    with built_once(target, is_complete) as building:
        if building:
            build(building)
    return building is not None


def quick_build(folder: Path) -> None:
    (folder / "sub").mkdir()
    (folder / "sub" / "part").write_text("x")
    (folder / "whole").write_text("x")


def unwanted_build(folder: Path) -> None:
    pytest.fail(f"built {folder} again")


def slow_build(folder: Path) -> None:
    (folder / "part").write_text("x")
    time.sleep(1.0)
    quick_build(folder)


def build_in_process(target: Path, results: "multiprocessing.Queue[bool]") -> None:
    results.put(build_once(target, slow_build, is_complete))


def hang(target: Path) -> None:
    def build(folder: Path) -> None:
        (folder / "part").write_text("x")
        time.sleep(60)

    build_once(target, build, is_complete)


def wait_for(folder: Path, pattern: str) -> None:
    deadline = time.monotonic() + 20
    while not list(folder.glob(pattern)):
        assert time.monotonic() < deadline, f"{pattern} never appeared"
        time.sleep(0.02)


@pytest.fixture(autouse=True)
def told(said: list[str]) -> Iterator[list[str]]:
    """Nothing is told where nobody waits; a test that waits clears it."""
    yield said
    assert said == []


def test_builds_then_reuses(tmp_path: Path) -> None:
    target = tmp_path / "a" / "store"
    assert build_once(target, quick_build, is_complete)
    assert not build_once(target, unwanted_build, is_complete)
    assert sorted(path.name for path in target.parent.iterdir()) == ["store", "store.lock"]
    assert (target / "sub" / "part").read_text() == "x"
    assert target.stat().st_mode & 0o777 == tmp_path.joinpath("a").stat().st_mode & 0o777


def test_unusable_folder_is_replaced(tmp_path: Path) -> None:
    target = tmp_path / "store"
    target.mkdir()
    (target / "half").write_text("x")
    assert build_once(target, quick_build, is_complete)
    assert not (target / "half").exists()


def test_failed_build_leaves_nothing(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "part").write_text("x")
        raise DataError("row 3")

    with pytest.raises(DataError, match="row 3"):
        build_once(tmp_path / "store", fail, is_complete)
    assert [path.name for path in tmp_path.iterdir()] == ["store.lock"]


def test_two_processes_build_once(tmp_path: Path) -> None:
    results: multiprocessing.Queue[bool] = SPAWN.Queue()
    processes = [SPAWN.Process(target=build_in_process, args=(tmp_path / "store", results)) for _ in range(3)]
    for process in processes:
        process.start()
    assert sorted(results.get(timeout=30) for _ in processes) == [False, False, True]
    for process in processes:
        process.join(30)
        assert process.exitcode == 0


def test_killed_builder_is_followed(tmp_path: Path) -> None:
    target = tmp_path / "store"
    builder = SPAWN.Process(target=hang, args=(target,))
    builder.start()
    wait_for(tmp_path, "store.tmp-*/part")
    assert builder.pid is not None
    os.kill(builder.pid, signal.SIGKILL)
    builder.join(30)
    assert list(tmp_path.glob("store.tmp-*"))
    assert build_once(target, quick_build, is_complete)
    assert not list(tmp_path.glob("store.tmp-*"))


def test_waiting_names_the_builder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]) -> None:
    monkeypatch.setattr(module, "NOTICE_AFTER_S", 0.2)
    target = tmp_path / "store"
    thread = threading.Thread(target=build_once, args=(target, slow_build, is_complete))
    thread.start()
    wait_for(tmp_path, "store.tmp-*")
    assert not build_once(target, unwanted_build, is_complete)
    thread.join(30)
    assert len(said) == 1
    assert said[0].startswith(f"Waiting for process {os.getpid()} on ")
    assert said[0].endswith(f", which is preparing {target}.")
    said.clear()


def test_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(DataError) as error:
        build_once(tmp_path / "file" / "store", quick_build, is_complete)
    assert str(error.value) == (
        f"Cannot write below '{tmp_path}/file': File exists. Choose another directory with prepare.dir=FOLDER."
    )


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs Linux")
def test_full_disk(tmp_path: Path) -> None:
    def build(folder: Path) -> None:
        with open("/dev/full", "w") as file:
            file.write("x")

    with pytest.raises(DataError) as error:
        build_once(tmp_path / "store", build, is_complete)
    assert str(error.value) == (
        f"No space left while writing below '{tmp_path}'. Free some, or choose another directory with "
        "prepare.dir=FOLDER."
    )
