"""What a request to transformers' server may ask for: `transformers_server.py` puts this in front of the server.

transformers 5.23 answers a request of another form with status 500 and a traceback, generates as many tokens as a
request says while all others wait, reads bodies of any size, takes a chat template and all options of `generate` from a
request, and loads or unloads whatever model directory a request names at /load_model and /reset.
"""

import inspect
import json
import math
from collections.abc import Awaitable, Callable
from typing import Any

from toolkit.messages import tr

MOST_BYTES = 16 << 20
"""Of a request: several times what a context of a million tokens takes."""
CLOSED = ("/load_model", "/reset", "/v1/audio/transcriptions")
"""Paths that load another model than the one that is served, or unload that one."""
RANGES: dict[str, tuple[type, float, float]] = {
    "temperature": (float, 0, 2),
    "top_p": (float, 0, 1),
    "frequency_penalty": (float, -2, 2),
    "max_tokens": (int, 1, math.inf),
    "max_completion_tokens": (int, 1, math.inf),
    "max_output_tokens": (int, 1, math.inf),
    "seed": (int, 0, 2**63 - 1),
}
"""Field -> its type, and the least and greatest value; null counts as absent."""
LEAST_TEMPERATURE = 0.01
"""Below it, and above 0, logits divided by the temperature overflow."""
_MOST_STOPS, _LONGEST_STOP = 4, 256
"""Strings that end an answer: each is compared with the whole vocabulary."""
_OF_THE_REQUEST = (AttributeError, IndexError, KeyError, OverflowError, RecursionError, TypeError, ValueError)
"""What transformers raises where a field has another type or value than it reads."""

Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


class Bounded:
    """An ASGI application that takes JSON objects of at most `MOST_BYTES`, and nothing for `CLOSED` paths.

    Args:
        app: the application behind it.
    """

    def __init__(self, app: Callable[[Any, Receive, Send], Awaitable[None]]) -> None:
        self.app = app

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        """Answer a request, or hand it on once all of it is here."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        if scope["path"].rstrip("/") in CLOSED:
            return await _answer(send, 404, tr("{path} is not available: one model is served.", path=scope["path"]))
        body, is_whole = bytearray(), False
        while not is_whole:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            if len(body) <= MOST_BYTES:  # the rest is read and dropped: most clients listen once all is sent
                body += message.get("body", b"")
            is_whole = not message.get("more_body", False)
        if len(body) > MOST_BYTES:
            return await _answer(send, 413, tr("the request is larger than {limit} MiB.", limit=MOST_BYTES >> 20))
        if body.lstrip()[:1] not in (b"", b"{"):  # FastAPI repeats it in its answer, and fails if it is NaN
            return await _answer(send, 400, tr("the request must be a JSON object."))
        whole = [{"type": "http.request", "body": bytes(body), "more_body": False}]

        async def read() -> dict[str, Any]:
            return whole.pop() if whole else await receive()

        return await self.app(scope, read, send)


async def _answer(send: Send, status: int, sentence: str) -> None:
    headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps({"detail": sentence}).encode()})


def problem(body: dict[str, Any], reserved: frozenset[str]) -> str:
    """Return what is wrong with the fields of a request; "" if nothing is.

    Args:
        body: the request.
        reserved: names that `chat_template_kwargs` must not hold, as they are options of the tokenizer.
    """
    for name, (kind, least, greatest) in RANGES.items():
        value = body.get(name)
        is_kind = isinstance(value, (int, kind)) and not isinstance(value, bool)
        if value is not None and not (is_kind and least <= value <= greatest):
            return tr(
                "{name} = {value} must be a number from {least} to {greatest}.",
                name=name,
                value=repr(value)[:80],
                least=least,
                greatest=greatest,
            )
    if body.get("generation_config") is not None:
        return tr("generation_config is not accepted. Set {names} instead.", names=", ".join(RANGES))
    stops = body.get("stop") or []
    stops = [stops] if isinstance(stops, str) else stops
    if not isinstance(stops, list) or len(stops) > _MOST_STOPS or not all(_is_stop(stop) for stop in stops):
        return tr(
            "stop must be a string, or at most {count} of them, of at most {length} characters each.",
            count=_MOST_STOPS,
            length=_LONGEST_STOP,
        )
    options = body.get("chat_template_kwargs") or {}
    if not isinstance(options, dict) or (taken := sorted(reserved.intersection(options))):
        name = taken[0] if isinstance(options, dict) else type(options).__name__
        return tr("chat_template_kwargs must be an object of the template's own names, without {name}.", name=name)
    return ""


def _is_stop(stop: object) -> bool:
    return isinstance(stop, str) and 0 < len(stop) <= _LONGEST_STOP


def bound_tokens(model: Any, inputs: Any, generation: Any) -> str:
    """Let an answer end where the model's positions end; return what is wrong if the prompt fills them, else "".

    Args:
        model: what generates.
        inputs: with `input_ids`, (1, length) or a list.
        generation: transformers' GenerationConfig, changed in place.
    """
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
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
    room = positions - length
    generation.max_new_tokens = min(generation.max_new_tokens or room, room)
    return ""


def install() -> None:
    """Put these bounds in front of transformers' server, in this process."""
    from fastapi import HTTPException
    from jinja2 import TemplateError
    from transformers import PreTrainedTokenizerBase
    from transformers.cli.serving import chat_completion, completion, response, server, systemone, utils

    reserved = frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters)
    build = server.build_server

    def refuse_if(sentence: str) -> None:
        if sentence:
            raise HTTPException(status_code=400, detail=sentence)

    def guard(handler: Any) -> None:
        handle = handler.handle_request

        async def handle_request(self: Any, body: dict[str, Any], request_id: str) -> Any:
            refuse_if(problem(body, reserved))
            if body.get("temperature"):
                body["temperature"] = max(body["temperature"], LEAST_TEMPERATURE)
            try:
                return await handle(self, body, request_id)
            except (*_OF_THE_REQUEST, TemplateError) as error:
                reason = f"{type(error).__name__}: {error}".encode(errors="backslashreplace").decode()[:500]
                sentence = tr("the request cannot be answered: {reason}", reason=reason)
                raise HTTPException(status_code=400, detail=sentence) from error

        handler.handle_request = handle_request

    def limit(manager: Any) -> None:
        streaming, whole = manager.generate_streaming, manager.generate_non_streaming

        def generate_streaming(
            self: Any, model: Any, processor: Any, inputs: Any, gen_config: Any, **options: Any
        ) -> Any:
            refuse_if(bound_tokens(model, inputs, gen_config))
            return streaming(self, model, processor, inputs, gen_config, **options)

        async def generate_non_streaming(
            self: Any, model: Any, processor: Any, inputs: Any, gen_config: Any, **options: Any
        ) -> Any:
            refuse_if(bound_tokens(model, inputs, gen_config))
            return await whole(self, model, processor, inputs, gen_config, **options)

        manager.generate_streaming, manager.generate_non_streaming = generate_streaming, generate_non_streaming

    for handler in (
        chat_completion.ChatCompletionHandler,
        completion.CompletionHandler,
        response.ResponseHandler,
        systemone.SystemOneHandler,
    ):
        guard(handler)
    for manager in (utils.GenerateManager, utils.CBGenerateManager):
        limit(manager)
    server.build_server = lambda *given, **named: Bounded(build(*given, **named))
