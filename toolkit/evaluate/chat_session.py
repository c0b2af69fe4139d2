"""A chat with a model in the terminal, or through a pipe."""

import contextlib
import io
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from toolkit.evaluate.generate import (
    Sampling,
    check_length,
    check_system,
    decode_answer,
    generate,
    max_context_tokens,
    with_system,
)
from toolkit.messages import ConfigError, ModelError, RowError, did_you_mean, joined, printable, tr
from toolkit.models import chat
from toolkit.sample_types import Message

COMMANDS = ("/reset", "/undo", "/system", "/help", "/exit")
_EXITS = ("exit", "quit", "/quit")
"""What people type for /exit in a terminal; through a pipe it is a question."""


class ChatSession:
    """A chat with a model. In a terminal (`is_terminal`) errors are printed, else they end the command."""

    def __init__(
        self,
        model: PreTrainedModel,
        encoder: chat.AnyChatEncoder,
        sampling: Sampling,
        is_terminal: bool,
        help_text: str,
    ) -> None:
        self.model, self.encoder, self.sampling = model, encoder, sampling
        self.is_terminal, self.help_text = is_terminal, help_text
        self.system = ""
        self.asked = 0
        """Number of questions so far, undone ones too: each has its own seed."""
        self.history: list[Message] = []
        """Question, answer, question, answer …"""

    def talk(self) -> None:
        """Read questions and answer them until the input or the user ends the session."""
        if self.is_terminal:
            _print_notice(tr("{commands}; Ctrl-C stops an answer, Ctrl-D ends.", commands=" ".join(COMMANDS)))
        for line in self._lines():
            if not self.handle(line):
                return

    def handle(self, line: str) -> bool:
        """Answer a typed question or execute a typed command; return False if the session is to end."""
        if self.is_terminal and line.strip().lower() in _EXITS:
            return False
        try:
            if line.startswith("/"):
                return self._execute(line)
            if line.strip():
                self._answer(line.strip())
        except (ConfigError, ModelError, RowError) as error:
            if not self.is_terminal and isinstance(error, RowError):  # no ToolkitError: it would show a traceback
                raise ModelError(str(error)) from None
            if not self.is_terminal:
                raise
            _print_notice(str(error))
        return True

    def set_system(self, text: str) -> None:
        """Set the system message, "" for none; ConfigError if the chat format has none."""
        check_system(self.encoder, text)
        self.system = text

    def _lines(self) -> Iterator[str]:
        """Yield the lines that the user types, or that come through a pipe."""
        # A terminal may send half a character.
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(encoding="utf-8", errors="replace")
        if not self.is_terminal:
            for line in sys.stdin:
                yield line.removesuffix("\n")
            return
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  editing and history of `input`
        while True:
            try:
                yield input("> ")
            except EOFError:
                _print("\n")
                return
            except KeyboardInterrupt:
                _print("\n")
                _print_notice(tr("Ctrl-D ends."))

    def _execute(self, line: str) -> bool:
        """Execute a typed command such as /reset; return False if the session is to end."""
        command, _, text = line.partition(" ")
        if command == "/reset":
            self.history.clear()
            _print_notice(tr("Everything that was said is forgotten."))
        elif command == "/undo":
            if self.history:
                _print_notice(tr("Forgotten: {question}", question=self.history[-2]["content"][:60]))
            else:
                _print_notice(tr("Nothing has been said yet."))
            del self.history[-2:]
        elif command == "/system":
            self.set_system(text.strip())
            _print_notice(tr("System message: {text}", text=self.system or "-"))
        elif command == "/help":
            _print_notice(self.help_text)
        elif command != "/exit":
            reason = tr("unknown command '{command}'.", command=command)
            commands = tr("Known: {commands}.", commands=", ".join(COMMANDS))
            raise ConfigError(joined(reason, did_you_mean(command, COMMANDS), commands))
        return command != "/exit"

    def _answer(self, question: str) -> None:
        """Generate an answer, print it as it is generated, and add question and answer to the conversation. In a
        terminal Ctrl-C ends the answer, and what was printed of it is added.
        """
        stream = AnswerStream(self.encoder, _print)
        try:
            answer = self.ask(question, stream)
            _print("\n")
        except KeyboardInterrupt:
            if not self.is_terminal:
                raise
            answer = stream.text
            _print("\n")
            _print_notice(tr("Stopped."))
        if answer:
            self.remember(question, answer)

    def ask(self, question: str, stream: "AnswerStream | None" = None) -> str:
        """Return the model's answer to a question after all that was said before; `stream` gets it as it comes."""
        prompt = self._prompt(question)
        sampling = replace(self.sampling, seed=self.sampling.seed + self.asked)
        self.asked += 1
        [ids] = generate(self.model, self.encoder, [prompt], sampling, self.model.device, streamer=stream)
        return decode_answer(self.encoder, ids)

    def remember(self, question: str, answer: str) -> None:
        """Add a question and its answer to the conversation."""
        self.history += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]

    def _prompt(self, question: str) -> list[int]:
        """Return the prompt, without the oldest turns where they do not fit; ModelError if the question does not."""
        dropped = 0
        while True:
            messages = [*self.history[dropped:], {"role": "user", "content": question}]
            prompt = self.encoder.prompt(with_system(messages, self.system))
            try:
                check_length(max_context_tokens(self.model), len(prompt), self.sampling.max_new_tokens)
                break
            except ModelError:
                if dropped == len(self.history):
                    raise
                dropped += 2  # a question and its answer
        if dropped:
            del self.history[:dropped]
            _print_notice(
                tr("The context window is full: the oldest {count} questions were dropped.", count=dropped // 2)
            )
        return prompt


class AnswerStream(BaseStreamer):
    """A streamer for `generate` with one prompt, which passes complete characters to `write`. All tokens are decoded
    again with each new one, as their text depends on their neighbours; that is cheap compared with the model.
    """

    def __init__(self, encoder: chat.AnyChatEncoder, write: Callable[[str], None]) -> None:
        self.encoder, self.write = encoder, write
        self.ids: list[int] = []
        self.text = ""
        """What has been written."""
        self._is_prompt = True

    def put(self, value: torch.Tensor) -> None:
        """Receive token ids as `generate` produces them: first the prompt's, which are skipped, then each new one."""
        if self._is_prompt:
            self._is_prompt = False
            return
        self.ids += [token for token in value.flatten().tolist() if token not in self.encoder.stop_ids]
        # An incomplete character is decoded as U+FFFD.
        self._write_new(decode_answer(self.encoder, self.ids).rstrip("\ufffd"))

    def end(self) -> None:
        """Print the rest of the text at the end of generation."""
        self._write_new(decode_answer(self.encoder, self.ids))

    def _write_new(self, text: str) -> None:
        """Write what a text has beyond the part of it that has been written."""
        if len(text) > len(self.text):
            self.write(text[len(self.text) :])
            self.text = text


def _print(text: str) -> None:
    sys.stdout.write(printable(text))
    sys.stdout.flush()


def _print_notice(text: str) -> None:
    """Print a notice to stderr, apart from answers on stdout."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
