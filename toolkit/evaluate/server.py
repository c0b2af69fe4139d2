"""The choice of a server program, and transformers' server with one model and limits on requests.

python -m toolkit.evaluate.server NAME serve DIRECTORY [--option-of-the-server …]

transformers' server (5.23) takes a local path as the model's name, answers a malformed request with a traceback, limits
neither tokens nor request bodies, accepts templates and all options of `generate` in a request, and loads any model
directory that a request names at /load_model.
"""

import importlib.util
import inspect
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from toolkit.config.context_length import position_limit
from toolkit.messages import ConfigError, ModelError, tr
from toolkit.models.directory import read_object, saved_template

_PACKAGES = ("fastapi", "uvicorn", "openai", "pydantic")
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""LoRA ranks that vLLM supports."""
_MERGED_ONLY = ("modules_to_save", "trainable_token_indices", "use_dora", "lora_bias", "layer_replication")
"""Settings in adapter_config.json with which vLLM fails once it has loaded the model (0.32: lora/peft_helper.py and,
for the rows of added tokens, `parse_fine_tuned_lora_name` in lora/utils.py).
"""
_EXPERT_MATRICES = {"gate_up_proj", "down_proj"}
MAX_REQUEST_BYTES = 16 << 20
"""Largest body of a request; a context of a million tokens takes a fraction of it."""
_FIRST_ERROR, _FIRST_OF_SERVER = 400, 500
"""HTTP status codes: the first of errors, the first of server errors."""
_BLOCKED_PATHS = ("/load_model", "/reset", "/v1/audio/transcriptions")
"""Paths that load another model, or unload the served one."""
_RANGES: dict[str, tuple[type, float, float]] = {
    "temperature": (float, 0, 2),
    "top_p": (float, 0, 1),
    "frequency_penalty": (float, -2, 2),
    "max_tokens": (int, 1, math.inf),
    "max_completion_tokens": (int, 1, math.inf),
    "max_output_tokens": (int, 1, math.inf),
    "seed": (int, 0, 2**63 - 1),
}
"""Field -> its type, smallest and largest value; null counts as absent."""
_MIN_TEMPERATURE = 0.01
"""Below it, and above 0, logits divided by the temperature overflow."""
_MOST_STOPS, _LONGEST_STOP = 4, 256
"""Number and length of strings that end an answer, as each is compared with the whole vocabulary."""
_REQUEST_ERRORS = (AttributeError, IndexError, KeyError, OverflowError, RecursionError, TypeError, ValueError)
"""Raised by transformers for a field of an unexpected type or value."""

Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


def find_program(name: str) -> str | None:
    """Return the path of a program next to this Python or on PATH, None if there is none."""
    return shutil.which(name, path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))


def server_program(backend: str) -> tuple[str, list[str]]:
    """Return a server's name (`auto` chooses) and its command without options; ConfigError if not installed."""
    name = "vllm" if backend == "auto" else backend
    program = find_program(name)
    if program and backend != "transformers":  # whose own program serves without the limits of this module
        return name, [program]
    if backend in ("vllm", "sglang"):
        raise ConfigError(
            "backend = {name}: no program {name} is on PATH. It needs its own versions of torch and transformers:\n"
            "python -m venv DIR && DIR/bin/pip install {name} && export PATH=$PATH:DIR/bin",
            name=name,
        )
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            "transformers' server needs packages that are not installed:  pip install {packages}",
            packages=" ".join(missing),
        )
    return "transformers", [sys.executable, "-m", "toolkit.evaluate.server"]


def check_adapter(adapter: Path, backend: str) -> None:
    """Raise ConfigError if a server does not apply an adapter, or not all of it."""
    file = adapter / "adapter_config.json"
    config: dict[str, Any] = read_object(file) if file.is_file() else {}
    if config.get("peft_type") != "LORA":
        raise ConfigError(
            "{folder} is no LoRA adapter in peft's layout; servers take no other kind of adapter.", folder=adapter
        )
    if backend == "transformers":
        raise ConfigError(
            "transformers' server serves no adapter ({folder}); vLLM and SGLang do. Or merge it: toolkit export-model "
            "{folder} merge=true output=DIR",
            folder=adapter,
        )
    if unsupported := [key for key in _MERGED_ONLY if config.get(key)]:
        raise ConfigError(
            "{folder} has {keys}, which servers do not apply. Merge it: toolkit export-model {folder} merge=true "
            "output=DIR",
            folder=adapter,
            keys=", ".join(unsupported),
        )


