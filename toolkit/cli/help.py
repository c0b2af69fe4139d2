"""Help: the overview of all commands, the text of one, and what a wrong command means."""

import re
from importlib import import_module

from toolkit.cli import COMMANDS, GROUPS
from toolkit.messages import (
    ConfigError,
    choose_language,
    current_language,
    did_you_mean,
    joined,
    listed,
    read_table,
    shortlist,
    tr,
    translated,
)

_REMOVED = {"autotune": ("toolkit plan", "toolkit sweep", "batch.micro_per_gpu=auto")}
"""Commands of earlier versions, and what serves instead."""
_FIRST = ("new", "check", "show", "train", "chat", "report", "export-model")
"""Commands that a first run takes, in their order."""
_END_OF_BRIEF = re.compile(r"[:;.](?=\s|$)|[：；。]|\n")


def help_of(command: str) -> str:
    """Return a command's help in the user's language: its module's docstring, or its translation, and examples."""
    summary, _, details = (import_module(COMMANDS[command]).__doc__ or "").strip().partition("\n\n")
    details = read_table("locale/help_zh.yaml")[command].rstrip() if current_language() == "zh" else details
    language = tr("language of what is printed; default: the locale's")
    examples = "\n".join(f"  {line}" for line in read_table("cli/examples.yaml")[command])
    return f"{translated(summary)}\n\n{details}\n\n  language=en|zh   {language}\n\n{tr('Examples:')}\n{examples}"


def overview() -> str:
    """Return all commands in their groups, each in a few words, and where to look further."""
    width = 1 + max(map(len, COMMANDS))
    lines = [tr("Fine-tune language models with DeepSpeed, from one YAML recipe.")]
    lines += [tr("usage: toolkit COMMAND [[recipe=]NAME] [key=value …]")]
    lines += [tr("On the first day: {commands}.", commands=listed(*_FIRST))]
    for title, names in GROUPS.items():
        lines += ["", translated(title)]
        lines += [f"  {name:<{width}}{_END_OF_BRIEF.split(help_of(name))[0]}" for name in names]
    lines += ["", tr("Examples:"), *(f"  {line}" for line in read_table("cli/examples.yaml")["toolkit"])]
    help_lines = {
        "toolkit help COMMAND": tr("arguments and examples of a command; --version: the version"),
        "toolkit help KEY": tr("a key or a group of keys, as optim.lr or tuning; keys: docs/config.md"),
        "toolkit doctor --report": tr("one file to attach when you ask for help; errors: docs/debugging.md"),
    }
    lines += ["", tr("Help:"), *(f"  {name:<25}{text}" for name, text in help_lines.items())]
    return "\n".join(lines)


def help_of_other_words(words: list[str], is_help: bool) -> str:
    """Return the help of keys, which the words name in place of a command; ConfigError if no help is asked for."""
    first_word, *other_words = choose_language(words)
    if not is_help:
        raise unknown_command(first_word)
    from toolkit.cli.key_help import ALL, help_of_keys

    return help_of_keys(other_words if first_word in ALL else [first_word, *other_words])


def unknown_command(command: str) -> ConfigError:
    """Return the error for a command that does not exist, with what was probably meant."""
    unknown = tr("unknown command '{command}'.", command=command)
    if instead := _REMOVED.get(command):
        return ConfigError(
            joined(unknown, tr("It has been removed; instead, see '{name}'.", name="' / '".join(instead)))
        )
    commands = tr("Known: {commands}.", commands=shortlist(COMMANDS, "toolkit help", like=command))
    return ConfigError(joined(unknown, _command_meant(command) or commands))


def _command_meant(word: str) -> str:
    """Return "Did you mean …?" for a wrong command: another program's name of one, a recipe, or a misspelling."""
    from toolkit.cli.key_help import is_key
    from toolkit.config.files import known_recipes

    if other := read_table("cli/other_names.yaml").get(word):
        return tr("Did you mean '{name}'?", name=f"toolkit {other}")
    if word in known_recipes() or word.endswith((".yaml", ".yml")) or word.startswith("recipe="):
        return tr("Did you mean '{name}'?", name=f"toolkit train {word}")
    if "." in word and is_key(word):
        return tr("Did you mean '{name}'?", name=f"toolkit help {word}")
    other_words = ("--help", "--version") if word.startswith("-") else ("help",)
    return did_you_mean(word, (*COMMANDS, *other_words))
