"""`model.path=owner/name`: from the cache without a network, from a small server that stands for Hugging Face."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from toolkit.config.files import is_hub_name
from toolkit.config.load import load

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": b"{}",
    "model.safetensors": b"weights",
    "model.gguf": b"not wanted",
    "README.md": b"read",
    "consolidated.safetensors": b"once more",
    "original/params.json": b"not wanted",
}
OWN = {
    "config.json": b'{"auto_map": {"AutoConfig": "own.M"}}',
    "own.py": b"code",
    "sub/own.py": b"code",
    "model.safetensors": b"weights",
}
PICKLED = {"config.json": b"{}", "pytorch_model.bin": b"weights"}
# One process asks for all: huggingface_hub reads its variables when it is imported.
ASK = """
import json, sys
from toolkit.config.hub import resolve_model_path
from toolkit.config.load import load
from toolkit.messages import ConfigError
from toolkit.messages import console, set_language

set_language("en")
for path, revision, config_only in json.loads(sys.argv[1]):
    loaded = load(["recipe=quickstart", "model=hf", f"model.path={path}", f"model.revision={revision}"])
    said = []
    console.write = said.append
    try:
        model = resolve_model_path(loaded, config_only=config_only).cfg.model
        print(json.dumps([model.path, model.revision, model.hub_id, said]))
    except ConfigError as error:
        print(json.dumps(str(error)))
