"""Reads configs of other programs: which program's they are, and the values of their keys.

Shell scripts are parsed, not executed, and the environment is not read: a needed value that only a shell could know is
an error.
"""

import math
import operator
import os
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from toolkit.config import files
from toolkit.config.program_keys import Key, keys_of, names_of, sentence
from toolkit.messages import ConfigError, file_bytes, parsed_json, reason_of, tr, type_name


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
        """Replace the program's defaults of some keys (key -> value), those that other keys decide."""
        self.keys = {**self.keys, **{name: replace(self.keys[name], default=value) for name, value in defaults.items()}}

    def remark(self, name: str, says: str, is_harmless: bool = False) -> None:
        """Replace what is reported about a key, where other keys decide that. `says`: name of a sentence in
        program_keys.yaml, "" for none; `is_harmless`: leaving the key out changes nothing that is trained.
        """
        self.keys = {**self.keys, name: replace(self.keys[name], says=says, is_harmless=is_harmless)}

    def find(self, named: str) -> Path:
        """Return the path of a file that the config names: relative to the working directory, or to the config's or one
        of those above it; as it is named if there is no such file.
        """
        folders = (Path(), self.folder, *self.folder.parents, *self.folder.absolute().parents)
        return next((folder / named for folder in folders if os.path.isfile(folder / named)), Path(named))

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

    def without_data(self, name: str) -> ConfigError:
        """Return the error for a config that does not set `name`, the key of its training data."""
        return ConfigError("{file}: {key} is not given: there is nothing to train on.", file=self.shown, key=name)

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
    """Return a value of a file or command line as the type `kind` of the schema; ConfigError if it is no such value. On
    a command line numbers and truth values are texts. Lists and other types are returned as they are.
    """
    wrong = ConfigError("{place} = {value} must be {kind}.", place=location, value=value, kind=type_name(kind))
    try:
        if kind is bool:
            return {"true": True, "false": False, "1": True, "0": False}[str(value).lower()]
        if kind in (int, float):
            number = float(value)
            if isinstance(value, bool) or (kind is int and not number.is_integer()):  # 3.0 is an int, True is not
                raise wrong
            return kind(number)
    except (KeyError, ValueError, TypeError, OverflowError) as error:
        raise wrong from error
    return str(value) if kind is str else value


_QUOTED, _UNKNOWN, _QUOTED_BACKTICK = "\ue000", "\ue001", "\ue002"
"""Placeholders, of Unicode's private use area: for a dollar sign that is a plain letter, for a value that only a shell
could know ($NAME becomes _UNKNOWN NAME _UNKNOWN), and for a backtick that is a plain letter.
"""
_SUBSTITUTION = re.compile(r"\$\((?:[^()]|\([^()]*\))*\)|`[^`]*`|\$\(\([^()]*\)\)")
_ARITHMETIC = re.compile(r"\$\((?:\(|expr )\s*(\d{1,9}) *\\?([-+*/%]) *(\d{1,9})\s*\)?\)")
_OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.floordiv, "%": operator.mod}
"""What `$(expr 16 / $n)` and `$((16 / n))` compute: no shell is needed for it."""
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::?-([^{}]*))?\}|(\w+))")
_ARGUMENT = re.compile(rf"{_UNKNOWN}\d+{_UNKNOWN}")
_ASSIGNMENT = re.compile(r"(\w+)=(.*)", re.DOTALL)
_PROGRAM = re.compile(r"(?:.*/)?[\w.-]+\.py|(?:.*/)?(?:llamafactory-cli|lmf|trl|swift|axolotl|axolotl\.cli\.train)")
_PIECE = re.compile(
    r"""'[^']*'|"(?:\\.|[^"\\])*"|\\.|\$\((?:[^()]|\([^()]*\))*\)|`[^`]*`|(&&|\|\|?|;|(?<!>)&(?!>))|.""", re.DOTALL
)
"""A quoted text, a substitution, a letter; or, in group 1, what stands between two commands: && || | ; &."""
_HERE_DOCUMENT = re.compile(r"(?<!<)<<-?\s*(['\"]?)([A-Za-z_]\w*)\1")
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
    config: Path | None = None
    """File that it takes further arguments from."""


