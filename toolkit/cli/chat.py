"""Talk to a model in the terminal.

toolkit chat PATH [adapter=DIR] [system="…"] [max_new_tokens=512] [temperature=0] [top_p=1] [top_k=0] [seed=0]

  PATH, adapter, model.family, temperature, top_p, top_k, seed    as for `toolkit generate`
  system=TEXT           what the model is told before the first question
  max_new_tokens=512    longest answer in tokens

The answer appears as it is made; Ctrl-C stops it, and keeps what was said. Questions and answers so far are part of
each prompt; when they get longer than the model's positions, the oldest leave, and that is said. Commands:

  /reset           forget everything that was said
  /undo            forget the last question and its answer
  /system TEXT     from now on with this system message; without TEXT, with none
  /help            these commands
  /exit            the end, as Ctrl-D is

A question may not begin with `/`; put a blank before it. If stdin is no terminal, each of its lines is a question.
"""

import contextlib
import io
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from toolkit.arguments import named_arguments
from toolkit.cli.asking import MODEL, SAMPLING, check_model, check_system, sampling_of
from toolkit.errors import ConfigError, ModelError, RowError
from toolkit.messages import did_you_mean, joined, printable, tr

if TYPE_CHECKING:
    from toolkit.data.formats import Message
    from toolkit.evaluate.generate import Sampling
    from toolkit.export.load import LoadedModel

COMMANDS = ("/reset", "/undo", "/system", "/help", "/exit")
USAGE = "toolkit chat PATH"


def run(words: list[str]) -> int:
    """Talk."""
    given = named_arguments(words, required=(), optional=(*MODEL, "system", *SAMPLING), usage=USAGE, bare="model.path")
    check_model(given, USAGE)
    sampling = sampling_of(given, max_new_tokens=512)
    path, family, adapter = (given.get(name, "") for name in MODEL)
    from toolkit.export.load import load_any

    usable = load_any(path, adapter=adapter, family=family or "auto")
    chat = Chat(usable, sampling, is_terminal=sys.stdin.isatty())
    chat.set_system(given.get("system", ""))
    chat.talk()
    return 0


class Chat:
    """One conversation.

    Args:
        usable: the model.
        sampling: how it answers.
        is_terminal: a person types: mistakes are told and the conversation goes on; else they end the command.
    """

    def __init__(self, usable: "LoadedModel", sampling: "Sampling", is_terminal: bool) -> None:
        self.usable, self.sampling, self.is_terminal = usable, sampling, is_terminal
        self.system = ""
        self.asked = 0
        """Questions so far, those that were undone too: each draws from a seed of its own."""
        self.history: list[Message] = []
        """Question, answer, question, answer …"""

    def talk(self) -> None:
        """Answer until there is nothing more to answer."""
        if self.is_terminal:
            _tell(tr("{commands}; Ctrl-C stops an answer, Ctrl-D ends.", commands=" ".join(COMMANDS)))
        for line in self._lines():
            try:
                if line.startswith("/"):
                    if not self._obey(line):
                        return
                elif line.strip():
                    self._answer(line.strip())
            except (ConfigError, ModelError, RowError) as error:
                if not self.is_terminal:
                    raise error if isinstance(error, ConfigError | ModelError) else ModelError(str(error)) from None
                _tell(str(error))

    def set_system(self, text: str) -> None:
        """Take another system message; "" is none.

        Raises:
            ConfigError: the model would not see it.
        """
        check_system(self.usable.encoder, text)
        self.system = text

    def _lines(self) -> Iterator[str]:
        """Yield what is typed, or what comes through a pipe."""
        # Half a character, as a terminal may send it, is no reason to end.
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
                print()
                return
            except KeyboardInterrupt:
                print()
                _tell(tr("Ctrl-D ends."))

    def _obey(self, line: str) -> bool:
        """Carry a command out, and return whether the conversation goes on."""
        command, _, text = line.partition(" ")
        if command == "/reset":
            self.history.clear()
            _tell(tr("Everything that was said is forgotten."))
        elif command == "/undo":
            forgotten = self.history[-2:]
            del self.history[-2:]
            _tell(
                tr("Forgotten: {question}", question=forgotten[0]["content"][:60])
                if forgotten
                else tr("Nothing has been said yet.")
            )
        elif command == "/system":
            self.set_system(text.strip())
            _tell(tr("System message: {text}", text=self.system or "-"))
        elif command == "/help":
            _tell((sys.modules[__name__].__doc__ or "").partition("Commands:\n\n")[2].rstrip())
        elif command != "/exit":
            raise ConfigError(
                joined(
                    tr("unknown command '{command}'.", command=command),
                    did_you_mean(command, COMMANDS),
                    tr("Known: {commands}.", commands=", ".join(COMMANDS)),
                )
            )
        return command != "/exit"

    def _answer(self, question: str) -> None:
        """Ask the model, show the answer as it comes, and remember both."""
        from toolkit.evaluate.generate import AnswerStream, decode_answer, generate

        usable = self.usable
        stream = AnswerStream(usable.encoder, _show)
        try:
            prompt, device = self._prompt(question), usable.model.device
            drawn = replace(self.sampling, seed=self.sampling.seed + self.asked)
            self.asked += 1
            [ids] = generate(usable.model, usable.encoder, [prompt], drawn, device, streamer=stream)
            answer = decode_answer(usable.encoder, ids)
            print(flush=True)
        except KeyboardInterrupt:
            if not self.is_terminal:
                raise
            answer = stream.text
            print(flush=True)
            _tell(tr("Stopped."))
        if answer:
            self.history += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]

    def _prompt(self, question: str) -> list[int]:
        """Return the prompt, after leaving out the oldest turns that have no room.

        Raises:
            ModelError: the question alone is too long.
        """
        from toolkit.evaluate.answers import with_system
        from toolkit.evaluate.generate import check_length

        left_out = 0
        while True:
            messages = [*self.history[left_out:], {"role": "user", "content": question}]
            prompt = self.usable.encoder.prompt(with_system(messages, self.system))
            try:
                check_length(self.usable.model, len(prompt), self.sampling.max_new_tokens)
            except ModelError:
                if left_out == len(self.history):
                    raise
                left_out += 2
                continue
            if left_out:
                del self.history[:left_out]
                _tell(
                    tr(
                        "The conversation has no room any more: the oldest {count} questions were left out.",
                        count=left_out // 2,
                    )
                )
            return prompt


def _show(text: str) -> None:
    sys.stdout.write(printable(text))
    sys.stdout.flush()


def _tell(text: str) -> None:
    """Write what is no answer."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