"""


def ask(home: Path, *asked: tuple[str, str, bool], processes: int = 1, **variables: str) -> list[Any]:
    """Return what each question led to: path, revision, hub_id and what was said; or the message of the error."""
    env = {**os.environ, "HF_HOME": str(home), **variables}
    command = [sys.executable, "-c", ASK, json.dumps(asked)]
    running = [
        subprocess.Popen(command, env=env, cwd=home.parent, stdout=subprocess.PIPE, text=True) for _ in range(processes)
    ]
    outputs = [one.communicate(timeout=120)[0] for one in running]
    assert [one.returncode for one in running] == [0] * processes
    return [json.loads(line) for output in outputs for line in output.splitlines()]


def cached(home: Path, name: str, files: dict[str, bytes]) -> Path:
    """Write a snapshot as huggingface_hub keeps it, and return its folder."""
    repository = home / "hub" / f"models--{name.replace('/', '--')}"
    folder = repository / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    for file, content in files.items():
        (folder / file).write_bytes(content)
    return folder


class _Hub(BaseHTTPRequestHandler):
    """Answers as Hugging Face does, as far as a download asks."""

    def do_HEAD(self) -> None:
        self.do_GET(with_body=False)

    def do_GET(self, with_body: bool = True) -> None:
        self.server.asked.append(f"{self.command} {self.path}")  # type: ignore[attr-defined]
        path = self.path.partition("?")[0]
        name = "/".join(path.removeprefix("/api/models/").strip("/").split("/")[:2])
        files = {"me/model": FILES, "me/old": PICKLED, "me/own": OWN}.get(name)
        if name == "me/gated":
            return self._answer(403, b"", {"X-Error-Code": "GatedRepo"})
        if files is None:
            return self._answer(404, b"", {"X-Error-Code": "RepoNotFound"})
        if "/nowhere" in path:
            return self._answer(404, b"", {"X-Error-Code": "RevisionNotFound"})
        if "/tree/" in path:
            listed = [{"type": "file", "path": key, "size": len(files[key]), "oid": f"{key}1"} for key in files]
            return self._answer(200, json.dumps(listed).encode())
        if path.startswith("/api/models/"):
            return self._answer(200, json.dumps({"id": name, "sha": COMMIT, "siblings": []}).encode())
        content = files[path.rpartition("/")[2]]
        headers = {"ETag": f'"{path.rpartition("/")[2]}1"', "X-Repo-Commit": COMMIT}
        return self._answer(200, content, headers, with_body)

    def _answer(self, code: int, body: bytes, headers: dict[str, str] | None = None, with_body: bool = True) -> None:
        self.send_response(code)
        for key, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@pytest.fixture
def hub() -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    server.asked = []  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def variables(hub: ThreadingHTTPServer, **more: str) -> dict[str, str]:
    endpoint = f"http://127.0.0.1:{hub.server_address[1]}"
    return {"HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", **more}


def test_names_and_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert is_hub_name("zai-org/chatglm3-6b")
    assert not any(map(is_hub_name, ["", "model", "/a/b", "./a", "../a", "~/a", "a/b/c", "a/b "]))
    (tmp_path / "a" / "b").mkdir(parents=True)
    assert not is_hub_name("a/b")


def test_the_cache_alone_without_a_network(tmp_path: Path) -> None:
    home = tmp_path / "home"
    folder = cached(home, "me/model", {"config.json": b"{}", "model.safetensors": b"x"})
    config = cached(home, "me/config", {"config.json": b"{}"})
    asked = ("me/model", "", False), ("me/model", COMMIT, False), ("me/config", "", True), ("me/none", "", False)
    whole, pinned, config_only, none = ask(home, *asked, ("me/model", "v2", True), HF_HUB_OFFLINE="1")[:4]
    assert whole == pinned == [str(folder), "", "me/model", []]
    assert config_only == [str(config), "", "me/config", []]
    assert none.startswith("command line: model.path = me/none is neither a directory here nor in the cache (")
    assert "hf download me/none" in none


def test_downloaded_once(tmp_path: Path, hub: ThreadingHTTPServer) -> None:
    """Of two ranks that one launcher started, one; and only what is needed."""
    home = tmp_path / "home"
    home.mkdir()
    ranks = variables(hub, WORLD_SIZE="2", MASTER_PORT="1")
    first, old, second, _ = ask(home, ("me/model", "", False), ("me/old", "", False), processes=2, **ranks)
    folder = home / "hub" / "models--me--model" / "snapshots" / COMMIT
    assert first[:3] == second[:3] == [str(folder), "", "me/model"]
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    assert (Path(old[0]) / "pytorch_model.bin").read_bytes() == b"weights"
    requests = hub.asked  # type: ignore[attr-defined]
    assert sum(line == f"GET /me/model/resolve/{COMMIT}/model.safetensors" for line in requests) == 1
    assert sum("/api/models/me/model/revision" in line for line in requests) == 1
    assert sorted(map(len, (first[3], second[3]))) == [0, 1]


def test_config_alone_and_the_code_that_it_names(tmp_path: Path, hub: ThreadingHTTPServer) -> None:
    home = tmp_path / "home"
    home.mkdir()
    [model, own] = ask(home, ("me/model", "", True), ("me/own", COMMIT, True), **variables(hub))
    assert [path.name for path in Path(model[0]).iterdir()] == ["config.json"]
    assert sorted(path.name for path in Path(own[0]).iterdir()) == ["config.json", "own.py"]
    offline = {"HF_HUB_OFFLINE": "1"}
    assert ask(home, ("me/model", "", True), ("me/own", COMMIT, True), **variables(hub) | offline) == [model, own]


def test_what_cannot_be_had(tmp_path: Path, hub: ThreadingHTTPServer) -> None:
    home = tmp_path / "home"
    home.mkdir()
    asked = [("me/gated", "", False), ("me/nothing", "", True), ("me/model", "nowhere", False)]
    gated, nothing, revision = ask(home, *asked, **variables(hub))
    assert "me/gated: its authors give it to whom they have agreed with only. Accept the terms at https" in gated
    assert "model.path = me/nothing is neither a directory here nor a model on Hugging Face" in nothing
    assert "model.revision = nowhere: me/model has no such commit, branch or tag." in revision
    hub.server_close()
    [away] = ask(home, ("me/model", "", False), **variables(hub))
    assert "model.path = me/model is neither a directory here nor in the cache" in away


def test_another_model_than_the_recipes_is_not_sought_on_modelscope(tmp_path: Path) -> None:
    program = ASK.replace("model=hf", "model=qwen3_0_6b")
    asked = json.dumps([("Qwen/Qwen2.5-7B-Instruct", "", True), ("Qwen/Qwen3-0.6B", "", True)])
    env = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    lines = subprocess.run([sys.executable, "-c", program, asked], env=env, stdout=subprocess.PIPE, text=True).stdout
    other, own = map(json.loads, lines.splitlines())
    assert "Qwen2.5-7B-Instruct is neither" in other and "Qwen3" not in other
    assert "modelscope download --model Qwen/Qwen3-0.6B" in own


def test_other_models_are_left_alone() -> None:
    from toolkit.config.hub import resolve_model_path

    loaded = load(["recipe=quickstart"])
    assert resolve_model_path(loaded) is loaded
