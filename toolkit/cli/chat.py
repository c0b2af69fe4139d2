"""Chat with a model in the terminal.

toolkit chat PATH [adapter=DIR] [system="…"] [max_new_tokens=512] [temperature=0] [top_p=1] [top_k=0] [seed=0]

  PATH, adapter, model.…, temperature, top_p, top_k, seed    as for `toolkit generate`
  system=TEXT           system message before the first question
  max_new_tokens=512    longest answer in tokens

The answer is shown while it is generated; Ctrl-C stops it and keeps what was generated. Each prompt includes the
conversation so far; when it exceeds the model's context window, the oldest turns are dropped and a notice is printed.
Commands:

  /reset           clear the conversation
  /undo            remove the last question and its answer
  /system TEXT     set the system message; without TEXT, remove it
  /help            list these commands
  /exit            quit, like Ctrl-D; exit or quit alone does too

A question must not begin with `/`; put a space before it. If stdin is not a terminal, each line is a question.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.cli.help import help_of
from toolkit.command_line import named_arguments, non_negative_int, number, positive_int
from toolkit.config import files, suggest
from toolkit.messages import ConfigError, ModelError, notes_to_stderr

if TYPE_CHECKING:
    from toolkit.evaluate.generate import Sampling

MODEL = ("model.path", "model.family", "model.chat_template", "adapter")
SAMPLING = ("max_new_tokens", "temperature", "top_p", "top_k", "seed")
"""Arguments that name the model that is asked, and how it samples, of `generate` too."""
USAGE = "toolkit chat PATH"


def run(words: list[str]) -> None:
    """Chat with a model until stdin ends or the user leaves."""
    arguments = named_arguments(
        words, required=(), optional=(*MODEL, "system", *SAMPLING), usage=USAGE, bare="model.path"
    )
    check_model(arguments, USAGE)
    sampling = sampling_arguments(arguments, max_new_tokens=512)
    path, family, template, adapter = (arguments.get(name, "") for name in MODEL)
    from toolkit.evaluate.chat_session import ChatSession
    from toolkit.export.load import load_any

    with notes_to_stderr():  # such as which checkpoint of a run is loaded: stdout is for answers
        loaded = load_any(path, adapter=adapter, family=family or "auto", chat_template=template)
    help_text = "\n".join(line for line in help_of("chat").splitlines() if line.startswith("  /"))
    session = ChatSession(loaded.model, loaded.encoder, sampling, sys.stdin.isatty(), help_text)
    session.set_system(arguments.get("system", ""))
    session.talk()


def check_model(arguments: dict[str, str], usage: str) -> None:
    """Raise ConfigError or ModelError unless the arguments name a model or an adapter (or both), which exist."""
    if not arguments.get("model.path") and not arguments.get("adapter"):
        raise ConfigError("{name} is missing: {usage}", name="model.path", usage=usage)
    for name in ("model.path", "adapter"):
        if arguments.get(name):
            files.check_directory(Path(arguments[name]), ModelError, name)
            suggest.check_is_no_folder_of_runs(Path(arguments[name]))


def sampling_arguments(arguments: dict[str, str], max_new_tokens: int) -> "Sampling":
    """Return how tokens are chosen, by the arguments SAMPLING; ConfigError for one that greedy decoding ignores."""
    temperature = number(arguments, "temperature", 0.0)
    drawn = [name for name in ("top_p", "top_k", "seed") if name in arguments]
    if drawn and not temperature:
        raise ConfigError(
            "{name} has no effect without temperature: the likeliest token is taken. Remove it.", name=drawn[0]
        )
    from toolkit.evaluate.generate import Sampling

    return Sampling(
        max_new_tokens=positive_int(arguments, "max_new_tokens") or max_new_tokens,
        temperature=temperature,
        top_p=number(arguments, "top_p", 1.0, most=1.0),
        top_k=non_negative_int(arguments, "top_k", 0),
        seed=non_negative_int(arguments, "seed", 0),
    )
