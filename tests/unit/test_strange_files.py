"""Files as they come: nothing is left out without a word, nothing ends in a traceback, each message names the file."""

import gzip
import json
import os
import zipfile
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from tests.unit.data_tools import ByteEncoder, pairs, run_config, write_rows
from toolkit.config.schema import OnBadRow, RowFormat, RunConfig, SourceConfig, TooLong, TrainOn
from toolkit.data import readers
from toolkit.data.first_rows import check_sources
from toolkit.data.json_lists import JsonListReader
from toolkit.data.packing import pack, weighted_samples
from toolkit.data.readers import DataFile, usable_rows
from toolkit.data.sources import locate_source
from toolkit.data.store import read_manifest
from toolkit.data.stream import Stream, encode, samples_of
from toolkit.data.stream_pieces import pieces_of
from toolkit.data.tables import TABLE_VERSION
from toolkit.data.tokenize import CachePair, build_caches
from toolkit.data.tokenize_workers import make_parts
from toolkit.evaluate.answer_files import read_questions
from toolkit.extras.data_report import data_page, inspect_files
from toolkit.messages import DataError, Problems

GOOD = {"prompt": "a", "response": "b"}


def made(cfg: RunConfig, encoder: ByteEncoder | None = None) -> CachePair:
    """Prepare; rows that cannot be used are skipped."""
    cfg.data.on_bad_row, cfg.data.max_bad_fraction = OnBadRow.skip, 0.9
    return build_caches(cfg, encoder or ByteEncoder())


def message(cfg: RunConfig) -> str:
    """Return what preparing says that does not succeed."""
    with pytest.raises(DataError) as error:
        build_caches(cfg, ByteEncoder())
    return str(error.value)


def parquet(path: Path, **columns: Any) -> str:
    """Write a Parquet file."""
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return str(path)


@pytest.mark.parametrize("indent", [None, 1])
def test_items_on_one_line_are_rows_of_their_own(tmp_path: Path, indent: int | None) -> None:
    rows: list[dict[str, Any]] = [*pairs(100)]
    rows[29] = {"prompt": "the 30th", "response": ""}
    file = tmp_path / "d.json"
    file.write_text(json.dumps(rows, indent=indent), encoding="utf-8")
    cfg = run_config(tmp_path, str(file))
    cfg.data.validation_fraction = 0.1
    train, validation, report = made(cfg)
    assert validation is not None
    assert (len(train), len(validation)) == (89, 10)
    line = 1 if indent is None else 29 * 4 + 2
    assert report.examples["cannot be used"] == [
        f"{file}:{line} (item 30): 'response' is empty. Fill it in or remove the row."
    ]
    (bad,) = [json.loads(text) for text in (train.folder / "bad_rows.jsonl").read_text(encoding="utf-8").splitlines()]
    assert bad["item"] == 30
    assert "the 30th" in bad["excerpt"]


