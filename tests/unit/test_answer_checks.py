"""Checks of generated answers: rules, limits of time, and code that runs by consent only."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.speaker import SAYS, write_speaker
from toolkit.cli import main
from toolkit.evaluate import checks, code_run
from toolkit.messages import RowError

FENCED = 'Here:\n```json\n{"year": 1998}\n```'
YEAR = {"type": "object", "required": ["year"], "properties": {"year": {"type": "integer"}}}


def why(check: dict[str, Any], answer: str) -> str:
    return checks.why_failed(checks.read_check(check, allow_code=True), answer)


@pytest.mark.parametrize(
    ("check", "passes", "fails"),
    [
        ({"exact": "Paris"}, " Paris\n", "Paris."),
        ({"exact": ["7", "seven"]}, "seven", "eight"),
        ({"contains": ["7", "days"]}, "7 days", "7 weeks"),
        ({"regex": r"^\d{4}$"}, "1998", "in 1998"),
        ({"json_schema": YEAR}, FENCED, '{"year": "1998"}'),
        ({"json_schema": YEAR}, '{"year": 1998}', "1998 was the year"),
        ({"contains": "98", "regex": "^1"}, "1998", "2098"),
        ({"regex": "a", "exact": None}, "a", "b"),
    ],
)
def test_what_passes_and_what_fails(check: dict[str, Any], passes: str, fails: str) -> None:
    assert why(check, passes) == ""
    assert why(check, fails)


def test_no_pattern_takes_years(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "TIME_LIMIT_S", 0.2)
    evil, text = r"^(a+)+$", "a" * 40 + "b"
    assert why({"regex": evil}, text) == "regex: no result within 0.2 s"
    assert why({"json_schema": {"pattern": evil}}, json.dumps(text)) == "json_schema: no result within 0.2 s"


def test_no_document_is_fetched() -> None:
    assert "example.invalid" in why({"json_schema": {"$ref": "http://example.invalid/schema.json"}}, "{}")
    assert why({"json_schema": {}}, "[" * 100_000)


@pytest.mark.parametrize(
    ("check", "says"),
    [
        (3, "not of the form"),
        ({}, "not of the form"),
        ({"regx": "a"}, "'regx'; known are .*regex"),
        ({"regex": "("}, "no regular expression"),
        ({"json_schema": {"type": "objet"}}, "no JSON Schema"),
        ({"contains": [1]}, "wrong type"),
        ({"python": "assert f"}, "allow_code=true"),
    ],
)
def test_a_wrong_check_is_an_error(check: object, says: str) -> None:
    with pytest.raises(RowError, match=says):
        checks.read_check(check)


def test_code_has_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_KEY", "secret")
    assert why({"python": "assert f(2) == 4"}, "Sure:\n```python\ndef f(x):\n    return x * x\n```") == ""
    assert why({"python": "assert f(2) == 4"}, "def f(x): return x") == "python: AssertionError"
    assert "MemoryError" in why({"python": ""}, "'a' * (3 << 30)")
    assert "File too large" in why({"python": ""}, "open('f', 'w').write('a' * (2 << 20))")
    assert why({"python": ""}, "import os, sys; sys.exit('API_KEY' in os.environ or os.getcwd() == '/')") == ""
    assert code_run.why_failed("while True: pass", seconds=1.0) == "no result within 1 s"
    if code_run.has_no_network():
        assert "unreachable" in why({"python": ""}, "import socket; socket.create_connection(('127.0.0.1', 1), 1)")


def rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def test_answers_of_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, questions = write_speaker(tmp_path / "model"), tmp_path / "faq.jsonl"
    asked = [
        {"prompt": "1", "check": {"exact": SAYS}},
        {"prompt": "2", "check": {"contains": "and", "regex": "^and"}},
        {"prompt": "3"},
        {"prompt": "", "check": {"contains": "a"}},
    ]
    questions.write_text("".join(json.dumps(row) + "\n" for row in asked), encoding="utf-8")
    output = tmp_path / "answers.jsonl"
    assert main(["generate", str(model), f"input={questions}", f"output={output}"]) == 0
    assert "Checks: 1 of 3 answers passed (33.3%)" in capsys.readouterr().out
    verdicts = [(row.get("passed"), row.get("failed")) for row in rows(output)]
    assert verdicts[:3] == [(True, None), (False, "regex: no match"), (None, None)]
    assert verdicts[3][0] is False and verdicts[3][1] == rows(output)[3]["error"]

    questions.write_text(json.dumps({"prompt": "1", "check": {"python": "pass"}}) + "\n", encoding="utf-8")
    words = ["generate", str(model), f"input={questions}", f"output={tmp_path / 'code.jsonl'}"]
    assert main(words) == 2
    assert "faq.jsonl:1" in (said := capsys.readouterr().err) and "allow_code=true" in said
    assert main([*words, "allow_code=true"]) == 0
    assert "Checks: 0 of 1 answers" in capsys.readouterr().out
