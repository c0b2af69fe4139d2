"""What goes wrong while data is prepared: nothing finished is lost, and no wrong store is ever used."""

import errno
import fcntl
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit.data_tools import ByteEncoder, pairs, run_config, write_rows
from toolkit.config.schema import DataConfig, OnBadRow, RunConfig, TooLong, TrainOn
from toolkit.data import tokenize as module
from toolkit.data.readers import read_blocks
from toolkit.data.store import TokenizedCache
from toolkit.data.tokenize import build_caches, prepare_shard
from toolkit.data.tokenize_workers import PartBuilder
from toolkit.messages import DataError

ROWS = 4000
SPAWN = multiprocessing.get_context("spawn")
Samples = list[tuple[list[int], list[bool]]]


class SlowEncoder(ByteEncoder):
    """Takes its time, so that there is something to interrupt."""

    def encode_many(self, conversations: Any, tools: Any = None) -> Any:
        """Return `encode` of each."""
        time.sleep(0.05)
        return super().encode_many(conversations, tools)


class DeadlyEncoder(ByteEncoder):
    """Kills the process that encodes a certain row."""

    def encode(self, messages: Any, tools: Any = None) -> Any:
        """Return ids and mask, or do not return."""
        if messages[-1]["content"].endswith(" kill"):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().encode(messages, tools)


def long_rows(count: int = ROWS) -> list[dict[str, str]]:
    """Return rows that make several blocks of a megabyte."""
    return [{"prompt": f"q{number}", "response": f"{number} " + "x" * 900} for number in range(count)]


@pytest.fixture
def cfg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    """A run over some four megabytes, tokenized by two processes."""
    monkeypatch.setattr(module, "LEAST_BYTES_FOR_PROCESSES", 0)
    made = run_config(tmp_path, write_rows(tmp_path / "d.jsonl", long_rows()))
    made.prepare.num_workers = 2
    return made


def parts(cfg: RunConfig) -> list[Path]:
    """Return the parts that are kept."""
    return sorted(Path(cfg.prepare.dir, "parts").glob("*.npz"))


def content(store: TokenizedCache) -> Samples:
    """Return all samples."""
    return [(ids.tolist(), trained.tolist()) for ids, trained in (store[index] for index in range(len(store)))]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Samples:
    """The samples of `long_rows` as one process makes them in a cache of its own."""
    folder = tmp_path_factory.mktemp("plain")
    plain = run_config(folder, write_rows(folder / "d.jsonl", long_rows()))
    plain.prepare.num_workers = 1
    return content(build_caches(plain, ByteEncoder()).train)


def test_processes_make_what_one_makes(tmp_path: Path, cfg: RunConfig, said: list[str], expected: Samples) -> None:
    train, _, report = build_caches(cfg, ByteEncoder())
    assert report.rows_read == ROWS
    assert [train.where(index) for index in (0, 1, ROWS - 1)] == [f"{tmp_path}/d.jsonl:{n}" for n in (1, 2, ROWS)]
    assert content(train) == expected
    assert parts(cfg) == []


def run_prepare(cfg: RunConfig) -> None:
    module.LEAST_BYTES_FOR_PROCESSES = 0
    build_caches(cfg, SlowEncoder())


@pytest.mark.fault("K1")
@pytest.mark.parametrize("deadly", [signal.SIGKILL, signal.SIGTERM])
def test_killed_build_goes_on_where_it_stopped(
    tmp_path: Path, cfg: RunConfig, deadly: signal.Signals, expected: Samples
) -> None:
    process = SPAWN.Process(target=run_prepare, args=(cfg,))
    process.start()
    deadline = time.monotonic() + 60
    while len(parts(cfg)) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(process.pid or 0, deadly)
    process.join(30)
    kept = len(parts(cfg))
    assert kept >= 2
    assert not list(Path(cfg.prepare.dir, "stores").glob("*/manifest.json"))
    deadline = time.monotonic() + 20  # its workers see that it is gone, and end
    while b"multiprocessing" in subprocess.run(["ps", "-o", "args", "--ppid", "1"], capture_output=True).stdout:
        assert time.monotonic() < deadline, "orphaned workers"
        time.sleep(0.2)
    train, _, report = build_caches(cfg, ByteEncoder())
    assert report.parts_kept >= kept
    assert content(train) == expected
    assert parts(cfg) == []


