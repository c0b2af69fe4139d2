"""Reads configs of other programs: which program's they are, and the values of their keys.

Shell scripts are parsed, not executed, and the environment is not read: a needed value that only a shell could know is
an error.
"""

import math
import operator
import os
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from toolkit.config import files
from toolkit.config.program_keys import Key, keys_of, names_of
from toolkit.messages import ConfigError, did_you_mean, file_bytes, joined, parsed_json, reason_of, tr, type_name


@dataclass(kw_only=True, slots=True)
class ForeignConfig:
    """The config of another program, read and not yet translated."""

    program: str
    """Name of the program, as printed."""
    keys: Mapping[str, Key]
    """All keys of that program."""
    shown: str
    """The file's name in messages."""
    folder: Path
    """Directory of the file, to which its paths may be relative."""
    values: dict[str, Any]
    """Key -> value as set in the file, without nulls."""
    lines: dict[str, int] = field(default_factory=dict)
    """Key -> line, if known."""
    spelled: dict[str, str] = field(default_factory=dict)
    """The Trainer's name of a key -> how this file spells it, where that differs."""
    world_size: int | None = None
    """Number of ranks that it is started on."""
    script: str = ""
    """The program that a command starts, without .py, or the subcommand of `trl`; "" where it is not known."""
    accelerate: dict[str, str] = field(default_factory=dict)
    """Options of the `accelerate launch` that starts it, without their dashes."""

    def get(self, name: str) -> Any:
        """Return a key's value, or the program's default if it is not set."""
        value = self.values.get(name)
        return self.keys[name].default if value is None else value

    def has(self, name: str) -> bool:
        """Whether a key is set."""
        return self.values.get(name) is not None

    def set_defaults(self, defaults: Mapping[str, Any]) -> None:
        """Set what keys mean where they are not set, key -> value, as far as other keys decide that."""
        self.keys = {**self.keys, **{name: replace(self.keys[name], default=value) for name, value in defaults.items()}}

    def location(self, name: str) -> str:
        """Return "file:line" of a key for messages, or the file if the line is unknown."""
        line = self.lines.get(self.spelling(name))
        return f"{self.shown}:{line}" if line else self.shown

    def spelling(self, name: str) -> str:
        """Return a key's name as the file spells it."""
        return self.spelled.get(name, name)

    def without_counterpart(self, name: str, supported: Iterable[str]) -> ConfigError:
        """Return the error for a value that has no counterpart here; `supported`: values that have one."""
        return ConfigError(
            "{place}: {key} = {value} has no counterpart: {names} have.",
            place=self.location(name),
            key=self.spelling(name),
            value=self.get(name),
            names=", ".join(supported),
        )

    def number(self, name: str, kind: type = float) -> Any:
        """Return a key's value as `kind`, int or float; ConfigError if it is no such number."""
        return typed(self.get(name), kind, f"{self.location(name)}: {self.spelling(name)}")

    def flag(self, name: str) -> bool:
        """Return a key's value as a bool, False for null; ConfigError if it is neither true nor false."""
        value = self.get(name)
        return value is not None and bool(typed(value, bool, f"{self.location(name)}: {self.spelling(name)}"))

    def names(self, name: str) -> list[str]:
        """Return a key's value, a list or a comma-separated text, as a list."""
        value = self.get(name)
        listed = value if isinstance(value, list) else [] if value is None else str(value).split(",")
        return [str(item).strip() for item in listed]


def typed(value: Any, kind: Any, location: str) -> Any:
    """Return a value of a file or command line as the type `kind` of the schema; ConfigError if it is no such value."""
    wrong = ConfigError("{place} = {value} must be {kind}.", place=location, value=value, kind=type_name(kind))
    try:
        if kind is bool:
            return {"true": True, "false": False, "1": True, "0": False}[str(value).lower()]
        if kind in (int, float):
            number = float(value)
            if isinstance(value, bool) or (kind is int and not number.is_integer()):
                raise wrong
            return kind(number)
    except (KeyError, ValueError, TypeError, OverflowError) as error:
        raise wrong from error
    return str(value) if kind is str else value


