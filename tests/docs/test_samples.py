"""The samples of data on the pages are read as what they are shown for."""

import csv
import re
from pathlib import Path

import pytest
from pages import ROOT, blocks, chinese

from tests.unit.data_tools import ByteEncoder, pairs, run_config, write_rows
from toolkit.config.schema import DataConfig, RowFormat, SourceConfig
from toolkit.data.detection import detect_format
from toolkit.data.labeled_formats import ClassReader, LabelReader, MarginReader, PairReader, TextPairReader
from toolkit.data.message_lists import ROLES
from toolkit.data.rows import parse_line, parse_row
from toolkit.data.sources import read_conversations
from toolkit.data.tokenize import build_caches

ENGLISH = ROOT / "docs" / "data.md"
PREFERENCES = ROOT / "docs" / "preference.md"
TASKS = ROOT / "docs" / "tasks.md"
PAGES = [ENGLISH, chinese(ENGLISH), ROOT / "README.md", ROOT / "README_zh.md"]
SAMPLES = [(block, line) for page in PAGES for block in blocks(page, "json") for line in block.body.splitlines()]


@pytest.mark.parametrize(("block", "line"), SAMPLES, ids=lambda one: str(one)[:40])
def test_each_sample_is_read(block: object, line: str, tmp_path: Path) -> None:
    file = tmp_path / "chat.jsonl"
    file.write_text(line + "\n", encoding="utf-8")
    (conversation,) = read_conversations(DataConfig(sources=[SourceConfig(path=str(file))]), tmp_path)
    assert conversation.messages[-1]["role"] in ("assistant", "text")
    assert conversation.messages[-1]["content"].strip()


@pytest.mark.parametrize("page", PAGES[:2], ids=lambda page: page.name)
def test_each_format_has_a_sample(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    shown = re.findall(r"^\*\*(\w+)\*\*.*?\n\n```json\n(.*?)```", text, re.MULTILINE | re.DOTALL)
    for name, sample in shown:
        for line in sample.splitlines():
            row = parse_row(parse_line(line.encode()))
            assert isinstance(row, dict)
            assert detect_format(row, {}).value == name
    of_tasks = {"preference", "labeled", "reward", "classify", "embed"}
    of_files = {one.value for one in RowFormat} - {"auto", "docstrings"} - of_tasks
    assert {name for name, _ in shown} == of_files


@pytest.mark.parametrize("page", PAGES[:2], ids=lambda page: page.name)
def test_each_role_is_on_the_page_that_the_error_names(page: Path) -> None:
    rows = re.findall(r"^\| (?:role|角色) (.+?) \|", page.read_text(encoding="utf-8"), re.MULTILINE)
    shown = [set(re.findall(r"`(\w+)`", row)) for row in rows]
    assert sorted(map(sorted, shown)) == sorted(sorted(set(names)) for names in ROLES.values())


@pytest.mark.parametrize("page", [PREFERENCES, chinese(PREFERENCES)], ids=lambda page: page.name)
def test_each_sample_of_preferences_is_read(page: Path) -> None:
    of_pairs, labeled, _ = blocks(page, "json")
    found = [LabelReader({}).read_all(parse_row(line.encode())) for line in labeled.body.splitlines()]
    assert [conversation.value for (conversation,) in found] == [1.0, 0.0, 1.0, 0.0, 1.0]
    for line in of_pairs.body.splitlines():
        chosen, rejected = PairReader({}).read_all(parse_row(line.encode()))
        assert chosen.messages[:-1] == rejected.messages[:-1]
        assert chosen.messages[-1]["content"] != rejected.messages[-1]["content"]


@pytest.mark.parametrize("page", [TASKS, chinese(TASKS)], ids=lambda page: page.name)
def test_each_sample_of_rewards_is_read(page: Path) -> None:
    samples, *_ = blocks(page, "json")
    found = [MarginReader({}).read_all(parse_row(line.encode())) for line in samples.body.splitlines()]
    assert [chosen.value for chosen, _ in found] == [1.5, 0.0]


@pytest.mark.parametrize("page", [TASKS, chinese(TASKS)], ids=lambda page: page.name)
def test_each_sample_of_classes_is_read(page: Path) -> None:
    _, samples, *_ = blocks(page, "json")
    found = [ClassReader({}).read_all(parse_row(line.encode())) for line in samples.body.splitlines()]
    assert [one.label for (one,) in found] == ["complaint", "question", "1"]


@pytest.mark.parametrize("page", [TASKS, chinese(TASKS)], ids=lambda page: page.name)
def test_each_sample_of_embeddings_is_read(page: Path) -> None:
    found = [
        TextPairReader({}).read_all(parse_row(sample.body.strip().encode())) for sample in blocks(page, "json")[2:]
    ]
    assert [len(texts) for texts in found] == [2, 4] and all(text.is_text for texts in found for text in texts)
    assert found[0] == found[1][:2] and found[0][0].messages != found[0][1].messages


def test_a_table_is_read_by_the_names_of_its_columns(tmp_path: Path) -> None:
    file = tmp_path / "chat.csv"
    with file.open("w", newline="", encoding="utf-8") as stream:
        csv.writer(stream).writerows([["question", "answer"], ["你好", "你好！\nHello"]])
    columns = re.search(r"path: chat\.csv\n +columns: \{prompt: (\w+), response: (\w+)\}", ENGLISH.read_text("utf-8"))
    assert columns
    source = SourceConfig(path=str(file), columns={"prompt": columns[1], "response": columns[2]})
    (conversation,) = read_conversations(DataConfig(sources=[source]), tmp_path)
    assert [message["content"] for message in conversation.messages] == ["你好", "你好！\nHello"]


def test_tokenized_data_is_handed_on_as_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    cache = build_caches(run_config(tmp_path, write_rows(tmp_path / "d.jsonl", pairs(3))), ByteEncoder()).train
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    for page in PAGES[:2]:
        (block,) = (block for block in blocks(page, "python") if "to_dataset" in block.body)
        exec(re.sub('"(DIRECTORY|目录)"', repr(str(cache.folder)), block.body))  # it is our own page
        for handed_on in (datasets.load_from_disk("train"), datasets.Dataset.from_parquet("train.parquet")):
            assert handed_on.column_names == ["input_ids", "labels"]
            for row, (ids, trained) in zip(handed_on, map(cache.__getitem__, range(len(cache))), strict=True):
                assert row["input_ids"] == ids.tolist()
                assert row["labels"] == [token if kept else -100 for token, kept in zip(ids, trained, strict=True)]
