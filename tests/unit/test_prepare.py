"""From files to a store: hand-checked ids, splits, length rules, counts, and when a store is used again."""

import json
import multiprocessing
import os
import pickle
import shutil
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.unit.data_tools import END, ByteEncoder, UntrainedEncoder, pairs, run_config, text_of, write_rows
from toolkit.config.schema import OnBadRow, RunConfig, SourceConfig, TooLong, TrainOn
from toolkit.data import tokenize_workers
from toolkit.data.message_lists import MessageReader
from toolkit.data.store import TRAINED, TokenizedCache, damaged_files
from toolkit.data.tokenize import build_caches, split_rows
from toolkit.messages import DataError
from toolkit.tasks.language_data import _print_report


def answers(store: TokenizedCache) -> list[str]:
    """Return the trained text of each sample."""
    texts = []
    for index in range(len(store)):
        ids, trained = store[index]
        kept = ids[trained].tolist()
        assert kept[-1] == END
        texts.append(bytes(token - 2 for token in kept[:-1]).decode())
    return texts


def made(tmp_path: Path, rows: Sequence[object], **data: object) -> RunConfig:
    cfg = run_config(tmp_path, write_rows(tmp_path / "d.jsonl", rows))
    for name, value in data.items():
        setattr(cfg.data, name, value)
    return cfg


def test_ids_and_masks_by_hand(tmp_path: Path) -> None:
    cfg = made(tmp_path, [{"prompt": "ab", "response": "c"}, {"prompt": "d", "response": "ef"}])
    train, validation, report = build_caches(cfg, ByteEncoder())
    assert validation is None
    assert [train[index][0].tolist() for index in range(2)] == [[99, 100, 101, 1], [102, 103, 104, 1]]
    assert [train[index][1].tolist() for index in range(2)] == [[False, False, True, True], [False, True, True, True]]
    assert train.lengths().tolist() == [4, 4]
    assert (train.num_tokens, train.num_trained_tokens) == (8, 5)
    assert (report.rows_read, report.train_samples, report.tokens, report.trained_tokens) == (2, 2, 8, 5)
    assert train[0][0].base is not None and train[0][0].dtype == np.uint16


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65536, np.uint16), (65537, np.uint32)])
def test_smallest_width(tmp_path: Path, vocab_size: int, dtype: type) -> None:
    cfg = made(tmp_path, pairs(1))
    assert build_caches(cfg, ByteEncoder(vocab_size)).train[0][0].dtype == dtype


