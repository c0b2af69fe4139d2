"""`toolkit push`: what is uploaded, and how often, against a server that answers as Hugging Face's does."""

import base64
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from toolkit.extras import push
from toolkit.messages import ConfigError, ModelError

TOKEN = "hf_" + "A1b2" * 9


class _Hub(ThreadingHTTPServer):
    """The parts of the hub's protocol that an upload uses, in memory."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.created: list[dict[str, Any]] = []
        self.stored: dict[str, bytes] = {}
        self.commits: list[dict[str, bytes]] = []
        self.sent = 0
        """Bytes of large files that have arrived."""
        self.refusing, self.failing = 0, False
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class _Answers(BaseHTTPRequestHandler):
    server: _Hub

    def log_message(self, *_: Any) -> None:
        """Print nothing."""

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _answer(self, content: Any, status: int = 200) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        """Say nothing of what an upload needs not ask."""
        self._answer({}, 404)

    def do_PUT(self) -> None:
        """Take a large file."""
        body = self._body()
        if self.server.failing:
            self.server.failing = False
            self._answer({"error": "disk full"}, 400)
            return
        self.server.sent += len(body)
        self.server.stored[self.path.removeprefix("/lfs/")] = body
        self._answer({})

    def do_POST(self) -> None:
        """Create a repository, say how files are sent, or take a commit."""
        body = self._body()
        if not self.headers.get("Authorization"):
            self._answer({"error": "who are you?"}, 401)
        elif self.server.refusing:
            self._answer({"error": f"{TOKEN} may not write"}, self.server.refusing)
        elif self.path == "/api/repos/create":
            self.server.created.append(json.loads(body))
            self._answer({"url": f"{self.server.url}/me/tuned", "id": "me/tuned"})
        elif "/preupload/" in self.path:
            modes = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if "safetensors" in file["path"] else "regular",
                    "shouldIgnore": False,
                }
                for file in json.loads(body)["files"]
            ]
            self._answer({"files": modes})
        elif self.path.endswith("/info/lfs/objects/batch"):
            objects: list[dict[str, Any]] = []
            for wanted in json.loads(body)["objects"]:
                href = {"href": f"{self.server.url}/lfs/{wanted['oid']}"}
                is_there = wanted["oid"] in self.server.stored
                objects.append(wanted if is_there else {**wanted, "actions": {"upload": href}})
            self._answer({"transfer": "basic", "objects": objects})
        elif self.path == "/api/validate-yaml":  # the card's front matter
            self._answer({"errors": [], "warnings": []})
        elif "/commit/" not in self.path:
            self._answer({"error": self.path}, 404)
        else:
            lines = [json.loads(line) for line in body.splitlines()]
            commit = {}
            for line in lines[1:]:
                value = line["value"]
                content = value.get("content")
                stored = self.server.stored.get(value.get("oid", ""))
                commit[value["path"]] = base64.b64decode(content) if content is not None else stored or b""
            self.server.commits.append(commit)
            self._answer({"commitUrl": f"{self.server.url}/me/tuned/commit/0", "commitOid": "0" * 40, "hookOutput": ""})


@pytest.fixture
def hub() -> Iterator[_Hub]:
    with _Hub() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "mine"
    (folder / "export" / "probe").mkdir(parents=True)
    (folder / "config.yaml").write_text("{}", encoding="utf-8")
    for name, text in {
        "config.json": "{}",
        "README.md": '---\ntags: ["deepspeed"]\n---\n\n# 微调\n',
        "model.safetensors": "w" * 50_000,
        "probe/logits.safetensors": "l" * 100,
    }.items():
        (folder / "export" / name).write_text(text, encoding="utf-8")
    return folder


def pushed(hub: _Hub, *words: str, token: str = TOKEN) -> subprocess.CompletedProcess[str]:
    """Run the command against the server."""
    environ = {
        **os.environ,
        "HF_ENDPOINT": hub.url,
        "HF_TOKEN": token,
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
    }
    command = [sys.executable, "-m", "toolkit", "push", *words]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)


def test_nothing_is_sent_without_yes(hub: _Hub, run_folder: Path) -> None:
    shown = pushed(hub, str(run_folder), "hub=me/tuned")
    assert shown.returncode == 0 and "model.safetensors" in shown.stdout
    assert "4 files, 0.00 GB" in shown.stdout and "Nothing was sent. To upload, add --yes" in shown.stdout
    assert not hub.created and not hub.commits


def test_all_files_arrive_in_one_commit_with_the_licence_in_the_card(hub: _Hub, run_folder: Path) -> None:
    done = pushed(hub, str(run_folder), "hub=me/tuned", "license=apache-2.0", "--yes")
    assert done.returncode == 0, done.stderr
    assert f"Uploaded: {hub.url}/me/tuned" in done.stdout and TOKEN not in done.stdout + done.stderr
    [commit] = hub.commits
    files = {str(path.relative_to(run_folder / "export")) for path in push.uploaded_files(run_folder / "export")}
    assert commit.keys() == files
    assert commit["model.safetensors"] == b"w" * 50_000
    assert commit["README.md"].decode() == '---\nlicense: apache-2.0\ntags: ["deepspeed"]\n---\n\n# 微调\n'
    assert "license" not in (run_folder / "export" / "README.md").read_text("utf-8"), "the run's file stays"
    assert hub.created[0]["name"] == "tuned" and hub.created[0].get("private", True)


def test_the_card_gets_the_scores_of_the_run_and_the_base_models_licence_is_named(
    hub: _Hub, run_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "README.md").write_text("---\nlanguage: zh\nlicense: mit\n---\n# Base\nlicense: none\n")
    (run_folder / "config.yaml").write_text(f"model: {{path: {tmp_path}/base}}\n")
    scores = [{"task": "my|quiz", "metric": "acc", "value": 0.75, "error": None, "samples": 4, "base": 0.5}]
    (run_folder / "evaluations").mkdir()
    (run_folder / "evaluations" / "scores-1.json").write_text(json.dumps({"model": "runs/mine", "scores": scores}))
    done = pushed(hub, str(run_folder), "hub=me/tuned", "--yes")
    assert done.returncode == 0, done.stderr
    assert "The base model's is mit." in done.stdout and "are added to the model card" in done.stdout
    card = hub.commits[0]["README.md"].decode()
    assert card.startswith('---\ntags: ["deepspeed"]\n---\n\n# 微调\n\n## ')
    assert "\n### runs/mine\n\n|  | examples | base model | model | change |\n| --- |" in card
    assert "\n| my/quiz acc | 4 | 0.5000 | 0.7500 | +0.2500 |\n" in card


def test_an_interrupted_upload_sends_the_rest(hub: _Hub, run_folder: Path) -> None:
    hub.failing = True
    failed = pushed(hub, str(run_folder), "hub=me/tuned", "--yes")
    assert failed.returncode == 74 and "Rerun the same command" in failed.stderr and not hub.commits
    pushed(hub, str(run_folder), "hub=me/tuned", "--yes")
    assert hub.sent == 50_100, "each large file arrived once"
    again = pushed(hub, str(run_folder), "hub=me/tuned", "--yes")
    assert again.returncode == 0 and hub.sent == 50_100


def test_a_missing_token_is_named(hub: _Hub, run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    missing = pushed(hub, str(run_folder), "hub=me/tuned", "--yes", token="")
    assert missing.returncode == 2 and "Set HF_TOKEN to a token that may write there" in missing.stderr


@pytest.mark.parametrize("status", [401, 403])
def test_a_refused_token_is_an_error_that_does_not_show_it(hub: _Hub, run_folder: Path, status: int) -> None:
    hub.refusing = status
    refused = pushed(hub, str(run_folder), "hub=me/tuned", "--yes")
    assert refused.returncode == 2 and "the hub rejects the upload" in refused.stderr and "HF_TOKEN" in refused.stderr
    assert TOKEN not in refused.stdout + refused.stderr and "Traceback" not in refused.stderr


def test_mistakes_are_named_before_anything_is_sent(run_folder: Path) -> None:
    for text in ("tuned", "a/b/c", "hf:", "s3:a/b"):
        with pytest.raises(ConfigError, match="is no repository"):
            push.parse_target(text)
    assert push.parse_target("modelscope:me/tuned") == push.Target("modelscope", "me/tuned")
    (run_folder / "export" / "config.json").unlink()
    with pytest.raises(ModelError, match="holds no exported model or adapter"):
        push.exported_folder(run_folder)
    (run_folder / "export" / "link").symlink_to("/etc/passwd")
    with pytest.raises(ModelError, match="is a link"):
        push.uploaded_files(run_folder / "export")


def test_modelscopes_library_gets_the_same_files(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in with the signatures of modelscope_hub 0.5.1: the library is not installed where tests run."""
    calls: list[tuple[Any, ...]] = []

    class HubApi:
        def repo_exists(self, repo_id: str, repo_type: str) -> bool:
            return False

        def create_repo(self, repo_id: str, repo_type: str, *, visibility: str) -> None:
            calls.append((repo_id, repo_type, visibility))

        def upload_folder(
            self, repo_id: str, repo_type: str, folder_path: Path, *, allow_patterns: list[str], commit_message: str
        ) -> None:
            calls.append((repo_id, folder_path, sorted(allow_patterns)))

        def upload_file(
            self, repo_id: str, repo_type: str, path_or_fileobj: bytes, path_in_repo: str, *, commit_message: str
        ) -> None:
            calls.append((path_in_repo, path_or_fileobj.decode()))

    monkeypatch.setitem(sys.modules, "modelscope_hub", SimpleNamespace())  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "modelscope_hub.api", SimpleNamespace(HubApi=HubApi))  # type: ignore[arg-type]
    folder, target = run_folder / "export", push.Target("modelscope", "me/tuned")
    assert push.upload(target, folder, private=False, license_id="mit") == "https://modelscope.cn/models/me/tuned"
    created, uploaded, card = calls
    assert created == ("me/tuned", "model", "public")
    assert uploaded == ("me/tuned", folder, ["config.json", "model.safetensors", "probe/logits.safetensors"])
    assert card[0] == "README.md" and card[1].startswith("---\nlicense: mit\n")
