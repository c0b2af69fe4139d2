"""The board's routes: who may ask, what is answered, and that nothing is overwritten."""

import contextlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from starlette.testclient import TestClient

from tests.unit.fake_runs import HOSTILE, fake_run
from toolkit import children
from toolkit.config.dotted_keys import leaves
from toolkit.config.load import load, to_plain
from toolkit.config.schema import RunConfig
from toolkit.extras import board
from toolkit.extras.board import Board, Launches, application
from toolkit.messages import current_language, set_language
from toolkit.report.page import commands
from toolkit.report.run import read_run

TOKEN, COOKIE = "a-token", "board-1"
ADDRESS = "http://127.0.0.1:8765"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def client(folder: Path) -> Iterator[TestClient]:
    """A browser that has opened the printed address."""
    with TestClient(application(Board(Path("runs"), folder), TOKEN, COOKIE), base_url=ADDRESS) as made:
        made.cookies.set(COOKIE, TOKEN)
        yield made


def ask(client: TestClient, action: str, /, **given: Any) -> dict[str, Any]:
    answer = client.post(f"/do/{action}", json=given)
    assert answer.status_code in (200, 400), answer.text
    return dict(answer.json())


def test_only_who_has_the_token_is_answered(client: TestClient) -> None:
    client.cookies.clear()
    for path in ("/", "/?token=", "/?token=another", "/file/board.js", "/report?run=one", f"/report?token={TOKEN}"):
        assert client.get(path).status_code == 403, path
    assert client.post("/do/runs", json={}).status_code == 403
    opened = client.get(f"/?token={TOKEN}")
    assert opened.status_code == 200
    cookie = opened.headers["set-cookie"]
    assert f"{COOKIE}={TOKEN}" in cookie and "HttpOnly" in cookie and "SameSite=strict" in cookie
    client.cookies.set(COOKIE, TOKEN)
    assert client.post("/do/runs", json={}).status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example:8765", "localhost@evil.example", ""])
def test_another_name_for_this_machine_is_not_answered(host: str, client: TestClient) -> None:
    assert client.get("/", headers={"host": host}).status_code == 403


def test_another_page_cannot_ask_with_the_cookie(client: TestClient) -> None:
    for origin in ("http://127.0.0.1:9999", "http://evil.example", "null"):
        assert client.post("/do/runs", json={}, headers={"origin": origin}).status_code == 403, origin
    assert client.post("/do/runs", json={}, headers={"origin": ADDRESS}).status_code == 200
    assert client.get("/do/runs").status_code == 405


def test_the_page_loads_nothing_from_elsewhere(client: TestClient) -> None:
    page = client.get("/")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "*" not in policy
    for text in (page.text, *(client.get(f"/file/{name}").text for name in ("board.js", "board.css"))):
        assert "//" not in re.sub(r"^\s*//.*$|\s//\s.*$", "", text, flags=re.MULTILINE)
    links = re.findall(r'(?:src|href)="([^"#]+)"', page.text)
    assert all(client.get(f"/{link}").status_code == 200 for link in links if not link.startswith("data:"))


@pytest.mark.parametrize(
    "path", ["../board.py", "..%2fboard.py", "%2e%2e/board.py", "board.html.j2", "/etc/passwd", ""]
)
def test_only_the_files_of_the_page_are_served(path: str, client: TestClient) -> None:
    assert client.get(f"/file/{path}").status_code == 404


def test_runs_are_listed_and_compared(folder: Path, client: TestClient) -> None:
    assert ask(client, "runs")["rows"] == []
    fake_run(folder / "runs" / "one", text=HOSTILE)
    (folder / "runs" / "one" / "DONE").write_text('{"steps": 40}')
    fake_run(folder / "runs" / "sweep" / "lr=1", 3, "optim.lr=0.5")
    (folder / "outside").mkdir()
    fake_run(folder / "outside" / "two")
    listed = ask(client, "runs")
    rows = {row["run"]: row for row in listed["rows"]}
    assert {name: (row["state"], row["cells"][2]) for name, row in rows.items()} == {
        "one": ("done", "40 / 40"),
        "sweep/lr=1": ("unfinished", "3 / 40"),
    }
    assert dict(zip(listed["heads"], rows["one"]["cells"], strict=True))["per second"] == "1,020 tokens"
    assert len(rows["one"]["curve"]) <= 41 and rows["one"]["curve"][-1] == pytest.approx(2.812, abs=0.001)
    assert rows["one"]["verdict"].startswith("40 steps are too few") and not rows["one"]["has_model"]
    (folder / "runs" / "one" / "export").mkdir()
    assert next(row for row in ask(client, "runs")["rows"] if row["run"] == "one")["has_model"]
    with (folder / "runs" / "sweep" / "lr=1" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 4, "loss": 1.5}) + "\n")
    assert {row["run"]: row for row in ask(client, "runs")["rows"]}["sweep/lr=1"]["cells"][2:4] == ["4 / 40", "1.50"]
    report = client.get("/report", params={"run": "one"})
    assert "<h1>one" in report.text and "sandbox allow-scripts" in report.headers["content-security-policy"]
    assert "optim.lr" in client.get("/report", params={"run": ["one", "sweep/lr=1"]}).text
    for name in ("../outside/two", "sweep/../../outside/two", "/etc", ".", "", "sweep", "\0"):
        assert client.get("/report", params={"run": name}).status_code == 400, name
    assert client.get("/report").status_code == 400


