"""A stream gives the samples of the tokenized cache: all of a pass, in their order, from any place on."""

import csv
import gzip
import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings, strategies as st

from tests.unit.data_tools import ByteEncoder, pairs, run_config, write_rows
from toolkit.config.load import load
from toolkit.config.rules import check_rules
from toolkit.config.schema import OnBadRow, Packing, PreferenceLoss, RowFormat, RunConfig, SourceConfig
from toolkit.data import sources, stream, stream_pieces
from toolkit.data.tokenize import build_caches
from toolkit.messages import ConfigError, DataError
from toolkit.tasks.stream import check_stream

Rows = Sequence[dict[str, str]]
Taken = list[list[list[stream.StreamSample]]]
"""Step, lane, samples of its sequence."""


def as_parquet(path: Path, rows: Rows) -> None:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path, row_group_size=7)


def as_csv(path: Path, rows: Rows) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["prompt", "response"])
        writer.writeheader()
        writer.writerows(rows)


WRITERS: dict[str, Callable[[Path, Rows], object]] = {
    "jsonl": write_rows,
    "parquet": as_parquet,
    "jsonl.gz": lambda path, rows: path.write_bytes(
        gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode())
    ),
    "json": lambda path, rows: path.write_text(json.dumps(rows)),
    "csv": as_csv,
}
SEEKABLE = ("jsonl", "parquet")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_pieces, "_BLOCK_BYTES", 100)
    monkeypatch.setattr(stream_pieces, "_BLOCK_ROWS", 5)
    monkeypatch.setattr(stream, "_LEAST_PACKED", 3)
    stream_pieces._is_lines_of.cache_clear()
    stream_pieces._with_format.cache_clear()


def opened(cfg: RunConfig) -> stream.Stream:
    return stream.Stream(cfg, ByteEncoder(), sources.locate_all(cfg.data, Path(cfg.prepare.dir)))


def beginning(data: stream.Stream) -> dict[int, stream.Places]:
    return {lane: data.position_of(lane, {}) for lane in range(data.lanes)}


def facts(sample: stream.StreamSample) -> tuple[str, tuple[int, ...], tuple[bool, ...]]:
    return sample.where, tuple(sample.ids.tolist()), tuple(sample.trained.tolist())


def one_pass(data: stream.Stream, lane: int) -> list[list[stream.StreamSample]]:
    """Return the sequences of a lane's first pass over the first source; [] for a lane without rows."""
    with data.executor() as executor:
        reader = stream.LaneReader(data, executor, lane, 0, [*stream.Start(), 0])
        sequences: list[list[stream.StreamSample]] = []
        try:
            while True:
                taken = reader.take()
                if reader.start.epoch:
                    return sequences
                sequences.append(taken)
        except DataError as error:
            if "no row can be trained" not in str(error):
                raise
            return []


def written(folder: Path, kinds: Sequence[str], counts: Sequence[int], seed: int) -> list[str]:
    """Write a file for each kind; return their paths."""
    draw, paths = random.Random(seed), []
    for number, (kind, count) in enumerate(zip(kinds, counts, strict=True)):
        rows = [
            {"prompt": f"{number}-{row} é" * draw.randint(1, 3), "response": "x" * draw.randint(1, 40)}
            for row in range(count)
        ]
        paths.append(str(folder / f"{number}.{kind}"))
        WRITERS[kind](Path(paths[-1]), rows)
    return paths


