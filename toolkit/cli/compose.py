"""From the words on the command line to a checked config; the same for every command."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from toolkit.config.checks import check, settled
from toolkit.config.files import known_recipes, language_of
from toolkit.config.layout import model_ranks
from toolkit.config.load import Loaded, load
from toolkit.engine.ds_config import OWNED, build_ds_config
from toolkit.engine.ds_keys import check_extra
from toolkit.errors import ConfigError
from toolkit.messages import set_language, tr
from toolkit.problems import Problems

_MOST_DIGITS = 18
"""Python refuses to read thousands."""


@dataclass(kw_only=True, slots=True)
class Composed:
    """A command's arguments and the config."""

    loaded: Loaded
    """The config and where each value comes from."""
    arguments: dict[str, str]
    """The command's own arguments."""
    flags: set[str]
    """The command's own flags, such as --explain."""
    notes: list[str] = field(default_factory=list)
    """What was resolved from a DeepSpeed JSON."""
    world_size: int | None = None
    """Number of ranks; None where unknown."""


def compose(
    words: Sequence[str],
    *,
    world_size: int | None,
    arguments: Sequence[str] = (),
    flags: Sequence[str] = (),
    problems: Problems | None = None,
) -> Composed:
    """Compose the config, translate a DeepSpeed JSON if one is given, choose the language.

    Args:
        words: command line after the command's name.
        world_size: number of ranks; None where unknown; an argument `world_size=N` of the command wins.
        arguments: names of the command's own `name=value` words.
        flags: the command's own `--flags`.
        problems: receives wrong keys and values, and what is wrong with the JSON; None raises them.

    Raises:
        ConfigError: anything wrong with recipe, overrides or JSON.
    """
    found = Problems() if problems is None else problems
    typed = [word.partition("=")[2] for word in words if word in ("language=zh", "language=en")]
    set_language("".join(typed[-1:]))  # errors of the config itself are in the chosen language too
    own, seen, config_dir, overrides = _sort(words, arguments, flags)
    recipes = [word.partition("=")[2].strip("'\"") for word in overrides if word.startswith("recipe=")]
    if recipes and not typed:
        set_language(language_of(recipes[-1]))
    world_size = positive_int(own, "world_size") or world_size
    loaded = load(overrides, config_dir=config_dir, problems=found)
    set_language(loaded.cfg.language)
    composed = Composed(loaded=loaded, arguments=own, flags=seen, world_size=world_size)
    if loaded.cfg.deepspeed_json:
        from toolkit.engine.ds_import import import_json

        translated = found.attempt(import_json, loaded.cfg.deepspeed_json, loaded, world_size)
        if translated:
            composed.loaded, composed.notes = translated
    if problems is None:
        found.raise_all()
    return composed


def compose_checked(
    words: Sequence[str],
    *,
    world_size: int | None,
    arguments: Sequence[str] = (),
    flags: Sequence[str] = (),
    files: bool = True,
    own: bool = False,
    problems: Problems | None = None,
) -> Composed:
    """Compose the config and check it; everything that is wrong is reported at once.

    Args:
        words: as for `compose`; so are `world_size`, `arguments` and `flags`.
        world_size: see there.
        arguments: see there.
        flags: see there.
        files: see `checks.check`; so is `own`.
        own: see there.
        problems: receives the errors; None raises them.

    Raises:
        ConfigError: anything wrong with recipe, overrides, DeepSpeed JSON, or what they say together.
    """
    found = Problems() if problems is None else problems
    composed = compose(words, world_size=world_size, arguments=arguments, flags=flags, problems=found)
    check_composed(composed.loaded, composed.world_size, found, files=files, own=own)
    if problems is None:
        found.raise_all()
    composed.notes += composed.loaded.notices
    return composed