@pytest.mark.fault("K1")
def test_killed_worker_is_named_and_nothing_lost(tmp_path: Path, cfg: RunConfig) -> None:
    rows = long_rows()
    rows[-1]["response"] += " kill"
    write_rows(tmp_path / "d.jsonl", rows)
    with pytest.raises(DataError) as error:
        build_caches(cfg, DeadlyEncoder())
    assert str(error.value) == (
        "A tokenizing process was killed, most likely by the system for lack of memory (see `dmesg`). What was "
        "finished is kept: the same command continues from there. With less memory: prepare.num_workers=1."
    )
    assert parts(cfg)
    report = build_caches(cfg, ByteEncoder()).report
    assert report.parts_kept >= 1


def test_row_in_the_middle_is_mended(tmp_path: Path, cfg: RunConfig, expected: Samples) -> None:
    rows: list[Any] = long_rows()
    rows[3100] = {"prompt": "p"}
    write_rows(tmp_path / "d.jsonl", rows)
    with pytest.raises(DataError, match=r"d\.jsonl:3101: no key 'response'; the row has 'prompt'\. "):
        build_caches(cfg, ByteEncoder())
    kept = len(parts(cfg))
    assert kept >= 2
    write_rows(tmp_path / "d.jsonl", long_rows())
    train, _, report = build_caches(cfg, ByteEncoder())
    assert report.parts_kept >= kept - 2  # the block of the row, and at most the one after it
    assert content(train) == expected


def test_skip_uses_what_error_had_finished(tmp_path: Path, cfg: RunConfig) -> None:
    rows: list[Any] = long_rows()
    rows[3100] = 7
    write_rows(tmp_path / "d.jsonl", rows)
    with pytest.raises(DataError):
        build_caches(cfg, ByteEncoder())
    kept = len(parts(cfg))
    cfg.data.on_bad_row = OnBadRow.skip
    report = build_caches(cfg, ByteEncoder()).report
    assert (report.parts_kept, report.bad_rows, report.train_samples) == (kept, 1, ROWS - 1)


@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "other"])
def test_damaged_part_is_made_anew(tmp_path: Path, cfg: RunConfig, damage: str, expected: Samples) -> None:
    cfg.prepare.shard = "1/1"
    total, new = prepare_shard(cfg, ByteEncoder())
    assert total == new == len(parts(cfg)) > 2
    part = parts(cfg)[1]
    data = part.read_bytes()
    middle = len(data) // 2
    part.write_bytes(
        {
            "cut": data[:-100],
            "flip": data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :],
            "empty": b"",
            "other": b"PK not a part",
        }[damage]
    )
    train, _, report = build_caches(cfg, ByteEncoder())
    assert report.parts_kept == total - 1
    assert content(train) == expected


def test_shards_of_several_machines(tmp_path: Path, cfg: RunConfig, expected: Samples) -> None:
    counts = []
    for shard in ("2/3", "1/3", "3/3"):
        cfg.prepare.shard = shard
        counts.append(prepare_shard(cfg, ByteEncoder()))
    assert all(total == new > 0 for total, new in counts)
    assert prepare_shard(cfg, ByteEncoder()) == (counts[2][0], 0)
    encoder = ByteEncoder()
    cfg.prepare.num_workers = 1
    train, _, report = build_caches(cfg, encoder)
    assert report.parts_kept == sum(total for total, _ in counts)
    assert encoder.calls == 0
    assert content(train) == expected