@given(
    kinds=st.lists(st.sampled_from(list(WRITERS)), min_size=1, max_size=5),
    lanes=st.integers(1, 7),
    packed=st.booleans(),
    shuffle=st.sampled_from([0, 1, 9]),
    seed=st.integers(0, 999),
)
@settings(deadline=None, max_examples=30)
def test_a_pass_has_the_samples_of_the_cache(
    kinds: list[str], lanes: int, packed: bool, shuffle: int, seed: int
) -> None:
    with TemporaryDirectory() as name:
        folder, draw = Path(name), random.Random(seed)
        counts = [draw.randint(1, 40) for _ in kinds]
        cfg = run_config(folder, *written(folder, kinds, counts, seed))
        cfg.data.sources = [SourceConfig(path=f"{folder}/[0-9].*")]
        cfg.data.max_length, cfg.batch.global_size, cfg.data.shuffle_buffer = 80, lanes, shuffle
        cache = build_caches(cfg, ByteEncoder()).train
        cached = [(cache.where(n), tuple(cache[n][0].tolist()), tuple(cache[n][1].tolist())) for n in range(len(cache))]
        cfg.data.packing = Packing.packed if packed else Packing.none
        data = opened(cfg)
        passes = [one_pass(data, lane) for lane in range(lanes)]
        streamed = [facts(sample) for sequences in passes for sequence in sequences for sample in sequence]
        assert Counter(streamed) == Counter(cached)
        if not packed and not shuffle and set(kinds) <= {*SEEKABLE}:
            assert streamed == cached  # lane after lane, the order of the files
        if packed:
            assert all(sum(len(sample.ids) for sample in row) <= 80 for rows in passes for row in rows)
        else:
            assert all(len(row) == 1 for rows in passes for row in rows)


@given(
    kinds=st.lists(st.sampled_from(list(WRITERS)), min_size=2, max_size=5),
    lanes=st.integers(1, 4),
    packed=st.booleans(),
    shuffle=st.sampled_from([0, 9]),
    step=st.integers(0, 60),
    seed=st.integers(0, 999),
)
@settings(deadline=None, max_examples=20)
def test_any_position_continues(kinds: list[str], lanes: int, packed: bool, shuffle: int, step: int, seed: int) -> None:
    """From a position, as a checkpoint has it, lanes go on as they did, also lane by lane as on other ranks."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        paths = written(folder, kinds, [60] * len(kinds), seed)
        cfg = run_config(folder, paths[0], *paths[1:])
        for source in cfg.data.sources[1:]:
            source.weight = 0.7
        cfg.data.max_length, cfg.batch.global_size, cfg.data.shuffle_buffer = 80, lanes, shuffle
        cfg.data.packing = Packing.packed if packed else Packing.none
        data = opened(cfg)
        try:
            straight = list(islice(data.steps(0, beginning(data)), step + 12))
        except DataError as error:  # a lane gets no block of a file that cannot be divided
            if "no row can be trained" not in str(error):
                raise
            return
        saved = json.loads(json.dumps(straight[step][1]))
        wanted = [[[facts(sample) for sample in row] for row in rows] for rows, _ in straight[step + 1 :]]
        places = {int(lane): place for lane, place in saved.items()}
        again = [
            [[facts(sample) for sample in row] for row in rows]
            for rows, _ in islice(opened(cfg).steps(step + 1, places), 11)
        ]
        assert again == wanted
        for lane, place in places.items():
            alone = [facts(rows[0][0]) for rows, _ in islice(opened(cfg).steps(step + 1, {lane: place}), 11)]
            assert alone == [rows[lane][0] for rows in wanted]


def test_processes_tokenize_the_same(tmp_path: Path) -> None:
    cfg = run_config(tmp_path, write_rows(tmp_path / "a.jsonl", pairs(200)))
    cfg.batch.global_size, cfg.data.shuffle_buffer = 2, 20

    def taken() -> list[Any]:
        data = opened(cfg)
        return [[facts(row[0]) for row in rows] for rows, _ in islice(data.steps(0, beginning(data)), 150)]

    straight = taken()
    cfg.data.num_workers = 1
    assert taken() == straight


def test_sources_are_mixed_by_samples_and_weight(tmp_path: Path) -> None:
    """As without streaming a weight says how often each sample comes per epoch, whatever the rows' lengths."""
    paths = [write_rows(tmp_path / "a.jsonl", pairs(50))]
    paths.append(write_rows(tmp_path / "b.jsonl", [{"prompt": "q" * 90, "response": "a" * 90}] * 50))
    cfg = run_config(tmp_path, *paths)
    cfg.data.sources[1].weight, cfg.batch.global_size = 3, 4
    data = opened(cfg)
    assert data.shares == [0.25, 0.75]
    assert data.steps_per_epoch == 50
    for lane in range(4):
        chosen = [data.source_at(lane, number) for number in range(1000)]
        for begin in range(0, 1000, 100):
            assert abs(sum(chosen[begin : begin + 100]) - 75) <= 2
    assert len({tuple(data.source_at(lane, number) for number in range(20)) for lane in range(4)}) > 1
    list(islice(data.steps(0, beginning(data)), data.steps_per_epoch))
    for lane in range(4):
        assert data.passes[lane] == pytest.approx([1, 3], abs=0.3)  # a row more or less of 12


