"""The client of completion servers: what is late, broken or nonsense costs a try, and never an error."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests.unit.speaker import write_random
from toolkit.config.schema import RolloutsConfig
from toolkit.evaluate import completions
from toolkit.evaluate.completions import CompletionClient, find_protocol
from toolkit.messages import ConfigError
from toolkit.models import chat, tokenizer_files

GOOD = {"text": "a b", "finish_reason": "stop", "token_ids": None, "index": 0}


class StandIn:
    """A server whose answers are taken from `script`, one for each request; the last one stays."""

    def __init__(self) -> None:
        self.script: list[Callable[[dict[str, Any]], tuple[int, bytes] | None]] = [says()]
        self.asked: list[tuple[dict[str, Any], str]] = []
        self.takes_ids = True
        self.models: list[dict[str, str]] = [{"id": "student"}]
        stand_in = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.reply(200, json.dumps({"data": stand_in.models}).encode())

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if not stand_in.takes_ids and not isinstance(body["prompt"], str):
                    self.reply(400, json.dumps({"error": {"message": "prompt must be a string."}}).encode())
                    return
                stand_in.asked.append((body, self.headers.get("Authorization", "")))
                act = stand_in.script.pop(0) if len(stand_in.script) > 1 else stand_in.script[0]
                if answer := act(body):
                    self.reply(*answer)
                else:
                    self.connection.close()

            def reply(self, code: int, content: bytes) -> None:
                self.send_response(code)
                self.send_header("Content-Length", str(len(content)))
                if code == 302:
                    self.send_header("Location", "/v1/completions")
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.server.handle_error = lambda *_: None  # type: ignore[method-assign]  # a client that gave up
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


def says(content: bytes | None = None, code: int = 200, wait_s: float = 0, model: str = "", **choice: Any) -> Any:
    def answer(body: dict[str, Any]) -> tuple[int, bytes]:
        time.sleep(wait_s)
        whole = {"model": model or body["model"], "choices": [{**GOOD, **choice}]}
        return code, json.dumps(whole).encode() if content is None else content

    return answer


@pytest.fixture
def server() -> Iterator[StandIn]:
    one = StandIn()
    yield one
    one.server.shutdown()
    one.server.server_close()


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> chat.AnyChatEncoder:
    folder = tmp_path_factory.mktemp("speaker")
    write_random(folder)
    return tokenizer_files.load_chat_encoder(folder)


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completions, "_FIRST_PAUSE_S", 0.01)


def client(server: StandIn, encoder: chat.AnyChatEncoder, **settings: Any) -> CompletionClient:
    config = RolloutsConfig(url=server.url, **{"max_new_tokens": 8, "timeout_s": 6.0, **settings})
    made = CompletionClient(config, encoder, find_protocol(config, encoder))
    server.asked.clear()
    return made


def prompt(encoder: chat.AnyChatEncoder) -> list[int]:
    return encoder.prompt([{"role": "user", "content": "b a"}])


NONSENSE = {
    "no JSON": says(b"<html>"),
    "no object": says(b"[1]"),
    "no UTF-8": says(b'{"model": "student", "choices": [{"text": "\xff\xfe"}]}'),
    "deep": says(b"[" * 60_000),
    "endless": says(b" " * (1 << 20)),
    "an error": says(b"{}", code=500),
    "a redirect": says(b"", code=302),
    "no choice": says(json.dumps({"model": "student", "choices": []}).encode()),
    "another model": says(model="gpt"),
    "empty": says(text=" "),
    "no text": says(text=None),
    "a lone surrogate": says(text="\ud800"),
    "token ids of another vocabulary": says(token_ids=[1, 10**6]),
    "token ids that are none": says(token_ids=[True, 1.5]),
    "too many token ids": says(token_ids=[1] * 9),
    "too long": says(text="a " * 200),
    "hung up": lambda body: None,
    "late": says(wait_s=2.5),
}


@pytest.mark.parametrize("name", NONSENSE)
def test_nonsense_costs_a_try(name: str, server: StandIn, encoder: chat.AnyChatEncoder) -> None:
    asks, gives_up = client(server, encoder), client(server, encoder, tries=2, timeout_s=1.5)
    server.script = [NONSENSE[name], says()]
    [answer] = asks.answer_all([prompt(encoder)], [7])
    assert isinstance(answer, list) and answer[-1] in encoder.stop_ids and len(server.asked) == 2
    server.script = [NONSENSE[name]]
    [reason] = gives_up.answer_all([prompt(encoder)], [7])
    assert isinstance(reason, str) and reason and "\n" not in reason


def test_a_dead_server_takes_no_longer_than_its_time(server: StandIn, encoder: chat.AnyChatEncoder) -> None:
    asks = client(server, encoder, timeout_s=1.0)
    server.script = [says(wait_s=5)]
    began = time.monotonic()
    answers = asks.answer_all([prompt(encoder)] * 70, list(range(70)))
    assert all(isinstance(answer, str) for answer in answers) and time.monotonic() - began < 3
    server.server.shutdown()
    server.server.server_close()
    [reason] = asks.answer_all([prompt(encoder)], [1])
    assert "refused" in str(reason)
    with pytest.raises(ConfigError, match=r"gives no completions: .*refused"):
        find_protocol(asks.config, encoder)


def test_ids_are_the_servers_or_those_of_the_text(
    server: StandIn, encoder: chat.AnyChatEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(completions.TOKEN_VARIABLE, "hush-hush-hush")
    asks, stop = client(server, encoder), encoder.stop_ids[0]
    of_text = [int(token) for token in encoder.tokenizer("a b", add_special_tokens=False)["input_ids"]]
    for choice, expected in (
        ({}, [*of_text, stop]),
        ({"finish_reason": "length"}, of_text),
        ({"token_ids": [9, 8, stop, 7]}, [9, 8, stop]),
        ({"token_ids": [9, 8]}, [9, 8, stop]),
        ({"token_ids": [9] * 8}, [9] * 8),
    ):
        server.script = [says(**choice)]
        assert asks.answer_all([prompt(encoder)], [3]) == [expected]
    body, token = server.asked[-1]
    assert token == "Bearer hush-hush-hush" and body["prompt"] == prompt(encoder)
    assert (body["seed"], body["temperature"], body["top_p"], body["max_tokens"]) == (3, 1.0, 1.0, 8)
    server.script, server.takes_ids = [says()], False
    by_text = client(server, encoder)
    assert not by_text.protocol.takes_ids and by_text.answer_all([prompt(encoder)], [3]) == [[*of_text, stop]]
    [(body, _)] = server.asked
    assert encoder.tokenizer(body["prompt"])["input_ids"] == prompt(encoder) and "return_token_ids" not in body


def test_an_answer_has_its_text(server: StandIn, encoder: chat.AnyChatEncoder) -> None:
    """Without the end token and what follows it; an empty one is an answer where nothing has to be learned of it."""
    asks, stop = client(server, encoder), encoder.stop_ids[0]
    asks.keeps_empty = True
    ids = [int(token) for token in encoder.tokenizer("b a", add_special_tokens=False)["input_ids"]]
    ended = f"b a{encoder.tokenizer.decode([stop])}and so on"
    for choice, text, is_cut in (
        ({"text": " a b\n"}, "a b", False),
        ({"text": "a b", "finish_reason": "length"}, "a b", True),
        ({"text": ended, "finish_reason": "length"}, "b a", False),
        ({"text": "as its ids", "token_ids": [*ids, stop]}, "b a", False),
        ({"text": "", "token_ids": [stop]}, "", False),
        ({"text": ""}, "", False),
    ):
        server.script = [says(**choice)]
        answer = asks.answer(prompt(encoder), 3, time.monotonic() + 5)
        assert not isinstance(answer, str), answer
        assert (answer.text, answer.is_cut) == (text, is_cut)


def test_a_proxy_is_not_asked_for_a_server_on_this_machine(
    server: StandIn, encoder: chat.AnyChatEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(completions, "_OPENER", None)
    assert isinstance(client(server, encoder).answer_all([prompt(encoder)], [7])[0], list)


def test_the_model_must_be_there(server: StandIn, encoder: chat.AnyChatEncoder) -> None:
    with pytest.raises(ConfigError, match=r"distill\.rollouts\.model = teacher: the server has student\."):
        client(server, encoder, model="teacher")


def test_the_names_of_one_model_need_no_choice(server: StandIn, encoder: chat.AnyChatEncoder) -> None:
    """vLLM 0.32 lists a model once for each name that it is served under."""
    server.models = [{"id": name, "root": "/m"} for name in ("student", "/m")]
    assert find_protocol(RolloutsConfig(url=server.url), encoder).model == "student"
    server.models.append({"id": "an-adapter", "root": "/a"})
    with pytest.raises(ConfigError, match="the server has student, /m, an-adapter"):
        find_protocol(RolloutsConfig(url=server.url), encoder)
