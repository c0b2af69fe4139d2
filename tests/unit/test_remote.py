"""Streams of URLs give the rows of the files, whatever their server does on the way."""

import json
import os
import pickle
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import pyarrow
import pyarrow.parquet
import pytest

from tests.unit.data_tools import ByteEncoder, pairs, run_config, write_rows
from toolkit.config.schema import RunConfig, SourceConfig
from toolkit.data import remote, sources, stream, stream_pieces
from toolkit.messages import DataError

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Server(ThreadingHTTPServer):
    """Serves the files of a directory in ranges, in a `mode` that real servers have at times."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder, self.mode, self.asked = folder, "", Counter[str]()
        self.released = threading.Event()
        """Set at the end: answers that hang hang no longer."""
        self.largest = 0
        """Bytes of the largest range that was asked for."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of connections that break, which is what they are for."""


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *words: Any) -> None:
        """Say nothing."""

    def do_HEAD(self) -> None:
        """Answer as GET does; what is sent after the headers is not read."""
        self.do_GET()

    def do_POST(self) -> None:
        """Answer Hugging Face's request for sizes."""
        names = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())["paths"]
        self.send_json([entry for entry in self.entries() if entry["path"] in names])

    def entries(self) -> list[dict[str, Any]]:
        """Return the files as Hugging Face lists them."""
        paths = [path for path in sorted(self.server.folder.rglob("*")) if path.is_file()]
        names = [(str(path.relative_to(self.server.folder)), path.stat().st_size) for path in paths]
        return [{"type": "file", "path": name, "size": size, "oid": "a" * 40} for name, size in names]

    def send_json(self, value: Any) -> None:
        """Send an answer of Hugging Face's API."""
        content = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_GET(self) -> None:
        """Answer with a range of a file, or with what Hugging Face's API says of the dataset me/chats."""
        if self.path.startswith("/api/datasets/me/chats/tree"):
            self.send_json(self.entries())
        elif self.path.startswith("/api/datasets/me/chats"):
            siblings = [{"rfilename": entry["path"]} for entry in self.entries()]
            facts = {"private": False, "gated": False, "disabled": False, "tags": [], "downloads": 0}
            self.send_json({"id": "me/chats", "sha": COMMIT, "siblings": siblings, **facts})
        else:
            self.path = self.path.removeprefix(f"/datasets/me/chats/resolve/{COMMIT}")
            self.send_file()

    def send_file(self) -> None:
        """Answer with a range of a file, as the mode of the server is."""
        server, mode = self.server, self.server.mode
        path = server.folder / self.path.lstrip("/")
        server.asked[path.name] += 1
        is_every_second = server.asked[path.name] % 2 == 0
        if not path.is_file() or "Range" not in self.headers:
            self.send_response(404)
            self.send_header("X-Error-Code", "EntryNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        if (mode == "nonsense" and is_every_second) or mode == "only nonsense":
            self.wfile.write(b"\x00\x01 what is this?\r\n\r\n")
            return
        if mode == "busy" and is_every_second:
            self.send_response(503)
            self.send_header("Retry-After", "0")
            self.end_headers()
            return
        content = path.read_bytes()
        begin, end = (int(number) for number in self.headers["Range"].removeprefix("bytes=").split("-"))
        server.largest = max(server.largest, end + 1 - begin)
        if mode == "shifted" and is_every_second:
            begin += 1
        part = content[begin : end + 1]
        self.send_response(200 if mode == "no ranges" else 206)
        self.send_header("ETag", f'"{hash(content)}"')
        self.send_header("Content-Length", str(len(part)))
        self.send_header("Content-Range", f"bytes {begin}-{begin + len(part) - 1}/{len(content)}")
        self.end_headers()
        if mode == "dies" and len(part) > 1:
            part = part[: max(200, len(part) // 2)]  # and the connection ends
        if mode in ("slow", "hangs") and len(part) > 1:
            self.wfile.write(part[:-1] if mode == "slow" else part[:1])
            self.wfile.flush()
            self.close_connection = not server.released.wait(20)
            return
        self.wfile.write(part)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    for name, value in {"_LEAST_BYTES": 200, "_RANGE_BYTES": 3000, "_TRIES": 4, "_LONGEST_WAIT_S": 0.01}.items():
        monkeypatch.setattr(remote, name, value)
    monkeypatch.setattr(stream_pieces, "_BLOCK_BYTES", 500)
    for cached in (remote._facts, stream_pieces._is_lines_of, stream_pieces._with_format, stream_pieces._num_rows):
        cached.cache_clear()
    (tmp_path / "www").mkdir()
    server = Server(tmp_path / "www")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield server
    server.released.set()
    server.shutdown()
    thread.join()
    server.server_close()


def opened(cfg: RunConfig, *paths: str) -> stream.Stream:
    cfg.data.streaming, cfg.data.sources = True, [SourceConfig(path=path) for path in paths]
    cfg.batch.global_size = 3
    return stream.Stream(cfg, ByteEncoder(), sources.locate_all(cfg.data, Path(cfg.prepare.dir)))


def taken(data: stream.Stream, steps: int = 60, start: int = 0, places: Any = None) -> tuple[list[Any], Any]:
    """Return the tokens of each sample of the steps, and the places after them."""
    places = places or {lane: data.position_of(lane, {}) for lane in range(3)}
    done = list(islice(data.steps(start, places), steps))
    return [[row[0].ids.tolist() for row in rows] for rows, _ in done], done[-1][1]


def files(folder: Path) -> None:
    write_rows(folder / "a.jsonl", pairs(100))
    table = pyarrow.Table.from_pylist(pairs(90))
    pyarrow.parquet.write_table(table, folder / "b.parquet", row_group_size=20)


@pytest.mark.parametrize("name", ["a.jsonl", "b.parquet"])
@pytest.mark.parametrize("mode", ["", "dies", "busy", "nonsense", "shifted"])
def test_rows_are_those_of_the_file(mode: str, name: str, server: Server, tmp_path: Path) -> None:
    files(server.folder)
    cfg = run_config(tmp_path, str(server.folder / name))
    wanted, _ = taken(opened(cfg, str(server.folder / name)))
    server.mode = mode
    data = opened(cfg, f"{server.url}/{name}")
    first, places = taken(data, 25)
    rest, _ = taken(opened(cfg, f"{server.url}/{name}"), 35, 25, places)
    assert first + rest == wanted
    assert server.asked[name] > (20 if mode else 5)
    assert name == "b.parquet" or server.largest <= 3690, server.largest
    assert data.signatures == opened(cfg, f"{server.url}/{name}").signatures
    server.mode = ""
    (server.folder / name).write_bytes((server.folder / name).read_bytes().replace(b"q7", b"Q7"))
    with pytest.raises(DataError, match=f"{server.url}/{name} was changed while the run was reading it"):
        taken(data, 35, 25, places)
    remote._facts.cache_clear()
    with pytest.raises(DataError, match=f"{name} has changed since the checkpoint was saved"):
        stream_pieces.check_same(data.signatures, opened(cfg, f"{server.url}/{name}").signatures)


@pytest.mark.parametrize(
    ("mode", "reason"),
    [
        ("hangs", r"TimeoutError: .*, 4 times in a row\.\nIf the server is up, start again"),
        ("only nonsense", r"BadStatusLine: .*, 4 times in a row\.\n"),
        ("no ranges", r"cannot be read in parts: its server does not answer Range requests\.\nDownload"),
    ],
)
def test_a_server_that_does_not_recover(
    mode: str, reason: str, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rows(server.folder / "a.jsonl", pairs(30))
    server.mode = mode
    monkeypatch.setattr(remote, "_TIMEOUT_S", 0.2)
    with pytest.raises(DataError, match=reason):
        taken(opened(run_config(tmp_path, ""), f"{server.url}/a.jsonl"))


def test_a_slow_server_is_asked_again_for_the_rest(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it sent before it hung is kept: all but a byte."""
    write_rows(server.folder / "a.jsonl", pairs(100))
    monkeypatch.setattr(remote, "_TIMEOUT_S", 0.2)
    size = (server.folder / "a.jsonl").stat().st_size
    server.mode = "slow"
    assert remote.read_range(f"{server.url}/a.jsonl", 0, size) == (server.folder / "a.jsonl").read_bytes()
    assert server.asked["a.jsonl"] == 3  # its size, all but the last byte, that byte


def test_lists_of_urls(server: Server, tmp_path: Path) -> None:
    """A list may be here or there, with names relative to its own."""
    files(server.folder)
    (server.folder / "shards.txt").write_text("# two\nb.parquet\n\na.jsonl\n")
    (tmp_path / "here.txt").write_text(f"{server.url}/b.parquet\n{server.url}/a.jsonl\n")
    cfg = run_config(tmp_path, "")
    there, here = (opened(cfg, path) for path in (f"{server.url}/shards.txt", str(tmp_path / "here.txt")))
    assert [str(file.path) for file in there.files] == [f"{server.url}/{name}" for name in ("b.parquet", "a.jsonl")]
    assert here.files == there.files
    assert pickle.loads(pickle.dumps(here.files)) == here.files
    assert taken(here) == taken(there)
    for line, reason in [
        ("c.jsonl", r"Cannot read '.*/c.jsonl': HTTP 404"),
        ("a.zip", r"'.*/a.zip' cannot be streamed"),
        ("a.jsonl?key=1", r"hold no query"),
        ("file:///etc/passwd", r"'file:///etc/passwd' cannot be streamed"),
    ]:
        (server.folder / "wrong.txt").write_text(f"{line}\n")
        remote._facts.cache_clear()
        with pytest.raises(DataError, match=reason):
            opened(cfg, f"{server.url}/wrong.txt")


def test_the_token_stays_with_its_server(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A redirect to another server, as to a store of large files, gets no header of the first one."""
    from urllib.request import Request

    request = Request(f"{server.url}/a", headers={"Authorization": "Bearer secret", "Range": "bytes=0-1"})
    handler = remote._SafeRedirects()
    elsewhere = handler.redirect_request(request, None, 302, "Found", {}, "http://elsewhere.invalid/a")
    assert elsewhere.get_header("Range") == "bytes=0-1"
    assert not elsewhere.has_header("Authorization")
    here = handler.redirect_request(request, None, 302, "Found", {}, f"{server.url}/b")
    assert here.get_header("Authorization") == "Bearer secret"


@pytest.mark.parametrize("is_offline", [False, True])
def test_a_dataset_on_hugging_face(is_offline: bool, server: Server, tmp_path: Path) -> None:
    """Its files are named at the commit, as the library `datasets` assigns them to splits, and read in ranges."""
    write_rows(server.folder / "train.jsonl", pairs(100))
    write_rows(server.folder / "test.jsonl", pairs(9))
    script = """if True:
        from pathlib import Path
        from toolkit.config.schema import DataConfig, SourceConfig
        from toolkit.data.sources import locate_all
        from toolkit.messages import DataError
        try:
            for file in locate_all(DataConfig(streaming=True, sources=[SourceConfig(hub="me/chats")]), Path()):
                print(file.path, file.path.stat().st_size, file.path.tag, file.path.open().read(13))
        except DataError as error:
            print(error)
    """
    hub = {"HF_ENDPOINT": server.url, "HF_HUB_OFFLINE": str(int(is_offline)), "HF_HOME": str(tmp_path / "hub")}
    done = subprocess.run([sys.executable, "-c", script], env=os.environ | hub, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    if is_offline:
        assert done.stdout.splitlines()[0] == "'me/chats' cannot be streamed from Hugging Face: HF_HUB_OFFLINE=1."
        assert len(done.stdout.splitlines()) == 2
        return
    size = (server.folder / "train.jsonl").stat().st_size
    url = f"{server.url}/datasets/me/chats/resolve/{COMMIT}/train.jsonl"
    assert done.stdout.splitlines() == [f'{url} {size} {"a" * 40} b\'{{"prompt": "q\'']


def test_urls_are_for_training_data_of_streams(tmp_path: Path) -> None:
    from toolkit.config.paths import _wrong_source

    (tmp_path / "shards.txt").write_text("https://localhost/a.jsonl\n")
    for path in ("https://localhost/a.jsonl", str(tmp_path / "shards.txt")):
        assert not [*_wrong_source(SourceConfig(path=path), "data.sources[0]", True)]
        [sentence] = _wrong_source(SourceConfig(path=path), "data.validation[0]", False)
        assert f"data.validation[0].path = {path} is a URL, which is read with data.streaming=true" in sentence