@pytest.mark.parametrize("kinds", [["jsonl"], ["parquet"], ["jsonl", "parquet"], ["jsonl.gz"] * 40, ["csv", "json"]])
@pytest.mark.parametrize("packed", [False, True])
def test_an_epoch_is_estimated(kinds: list[str], packed: bool, tmp_path: Path) -> None:
    """From 32 small blocks of each source, of files that cannot be read from their middle from the first ones."""
    count = 1500 // len(kinds)
    paths = written(tmp_path, kinds, [count] * len(kinds), 5)
    cfg = run_config(tmp_path, *paths)
    cfg.data.sources = [SourceConfig(path=f"{tmp_path}/[0-9]*.*")]
    cfg.data.max_length, cfg.batch.global_size = 400, 2
    cfg.data.packing = Packing.packed if packed else Packing.none
    data = opened(cfg)
    sampled = sum(len(estimate.samples) for estimate in data.estimates)
    passes = [one_pass(data, lane) for lane in range(2)]
    assert 0 < sampled < (600 if set(kinds) <= {*SEEKABLE} else 1501)
    assert data.steps_per_epoch == pytest.approx(sum(map(len, passes)) / 2, rel=0.12)
    assert opened(cfg).steps_per_epoch == data.steps_per_epoch


def test_small_data_are_counted(tmp_path: Path) -> None:
    cfg = run_config(tmp_path, write_rows(tmp_path / "a.jsonl", pairs(37)))
    cfg.batch.global_size = 4
    assert opened(cfg).steps_per_epoch == 9
    cfg.data.sources[0].weight = 2
    assert opened(cfg).steps_per_epoch == 18


def test_one_estimate_of_an_epoch_is_said(tmp_path: Path, said: list[str]) -> None:
    """At startup and with the model: of the samples that it has by the weights of the sources."""
    from toolkit.tasks.stream import SampledRows  # with deepspeed, which no other test here needs

    paths = [write_rows(tmp_path / f"{count}.jsonl", pairs(count)) for count in (40, 10)]
    cfg = run_config(tmp_path, *paths)
    cfg.data.sources[0].weight, cfg.data.sources[1].weight, cfg.batch.global_size = 0.5, 2, 2
    data = opened(cfg)
    data.say_estimate()
    sampled = SampledRows(data)
    assert any("an epoch is about 40 samples, 20 steps" in line for line in said)
    weighted = [(sample, 0.5 if number < 40 else 2) for number, sample in enumerate(sampled.samples)]
    assert (sampled.num_samples, sampled.num_tokens) == (40, round(sum(len(one.ids) * w for one, w in weighted)))


def test_lanes_that_end_begin_again(tmp_path: Path) -> None:
    """A pass of a lane is over when its own part is; the others do not wait."""
    rows = [{"prompt": "q", "response": "x" * (1 if number < 30 else 90)} for number in range(40)]
    cfg = run_config(tmp_path, write_rows(tmp_path / "a.jsonl", rows))
    cfg.batch.global_size = 2
    data = opened(cfg)
    *_, (_, places) = islice(data.steps(0, beginning(data)), 40)
    assert places[0][0][0] < places[1][0][0]


