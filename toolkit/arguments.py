"""From a command's arguments to a checked config; the same for every command."""

import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path

from toolkit.config import mesh, rules
from toolkit.config.files import known_recipes, language_of
from toolkit.config.load import LoadedConfig, load
from toolkit.config.validate import field_type
from toolkit.engine.ds_config import OWNED, build_ds_config
from toolkit.messages import (
    ConfigError,
    Problems,
    choose_language,
    did_you_mean,
    joined,
    nearest,
    raise_all,
    set_language,
    shortlist,
    tr,
)

_MAX_DIGITS = 18
"""Python refuses to read thousands."""
_ALONE = r"\w[\w./-]*|[./~][\w./-]+"
"""A word without =: a recipe's name or path."""


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
    options: Sequence[str] = (),
    problems: Problems | None = None,
) -> Arguments:
    """Compose the config, translate a DeepSpeed JSON if one is given, choose the language.
    `words` follow the command's name; `names` and `flags` are the command's own `name=value` and `--flag` arguments, of
    which `world_size=N` beats `world_size`. `options` were taken out of `words`: a misspelt option may mean one.
    Without `problems` wrong keys and values, and what is wrong with the JSON, are raised as a ConfigError.
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

            wrong.append(unknown_option(word, following, names, [*flags, *options, "--config-dir DIR"], keys_meant))
        else:
            try:
                overrides.append(named_recipe(word, rest[0] if rest else ""))
            except ConfigError as error:
                wrong.append(error)
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


def named_recipe(word: str, following: str = "") -> str:
    """Return an argument, `recipe=WORD` for a word that stands alone: every command takes its recipe in both forms.

    Raises:
        ConfigError: the word is a key whose `=` is missing, or there are spaces around its `=`; `following` is the
            next word, its value perhaps.
    """
    is_file = "=" not in word and word.endswith((".yaml", ".yml"))
    if not is_file and word not in known_recipes():
        _check_equals(word, following)
    return f"recipe={word}" if is_file or re.fullmatch(_ALONE, word) else word


def _check_equals(word: str, following: str) -> None:
    """Raise a ConfigError for a key without `=`, and for spaces around `=`."""
    has_value = bool(following) and "=" not in following and not following.startswith("--")
    if following.startswith("=") or (word.endswith("=") and re.match(r"[./~]?/", following) and has_value):
        raise ConfigError("'{words}': write key=value without spaces around the =.", words=f"{word} {following}")
    if "=" in word or os.sep in word:
        return
    from toolkit.config.suggest import foreign_names, keys_meant  # its tables are read in errors alone

    is_key = field_type(word) is not None or word in foreign_names()
    if keys := keys_meant(word) if is_key or ("." in word and not nearest(word, known_recipes())) else ():
        written = tr(" or ").join(f"{key}={following if has_value else 'VALUE'}" for key in keys)
        raise ConfigError("'{word}' has no =. Write {words}", word=word, words=written)


def unknown_option(
    word: str,
    following: str,
    names: Sequence[str],
    options: Sequence[str],
    meant: Callable[[str], Sequence[str]] = lambda _: (),
) -> ConfigError:
    """Return the error about `--name value`, or `--name=value`, with the option or the `key=value` to write.
    `names`: the command's own `name=value` arguments; `options`: its options; `meant` gives the keys that a name means.
    """
    from toolkit.launch.deepspeed import OPTIONS, OTHER_NAMES  # read in errors alone

    name, _, value = word.lstrip("-").partition("=")
    name, value = name.replace("-", "_"), value or following
    of_launcher = OTHER_NAMES.get(name, f"--{name}")
    keys = [name] if name in names else [] if of_launcher in options else meant(name)
    spelled = {re.sub(r"\W.*", "", option.lstrip("-").replace("-", "_")): option for option in (*options, "--help")}
    # The most similar of options, own arguments and keys: --explian is --explain, not plan=.
    likeliest = nearest(of_launcher.lstrip("-"), [*(key.rpartition(".")[2] for key in keys), *names, *spelled]) or ""
    if likeliest in spelled and not spelled[likeliest].endswith("="):
        advice = tr("Did you mean '{name}'?", name=spelled[likeliest])
    elif keys := [likeliest] if likeliest in names else keys:
        advice = tr("Write {words}", words=tr(" or ").join(f"{key}={value or 'VALUE'}" for key in keys))
    elif of_launcher in OPTIONS:
        advice = tr("The launcher has it: toolkit launch {option} …", option=f"{of_launcher} {value}".strip())
    else:
        advice = tr("Known here: {keys}.", keys=", ".join(options))
    return ConfigError(joined(tr("unknown option {word}.", word=word), advice))


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
        if word in names:
            raise ConfigError("'{word}' has no =. Write {words}", word=word, words=f"{word}={following or 'VALUE'}")
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