def adapter_options(adapter: Path, base: Path, name: str, backend: str) -> list[str]:
    """Return vLLM's or SGLang's options to serve as `name` a LoRA adapter that passed `check_adapter`; ConfigError if
    it adds to one of the two matrices of experts alone.
    """
    config = read_object(adapter / "adapter_config.json")
    needed = max([config.get("r", 0), *config.get("rank_pattern", {}).values()])
    rank = next((allowed for allowed in _RANKS if allowed >= needed), needed)
    options = ["--enable-lora", "--max-lora-rank", str(rank)]
    template = adapter.resolve() / "chat_template.jinja"
    if template.is_file() and saved_template(adapter) != saved_template(base):
        options += ["--chat-template", str(template)]
    if backend == "sglang":
        return [*options, "--lora-paths", f"{name}={adapter.resolve()}"]
    if (adapter / "generation_config.json").is_file():
        options += ["--generation-config", str(adapter.resolve())]
    experts = {parameter.rpartition(".")[2] for parameter in config.get("target_parameters") or ()}
    if not experts:
        return [*options, "--lora-modules", f"{name}={adapter.resolve()}"]
    # Adapters of stacked experts must be declared, or vLLM misreads them (its pull request 42242, in 0.25); if one of
    # the two matrices is missing, vLLM applies neither.
    if missing := _EXPERT_MATRICES - experts:
        raise ConfigError(
            "{folder} adds to {found} of the experts, and not to {missing}. vLLM takes both or none: merge the adapter "
            "(toolkit export-model {folder} merge=true output=DIR), and serve that.",
            folder=adapter,
            found=" ".join(sorted(experts)),
            missing=" ".join(sorted(missing)),
        )
    declaration = {"name": name, "path": str(adapter.resolve()), "is_3d_lora_weight": True}
    return [*options, "--enable-mixed-moe-lora-format", "--lora-modules", json.dumps(declaration)]


class BoundedApp:
    """Wraps an ASGI application: only JSON objects of at most `MAX_REQUEST_BYTES`, no `_BLOCKED_PATHS` paths, and every
    error in the form of OpenAI's, which clients show: FastAPI's is `{"detail": …}`.
    """

    def __init__(self, app: Callable[[Any, Receive, Send], Awaitable[None]]) -> None:
        self.app = app

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        """Answer a request with an error, or pass it on once it is complete."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        if scope["path"].rstrip("/") in _BLOCKED_PATHS:
            return await _send_error(send, 404, tr("{path} is not available: one model is served.", path=scope["path"]))
        body = await _complete_body(receive)
        if body is None:
            return None
        if len(body) > MAX_REQUEST_BYTES:
            return await _send_error(
                send, 413, tr("the request is larger than {limit} MiB.", limit=MAX_REQUEST_BYTES >> 20)
            )
        # FastAPI would repeat another body in its answer, and fail if it is NaN; that of a GET is empty.
        if body.lstrip()[:1] not in (b"", b"{"):
            return await _send_error(send, 400, tr("the request must be a JSON object."))
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive_again() -> dict[str, Any]:
            """Give the application the request, then what else comes."""
            return messages.pop() if messages else await receive()

        return await self.app(scope, receive_again, _in_openai_form(send))


async def _complete_body(receive: Receive) -> bytes | None:
    """Return a request's body, cut somewhere beyond MAX_REQUEST_BYTES; None if the client has gone."""
    body, is_complete = bytearray(), False
    while not is_complete:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        if len(body) <= MAX_REQUEST_BYTES:  # more is read and dropped, as most clients listen after sending all
            body += message.get("body", b"")
        is_complete = not message.get("more_body", False)
    return bytes(body)


def _in_openai_form(send: Send) -> Send:
    """Return a `send` that collects the body of an error, and sends it in OpenAI's form; it passes the rest on."""
    status, error = 0, bytearray()

    async def send_translated(message: dict[str, Any]) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        if status < _FIRST_ERROR:
            return await send(message)
        error.extend(message.get("body", b""))
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            await _send_error(send, status, _error_message(bytes(error)))
        return None

    return send_translated


