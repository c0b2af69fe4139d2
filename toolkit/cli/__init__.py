"""The command line: `toolkit COMMAND …`, and `run.py`, which is `toolkit train`."""

import codecs
import locale
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module

from toolkit import __version__
from toolkit.distributed.failure import run_guarded
from toolkit.errors import ConfigError
from toolkit.messages import did_you_mean, joined, tr

# Command -> module with `run(arguments)` and a docstring that is its help. Imported when called: help needs no torch.
COMMANDS = {
    "train": "toolkit.cli.train",
    "launch": "toolkit.cli.launch",
    "sweep": "toolkit.cli.sweep",
    "autotune": "toolkit.cli.autotune",
    "check": "toolkit.cli.check",
    "recipes": "toolkit.cli.recipes",
    "models": "toolkit.cli.models",
    "plan": "toolkit.cli.plan",
    "prepare": "toolkit.cli.prepare",
    "show": "toolkit.cli.show",
    "export-config": "toolkit.cli.export_config",
    "import-config": "toolkit.cli.import_config",
    "eval": "toolkit.cli.eval",
    "generate": "toolkit.cli.generate",
    "chat": "toolkit.cli.chat",
    "serve": "toolkit.cli.serve",
    "export-model": "toolkit.cli.export_model",
    "verify": "toolkit.cli.verify",
    "hostfile": "toolkit.cli.hostfile",
    "doctor": "toolkit.cli.doctor",
    "report": "toolkit.cli.report",
    "bench": "toolkit.cli.bench",
}
MULTIRUN = ("-m", "--multirun")
"""Options by which `toolkit train` is `toolkit sweep`."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: the words after the program's name; None takes them from the command line.

    Returns:
        The exit code; see docs/commands.md.
    """
    _use_utf8()
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words and words[0].startswith("--local_rank="):  # `deepspeed --module toolkit eval …` puts it before the command
        del words[0]
    if not words or words[0] in ("-h", "--help"):
        _show(_overview())
        return 0 if words else 2
    if words[0] == "--version":
        _show(f"toolkit {__version__}")
        return 0
    return run_guarded(lambda: _dispatch(words))


def _use_utf8() -> None:
    """Start this process again in Python's UTF-8 mode if files would be read in another encoding (ASCII, GBK).

    DeepSpeed 0.19.8 and transformers open text files without naming one. The terminal keeps its own.
    """
    encoding = locale.getpreferredencoding(False)
    if codecs.lookup(encoding).name != "utf-8" and os.environ.get("PYTHONUTF8") != "1":
        streams = {
            "PYTHONUTF8": "1",
            "PYTHONIOENCODING": os.environ.get("PYTHONIOENCODING", f"{encoding}:backslashreplace"),
        }
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | streams)  # noqa: S606


def _dispatch(words: list[str]) -> int:
    command, rest = words[0], words[1:]
    if command == "train" and set(rest).intersection(MULTIRUN):
        command, rest = "sweep", [word for word in rest if word not in MULTIRUN]
    if command not in COMMANDS:
        raise ConfigError(
            joined(
                tr("unknown command '{command}'.", command=command),
                did_you_mean(command, COMMANDS),
                tr("Known: {commands}.", commands=", ".join(COMMANDS)),
            )
        )
    module = import_module(COMMANDS[command])
    if any(word in ("-h", "--help") for word in rest):
        _show((module.__doc__ or "").strip())
        return 0
    run: Callable[[list[str]], int] = module.run
    return run(rest)


def _show(text: str) -> None:
    """Print a text to a reader that may have read enough, as `head` does."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more as it ends


def _overview() -> str:
    lines = [tr("usage: toolkit COMMAND recipe=NAME [key=value …]"), ""]
    for name, module in COMMANDS.items():
        lines.append(f"  {name:15}{(import_module(module).__doc__ or '').strip().splitlines()[0]}")
    return "\n".join(
        [
            *lines,
            "",
            tr("`toolkit COMMAND --help` says more. docs/config.md lists every key."),
        ]
    )
