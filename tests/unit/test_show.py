"""`toolkit show` and `toolkit prepare`: what they print, in which form, and what they refuse."""

import json
import re
from pathlib import Path

import pytest

from toolkit.cli import main

WORDS = ["recipe=zero1", "model=glm_tiny", "data.validation_fraction=0"]


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    rows = [
        {"conversations": [{"from": "human", "value": f"q{n}"}, {"from": "gpt", "value": f"the answer {n}"}]}
        for n in range(40)
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return [*WORDS, f"data.sources=[{{path: {file}}}]", f"prepare.dir={tmp_path}/cache"]


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return what a command that succeeds prints."""
    assert main(list(words)) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return what a command says that refuses its input."""
    assert main(list(words)) == 2
    return capsys.readouterr().err


def test_brackets_hold_what_is_trained(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    output = shown(capsys, "show", "n=3", *words)
    assert output.count("── row ") == 3
    assert "\x1b" not in output
    legend = next(line for line in output.splitlines() if line.startswith("⟦trained⟧"))
    assert legend == "⟦trained⟧ · context · special token · padding"
    for block in output.split("── row ")[1:]:
        number = block.split("rows.jsonl:")[1].split(",")[0]
        assert f"<|user|>\nq{int(number) - 1}<|assistant|>\n⟦the answer {int(number) - 1}<|endoftext|>⟧" in block
    assert re.search(r" train +40 +40 +\d+ +\d+\n", output)
    assert "Skipped: 0 rows." in output
    least, most = map(int, re.findall(r"Tokens per sample: (\d+) to (\d+)", output)[0])
    bars = re.findall(r"^ +(\d+) - +(\d+) +(\d+)  █*$", output, re.MULTILINE)
    assert (int(bars[0][0]), int(bars[-1][1]), sum(int(count) for *_, count in bars)) == (least, most, 40)
    assert "Held out" not in output
    assert "── row " not in shown(capsys, "show", "n=0", *words)


@pytest.mark.parametrize(("split", "count"), [("train", 36), ("validation", 4)])
def test_rows_that_are_held_out_are_counted(
    split: str, count: int, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    output = shown(capsys, "show", "n=0", f"split={split}", *words, "data.validation_fraction=0.1")
    assert re.search(r" train +40 +40 +", output) and "\nHeld out for validation: 4 samples.\n" in output
    assert sum(map(int, re.findall(r"^ +\d+ - +\d+ +(\d+)  █*$", output, re.MULTILINE))) == count


def test_names_are_this_recipes(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The cache knows data by content: another recipe may have made it of a file of another name."""
    shown(capsys, "show", "n=1", *words)
    (tmp_path / "rows.jsonl").rename(tmp_path / "mine.jsonl")
    output = shown(capsys, "show", "n=1", *words, f"data={tmp_path}/mine.jsonl")
    assert "mine.jsonl" in output and "rows.jsonl" not in output


def test_colours_and_packed_rows(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    output = shown(
        capsys,
        "show",
        "n=1",
        "color=always",
        "data.packing=packed",
        "data.max_length=128",
        "batch.global_size=1",
        *words,
    )
    assert "\x1b[1;32mthe answer" in output
    assert "\x1b[90mpadding x " in output
    assert " rows of 128 tokens (packed), " in output
    assert output.count("── row ") > 2, "several samples in the one row"
    assert "⟦" not in output


def test_words_that_mean_nothing(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert "n = many is not a whole number from 0." in refused(capsys, "show", "n=many", *words)
    assert "color = blue is none of auto, always, never." in refused(capsys, "show", "color=blue", *words)
    assert "has no validation data: show split=train" in refused(capsys, "show", "split=validation", *words)


def test_what_samples_share_is_said_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By loading the data, which training does too."""
    pair = {"prompt": "a question of some length", "chosen": "yes", "rejected": "no"}
    (tmp_path / "pairs.jsonl").write_text(f"{json.dumps(pair)}\n" * 8, encoding="utf-8")
    for command in (["prepare"], ["show", "n=0"]):
        output = shown(
            capsys, *command, *WORDS, "preference=dpo", f"data={tmp_path}/pairs.jsonl", f"prepare.dir={tmp_path}/cache"
        )
        assert output.count("share their prompt") == 1, command


def test_prepared_data_is_verified(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = shown(capsys, "prepare", *words)
    assert "Tokenized 40 rows" in first
    assert "40 training samples" in first
    assert "Tokenized" not in shown(capsys, "prepare", *words)
    (ids,) = tmp_path.glob("cache/stores/*/ids.bin")
    content = bytearray(ids.read_bytes())
    content[7] ^= 1
    ids.write_bytes(content)
    assert f"The prepared data in {ids.parent} is damaged (ids.bin)." in refused(capsys, "prepare", *words)


def test_parts_of_several_machines_are_joined(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert "Part 1/2 is done: 1 pieces, 1 of them made now." in shown(capsys, "prepare", "prepare.shard=1/2", *words)
    assert "Part 2/2 is done: 0 pieces, 0 of them made now." in shown(capsys, "prepare", "prepare.shard=2/2", *words)
    assert "40 training samples" in shown(capsys, "prepare", *words)
    assert "prepare.shard is for `toolkit prepare` alone" in refused(capsys, "train", "prepare.shard=1/2", *words)