def _error_message(body: bytes) -> str:
    """Return the message in the body of an error response of FastAPI."""
    text = body.decode(errors="replace")
    with suppress(ValueError, RecursionError):
        answer = json.loads(text)
        detail = answer.get("detail", answer) if isinstance(answer, dict) else answer
        return detail if isinstance(detail, str) else json.dumps(detail, ensure_ascii=False)
    return text


async def _send_error(send: Send, status: int, sentence: str) -> None:
    """Send an error in the form of OpenAI's."""
    headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
    error_type = "invalid_request_error" if status < _FIRST_OF_SERVER else "server_error"
    error = {"message": sentence, "type": error_type, "param": None, "code": status}
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps({"error": error}).encode()})


def request_problem(body: dict[str, Any], reserved: frozenset[str]) -> str:
    """Return what is wrong with a request, else "". `reserved`: names not allowed in `chat_template_kwargs`."""
    for name, (number_type, least, greatest) in _RANGES.items():
        value = body.get(name)
        is_number = isinstance(value, (int, number_type)) and not isinstance(value, bool)  # JSON may write 1.0 as 1
        if value is not None and not (is_number and least <= value <= greatest):
            return tr(
                "{name} = {value} must be a number from {least} to {greatest}.",
                name=name,
                value=repr(value)[:80],
                least=least,
                greatest=greatest,
            )
    if body.get("generation_config") is not None:
        return tr("generation_config is not accepted. Set {names} instead.", names=", ".join(_RANGES))
    stops = body.get("stop") or []
    stops = [stops] if isinstance(stops, str) else stops
    are_stops = isinstance(stops, list) and len(stops) <= _MOST_STOPS
    if not are_stops or not all(isinstance(stop, str) and 0 < len(stop) <= _LONGEST_STOP for stop in stops):
        return tr(
            "stop must be a string, or at most {count} of them, of at most {length} characters each.",
            count=_MOST_STOPS,
            length=_LONGEST_STOP,
        )
    options = body.get("chat_template_kwargs") or {}
    forbidden = sorted(reserved.intersection(options)) if isinstance(options, dict) else [type(options).__name__]
    if forbidden:
        return tr(
            "chat_template_kwargs must be an object of the template's own names, without {name}.", name=forbidden[0]
        )
    return _messages_problem(body.get("messages"))


def _messages_problem(messages: Any) -> str:
    """Return which message is no object with a role, or has no content, so that templates would drop it; "" if none is.
    An assistant's message may have calls of tools instead.
    """
    for number, message in enumerate(messages if isinstance(messages, list) else []):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            return tr("messages[{number}] must be an object with role and content.", number=number)
        if message.get("content") is None and message["role"] != "assistant":
            return tr("messages[{number}] ({role}) has no content.", number=number, role=message["role"][:80])
    return ""


def limit_tokens(model: Any, inputs: Any, generation: Any) -> str:
    """Limit `generation.max_new_tokens` to the model's remaining positions; return an error message if there are none,
    else "". `inputs` has `input_ids`, `[1, S]` or a list.
    """
    positions = position_limit(model.config.to_dict())
    ids = inputs["input_ids"]
    length = len(ids) if isinstance(ids, list) else ids.shape[-1]
    if not positions:
        return ""
    if length >= positions:
        return tr(
            "the prompt has {length} tokens, and the model takes {positions} with its answer.",
            length=length,
            positions=positions,
        )
    generation.max_new_tokens = min(generation.max_new_tokens or positions, positions - length)
    return ""


def main(words: list[str]) -> None:
    """Serve a model over HTTP. `words`: its name, then the arguments of `transformers`: serve, directory, options."""
    from transformers.cli.transformers import app

    from toolkit.models.sandbox import bound_templates

    _install_limits()
    _sample_by_temperature()
    bound_templates()
    _sanitize_messages()
    _serve_one_model(name=words[0], folder=words[2])
    app(words[1:])


