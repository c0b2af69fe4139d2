"""From a command's arguments to a checked config; the same for every command."""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path

from toolkit.config import mesh, rules
from toolkit.config.files import language_of
from toolkit.config.load import LoadedConfig, load
from toolkit.engine.ds_config import OWNED, build_ds_config
from toolkit.messages import ConfigError, Problems, did_you_mean, joined, raise_all, set_language, shortlist, tr

_MAX_DIGITS = 18
"""Python refuses to read thousands."""


@dataclass(kw_only=True, slots=True)
class Arguments:
    """A command's own arguments, and the config that the others make."""

    loaded: LoadedConfig
    values: dict[str, str]
    """The command's own `name=value` arguments."""
    flags: set[str]
    """The command's own flags, such as --explain."""
    notes: list[str] = field(default_factory=list)
    """What was resolved from a DeepSpeed JSON, and notices of the config."""
    world_size: int | None = None
    """Number of ranks; None if unknown."""


def parse(
    words: Sequence[str],
    *,
    world_size: int | None = None,
    names: Sequence[str] = (),
    flags: Sequence[str] = (),
    problems: Problems | None = None,
) -> Arguments:
    """Compose the config, translate a DeepSpeed JSON if one is given, choose the language.
    `words` follow the command's name; `names` and `flags` are the command's own `name=value` and `--flag` arguments, of
    which `world_size=N` beats `world_size`. Without `problems` wrong keys and values, and what is wrong with the JSON,
    are raised as a ConfigError.
    """
    errors = Problems() if problems is None else problems
    typed = [word.partition("=")[2] for word in words if word in ("language=zh", "language=en", "language=")]
    if typed:
        set_language(typed[-1])  # errors of the config itself are in the chosen language too
    values, given_flags = dict[str, str](), set[str]()
    config_dir, overrides, wrong = "", list[str](), list[ConfigError]()
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if word in flags:
            given_flags.add(word)
        elif name in ("--config-dir", "-cd"):
            config_dir = value if equals else "".join(rest[:1])
            rest = rest if equals else rest[1:]
        elif equals and name in names:
            values[name] = value
        elif word.startswith("-"):
            # The next word is this option's value unless it has a = or is an option itself; -1 and -.5 are none.
            following = rest.pop(0) if rest and not equals and re.match(r"(?!-[^\d.])[^=]+$", rest[0]) else ""
            from toolkit.config.suggest import keys_meant  # its tables are read in errors alone

            wrong.append(unknown_option(word, following, names, [*flags, "--config-dir DIR"], keys_meant))
        else:
            overrides.append(named_recipe(word))
    raise_all(wrong)
    recipes = [word.partition("=")[2].strip("'\"") for word in overrides if word.startswith("recipe=")]
    if recipes and not typed and (language := language_of(recipes[-1])):
        set_language(language)
    world_size = positive_int(values, "world_size") or world_size
    loaded = load(overrides, config_dir=config_dir, problems=errors)
    if loaded.cfg.language:
        set_language(loaded.cfg.language)
    arguments = Arguments(loaded=loaded, values=values, flags=given_flags, world_size=world_size)
    if loaded.cfg.deepspeed_json:
        from toolkit.engine.ds_import import import_json

        if imported := errors.attempt(import_json, loaded.cfg.deepspeed_json, loaded, world_size):
            arguments.loaded, arguments.notes = imported
    if problems is None:
        errors.raise_all()
    return arguments


def named_recipe(word: str) -> str:
    """Return an argument, `recipe=WORD` for a word that stands alone: every command takes its recipe in both forms."""
    is_file = "=" not in word and word.endswith((".yaml", ".yml"))
    return f"recipe={word}" if is_file or re.fullmatch(r"\w[\w./-]*|[./~][\w./-]+", word) else word


def unknown_option(
    word: str,
    following: str,
    names: Sequence[str],
    options: Sequence[str],
    meant: Callable[[str], Sequence[str]] = lambda _: (),
) -> ConfigError:
    """Return the error about `--name value`, or `--name=value`, with the `key=value` to write where one is meant.
    `names`: the command's own `name=value` arguments; `options`: its options; `meant` gives the keys that a name means.
    """
    name, _, value = word.lstrip("-").partition("=")
    name = name.replace("-", "_")
    written = [f"{key}={value or following or 'VALUE'}" for key in ([name] if name in names else meant(name))]
    if not written:
        return ConfigError("unknown option {word}. Known here: {known}.", word=word, known=", ".join(options))
    return ConfigError("unknown option {word}. Write {words}", word=word, words=tr(" or ").join(written))


def parse_checked(
    words: Sequence[str],
    *,
    world_size: int | None = None,
    names: Sequence[str] = (),
    flags: Sequence[str] = (),
    files: bool = True,
    custom: bool = False,
    problems: Problems | None = None,
) -> Arguments:
    """Parse as `parse` does and check the config as `check_parsed` does; every error is reported at once."""
    errors = Problems() if problems is None else problems
    arguments = parse(words, world_size=world_size, names=names, flags=flags, problems=errors)
    check_parsed(arguments.loaded, arguments.world_size, errors, files=files, custom=custom)
    if problems is None:
        errors.raise_all()
    arguments.notes += arguments.loaded.notices
    return arguments