def read_command(text: str, shown: str) -> Command:
    """Return a script's single training command; ConfigError if there is none or several, or if a part of it can only
    be known by running a shell. Assignments before it count: on lines of their own or after `export` for all that
    follows, before a command's name for that command. `shown`: the file's name in messages.
    """
    variables: dict[str, str] = {}
    commands = []
    for number, part in ((number, part) for number, line in _logical_lines(text) for part in _divide(line)):
        words = _words_of_command(part, variables, f"{shown}:{number}")
        assigned: dict[str, str] = {}  # by the NAME=VALUE with which the line begins
        while words and (match := _ASSIGNMENT.fullmatch(words[0])):
            name, value = match.groups()
            # MODEL=$2 in a loop over the script's own options: MODEL keeps the default that it has already.
            if not (_ARGUMENT.search(value) and name in variables):
                assigned[name] = value
            words.pop(0)
        if not words or words[0] == "export":
            variables |= assigned | dict(word.split("=", 1) for word in words[1:] if "=" in word)
        elif command := _command_of(words, number, variables | assigned, shown):
            commands.append(command)
    if not commands:
        raise ConfigError(
            "{file}: there is no training command: NAME.py, `swift sft`, `trl sft` or `llamafactory-cli train`, "
            "with --arguments.",
            file=shown,
        )
    if len(commands) > 1:
        listed = ", ".join(f"{command.script} ({shown}:{command.line})" for command in commands)
        raise ConfigError("there are several training commands: {commands}. Keep one.", commands=listed)
    return commands[0]


def _command_of(words: list[str], number: int, variables: dict[str, str], shown: str) -> Command | None:
    """Return the training command of a line, None if the line is something else; ConfigError if it cannot be read. A
    training command is [LAUNCHER …] PROGRAM --arguments, or PROGRAM … CONFIG. `words`: the line, split, and `number`,
    its own; `variables`: those that the script sets; `shown`: its name in messages.
    """
    is_pattern = any(word.endswith(")") for word in words[:2])  # of `case`, as in `--model )`
    if words[0].startswith("--") and not is_pattern:
        raise ConfigError(
            "{file}:{line}: the line begins with the option {word}: the line before must end with a backslash "
            "and nothing behind it, or a shell leaves out all that follows.",
            file=shown,
            line=number,
            word=words[0],
        )
    if re.search(r"(^| )megatron (sft|pt|rlhf)( |$)|_megatron/(sft|pt|rlhf)\.py", " ".join(words)):
        what = sentence("refused_megatron")
        raise ConfigError("{place}: {what} (seen: {keys}).", place=f"{shown}:{number}", what=what, keys="megatron")
    index = next((index for index, word in enumerate(words) if _PROGRAM.fullmatch(word)), None)
    if index is None:
        return None
    is_swift = words[index].rpartition("/")[2] == "swift"
    if is_swift and f"swift {''.join(words[index + 1 : index + 2])}" not in _SWIFT:
        return None  # such as `swift infer`
    if any(word.startswith("--") for word in words[index + 1 :]):  # arguments, with or without a config
        return _parse_command(words, index, number, variables, shown)
    named = next((word for word in words[index + 1 :] if word.endswith(_CONFIGS)), "")  # the config
    if not named:
        return None
    if not any(os.path.isfile(folder / named) for folder in (Path(), Path(shown).parent)):
        raise ConfigError(
            "{file}:{line}: this command takes its arguments from {named}: give that file instead.",
            file=shown,
            line=number,
            named=named,
        )
    # Before the config stands a subcommand, as in `llamafactory-cli train CONFIG`; or, in ChatGLM3's and GLM-4's demo,
    # PROGRAM DATA_DIR MODEL_DIR CONFIG, two arguments, which get the form that `_parse_command` reads.
    before = words[index + 1 : words.index(named, index + 1)]
    if len(before) == 2:
        before = [f"--data_dir={before[0]}", f"--model_dir={before[1]}"]
    return _parse_command([*words[: index + 1], *before, f"--config={named}"], index, number, variables, shown)


def _logical_lines(text: str) -> list[tuple[int, str]]:
    """Return (number of the first line, text) of a script's lines without comments and here-documents, those joined
    that end with a backslash or within a quote.
    """
    lines: list[tuple[int, str]] = []
    first_number, joined = 0, ""  # of the line that is being put together; 0: none
    quote, document_end = "", ""  # the quotation mark, and the here-document's last line, that are awaited
    texts = text.splitlines()
    last_lines = {line.strip(): number for number, line in enumerate(texts, start=1)}
    for number, raw in enumerate(texts, start=1):
        if document_end:
            document_end = "" if raw.strip() == document_end else document_end
            continue
        first_number = first_number or number
        line, quote = _without_comment(raw, quote)
        if line.endswith("\\") and quote != "'":
            joined += line[:-1] + " "
            continue
        joined += line
        if quote:
            joined += "\n"
            continue
        document = _HERE_DOCUMENT.search(line)  # such as `cat <<EOF`
        if document and last_lines.get(document[2], 0) > number:  # else << is something else: no such line follows
            document_end = document[2]
        lines.append((first_number, joined))
        first_number, joined = 0, ""
    return [*lines, (first_number, joined)] if joined else lines


