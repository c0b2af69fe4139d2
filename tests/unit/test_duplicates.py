"""Data that is there twice: whole files are rejected, equal rows are counted and stay on one side of the split."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.unit.data_tools import ByteEncoder, pairs, run_config, write_rows
from toolkit.cli import check
from toolkit.config.schema import RowFormat, SourceConfig, TooLong
from toolkit.data.tokenize import build_caches, first_equal
from toolkit.messages import ToolkitError, set_language
from toolkit.report.page import data_card
from toolkit.report.run import read_run
from toolkit.tasks.language_data import load_data_with

NEW = {"prompt": "new", "response": "row"}


@pytest.mark.parametrize("kind", ["path", "relative", "link", "hard link", "pattern", "folder", "copy"])
@pytest.mark.parametrize("is_validation", [True, False], ids=["validation", "source"])
def test_a_file_under_two_entries_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, is_validation: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    path, other = Path(write_rows(tmp_path / "a.jsonl", pairs(20))), tmp_path / "other" / "b.jsonl"
    other.parent.mkdir()
    if kind in ("link", "hard link", "copy"):
        {"link": os.symlink, "hard link": os.link, "copy": shutil.copy}[kind](path, other)
    again = {"path": str(path), "relative": "other/../a.jsonl", "pattern": "*.jsonl", "folder": "."}.get(
        kind, str(other)
    )
    cfg = run_config(tmp_path, str(path))
    (cfg.data.validation if is_validation else cfg.data.sources).append(SourceConfig(path=again))
    expected = (
        r"data.validation\[0\] is also training data \(data.sources\[0\]\): .*a.jsonl.*data.validation_fraction"
        if is_validation
        else r"data.sources\[0\] and data.sources\[1\] read the same file: .*a.jsonl.*`weight`"
    )
    with pytest.raises(ToolkitError, match=expected):
        build_caches(cfg, ByteEncoder())


def test_check_finds_a_file_under_two_entries(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", pairs(20))
    (tmp_path / "b.jsonl").symlink_to(path)
    words = ["recipe=quickstart", f"data.sources=[{{path: {path}}}]", f"data.validation=[{{path: {tmp_path}/b.jsonl}}]"]
    with pytest.raises(ToolkitError, match=r"data.validation\[0\] is also training data"):
        check.run(words)


def test_one_file_read_in_two_ways_is_no_duplicate(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", pairs(20))
    cfg = run_config(tmp_path, path, path)
    cfg.data.sources[1].columns = {"prompt": "response", "response": "prompt"}
    assert build_caches(cfg, ByteEncoder()).report.repeated == 0
    rows = [{**row, "text": f"text {number}"} for number, row in enumerate(pairs(20))]
    both = write_rows(tmp_path / "both.jsonl", rows)
    cfg = run_config(tmp_path, both, both)
    cfg.data.sources[0].format, cfg.data.sources[1].format = RowFormat.text, RowFormat.prompt_response
    assert build_caches(cfg, ByteEncoder()).report.train_samples == 40


def test_equal_rows_are_counted_whatever_their_format(tmp_path: Path) -> None:
    first = write_rows(tmp_path / "a.jsonl", [*pairs(5), pairs(5)[3], {"prompt": "q9", "response": "009"}])
    turns = [{"role": "user", "content": "q1"}, {"role": "assistant", "content": "001"}]
    second = write_rows(tmp_path / "b.jsonl", [{"messages": turns}, {"messages": [*turns, *turns]}])
    cfg = run_config(tmp_path, first, second)
    cfg.data.validation = [SourceConfig(path=write_rows(tmp_path / "v.jsonl", [*pairs(2), NEW]))]
    report = build_caches(cfg, ByteEncoder()).report
    assert (report.repeated, report.leaked) == (2, 2)
    assert report.repeated_examples == [f"{first}:6 = {first}:4", f"{second}:1 = {first}:2"]
    assert report.leaked_examples == [f"{tmp_path}/v.jsonl:{line} = {first}:{line}" for line in (1, 2)]


def test_an_answer_that_is_not_trained_makes_another_row(tmp_path: Path) -> None:
    def row(loss: bool) -> dict[str, object]:
        answers = [{"role": "assistant", "content": "a", "loss": loss}, {"role": "assistant", "content": "b"}]
        question = {"role": "user", "content": "q"}
        return {"messages": [question, answers[0], question, answers[1]]}

    cfg = run_config(tmp_path, write_rows(tmp_path / "a.jsonl", [row(True), row(False), row(True)]))
    assert build_caches(cfg, ByteEncoder()).report.repeated == 1


def test_all_samples_of_a_row_count(tmp_path: Path) -> None:
    """Two texts that begin alike share their first window, not their second."""
    rows = [{"text": "0123456789abcdefghijk"}, {"text": "0123456789abcdefghijX"}, {"text": "0123456789abcdefghijk"}]
    cfg = run_config(tmp_path, write_rows(tmp_path / "t.jsonl", rows))
    cfg.data.max_length, cfg.data.too_long = 10, TooLong.split
    report = build_caches(cfg, ByteEncoder()).report
    assert report.train_samples > 3
    assert report.repeated == 1


def test_equal_rows_stay_on_one_side_of_the_split(tmp_path: Path) -> None:
    cfg = run_config(tmp_path, write_rows(tmp_path / "a.jsonl", [*pairs(200), *pairs(200)[::2], *pairs(200)]))
    cfg.data.validation_fraction = 0.2
    train, validation, report = build_caches(cfg, ByteEncoder())
    assert validation is not None
    sides = [{store[index][0].tobytes() for index in range(len(store))} for store in (train, validation)]
    assert not sides[0] & sides[1]
    assert [len(side) for side in sides] == [160, 40]
    assert report.leaked == 0
    assert report.repeated == len(train) - 160


def test_first_equal() -> None:
    hashes = np.array([7, 3, 7, 9, 3, 3], np.uint64)
    assert first_equal(hashes).tolist() == [0, 1, 0, 3, 1, 1]
    assert first_equal(hashes[:0]).tolist() == []


@pytest.mark.parametrize("language", ["en", "zh"])
def test_duplicates_are_told_by_a_store_that_is_used_again_too(tmp_path: Path, language: str) -> None:
    set_language(language)
    cfg = run_config(tmp_path, write_rows(tmp_path / "a.jsonl", [*pairs(20), *pairs(3)]))
    cfg.data.validation = [SourceConfig(path=write_rows(tmp_path / "v.jsonl", [*pairs(4), NEW]))]
    expected = {
        "en": ["Duplicates: 3 training rows are equal", "WARNING: 4 validation rows are also training rows"],
        "zh": ["重复数据：训练集有 3 行", "警告：验证集有 4 行同时也是训练数据"],
    }[language]
    for _ in range(2):
        lines: list[str] = []
        prepared = load_data_with(cfg, ByteEncoder())  # type: ignore[arg-type]
        assert [line for line in lines if line.startswith(tuple(expected))] == lines[-2:]
    assert prepared.report.duplicates()


def test_the_report_shows_duplicates(tmp_path: Path) -> None:
    (tmp_path / "DONE").write_text("{}")
    splits = {"train": {"samples": 20}}
    (tmp_path / "data.json").write_text(
        json.dumps({"splits": splits, "duplicates": {"training": 1234, "validation": 5}})
    )
    note = data_card(read_run(tmp_path))[0].note
    assert "Duplicates: 1,234 training rows; 5 validation rows that are also training rows." in note