def test_bad_rows(tmp_path: Path, said: list[str]) -> None:
    lines = [json.dumps(row) for row in pairs(60)]
    lines[41] = '{"prompt": "q"'
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(lines))
    cfg = run_config(tmp_path, str(path))
    cfg.batch.global_size = 3
    with pytest.raises(DataError, match=rf"{path}:42: .*on_bad_row=skip"):
        list(islice(opened(cfg).steps(0, beginning(opened(cfg))), 40))
    cfg.data.on_bad_row = OnBadRow.skip
    data = opened(cfg)
    data.bad_rows_file = tmp_path / "bad.jsonl"
    assert sum(len(one_pass(data, lane)) for lane in range(3)) == 59
    assert json.loads(data.bad_rows_file.read_text().splitlines()[0])["line"] == 42
    path.write_text("\n".join(['{"prompt": "q"'] * 12 + lines[:30]))
    cfg.batch.global_size = 1
    with pytest.raises(DataError, match=r"cannot be used, more than data.max_bad_fraction"):
        one_pass(opened(cfg), 0)


def test_too_few_rows(tmp_path: Path) -> None:
    cfg = run_config(tmp_path, write_rows(tmp_path / "a.jsonl", pairs(3)))
    cfg.batch.global_size = 8
    with pytest.raises(DataError, match=r"part \d of 8 of data.sources\[0\].*smaller batch.global_size"):
        next(opened(cfg).steps(0, beginning(opened(cfg))))
    cfg.batch.global_size, cfg.data.max_length = 1, 8
    rows = [{"prompt": "far too long for this", "response": "x"}] * 40
    cfg.data.sources = [SourceConfig(path=write_rows(tmp_path / "b.jsonl", rows))]
    with pytest.raises(DataError, match="no row can be trained"):
        next(opened(cfg).steps(0, beginning(opened(cfg))))


def test_files_that_change(tmp_path: Path) -> None:
    paths = [Path(write_rows(tmp_path / f"{name}.jsonl", pairs(200))) for name in "ab"]
    cfg = run_config(tmp_path, f"{tmp_path}/*.jsonl")
    before = json.loads(json.dumps(opened(cfg).signatures))
    stream_pieces.check_same(before, opened(cfg).signatures)
    text = paths[1].read_text()
    paths[1].write_text(text.replace("q7", "Q7"))
    with pytest.raises(DataError, match=r"b.jsonl has changed since"):
        stream_pieces.check_same(before, opened(cfg).signatures)
    paths[1].rename(tmp_path / "c.jsonl")
    with pytest.raises(DataError, match=r"b.jsonl is gone"):
        stream_pieces.check_same(before, opened(cfg).signatures)
    (tmp_path / "c.jsonl").rename(paths[1])
    paths[1].write_text(text)
    (tmp_path / "c.jsonl").write_text(text)
    with pytest.raises(DataError, match="files that the checkpoint's run did not read"):
        stream_pieces.check_same(before, opened(cfg).signatures)
    (tmp_path / "c.jsonl").unlink()
    data = opened(cfg)
    paths[0].write_text(text[: len(text) // 2])
    with pytest.raises(DataError, match="was changed while the run was reading it"):
        next(data.steps(0, beginning(data)))


WORDS = ["recipe=quickstart", "model=hf", "model.path=MODEL", "data.path=FILE", "data.streaming=true"]


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["train.max_steps=5"], "data.validation_fraction = 0.05"),
        (["train.max_steps=5", "data.validation=100"], "data.validation_rows = 100"),
        (["train.max_steps=5", "data.validation_fraction=0", "data.packing=grouped"], "data.packing = grouped"),
        (["train.max_steps=5", "data.validation_fraction=0", "data.max_samples=9"], "data.max_samples = 9"),
        (["train.max_steps=5", "data.validation_fraction=0", "data.curriculum.steps=3"], "data.curriculum.steps = 3"),
        (["train.max_steps=5", "data.validation_fraction=0", "preference=kto"], "preference.loss = kto"),
        (["train.max_steps=5", "data.validation_fraction=0", "model=glm_tiny"], "model.init = random"),
    ],
)
def test_what_a_stream_cannot_do(words: list[str], key: str, tmp_path: Path) -> None:
    file = write_rows(tmp_path / "a.jsonl", pairs(20))
    chosen = [word for word in WORDS if not (word.startswith("model") and any(w.startswith("model=") for w in words))]
    loaded = load([word.replace("FILE", file).replace("MODEL", str(tmp_path)) for word in [*chosen, *words]])
    with pytest.raises(ConfigError) as error:
        check_rules(loaded, 1, files=False)
    assert f"{key} and data.streaming = true cannot be together" in str(error.value)


