"""A client of an OpenAI-compatible server's completions, such as vLLM's and `toolkit serve`'s.

No answer is trusted: one that is late, broken, too long or of another model costs a try, and never more than that.
"""

import json
import os
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from http.client import HTTPException
from types import MappingProxyType
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit

from toolkit.config.schema import RolloutsConfig
from toolkit.evaluate.generate import decode_answer
from toolkit.messages import ConfigError, tr
from toolkit.models import chat

TOKEN_VARIABLE = "ROLLOUTS_API_KEY"  # noqa: S105  its name
_AT_ONCE = 64
_FIRST_PAUSE_S = 1.0
_LEAST_BYTES, _TOKEN_BYTES = 1 << 16, 1 << 10
"""Largest response: a constant, and so much for each token that was asked for."""
_WRONG = (OSError, HTTPException, ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError)
"""What a server that is away, or an answer that is nonsense, raises; urllib's errors are an OSError."""


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Follows no redirect, as the token is for this server alone."""

    def redirect_request(self, *_: Any) -> None:
        """Return no request: the redirect is an error."""


_OPENER = urllib.request.build_opener(_NoRedirects)
_LOCAL_OPENER = urllib.request.build_opener(_NoRedirects, urllib.request.ProxyHandler({}))
"""For servers on this machine, with which a proxy has no business."""
_HERE = ("127.0.0.1", "localhost", "::1")
_NO_FIELDS: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Protocol:
    """What a server was found to understand."""

    model: str
    """The name by which the model is asked for."""
    answers_as: str
    """The name that the server gives the model in its answers."""
    takes_ids: bool
    """Whether a prompt can be token ids; else it is text."""


@dataclass(frozen=True, slots=True)
class Completion:
    """An answer of a server."""

    ids: list[int]
    """Token ids, the end token included."""
    text: str
    """The answer without special tokens and surrounding white space."""
    is_cut: bool
    """Whether it ended at `max_new_tokens`."""


class CompletionClient:
    """Asks a server for answers to prompts of token ids.

    Args:
        config: the server, and how it samples.
        encoder: the model's tokenizer and the tokens that end an answer.
        protocol: of `find_protocol`.
        fields: further fields of each request.
        keeps_empty: whether an empty answer is one; else it costs a try.
    """

    def __init__(
        self,
        config: RolloutsConfig,
        encoder: chat.AnyChatEncoder,
        protocol: Protocol,
        fields: Mapping[str, Any] = _NO_FIELDS,
        keeps_empty: bool = False,
    ) -> None:
        self.config, self.encoder, self.protocol = config, encoder, protocol
        self.fields, self.keeps_empty = fields, keeps_empty

    def answer_all(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int]) -> list[list[int] | str]:
        """Return the ids of each answer, its end token included, or why there is none; within `timeout_s`."""
        until = time.monotonic() + self.config.timeout_s
        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="completions") as threads:
            answers = list(threads.map(lambda prompt, seed: self.answer(prompt, seed, until), prompts, seeds))
        return [answer if isinstance(answer, str) else answer.ids for answer in answers]

    def answer(
        self, prompt: Sequence[int], seed: int, until: float, gives_up: Callable[[], object] = lambda: False
    ) -> Completion | str:
        """Return an answer, or why none of several tries gave one.

        Args:
            prompt: token ids.
            seed: the same gives the same answer, if the server allows for it.
            until: when to stop, of time.monotonic(); each try gets an equal share of the time that is left.
            gives_up: asked after each failure; what is true ends the tries.
        """
        reason, tries = tr("timed out"), self.config.tries
        for number in range(tries):
            left = until - time.monotonic()
            if left <= 0:
                break
            try:
                return self.ask(prompt, seed, left / (tries - number))  # equal shares of the time that is left
            except _WRONG as error:
                reason = _reason(error)
            if gives_up():
                break
            if number < tries - 1:  # pauses of 1, 2, 4, … seconds between tries
                time.sleep(max(0.0, min(_FIRST_PAUSE_S * 2**number, until - time.monotonic())))
        return reason

    def why_down(self) -> str:
        """Return why the server answers not even a simple question; "" if it does."""
        try:
            _ask_briefly(self.config, self.encoder, self.protocol, self.fields)
        except _WRONG as error:
            return _reason(error)
        return ""

    def ask(self, prompt: Sequence[int], seed: int, limit_s: float) -> Completion:
        """Return an answer; one of `_WRONG` is raised if none that can be used comes within `limit_s`."""
        config, protocol = self.config, self.protocol
        body = {
            "model": protocol.model,
            "prompt": list(prompt) if protocol.takes_ids else as_text(prompt, self.encoder),
            "seed": seed,
            "max_tokens": config.max_new_tokens,
            "temperature": config.temperature,
            "top_p": config.top_p,
            **self.fields,
        }
        if protocol.takes_ids:  # vLLM's; others ignore them. A base model's own end token need not be the chat's.
            body |= {"return_token_ids": True, "stop_token_ids": self.encoder.stop_ids}
        answer = _request(config, "completions", limit_s, body)
        if protocol.answers_as and answer["model"] != protocol.answers_as:
            raise ValueError(tr("it is of the model {name}", name=str(answer["model"])[:80]))
        [choice] = answer["choices"]
        return self._completion(choice)

    def _completion(self, choice: dict[str, Any]) -> Completion:
        """Return a choice (of a response's `choices`) up to its end token: with the server's `token_ids`, else those of
        its text. ValueError if the answer cannot be used.
        """
        tokenizer, max_tokens = self.encoder.tokenizer, self.config.max_new_tokens
        text, ids_of_server = choice["text"], choice.get("token_ids")
        if not text.encode().strip() and not self.keeps_empty:  # `encode` raises ValueError for a lone surrogate
            raise ValueError(tr("it is empty"))
        ids = ids_of_server
        if ids is None:
            ids = [int(token) for token in tokenizer(text, add_special_tokens=False)["input_ids"]]
        elif not all(type(token) is int and 0 <= token < len(tokenizer) for token in ids) or len(ids) > max_tokens:
            raise ValueError(tr("its token ids are not the student's"))
        # A text may become more tokens than it came from: a byte that is no UTF-8 becomes U+FFFD, which is three.
        if len(ids) > 3 * max_tokens:
            raise ValueError(tr("it has {count} tokens", count=len(ids)))
        end = next((index for index, token in enumerate(ids) if token in self.encoder.stop_ids), len(ids))
        end_token = ids[end : end + 1]  # [] without one
        if choice["finish_reason"] == "stop" and not end_token:  # a server leaves the end token out of the text
            end_token = [self.encoder.stop_ids[0]]
        is_text_alone = ids_of_server is None and end == len(ids)  # no ids to decode, and no end token to leave out
        answer = text.strip() if is_text_alone else decode_answer(self.encoder, ids[:end])
        return Completion((ids[:end] + end_token)[:max_tokens], answer, is_cut=not end_token)


def as_text(prompt: Sequence[int], encoder: chat.AnyChatEncoder) -> str:
    """Return the text that the tokenizer turns into `prompt`, without the tokens (two at most) that it puts in front by
    itself, such as BOS, or GLM's [gMASK]<sop>; ValueError if there is none.
    """
    for num_added in (0, 1, 2):
        text = str(encoder.tokenizer.decode(list(prompt[num_added:]), skip_special_tokens=False))
        if list(encoder.tokenizer(text)["input_ids"]) == list(prompt):
            return text
    raise ValueError(tr("the server takes text, and the prompt's tokens are not those of its text"))


def find_protocol(config: RolloutsConfig, encoder: chat.AnyChatEncoder) -> Protocol:
    """Return what the server understands, after asking it a question; ConfigError if it gives no answer."""
    protocol = try_protocols(config, encoder, "distill.rollouts.model")
    if isinstance(protocol, str):
        raise ConfigError(
            "distill.rollouts.url = {url} gives no completions: {reason}. Give the base URL of an OpenAI-compatible "
            "server that runs, such as http://host:8000/v1.",
            url=config.url,
            reason=protocol,
        )
    return protocol


def try_protocols(
    config: RolloutsConfig, encoder: chat.AnyChatEncoder, key: str, fields: Mapping[str, Any] = _NO_FIELDS
) -> Protocol | str:
    """Return what the server understands, after asking it a question, or why it gives no answer. ConfigError if it has
    no model of that name, or several and none is named. `key`: what the user calls that name; `fields`: as of
    `CompletionClient`.
    """
    # Token ids first: they are the prompt as it is, while a text has to be tokenized to the same ones.
    reason = ""
    for takes_ids in (True, False):
        try:
            models = _request(config, "models", config.timeout_s)["data"]
            listed = [str(model["id"]) for model in models]
            # vLLM lists each name of a model with the path of the model as its root.
            distinct = {str(model.get("root") or model["id"]) for model in models}
            has_model = config.model in listed or (not config.model and len(distinct) == 1)  # "": the only one
            if not has_model:
                raise ConfigError(
                    "{key} = {name}: the server has {listed}. Name one of them.",
                    key=key,
                    name=config.model or '""',
                    listed=", ".join(listed[:20]) or "-",
                )
            protocol = Protocol(config.model or listed[0], "", takes_ids)
            return replace(protocol, answers_as=_ask_briefly(config, encoder, protocol, fields))
        except _WRONG as error:
            reason = _reason(error)
    return reason


def _ask_briefly(
    config: RolloutsConfig, encoder: chat.AnyChatEncoder, protocol: Protocol, fields: Mapping[str, Any]
) -> str:
    """Return the name that the server gives the model in an answer of one token; one of `_WRONG` if there is none."""
    prompt = encoder.prompt([{"role": "user", "content": "?"}])
    body = {
        "model": protocol.model,
        "prompt": prompt if protocol.takes_ids else as_text(prompt, encoder),
        "max_tokens": 1,
        "temperature": config.temperature,
        "top_p": config.top_p,
        **fields,
    }
    answer = _request(config, "completions", config.timeout_s, body)
    return str(answer["model"])


def _request(config: RolloutsConfig, path: str, limit_s: float, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the JSON object that the server answers; one of `_WRONG` if it is late, too long or no such object."""
    until, most = time.monotonic() + limit_s, _LEAST_BYTES + _TOKEN_BYTES * config.max_new_tokens
    content = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{config.url.rstrip('/')}/{path}", content, {"Content-Type": "application/json"})  # noqa: S310  a rule admits http and https alone
    if token := os.environ.get(TOKEN_VARIABLE):
        request.add_header("Authorization", f"Bearer {token}")
    received, is_here = bytearray(), urlsplit(config.url).hostname in _HERE
    with (_LOCAL_OPENER if is_here else _OPENER).open(request, timeout=limit_s) as response:
        while part := response.read1(1 << 16):
            received += part
            if len(received) > most:
                raise ValueError(tr("it is longer than {count} bytes", count=most))
            if time.monotonic() > until:  # the timeout is that of a single read
                raise TimeoutError(tr("timed out"))
    return dict(json.loads(received.decode()))


def _reason(error: Exception) -> str:
    """Return why a request failed, in a line."""
    detail = ""
    if isinstance(error, HTTPError):
        with suppress(*_WRONG):  # the body may be anything
            detail = f" {json.loads(error.read(_LEAST_BYTES))['error']['message']}"
    return f"{type(error).__name__}: {error}{detail}".splitlines()[0][:300]
