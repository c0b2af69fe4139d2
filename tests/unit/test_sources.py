"""Reading data files: every kind of file, and every kind of row that cannot be used."""

import csv
import gzip
import io
import json
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from tests.unit.data_tools import ByteEncoder, pairs, run_config, write_rows
from toolkit.config.load import load
from toolkit.config.paths import _wrong_source
from toolkit.config.schema import OnBadRow, RowFormat, SourceConfig
from toolkit.data import data_paths, readers as files_module, sources
from toolkit.data.detection import columns_for
from toolkit.data.tokenize import CachePair, build_caches
from toolkit.messages import DataError

GOOD_ROW = {"prompt": "a", "response": "b"}
GOOD = b'{"prompt": "a", "response": "b"}\n'
ONE_OF = "A file holds one {…} per line, or one list [{…}, …]"
HISTORY = "Write it as a list of [question, answer] pairs of texts that are not empty"


def prepared(folder: Path, *given: SourceConfig, skip: bool = False) -> tuple[CachePair, ByteEncoder]:
    """Prepare sources; the encoder has seen their conversations in order."""
    cfg, encoder = run_config(folder), ByteEncoder()
    cfg.data.sources = list(given)
    cfg.data.on_bad_row = OnBadRow.skip if skip else OnBadRow.error
    cfg.data.max_bad_fraction = 0.999
    return build_caches(cfg, encoder), encoder


def read(path: Path, row_format: RowFormat = RowFormat.auto, skip: bool = False, **source: Any) -> list[Any]:
    """Return messages and place of each row."""
    result, encoder = prepared(path.parent, SourceConfig(path=str(path), format=row_format, **source), skip=skip)
    return [(messages, result.train.where(index)) for index, (messages, _) in enumerate(encoder.seen)]


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
    assert read(path) == [(messages, f"{path}:1")]


def test_lines_keep_their_numbers(tmp_path: Path) -> None:
    content = (
        b"\xef\xbb\xbf\r\n"
        + GOOD.replace(b"\n", b"\r\n")
        + b"\n  \n"
        + '{"prompt": "x\u2028y", "response": "z"}'.encode()
    )
    path = written(tmp_path, content)
    rows = read(path)
    assert [where for _, where in rows] == [f"{path}:2", f"{path}:5"]
    assert rows[1][0][0]["content"] == "x\u2028y"


@pytest.mark.parametrize("name", ["d.json", "d.jsonl"])
def test_array_rows_have_the_line_they_begin_on(tmp_path: Path, name: str) -> None:
    content = b"\xef\xbb\xbf[\r\n" + GOOD.strip() + b',\n\n{"prompt": "a\\n",\n "response": "b"}, ' + GOOD + b"]\n"
    path = written(tmp_path, content, name)
    assert [where for _, where in read(path)] == [f"{path}:2", f"{path}:4", f"{path}:5"]


def test_json_file_may_hold_lines(tmp_path: Path) -> None:
    assert len(read(written(tmp_path, GOOD * 2, "d.json"))) == 2