@pytest.mark.fault("D5")
def test_file_that_changes_while_it_is_read(tmp_path: Path, cfg: RunConfig) -> None:
    cfg.prepare.num_workers = 1
    file = tmp_path / "d.jsonl"

    class Changing(ByteEncoder):
        def encode_many(self, conversations: Any, tools: Any = None) -> Any:
            if conversations[-1][-1]["content"].startswith(f"{ROWS - 1} "):
                write_rows(file, pairs(3))
            return super().encode_many(conversations, tools)

    with pytest.raises(DataError, match="A data file was changed while it was being tokenized"):
        build_caches(cfg, Changing())
    assert not list(Path(cfg.prepare.dir, "stores").glob("*/manifest.json"))
    assert len(build_caches(cfg, ByteEncoder()).train) == 3


def test_parts_of_other_rules_are_never_used(tmp_path: Path) -> None:
    cfg = run_config(tmp_path, write_rows(tmp_path / "d.jsonl", pairs(3)))
    files = module.locate_all(cfg.data, tmp_path)
    ((_, file, block),) = read_blocks(files)

    def path(rules: DataConfig, columns: dict[str, str] | None = None, fingerprint: str = "bytes") -> Path:
        encoder = ByteEncoder()
        encoder.fingerprint = fingerprint
        return PartBuilder(encoder, RunConfig(data=rules), tmp_path).path(replace(file, columns=columns or {}), block)

    rules = [
        DataConfig(max_length=100, too_long=TooLong.drop, train_on=TrainOn.auto),
        DataConfig(max_length=101, too_long=TooLong.drop, train_on=TrainOn.auto),
        DataConfig(max_length=100, too_long=TooLong.split, train_on=TrainOn.auto),
        DataConfig(max_length=100, too_long=TooLong.drop, train_on=TrainOn.last),
    ]
    paths = [*map(path, rules), path(rules[0], {"prompt": "response"}), path(rules[0], fingerprint="other")]
    assert len(set(paths)) == 6
    assert path(rules[0]) == paths[0]


FILL = """
import sys
from dataclasses import replace
from pathlib import Path
from tests.unit.data_tools import ByteEncoder, run_config
from toolkit.data.tokenize import build_caches
from toolkit.messages import DataError
folder, data = map(Path, sys.argv[1:])
cfg = run_config(folder, str(data))
cfg.prepare.num_workers = 2
try:
    report = build_caches(cfg, ByteEncoder(300)).report
    print("KEPT", report.parts_kept, report.train_samples)
except DataError as error:
    print("ERROR", error)
"""