def _divide(line: str) -> list[str]:
    """Return the commands of a line, divided at && || | ; and &: `a --x 1; b "c;d"` -> ["a --x 1", ' b "c;d"']."""
    commands = [""]
    for piece in _PIECE.finditer(line):
        if piece[1]:
            commands.append("")
        else:
            commands[-1] += piece[0]
    return commands


def _without_comment(line: str, quote: str) -> tuple[str, str]:
    """Return a line without its comment, and the quotation mark that is open at its end; `quote`: at its beginning."""
    index = 0
    while index < len(line):
        letter = line[index]
        if letter == "\\" and quote != "'":
            index += 1  # the letter behind it is no mark
        elif quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        elif letter == "#" and (not index or line[index - 1] in " \t;&|("):  # within a word # is a plain letter
            return line[:index], ""
        index += 1
    return line, quote


def _words_of_command(line: str, variables: dict[str, str], location: str) -> list[str]:
    """Split a line into words, with variables replaced and arithmetic computed; what only a shell knows is _UNKNOWN.
    With N=4 among `variables`: `--steps=$((16 / $N)) '$x'` -> ["--steps=4", "$x"].
    """

    def quoted(match: "re.Match[str]") -> str:
        """Return a text in single quotes with placeholders for $ and `, which are plain letters there."""
        return match[0].replace("$", _QUOTED).replace("`", _QUOTED_BACKTICK)

    def value(match: "re.Match[str]") -> str:
        """Return a variable's value, its default in the script, or a placeholder for an unknown one."""
        name = match[1] or match[3]
        default = match[2]  # of ${NAME:-DEFAULT}
        return variables.get(name, default if default is not None else f"{_UNKNOWN}{name}{_UNKNOWN}")

    def computed(match: "re.Match[str]") -> str:
        """Return the result of an arithmetic substitution of two numbers, _UNKNOWN for any other."""
        text = _VARIABLE.sub(value, match[0])
        if text.startswith("$(("):  # where names need no $
            text = re.sub(r"\b[A-Za-z_]\w*\b", lambda name: variables.get(name[0], name[0]), text)
        terms = _ARITHMETIC.fullmatch(text)
        if terms is None or (terms[2] in "/%" and not int(terms[3])):  # division by 0
            return _UNKNOWN
        return str(_OPERATORS[terms[2]](int(terms[1]), int(terms[3])))

    plain = re.sub(r"'[^']*'", quoted, line).replace("\\$", _QUOTED)
    plain = _SUBSTITUTION.sub(computed, plain)
    try:
        words = shlex.split(_VARIABLE.sub(value, plain))
    except ValueError as error:
        raise ConfigError("{place}: a quote is not closed ({reason}).", place=location, reason=error) from error
    return [word.replace(_QUOTED, "$").replace(_QUOTED_BACKTICK, "`") for word in words]


def _parse_command(words: list[str], program_index: int, line: int, variables: dict[str, str], shown: str) -> Command:
    """Parse a command whose program is `words[program_index]`: launcher options before it, arguments behind it. `line`:
    its number; `variables`: those of the script; `shown`: the script's name in messages.
    """
    launcher, program, arguments = words[:program_index], words[program_index], words[program_index + 1 :]
    # Arguments end at a redirection such as 2>&1, unless it comes first: then they follow it.
    redirection = next((index for index, word in enumerate(arguments) if re.match(r"[\d&]?>", word)), 0)
    arguments = arguments[:redirection] if redirection else arguments
    values = _parse_arguments(arguments, program, line, shown)
    options = _launcher_options(launcher, program)
    accelerate: dict[str, str] = {}
    if any(word.rpartition("/")[2] == "accelerate" for word in launcher):
        accelerate = {name[2:]: "" if _UNKNOWN in value else value for name, value in options.items()}
    world_size = _world_size(launcher, options, variables)
    return Command(values, line, world_size, _script_of(program, arguments), accelerate)