_QUOTED, _UNKNOWN = "\ue000", "\ue001"
"""Placeholders for an escaped dollar sign, and for a value that only a shell could know."""
_SUBSTITUTION = re.compile(r"\$\((?:[^()]|\([^()]*\))*\)|`[^`]*`|\$\(\([^()]*\)\)")
_ARITHMETIC = re.compile(r"\$\((?:\(|expr )\s*(\d{1,9}) *\\?([-+*/%]) *(\d{1,9})\s*\)?\)")
_OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.floordiv, "%": operator.mod}
"""What `$(expr 16 / $n)` and `$((16 / n))` compute: no shell is needed for it."""
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::?-([^{}]*))?\}|(\w+))")
_ASSIGNMENT = re.compile(r"(\w+)=(.*)", re.DOTALL)
_PROGRAM = re.compile(r"(?:.*/)?[\w.-]+\.py|(?:.*/)?(?:llamafactory-cli|lmf|trl|swift)")
_CONFIGS = (".yaml", ".yml", ".json")
_SWIFT = ("swift sft", "swift pt", "swift rlhf")
_RANKS = ("--num_gpus", "--num_accelerators", "--nproc_per_node", "--num_processes")
_NODES = ("--num_nodes", "--nnodes", "--num_machines")


class Command(NamedTuple):
    """One training command."""

    values: dict[str, Any]
    """Argument -> value; True for an option without a value, a list for several."""
    line: int
    """Its first line in the script."""
    world_size: int | None
    """Number of ranks, where its launcher is told."""
    script: str
    """As `ForeignConfig.script`."""
    accelerate: dict[str, str]
    """As `ForeignConfig.accelerate`."""


def read_command(text: str, shown: str) -> Command:
    """Return a script's single training command; ConfigError if there is none or several, or if a part of it can only
    be known by running a shell.
    """
    variables: dict[str, str] = {}
    commands = []
    for number, line in _logical_lines(text):
        words = _words_of_command(line, variables, f"{shown}:{number}")
        before: dict[str, str] = {}
        while words and (match := _ASSIGNMENT.fullmatch(words[0])):
            before[match[1]] = match[2]
            words.pop(0)
        if not words or words[0] == "export":
            variables |= before | dict(word.split("=", 1) for word in words[1:] if "=" in word)
            continue
        if words[0].startswith("--"):
            raise ConfigError(
                "{file}:{line}: the line begins with the option {word}: the line before must end with a backslash "
                "and nothing behind it, or a shell leaves out all that follows.",
                file=shown,
                line=number,
                word=words[0],
            )
        program_index = next((index for index, word in enumerate(words) if _PROGRAM.fullmatch(word)), None)
        if (
            program_index is not None
            and words[program_index].rpartition("/")[2] == "swift"
            and f"swift {''.join(words[program_index + 1 : program_index + 2])}" not in _SWIFT
        ):
            continue  # such as `swift infer`
        if program_index is not None and any(word.startswith("--") for word in words[program_index + 1 :]):
            commands.append(_parse_command(words, program_index, number, variables | before, shown))
        elif program_index is not None and (
            named := [word for word in words[program_index:] if word.endswith(_CONFIGS)]
        ):
            raise ConfigError(
                "{file}:{line}: this command takes its arguments from {named}: give that file instead.",
                file=shown,
                line=number,
                named=named[0],
            )
    if len(commands) != 1:
        lines = ", ".join(str(command.line) for command in commands)
        raise ConfigError(
            tr("{file}: there are several training commands, in lines {lines}. Keep one.", file=shown, lines=lines)
            if commands
            else tr(
                "{file}: there is no training command: NAME.py, `swift sft`, `trl sft` or `llamafactory-cli train`, "
                "with --arguments.",
                file=shown,
            )
        )
    return commands[0]