@pytest.mark.fault("E1")
@pytest.mark.parametrize("small_disk", ["16m"], indirect=True)
def test_full_disk(tmp_path: Path, small_disk: Path) -> None:
    data = tmp_path / "d.jsonl"
    write_rows(data, long_rows(12_000))  # 11 MB, of which parts and store take 25 MB each

    def attempt() -> str:
        done = subprocess.run(
            [sys.executable, "-c", FILL, str(small_disk), str(data)], capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip().splitlines()[-1]

    message = attempt()
    assert message == (
        f"ERROR No space left while writing below '{small_disk}/cache/stores'. Free some, or choose another directory "
        "with prepare.dir=FOLDER."
    )
    assert not list((small_disk / "cache" / "stores").glob("*/manifest.json"))
    assert not list((small_disk / "cache").rglob("*.tmp"))
    kept = list((small_disk / "cache" / "parts").glob("*.npz"))
    assert kept
    subprocess.run(["mount", "-o", "remount,size=80m", str(small_disk)], check=True)
    word, parts_kept, samples = attempt().split()
    assert (word, samples) == ("KEPT", "12000")
    assert int(parts_kept) >= len(kept)


def node(cfg: RunConfig, host: str, no_locks: bool, results: "multiprocessing.Queue[tuple[bool, int]]") -> None:
    """Prepare as a machine of its own, with locks that other nodes do not see, or on a file system without any."""
    from toolkit.distributed import file_lock

    real, handles = fcntl.flock, {}

    def local(file: Any, how: int) -> None:
        handle = handles.setdefault(file.name, open(f"{file.name}.of.{host}", "a"))
        real(handle, how)

    file_lock.fcntl.flock = local  # type: ignore[attr-defined]
    file_lock.socket.gethostname = lambda: host  # type: ignore[attr-defined]
    file_lock._BEAT_S, file_lock._SILENT_S = 0.1, 1.0
    if no_locks:

        def refuse(file: Any, how: int) -> None:
            raise OSError(errno.ENOLCK, "no locks")

        file_lock.fcntl.flock = refuse  # type: ignore[attr-defined]
    train, _, report = build_caches(cfg, SlowEncoder())
    results.put((report.built, int(train.read_ids(0, int(train.offsets[-1])).astype(np.int64).sum())))


@pytest.mark.parametrize("no_locks", [False, True])
def test_two_machines_without_common_locks(cfg: RunConfig, no_locks: bool) -> None:
    results: multiprocessing.Queue[tuple[bool, int]] = SPAWN.Queue()
    processes = [SPAWN.Process(target=node, args=(cfg, f"node{number // 2}", no_locks, results)) for number in range(4)]
    for process in processes:
        process.start()
    answers = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(30)
    assert sorted(built for built, _ in answers) == [False, False, False, True]
    assert len({total for _, total in answers}) == 1


@pytest.mark.fault("H4")
def test_a_lock_left_by_a_dead_machine_is_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    from toolkit.distributed import file_lock

    monkeypatch.setattr(file_lock, "_SILENT_S", 0.5)
    cfg = run_config(tmp_path, write_rows(tmp_path / "d.jsonl", pairs(3)))
    folder = build_caches(cfg, ByteEncoder()).train.folder
    lock = folder.with_name(folder.name + ".lock")
    (folder / "manifest.json").unlink()
    lock.write_text(json.dumps({"pid": 1, "host": "gone", "token": "x", "beat": 7, "doing": ""}))
    started = time.monotonic()
    assert build_caches(cfg, ByteEncoder()).report.built
    assert time.monotonic() - started >= 0.5
    assert lock.read_text() == ""

    (folder / "manifest.json").unlink()
    alive = threading.Event()

    def beat() -> None:
        for number in range(100):
            if alive.wait(0.05):
                lock.write_text("")
                return
            content = {"pid": 1, "host": "busy", "token": "y", "beat": number, "doing": "Tokenizing: 3 %"}
            with open(lock, "r+", encoding="utf-8") as file:  # never empty in between, as a builder writes it
                file.write(json.dumps(content) + "\n")
                file.truncate()

    monkeypatch.setattr(file_lock, "NOTICE_AFTER_S", 0.2)
    lock.write_text(json.dumps({"pid": 1, "host": "busy", "token": "y", "beat": -1, "doing": ""}))
    beating = threading.Thread(target=beat)
    beating.start()
    threading.Timer(2.0, alive.set).start()
    assert build_caches(cfg, ByteEncoder()).report.built
    assert time.monotonic() - started >= 2.0
    beating.join()
    assert said == [f"Waiting for process 1 on busy, which is preparing {folder}. Tokenizing: 3 %"]


def test_a_store_that_is_cut_short_under_a_run_is_an_error_with_its_name(tmp_path: Path) -> None:
    """A mapped file would end the process with SIGBUS and no word."""
    store = build_caches(run_config(tmp_path, write_rows(tmp_path / "d.jsonl", pairs(9))), ByteEncoder()).train
    ids = store.folder / "ids.bin"
    os.truncate(ids, ids.stat().st_size // 2)
    assert len(store[0][0])
    with pytest.raises(DataError, match=rf"Cannot read '{ids}': it is shorter than when it was written\."):
        store[8]