def _install_limits() -> None:
    """Patch transformers' server in this process with `BoundedApp`, `request_problem` and `limit_tokens`."""
    from fastapi import HTTPException
    from jinja2 import TemplateError
    from transformers import PreTrainedTokenizerBase
    from transformers.cli.serving import chat_completion, completion, response, server, systemone, utils

    reserved = frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters)
    build_server = server.build_server

    def reject_if(sentence: str) -> None:
        if sentence:
            raise HTTPException(status_code=400, detail=sentence)

    def guard_handler(handler: Any) -> None:
        """Let a class of handlers answer requests that are wrong with status 400, not with a traceback."""
        handle = handler.handle_request

        async def handle_request(self: Any, body: dict[str, Any], request_id: str) -> Any:
            reject_if(request_problem(body, reserved))
            if body.get("temperature"):
                body["temperature"] = max(body["temperature"], _MIN_TEMPERATURE)
            try:
                return await handle(self, body, request_id)
            except (*_REQUEST_ERRORS, TemplateError) as error:
                reason = f"{type(error).__name__}: {error}".encode(errors="backslashreplace").decode()[:500]
                sentence = tr("the request cannot be answered: {reason}", reason=reason)
                raise HTTPException(status_code=400, detail=sentence) from error

        handler.handle_request = handle_request

    def limit_method(manager: Any, name: str) -> None:
        """Let the method `name` of a class generate no more tokens than the model has positions."""
        generate = getattr(manager, name)

        def bounded(self: Any, model: Any, processor: Any, inputs: Any, gen_config: Any, **options: Any) -> Any:
            reject_if(limit_tokens(model, inputs, gen_config))
            return generate(self, model, processor, inputs, gen_config, **options)  # a coroutine, if not streaming

        setattr(manager, name, bounded)

    for handler in (
        chat_completion.ChatCompletionHandler,
        completion.CompletionHandler,
        response.ResponseHandler,
        systemone.SystemOneHandler,
    ):
        guard_handler(handler)
    for manager in (utils.GenerateManager, utils.CBGenerateManager):
        limit_method(manager, "generate_streaming")
        limit_method(manager, "generate_non_streaming")
    server.build_server = lambda *arguments, **named: BoundedApp(build_server(*arguments, **named))


def _sample_by_temperature() -> None:
    """Make transformers' server (5.23) sample if a request's temperature is above 0, whatever the export says."""
    from transformers.cli.serving.utils import BaseHandler

    build = BaseHandler._build_generation_config

    def sampled(self: BaseHandler, body: dict[str, Any], *arguments: Any, **named: Any) -> Any:
        generation = build(self, body, *arguments, **named)
        if body.get("temperature"):
            generation.do_sample = True
        return generation

    BaseHandler._build_generation_config = sampled


def _sanitize_messages() -> None:
    """Make control strings in messages stay text, as in training. transformers (5.23) has an option for that, but
    unless the control tokens are listed it treats `<think>` and `<tool_call>` in earlier answers as text too.
    """
    from transformers import PreTrainedTokenizerBase

    from toolkit.models.chat_template import TemplateChatEncoder

    apply = PreTrainedTokenizerBase.apply_chat_template

    def with_text(self: Any, conversation: Any, **options: Any) -> Any:
        # In other calls transformers rejects the option.
        if options.get("tokenize", True) and not options.get("return_assistant_tokens_mask"):
            if self.chat_control_tokens is None:
                self.chat_control_tokens = []
                with suppress(ModelError):  # it has no usable template
                    self.chat_control_tokens = sorted(TemplateChatEncoder(self).traits.turn_marks)
            options["sanitize_control_tokens"] = True
        return apply(self, conversation, **options)

    PreTrainedTokenizerBase.apply_chat_template = with_text


def _serve_one_model(name: str, folder: str) -> None:
    """Make the server list one model, and accept its name or path in requests."""
    from transformers.cli.serving.model_manager import ModelManager
    from transformers.cli.serving.utils import BaseHandler

    listed = {"id": name, "object": "model", "created": int(time.time()), "owned_by": "toolkit"}
    by_path = BaseHandler._resolve_model  # transformers 5.23, cli/serving/utils.py

    def by_name(self: BaseHandler, body: dict[str, Any]) -> Any:
        if body.get("model") == name:
            body["model"] = folder
        return by_path(self, body)

    for listing in ("get_gen_models", "list_models"):  # its names before transformers 5.24, and since
        setattr(ModelManager, listing, staticmethod(lambda cache_dir=None: [listed]))
    BaseHandler._resolve_model = by_name


if __name__ == "__main__":
    main(sys.argv[1:])