def test_trained_tokens_of_a_large_store_are_counted_in_little_memory(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    offsets = np.concatenate(([0], np.cumsum(rng.integers(1, 300, 20_000))))
    trained = rng.random(offsets[-1]) < 0.5
    cache = build_caches(made(tmp_path, pairs(1)), ByteEncoder()).train
    (tmp_path / TRAINED).write_bytes(np.packbits(trained).tobytes())
    cache._trained = os.open(tmp_path / TRAINED, os.O_RDONLY)
    cache.offsets, cache.members = offsets, np.arange(0, 20_000, 3, np.uint32)
    tracemalloc.start()
    counts = cache.predicted_counts()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    os.close(cache._trained)
    assert peak < 4 * len(trained)
    trained[offsets[:-1]] = False
    assert np.array_equal(counts, np.add.reduceat(trained, offsets[:-1], dtype=np.int64)[::3])


def test_split_by_fraction(tmp_path: Path) -> None:
    cfg = made(tmp_path, pairs(1200, length=5), validation_fraction=0.1)
    train, validation, report = build_caches(cfg, ByteEncoder())
    assert validation is not None
    assert (len(train), len(validation), report.train_samples, report.validation_samples) == (1080, 120, 1080, 120)
    assert sorted(answers(train) + answers(validation)) == [f"{number:05d}" for number in range(1200)]
    assert train.num_tokens + validation.num_tokens == train.offsets[-1]
    assert sorted([*train.members, *validation.members]) == list(range(1200))
    cfg.run.seed += 1
    other = build_caches(cfg, ByteEncoder()).validation
    assert other is not None
    assert answers(other) != answers(validation)


def test_split_by_number_of_rows(tmp_path: Path) -> None:
    """The rows are the first of those that a fraction would take; equal rows go with them, all samples of a row too."""
    cfg = made(tmp_path, [*pairs(50, length=5), *pairs(50, length=5)], validation_fraction=0.2)
    fraction = build_caches(cfg, ByteEncoder()).validation
    cfg.data.validation_rows = 10
    train, validation, report = build_caches(cfg, ByteEncoder())
    assert fraction is not None and validation is not None
    assert answers(validation) == answers(fraction)
    assert (len(train), len(validation), report.leaked) == (80, 20, 0)
    assert len({*answers(train)} | {*answers(validation)}) == 50
    cfg.data.validation_rows = 49
    assert len(build_caches(cfg, ByteEncoder()).train) == 2
    cfg.data.validation_rows = 50
    with pytest.raises(DataError, match=r"data.validation = 50 rows: there are 50 different rows, and none would be"):
        build_caches(cfg, ByteEncoder())


def test_samples_of_a_row_stay_on_one_side_of_the_split(tmp_path: Path) -> None:
    rows = [{"text": f"{number:02d}" * 20} for number in range(20)]
    cfg = made(tmp_path, rows, max_length=10, too_long=TooLong.split, validation_rows=5)
    train, validation, _ = build_caches(cfg, ByteEncoder())
    assert validation is not None
    held, trained = ({cache.where(index) for index in range(len(cache))} for cache in (validation, train))
    assert (len(held), len(trained), held & trained) == (5, 15, set())
    assert len(validation) == 5 * len(train) // 15 > 5


@pytest.mark.parametrize(
    ("rows", "fraction", "count"), [(1, 0.5, 0), (2, 0.01, 1), (2, 0.99, 1), (10, 0, 0), (10, 0.25, 2)]
)
def test_split_sizes(rows: int, fraction: float, count: int) -> None:
    splits = split_rows(rows, fraction, 5)
    assert len(splits["validation"]) == count
    assert sorted([*splits["train"], *splits["validation"]]) == list(range(rows))


def test_split_by_file(tmp_path: Path) -> None:
    cfg = made(tmp_path, pairs(3), validation_fraction=0.5)
    cfg.data.validation = [SourceConfig(path=write_rows(tmp_path / "v.jsonl", [{"prompt": "p", "response": "v"}]))]
    cfg.data.max_samples = 2
    train, validation, report = build_caches(cfg, ByteEncoder())
    assert validation is not None
    assert (answers(train), answers(validation), report.rows_read) == (["000", "001"], ["v"], 3)


LONG = [
    {"prompt": "p" * 5, "response": "a" * 5},  # 11 tokens
    {"prompt": "p", "response": "b" * 8},  # 10
    {"prompt": "p", "response": "c" * 9},  # 11, answer and end 10
    {"prompt": "p" * 50, "response": "d" * 8},  # 59, answer and end 9
    {"prompt": "p", "response": "e" * 40},
]


def test_too_long_is_dropped(tmp_path: Path) -> None:
    cfg = made(tmp_path, LONG, max_length=10, too_long=TooLong.drop)
    train, _, report = build_caches(cfg, ByteEncoder())
    assert answers(train) == ["b" * 8]
    assert report.dropped == {"longer than data.max_length = 10": 4}
    assert report.examples["longer than data.max_length = 10"][0] == f"{tmp_path}/d.jsonl:1"


def chat(*contents: str, system: str = "") -> dict[str, object]:
    messages = [{"role": ("user", "assistant")[number % 2], "content": text} for number, text in enumerate(contents)]
    return {"messages": [{"role": "system", "content": system}] * bool(system) + messages}


def texts(store: TokenizedCache) -> list[str]:
    """Return each sample as text, $ for end tokens, what is trained in upper case."""
    found = []
    for index in range(len(store)):
        ids, trained = store[index]
        found.append("".join(text_of([i]).upper() if t else text_of([i]) for i, t in zip(ids, trained, strict=True)))
    return found


CHATS = [
    chat("q", "a", "r", "b", "s", "c", system="_"),  # 1 + 3 x 3 = 10 tokens
    chat("q", "a" * 4, "r", "b" * 4, "s", "c" * 3, system="_"),  # turns of 6, 6, 5
    chat("q", "a", "r", "b" * 12, "s", "c" * 3),  # turns of 3, 14, 5
    chat("q" * 9, "b" * 4),
]


def test_truncation_keeps_the_newest_whole_turns(tmp_path: Path) -> None:
    cfg = made(tmp_path, CHATS, max_length=10, too_long=TooLong.truncate)
    train, _, report = build_caches(cfg, ByteEncoder())
    assert texts(train) == ["_qA$rB$sC$", "_sCCC$", "sCCC$", "qqqqqqqqqB"]  # the last without its end, and end token
    assert (report.longer, report.longest, report.truncated, report.turns_dropped, report.cut) == (3, 22, 3, 4, 1)
    assert report.dropped == {}
    cfg.data.max_length = 12
    train = build_caches(cfg, ByteEncoder()).train
    assert texts(train) == ["_qA$rB$sC$", "_rBBBB$sCCC$", "sCCC$", "qqqqqqqqqBBB"]


def test_truncation_keeps_the_system_message_and_drops_what_has_no_answer_left(tmp_path: Path) -> None:
    rows = [chat("q", "a", "r", "b" * 12, system="__"), chat("q" * 12, "a"), chat("q", "a")]
    train, _, report = build_caches(made(tmp_path, rows, max_length=10), ByteEncoder())
    assert texts(train) == ["__rBBBBBBB", "qA$"]
    assert (report.truncated, report.cut, report.turns_dropped) == (1, 1, 1)
    assert report.dropped == {"longer than data.max_length = 10": 1}


@pytest.mark.parametrize("rule", TooLong)
def test_how_many_rows_are_longer_is_told(tmp_path: Path, said: list[str], rule: TooLong) -> None:
    rows = [chat("p", str(number)) for number in range(197)] + CHATS[1:]
    cfg = made(tmp_path, rows, max_length=10, too_long=rule)
    if rule is TooLong.error:
        return
    report = build_caches(cfg, ByteEncoder()).report
    report.print_longer(cfg.data)
    became = {
        TooLong.truncate: "3 samples were shortened, which took 4 oldest turns and the end of 1 last answers or texts",
        TooLong.drop: "they are skipped",
        TooLong.split: "3 became several samples",
    }
    line = (
        "3 of 200 rows (1.5 %) are longer than data.max_length = 10 tokens, the longest has 22. "
        f"data.too_long={rule.value}: {became[rule]}."
    )
    assert said == [f"WARNING: {line}"]
    report.rows_read = 300  # one in a hundred is no reason to be alarmed
    report.print_longer(cfg.data)
    assert "WARNING" not in said[-1] and "3 of 300 rows (1 %)" in said[-1]


def test_splitting_trains_every_token_once(tmp_path: Path) -> None:
    cfg = made(tmp_path, [*CHATS, {"text": "x" * 25}], max_length=10, too_long=TooLong.split)
    cfg.data.sources.append(SourceConfig(path=write_rows(tmp_path / "t.jsonl", [{"text": "0123456789abcdefghijk"}])))
    write_rows(tmp_path / "d.jsonl", CHATS)
    train, _, report = build_caches(cfg, ByteEncoder())
    assert texts(train) == [
        "_qA$rB$sC$",
        "_qAAAA$",
        "_rBBBB$",
        "_sCCC$",
        "qA$",
        "rBBBBBBBBB",
        "bBBB$",  # begins with the last token before it, as context
        "sCCC$",
        "qqqqqqqqqB",
        "bBBB$",
        "0123456789",
        "9ABCDEFGHI",
        "iJK$",
    ]
    assert report.split == 4
    assert report.dropped == {}
    assert [train.where(index) for index in (4, 5, 6, 7)] == [f"{tmp_path}/d.jsonl:3"] * 4


def test_windows_end_with_answers_and_dropped_turns_are_counted(tmp_path: Path, said: list[str]) -> None:
    calls = [{"role": "assistant", "content": "aaa"}, {"role": "tool", "content": "tt"}] * 2
    loop = {"messages": [{"role": "user", "content": "qq"}, *calls, {"role": "assistant", "content": "b"}]}
    cfg = made(tmp_path, [loop], max_length=10, too_long=TooLong.split)
    assert texts(build_caches(cfg, ByteEncoder()).train) == ["qqAAA$", "$ttAAA$", "$ttB$"]
    cfg = made(
        tmp_path,
        [{"prompt": "q", "response": "a", "history": [["q", "a"]] * 5}],
        max_length=9,
        too_long=TooLong.truncate,
    )
    report = build_caches(cfg, ByteEncoder()).report
    assert (report.truncated, report.turns_dropped) == (1, 3)
    _print_report(report, cfg.data)
    assert any("1 sample was shortened, which took 3 oldest turns" in line for line in said)


def test_windows_without_a_trained_token_are_left_out(tmp_path: Path) -> None:
    cfg = made(tmp_path, [chat("q" * 25, "ab"), chat("q", "abc" * 5)], max_length=10, too_long=TooLong.split)
    assert texts(build_caches(cfg, ByteEncoder()).train) == ["qqqqqqqAB$", "qABCABCABC", "cABCABC$"]
    whole_only = ByteEncoder()
    whole_only.can_cut, whole_only.fingerprint = False, "uncut"
    with pytest.raises(DataError, match=r"none of the 2 rows.*\n  2 x longer than data.max_length = 10"):
        build_caches(cfg, whole_only)


def test_a_format_that_trains_last_answers(tmp_path: Path) -> None:
    cfg = made(tmp_path, CHATS[:2], max_length=12, train_on=TrainOn.all, too_long=TooLong.truncate)
    train, _, report = build_caches(cfg, ByteEncoder(only_last=True))
    assert [text.replace("$", "") for text in texts(train)][:3] == ["_qA", "_qArB", "_qArBsC"]
    assert report.rows_read == 2
    assert train.num_tokens == sum(map(len, texts(train)))
    cfg.data.validation_fraction = 0.5
    train, validation, _ = build_caches(cfg, ByteEncoder(only_last=True))
    assert validation is not None
    lines = [{store.where(index) for index in range(len(store))} for store in (train, validation)]
    assert not lines[0] & lines[1]  # samples of one row are never on both sides


def test_plain_text_is_cut_at_its_end(tmp_path: Path) -> None:
    cfg = made(tmp_path, [{"text": "abcdefghijklm"}, {"text": "xy"}], max_length=8, too_long=TooLong.truncate)
    train, _, report = build_caches(cfg, ByteEncoder())
    assert texts(train) == ["aBCDEFGH", "xY$"]
    assert report.truncated == 1


def test_flags_at_messages(tmp_path: Path) -> None:
    row = chat("q", "a", "r", "b")
    row["messages"][1]["loss"] = False  # type: ignore[index]
    cfg = made(tmp_path, [row, chat("q", "a")])
    for train_on, expected in (
        (TrainOn.auto, ["qa$rB$", "qA$"]),
        (TrainOn.all, ["qa$rB$", "qA$"]),
        (TrainOn.last, ["qa$rB$", "qA$"]),
    ):
        cfg.data.train_on = train_on
        assert texts(build_caches(cfg, ByteEncoder()).train) == expected
    cfg.data.train_on = TrainOn.marked
    with pytest.raises(DataError, match="2 x no token the loss covers"):
        build_caches(cfg, ByteEncoder())
    row["messages"][3]["loss"] = True  # type: ignore[index]
    write_rows(tmp_path / "d.jsonl", [row, chat("q", "a")])
    assert texts(build_caches(cfg, ByteEncoder()).train) == ["qa$rB$"]


def test_too_long_is_an_error(tmp_path: Path) -> None:
    cfg = made(tmp_path, LONG[1:], max_length=10, too_long=TooLong.error)
    with pytest.raises(DataError) as error:
        build_caches(cfg, ByteEncoder())
    assert str(error.value) == (
        f"{tmp_path}/d.jsonl:2: 11 tokens, more than data.max_length = 10. Raise it, or choose what happens to long "
        "rows with data.too_long=drop, truncate or split."
    )


def test_nothing_trained(tmp_path: Path) -> None:
    cfg = made(tmp_path, pairs(2))
    with pytest.raises(DataError) as error:
        build_caches(cfg, UntrainedEncoder())
    assert str(error.value) == (
        "No trained tokens: none of the 2 rows of data.sources can be used.\n"
        f"  2 x no token the loss covers ({tmp_path}/d.jsonl:1, {tmp_path}/d.jsonl:2)"
    )
    assert not list((tmp_path / "cache" / "stores").glob("*.tmp-*"))


def test_seven_of_eight(tmp_path: Path) -> None:
    """The mask is kept as bits: samples begin anywhere in a byte."""
    rows = [{"prompt": "p" * (number % 11 + 1), "response": "a" * (number * 7 % 13 + 1)} for number in range(300)]
    train = build_caches(made(tmp_path, rows), ByteEncoder()).train
    for row, text in zip(rows, texts(train), strict=True):
        assert text == row["prompt"] + row["response"].upper() + "$"


def test_rows_the_encoder_refuses(tmp_path: Path) -> None:
    cfg = made(tmp_path, [*pairs(2), {"prompt": "p", "response": "REFUSED"}, {"prompt": "p"}])
    with pytest.raises(DataError) as error:
        cfg.data.max_samples = 3
        build_caches(cfg, ByteEncoder())
    assert str(error.value) == (
        f"{tmp_path}/d.jsonl:3: refused by the encoder. Such rows are skipped and counted with data.on_bad_row=skip."
    )
    cfg.data.on_bad_row, cfg.data.max_samples = OnBadRow.skip, 0
    train, _, report = build_caches(cfg, ByteEncoder())
    assert len(train) == 2
    assert report.dropped == {"cannot be used": 2}
    assert report.examples["cannot be used"] == [
        f"{tmp_path}/d.jsonl:4: no key 'response'; the row has 'prompt'. "
        "Add it, remove the row, or map another key: data.columns={response:NAME}.",
        f"{tmp_path}/d.jsonl:3: refused by the encoder.",
    ]


def test_store_is_reused_until_something_changes(tmp_path: Path) -> None:
    cfg, encoder = made(tmp_path, pairs(6)), ByteEncoder()
    first = build_caches(cfg, encoder).report
    second = build_caches(cfg, encoder).report
    assert (first.built, second.built, encoder.calls) == (True, False, 1)
    second.built = second.is_new = True
    assert second == first

    changes = [("max_length", 9), ("too_long", TooLong.drop), ("max_samples", 3), ("validation_fraction", 0.3)]
    changes.append(("validation_rows", 1))
    for name, value in changes:
        setattr(cfg.data, name, value)
        assert build_caches(cfg, encoder).report.built, name
    cfg.data.sources[0].max_samples = 2
    assert build_caches(cfg, encoder).report.built
    encoder.fingerprint = "other"
    assert build_caches(cfg, encoder).report.built
    write_rows(tmp_path / "d.jsonl", pairs(7))
    assert build_caches(cfg, encoder).report.built
    assert not build_caches(cfg, encoder).report.built


def test_moved_file_is_the_same_data(tmp_path: Path) -> None:
    cfg = made(tmp_path, pairs(6))
    build_caches(cfg, ByteEncoder())
    (tmp_path / "d.jsonl").rename(tmp_path / "moved.jsonl")
    cfg.data.sources[0].path = str(tmp_path / "moved.jsonl")
    assert not build_caches(cfg, ByteEncoder()).report.built


@pytest.mark.parametrize("name", ["ids.bin", "trained.bin", "manifest.json", "train.npy", "offsets.npy"])
def test_damaged_store_is_built_again(tmp_path: Path, name: str) -> None:
    cfg = made(tmp_path, pairs(6))
    folder = Path(build_caches(cfg, ByteEncoder()).report.folder)
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[:-3])
    train, _, report = build_caches(cfg, ByteEncoder())
    assert report.built
    assert len(train) == 6