def _script_of(program: str, arguments: Sequence[str]) -> str:
    """Return `Command.script` of a program and its arguments: of `trl sft` sft, of `swift sft` and
    .../swift/cli/sft.py "swift sft", of any other program its name without .py.
    """
    name = program.rpartition("/")[2].removesuffix(".py")
    if name == "trl" and arguments:
        return arguments[0]
    if name == "swift" and arguments:
        return f"swift {arguments[0]}"
    is_swift = program.endswith(("swift/cli/sft.py", "swift/cli/pt.py", "swift/cli/rlhf.py"))
    return f"swift {name}" if is_swift else name


def _launcher_options(launcher: Sequence[str], program: str) -> dict[str, str]:
    """Return the options of a launcher's words, which `program` follows: --nproc-per-node 8 and -nproc_per_node=8 ->
    {"--nproc_per_node": "8"}; "" for an option without a value.
    """
    options: dict[str, str] = {}
    for word, after in zip(launcher, [*launcher[1:], program], strict=False):
        name, equals, value = word.partition("=")
        if not name.startswith("-"):
            continue
        if not equals:
            is_alone = after.startswith("-") or after == program
            value = "" if is_alone else after
        options["--" + name.lstrip("-").replace("-", "_")] = value
    return options


def _parse_arguments(words: Sequence[str], program: str, line: int, shown: str) -> dict[str, Any]:
    """Return a training command's arguments, as `Command.values`: `--a 1 --b --c x y` -> {"a": "1", "b": True, "c":
    ["x", "y"]}. ConfigError for one that is given twice, or whose value is not in the file.
    """
    values: dict[str, Any] = {}
    name = ""  # of the option whose values follow
    for word in words:
        if _UNKNOWN in word:
            raise _unknown_value_error(word, name, program, line, shown)
        if re.match(r"--[A-Za-z]", word):
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            if name in values:
                raise ConfigError("{file}:{line}: --{name} is given twice.", file=shown, line=line, name=name)
            values[name] = value if equals else True
        elif name:
            previous = values[name]
            earlier = previous if isinstance(previous, list) else [previous]
            values[name] = word if previous is True else [*earlier, word]
    return values


def _unknown_value_error(word: str, option: str, program: str, line: int, shown: str) -> ConfigError:
    """Return the error for a word with a variable that the script does not set, or with what a command would print.
    `option`: the option, without dashes, whose value it is; "" for an argument without one.
    """
    variable = re.search(rf"{_UNKNOWN}(\w+){_UNKNOWN}", word)
    what = f"${variable[1]}" if variable else "$(…)"
    if not option:
        return ConfigError(
            "{file}:{line}: the argument {what} of {program} is not in the file: nothing is executed here, and "
            "the environment is not read. Write its value.",
            file=shown,
            line=line,
            what=what,
            program=program,
        )
    return ConfigError(
        "{file}:{line}: the value of {option} is not in the file ({what}): nothing is executed here, and "
        "the environment is not read. Write the value itself.",
        file=shown,
        line=line,
        option=f"--{option}",
        what=what,
    )


def _world_size(launcher: list[str], options: dict[str, str], variables: dict[str, str]) -> int | None:
    """Return the number of ranks that a command starts on all nodes together, None if the file does not say it.
    `launcher`: the words before the program, `options` of these: name with dashes -> value; `variables`: the script's.
    """
    if not launcher and "NPROC_PER_NODE" in variables:  # ms-swift starts torchrun by it
        return _product([variables["NPROC_PER_NODE"], variables.get("NNODES", "1")])
    if not launcher:  # `trl` starts accelerate itself
        return None
    if {"--hostfile", "--include", "--exclude"} & options.keys():  # of DeepSpeed's: what the hostfile says
        return None
    if ranks := [options[name] for name in _RANKS if name in options]:
        # accelerate's number, --num_processes, is that of all nodes; those of the others are of one.
        nodes = [options[name] for name in _NODES if name in options and "--num_processes" not in options]
        return _product([ranks[0], *nodes[:1]])
    if not launcher[0].rpartition("/")[2].startswith("python"):  # a launcher that takes all GPUs, however many
        return None
    # `python` alone: the Trainer's one process gives each of these GPUs a micro-batch (DataParallel), as to a rank.
    devices = variables.get("CUDA_VISIBLE_DEVICES", "0")
    return len([device for device in devices.split(",") if device.strip()]) or 1


def _product(counts: Sequence[str]) -> int | None:
    """Return the product of texts that are whole numbers above 0, None if one of them is not."""
    return math.prod(map(int, counts)) if all(text.isdecimal() and int(text) for text in counts) else None


