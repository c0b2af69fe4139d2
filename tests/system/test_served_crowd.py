"""`toolkit serve` under a crowd: 50 clients, 200 requests, some malformed, some too long, some left in the middle."""

import http.client
import json
import random
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from ranks import REPOSITORY, environment

from tests.unit.speaker import write_random
from toolkit.launch.environment import free_port

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]
CLIENTS, REQUESTS, PROMPTS = 50, 200, 10
MALFORMED = [
    b"[1, 2]",
    b"{",
    b'{"model": "model", "messages": [{"role": "user"}]}',
    b'{"model": "model", "messages": [{"role": "user", "content": "a"}], "max_tokens": -3}',
    b'{"model": "other", "messages": [{"role": "user", "content": "a"}]}',
]


def body(text: str, **options: Any) -> bytes:
    """Return a request."""
    return json.dumps({"model": "model", "messages": [{"role": "user", "content": text}], **options}).encode()


def ask(port: int, content: bytes) -> tuple[int, dict[str, Any]]:
    """Return the status and the answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=240)
    try:
        connection.request("POST", "/v1/chat/completions", content, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def said(answer: dict[str, Any]) -> str:
    """Return the text of an answer."""
    return str(answer["choices"][0]["message"]["content"])


def streamed(port: int, content: bytes) -> str:
    """Return the text of an answer that comes in pieces."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=240)
    try:
        connection.request("POST", "/v1/chat/completions", content, {"Content-Type": "application/json"})
        text = ""
        for line in connection.getresponse():
            if line.startswith(b"data: {"):
                text += json.loads(line[6:])["choices"][0]["delta"].get("content") or ""
        return text
    finally:
        connection.close()


def leave(port: int, content: bytes, draw: random.Random) -> None:
    """Ask for a stream, read some of it or nothing, and go."""
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), 60) as connection:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {len(content)}\r\n"
        connection.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + content[: draw.choice((9, 999))])
        connection.settimeout(draw.random())
        connection.recv(draw.choice((1, 500)))


@pytest.fixture
def server(tmp_path: Path) -> Any:
    """The server's process, its port and its log."""
    write_random(tmp_path / "model", positions=128)
    port, log = free_port(), tmp_path / "log"
    command = [sys.executable, "-m", "toolkit", "serve", str(tmp_path / "model"), f"port={port}"]
    with log.open("w") as out:
        process = subprocess.Popen(
            [*command, "backend=transformers"], cwd=REPOSITORY, env=environment(), stdout=out, stderr=out
        )
    try:
        until = time.monotonic() + 120
        while True:
            assert process.poll() is None and time.monotonic() < until, log.read_text()[-3000:]
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            time.sleep(0.2)
        yield process, port, log
    finally:
        process.kill()
        process.wait(30)


@pytest.mark.fault("V1")
def test_a_crowd(server: Any, record_property: Any) -> None:
    process, port, log = server
    bodies = [body(f"{number} and so on", max_tokens=24) for number in range(PROMPTS)]
    alone = [ask(port, content) for content in bodies]
    assert [status for status, _ in alone] == [200] * PROMPTS, log.read_text()[-3000:]
    expected = [said(answer) for _, answer in alone]
    # A stream leaves out the bytes of a character that the answer's end cuts off.
    in_pieces = [streamed(port, body(f"{number} and so on", max_tokens=24, stream=True)) for number in range(PROMPTS)]
    assert len(set(expected)) > 1
    used = psutil.Process(process.pid).memory_info().rss
    kinds = ["plain"] * 120 + ["streamed"] * 30 + ["left"] * 25 + ["malformed"] * 15 + ["long"] * 10
    random.Random(1).shuffle(kinds)
    assert len(kinds) == REQUESTS

    def one(number: int) -> tuple[str, int, Any]:
        draw, prompt = random.Random(number), number % PROMPTS
        if kinds[number] == "plain":
            status, answer = ask(port, bodies[prompt])
            return "plain", status, (status == 200 and said(answer) == expected[prompt]) or answer
        if kinds[number] == "streamed":
            text = streamed(port, body(f"{prompt} and so on", max_tokens=24, stream=True))
            return "streamed", 200, text == in_pieces[prompt] or text
        if kinds[number] == "malformed":
            status, answer = ask(port, draw.choice(MALFORMED))
        elif kinds[number] == "long":
            status, answer = ask(port, body("and so on " * 500))
        else:
            leave(port, body("and so on", max_tokens=100, stream=True), draw)
            return "left", 0, True
        return kinds[number], status, bool(answer.get("error", {}).get("message")) or answer

    began = time.monotonic()
    with ThreadPoolExecutor(CLIENTS) as pool:
        found = list(pool.map(one, range(REQUESTS)))
    seconds = time.monotonic() - began
    for kind, status, fits in found:
        wanted = {"left": (0,), "malformed": (400, 404, 422), "long": (400, 413)}.get(kind, (200,))
        assert status in wanted and fits is True, (kind, status, fits)
    grown = psutil.Process(process.pid).memory_info().rss - used
    with ThreadPoolExecutor(CLIENTS) as pool:
        list(pool.map(one, range(REQUESTS)))
    again = psutil.Process(process.pid).memory_info().rss - used - grown
    record_property("requests per second", round(REQUESTS / seconds, 1))
    record_property("MiB grown", f"{grown >> 20}, then {again >> 20}")
    assert again < 64 << 20, "memory grows with each request"
    assert ask(port, bodies[0])[0] == 200
    assert "Traceback" not in log.read_text(), log.read_text()[-3000:]
    with ThreadPoolExecutor(4) as pool:  # it ends while it answers
        waiting = [pool.submit(streamed, port, body("and so on", max_tokens=100, stream=True)) for _ in range(4)]
        time.sleep(0.3)
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        process.wait(30)
        record_property("seconds to end", round(time.monotonic() - began, 1))
        assert time.monotonic() - began < 10
        for one_waiting in waiting:
            with suppress(OSError, http.client.HTTPException):
                one_waiting.result(30)
