"""Files of other programs: which program's they are, and what they say."""

import json
from pathlib import Path
from typing import Any

from toolkit.config import files
from toolkit.config.suggest import did_you_mean
from toolkit.errors import ConfigError
from toolkit.messages import joined, tr
from toolkit.translate.given import Given
from toolkit.translate.key import Key, keys_of
from toolkit.translate.shell import read_command

FACTORY_NAME, CHATGLM_NAME, HF_NAME = "LLaMA-Factory", "ChatGLM", "TrainingArguments"
HF = keys_of("hf")
PROGRAMS: dict[str, dict[str, Key]] = {CHATGLM_NAME: keys_of("chatglm"), FACTORY_NAME: keys_of("factory"), HF_NAME: HF}
_DEEPSPEED = ("zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size")
_SUFFIXES = (".yaml", ".yml", ".json", ".sh", ".bash")


def read_all(paths: list[str], world_size: int | None) -> tuple[Given, str]:
    """Read a config, and a DeepSpeed JSON that is given beside it.

    Args:
        paths: one or two files.
        world_size: ranks that the config is started on; None takes what the command says.

    Returns:
        The config, and the path of the DeepSpeed JSON, "" without one.

    Raises:
        ConfigError: a file that cannot be read or is of no known kind; two configs, or none.
    """
    configs: list[Given] = []
    jsons: list[str] = []
    for path in paths:
        found = _read(Path(path))
        if found is None:
            jsons.append(path)
        else:
            configs.append(found)
    if not configs:
        raise ConfigError(
            tr(
                "{files}: this is a DeepSpeed JSON alone. Give deepspeed_json=FILE to any recipe, or the training "
                "arguments as well.",
                files=", ".join(paths),
            )
        )
    if len(configs) > 1 or len(jsons) > 1:
        raise ConfigError(tr("{files}: give one config, and one DeepSpeed JSON if it has one.", files=", ".join(paths)))
    [given] = configs
    given.world_size = world_size or given.world_size
    return given, jsons[0] if jsons else ""


def _read(path: Path) -> Given | None:
    """Read one file; None for a DeepSpeed JSON."""
    if path.suffix.lower() not in _SUFFIXES:
        raise ConfigError(
            tr(
                "{file}: files of this kind are not read. Known are {known}: a LLaMA-Factory or TrainingArguments YAML "
                "or JSON, a DeepSpeed JSON, a shell script with a training command.",
                file=path,
                known=", ".join(_SUFFIXES),
            )
        )
    text = _text(path)
    lines: dict[str, int] = {}
    world_size = None
    if path.suffix.lower() in (".sh", ".bash"):
        command = read_command(text, str(path))
        values, world_size = command.values, command.world_size
        lines = dict.fromkeys(values, command.line)
    elif path.suffix.lower() == ".json":
        values = _json(text, path)
        if any(name in values for name in _DEEPSPEED):
            return None
    else:
        document = files.parse(text, str(path))
        values, lines = document.values, document.lines
    if not values:
        raise ConfigError(tr("{file} is empty: there is nothing to take over.", file=path))
    program = _program(values, path)
    return Given(
        program=program,
        keys=PROGRAMS[program],
        shown=str(path),
        folder=path.parent,
        values={str(name): value for name, value in _positive(values, PROGRAMS[program]).items() if value is not None},
        lines=lines,
        world_size=world_size,
    )


def _text(path: Path) -> str:
    try:
        if path.stat().st_size > files.LARGEST_FILE_BYTES:
            raise ConfigError(tr("{file} is larger than {limit} bytes.", file=path, limit=files.LARGEST_FILE_BYTES))
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(tr("cannot read {file}: {reason}", file=path, reason=error)) from error


def _json(text: str, path: Path) -> dict[str, Any]:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        for name, _ in pairs:
            if [other for other, _ in pairs].count(name) > 1:
                raise ConfigError(tr("{file}: the key '{key}' stands twice.", file=path, key=name))
        return dict(pairs)

    try:
        values = json.loads(text, object_pairs_hook=once)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ConfigError(tr("{file} is no JSON: {reason}", file=path, reason=error)) from error
    if not isinstance(values, dict):
        raise ConfigError(tr("{file} must hold an object, {{...}}.", file=path))
    return values


def _positive(values: dict[str, Any], keys: dict[str, Key]) -> dict[str, Any]:
    """Return the arguments with --no_NAME read as NAME = false."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        bare = str(name).removeprefix("no_")
        off = bare != name and str(name) not in keys and bare in keys
        found[bare if off else name] = False if off else value
    return found


def _program(values: dict[str, Any], path: Path) -> str:
    """Return whose keys these are: whose own ones are most, and the Trainer's where nobody's are."""
    own = {name: len(values.keys() & (keys.keys() - HF.keys())) for name, keys in PROGRAMS.items()}
    best = max(own, key=lambda name: own[name])
    if own[best]:
        return best
    if values.keys() & HF.keys():
        return HF_NAME
    known = {name for keys in PROGRAMS.values() for name in keys}
    first = str(next(iter(values)))
    raise ConfigError(
        joined(
            tr("{file}: none of its keys is known; the first is '{key}'.", file=path, key=first),
            did_you_mean(first, known),
        )
    )