FACTORY_NAME, CHATGLM_NAME, HF_NAME = "LLaMA-Factory", "ChatGLM", "TrainingArguments"
SWIFT_NAME, AXOLOTL_NAME = "ms-swift", "axolotl"
GLM_DEMO_NAME, FASTCHAT_NAME, FIREFLY_NAME = "ChatGLM3 and GLM-4", "FastChat and Qwen", "Firefly"
_TABLES = {
    HF_NAME: "hf",
    CHATGLM_NAME: "chatglm",
    GLM_DEMO_NAME: "glm_demo",
    FACTORY_NAME: "factory",
    SWIFT_NAME: "swift",
    AXOLOTL_NAME: "axolotl",
    FASTCHAT_NAME: "fastchat",
    FIREFLY_NAME: "firefly",
}
"""Of programs that know as many keys of a config, the first is its owner."""
_SHOWN_KEYS = 5
_CONFIG_OPTIONS = ("config", "train_args_file")
_DEEPSPEED = ("zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size")
_SUFFIXES = (".yaml", ".yml", ".json", ".sh", ".bash")


def read_all(paths: list[str], world_size: int | None) -> tuple[ForeignConfig, str]:
    """Return the one config among some files, and the path of the DeepSpeed JSON among them or ""; a ConfigError if
    files are unknown, none or too many. `world_size` None takes the command's number of ranks.
    """
    path_configs = [(path, _read_config(Path(path))) for path in paths]
    configs = [config for _, config in path_configs if config]
    jsons = [path for path, config in path_configs if not config]
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
    """Read a file: a config, or a script with a training command; None for a DeepSpeed JSON, ConfigError for others."""
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
    command: Command | None = None
    if path.suffix.lower() in (".sh", ".bash"):
        command = _read_script(text, path)
        values, lines = command.values, dict.fromkeys(command.values, command.line)
    elif path.suffix.lower() == ".json":
        values = _json_object(text, path)
        if any(name in values for name in _DEEPSPEED):
            return None
    else:
        document = files.parse(text, str(path))
        values, lines = document.values, document.lines
    if not values:
        raise ConfigError("{file} is empty: there is nothing to take over.", file=path)
    values, spelled = _without_sections(values)
    script = command.script if command else ""
    if script.startswith("swift "):
        program = SWIFT_NAME
    elif script in names_of("trl"):
        program = HF_NAME
    else:  # no command, or one that does not say whose it is
        program = _owner_of(values, path, script)
    if program == HF_NAME and not script and path.absolute().parent.name in names_of("trl"):
        script = path.absolute().parent.name  # as in recipes/zephyr-7b/dpo/config.yaml
    keys = keys_of(_TABLES[program])
    values_by_key, aliases = _values_by_key(values, keys)
    return ForeignConfig(
        program=program,
        keys=keys,
        shown=str(path),
        folder=command.config.parent if command and command.config else path.parent,
        values=values_by_key,
        lines=lines,
        spelled=spelled | aliases,
        world_size=command.world_size if command else None,
        accelerate=command.accelerate if command else {},
        # Of the Trainers' configs this key is in RewardConfig alone, null where it is not set.
        script="reward" if "center_rewards_coefficient" in values else script,
    )


