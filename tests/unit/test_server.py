"""Requests that ask for too much, or have no form, are turned away before transformers' server sees them."""

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import GenerationConfig
from transformers.cli.serving.utils import BaseHandler

from toolkit.cli.serve import serving_command
from toolkit.evaluate import server
from toolkit.evaluate.server import MAX_REQUEST_BYTES, BoundedApp, _sample_by_temperature, limit_tokens, request_problem

RESERVED = frozenset({"chat_template", "tokenize"})


def asked(path: str, parts: list[bytes]) -> tuple[int, bytes | None]:
    """Return the status of the answer to a request that comes in parts, and what the application behind got."""
    sent: list[dict[str, Any]] = []
    got: list[bytes] = []
    messages = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
    messages[-1]["more_body"] = False

    async def app(scope: Any, receive: Any, send: Any) -> None:
        got.append((await receive())["body"])
        await send({"type": "http.response.start", "status": 200})

    async def receive() -> dict[str, Any]:
        return messages.pop(0)

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    asyncio.run(BoundedApp(app)({"type": "http", "path": path}, receive, send))
    if sent[0]["status"] != 200:
        assert set(json.loads(sent[1]["body"])["error"]) == {"message", "type", "param", "code"}
    return sent[0]["status"], got[0] if got else None


@pytest.mark.parametrize("installed", [[], ["vllm"], ["vllm", "sglang"]])
def test_each_server_has_its_command(installed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    programs = {name: f"/bin/{name}" for name in installed}
    monkeypatch.setattr(server.shutil, "which", lambda name, **_: programs.get(name))
    monkeypatch.setattr(server.importlib.util, "find_spec", lambda _: True)
    folder, more = Path("dir"), ["--dtype", "float32"]
    assert server.server_program("auto")[0] == ("vllm" if installed else "transformers")
    for backend in ("transformers", *installed):
        name, program = server.server_program(backend)
        command = serving_command(name, program, folder, "NAME", ("host", 1), more)
        assert name == backend and command[: len(program)] == program
        listen = ["--host", "host", "--port", "1"]
        after = {
            "vllm": ["serve", "dir", *listen, "--served-model-name", "NAME", "dir", *more],
            "sglang": ["serve", "--model-path", "dir", *listen, "--served-model-name", "NAME", *more],
            "transformers": ["NAME", "serve", "dir", *listen, *more],
        }
        assert command[len(program) :] == after[backend]


def test_bodies_and_paths() -> None:
    assert asked("/v1/chat/completions", [b" {", b"}"]) == (200, b" {}")
    assert asked("/v1/models", [b""]) == (200, b"")
    part = b"{" * (1 << 20)
    assert asked("/v1/chat/completions", [part] * (MAX_REQUEST_BYTES >> 20)) == (200, b"{" * MAX_REQUEST_BYTES)
    assert asked("/v1/chat/completions", [*[part] * (MAX_REQUEST_BYTES >> 20), b"{", b"}"]) == (413, None)
    assert asked("/v1/chat/completions", [b"NaN"]) == (400, None)
    for path in ("/load_model", "/load_model/", "/reset", "/v1/audio/transcriptions"):
        assert asked(path, [b'{"model": "/etc"}']) == (404, None)


GOOD: list[dict[str, Any]] = [
    {},
    {"temperature": None, "max_tokens": None, "stop": None, "chat_template_kwargs": None},
    {"temperature": 0, "top_p": 1, "max_tokens": 10**9, "seed": 0, "stop": "x"},
    {"temperature": 1.5, "stop": ["a", "b"], "chat_template_kwargs": {"enable_thinking": False}},
    {"messages": [{"role": "user", "content": ""}, {"role": "assistant", "tool_calls": []}]},
]
BAD: list[dict[str, Any]] = [
    {"temperature": -1},
    {"temperature": "hot"},
    {"temperature": float("nan")},
    {"temperature": True},
    {"temperature": 10**400},
    {"top_p": 5},
    {"frequency_penalty": -1e9},
    {"max_tokens": 0},
    {"max_tokens": 1.5},
    {"max_completion_tokens": "x"},
    {"max_output_tokens": [1]},
    {"seed": 10**30},
    {"generation_config": '{"num_beams": 1000000}'},
    {"stop": ["x"] * 1000},
    {"stop": ["x" * 1000]},
    {"stop": [""]},
    {"stop": {"a": 1}},
    {"chat_template_kwargs": {"chat_template": "{% for i in range(9) %}{% endfor %}"}},
    {"chat_template_kwargs": {"tokenize": False}},
    {"chat_template_kwargs": [1]},
    {"messages": [{"role": "user", "text": "what it was asked"}]},
    {"messages": [{"role": "user", "content": "a"}, {"content": "b"}]},
    {"messages": ["a"]},
]


@pytest.mark.parametrize("body", GOOD, ids=repr)
def test_good_fields(body: dict[str, Any]) -> None:
    assert request_problem(body, RESERVED) == ""


@pytest.mark.parametrize("body", BAD, ids=lambda body: repr(body)[:40])
def test_bad_fields(body: dict[str, Any]) -> None:
    said = request_problem(body, RESERVED)
    assert next(iter(body)) in said
    assert len(said) < 400


def test_an_answer_ends_with_the_positions() -> None:
    def model(positions: int | None) -> Any:
        config = {"model_type": "llama", "max_position_embeddings": positions}
        return SimpleNamespace(config=SimpleNamespace(to_dict=lambda: config))

    for most, room in ((10**9, 7), (None, 7), (3, 3)):
        generation = SimpleNamespace(max_new_tokens=most)
        assert limit_tokens(model(10), {"input_ids": [1, 2, 3]}, generation) == ""
        assert generation.max_new_tokens == room
    assert "10 tokens" in limit_tokens(model(10), {"input_ids": [1] * 10}, SimpleNamespace(max_new_tokens=1))
    assert limit_tokens(model(None), {"input_ids": [1] * 10}, SimpleNamespace(max_new_tokens=1)) == ""


@pytest.mark.parametrize("default", [None, True])
def test_a_temperature_samples(default: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BaseHandler, "_build_generation_config", BaseHandler._build_generation_config)  # and back
    _sample_by_temperature()
    handler: Any = SimpleNamespace(generation_state=SimpleNamespace(_compile=False))
    for temperature, wanted in ((None, default), (0, False), (0.01, True), (1, True)):
        body = {"temperature": temperature, "top_p": 0.9}
        found = BaseHandler._build_generation_config(handler, body, GenerationConfig(do_sample=default))
        assert found.do_sample == wanted
        assert found.top_p == 0.9


@pytest.mark.parametrize(
    ("status", "parts", "message", "kind"),
    [
        (400, [b'{"detail": "too', b' long"}'], "too long", "invalid_request_error"),
        (422, [b'{"detail": [{"msg": "no"}]}'], '[{"msg": "no"}]', "invalid_request_error"),
        (404, [b'{"detail": "Not Found"}'], "Not Found", "invalid_request_error"),
        (500, [b"Internal Server Error"], "Internal Server Error", "server_error"),
    ],
)
def test_every_error_has_the_form_of_openais(status: int, parts: list[bytes], message: str, kind: str) -> None:
    """What the server behind answers, FastAPI's {"detail": …}, is not shown by clients."""
    sent: list[dict[str, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": status, "headers": [(b"content-length", b"7")]})
        for place, part in enumerate(parts):
            await send({"type": "http.response.body", "body": part, "more_body": place + 1 < len(parts)})

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"{}"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    asyncio.run(BoundedApp(app)({"type": "http", "path": "/v1/chat/completions"}, receive, send))
    start, body = sent
    assert start["status"] == status and (b"content-length", b"7") not in start["headers"]
    error = {"message": message, "type": kind, "param": None, "code": status}
    assert json.loads(body["body"]) == {"error": error}
