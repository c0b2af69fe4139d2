"""The command line: `toolkit COMMAND …`, and `run.py`, which is `toolkit train`."""

import codecs
import locale
import os
import re
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from itertools import chain

from toolkit import __version__
from toolkit.messages import ConfigError, current_language, did_you_mean, joined, read_table, shortlist, tr, translated

GROUPS = {
    "Getting started": ("new", "recipes", "models", "doctor", "hostfile"),
    "Check before training": ("check", "plan", "show", "prepare", "data-report", "prove"),
    "Train": ("train", "launch", "sweep", "rounds", "replay"),
    "Use what was trained": (
        "chat",
        "generate",
        "eval",
        "serve",
        "export-model",
        "export-gguf",
        "push",
        "report",
        "board",
    ),
    "Maintain": (
        *("verify", "verify-serving", "export-config", "import-config", "convert-checkpoint", "bench", "completion"),
    ),
}
"""Commands by what a user does; the titles are translated."""
COMMANDS = tuple(chain.from_iterable(GROUPS.values()))
EXTRAS = (
    *("sweep", "rounds", "prove", "new", "export-config", "import-config", "convert-checkpoint"),
    *("verify-serving", "export-gguf", "doctor", "data-report", "models", "board", "bench", "completion", "push"),
)
"""Commands that serve around a run: their modules are in toolkit/extras/, which nothing else here imports."""
_REMOVED = {"autotune": ("toolkit plan", "toolkit sweep", "batch.micro_per_gpu=auto")}
"""Commands of earlier versions, and what serves instead."""
_END_OF_BRIEF = re.compile(r"[:;.：；。]|\n")
MULTIRUN = ("-m", "--multirun")
"""Options by which `toolkit train` is `toolkit sweep`."""


def module_of(command: str) -> str:
    """Return the name of a command's module: its docstring is the help, which needs no torch, and it has `run(words)`.

    That returns the exit code, None for 0.
    """
    package = "toolkit.extras.cli" if command in EXTRAS else "toolkit.cli"
    return f"{package}.{command.replace('-', '_')}"


def help_of(command: str) -> str:
    """Return a command's help in the user's language."""
    summary, _, rest = (import_module(module_of(command)).__doc__ or "").strip().partition("\n\n")
    rest = read_table("locale/help_zh.yaml")[command].rstrip() if current_language() == "zh" else rest
    language = tr("language of what is printed; default: the locale's")
    examples = "\n".join(f"  {line}" for line in read_table("cli/examples.yaml")[command])
    return f"{translated(summary)}\n\n{rest}\n\n  language=en|zh   {language}\n\n{tr('Examples:')}\n{examples}"


def overview() -> str:
    """Return all commands in their groups, each in a few words, and where to look further."""
    width = 1 + max(map(len, COMMANDS))
    lines = [tr("usage: toolkit COMMAND [recipe=NAME] [key=value …]")]
    for title, names in GROUPS.items():
        lines += ["", translated(title)]
        lines += [f"  {name:<{width}}{_END_OF_BRIEF.split(help_of(name))[0]}" for name in names]
    lines += ["", tr("Examples:"), *(f"  {line}" for line in read_table("cli/examples.yaml")["toolkit"])]
    help_lines = {
        "toolkit help COMMAND": tr("arguments and examples of a command"),
        "toolkit doctor --report": tr("one file to attach when you ask for help"),
        "docs/config.md": tr("every key; docs/debugging.md: what to do about an error"),
    }
    lines += ["", tr("Help:"), *(f"  {name:<25}{text}" for name, text in help_lines.items())]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command, of the command line if None is given; return the exit code (docs/commands.md)."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["--complete"]:  # a shell asks at each TAB
        _show("\n".join(import_module("toolkit.extras.completion").candidates(words[1], COMMANDS, module_of)))
        return 0
    _use_utf8()
    if words and words[0].startswith("--local_rank="):  # `deepspeed --module toolkit eval …` puts it before the command
        del words[0]
    if words[:1] == ["help"]:
        words = [*words[1:], "--help"]
    if not words or words[0] in ("-h", "--help"):
        _show(overview())
        return 0 if words else 2
    if words[0] == "--version":
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
        streams = {
            "PYTHONUTF8": "1",
            "PYTHONIOENCODING": os.environ.get("PYTHONIOENCODING", f"{encoding}:backslashreplace"),
        }
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | streams)  # noqa: S606


def _dispatch(words: list[str]) -> int:
    """Run the command that the first word names; return its exit code."""
    command, rest = words[0], words[1:]
    if command == "train" and set(rest).intersection(MULTIRUN):
        command, rest = "sweep", [word for word in rest if word not in MULTIRUN]
    if command not in COMMANDS:
        unknown = tr("unknown command '{command}'.", command=command)
        if instead := _REMOVED.get(command):
            raise ConfigError(
                joined(unknown, tr("It has been removed; instead, see '{name}'.", name="' / '".join(instead)))
            )
        commands = tr("Known: {commands}.", commands=shortlist(COMMANDS, "toolkit help", like=command))
        raise ConfigError(joined(unknown, _command_meant(command), commands))
    module = import_module(module_of(command))
    if any(word in ("-h", "--help") for word in rest):
        from toolkit.arguments import choose_language  # only now: it brings Hydra

        choose_language(rest)
        _show(help_of(command))
        return 0
    run: Callable[[list[str]], int | None] = module.run
    return run(rest) or 0


def _command_meant(word: str) -> str:
    """Return "Did you mean …?" for a wrong command: another program's name of one, a recipe, or a misspelling."""
    from toolkit.config.files import known_recipes

    if other := read_table("cli/other_names.yaml").get(word):
        return tr("Did you mean '{name}'?", name=f"toolkit {other}")
    if word in known_recipes() or word.endswith((".yaml", ".yml")) or word.startswith("recipe="):
        return tr("Did you mean '{name}'?", name=f"toolkit train {word}")
    return did_you_mean(word, COMMANDS)


def _show(text: str) -> None:
    """Print a text to a reader that may have read enough, as `head` does."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more as it ends
