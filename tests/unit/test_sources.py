"""Reading data files: every format, and every kind of row that cannot be used."""

import json
from pathlib import Path

import pytest

from tests.unit.data_tools import pairs, write_rows
from toolkit.config.schema import DataConfig, OnBadRow, RowFormat, SourceConfig
from toolkit.data.conversation import Row
from toolkit.data.sources import BadRows, read_rows, read_training_rows
from toolkit.errors import DataError

GOOD = b'{"prompt": "a", "response": "b"}\n'
ONE_OF = "A file holds one {…} per line, or one list [{…}, …]"
HISTORY = "Write it as a list of [question, answer] pairs of texts that are not empty"


def read(
    path: Path, row_format: RowFormat = RowFormat.auto, skip: bool = False, bad: BadRows | None = None
) -> list[Row]:
    on_bad_row = OnBadRow.skip if skip else OnBadRow.error
    return list(read_rows([SourceConfig(path=str(path), format=row_format)], on_bad_row, path.parent, pytest.fail, bad))


def written(folder: Path, content: bytes, name: str = "d.jsonl") -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        ({"prompt": "p", "response": "r"}, [user("p"), assistant("r")]),
        ({"prompt": "p", "response": "r", "history": None, "id": 3}, [user("p"), assistant("r")]),
        (
            {"prompt": "p", "response": "r", "history": [["a", "b"], ["c", "d"]]},
            [user("a"), assistant("b"), user("c"), assistant("d"), user("p"), assistant("r")],
        ),
        ({"instruction": "i", "input": "", "output": "o"}, [user("i"), assistant("o")]),
        ({"instruction": "i", "input": "x", "output": "o"}, [user("i\nx"), assistant("o")]),
        (
            {"instruction": "i", "output": "o", "history": [["a", "b"]]},
            [user("a"), assistant("b"), user("i"), assistant("o")],
        ),
    ],
)
def test_formats(tmp_path: Path, row: dict[str, object], messages: list[dict[str, str]]) -> None:
    path = tmp_path / "d.jsonl"
    write_rows(path, [row])
    assert read(path) == [Row(messages, f"{path}:1")]


def test_lines_keep_their_numbers(tmp_path: Path) -> None:
    content = (
        b"\xef\xbb\xbf\r\n"
        + GOOD.replace(b"\n", b"\r\n")
        + b"\n  \n"
        + '{"prompt": "x\u2028y", "response": "z"}'.encode()
    )
    path = written(tmp_path, content)
    rows = read(path)
    assert [row.where for row in rows] == [f"{path}:2", f"{path}:5"]
    assert rows[1].messages[0]["content"] == "x\u2028y"


@pytest.mark.parametrize("name", ["d.json", "d.jsonl"])
def test_array_rows_have_the_line_they_begin_on(tmp_path: Path, name: str) -> None:
    content = b"\xef\xbb\xbf[\r\n" + GOOD.strip() + b',\n\n{"prompt": "a\\n",\n "response": "b"}, ' + GOOD + b"]\n"
    path = written(tmp_path, content, name)
    assert [row.where for row in read(path)] == [f"{path}:2", f"{path}:4", f"{path}:5"]


def test_json_file_may_hold_lines(tmp_path: Path) -> None:
    assert len(read(written(tmp_path, GOOD * 2, "d.json"))) == 2


SKIP = "Such rows are left out and counted with data.on_bad_row=skip."
BAD_LINES = [
    (b'{"prompt": "a" "response": "b"}', f"broken JSON at column 16: Expecting ',' delimiter. {ONE_OF}"),
    (
        b'{"prompt": "\xb0\xa1", "response": "b"}',
        "not UTF-8: byte 0xb0 at position 13 of the line. If the file is in GBK, convert it with "
        "`iconv -f GBK -t UTF-8`",
    ),
    (
        b'["a", "b"]',
        'the row is a list, not an object. Each row must look like {"prompt": …, "response": …}',
    ),
    (b"null", 'the row is null, not an object. Each row must look like {"prompt": …, "response": …}'),
    (b'{"prompt": "a"}', "no key 'response'; the row has 'prompt'. Add it or remove the row"),
    (b"{}", "no key 'prompt'; the row has no keys at all. Add it or remove the row"),
    (
        b'{"prompt": "a", "respones": "b"}',
        "no key 'response'; the row has 'prompt', 'respones'. Rename 'respones' to 'response'",
    ),
    (b'{"prompt": 3, "response": "b"}', "'prompt' is 3, not a text. Correct or remove the row"),
    (b'{"prompt": "a", "response": null}', "'response' is null, not a text. Correct or remove the row"),
    (b'{"prompt": "a", "response": ["b"]}', "'response' is a list, not a text. Correct or remove the row"),
    (b'{"prompt": "a", "response": " "}', "'response' is empty. Fill it in or remove the row"),
    (b'{"prompt": "", "response": "b"}', "'prompt' is empty. Fill it in or remove the row"),
    (b'{"prompt": "a", "response": NaN}', "broken JSON: NaN is no JSON value. Correct or remove the row"),
    (
        b'{"prompt": "a\\ud83d", "response": "b"}',
        "'prompt' holds half of a character (\\ud83d at position 2). Correct or remove the row",
    ),
    (b"[" * 100_000, "the JSON is nested too deeply. Correct or remove the row"),
    (b'{"prompt": "a", "response": "b", "history": "x"}', f"'history' is a text. {HISTORY}"),
    (b'{"prompt": "a", "response": "b", "history": [["x"]]}', f"item 1 of 'history' is no pair. {HISTORY}"),
    (
        b'{"prompt": "a", "response": "b", "history": [["x", "y"], ["x", null]]}',
        f"item 2 of 'history' holds null. {HISTORY}",
    ),
    (
        b'{"prompt": "a", "response": "b", "history": [["x", ""]]}',
        f"item 1 of 'history' holds an empty text. {HISTORY}",
    ),
]