def check_composed(
    loaded: Loaded, world_size: int | None, problems: Problems, *, files: bool = True, own: bool = False
) -> None:
    """Check a config that was composed, and the DeepSpeed JSON that it makes.

    Args:
        loaded: the config.
        world_size: number of ranks; None where unknown.
        problems: what was wrong before; receives the errors.
        files: see `checks.check`; so is `own`.
        own: see there.
    """
    check(loaded, world_size, files=files, own=own, problems=problems)
    problems.attempt(check_extra, loaded.cfg.ds_extra, OWNED, loaded.where)
    if not problems.errors:
        cfg = settled(loaded.cfg)
        problems.attempt(build_ds_config, cfg, world_size or model_ranks(cfg), cfg.train.max_steps or None)


def _sort(
    words: Sequence[str], arguments: Sequence[str], flags: Sequence[str]
) -> tuple[dict[str, str], set[str], str, list[str]]:
    """Split words into the command's arguments, its flags, --config-dir and Hydra overrides."""
    own: dict[str, str] = {}
    seen: set[str] = set()
    config_dir, overrides = "", []
    rest = iter(words)
    for word in rest:
        name, equals, value = word.partition("=")
        if word in flags:
            seen.add(word)
        elif name in ("--config-dir", "-cd"):
            config_dir = value if equals else next(rest, "")
        elif equals and name in arguments:
            own[name] = value
        elif not equals and (name.endswith((".yaml", ".yml")) or name in known_recipes()):
            overrides.append(f"recipe={name}")
        elif word.startswith("-"):
            known = ", ".join([*flags, "--config-dir DIR"])
            raise ConfigError(
                tr(
                    "unknown option {word}. Known here: {known}.",
                    word=word,
                    known=known,
                )
            )
        else:
            overrides.append(word)
    return own, seen, config_dir, overrides


def named_arguments(
    words: Sequence[str], *, required: Sequence[str], optional: Sequence[str], usage: str, bare: str = ""
) -> dict[str, str]:
    """Return the `name=value` words of a command that takes no recipe.

    Args:
        words: command line after the command's name.
        required: names that must be given.
        optional: names that may be given.
        usage: an example, shown where something is missing.
        bare: what a word means that is a value alone, such as a path; "" nothing.

    Raises:
        ConfigError: an unknown word, or a missing one.
    """
    given: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if bare and bare not in given and not equals and not word.startswith("-"):
            given[bare] = word
            continue
        if not equals or name not in (*required, *optional):
            raise ConfigError(
                tr(
                    "unknown argument '{word}'. Known: {known}.",
                    word=word,
                    known=", ".join([*required, *optional]),
                )
            )
        given[name] = value
    for name in required:
        if not given.get(name):
            raise ConfigError(tr("{name} is missing: {usage}", name=name, usage=usage))
    return given


def positive_int(arguments: dict[str, str], name: str) -> int | None:
    """Return an argument as a positive integer, None if it was not given.

    Raises:
        ConfigError: it is something else.
    """
    if name not in arguments:
        return None
    text = arguments[name]
    if not text.isdecimal() or len(text) > _MOST_DIGITS or int(text) == 0:
        raise ConfigError(tr("{name} = {text} is not a positive whole number.", name=name, text=text[:40]))
    return int(text)


def non_negative_int(arguments: dict[str, str], name: str, default: int) -> int:
    """Return an argument as a whole number from 0, the default if it was not given.

    Raises:
        ConfigError: it is something else.
    """
    text = arguments.get(name, str(default))
    if not text.isdecimal() or len(text) > _MOST_DIGITS:
        raise ConfigError(tr("{name} = {text} is not a whole number from 0.", name=name, text=text))
    return int(text)


def number(arguments: dict[str, str], name: str, default: float, most: float = math.inf) -> float:
    """Return an argument as a number from 0 to `most`, the default if it was not given.

    Raises:
        ConfigError: it is something else.
    """
    text = arguments.get(name, str(default))
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


def one_of(arguments: dict[str, str], name: str, known: Sequence[str]) -> str:
    """Return an argument that has a few known values, the first of them if it was not given.

    Raises:
        ConfigError: it is something else.
    """
    value = arguments.get(name, known[0])
    if value not in known:
        raise ConfigError(tr("{name} = {value} is none of {known}.", name=name, value=value, known=", ".join(known)))
    return value
