"""A command's own arguments: `name=value`, options, the file that it writes. Imports no Hydra, which takes 0.4 s."""

import math
import re
from collections.abc import Callable, Sequence
from itertools import zip_longest
from pathlib import Path

from toolkit.messages import ConfigError, choose_language, did_you_mean, joined, nearest, shortlist, tr

_MAX_DIGITS = 18
"""Python refuses to read thousands."""


def named_arguments(
    words: Sequence[str], *, required: Sequence[str], optional: Sequence[str], usage: str, bare: str = ""
) -> dict[str, str]:
    """Return the arguments, name -> value, of a command that takes no recipe, without `language=`, which is obeyed.
    ConfigError for one that is unknown, or `required` and missing: then `usage`, an example, is shown. The value of
    `bare`, such as a path, may stand alone: a directory above its name may hold a =, as that of a sweep's run does.
    """
    values: dict[str, str] = {}
    names = [*required, *optional]
    words = choose_language(words)
    for word, following in zip_longest(words, words[1:], fillvalue=""):
        name, equals, value = word.partition("=")
        if word.startswith("-"):
            raise unknown_option(word, following, names, [f"{name}=" for name in names])
        is_named = word in names and word != bare and not Path(word).exists()  # an argument whose = is missing
        if bare and bare not in values and (not equals or "/" in name) and not is_named:
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


def unknown_option(
    word: str,
    following: str,
    names: Sequence[str],
    options: Sequence[str],
    meant: Callable[[str], Sequence[str]] = lambda _: (),
    written: Callable[[str, str], str] = lambda *_: "",
) -> ConfigError:
    """Return the error about a wrong option, `--name value` or `--name=value`, with what to write instead: what
    `written` says for an option of another program, the most similar option or argument of the command, the keys of the
    config that are meant, the launcher's option of that name, or all options; the first that there is.

    Args:
        word: the option; `following` is the next word, perhaps its value.
        names: the command's own `name=value` arguments, and `options` its options.
        meant: returns the keys that a name means.
        written: returns what to write for another program's name and value, "" if a key that is meant takes the value.
    """
    from toolkit.launch.deepspeed import OPTIONS, OTHER_NAMES  # read in errors alone

    name, _, value = word.lstrip("-").partition("=")
    name, value = name.replace("-", "_"), value or following
    of_launcher = OTHER_NAMES.get(name, f"--{name}")  # torchrun's --nproc_per_node is --num_gpus
    if name in names:
        keys: Sequence[str] = [name]
    else:
        keys = [] if of_launcher in options else meant(name)
    # Name -> option as it is typed: config_dir -> "--config-dir DIR".
    spelled = {re.sub(r"\W.*", "", option.lstrip("-").replace("-", "_")): option for option in (*options, "--help")}
    is_own = name in names or of_launcher in (*options, *OPTIONS)
    if advice := "" if is_own else written(name, value):
        return ConfigError(joined(tr("unknown option {word}.", word=word), advice))
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


def positive_int(values: dict[str, str], name: str) -> int | None:
    """Return an argument as a positive integer, None if it was not given; ConfigError if it is none."""
    if name not in values:
        return None
    text = values[name]
    if not _is_whole(text) or int(text) == 0:
        raise ConfigError("{name} = {text} is not a positive whole number.", name=name, text=text[:40])
    return int(text)


def port_number(values: dict[str, str], default: int) -> int:
    """Return the argument `port`, the default if it was not given."""
    port = non_negative_int(values, "port", default)
    if port > 65_535:
        raise ConfigError(tr("port = {port} is none: ports end at 65535.", port=port))
    return port


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
    """Return an argument as a number from 0 to `most`, the default if it was not given; ConfigError if it is none."""
    text = values.get(name, str(default))
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (0 <= value <= most and value < math.inf):
        if most == math.inf:
            raise ConfigError("{name} = {text} is not a number from 0.", name=name, text=text)
        raise ConfigError("{name} = {text} is not a number from 0 to {most}.", name=name, text=text, most=f"{most:g}")
    return value


def one_of(values: dict[str, str], name: str, choices: Sequence[str]) -> str:
    """Return an argument's value, the first of `choices` if it was not given; ConfigError if it is none of them."""
    value = values.get(name, choices[0])
    if value not in choices:
        raise ConfigError(
            "{name} = {value} is none of {known}.", name=name, value=value, known=shortlist(choices, "--help")
        )
    return value


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