@pytest.mark.parametrize(("line", "reason"), BAD_LINES, ids=range(len(BAD_LINES)))
def test_bad_line_stops_with_its_number(tmp_path: Path, line: bytes, reason: str) -> None:
    path = written(tmp_path, GOOD + line + b"\n" + GOOD)
    with pytest.raises(DataError) as error:
        read(path)
    assert str(error.value) == f"{path}:2: {reason}. {SKIP}"


@pytest.mark.parametrize(("line", "reason"), BAD_LINES, ids=range(len(BAD_LINES)))
def test_bad_line_is_skipped_and_reported(tmp_path: Path, line: bytes, reason: str) -> None:
    path, bad = written(tmp_path, GOOD + line + b"\n" + GOOD), BadRows()
    assert [row.where for row in read(path, skip=True, bad=bad)] == [f"{path}:1", f"{path}:3"]
    assert (bad.count, bad.examples) == (1, [f"{path}:2: {reason}."])


def test_skip_keeps_only_the_first_examples(tmp_path: Path) -> None:
    path, bad = written(tmp_path, GOOD + b"{\n" * 50), BadRows()
    assert len(read(path, skip=True, bad=bad)) == 1
    assert (bad.count, len(bad.examples)) == (50, 5)


@pytest.mark.parametrize(
    ("content", "line", "reason"),
    [
        (b"[" + GOOD + GOOD + b"]", 2, f"broken JSON at column 1: Expecting ',' or ']'. {ONE_OF}"),
        (b"[\n" + GOOD + b",\n]", 4, f"broken JSON at column 1: Expecting value. {ONE_OF}"),
        (b"[\n" + GOOD, 3, f"broken JSON at column 1: Expecting ',' or ']'. {ONE_OF}"),
        (b"[\n" + GOOD + b"]\nmore", 4, f"broken JSON at column 1: Extra data. {ONE_OF}"),
        (b'[\n{"prompt": "a",\n "response" "b"}]', 3, f"broken JSON at column 13: Expecting ':' delimiter. {ONE_OF}"),
        (
            b"[\n" + GOOD + b', {"prompt": "\xff"}]',
            3,
            "not UTF-8: byte 0xff at position 15 of the line. If the file is in GBK, convert it with "
            "`iconv -f GBK -t UTF-8`",
        ),
        (
            b"[" + GOOD + b",\n 3]",
            3,
            'the row is 3, not an object. Each row must look like {"prompt": …, "response": …}',
        ),
    ],
)
def test_broken_array(tmp_path: Path, content: bytes, line: int, reason: str) -> None:
    path = written(tmp_path, content, "d.json")
    with pytest.raises(DataError) as error:
        read(path)
    # What breaks the array itself cannot be stepped over, so skipping is no mend there.
    assert str(error.value) == f"{path}:{line}: {reason}." + (f" {SKIP}" if reason.startswith("the row") else "")


def test_utf16_is_named(tmp_path: Path) -> None:
    path = written(tmp_path, GOOD.decode().encode("utf-16"))
    with pytest.raises(DataError, match="iconv -f UTF-16 -t UTF-8"):
        read(path)


@pytest.mark.parametrize("skip", [False, True])
def test_unknown_keys_name_the_known_formats(tmp_path: Path, skip: bool) -> None:
    path = tmp_path / "d.jsonl"
    write_rows(path, [{"question": "a", "answer": "b"}])
    with pytest.raises(DataError) as error:
        read(path, skip=skip)
    assert str(error.value) == (
        f"{path}:1: the keys 'question', 'answer' belong to no known format. Known are prompt, response (history) and "
        "instruction, output (input, history); rename the keys accordingly."
    )


def test_given_format_is_not_guessed(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    write_rows(path, [{"prompt": "p", "response": "r", "instruction": "i", "output": "o"}])
    assert read(path, RowFormat.instruction)[0].messages == [user("i"), assistant("o")]
    assert read(path)[0].messages == [user("p"), assistant("r")]


def test_missing_folder_and_empty_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError) as error:
        read(Path("no.jsonl"))
    assert str(error.value) == (
        f"There is no data file 'no.jsonl' (looked in {tmp_path}). Correct `path` under data.sources or "
        "data.validation."
    )
    with pytest.raises(DataError, match="is a folder, not a file"):
        read(tmp_path)
    with pytest.raises(DataError, match=r"The data file '.*e\.jsonl' is empty\."):
        read(written(tmp_path, b"", "e.jsonl"))
    for content in (b"\n\n", b"[]", b"[\n]\n"):
        with pytest.raises(DataError, match="holds no row that can be used"):
            read(written(tmp_path, content))
    with pytest.raises(DataError, match=r"(?s)\(2 were refused\).*d\.jsonl:1: the row is 3"):
        read(written(tmp_path, b"3\n4\n"), skip=True)


def test_several_sources_and_max_samples(tmp_path: Path) -> None:
    first, second = tmp_path / "1.jsonl", tmp_path / "2.jsonl"
    write_rows(first, pairs(3))
    second.write_text(json.dumps([{"instruction": "i", "output": "o"}]))
    data = DataConfig(sources=[SourceConfig(path=str(first)), SourceConfig(path=str(second))])
    assert len(list(read_training_rows(data, tmp_path, pytest.fail))) == 4
    data.max_samples = 2
    assert [row.where for row in read_training_rows(data, tmp_path, pytest.fail)] == [f"{first}:1", f"{first}:2"]
    with pytest.raises(DataError, match=r"data\.sources is empty"):
        list(read_training_rows(DataConfig(), tmp_path, pytest.fail))
