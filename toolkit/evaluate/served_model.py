"""Answers by a server: one that somebody runs at a URL, or one that is started here with the model, and started again
when it dies.

Requests for all questions of a window run in parallel. One that fails is tried again; once one has failed, the server
is asked something simple, and if that fails too the server counts as down: what is not answered yet waits until it is
back. A server that is up, and gives no usable answer to a question, costs that question alone.
"""

import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from multiprocessing.pool import ThreadPool
from pathlib import Path
from threading import Lock
from typing import Any

from toolkit.config.schema import RolloutsConfig
from toolkit.evaluate import completions
from toolkit.evaluate.generate import Sampling, until_stop
from toolkit.evaluate.server_process import NotStarted, running_server
from toolkit.launch.environment import free_port
from toolkit.messages import LaunchError, say, warn
from toolkit.models import chat

TRIES = 3
"""Requests for an answer, and times in a row that the server may be down without having given one."""
_POLL_S = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerChoice:
    """Which server answers."""

    url: str = ""
    """Base URL of a server that runs, such as http://host:8000/v1; "": one is started."""
    command: Callable[[int], Sequence[str]] = lambda port: ()
    """Returns the command that starts the server on a port of this machine."""
    log: Path = Path()
    """The file for what that server prints."""
    name: str = ""
    """Name of the model on the server; "": the only one that it lists."""
    timeout_s: float = 600.0
    """Seconds for an answer, before it is asked for again."""


class ServedModel:
    """A model whose answers a server gives.

    Args:
        choice: the server.
        encoder: the model's tokenizer and chat format.
        max_tokens: of prompt and answer together.
        sampling: how it samples, the seed apart.
        running: a server that is started here ends when this is closed, or with this process.

    Raises:
        ConfigError: the server gives no answers.
        LaunchError: it does not start.
    """

    def __init__(
        self,
        choice: ServerChoice,
        encoder: chat.AnyChatEncoder,
        max_tokens: float,
        sampling: Sampling,
        running: ExitStack,
    ) -> None:
        self.choice, self.encoder, self.max_tokens, self.sampling = choice, encoder, max_tokens, sampling
        self._running = running.enter_context(ExitStack())
        self._down = ""  # why the server counts as down
        self._lock = Lock()
        self._client = self._connect()

    def answer(
        self, prompts: Mapping[int, Sequence[int]], sampling: Sampling, at_once: int
    ) -> dict[int, dict[str, Any]]:
        """Return by key of a prompt what `answer_rows` adds to its row.

        Args:
            prompts: key -> token ids.
            sampling: has the seed, to which each prompt adds its key.
            at_once: requests that run in parallel.

        Raises:
            LaunchError: the server was down several times in a row, or does not start again.
        """
        answers: dict[int, completions.Completion | str] = {}
        failures = 0
        while missing := [key for key in prompts if key not in answers]:
            ask = partial(self._ask, prompts, sampling.seed)
            with ThreadPool(min(at_once, len(missing))) as threads:  # a Ctrl-C ends it without waiting for answers
                received = dict(zip(missing, threads.map(ask, missing, chunksize=1), strict=True))
            # Errors while the server is down say nothing about the question.
            usable = {key: reply for key, reply in received.items() if not (self._down and isinstance(reply, str))}
            answers |= usable
            if self._down:
                failures = 1 if usable else failures + 1  # what has answered was up in between
                self._revive(failures)
        return {key: self._row(answer) for key, answer in answers.items()}

    def _row(self, answer: completions.Completion | str) -> dict[str, Any]:
        """Return what `answer_rows` adds to a row for an answer, or for a reason why there is none."""
        if isinstance(answer, str):
            return {"error": answer}
        tokens = len(until_stop(answer.ids, set(self.encoder.stop_ids)))
        return {"answer": answer.text, "tokens": tokens, "finish": "length" if answer.is_cut else "stop"}

    def _ask(self, prompts: Mapping[int, Sequence[int]], seed: int, key: int) -> completions.Completion | str:
        """Return the answer to the prompt `key`, or why there is none: at once if the server is down."""
        until = time.monotonic() + TRIES * self.choice.timeout_s
        return self._down or self._client.answer(prompts[key], seed + key, until, gives_up=self._is_down)

    def _is_down(self) -> bool:
        """Whether the server is down; it is asked, unless it is known."""
        with self._lock:
            self._down = self._down or self._client.why_down()
            return bool(self._down)

    def _connect(self) -> completions.CompletionClient:
        """Return a client of the server, which is started if it is one of this machine."""
        choice, sampling = self.choice, self.sampling
        config = RolloutsConfig(
            url=choice.url or self._start(),
            model=choice.name,
            tries=TRIES,
            timeout_s=choice.timeout_s,
            max_new_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
        )
        fields = {"top_k": sampling.top_k} if sampling.top_k else {}
        protocol = completions.try_protocols(config, self.encoder, "served_name", fields)
        if isinstance(protocol, str):
            raise self._error(protocol)
        say("The answers come from {url}, model {name}.", url=config.url, name=protocol.model)
        return completions.CompletionClient(config, self.encoder, protocol, fields, keeps_empty=True)

    def _start(self) -> str:
        """Start the server, which takes the place of one that was started before, and return its URL."""
        self._running.close()
        port = free_port()
        address, command = f"http://127.0.0.1:{port}", self.choice.command(port)
        say("Starting:  {command}", command=shlex.join(command))
        try:
            self._running.enter_context(running_server(command, address, "/v1/models", self.choice.log))
        except NotStarted as error:
            raise self._error(str(error)) from error
        return f"{address}/v1"

    def _error(self, reason: str) -> LaunchError:
        """Return the error about a server that gives no answers."""
        return LaunchError(
            "the server gives no answers: {reason}. See {where}. The same command resumes.",
            reason=reason,
            where=self.choice.url or self.choice.log,
        )

    def _revive(self, failures: int) -> None:
        """Start the server again, or wait up to `timeout_s` for one that somebody else runs; LaunchError after too many
        failures in a row.
        """
        if failures >= TRIES:
            raise self._error(self._down)
        warn("the server is down: {reason}. What it has not answered is asked again.", reason=self._down)
        self._down = ""
        if not self.choice.url:
            self._client = self._connect()
            return
        until = time.monotonic() + self.choice.timeout_s
        while self._client.why_down() and time.monotonic() < until:
            time.sleep(_POLL_S)