def test_what_sources_of_a_stream_cannot_be(tmp_path: Path) -> None:
    cfg = run_config(tmp_path, write_rows(tmp_path / "a.jsonl", pairs(20)))
    check_stream(cfg)
    cfg.data.sources[0].max_samples = 3
    with pytest.raises(ConfigError, match=r"data.sources\[0\].max_samples needs the number of rows"):
        check_stream(cfg)
    cfg.data.streaming = True
    with pytest.raises(ConfigError, match=r"set data.streaming=false"):
        build_caches(cfg, ByteEncoder())


def preferences(count: int) -> list[dict[str, str]]:
    return [{"prompt": f"p{n}", "chosen": "good" * (n % 3 + 1), "rejected": f"bad {n}"} for n in range(count)]


@pytest.mark.parametrize("shuffle", [0, 7])
def test_pairs_stay_together(shuffle: int, tmp_path: Path) -> None:
    """A sequence of a lane is a row's chosen and rejected answer, also where it is shuffled or begins in the middle."""
    cfg = run_config(tmp_path, write_rows(tmp_path / "a.jsonl", preferences(50)))  # type: ignore[arg-type]
    cfg.data.sources[0].format, cfg.preference.loss = RowFormat.preference, PreferenceLoss.simpo
    cfg.batch.global_size, cfg.data.shuffle_buffer = 2, shuffle
    cache = build_caches(cfg, ByteEncoder()).train
    data = opened(cfg)
    passes = [one_pass(data, lane) for lane in range(2)]
    assert all(len(pair) == 2 and pair[0].where == pair[1].where for pairs in passes for pair in pairs)
    streamed = Counter(facts(sample) for pairs in passes for pair in pairs for sample in pair)
    assert streamed == Counter((cache.where(n), tuple(cache[n][0]), tuple(cache[n][1])) for n in range(len(cache)))
    assert data.steps_per_epoch == 25
    straight = list(islice(data.steps(0, beginning(data)), 30))
    again = list(islice(opened(cfg).steps(11, straight[10][1]), 19))
    assert [[facts(pair[1]) for pair in pairs] for pairs, _ in again] == [
        [facts(pair[1]) for pair in pairs] for pairs, _ in straight[11:]
    ]


@pytest.mark.parametrize("words", [["preference=dpo"], ["preference=dpo", "tuning=lora", "parallel=pipeline"]])
def test_a_reference_of_all_data_is_rejected(words: list[str]) -> None:
    cfg = load(["recipe=quickstart", "data.streaming=true", "data.validation_fraction=0", *words]).cfg
    with pytest.raises(ConfigError, match=r"preference.loss = sigmoid needs a reference, .*\nUse tuning=lora"):
        check_stream(cfg)
    check_stream(load(["recipe=quickstart", "data.streaming=true", "preference=dpo", "tuning=lora"]).cfg)
    check_stream(load(["recipe=quickstart", "data.streaming=true", "preference=simpo"]).cfg)