def _logical_lines(text: str) -> list[tuple[int, str]]:
    """Return (number of the first line, text) of a script's lines, those that end with a backslash joined."""
    lines: list[tuple[int, str]] = []
    begun, parts = 0, []
    for number, line in enumerate(text.splitlines(), start=1):
        begun = begun or number
        if line.endswith("\\"):
            parts.append(line[:-1])
            continue
        lines.append((begun, " ".join([*parts, line])))
        begun, parts = 0, []
    return [*lines, (begun, " ".join(parts))] if parts else lines


def _words_of_command(line: str, variables: dict[str, str], location: str) -> list[str]:
    """Split a line into words, with variables replaced and arithmetic computed; what only a shell could know becomes
    `_UNKNOWN`.
    """
    plain = re.sub(r"'[^']*'", lambda match: match[0].replace("$", _QUOTED).replace("`", "\ue002"), line)

    def value(match: "re.Match[str]") -> str:
        """Return a variable's value, its default in the script, or a placeholder for an unknown one."""
        name = match[1] or match[3]
        return variables.get(name, match[2] if match[2] is not None else f"{_UNKNOWN}{name}{_UNKNOWN}")

    def computed(match: "re.Match[str]") -> str:
        """Return the result of an arithmetic substitution of two numbers, _UNKNOWN for any other."""
        terms = _ARITHMETIC.fullmatch(_VARIABLE.sub(value, match[0]))
        if terms is None or (terms[2] in "/%" and not int(terms[3])):
            return _UNKNOWN
        return str(_OPERATORS[terms[2]](int(terms[1]), int(terms[3])))

    plain = _SUBSTITUTION.sub(computed, plain.replace("\\$", _QUOTED))
    try:
        words = shlex.split(_VARIABLE.sub(value, plain), comments=True)
    except ValueError as error:
        raise ConfigError("{place}: a quote is not closed ({reason}).", place=location, reason=error) from error
    return [word.replace(_QUOTED, "$").replace("\ue002", "`") for word in words]


def _parse_command(words: list[str], program_index: int, line: int, variables: dict[str, str], shown: str) -> Command:
    """Parse a command whose program is `words[program_index]`: launcher options before it, arguments behind it."""
    rest = words[program_index + 1 :]
    if end := next((index for index, word in enumerate(rest) if re.match(r"(?:\d?>|\||&|;)", word)), None):
        rest = rest[:end]  # where the output goes
    values: dict[str, Any] = {}
    name = ""
    for word in rest:
        if _UNKNOWN in word:
            variable = re.search(rf"{_UNKNOWN}(\w+){_UNKNOWN}", word)
            what = f"${variable[1]}" if variable else "$(…)"
            if not name:
                raise ConfigError(
                    "{file}:{line}: the argument {what} of {program} is not in the file: nothing is executed here, and "
                    "the environment is not read. Write its value.",
                    file=shown,
                    line=line,
                    what=what,
                    program=words[program_index],
                )
            raise ConfigError(
                "{file}:{line}: the value of {option} is not in the file ({what}): nothing is executed here, and "
                "the environment is not read. Write the value itself.",
                file=shown,
                line=line,
                option=f"--{name}",
                what=what,
            )
        if re.match(r"--[A-Za-z]", word):
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            if name in values:
                raise ConfigError("{file}:{line}: --{name} is given twice.", file=shown, line=line, name=name)
            values[name] = value if equals else True
        elif name:
            previous = values[name]
            values[name] = (
                word if previous is True else [*(previous if isinstance(previous, list) else [previous]), word]
            )
    script = words[program_index].rpartition("/")[2].removesuffix(".py")
    script = rest[0] if script == "trl" and rest else script
    if script == "swift" or words[program_index].endswith(("swift/cli/sft.py", "swift/cli/pt.py", "swift/cli/rlhf.py")):
        script = f"swift {rest[0] if script == 'swift' and rest else script}"
    launcher = words[:program_index]
    options: dict[str, str] = {}
    for word, after in zip(launcher, words[1 : program_index + 1], strict=True):
        name, equals, value = word.partition("=")
        if name.startswith("-"):
            is_alone = after.startswith("-") or after == words[program_index]
            options["--" + name.lstrip("-").replace("-", "_")] = value if equals else "" if is_alone else after
    is_accelerate = any(word.rpartition("/")[2] == "accelerate" for word in launcher)
    named = {name[2:]: "" if _UNKNOWN in value else value for name, value in options.items() if is_accelerate}
    return Command(values, line, _world_size(launcher, options, variables), script, named)