def _values_by_key(values: dict[str, Any], keys: Mapping[str, Key]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return a config's values, without nulls, by their names in `keys`: a program's own name for one of the Trainer's
    keys is read as that, and --no_NAME as NAME = false, unless a key is really called no_NAME. Also return the
    Trainer's name -> the program's own where the former was taken.
    """
    values_by_key, spelled = dict[str, Any](), dict[str, str]()
    for name, value in ((str(name), value) for name, value in values.items() if value is not None):
        bare = name.removeprefix("no_")
        if name in keys and keys[name].same_as:
            values_by_key[keys[name].same_as] = value
            spelled[keys[name].same_as] = name
        elif bare != name and name not in keys and bare in keys:
            values_by_key[bare] = False
        else:
            values_by_key[name] = value
    return values_by_key, spelled


def _read_script(text: str, path: Path) -> Command:
    """Return a script's training command, completed by what the files say that it names: a config, one of accelerate.
    DeepSpeed's own options (--deepspeed --deepspeed_config FILE) become the Trainer's (--deepspeed FILE).
    """
    command = read_command(text, str(path))
    values, accelerate, world_size = command.values, command.accelerate, command.world_size
    # deepspeed.add_config_arguments: a switch and a file; the Trainer's --deepspeed is the file.
    if values.get("deepspeed") is True and isinstance(values.get("deepspeed_config"), str):
        values["deepspeed"] = values.pop("deepspeed_config")
    _check_values(values, path, command.line)
    config = None
    if option := next((name for name in _CONFIG_OPTIONS if str(values.get(name)).endswith(_CONFIGS)), ""):
        config = _beside(path, values.pop(option))
        values = files.read(config).values | values  # the command's arguments beat it
    if "config_file" in accelerate and os.path.isfile(_beside(path, accelerate["config_file"])):
        settings = _accelerate_settings(_beside(path, accelerate.pop("config_file")))
        accelerate = settings | accelerate  # options beat the file
        world_size = world_size or _product([settings.get("num_processes", "")])
    return command._replace(values=values, accelerate=accelerate, world_size=world_size, config=config)


def _beside(path: Path, named: str) -> Path:
    """Return the path of a file that another one names: next to it if there is one, else as named."""
    return path.parent / named if os.path.isfile(path.parent / named) else Path(named)


_SECTIONS = ("data_config", "training_args", "peft_config")


def _without_sections(values: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the values of a config of ChatGLM3's or GLM-4's demo without its sections, and key -> SECTION.KEY, as it
    is spelled there; the values of other configs as they are, and {}.
    """
    if not all(isinstance(values.get(name), dict) for name in _SECTIONS[:2]):
        return values, {}
    flat, spelled = {name: value for name, value in values.items() if name not in _SECTIONS}, dict[str, str]()
    for section in _SECTIONS:
        if isinstance(entries := values.get(section), dict):
            flat |= entries
            spelled |= {name: f"{section}.{name}" for name in entries}
    return flat, spelled


def _accelerate_settings(path: Path) -> dict[str, str]:
    """Return what a config of accelerate says, as options of `accelerate launch`. It has sections for DeepSpeed and
    FSDP, of which the one counts that distributed_type names.
    """
    values = files.read(path).values
    inner: dict[str, Any] = {}
    kind = str(values.get("distributed_type")).upper()
    if kind == "DEEPSPEED":
        inner = {"use_deepspeed": "", **(values.get("deepspeed_config") or {})}
    elif kind == "FSDP":
        inner = {"use_fsdp": "", **(values.get("fsdp_config") or {})}
    settings = {**{name: values.get(name) for name in ("num_processes", "mixed_precision")}, **inner}
    return {name: str(value) for name, value in settings.items() if value is not None}


def _check_values(values: dict[str, Any], path: Path, line: int) -> None:
    """Raise ConfigError for an option of a command that lacks its value."""
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


def _check_translatable(values: dict[str, Any], path: Path, script: str) -> None:
    """Raise ConfigError for what would pass for a training config, but is another kind of training that has no
    counterpart here (`refused` in program_keys.yaml): it has that kind's script, or two of its keys.
    """
    for what, signs in names_of("refused").items():
        seen = [script] if script in signs else [name for name in values if name in signs]
        if script in signs or len(seen) > 1:
            keys_seen = ", ".join(seen[:_SHOWN_KEYS])
            raise ConfigError(
                "{place}: {what} (seen: {keys}).", place=path, what=sentence(f"refused_{what}"), keys=keys_seen
            )


def _owner_of(values: dict[str, Any], path: Path, script: str) -> str:
    """Return the program whose config has these keys: the one that knows most of them, the Trainer if as many as others
    do. ConfigError if that is less than half of them, if none of these sets one of ours, or by `_check_translatable`.
    """
    _check_translatable(values, path, script)
    keys_by_program = {name: keys_of(table) for name, table in _TABLES.items()}
    counts = {name: len(values.keys() & keys.keys()) for name, keys in keys_by_program.items()}
    best = max(counts, key=lambda name: counts[name])  # of equal ones the first, see _TABLES
    keys = keys_by_program[best]
    unknown = [name for name in values if name not in keys]
    sets_ours = any(keys[name].to for name in values.keys() & keys.keys() - {"model_name_or_path"})
    if sets_ours and counts[best] >= len(unknown):
        return best
    raise ConfigError(
        "{file}: this is no training config of {programs}, as far as its keys say: {count} of {all} are known to one "
        "of them{unknown}.",
        file=path,
        programs=", ".join(_TABLES),
        count=counts[best],
        all=len(values),
        unknown=tr(", and not {keys}", keys=", ".join(map(str, unknown[:_SHOWN_KEYS]))) if unknown else "",
    )