def check_parsed(loaded: LoadedConfig, world_size: int | None, problems: Problems, **which: bool) -> None:
    """Check a config and the DeepSpeed JSON that it makes; `which`: the flags of `check_rules` that leave rules out."""
    rules.check_rules(loaded, world_size, **which, problems=problems)
    if loaded.cfg.ds_extra:
        from toolkit.engine.ds_keys import check_extra

        problems.attempt(check_extra, loaded.cfg.ds_extra, OWNED, loaded.where)
    if not problems.errors:
        cfg = mesh.with_micro_batch(loaded.cfg)
        # Only for what it refuses: the run makes its own once the config is settled (train/trainer.py).
        problems.attempt(build_ds_config, cfg, world_size or mesh.model_ranks(cfg), cfg.train.max_steps or None)


def choose_language(words: Sequence[str]) -> list[str]:
    """Use the language of `language=en|zh`, which every command takes; return the other words."""
    typed = [word.partition("=")[2] for word in words if word.startswith("language=")]
    if typed:
        if typed[-1] not in ("", "en", "zh"):
            raise ConfigError("language = {value} must be en, zh or empty.", value=typed[-1])
        set_language(typed[-1])
    return [word for word in words if not word.startswith("language=")]


def named_arguments(
    words: Sequence[str], *, required: Sequence[str], optional: Sequence[str], usage: str, bare: str = ""
) -> dict[str, str]:
    """Return the `name=value` arguments of a command that takes no recipe, without `language=`, which is obeyed.
    `usage` is an example, shown if a required one is missing; the value of `bare`, such as a path, may stand alone: a
    directory above its name may hold a =, as that of a sweep's run does.
    """
    values: dict[str, str] = {}
    names = [*required, *optional]
    rest = choose_language(words)
    for word, following in zip_longest(rest, rest[1:], fillvalue=""):
        name, equals, value = word.partition("=")
        if word.startswith("-"):
            raise unknown_option(word, following, names, [f"{name}=" for name in names])
        if bare and bare not in values and (not equals or "/" in name):
            values[bare] = word
            continue
        if not equals or name not in names:
            known = shortlist(names, "--help") or tr("none")
            unknown = tr("unknown argument '{word}'. Known: {known}.", word=word, known=known)
            raise ConfigError(joined(unknown, did_you_mean(name, names)))
        values[name] = value
    for name in required:
        if not values.get(name):
            raise ConfigError("{name} is missing: {usage}", name=name, usage=usage)
    return values


def check_output(values: dict[str, str]) -> None:
    """Reject an argument `output=FILE` that names a file which exists."""
    if values.get("output") and Path(values["output"]).exists():
        raise ConfigError("{file} exists already: nothing was written. Name another file.", file=values["output"])


def write_output(values: dict[str, str], text: str) -> None:
    """Write the file of `output=FILE`; an error if it exists or cannot be written."""
    check_output(values)
    try:
        with open(values["output"], "x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError("cannot write {file}: {reason}.", file=values["output"], reason=reason) from error


def positive_int(values: dict[str, str], name: str) -> int | None:
    """Return an argument as a positive integer, None if it was not given."""
    if name not in values:
        return None
    text = values[name]
    if not _is_whole(text) or int(text) == 0:
        raise ConfigError("{name} = {text} is not a positive whole number.", name=name, text=text[:40])
    return int(text)


def non_negative_int(values: dict[str, str], name: str, default: int) -> int:
    """Return an argument as a whole number from 0, the default if it was not given."""
    text = values.get(name, str(default))
    if not _is_whole(text):
        raise ConfigError("{name} = {text} is not a whole number from 0.", name=name, text=text)
    return int(text)


def _is_whole(text: str) -> bool:
    """Whether a text is a whole number from 0, of a size that can be meant."""
    return text.isdecimal() and len(text) <= _MAX_DIGITS


def number(values: dict[str, str], name: str, default: float, most: float = math.inf) -> float:
    """Return an argument as a number from 0 to `most`, the default if it was not given."""
    text = values.get(name, str(default))
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (0 <= value <= most and value < math.inf):
        raise ConfigError(
            tr("{name} = {text} is not a number from 0.", name=name, text=text)
            if most == math.inf
            else tr("{name} = {text} is not a number from 0 to {most}.", name=name, text=text, most=f"{most:g}")
        )
    return value


def one_of(values: dict[str, str], name: str, choices: Sequence[str]) -> str:
    """Return an argument that is one of the known values, the first of them if it was not given."""
    value = values.get(name, choices[0])
    if value not in choices:
        raise ConfigError(
            "{name} = {value} is none of {known}.", name=name, value=value, known=shortlist(choices, "--help")
        )
    return value