def test_a_run_that_cannot_be_read_hides_no_other(
    folder: Path, client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "other"):
        fake_run(folder / "runs" / name, 3)
    (folder / "runs" / "shut").mkdir()
    with_permission, opened = os.stat, Path.open

    def stat(path: Any, **options: Any) -> os.stat_result:
        if "/shut/" in str(path):
            raise PermissionError(13, "Permission denied", str(path))
        return with_permission(path, **options)

    def shut(path: Path, *given: Any, **options: Any) -> Any:
        if path.match("other/metrics.jsonl"):
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *given, **options)

    monkeypatch.setattr(os, "stat", stat)
    monkeypatch.setattr(Path, "open", shut)
    rows = {row["run"]: row for row in ask(client, "runs")["rows"]}
    assert {name: row["state"] for name, row in rows.items()} == {"one": "unfinished", "other": "failed"}
    assert rows["other"]["cells"][1].endswith("metrics.jsonl cannot be read: Permission denied.")


def test_every_error_is_shown_with_its_key_and_value(client: TestClient) -> None:
    values = {"optim.lr": "fast", "train.stpes": "3", "zero.stage": "9", "data.max_length": "[1", "language": "zh"}
    found = ask(client, "check", base="quickstart", gpus="many", values=values)
    texts = {key: error["text"] for error in found["errors"] for key in error["keys"]}
    assert "fast" in texts["optim.lr"]
    assert "train.max_steps" in texts["train.stpes"]
    assert "9" in texts["zero.stage"]
    assert "data.max_length" in texts
    assert any("many" in error["text"] for error in found["errors"])
    assert found["plan"] == []
    assert current_language() == "en", "a recipe's own language is not the board's"


def test_a_rule_between_keys_is_reported_next_to_a_wrong_value(client: TestClient) -> None:
    values = {"optim.lr": "fast", "batch.global_size": "7", "batch.micro_per_gpu": "2"}
    found = ask(client, "check", base="quickstart", gpus="2xcpu", values=values)
    first, second = (error["text"] for error in found["errors"])
    assert first == "recipe.yaml:7: 'optim.lr' = fast must be a number."
    assert second.startswith("recipe.yaml:9: batch.global_size = 7 is not a multiple of batch.micro_per_gpu (2) x 2")


def test_the_plan_is_that_of_the_command(client: TestClient, capsys: pytest.CaptureFixture[str]) -> None:
    from toolkit.cli import main

    values = {"batch.micro_per_gpu": "4", "data.max_length": "64"}
    found = ask(client, "check", base="quickstart", gpus="2xcpu", groups={"zero": "stage1"}, values=values)
    assert found["errors"] == []
    assert found["values"]["zero.stage"] == "1" and found["values"]["data.max_length"] == "64"
    assert any("config and files are in order" in note for note in found["notes"])
    overrides = [f"{key}={value}" for key, value in values.items()]
    capsys.readouterr()
    assert main(["plan", "recipe=quickstart", "zero=stage1", "gpus=2xcpu", *overrides]) == 0
    assert capsys.readouterr().out.splitlines() == "\n".join(found["plan"]).splitlines()


def test_the_board_speaks_its_own_language_whatever_the_recipe_says(client: TestClient) -> None:
    set_language("zh")
    try:
        found = ask(client, "check", base="quickstart", gpus="2xcpu", values={"language": "en"})
        wrong = ask(client, "check", base="quickstart", values={"optim.lr": "fast"})
    finally:
        set_language("en")
    for text in (found["notes"][0], found["plan"][0], wrong["errors"][0]["text"]):
        assert re.search(r"[\u4e00-\u9fff]", text), text


