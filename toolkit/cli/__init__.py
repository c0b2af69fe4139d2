"""The command line: `toolkit COMMAND …`, and `run.py`, which is `toolkit train`."""

import codecs
import locale
import logging
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module

from toolkit import __version__
from toolkit.messages import choose_language

GROUPS = {
    "Getting started": {
        "new": "toolkit.extras.cli.new",
        "recipes": "toolkit.cli.recipes",
        "models": "toolkit.extras.cli.models",
        "doctor": "toolkit.extras.cli.doctor",
        "hostfile": "toolkit.cli.hostfile",
    },
    "Check before training": {
        "check": "toolkit.cli.check",
        "plan": "toolkit.cli.plan",
        "show": "toolkit.cli.show",
        "prepare": "toolkit.cli.prepare",
        "data-report": "toolkit.extras.cli.data_report",
        "prove": "toolkit.extras.cli.prove",
    },
    "Train": {
        "train": "toolkit.cli.train",
        "launch": "toolkit.cli.launch",
        "sweep": "toolkit.extras.cli.sweep",
        "rounds": "toolkit.extras.cli.rounds",
        "replay": "toolkit.cli.replay",
    },
    "Use what was trained": {
        "chat": "toolkit.cli.chat",
        "generate": "toolkit.cli.generate",
        "eval": "toolkit.cli.eval",
        "serve": "toolkit.cli.serve",
        "export-model": "toolkit.cli.export_model",
        "export-gguf": "toolkit.extras.cli.export_gguf",
        "push": "toolkit.extras.cli.push",
        "report": "toolkit.cli.report",
        "board": "toolkit.extras.cli.board",
    },
    "Verify, convert, measure": {
        "verify": "toolkit.cli.verify",
        "verify-serving": "toolkit.extras.cli.verify_serving",
        "export-config": "toolkit.extras.cli.export_config",
        "import-config": "toolkit.extras.cli.import_config",
        "convert-checkpoint": "toolkit.extras.cli.convert_checkpoint",
        "bench": "toolkit.extras.cli.bench",
        "completion": "toolkit.extras.cli.completion",
    },
}
"""Commands by what a user does, under translated titles -> their modules. A module's docstring is the command's help,
which needs no torch, and its `run(words)` returns the exit code, None for 0.
"""
COMMANDS = {command: module for commands in GROUPS.values() for command, module in commands.items()}
MULTIRUN = ("-m", "--multirun")
"""Options by which `toolkit train` is `toolkit sweep`."""
# DeepSpeed's own warning that it found no GPU, in the middle of any output; `warn_without_gpu` is this toolkit's.
logging.getLogger("DeepSpeed").addFilter(lambda record: "Setting accelerator to CPU" not in str(record.msg))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command, of the command line if None is given; return the exit code (docs/commands.md)."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["--complete"]:  # a shell asks at each TAB
        _show("\n".join(import_module("toolkit.extras.completion").candidates(words[1], COMMANDS)))
        return 0
    _use_utf8()
    if words and words[0].startswith("--local_rank="):  # `deepspeed --module toolkit eval …` puts it before the command
        del words[0]
    if [word for word in words if not word.startswith("language=")] == ["--version"]:
        _show(f"toolkit {__version__}")
        return 0
    from toolkit.distributed.exits import run_guarded

    return run_guarded(lambda: _dispatch(words))  # an error of the command becomes a message and an exit code


def _use_utf8() -> None:
    """Start this process again in Python's UTF-8 mode if files would be read in another encoding (ASCII, GBK).

    DeepSpeed 0.19.8 and transformers open text files without naming one. The terminal keeps its own.
    """
    encoding = locale.getpreferredencoding(False)
    if codecs.lookup(encoding).name != "utf-8" and os.environ.get("PYTHONUTF8") != "1":
        variables = {
            "PYTHONUTF8": "1",
            "PYTHONIOENCODING": os.environ.get("PYTHONIOENCODING", f"{encoding}:backslashreplace"),
        }
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | variables)  # noqa: S606


def _dispatch(words: list[str]) -> int:
    """Run the command that the first word names, or show help; return the exit code, 2 if there is no command."""
    if words and words[0].startswith("language="):  # after its name a command reads this word itself
        words = choose_language(words)
    is_help = bool(words) and words[0] in ("help", "-h", "--help")
    if is_help:  # `help COMMAND` is `COMMAND --help`
        words = choose_language(words[1:])
    if not words or not words[0]:
        from toolkit.cli.help import overview

        _show(overview())
        return 0 if is_help else 2
    command, *arguments = words
    if command == "train" and set(arguments).intersection(MULTIRUN):
        command, arguments = "sweep", [word for word in arguments if word not in MULTIRUN]
    if command not in COMMANDS:
        from toolkit.cli.help import help_of_other_words

        _show(help_of_other_words(words, is_help))  # of a key; a ConfigError if no help was asked for
        return 0
    module = import_module(COMMANDS[command])
    if is_help or any(word in ("-h", "--help") for word in arguments):
        from toolkit.cli.help import help_of

        choose_language(arguments)
        _show(help_of(command))
        return 0
    run: Callable[[list[str]], int | None] = module.run
    return run(arguments) or 0


def _show(text: str) -> None:
    """Print a text; that the reader has read enough and gone, as `head` does, is no error."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more as it ends