def test_a_flipped_bit_is_found(tmp_path: Path) -> None:
    folder = build_caches(made(tmp_path, pairs(6)), ByteEncoder()).train.folder
    assert damaged_files(folder) == []
    for name in ("ids.bin", "trained.bin", "offsets.npy", "lines.npy"):
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[:-1] + bytes([content[-1] ^ 64]))
        assert damaged_files(folder) == [name]
        (folder / name).write_bytes(content)


def test_a_cache_of_before_a_row_was_rejected_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until version 8, an empty list of calls after an answer was read as nothing."""
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    cfg = made(tmp_path, [{"messages": [*turns, {"role": "function_call", "content": "[]"}]}, {"messages": turns}])
    cfg.data.on_bad_row = OnBadRow.skip
    read = MessageReader._assistant_message
    no_calls = {"role": "assistant", "content": "", "tool_calls": []}
    with monkeypatch.context() as before:
        before.setattr(tokenize_workers, "CODE_VERSION", 8)
        before.setattr(
            MessageReader,
            "_assistant_message",
            lambda self, item, key, role: read(self, item, key, role) if role == "assistant" else no_calls,
        )
        assert build_caches(cfg, ByteEncoder()).report.bad_rows == 0
    assert build_caches(cfg, ByteEncoder()).report.bad_rows == 1


def test_what_changed_is_said(tmp_path: Path, said: list[str]) -> None:
    cfg = made(tmp_path, pairs(6))
    first = build_caches(cfg, ByteEncoder()).train
    assert said == []
    cfg.data.max_length = 9
    build_caches(cfg, ByteEncoder())
    write_rows(tmp_path / "d.jsonl", pairs(7))
    second = build_caches(cfg, ByteEncoder()).train
    changes = [line.partition("this changed: ")[2] for line in said]
    assert changes == ["max_length 1024 -> 9."], "of other data it is another recipe's cache, mostly"
    assert first.fingerprint[:8] in said[0] and second.fingerprint != first.fingerprint


def test_a_foreign_store_is_not_used(tmp_path: Path) -> None:
    cfg = made(tmp_path, pairs(6))
    ours = build_caches(cfg, ByteEncoder()).train.folder
    cfg.data.max_length = 9
    other = build_caches(cfg, ByteEncoder()).train.folder
    shutil.rmtree(other)
    shutil.copytree(ours, other)  # whole, but not what its name says
    assert build_caches(cfg, ByteEncoder()).report.built


def prepare_in_process(cfg: RunConfig, results: "multiprocessing.Queue[tuple[bool, bool, int]]") -> None:
    train, _, report = build_caches(cfg, ByteEncoder())
    results.put((report.built, report.is_new, int(train.read_ids(0, int(train.offsets[-1])).sum())))


def test_two_processes_at_once(tmp_path: Path) -> None:
    cfg = made(tmp_path, pairs(3000))
    context = multiprocessing.get_context("spawn")
    results: multiprocessing.Queue[tuple[bool, bool, int]] = context.Queue()
    processes = [context.Process(target=prepare_in_process, args=(cfg, results)) for _ in range(2)]
    for process in processes:
        process.start()
    answers_ = [results.get(timeout=200) for _ in processes]
    for process in processes:
        process.join(30)
    assert sorted(built for built, _, _ in answers_) == [False, True]
    assert all(is_new for _, is_new, _ in answers_), "whichever built it, both began before"
    assert len({total for _, _, total in answers_}) == 1
    manifest = Path(build_caches(cfg, ByteEncoder()).report.folder) / "manifest.json"
    day_s = 24 * 3600
    os.utime(manifest, (manifest.stat().st_atime - day_s, manifest.stat().st_mtime - day_s))
    later = context.Process(target=prepare_in_process, args=(cfg, results))
    later.start()
    assert results.get(timeout=200)[:2] == (False, False)
    later.join(30)


def test_store_travels_as_a_path(tmp_path: Path) -> None:
    train = build_caches(made(tmp_path, pairs(500)), ByteEncoder()).train
    data = pickle.dumps(train)
    assert len(data) < 500
    assert answers(pickle.loads(data)) == answers(train)


def test_manifest_says_what_the_store_is(tmp_path: Path) -> None:
    cfg = made(tmp_path, pairs(4), validation_fraction=0.25)
    manifest = json.loads((Path(build_caches(cfg, ByteEncoder()).report.folder) / "manifest.json").read_text())
    assert manifest["inputs"]["encoder"] == "bytes"
    assert manifest["splits"]["train"] == {"samples": 3, "tokens": 18, "trained_tokens": 12}
    assert manifest["splits"]["validation"] == {"samples": 1, "tokens": 6, "trained_tokens": 4}


def test_keys_of_messages_that_are_not_read_are_counted_and_text_is_an_error(tmp_path: Path, said: list[str]) -> None:
    turns = [{"role": "user", "content": "q", "id": "a1"}, {"role": "assistant", "content": "a", "id": "a2"}]
    cfg = made(tmp_path, [{"messages": turns}] * 3)
    report = build_caches(cfg, ByteEncoder()).report
    assert report.message_keys == {"id": 6}
    _print_report(report, cfg.data)
    assert "Keys of messages that are not read: id (6)." in said
    turns[1]["thoughts"] = "because"
    cfg = made(tmp_path, [{"messages": turns}])
    with pytest.raises(DataError, match=r"d\.jsonl:1: message 2 of 'messages': the key 'thoughts' is not read"):
        build_caches(cfg, ByteEncoder())