def _world_size(launcher: list[str], options: dict[str, str], variables: dict[str, str]) -> int | None:
    """Return the number of ranks that a launcher's options ask for, None if it decides by itself."""
    if not launcher and "NPROC_PER_NODE" in variables:  # ms-swift starts torchrun by it
        counts = [variables["NPROC_PER_NODE"], variables.get("NNODES", "1")]
        return math.prod(map(int, counts)) if all(text.isdecimal() and int(text) for text in counts) else None
    if not launcher:  # `trl` starts accelerate itself
        return None
    if {"--hostfile", "--include", "--exclude"} & options.keys():
        return None
    ranks = [options[name] for name in _RANKS if name in options]
    # accelerate's number is that of all nodes; those of the others are of one.
    nodes = [options[name] for name in _NODES if name in options and "--num_processes" not in options]
    if not ranks and not launcher[0].rpartition("/")[2].startswith("python"):
        return None
    if not ranks:
        devices = variables.get("CUDA_VISIBLE_DEVICES", "0")
        return len([device for device in devices.split(",") if device.strip()]) or 1
    both = [*ranks[:1], *(nodes[:1] or ["1"])]
    return int(both[0]) * int(both[1]) if all(text.isdecimal() and int(text) for text in both) else None


FACTORY_NAME, CHATGLM_NAME, HF_NAME = "LLaMA-Factory", "ChatGLM", "TrainingArguments"
SWIFT_NAME, AXOLOTL_NAME = "ms-swift", "axolotl"
_TABLES = {
    CHATGLM_NAME: "chatglm",
    FACTORY_NAME: "factory",
    SWIFT_NAME: "swift",
    AXOLOTL_NAME: "axolotl",
    HF_NAME: "hf",
}
_DEEPSPEED = ("zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size")
_SUFFIXES = (".yaml", ".yml", ".json", ".sh", ".bash")


def read_all(paths: list[str], world_size: int | None) -> tuple[ForeignConfig, str]:
    """Return a config, and its DeepSpeed JSON's path or ""; a ConfigError if files are unknown, none or too many.
    `world_size` None takes the command's number of ranks.
    """
    read = [(path, _read_config(Path(path))) for path in paths]
    configs = [config for _, config in read if config]
    jsons = [path for path, config in read if not config]
    if not configs:
        raise ConfigError(
            "{files}: this is a DeepSpeed JSON alone. Give deepspeed_json=FILE to any recipe, or the training "
            "arguments as well.",
            files=", ".join(paths),
        )
    if len(configs) > 1 or len(jsons) > 1:
        raise ConfigError("{files}: give one config, and one DeepSpeed JSON if it has one.", files=", ".join(paths))
    [config] = configs
    config.world_size = world_size or config.world_size
    return config, jsons[0] if jsons else ""