def test_samples_of_items_on_one_line_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In cache, stream, duplicates, questions and data report; also the only item of a block. An item that begins a
    line of its own is named by that.
    """
    monkeypatch.setattr(readers, "_ROWS_PER_BLOCK", 2)
    rows = [*pairs(3), pairs(1)[0], {"prompt": "a", "response": ""}, {"prompt": "the 6th", "response": "b"}, *pairs(1)]
    file = tmp_path / "d.json"
    for indent, places in (
        (None, [f"{file}:1 (item {number})" for number in (1, 2, 3, 4, 6, 7)]),
        (1, [f"{file}:{4 * item - 2}" for item in (1, 2, 3, 4, 6, 7)]),
    ):
        file.write_text(json.dumps(rows, indent=indent), encoding="utf-8")
        cfg = run_config(tmp_path, str(file))
        train, _, report = made(cfg)
        assert [train.where(index) for index in range(6)] == places
        assert report.repeated_examples == [f"{places[3]} = {places[0]}", f"{places[5]} = {places[0]}"]
        asked = {question.where for question in read_questions(cfg.data.sources[0])}
        assert len(asked) == len(rows) and asked.issuperset(places)
        files = [DataFile(file, 0, RowFormat.auto, {})]
        assert f"{places[3]} = {places[0]}" in data_page("t", inspect_files(files), files, None)
        cfg.data.streaming, cfg.batch.global_size = True, 1
        data = Stream(cfg, ByteEncoder(), files)
        (sequences, _), *_ = islice(data.steps(0, {0: data.position_of(0, {})}), 1)
        assert sequences[0][0].where in places
        piece = pieces_of(files, [file.stat().st_size], 0, 1)[0]
        found = [
            sample.where
            for block, *_ in piece.blocks(0, 0)
            for sample in samples_of(encode(data.maker, piece.file_with_format, block), piece, block)
        ]
        assert found == places


@pytest.mark.parametrize("indent", [None, 1])
def test_lines_of_items_are_counted_once(tmp_path: Path, indent: int | None) -> None:
    counted = 0

    class Counting(JsonListReader):
        def _line_of(self, position: int) -> int:
            nonlocal counted
            counted += position - self.counted
            return super()._line_of(position)

    text = json.dumps(pairs(40000), indent=indent)
    file = tmp_path / "d.json"
    file.write_text(text, encoding="utf-8")
    with open(file, "rb") as opened:
        lines = [line for line, _ in Counting(opened, file).items()]
    assert lines == [1 if indent is None else 4 * number + 2 for number in range(40000)]
    assert len(text) > 1 << 20 and counted <= len(text)


def test_bad_rows_of_a_list_are_those_of_lines(tmp_path: Path) -> None:
    long_text = "x" * (1 << 20)  # read in two pieces
    bad = [
        '{"prompt": "a", "response": NaN, "id": "' + long_text + '"}',
        '{"prompt": "a", "prompt": "b", "response": "c"}',
        '{"prompt": "a", "response": ' + "9" * 5000 + "}",
        '{"prompt": [{"a": 1, "a": 2}, -Infinity], "response": "c"}',
    ]
    rows = [row for wrong in bad for row in (wrong, json.dumps(GOOD))]
    found = []
    for name, start, between, end in (("d.jsonl", "", "\n", "\n"), ("d.json", "[", ",\n", "]")):
        file = tmp_path / name
        file.write_text(start + between.join(rows) + end)
        cache = made(run_config(tmp_path, str(file))).train
        assert len(cache) == len(bad)
        listed = (cache.folder / "bad_rows.jsonl").read_text(encoding="utf-8").splitlines()
        found.append([{**json.loads(text), "file": "", "item": 0} for text in listed])
    assert found[0] == found[1] and len(found[0]) == len(bad)
    file.write_text("[" + rows[0].replace('"}', '", }') + "]")
    assert "broken JSON at column" in message(run_config(tmp_path, str(file)))


def test_samples_of_a_row_stay_together_on_one_line(tmp_path: Path) -> None:
    """Items of one line are told apart, several samples of an item are not."""
    rows = [{"prompt": "q", "response": f"r{n}", "history": [["h", f"a{n}"]]} for n in range(40)]
    file = tmp_path / "d.json"
    file.write_text(json.dumps(rows), encoding="utf-8")
    cfg = run_config(tmp_path, str(file))
    cfg.data.validation_fraction, cfg.data.train_on = 0.25, TrainOn.all
    train, validation, _ = made(cfg, ByteEncoder(only_last=True))
    assert validation is not None
    assert (len(train), len(validation)) == (60, 20)
    # Both samples of a row are on the same side: the shorter is the beginning of the longer.
    whole = {bytes((ids - 2).astype(np.uint8)) for ids, _ in (validation[i] for i in range(20))}
    assert sum(any(one.startswith(two[:-1]) and one != two for one in whole) for two in whole) == 10


@pytest.mark.parametrize(
    "row",
    [
        '{"\\ud83d": 1, "prompt": "a", "response": "b"}',
        '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "tools": '
        '[{"name": "\\ud83d", "parameters": {}}]}',
        '{"conversations": [{"from": "human", "value": "a"}, {"from": "function_call", "value": '
        '"{\\"name\\": \\"f\\", \\"arguments\\": {\\"x\\": \\"\\\\ud83d\\"}}"}]}',
    ],
    ids=["key", "tools", "text in a text"],
)
@pytest.mark.parametrize("form", ["{}\n", "[{}]"])
def test_half_characters_anywhere_are_a_bad_row(tmp_path: Path, row: str, form: str) -> None:
    (tmp_path / "d.json").write_text(form.format(row), encoding="utf-8")
    write_rows(tmp_path / "good.jsonl", [GOOD])
    cfg = run_config(tmp_path, str(tmp_path / "d.json"), str(tmp_path / "good.jsonl"))
    train, _, report = made(cfg)
    assert (len(train), report.bad_rows) == (1, 1)
    assert "half of a character (\\ud83d)" in report.examples["cannot be used"][0]


def test_names_that_are_no_utf8(tmp_path: Path) -> None:
    file = os.fsencode(tmp_path) + b"/x\xff.jsonl"
    with open(file, "wb") as out:
        out.write(json.dumps(GOOD).encode() + b"\nbroken\n")
    train, _, report = made(run_config(tmp_path, os.fsdecode(file)))
    assert train.where(0) == os.fsdecode(file) + ":1"
    assert report.bad_rows == 1


def test_columns_that_nobody_reads_may_hold_anything(tmp_path: Path) -> None:
    when = pyarrow.array([1, 2], pyarrow.timestamp("ns"))
    broken = pyarrow.Array.from_buffers(
        pyarrow.string(), 2, [None, pyarrow.py_buffer(np.array([0, 1, 2], np.int32)), pyarrow.py_buffer(b"\xff\xfe")]
    )
    far = pyarrow.array([4_000_000, 5_000_000], pyarrow.date32())
    path = parquet(tmp_path / "D.PARQUET", prompt=["a", "b"], response=["c", "d"], when=when, broken=broken, far=far)
    train, _, report = made(run_config(tmp_path, path))
    assert len(train) == 2
    assert report.unused == ["when", "broken", "far"]
    arrow = tmp_path / "d.arrow"
    table = pyarrow.table({"q": ["a"], "response": ["c"], "far": far[:1]})
    with pyarrow.OSFile(str(arrow), "wb") as file, pyarrow.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    cfg = run_config(tmp_path / "arrow")
    cfg.data.sources = [SourceConfig(path=str(arrow), columns={"prompt": "q"})]
    assert len(made(cfg).train) == 1


def test_columns_of_every_row_are_named(tmp_path: Path) -> None:
    rows = [{**GOOD, "id": 1}, {**GOOD, "id": 2, "system_prompt": "s"}]
    report = made(run_config(tmp_path, write_rows(tmp_path / "d.jsonl", rows))).report
    assert report.unused == ["id", "system_prompt"]
    rows = [{**GOOD, f"column {number}": 1} for number in range(600)]
    report = made(run_config(tmp_path, write_rows(tmp_path / "d.jsonl", rows))).report
    assert report.unused == [f"column {number}" for number in range(100)]


def test_columns_that_are_read_must_be_readable(tmp_path: Path) -> None:
    broken = pyarrow.Array.from_buffers(
        pyarrow.string(), 1, [None, pyarrow.py_buffer(np.array([0, 2], np.int32)), pyarrow.py_buffer(b"\xff\xfe")]
    )
    path = parquet(tmp_path / "d.parquet", prompt=["a"], response=broken)
    assert message(run_config(tmp_path, path)).startswith(f"Cannot read '{path}': In column 1: Invalid: Invalid UTF8")
    path = parquet(tmp_path / "e.parquet", prompt=["a" * 100] * 5000, response=["b" * 100] * 5000)
    content = bytearray(Path(path).read_bytes())
    content[40:400] = os.urandom(360)
    Path(path).write_bytes(content)
    assert message(run_config(tmp_path, path)).startswith(f"Cannot read '{path}': ")
    packed = tmp_path / "e.parquet.gz"
    packed.write_bytes(gzip.compress(b"PAR1"))
    assert message(run_config(tmp_path, str(packed))) == (
        f"'{packed}' is packed twice: Parquet and Arrow compress by themselves. Unpack it."
    )


@pytest.mark.parametrize("form", ["parquet", "arrow"])
def test_objects_of_a_table_have_their_own_keys(tmp_path: Path, form: str) -> None:
    """In Arrow, all objects of a column have the same keys."""
    called: tuple[tuple[str, dict[str, Any]], ...]
    called = (("get_weather", {"city": "Paris"}), ("get_stock", {"ticker": "X", "days": 2}))
    rows = []
    for name, arguments in called:
        calls = [{"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}]
        tool = {"name": name, "parameters": {"properties": {key: {"type": "string"} for key in arguments}}}
        asked = {"role": "user", "content": "q"}
        result = {"role": "tool", "content": "r", "tool_call_id": "1"}
        rows.append(
            {
                "messages": [
                    asked,
                    {"role": "assistant", "tool_calls": calls},
                    result,
                    {"role": "assistant", "content": "a"},
                ],
                "tools": [{"type": "function", "function": tool}],
                "system": None,
            }
        )
    table, file = pyarrow.Table.from_pylist(rows), tmp_path / f"d.{form}"
    if form == "parquet":
        pyarrow.parquet.write_table(table, file)
    else:
        with pyarrow.OSFile(str(file), "wb") as out, pyarrow.ipc.new_file(out, table.schema) as writer:
            writer.write_table(table)
    read = [
        [conversation for _, conversation in usable_rows([DataFile(path, 0, RowFormat.auto, {})])]
        for path in (file, Path(write_rows(tmp_path / "d.jsonl", rows)))
    ]
    assert read[0] == read[1] and len(read[0]) == len(rows)
    assert read[0][0].messages[1]["tool_calls"][0]["function"]["arguments"] == called[0][1]
    cache = made(run_config(tmp_path, str(file))).train
    assert read_manifest(cache.folder)["inputs"]["tables"] == TABLE_VERSION


def test_folders_lose_no_file(tmp_path: Path) -> None:
    folder, outside = tmp_path / "data", tmp_path / "outside"
    (folder / "deep" / "er").mkdir(parents=True)
    outside.mkdir()
    for number, place in enumerate((folder / "a.jsonl", folder / "deep" / "er" / "B.JSONL", outside / "c.ndjson")):
        write_rows(place, [{"prompt": "q", "response": f"from {number}"}])
    (folder / "linked").symlink_to(outside)
    (outside / "back").symlink_to(folder)  # a circle
    (folder / ".hidden").mkdir()
    write_rows(folder / ".hidden" / "d.jsonl", [GOOD])
    (folder / "notes.txt").write_text("not data")
    cfg = run_config(tmp_path, str(folder))
    assert len(made(cfg).train) == 3
    (folder / "gone.jsonl").symlink_to(tmp_path / "nowhere")
    assert message(cfg) == f"Cannot read '{folder}/gone.jsonl': the link leads nowhere."


def test_csv_troubles(tmp_path: Path) -> None:
    file = tmp_path / "d.csv"
    file.write_text("prompt,response,response\na,b,c\n")
    assert message(run_config(tmp_path, str(file))) == f"{file}:1: two columns are called 'response'. Rename one."
    lines = [f"q{n},r{n}".encode() for n in range(3000)]
    lines[2000] = "q,答案".encode("gbk")
    file.write_bytes(b"prompt,response\n" + b"\n".join(lines) + b"\n")
    train, _, report = made(run_config(tmp_path, str(file)))
    assert (len(train), report.bad_rows) == (2999, 1)
    assert report.examples["cannot be used"][0].startswith(f"{file}:2002: not UTF-8: byte 0xb4. If the file is in GBK")


GBK = "GBK (GB18030). Convert it: `iconv -f GB18030"
ENCODED = {
    "Excel, Chinese columns": ("d.csv", "问题,回答\na,b\n", "gb18030", GBK),
    "Excel, English columns": ("d.csv", "prompt,response\n问题,回答\n再问,再答\n", "gb18030", GBK),
    "UTF-16, as Notepad and PowerShell write": ("d.csv", "\ufeffprompt,response\na,b\n", "utf-16-le", "UTF-16. "),
    "UTF-16, big end first": ("d.tsv", "\ufeffprompt\tresponse\na\tb\n", "utf-16-be", "UTF-16. "),
    "UTF-16 without a mark": ("d.csv", "prompt,response\na,b\n", "utf-16-le", "UTF-16LE. "),
    "JSON lines": ("d.jsonl", '{"prompt": "问", "response": "答"}\n' * 3, "gbk", GBK),
    "JSON lines in UTF-16": ("d.jsonl", '\ufeff{"prompt": "a", "response": "b"}\n', "utf-16-le", "UTF-16. "),
    "Western": ("d.csv", "prompt,response\ncafé,thé\nà,crème\n", "cp1252", "CP1252. "),
}


@pytest.mark.parametrize("case", ENCODED)
@pytest.mark.parametrize("is_packed", [False, True])
def test_a_file_that_is_not_utf8_is_one_error_with_the_command(tmp_path: Path, case: str, is_packed: bool) -> None:
    name, content, encoding, said = ENCODED[case]
    file = tmp_path / (name + ".gz" * is_packed)
    file.write_bytes(gzip.compress(content.encode(encoding)) if is_packed else content.encode(encoding))
    cfg = run_config(tmp_path, str(file))
    cfg.data.on_bad_row = OnBadRow.skip
    assert message(cfg).startswith(f"{file}: not UTF-8, but probably {said}")
    assert is_packed or f"-t UTF-8 {file} > {tmp_path}/d_utf8{file.suffix}`" in message(cfg)
    assert ("CSV UTF-8" in message(cfg)) == (not name.endswith(".jsonl"))


def zipped(file: Path, member: str) -> None:
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, "<a/>" * 1000)


@pytest.mark.parametrize("suffix", [".xlsx", ".csv", ".jsonl", ".txt"])
def test_documents_of_other_programs_are_named(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"d{suffix}"
    for member, said in (("xl/a.xml", "an Excel file"), ("word/a.xml", "a Word or PDF"), ("a.jsonl", "a ZIP archive")):
        zipped(file, member)
        assert message(run_config(tmp_path, str(file))).startswith(f"'{file}' is {said}")
    for mark, said in ((b"\xd0\xcf\x11\xe0", "an Excel file"), (b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n", "a Word or PDF")):
        file.write_bytes(mark + bytes(600))
        assert message(run_config(tmp_path, str(file))).startswith(f"'{file}' is {said}")
    parquet(file, prompt=["a"], response=["b"])
    assert message(run_config(tmp_path, str(file))) == f"'{file}' is a .parquet file by its content. Rename it."


def test_one_row_with_a_list_of_messages_is_no_list_of_rows(tmp_path: Path) -> None:
    turn = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    file = write_rows(tmp_path / "d.jsonl", [{"message": turn}])
    assert "add 'columns={messages: message}'" in message(run_config(tmp_path, file))


def test_errors_of_items_on_one_line_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "d.json").write_text(json.dumps([{"prompt": "a", "response": ""}] * 8))
    problems = Problems()
    check_sources(run_config(tmp_path, str(tmp_path / "d.json")).data, (), problems)
    with pytest.raises(DataError) as error:
        problems.raise_all()
    said = str(error.value)
    assert [f"(item {number}): 'response' is empty" in said for number in range(1, 5)] == [True, True, True, False]


@pytest.mark.filterwarnings("error")
def test_a_csv_that_is_left_early_says_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "d.csv"
    file.write_text("prompt,response\n" + "".join(f"q{n},r{n}\n" for n in range(9000)))
    cfg = run_config(tmp_path, str(file))
    cfg.data.max_samples = 10
    assert len(made(cfg).train) == 10
    assert "Exception" not in capfd.readouterr().err


def test_first_rows_that_say_nothing(tmp_path: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    file = tmp_path / "d.jsonl"
    file.write_text("null\n[1]\n" + (json.dumps(chat) + "\n") * 20)
    train, _, report = made(run_config(tmp_path, str(file)))
    assert (len(train), report.bad_rows) == (20, 2)
    file.write_text("\n" * (1 << 20) + (json.dumps(chat) + "\n") * 20)
    cfg = run_config(tmp_path, str(file))
    cfg.data.max_samples = 5
    assert len(made(cfg).train) == 5


def test_a_row_is_counted_once(tmp_path: Path) -> None:
    history = [["q", "x" * 50] for _ in range(4)]
    rows: list[dict[str, Any]] = [{"prompt": "q", "response": "x" * 50, "history": history}, *pairs(20)]
    rows.append({"prompt": "q", "response": "REFUSED", "history": [["q", "REFUSED"]]})
    cfg = run_config(tmp_path, write_rows(tmp_path / "d.jsonl", rows))
    cfg.data.max_length, cfg.data.too_long, cfg.data.train_on = 30, TooLong.drop, TrainOn.all
    report = made(cfg, ByteEncoder(only_last=True)).report
    assert report.dropped["longer than data.max_length = 30"] == 1
    assert (report.bad_rows, report.dropped["cannot be used"]) == (1, 1)


def test_tools_without_a_place_are_counted(tmp_path: Path) -> None:
    class NoPlace(ByteEncoder):
        drops_system = drops_tools = True

    rows = [{**row, "tools": [{"name": "f", "parameters": {}}]} for row in pairs(3)] + pairs(2)
    assert made(run_config(tmp_path, write_rows(tmp_path / "d.jsonl", rows)), NoPlace()).report.systems == 3


def test_rows_whose_roles_are_odd_are_counted(tmp_path: Path) -> None:
    """A row that begins with the assistant trains it to speak unasked; a question at the end is not used."""
    asked, answered = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
    rows: list[dict[str, Any]] = [{"messages": [answered, asked]}, {"messages": [asked, answered, asked]}, *pairs(3)]
    rows.append({"messages": [{"role": "system", "content": "s"}, answered, asked, answered]})
    report = made(run_config(tmp_path, write_rows(tmp_path / "d.jsonl", rows)), ByteEncoder()).report
    assert (report.unasked, report.unanswered) == (2, 2)


def test_slices_of_a_split_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"`split` = train\[:10\] selects rows, which is not known here"):
        locate_source(SourceConfig(hub="owner/name", split="train[:10]"), 0, tmp_path)


def test_a_small_weight_leaves_a_sample(tmp_path: Path) -> None:
    store = made(run_config(tmp_path, write_rows(tmp_path / "d.jsonl", pairs(20)))).train
    assert len(weighted_samples(store, [0.01], seed=1)) == 1
    assert len(weighted_samples(store, [2.5], seed=1)) == 50


def test_long_rows_cost_no_memory_by_themselves() -> None:
    import tracemalloc

    tracemalloc.start()
    rows = pack(np.full(100, 60_000), 1 << 17)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert rows.max() == 49
    assert peak < 64 << 20


def test_parts_that_another_build_removed_are_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = run_config(tmp_path, write_rows(tmp_path / "d.jsonl", pairs(50)))

    def removed(*arguments: Any) -> Any:
        for one in make_parts(*arguments):
            one.path.unlink()
            yield one

    monkeypatch.setattr("toolkit.data.tokenize.make_parts", removed)
    assert len(made(cfg).train) == 50


def test_a_row_too_large_to_tokenise_is_a_bad_row(tmp_path: Path) -> None:
    """It would take a hundred times its size of memory, and end the process without a word."""
    file = tmp_path / "d.jsonl"
    large = json.dumps({"prompt": "a", "response": "word " * (4 << 20)})
    file.write_text(f"{large}\n" + (json.dumps(GOOD) + "\n") * 20)
    cfg = run_config(tmp_path, str(file))
    cfg.prepare.num_workers = 1
    train, _, report = made(cfg)
    assert (len(train), report.bad_rows) == (20, 1)
    assert report.examples["cannot be used"][0].startswith(f"{file}:1: a row of 20 MiB; at most 16 MiB")
    path = parquet(tmp_path / "d.parquet", prompt=["a"] * 3, response=["b", "word " * (4 << 20), "c"])
    cfg = run_config(tmp_path, path, str(file))
    cfg.prepare.num_workers = 1
    report = made(cfg).report
    assert report.examples["cannot be used"][0].startswith(f"{path}:2: a row of 20 MiB")


def test_a_conversation_too_long_to_render_is_a_bad_row(tmp_path: Path) -> None:
    turn = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rows = [{"messages": turn * 1001}, *[{"messages": turn}] * 20]
    train, _, report = made(run_config(tmp_path, write_rows(tmp_path / "d.jsonl", rows)))
    assert (len(train), report.bad_rows) == (20, 1)
    assert "a conversation of 2,002 messages; at most 2,000" in report.examples["cannot be used"][0]
    rows[0] = {"messages": [turn[0], {"role": "assistant", "content": "b" * 10_000}] * 200}
    cfg = run_config(tmp_path, write_rows(tmp_path / "e.jsonl", rows))
    cfg.data.train_on = TrainOn.all
    assert "200 answers, each with" in made(cfg, ByteEncoder(only_last=True)).report.examples["cannot be used"][0]


def test_long_texts_are_tokenised_apart(tmp_path: Path) -> None:
    class Counting(ByteEncoder):
        def encode_many(self, conversations: Any, tools: Any = None) -> Any:
            assert sum(len(m["content"]) for one in conversations for m in one) < 6 << 20
            return super().encode_many(conversations, tools)

    rows = [{"prompt": "a", "response": "b" * (2 << 20)}, {"prompt": "a", "response": "c"}] * 5
    encoder, cfg = Counting(), run_config(tmp_path, write_rows(tmp_path / "d.jsonl", rows))
    cfg.prepare.num_workers, cfg.data.too_long = 1, TooLong.drop
    assert len(made(cfg, encoder).train) == 5
    assert encoder.calls == 3


def test_packed_files_that_hold_too_much(tmp_path: Path) -> None:
    file = tmp_path / "d.jsonl.gz"
    file.write_bytes(gzip.compress(b"\n" * (80 << 20), 1))
    said = f"'{file}' unpacks to more than 200 times its size. If that is really your data, unpack it."
    assert message(run_config(tmp_path, str(file))) == said


def test_blank_lines_count_as_lines(tmp_path: Path) -> None:
    file = tmp_path / "d.jsonl"
    good = json.dumps(GOOD)
    file.write_text("\n" * 3_000_000 + good + "\n" * 70_000 + good + "\n\n" + good + "\n")
    train = made(run_config(tmp_path, str(file))).train
    assert [train.where(i) for i in range(3)] == [f"{file}:{n}" for n in (3_000_001, 3_070_001, 3_070_003)]


@pytest.mark.parametrize(
    "content", ["prompt,response\na,b\nc,d\n", json.dumps(GOOD, indent=2) + "\n", '{"prompt": “a”}\n' * 5]
)
def test_a_file_without_a_row_of_json_is_one_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "d.jsonl").write_text(content, encoding="utf-8")
    problems = Problems()
    check_sources(run_config(tmp_path, str(tmp_path / "d.jsonl")).data, (), problems)
    assert [str(error).partition(" ")[0] for error in problems.errors] == [f"{tmp_path}/d.jsonl:1:"]