def test_a_model_of_unknown_size_is_not_looked_up(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    def reach(*_: Any, **__: Any) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setattr("toolkit.config.hub._config_folder", reach)
    monkeypatch.setattr("toolkit.config.hub._once_per_machine", reach)
    found = ask(client, "check", base="qwen3_8b_lora", gpus="8x80GB", values={"model.path": "owner/other"})
    assert found["errors"] == []
    assert "owner/other" in found["plan"][0]
    assert ask(client, "check", base="qwen3_8b_lora", gpus="8x80GB")["plan"][0].startswith("Qwen3-8B: ")


def test_a_saved_recipe_is_what_was_checked_and_is_not_overwritten(folder: Path, client: TestClient) -> None:
    given = {
        "base": "quickstart",
        "groups": {"zero": "stage1"},
        "values": {"optim.lr": "1e-3", "run.name": "${recipe}"},
    }
    text = ask(client, "check", **given)["text"]
    assert "Wrote" in ask(client, "save", **given, file="recipes/mine.yaml")["said"]
    mine = folder / "recipes" / "mine.yaml"
    assert mine.read_text() == text
    assert ask(client, "check", base="mine")["values"]["optim.lr"] == "0.001"
    other = given | {"values": {"optim.lr": "2e-3"}}
    assert ask(client, "save", **other, file="recipes/mine.yaml")["exists"] is True
    assert mine.read_text() == text
    assert "exists" not in ask(client, "save", **other, file="recipes/mine.yaml", overwrite=True)
    assert "lr: 2e-3" in mine.read_text()
    assert "error" in ask(client, "save", **given, file="mine.txt")
    assert "error" in ask(client, "save", base="", values={"a": "[1"}, file="broken.yaml")
    assert not (folder / "mine.txt").exists() and not (folder / "broken.yaml").exists()


def test_the_form_has_every_key_of_the_schema(client: TestClient) -> None:
    form = ask(client, "form")
    keys = {key["key"]: key for key in form["keys"]}
    assert {key for key, value in leaves(to_plain(RunConfig())) if value != {}} - {"recipe"} <= set(keys)
    assert all(key["text"] for key in keys.values())
    assert keys["zero.overlap_comm"]["choices"] == ["true", "false"]
    set_language("zh")
    try:
        in_chinese = {key["key"]: key["text"] for key in ask(client, "form")["keys"]}
    finally:
        set_language("en")
    assert re.search(r"[\u4e00-\u9fff]", in_chinese["optim.lr"])


def test_only_a_recipe_with_a_plain_name_is_started(folder: Path, client: TestClient) -> None:
    for given in (
        {"recipe": "quickstart", "name": "../x", "ranks": "1"},
        {"recipe": "quickstart", "name": "", "ranks": "1"},
        {"recipe": "quickstart", "name": "x", "ranks": "0"},
        {"recipe": "nothing.yaml", "name": "x", "ranks": "1"},
        {"recipe": "/etc/passwd", "name": "x", "ranks": "1"},
    ):
        assert "error" in ask(client, "start", **given), given
    for name in ("x", "../x", ""):
        assert "error" in ask(client, "stop", run=name)
        assert "error" in ask(client, "log", run=name)
    assert not (folder / "runs").exists()


def test_a_run_is_started_in_any_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "a (1), it's {#2}=[x] & y"
    folder.mkdir()
    (folder / "mine.yaml").write_text("# @package _global_\ndefaults: [quickstart]\n")
    started = list[list[str]]()

    def start(command: list[str], **options: Any) -> Any:
        started.append(command)
        return SimpleNamespace(pid=os.getpid(), poll=lambda: None)

    monkeypatch.setattr(children, "start_detached", start)
    Launches(folder / "runs").start({"name": "x", "recipe": str(folder / "mine.yaml"), "ranks": "1"})
    record = json.loads((folder / "runs" / ".board" / "x.json").read_text())
    assert [record["command"]] == started
    cfg = load(started[0][started[0].index("1") + 1 :]).cfg
    assert (cfg.run.dir, cfg.run.name) == (str(folder / "runs"), "x") and cfg.recipe == "mine"
    again = shlex.split(commands(read_run(fake_run(folder / "runs" / "x", 3)))[-1][1])
    assert load(again[-2:]).cfg.train.max_steps == 40


def test_the_rest_of_an_answer_that_nobody_waits_for_is_no_answer_to_the_next_question(folder: Path) -> None:
    board = Board(Path("runs"), folder)
    lines = [json.dumps(one) + "\n" for one in ({"text": "a"}, {"text": "b"}, {"end": ""}, {"text": "c"}, {"end": ""})]
    board.chat = cast("Any", SimpleNamespace(stdout=iter(lines), stdin=io.StringIO(), poll=lambda: None))
    left = board.ask({"text": "1"})
    assert next(left) == lines[0]
    left.close()
    assert list(board.ask({"text": "2"})) == lines[3:]
    assert board.pending_answers == 0
    assert "closed" in next(board.ask({"text": "3"}))


def test_a_question_that_nobody_waits_for_is_answered_to_nobody(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page was left before it read the first line: a question was not sent yet, and loading goes on."""
    board = Board(Path("runs"), folder)
    lines = [json.dumps(one) + "\n" for one in ({"end": ""}, {"text": "2"}, {"end": ""})]
    process = SimpleNamespace(stdout=iter(lines), stdin=io.StringIO(), poll=lambda: None)
    monkeypatch.setattr("toolkit.extras.board._start_module", lambda *words: process)
    board.open_chat({"path": "x"})
    board.ask({"text": "1"})
    assert process.stdin.getvalue() == "", "a full pipe would hold up the board"
    assert list(board.ask({"text": "2"})) == lines[1:]
    assert process.stdin.getvalue() == '"2"\n'


def test_no_model_is_loaded_unasked(client: TestClient) -> None:
    assert ask(client, "ask", text="hello") == {"error": "no model is loaded."}
    assert "error" in ask(client, "open", path="nowhere")


@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl", "FAILED", "config.yaml", "logs/starts.jsonl"])
@pytest.mark.timeout(60)
def test_a_pipe_in_a_run_blocks_nothing(name: str, folder: Path, client: TestClient) -> None:
    """Reading one waits for ever for who writes into it; so the board stood still, and could not be ended either."""
    (folder / "runs" / "a" / "logs").mkdir(parents=True)
    (folder / "runs" / "a" / "data.json").touch()
    for other in {"config.yaml", "metrics.jsonl"} - {name}:
        (folder / "runs" / "a" / other).touch()
    os.mkfifo(folder / "runs" / "a" / name)
    [row] = ask(client, "runs")["rows"]
    assert row["run"] == "a"
    assert (name == "metrics.jsonl") == ("metrics.jsonl cannot be read: it is no file" in str(row["cells"]))


@pytest.mark.timeout(60)
def test_a_run_whose_file_server_stands_still_holds_up_no_other(
    folder: Path, client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, real, asked = threading.Event(), board.read_run, list[Path]()

    def read(path: Path) -> Any:
        asked.append(path)
        if path.name == "far":
            answers.wait()
        return real(path)

    for name in ("far", "near"):
        (folder / "runs" / name).mkdir(parents=True)
        (folder / "runs" / name / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    monkeypatch.setattr(board, "read_run", read)
    monkeypatch.setattr(board, "_ROW_S", 0.2)
    monkeypatch.setattr(board, "_READING_S", 2.0)
    for wanted in ("still being read …", "far does not answer for 2 s: its disk or file server may be gone."):
        until, rows = time.monotonic() + 20, {}
        while wanted not in str(rows) and time.monotonic() < until:
            rows = {row["run"]: row["cells"] for row in ask(client, "runs")["rows"]}
            assert "near" in rows["near"]
        assert wanted in str(rows["far"])
    assert [path.name for path in asked].count("far") == 1, "one thread waits"
    report = client.get("/report?run=far")
    assert report.status_code == 400 and "runs does not answer for 2 s" in report.text
    assert client.get("/report?run=near").status_code == 200
    assert ask(client, "check", base="quickstart", gpus="1xcpu")["errors"] == [], "other requests are answered"
    answers.set()
    until = time.monotonic() + 20
    while "does not answer" in str(rows["far"]) and time.monotonic() < until:
        rows = {row["run"]: row["cells"] for row in ask(client, "runs")["rows"]}
    assert rows["far"][1] == "stopped, unfinished"


@pytest.mark.timeout(60)
def test_a_directory_that_is_no_run_holds_up_nothing(
    folder: Path, client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither one that does not even say what is in it, nor one with more entries than anybody looks at."""
    answers, asks = threading.Event(), board.is_run
    monkeypatch.setattr(board, "is_run", lambda path: bool(path.name == "far" and answers.wait()) or asks(path))
    monkeypatch.setattr(board, "_ROW_S", 0.5)
    monkeypatch.setattr(board, "_MOST_FOLDERS", 20)
    for name in ("far", "near"):
        fake_run(folder / "runs" / name, 3)
    for number in range(50):
        (folder / "runs" / "huge" / str(number)).mkdir(parents=True)
    try:
        rows = {row["run"]: row["cells"][1] for row in ask(client, "runs")["rows"]}
    finally:
        answers.set()
    assert rows == {"far": "still being read …", "near": "stopped, unfinished"}
    assert ask(client, "runs")["note"] == ""
    for number in range(50):
        (folder / "runs" / f"x{number}").mkdir()
    assert ask(client, "runs")["note"] == "Only 20 of the directories are listed."


@pytest.mark.parametrize("host", ["[::1", "[", "]:80", "127.0.0.1:x"])
def test_a_host_that_is_none_is_rejected(host: str, client: TestClient) -> None:
    assert client.get("/", headers={"host": host}).status_code == 403 or host == "127.0.0.1:x"
    assert client.get("/", headers={"origin": f"http://{host}"}).status_code == 403


def test_what_is_asked_may_be_anything(folder: Path, client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request is answered with what was wrong in it, never with a traceback."""

    def end_at_once(*words: str, **_: Any) -> Any:
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "encoding": "utf-8"}
        return subprocess.Popen(["true", *words], **pipes)

    monkeypatch.setattr(board, "_start_module", end_at_once)
    for body in ("[" * 100_000, "NaN", "[]", "", b'"\xff"', "7", '"x"', "null"):
        answer = client.post("/do/check", content=body)
        assert answer.status_code == 400 and answer.json()["error"], body[:20]
    keys = {
        "check": "values groups base gpus",
        "save": "values groups base file",
        "samples": "values base n",
        "new": "model gpus file",
        "log": "run",
        "stop": "run",
        "start": "name recipe ranks",
        "open": "path",
        "ask": "text",
    }
    odd = (None, 7, "\0", "\ud800", [{}], {"a": None}, {"": ""}, {"a": "1", "a.b": "2"}, "x" * 10_000)
    sent = [(name, key, value) for name, words in keys.items() for key in words.split() for value in odd]
    for name, key, value in sent:
        answer = client.post(f"/do/{name}", content=json.dumps({key: value}))
        assert answer.status_code in (200, 400), (name, key, value)
        assert answer.status_code == 200 or answer.json()["error"], (name, key, value)
    answer = client.post("/do/nothing", json={})
    assert answer.status_code == 404 and answer.json() == {"error": "there is no request nothing."}


def test_three_answers_become_a_recipe(folder: Path, client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    given = {"model": "glm_tiny", "data": "examples", "gpus": "1xcpu", "file": "recipes/mine.yaml"}
    made = [json.loads(line) for line in client.post("/do/new", json=given).text.splitlines()]
    assert made[-1] == {"file": "recipes/mine.yaml", "name": "mine", "base": "mine", "ranks": "1"}
    assert "Wrote recipes/mine.yaml" in "".join(line.get("text", "") for line in made)
    assert ask(client, "check", base="mine", gpus="1xcpu")["errors"] == []
    again = client.post("/do/new", json=given).text
    assert "exists already" in again and '"ranks"' not in again
    saved = ask(client, "save", base="mine", file="recipes/mine.yaml", overwrite=True)
    assert "is the recipe that this one builds on" in saved["error"]


STALLED = """
import sys, time
from pathlib import Path
from toolkit.extras import board
board.read_run = lambda path: (print("reads", flush=True), time.sleep(600))
board.serve(Path("runs"), 0)
"""


@pytest.mark.timeout(120)
def test_a_signal_ends_the_board_while_a_file_server_stands_still(folder: Path) -> None:
    (folder / "runs" / "far").mkdir(parents=True)
    (folder / "runs" / "far" / "metrics.jsonl").touch()
    environ = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    process = subprocess.Popen([sys.executable, "-c", STALLED], env=environ, stdout=subprocess.PIPE, text=True)
    with contextlib.closing(cast("Any", process.stdout)) as output:
        try:
            address = next(line.strip() for line in output if "http://" in line)
            server, _, token = address.partition("/?token=")
            cookie = f"board-{server.rpartition(':')[2]}={token}"
            request = urllib.request.Request(f"{server}/report?run=far", headers={"Cookie": cookie})

            def ask_for_report() -> None:
                with contextlib.suppress(OSError):
                    urllib.request.urlopen(request, timeout=60).close()

            threading.Thread(target=ask_for_report, daemon=True).start()
            assert output.readline() == "reads\n"
            process.terminate()
            process.wait(timeout=30)
        finally:
            process.kill()
            process.wait()