def _read_config(path: Path) -> ForeignConfig | None:
    """Read one file; None for a DeepSpeed JSON."""
    if path.suffix.lower() not in _SUFFIXES:
        raise ConfigError(
            "{file}: files of this kind are not read. Known are {known}: a YAML of LLaMA-Factory, axolotl "
            "or ms-swift, TrainingArguments as YAML or JSON, a DeepSpeed JSON, a shell script with a training command.",
            file=path,
            known=", ".join(_SUFFIXES),
        )
    try:
        text = file_bytes(path, files.LARGEST_FILE_BYTES).decode("utf-8-sig")
    except (OSError, ValueError) as error:
        raise ConfigError("cannot read {file}: {reason}", file=path, reason=reason_of(error)) from error
    lines: dict[str, int] = {}
    world_size, script, accelerate = None, "", dict[str, str]()
    if path.suffix.lower() in (".sh", ".bash"):
        command = read_command(text, str(path))
        values, world_size, script, accelerate = command.values, command.world_size, command.script, command.accelerate
        lines = dict.fromkeys(values, command.line)
        _check_values(values, path, command.line)
        if script in (*names_of("trl"), *_SWIFT) and isinstance(
            values.get("config"), str
        ):  # the command's arguments beat it
            named = values.pop("config")
            below = path.parent / named if os.path.isfile(path.parent / named) else Path(named)
            values = files.read(below).values | values
    elif path.suffix.lower() == ".json":
        values = _json_object(text, path)
        if any(name in values for name in _DEEPSPEED):
            return None
    else:
        document = files.parse(text, str(path))
        values, lines = document.values, document.lines
    if not values:
        raise ConfigError("{file} is empty: there is nothing to take over.", file=path)
    named = {SWIFT_NAME: script.startswith("swift "), HF_NAME: script in names_of("trl")}
    program = next((name for name, is_it in named.items() if is_it), "") or _owner_of(values, path)
    keys = keys_of(_TABLES[program])
    values_by_key, spelled = dict[str, Any](), dict[str, str]()
    for name, value in ((str(name), value) for name, value in values.items() if value is not None):
        bare = name.removeprefix("no_")
        is_off = bare != name and name not in keys and bare in keys  # --no_NAME is NAME = false
        read_as = keys[name].same_as if name in keys else ""
        spelled |= {read_as: name} if read_as else {}
        values_by_key[read_as or (bare if is_off else name)] = False if is_off else value
    return ForeignConfig(
        program=program,
        keys=keys,
        shown=str(path),
        folder=path.parent,
        values=values_by_key,
        lines=lines,
        spelled=spelled,
        world_size=world_size,
        accelerate=accelerate,
        # Of the Trainers' configs this key is in RewardConfig alone, null where it is not set.
        script="reward" if "center_rewards_coefficient" in values else script,
    )


def _check_values(values: dict[str, Any], path: Path, line: int) -> None:
    """Reject options of a command that lack their value, and map DeepSpeed's own options to the Trainer's."""
    if values.get("deepspeed") is True and isinstance(values.get("deepspeed_config"), str):
        values["deepspeed"] = values.pop("deepspeed_config")
    for name in names_of("valued"):
        if values.get(name) is True:
            raise ConfigError(
                "{file}:{line}: --{name} has no value. Write it behind the option, or leave the option out.",
                file=path,
                line=line,
                name=name,
            )


def _json_object(text: str, path: Path) -> dict[str, Any]:
    """Return the object in a JSON text; ConfigError if it is no JSON or no object."""
    try:
        values = parsed_json(text, once=True)
    except ValueError as error:
        raise ConfigError("{file} is no JSON: {reason}", file=path, reason=error) from error
    if not isinstance(values, dict):
        raise ConfigError("{file} must hold an object, {{...}}.", file=path)
    return values


def _owner_of(values: dict[str, Any], path: Path) -> str:
    """Return the program whose config has these keys: the one with most of the keys that the Trainer does not have,
    else the Trainer.
    """
    if len(later := [name for name in values if name in names_of("factory_v1")]) > 1:
        raise ConfigError(
            "{file}: a config of LLaMA-Factory v1 ({keys}), whose keys are not translated. Import the one for its "
            "stable version, or make a recipe of the model and data:  toolkit new",
            file=path,
            keys=", ".join(later),
        )
    keys_by_program = {name: keys_of(table).keys() for name, table in _TABLES.items()}
    counts = {name: len(values.keys() & (keys - keys_by_program[HF_NAME])) for name, keys in keys_by_program.items()}
    best = max(counts, key=lambda name: counts[name])
    if counts[best]:
        return best
    if values.keys() & keys_by_program[HF_NAME]:
        return HF_NAME
    first = str(next(iter(values)))
    raise ConfigError(
        joined(
            tr("{file}: none of its keys is known; the first is '{key}'.", file=path, key=first),
            did_you_mean(first, set().union(*keys_by_program.values())),
        )
    )