SKIP = "Such rows are skipped and counted with data.on_bad_row=skip."
MAPPED = "Add it, remove the row, or map another key: data.columns="
BAD_LINES = [
    (
        b'{"prompt": "a" "response": "b"}',
        f'broken JSON at column 16: a comma is missing, or a \\ before a " in a text. {ONE_OF}',
    ),
    (
        b'{"prompt": "\xb0\xa1", "response": "b"}',
        "not UTF-8: byte 0xb0 at position 13 of the line. If the file is in GBK, convert it: "
        "`iconv -f GB18030 -t UTF-8 FILE > NEW`",
    ),
    (
        "{“prompt”: “a”}".encode(),
        "broken JSON at column 2: '“' is no character of JSON, which has \" { } [ ] : , alone",
    ),
    (
        '｛"prompt": "a"}'.encode(),
        "broken JSON at column 1: '｛' is no character of JSON, which has \" { } [ ] : , alone",
    ),
    (
        '{"prompt"："a"}'.encode(),
        "broken JSON at column 10: '：' is no character of JSON, which has \" { } [ ] : , alone",
    ),
    (
        b'{"prompt": "a", "response": "b"}, {"prompt": "a", "response": "b"}',
        "several rows on one line, the second at column 33. Write each on its own",
    ),
    (b"prompt,response", "the line is no JSON. If the file is a table, name it .csv (commas) or .tsv (tabs)"),
    (
        b'{"prompt": "a",',
        "the line ends before its row does: a } or ] is missing. If the JSON is indented, unite its lines: `jq -c . "
        "FILE > NEW`",
    ),
    (
        b'{"prompt": "a\tb"}',
        f"broken JSON at column 14: a line break or tab in a text is to be written \\n or \\t. {ONE_OF}",
    ),
    (b'{"prompt": "a\\d"}', f"broken JSON at column 14: a backslash in a text is to be written twice. {ONE_OF}"),
    (
        b'["a", "b"]',
        'the row is a list, not an object. Each row must look like {"prompt": …, "response": …}',
    ),
    (b"null", 'the row is null, not an object. Each row must look like {"prompt": …, "response": …}'),
    (b'{"prompt": "a"}', f"no key 'response'; the row has 'prompt'. {MAPPED}{{response:NAME}}"),
    (b"{}", f"no key 'prompt'; the row has no keys at all. {MAPPED}{{prompt:NAME}}"),
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
        'half of a character (\\ud83d) after \'{"prompt": "a\'. Correct or remove the row',
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
    path = written(tmp_path, GOOD + line + b"\n" + GOOD)
    result, _ = prepared(tmp_path, SourceConfig(path=str(path)), skip=True)
    assert [result.train.where(index) for index in range(2)] == [f"{path}:1", f"{path}:3"]
    assert result.report.dropped == {"cannot be used": 1}
    assert result.report.examples == {"cannot be used": [f"{path}:2: {reason}."]}
    listed = (Path(result.report.folder) / "bad_rows.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(text) for text in listed] == [
        {"file": str(path), "line": 2, "reason": reason, "excerpt": line.decode("utf-8", "replace").strip()[:200]}
    ]


def test_skip_keeps_only_the_first_examples(tmp_path: Path) -> None:
    path = written(tmp_path, GOOD + b"{\n" * 50)
    report = prepared(tmp_path, SourceConfig(path=str(path)), skip=True)[0].report
    assert (report.bad_rows, len(report.examples["cannot be used"])) == (50, 5)
    assert len((Path(report.folder) / "bad_rows.jsonl").read_text().splitlines()) == 50


def test_too_many_bad_rows_stop_even_skip(tmp_path: Path) -> None:
    path = written(tmp_path, GOOD * 500 + b"{\n" * 12)
    cfg = run_config(tmp_path, str(path))
    cfg.data.on_bad_row, cfg.data.max_bad_fraction = OnBadRow.skip, 0.02
    with pytest.raises(DataError) as error:
        build_caches(cfg, ByteEncoder())
    listed = tmp_path / "cache" / "bad_rows.jsonl"
    assert str(error.value).startswith(
        f"12 of 512 rows cannot be used, more than data.max_bad_fraction = 0.02 allows. They are listed in {listed}. \n"
        f"{path}:501: the line ends before its row does"
    )
    assert len(listed.read_text().splitlines()) == 12
    cfg.data.max_bad_fraction = 0.03
    assert build_caches(cfg, ByteEncoder()).report.bad_rows == 12
    listed.unlink()
    cfg.data.max_bad_fraction = 0.01  # of a cache that is there
    with pytest.raises(
        DataError, match=r"^12 of 512 rows .* = 0\.01 allows\..* \n.*d\.jsonl:501: the line ends before its row does"
    ):
        build_caches(cfg, ByteEncoder())
    assert len(listed.read_text().splitlines()) == 12
    write_rows(path, [*pairs(3), *[{}] * 10])  # ten are tolerated whatever the fraction
    cfg.data.max_bad_fraction = 0.0
    assert build_caches(cfg, ByteEncoder()).report.bad_rows == 10


@pytest.mark.parametrize(
    ("content", "line", "reason"),
    [
        (b"[" + GOOD + GOOD + b"]", 2, f"broken JSON at column 1: a comma or ] is missing after a row. {ONE_OF}"),
        (b"[\n" + GOOD + b",\n]", 4, f"broken JSON at column 1: a value is missing, or is not JSON. {ONE_OF}"),
        (b"[\n" + GOOD, 3, f"broken JSON at column 1: a comma or ] is missing after a row. {ONE_OF}"),
        (b"[\n" + GOOD + b"]\nmore", 4, f"broken JSON at column 1: something follows the end of the JSON. {ONE_OF}"),
        (
            b'[\n{"prompt": "a",\n "response" "b"}]',
            3,
            f"broken JSON at column 13: a colon is missing after a key. {ONE_OF}",
        ),
        (
            b"[\n" + GOOD + b', {"prompt": "\xff"}]',
            3,
            "not UTF-8: byte 0xff at position 15 of the line. If the file is in GBK, convert it: "
            "`iconv -f GB18030 -t UTF-8 FILE > NEW`",
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
    is_row = reason.startswith("the row")
    place = f"{path}:{line}" + (" (item 2)" if is_row else "")
    assert str(error.value) == f"{place}: {reason}." + (f" {SKIP}" if is_row else "")


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
        f"{path}:1: the keys 'question', 'answer' belong to no known format. Known are prompt, response (history); "
        "query, response; instruction, output (input, history); conversations; messages; conversation; text. Say which "
        "is which: add 'columns={prompt: question, response: answer}' to the command line."
    )


@pytest.mark.parametrize(
    ("row", "columns"),
    [
        ({"id": "7", "回答": "b", "问题": "a"}, {"prompt": "问题", "response": "回答"}),
        ({"src": "a", "dst": "b"}, {"prompt": "src", "response": "dst"}),
        ({"my question": "a", "it's so": "b"}, {"prompt": "my question", "response": "it's so"}),
        ({"true": "a", "7": "b"}, {"prompt": "true", "response": "7"}),
        ({"story": "a", "n": 3}, {"text": "story"}),
        ({"dialog": [{"role": "user", "content": "a"}]}, {"messages": "dialog"}),
    ],
)
def test_columns_to_paste(row: dict[str, Any], columns: dict[str, str]) -> None:
    [word] = shlex.split(columns_for(row))
    assert load(["recipe=zero1", "data=d.jsonl", word]).cfg.data.sources[0].columns == columns


def test_tables_in_one_object_are_named(tmp_path: Path) -> None:
    for table in ({"prompt": ["a", "b"], "response": ["c", "d"]}, {"0": GOOD_ROW, "1": GOOD_ROW}):
        with pytest.raises(DataError, match=r"d\.jsonl:1: a whole table in one object"):
            write_rows(tmp_path / "d.jsonl", [table])
            read(tmp_path / "d.jsonl")
    conversation = [user("a"), assistant("b")]
    # One object with one list of objects, and a row all the same.
    for row in ({"messages": conversation}, {"n": 1, "spans": [{"x": 1}], "prompt": "a", "response": "b"}):
        write_rows(tmp_path / "one.jsonl", [row])
        assert read(tmp_path / "one.jsonl")[0][0] == conversation


def test_given_format_is_not_guessed(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    write_rows(path, [{"prompt": "p", "response": "r", "instruction": "i", "output": "o"}])
    assert read(path, RowFormat.instruction)[0][0] == [user("i"), assistant("o")]
    assert read(path)[0][0] == [user("p"), assistant("r")]


def test_an_empty_file_among_others_is_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(tmp_path, b"", "a.jsonl")
    written(tmp_path, b'{"prompt": "p", "response": "r"}\n', "b.jsonl")
    for path in (tmp_path, tmp_path / "*.jsonl"):
        source = SourceConfig(path=str(path))
        assert [file.name for file in data_paths.files_of(source)] == ["b.jsonl"]
    assert capsys.readouterr().out == f"WARNING: The data file '{tmp_path}/a.jsonl' is empty: it is skipped.\n"


@pytest.mark.parametrize("name", ["notes.txt", "notes.md", "notes"])
def test_plain_text_is_no_format(name: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"notes.*' is no data file: plain text .* \.jsonl file\. Known are \.jsonl, "):
        read(written(tmp_path, "你好。\nA text.\n".encode(), name))
    assert read(written(tmp_path, b'\xef\xbb\xbf {"text": "a"}\n', name))[0][0] == [{"role": "text", "content": "a"}]


def test_missing_folder_and_empty_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError) as error:
        read(Path("no.jsonl"))
    assert str(error.value) == (
        f"There is no data file 'no.jsonl' (looked in {tmp_path}). Correct `path` under data.sources or "
        "data.validation."
    )
    with pytest.raises(DataError, match=r"The directory '.*' holds no data file\. Known are \.jsonl, \.json, "):
        read(tmp_path)
    with pytest.raises(DataError, match=r"The data file '.*e\.jsonl' is empty\."):
        read(written(tmp_path, b"", "e.jsonl"))
    with pytest.raises(DataError, match=r"The data file '.*e\.jsonl' is empty\."):
        read(tmp_path)
    for content in (b"\n\n", b"[]", b"[\n]\n"):
        with pytest.raises(DataError, match=r"d\.jsonl holds no row\."):
            read(written(tmp_path, content))
    with pytest.raises(DataError, match=r"(?s)none of the 2 rows.*2 x cannot be used \(.*d\.jsonl:1: the row is 3"):
        read(written(tmp_path, b"3\n4\n"), skip=True)


def test_several_sources_and_max_samples(tmp_path: Path) -> None:
    first, second = tmp_path / "1.jsonl", tmp_path / "2.jsonl"
    write_rows(first, pairs(3))
    second.write_text(json.dumps([{"instruction": "i", "output": "o"}] * 3))
    cfg = run_config(tmp_path, str(first), str(second))
    train, _, report = build_caches(cfg, ByteEncoder())
    assert [train.where(index) for index in range(6)] == [f"{first}:{n}" for n in (1, 2, 3)] + [
        f"{second}:1 (item {n})" for n in (1, 2, 3)
    ]
    assert [(source["name"], source["rows"], source["samples"]) for source in report.sources] == [
        (str(first), 3, 3),
        (str(second), 3, 3),
    ]
    for most in (2, 3, 5, 6, 9):
        cfg.data.max_samples = most
        assert len(build_caches(cfg, ByteEncoder()).train) == min(most, 6)
    cfg.data.sources = []
    with pytest.raises(DataError, match=r"data\.sources is empty"):
        build_caches(cfg, ByteEncoder())


def test_a_limit_of_rows_is_that_of_its_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    """The first rows in the order of its files, together with the limit of all, and no file is read beyond it."""
    (tmp_path / "d").mkdir()
    for name in ("a", "b", "c"):
        write_rows(tmp_path / "d" / f"{name}.jsonl", [{"prompt": "q", "response": f"{name}{n}"} for n in range(3)])
    write_rows(tmp_path / "second.jsonl", [{"prompt": "q", "response": f"s{n}"} for n in range(4)])
    write_rows(tmp_path / "v.jsonl", [{"prompt": "q", "response": f"v{n}"} for n in range(9)])
    cfg = run_config(tmp_path)

    def rows(*limits: int, most: int = 0) -> list[str]:
        first, second, held = limits
        cfg.data.sources = [
            SourceConfig(path=str(tmp_path / "d"), max_samples=first),
            SourceConfig(path=str(tmp_path / "second.jsonl"), max_samples=second),
        ]
        cfg.data.validation = [SourceConfig(path=str(tmp_path / "v.jsonl"), max_samples=held)]
        cfg.data.max_samples = most
        caches = build_caches(cfg, encoder := ByteEncoder())
        caches.report.print_limits(cfg.data)
        assert caches.validation is not None and len(caches.validation) == held
        return [messages[1]["content"] for messages, _ in encoder.seen if "v" not in messages[1]["content"]]

    assert rows(4, 2, 2) == ["a0", "a1", "a2", "b0", "s0", "s1"]
    assert rows(4, 0, 3) == ["a0", "a1", "a2", "b0", "s0", "s1", "s2", "s3"]
    assert rows(2, 2, 1, most=3) == ["a0", "a1", "s0"]
    assert [line for line in said if "rows, all" in line] == []
    said.clear()
    opened: list[str] = []
    read = files_module.blocks

    def blocks(path: Path, *rest: Any) -> Any:
        opened.append(path.name)
        yield from read(path, *rest)

    monkeypatch.setattr(files_module, "blocks", blocks)
    assert rows(3, 5, 9) == ["a0", "a1", "a2", "s0", "s1", "s2", "s3"]
    assert opened == ["a.jsonl", "second.jsonl", "v.jsonl"]
    assert said[-1] == "data.sources[1].max_samples = 5: there are 4 rows, all of which are used."


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet"])
def test_every_kind_of_file_is_cut_at_the_limit(tmp_path: Path, kind: str) -> None:
    contents = {
        "jsonl": b"\n\n" + lines_bytes(),
        "json": json.dumps(ROWS).encode(),
        "csv": csv_bytes(ROWS),
        "parquet": parquet_bytes(),
    }
    path = written(tmp_path, contents[kind], f"d.{kind}")
    assert [messages for messages, _ in read(path, max_samples=2)] == [messages for messages, _ in read(path)][:2]


ROWS = [{"prompt": f"问 {number}\n", "response": 'a "b", c'} for number in range(5)]


def csv_bytes(rows: list[dict[str, str]], delimiter: str = ",") -> bytes:
    file = io.StringIO(newline="")
    writer = csv.DictWriter(file, list(rows[0]), delimiter=delimiter)
    writer.writeheader()
    writer.writerows(rows)
    return b"\xef\xbb\xbf" + file.getvalue().encode()


def lines_bytes() -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()


def arrow_bytes(kind: Any) -> bytes:
    file = io.BytesIO()
    table = pyarrow.Table.from_pylist(ROWS)
    with kind(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    return file.getvalue()


def parquet_bytes() -> bytes:
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), file, row_group_size=2)
    return file.getvalue()


def compressed(content: bytes) -> bytes:
    return pyarrow.compress(content, codec="zstd", asbytes=True)


OBJECT = {"a": "]", "v": 1, "rows": ROWS, "n": 5}
ON_ONE_LINE = [f"1 (item {number})" for number in range(1, 6)]


@pytest.mark.parametrize(
    ("name", "content", "numbers"),
    [
        ("d.jsonl", lines_bytes(), [1, 2, 3, 4, 5]),
        ("d.jsonl.gz", gzip.compress(lines_bytes()), [1, 2, 3, 4, 5]),
        ("two.gz", gzip.compress(lines_bytes()[:100]) + gzip.compress(lines_bytes()[100:]), [1, 2, 3, 4, 5]),
        ("d.jsonl.zst", compressed(lines_bytes()), [1, 2, 3, 4, 5]),
        ("d.json", json.dumps(ROWS, indent=1).encode(), [2, 6, 10, 14, 18]),
        ("d.json.gz", gzip.compress(json.dumps(ROWS).encode()), ON_ONE_LINE),
        ("d.csv", csv_bytes(ROWS), [2, 4, 6, 8, 10]),
        ("d.csv.gz", gzip.compress(csv_bytes(ROWS)), [2, 4, 6, 8, 10]),
        ("d.tsv", csv_bytes(ROWS, "\t"), [2, 4, 6, 8, 10]),
        ("semicolon.csv", csv_bytes(ROWS, ";"), [2, 4, 6, 8, 10]),
        ("tab.csv", csv_bytes(ROWS, "\t"), [2, 4, 6, 8, 10]),
        ("comma.tsv", csv_bytes(ROWS), [2, 4, 6, 8, 10]),
        ("object.json", json.dumps({"data": ROWS}).encode() + b"\n", ON_ONE_LINE),
        ("facts.json.gz", gzip.compress(json.dumps(OBJECT, indent=1).encode()), [5, 9, 13, 17, 21]),
        ("d.parquet", parquet_bytes(), [1, 2, 3, 4, 5]),
        ("d.arrow", arrow_bytes(pyarrow.ipc.new_stream), [1, 2, 3, 4, 5]),
        ("d.arrow", arrow_bytes(pyarrow.ipc.new_file), [1, 2, 3, 4, 5]),
    ],
)
def test_kinds_of_files(tmp_path: Path, name: str, content: bytes, numbers: list[int] | list[str]) -> None:
    path = written(tmp_path, content, name)
    rows = [
        ([user(row["prompt"]), assistant(row["response"])], number) for row, number in zip(ROWS, numbers, strict=True)
    ]
    assert read(path) == [(messages, f"{path}:{number}") for messages, number in rows]


def test_folder_and_pattern(tmp_path: Path) -> None:
    data = tmp_path / "data"
    (data / "sub").mkdir(parents=True)
    (data / ".hidden").mkdir()
    written(data, GOOD, "b.jsonl")
    written(data / "sub", gzip.compress(GOOD * 2), "a.jsonl.gz")
    written(data, GOOD, "readme.txt")
    written(data / ".hidden", GOOD, "x.jsonl")
    result, _ = prepared(tmp_path, SourceConfig(path=str(data)))
    assert [result.train.where(n) for n in range(3)] == [
        f"{data}/b.jsonl:1",
        f"{data}/sub/a.jsonl.gz:1",
        f"{data}/sub/a.jsonl.gz:2",
    ]
    assert len(prepared(tmp_path, SourceConfig(path=str(data / "**" / "*.gz")))[0].train) == 2


def test_folders_that_datasets_saved(tmp_path: Path) -> None:
    import datasets

    data = datasets.Dataset.from_list(ROWS)
    data.shuffle(seed=1).save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": data, "test": data.select([1, 3])}).save_to_disk(str(tmp_path / "dict"))
    expected = {row["prompt"] for row in ROWS}
    assert {messages[0]["content"] for messages, _ in read(tmp_path / "one")} == expected
    assert [messages[0]["content"] for messages, _ in read(tmp_path / "dict", split="test")] == ["问 1\n", "问 3\n"]
    one, several = (SourceConfig(path=str(tmp_path / name), split="test") for name in ("one", "dict"))
    assert (len(list(_wrong_source(one, ""))), list(_wrong_source(several, ""))) == (1, [])
    with pytest.raises(DataError, match=r"has no split 'dev'; it has train, test\. Choose one with `split`"):
        read(tmp_path / "dict", split="dev")


def test_messages_of_varying_fields_that_datasets_wrote(tmp_path: Path) -> None:
    """`datasets` has no type for them and stores each message as a text of JSON."""
    import datasets

    def called(**arguments: object) -> list[dict[str, Any]]:
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        return [user("q"), {"role": "assistant", "content": "", "tool_calls": [call]}]

    rows = [{"messages": called(n=3)}, {"messages": [user("q"), assistant("a")]}, {"messages": called(n="three")}]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    data = datasets.load_dataset("json", data_files=str(file), split="train", cache_dir=str(tmp_path / "cache"))
    assert "Json" in str(data.features)
    data.save_to_disk(str(tmp_path / "saved"))
    data.to_parquet(str(tmp_path / "d.parquet"))
    expected = [messages for messages, _ in read(file)]
    for path in (tmp_path / "saved", tmp_path / "d.parquet"):
        assert [messages for messages, _ in read(path)] == expected


def test_hub_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    datasets.Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "cached"))
    asked: list[Any] = []

    def load(*words: Any, **options: Any) -> Any:
        asked.append((words, options))
        return datasets.load_from_disk(str(tmp_path / "cached"))

    monkeypatch.setattr(datasets, "load_dataset", load)
    result, _ = prepared(tmp_path, SourceConfig(hub="me/chats", subset="zh", split="dev", revision="abc"))
    assert len(result.train) == 5
    assert asked == [(("me/chats", "zh"), {"split": "dev", "revision": "abc"})]
    assert result.report.sources[0]["name"] == "me/chats"
    monkeypatch.setattr(datasets, "load_dataset", lambda *words, **options: 1 / 0)
    with pytest.raises(
        DataError, match=r"'me/chats' cannot be had from Hugging Face \(ZeroDivisionError: division by zero"
    ):
        prepared(tmp_path, SourceConfig(hub="me/chats"))

    def unreachable(*words: Any, **options: Any) -> Any:
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(DataError, match=r"^'me/chats' is neither a file here nor .*\nCopy the cache[^\n]*$"):
        prepared(tmp_path, SourceConfig(hub="me/chats"))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("d.jsonl.gz", gzip.compress(lines_bytes() * 500)[:-20], r"Cannot read '.*d\.jsonl\.gz': .+"),
        ("d.parquet", parquet_bytes()[:-30], r"Cannot read '.*d\.parquet': .+"),
        ("d.arrow", b"nonsense" * 10, r"Cannot read '.*d\.arrow': .+"),
        (
            "d.json",
            b'{"train": [{"prompt": "a"}],\n"test": [{"prompt": "b"}]}',
            r"d\.json:1: there is more than one list",
        ),
        ("d.csv", b'prompt,response\na,"b\n', r"d\.csv:2: broken CSV: unexpected end of data\. Correct the file\."),
        ("d.csv", b'"prompt" x,response\na,b\n', r"d\.csv:1: broken CSV: ',' expected after '\"'\. Correct the file\."),
    ],
)
def test_broken_files(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read(written(tmp_path, content, name), skip=True)


def test_csv_row_with_too_few_or_many_fields(tmp_path: Path) -> None:
    path = written(tmp_path, b"prompt,response\na,b\nc\nd,e,f\n", "d.csv")
    result, encoder = prepared(tmp_path, SourceConfig(path=str(path)), skip=True)
    assert [messages for messages, _ in encoder.seen] == [[user("a"), assistant("b")]]
    assert result.report.examples["cannot be used"] == [
        f"{path}:3: 'response' is null, not a text. Correct or remove the row.",
        f"{path}:4: the row has more fields than the first line names. Correct or remove the row.",
    ]


def test_long_array_is_read_piece_by_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from toolkit.data import json_lists

    monkeypatch.setattr(json_lists, "CHUNK_BYTES", 7)
    rows = [{"prompt": f"é{'x' * (number % 90)}", "response": "\\u4f60 你好 \\n"} for number in range(200)]
    for indent in (None, 2):
        text = json.dumps(rows, indent=indent, ensure_ascii=indent is None)
        path = written(tmp_path, f" \t{text}\n".encode(), "d.json")
        found = read(path)
        assert [messages for messages, _ in found] == [
            [user(row["prompt"]), assistant(row["response"])] for row in rows
        ]
        if indent:
            assert [where for _, where in found] == [f"{path}:{2 + 4 * number}" for number in range(200)]
    broken = json.dumps(rows[:50])[:-1] + ', {"prompt": "a" "response"}, ' + json.dumps(rows)[1:]
    with pytest.raises(
        DataError, match=rf":1: broken JSON at column {broken.index('a' + chr(34) + ' ') + 4}: a comma is missing"
    ):
        read(written(tmp_path, broken.encode(), "d.json"))


def test_long_lines_and_line_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = {"prompt": "p" * (10 << 20), "response": "r"}
    path = tmp_path / "d.jsonl"
    write_rows(path, [*pairs(2), long, *pairs(2)])
    result, _ = prepared(tmp_path, SourceConfig(path=str(path)))
    assert len(result.train) == 4
    assert result.report.dropped == {"longer than data.max_length = 1024": 1}
    monkeypatch.setattr(files_module, "LARGEST_LINE_BYTES", 1 << 20)
    with pytest.raises(DataError, match=r"d\.jsonl:3: a line of more than 1 MiB"):
        list(files_module.blocks(path, 1 << 20))


def test_an_edit_moves_few_blocks(tmp_path: Path) -> None:
    rows = pairs(4000, length=30)
    path = tmp_path / "d.jsonl"
    write_rows(path, rows)
    before = [block.content for block in files_module.blocks(path, 4096)]
    del rows[1234]
    rows[3000]["prompt"] = "mended"
    write_rows(path, rows)
    after = [block.content for block in files_module.blocks(path, 4096)]
    assert len(before) > 20
    assert len(set(after) - set(before)) <= 4
    assert b"".join(after) == path.read_bytes()  # type: ignore[arg-type]


def test_nodes_that_number_devices_otherwise_remember_hashes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, devices, hashed = written(tmp_path, GOOD), iter([1, 2, 1, 2]), []
    names = [f"st_{name}" for name in ("size", "mtime_ns", "ctime_ns", "ino", "mtime", "ctime")]
    stat, sha256 = Path.stat, sources.sha256

    def other_stat(self: Path, **options: Any) -> Any:
        found = stat(self, **options)
        if self != path:
            return found
        return SimpleNamespace(st_dev=next(devices), **{name: getattr(found, name) for name in names})

    monkeypatch.setattr(sources, "_SETTLED_S", -1.0)
    monkeypatch.setattr(sources, "sha256", lambda file: hashed.append(file) or sha256(file))
    monkeypatch.setattr(Path, "stat", other_stat)
    assert len({sources.content_hash(path, tmp_path) for _ in range(4)}) == 1
    assert len(hashed) == 2


def test_hash_is_remembered_until_the_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, GOOD)
    first = sources.content_hash(path, tmp_path)
    assert not (tmp_path / "hashes").exists()  # too young to be trusted: a change within the clock's resolution
    monkeypatch.setattr(sources, "_SETTLED_S", -1.0)
    assert sources.content_hash(path, tmp_path) == first
    kept = next((tmp_path / "hashes").iterdir())
    kept.write_text(kept.read_text().replace(first, "remembered"))
    assert sources.content_hash(path, tmp_path) == "remembered"
    written(tmp_path, GOOD.replace(b"a", b"z"))
    assert sources.content_hash(path, tmp_path) not in ("remembered", first)
    kept.write_text("[broken")
    assert sources.content_hash(path, tmp_path) not in ("remembered", first)
