"""From a command's arguments to a checked config; the same for every command."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from toolkit.config import rules
from toolkit.config.files import known_recipes, language_of
from toolkit.config.load import LoadedConfig, load
from toolkit.config.validate import field_type
from toolkit.engine.ds_config import OWNED, check_ds_config
from toolkit.messages import ConfigError, Problems, raise_all, set_language

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
    """Compose the config, translate a DeepSpeed JSON if one is given, choose the language of messages.
    `words` follow the command's name; `names` and `flags` are the command's own `name=value` and `--flag` arguments, of
    which `world_size=N` beats `world_size`. `options` were taken out of `words`: a misspelt option may mean one. Wrong
    keys and values, and what is wrong with the JSON, go to `problems`, or without it are raised as a ConfigError, as
    words that are no arguments of the command always are.
    """
    errors = Problems() if problems is None else problems
    # Errors of the config itself are in the chosen language, too, so it is found before the config is read.
    languages = [word.partition("=")[2] for word in words if word in ("language=zh", "language=en", "language=")]
    if languages:
        set_language(languages[-1])
    overrides, config_dir, values, own_flags = _separate(words, names, flags, options)
    # Without the quotes of Hydra's grammar: recipe='my run.yaml'.
    recipes = [word.partition("=")[2].strip("'\"") for word in overrides if word.startswith("recipe=")]
    if recipes and not languages and (language := language_of(recipes[-1])):
        set_language(language)
    if "world_size" in values:
        from toolkit.command_line import positive_int

        world_size = positive_int(values, "world_size")
    loaded = load(overrides, config_dir=config_dir, problems=errors)
    if loaded.cfg.language:
        set_language(loaded.cfg.language)
    arguments = Arguments(loaded=loaded, values=values, flags=own_flags, world_size=world_size)
    if loaded.cfg.deepspeed_json:
        from toolkit.engine.ds_import import import_json

        if imported := errors.attempt(import_json, loaded.cfg.deepspeed_json, loaded, world_size):
            arguments.loaded, arguments.notes = imported
    if problems is None:
        errors.raise_all()
    return arguments


def _separate(
    words: Sequence[str], names: Sequence[str], flags: Sequence[str], options: Sequence[str]
) -> tuple[list[str], str, dict[str, str], set[str]]:
    """Return the config's overrides and `--config-dir` ("" without), and a command's own values, by name, and flags.
    ConfigError for other options; the arguments are those of `parse`.
    """
    overrides, config_dir, values, own_flags = list[str](), "", dict[str, str](), set[str]()
    wrong, unknown_options = list[ConfigError](), list[str]()
    unread = list(words)
    while unread:
        word = unread.pop(0)
        name, equals, value = word.partition("=")
        if word in flags:
            own_flags.add(word)
        elif name in ("--config-dir", "-cd"):
            config_dir = value if equals else "".join(unread[:1])
            unread = unread if equals else unread[1:]
        elif equals and name in names:
            values[name] = value
        elif word.startswith("-"):
            # The next word is this option's value unless it has a = or is an option itself; -1 and -.5 are values.
            has_value = bool(unread) and not equals and re.match(r"(?!-[^\d.])[^=]+$", unread[0])
            following = unread.pop(0) if has_value else ""
            from toolkit.command_line import unknown_option
            from toolkit.config.suggest import keys_meant, option_meant  # its tables are read in errors alone

            allowed = [*flags, *options, "--config-dir DIR"]
            wrong.append(unknown_option(word, following, names, allowed, keys_meant, option_meant))
            unknown_options.append(name)
        else:
            try:
                overrides.append(named_recipe(word, unread[0] if unread else "", names))
            except ConfigError as error:
                wrong.append(error)
    if unknown_options:
        from toolkit.config.suggest import whole_command

        wrong += whole_command(unknown_options)
    raise_all(wrong)
    return overrides, config_dir, values, own_flags


def named_recipe(word: str, following: str = "", names: Sequence[str] = ()) -> str:
    """Return an argument, `recipe=WORD` for a word that stands alone: every command takes its recipe in both forms.

    Raises:
        ConfigError: the word is a key whose `=` is missing, there are spaces around its `=`, or it is one of the
            command's own `names` misspelt; `following` is the next word, its value perhaps.
    """
    is_yaml_file = "=" not in word and word.endswith((".yaml", ".yml"))
    is_recipe = is_yaml_file or ("=" not in word and word in known_recipes())
    if not is_recipe:
        _check_equals(word, following, names)
    # An unknown name becomes a recipe too: the error about it lists those that there are.
    return f"recipe={word}" if is_yaml_file or re.fullmatch(_ALONE, word) else word


def _check_equals(word: str, following: str, names: Sequence[str]) -> None:
    """Raise a ConfigError for a key without `=`, spaces around `=`, a misspelt one of `names`; see `named_recipe`."""
    has_value = bool(following) and "=" not in following and not following.startswith("--")
    is_recipe = following in known_recipes() or following.endswith((".yaml", ".yml"))
    # "key= value" has a space after its =, but "run.name= quickstart" is an empty value and a recipe.
    has_space_after = word.endswith("=") and has_value and (not is_recipe or word == "recipe=")
    if following.startswith("=") or has_space_after:
        raise ConfigError("'{words}': write key=value without spaces around the =.", words=f"{word} {following}")
    is_known_key = "=" in word and field_type(word.partition("=")[0])
    if os.sep not in word and not is_known_key:  # a path is a recipe's
        from toolkit.config.suggest import check_word  # its tables are read in errors alone

        check_word(word, following if has_value else "VALUE", names)


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

        # OWNED: DeepSpeed's keys that keys of the config set, so that `ds_extra` must not.
        problems.attempt(check_extra, loaded.cfg.ds_extra, OWNED, loaded.where)
    if not problems.errors:  # of a wrong config no JSON can be made
        problems.attempt(check_ds_config, loaded.cfg, world_size)
