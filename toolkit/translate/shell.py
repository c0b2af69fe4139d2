"""A training command in a shell script, read without a shell: its variables, line continuations, words.

Nothing is executed and the environment is not read: what only a shell could say is an error where it is needed.
"""

import re
import shlex
from dataclasses import dataclass, field
from typing import Any

from toolkit.errors import ConfigError
from toolkit.messages import tr

_QUOTED, _UNKNOWN = "\ue000", "\ue001"
"""Stand for a dollar sign that means itself, and for what only a shell could say."""
_SUBSTITUTION = re.compile(r"\$\((?:[^()]|\([^()]*\))*\)|`[^`]*`|\$\(\([^()]*\)\)")
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::?-([^{}]*))?\}|(\w+))")
_ASSIGNMENT = re.compile(r"(\w+)=(.*)", re.DOTALL)
_PROGRAM = re.compile(r"(?:.*/)?[\w.-]+\.py|(?:.*/)?(?:llamafactory-cli|lmf)")
_CONFIGS = (".yaml", ".yml", ".json")
_RANKS = ("--num_gpus", "--num_accelerators", "--nproc_per_node", "--num_processes")
_NODES = ("--num_nodes", "--nnodes", "--num_machines")


@dataclass(kw_only=True, slots=True)
class Command:
    """One training command."""

    program: str
    """The script that is started."""
    values: dict[str, Any] = field(default_factory=dict)
    """Argument -> value; True for one without, a list for several."""
    line: int
    """Where it begins."""
    world_size: int | None
    """Number of ranks, where its launcher is told."""


def read_command(text: str, shown: str) -> Command:
    """Read the one training command of a script.

    Args:
        text: the script.
        shown: its name, for messages.

    Raises:
        ConfigError: there is none, or more than one; or a part of it would have to be executed.
    """
    variables: dict[str, str] = {}
    commands = []
    for number, line in _logical_lines(text):
        words = _words(line, variables, f"{shown}:{number}")
        before: dict[str, str] = {}
        while words and (match := _ASSIGNMENT.fullmatch(words[0])):
            before[match[1]] = match[2]
            words.pop(0)
        if not words or words[0] == "export":
            variables |= before | dict(word.split("=", 1) for word in words[1:] if "=" in word)
            continue
        if words[0].startswith("--"):
            raise ConfigError(
                tr(
                    "{file}:{line}: the line begins with the option {word}: the line before must end with a backslash "
                    "and nothing behind it, or a shell leaves out all that follows.",
                    file=shown,
                    line=number,
                    word=words[0],
                )
            )
        place = next((at for at, word in enumerate(words) if _PROGRAM.fullmatch(word)), None)
        if place is not None and any(word.startswith("--") for word in words[place + 1 :]):
            commands.append(_command(words, place, number, variables | before, shown))
        elif place is not None and (named := [word for word in words[place:] if word.endswith(_CONFIGS)]):
            raise ConfigError(
                tr(
                    "{file}:{line}: this command takes its arguments from {named}: give that file instead.",
                    file=shown,
                    line=number,
                    named=named[0],
                )
            )
    if len(commands) != 1:
        lines = ", ".join(str(command.line) for command in commands)
        raise ConfigError(
            tr("{file}: there are several training commands, in lines {lines}. Keep one.", file=shown, lines=lines)
            if commands
            else tr("{file}: there is no training command: a script, NAME.py, with --arguments behind it.", file=shown)
        )
    return commands[0]


def _logical_lines(text: str) -> list[tuple[int, str]]:
    """Return the lines after joining those that end with a backslash, with the number of their first."""
    found: list[tuple[int, str]] = []
    begun, parts = 0, []
    for number, line in enumerate(text.splitlines(), start=1):
        begun = begun or number
        if line.endswith("\\"):
            parts.append(line[:-1])
            continue
        found.append((begun, " ".join([*parts, line])))
        begun, parts = 0, []
    return [*found, (begun, " ".join(parts))] if parts else found


def _words(line: str, variables: dict[str, str], place: str) -> list[str]:
    """Split a line into words, variables replaced; texts that a shell would have to make become `_UNKNOWN`."""
    plain = re.sub(r"'[^']*'", lambda found: found[0].replace("$", _QUOTED).replace("`", "\ue002"), line)
    plain = _SUBSTITUTION.sub(_UNKNOWN, plain.replace("\\$", _QUOTED))

    def value(found: "re.Match[str]") -> str:
        name = found[1] or found[3]
        return variables.get(name, found[2] if found[2] is not None else f"{_UNKNOWN}{name}{_UNKNOWN}")

    try:
        words = shlex.split(_VARIABLE.sub(value, plain), comments=True)
    except ValueError as error:
        raise ConfigError(tr("{place}: a quote is not closed ({reason}).", place=place, reason=error)) from error
    return [word.replace(_QUOTED, "$").replace("\ue002", "`") for word in words]


def _command(words: list[str], place: int, line: int, variables: dict[str, str], shown: str) -> Command:
    """Read a command whose program is at `place`."""
    rest = words[place + 1 :]
    if end := next((at for at, word in enumerate(rest) if re.match(r"(?:\d?>|\||&|;)", word)), None):
        rest = rest[:end]  # where the output goes
    values: dict[str, Any] = {}
    name = ""
    for word in rest:
        if _UNKNOWN in word:
            variable = re.search(rf"{_UNKNOWN}(\w+){_UNKNOWN}", word)
            raise ConfigError(
                tr(
                    "{file}:{line}: the value of {option} is not in the file ({what}): nothing is executed here, and "
                    "the environment is not read. Write the value itself.",
                    file=shown,
                    line=line,
                    option=name and f"--{name}",
                    what=f"${variable[1]}" if variable else "$(…)",
                )
            )
        if re.match(r"--[A-Za-z]", word):
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            if name in values:
                raise ConfigError(tr("{file}:{line}: --{name} is given twice.", file=shown, line=line, name=name))
            values[name] = value if equals else True
        elif name:
            known = values[name]
            values[name] = word if known is True else [*(known if isinstance(known, list) else [known]), word]
    return Command(program=words[place], values=values, line=line, world_size=_world_size(words[:place], variables))


def _world_size(launcher: list[str], variables: dict[str, str]) -> int | None:
    """Return the number of ranks that a launcher is asked for, None where it decides by itself."""
    options: dict[str, str] = {}
    for word, after in zip(launcher, [*launcher[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        options["--" + name.lstrip("-").replace("-", "_")] = value if equals else after
    if {"--hostfile", "--include", "--exclude"} & options.keys():
        return None
    ranks = [options[name] for name in _RANKS if name in options]
    nodes = [options[name] for name in _NODES if name in options]
    if not ranks and not launcher[0].rpartition("/")[2].startswith("python"):
        return None
    if not ranks:
        devices = variables.get("CUDA_VISIBLE_DEVICES", "0")
        return len([device for device in devices.split(",") if device.strip()]) or 1
    both = [*ranks[:1], *(nodes[:1] or ["1"])]
    return int(both[0]) * int(both[1]) if all(text.isdecimal() and int(text) for text in both) else None
