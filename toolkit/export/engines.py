"""Prompts by serving engines that are installed, each started on the export and asked over HTTP.

vLLM and llama.cpp tell the ids of a chat's prompt (`/tokenize` with messages; `/apply-template`, then `/tokenize`),
SGLang only how many there are (`usage.prompt_tokens`).
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

from toolkit import children
from toolkit.launch.environment import free_port, without_ranks
from toolkit.messages import tr
from toolkit.models.chat_template import MODES, with_text_arguments

_READY_S = 900
_ANSWER_S = 60
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy has no business on this machine

Prompts = list[list[list[int] | int]]
"""Of each case, in each mode: ids, or how many there are."""


class Chat(Protocol):
    """Messages and tools as a client sends them."""

    @property
    def messages(self) -> Sequence[Any]:
        """Return the messages before an answer."""

    @property
    def tools(self) -> list[Any] | None:
        """Return the tools that may be called."""


class NotRun(Exception):
    """Why an engine was not asked."""


def _program(name: str) -> str | None:
    own = str(Path(sys.executable).parent)
    return shutil.which(name, path=os.pathsep.join([own, os.environ.get("PATH", "")]))


@contextmanager
def _server(command: Sequence[str], port: int, scratch: Path) -> Iterator[str]:
    """Start a server and yield its address once it is ready; NotRun if it ends before."""
    log = scratch / "server.log"
    alone = {"HF_HUB_OFFLINE": "1"}
    with log.open("wb") as output:
        process = children.start_tree(
            command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=without_ranks() | alone
        )
    url, until = f"http://127.0.0.1:{port}", time.monotonic() + _READY_S
    try:
        while True:
            if process.poll() is not None or time.monotonic() > until:
                lines = [line for line in log.read_text("utf-8", "replace").splitlines() if line.strip()] or ["?"]
                raise NotRun(tr("it is installed, but does not start here: {reason}", reason=lines[-1][:300]))
            with suppress(OSError):
                if _OPENER.open(f"{url}/health", timeout=_ANSWER_S).status == 200:
                    break
            time.sleep(0.5)
        yield url
    finally:
        process.terminate()
        process.wait()


def _post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    content = json.dumps({name: value for name, value in body.items() if value is not None}).encode()
    request = urllib.request.Request(url, content, {"Content-Type": "application/json"})  # noqa: S310  ours
    with _OPENER.open(request, timeout=_ANSWER_S) as answer:
        return dict(json.loads(answer.read()))


def _each(cases: Sequence[Chat], ask: Callable[[dict[str, Any]], list[int] | int]) -> Prompts:
    """Ask about each case in each mode, as OpenAI's clients do; what is rejected gives no prompt."""
    found: Prompts = []
    for case in cases:
        found.append([])
        for mode in MODES:
            body = {"model": "model", "messages": with_text_arguments(case.messages), "tools": case.tools}
            with suppress(OSError, ValueError, KeyError):  # urllib's errors are an OSError
                found[-1].append(ask({**body, "chat_template_kwargs": mode or None}))
    return found


def _vllm(folder: Path, cases: Sequence[Chat]) -> Prompts:
    if not (program := _program("vllm")):
        raise NotRun(tr("it is not installed"))
    port = free_port()
    command = [program, "serve", str(folder), "--served-model-name", "model", "--host", "127.0.0.1"]
    with TemporaryDirectory() as scratch, _server([*command, "--port", str(port)], port, Path(scratch)) as url:
        return _each(cases, lambda body: list(_post(f"{url}/tokenize", body)["tokens"]))


def _sglang(folder: Path, cases: Sequence[Chat]) -> Prompts:
    if importlib.util.find_spec("sglang") is None:
        raise NotRun(tr("it is not installed"))
    port = free_port()
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(folder), "--host", "127.0.0.1"]
    chat = "v1/chat/completions"
    with TemporaryDirectory() as scratch, _server([*command, "--port", str(port)], port, Path(scratch)) as url:
        return _each(
            cases, lambda body: int(_post(f"{url}/{chat}", {**body, "max_tokens": 1})["usage"]["prompt_tokens"])
        )


def _llama_cpp(folder: Path, cases: Sequence[Chat]) -> Prompts:
    """Convert to GGUF, which keeps the vocabulary and the template, and ask llama.cpp's server."""
    program, convert = _program("llama-server"), _program("convert_hf_to_gguf.py")
    if not program:
        raise NotRun(tr("it is not installed"))
    if not convert:
        raise NotRun(tr("its convert_hf_to_gguf.py is not on PATH"))
    port = free_port()
    with TemporaryDirectory() as scratch:
        file = Path(scratch) / "model.gguf"
        made = children.run(
            [sys.executable, convert, str(folder), "--outfile", str(file)], capture_output=True, text=True
        )
        if made.returncode:
            lines = [line for line in made.stderr.splitlines() if line.strip()] or ["?"]
            raise NotRun(tr("it cannot be converted to GGUF: {reason}", reason=lines[-1][:300]))

        def ask(body: dict[str, Any]) -> list[int]:
            prompt = _post(f"{url}/apply-template", body)["prompt"]
            asked = {"content": prompt, "add_special": True, "parse_special": True}  # as its chat does
            return [int(token) for token in _post(f"{url}/tokenize", asked)["tokens"]]

        command = [program, "-m", str(file), "--jinja", "--host", "127.0.0.1", "--port", str(port)]
        with _server(command, port, Path(scratch)) as url:
            return _each(cases, ask)


ENGINES: dict[str, Callable[[Path, Sequence[Chat]], Prompts]] = {
    "vLLM": _vllm,
    "SGLang": _sglang,
    "llama.cpp": _llama_cpp,
}
