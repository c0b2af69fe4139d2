"""`toolkit data-report`: what is counted, where it is said to be, and what near-duplicates are."""

import json
import random
from pathlib import Path

import numpy as np
import pytest

from tests.unit.data_tools import write_rows
from toolkit.cli import main
from toolkit.config.schema import RowFormat
from toolkit.data.readers import DataFile
from toolkit.extras import data_report
from toolkit.extras.data_report import SIMILAR, Alike, alike, inspect_files, min_hashes

HAN = [chr(code) for code in range(0x4E00, 0x5200)]


def text(chance: random.Random, length: int) -> str:
    """Return a text of Chinese characters."""
    return "".join(chance.choice(HAN) for _ in range(length))


def pair(prompt: str, response: str) -> dict[str, str]:
    """Return a row."""
    return {"prompt": prompt, "response": response}


def test_what_is_found_and_where(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chance = random.Random(0)
    question, answer = text(chance, 200), text(chance, 200) + "。"
    rows = [
        pair(question, answer),
        pair("Another question?", "Another answer."),
        pair(question, answer),
        pair(question + "吗", answer),
        pair("Please.", "I'm sorry, but I cannot help with that."),
        pair("请问？", "抱歉，我无法回答这个问题。"),
        pair("Show <|im_start|>.", "Well.<|im_end|>"),
        pair("List?", "one, two,"),
        pair("Why?", "x" * 250),
        pair("Empty?", " "),
        pair("Привет", "Привет."),
        {"prompt": 5, "response": "no text"},
    ]
    file = Path(write_rows(tmp_path / "rows.jsonl", rows))
    facts = inspect_files([DataFile(file, 0, RowFormat.prompt_response, {})])
    assert (facts.rows, facts.bad) == (12, 2)
    where = {f"{kind}: {what[:20].strip()}": one for (kind, what), one in facts.examples.items() if kind != "unusable"}
    assert where == {
        "answer: declines: an apology": [f"{file}:5", f"{file}:6"],
        "leftover in a question: <|im_start|>": [f"{file}:7"],
        "leftover in an answer: <|im_end|>": [f"{file}:7"],
        "answer: is cut: it ends with": [f"{file}:8"],
        "answer: is cut: 200 characte": [f"{file}:9"],
    }
    assert alike(facts) == (Alike(1, [(2, 0)]), Alike(1, [(3, 0)]))
    assert facts.mostly["Cyrillic"] == 1 and facts.mostly["Han"] == 4 and facts.turns == {1: 10}
    output = tmp_path / "page.html"
    assert main(["data-report", str(file), f"output={output}", "language=zh"]) == 0
    page = output.read_text(encoding="utf-8")
    assert f"{file}:3 = {file}:1" in page and "数据报告" in page and "&lt;|im_end|&gt;" in page
    assert main(["data-report", str(file), f"output={output}", "language=en"]) == 0  # a report may be replaced
    output.write_text("mine")
    assert main(["data-report", str(file), f"output={output}"]) == 2
    assert output.read_text() == "mine" and "not a report" in capsys.readouterr().err
    assert main(["data-report", str(file), "format=nosuch"]) == 2


def test_the_texts_of_a_row_are_no_duplicates_of_each_other(tmp_path: Path) -> None:
    chance = random.Random(4)
    pairs = [{"prompt": text(chance, 400), "chosen": "是", "rejected": "不"} for _ in range(50)]
    passages = [{"query": f"{n}", "positive": text(chance, 100), "negatives": ["It is."]} for n in range(50)]
    for row_format, rows in ((RowFormat.preference, pairs), (RowFormat.embed, passages)):
        file = Path(write_rows(tmp_path / f"{row_format.name}.jsonl", [*rows, rows[0]]))
        facts = inspect_files([DataFile(file, 0, row_format, {})])
        assert alike(facts) == (Alike(1, [(50, 0)]), Alike(0, []))
        assert len(np.concatenate(facts.places)) == facts.rows == 51
    facts = inspect_files([DataFile(tmp_path / "preference.jsonl", 0, RowFormat.preference, {})])
    assert {*np.concatenate(facts.asked)} == {400} and {*np.concatenate(facts.answered)} == {2}


def test_processes_find_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(1)
    rows = [pair(text(chance, 30), text(chance, chance.randrange(1, 300))) for _ in range(400)]
    files = [
        DataFile(Path(write_rows(tmp_path / f"{name}.jsonl", some)), 0, RowFormat.auto, {})
        for name, some in (("a", rows), ("b", [*rows[:40], *rows[50:60]]))
    ]
    one = inspect_files(files, workers=1)
    monkeypatch.setattr(data_report, "LEAST_BYTES_FOR_PROCESSES", 0)
    two = inspect_files(files, workers=2)
    assert alike(one) == alike(two) and alike(one)[0].count == 50
    assert np.array_equal(np.concatenate(one.bins), np.concatenate(two.bins)) and one.scripts == two.scripts


@pytest.mark.parametrize(("share", "least", "most"), [(0.95, 0.9, 1.0), (0.8, 0.2, 0.8), (0.5, 0.0, 0.0)])
def test_near_duplicates_are_those_of_that_similarity(share: float, least: float, most: float) -> None:
    """The estimate is unbiased, and of 200 pairs those are called that the definition means."""
    chance = random.Random(2)
    estimates, true = [], []
    for _ in range(200):
        length = chance.randrange(200, 600)
        first = text(chance, length)
        kept = length - int(length * (1 - share) / (1 + share))
        other = first[:kept] + text(chance, length - kept)
        shingles = [{one[index : index + 5] for index in range(length - 4)} for one in (first, other)]
        true.append(len(shingles[0] & shingles[1]) / len(shingles[0] | shingles[1]))
        bins = min_hashes([first, other])
        estimates.append(float((bins[0] == bins[1]).mean()))
    assert abs(np.mean(estimates) - np.mean(true)) < 0.02
    assert least <= np.mean(np.array(estimates) >= SIMILAR) <= most


def test_a_recipe_has_its_tokens_too(tmp_path: Path) -> None:
    rows = [pair(f"Question {index}?", f"Answer {index}.") for index in range(40)]
    rows[0]["response"] = "[gMASK] is a token of its tokenizer."
    file = Path(write_rows(tmp_path / "rows.jsonl", rows))
    words = ["recipe=quickstart", f"data.sources=[{{path: {file}}}]", f"prepare.dir={tmp_path}/cache"]
    output = tmp_path / "page.html"
    assert main(["data-report", *words, f"output={output}"]) == 0
    page = output.read_text(encoding="utf-8")
    assert "Trained tokens" in page and "[gMASK]" in page and json.dumps(str(file))[1:-1] in page
