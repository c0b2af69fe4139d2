"""`toolkit help` of a key, of a group of keys, and where the list of all is. No torch."""

import glob
import re

from toolkit.cli import COMMANDS
from toolkit.config import data_forms, key_texts
from toolkit.config.files import conf_folder
from toolkit.messages import ConfigError, current_language, did_you_mean, joined, listed, shortened, tr
from toolkit.tables import text_table

ALL = ("keys", "key", "config")
"""Words that stand for all keys: `toolkit help keys`, `toolkit help keys report` where a command has the same name."""

_END_OF_BRIEF = re.compile(r"[.;] (?=[A-Z\"\d])|[.。；]$|。")
_LONGEST_BRIEF = 90


def help_of_keys(words: list[str]) -> str:
    """Return the help of the keys or groups that words name, or the list of groups without one.

    Raises:
        ConfigError: there is no such key, with the most similar one.
    """
    return "\n\n".join(map(_help_of, words)) if words else _groups()


def _help_of(word: str) -> str:
    """Return the help of a key or group; ConfigError if there is none of this name."""
    name = _full_name(word.partition("=")[0])
    sections = key_texts.sections()
    keys = {_without_positions(key.name): key for section in sections for key in section.keys}
    # A group, and the groups inside it; the dots are there so that "data" is not the beginning of "dataset".
    in_group = [section for section in sections if f"{_without_positions(section.name)}.".startswith(f"{name}.")]
    named = [keys[name]] if name in keys else []
    if not named and not in_group:  # "lr" alone means optim.lr, and whatever else ends so
        named = [key for dotted, key in keys.items() if dotted.rpartition(".")[2] == name]
    if not named and not in_group:
        raise _unknown(name)
    parts = [*map(_help_of_key, named), *map(_help_of_group, in_group)]
    choices = listed(*(path.stem for path in sorted((conf_folder() / name).glob("*.yaml"))))
    if choices:
        parts.append(tr("Choices of the group: {group}=… of {choices}.", group=name, choices=choices))
    if in_group:
        parts.append(tr("One key in full: toolkit help KEY"))
    return "\n\n".join(parts)


def is_key(word: str) -> bool:
    """Whether a word names a key or a group of keys."""
    from toolkit.config.validate import field_type

    name = _full_name(word)
    return name.removeprefix("data.sources.") in data_forms.SOURCE_KEYS or field_type(name) is not None


def _help_of_group(section: key_texts.Section) -> str:
    """Return what a group of keys is for, and a table of its keys."""
    rows = [(key.name, key.default, _brief(key.meaning)) for key in section.keys]
    table = text_table((tr("key"), tr("default"), tr("meaning")), rows, texts=True)
    return "\n".join([tr("{place}: ", place=section.name) + section.about, *table])


def _help_of_key(key: key_texts.Key) -> str:
    """Return what the page of all keys says of one: its name, and below it meaning, type or choices, and default."""
    kind = key.kind.replace("`", "")
    is_choice = key.kind.startswith("`")  # the page writes choices, and no type, as code
    kind_line = tr("choices: {choices}", choices=kind) if is_choice else tr("type: {type}", type=kind)
    lines = (key.meaning, kind_line, tr("default: {value}", value=key.default))
    return "\n".join([key.name, *(f"  {line}" for line in lines)])


def _brief(meaning: str) -> str:
    """Return the beginning of a text, in one line."""
    longest = _LONGEST_BRIEF // 2 if current_language() == "zh" else _LONGEST_BRIEF  # its characters are twice as wide
    return shortened(_END_OF_BRIEF.split(meaning)[0], longest)


def _groups() -> str:
    """Return all groups, each with its purpose, and where the list of all keys is."""
    top, *sections = key_texts.sections()
    rows = [(section.name, section.about) for section in sections]
    lines = text_table((tr("group"), tr("what it is for")), rows, texts=True)
    lines += ["", tr("Keys outside of groups: {keys}.", keys=listed(*(key.name for key in top.keys)))]
    return "\n".join(
        [*lines, tr("One group or key: toolkit help keys NAME, such as optim or optim.lr. All of them: docs/config.md")]
    )


def _unknown(name: str) -> ConfigError:
    """Return the error for a name that no key has, with the command or the keys that were probably meant."""
    from toolkit.config import suggest

    unknown = tr("no command and no key is called '{name}'.", name=name)
    if "." not in name and not suggest.is_of_others(name) and (command := did_you_mean(name, COMMANDS)):
        return ConfigError(joined(unknown, command))
    if groups := sorted(path.parent.name for path in conf_folder().glob(f"*/{glob.escape(name)}.yaml")):
        return ConfigError(
            "'{name}' is a choice of the group {group}: {group}={name}. About it: toolkit help {group}",
            name=name,
            group=groups[0],
        )
    meant = suggest.keys_meant(name)
    if meant and meant[0].startswith("ds_extra."):
        extra = tr("DeepSpeed has it, but no key here: write it as {key} (toolkit help ds_extra).", key=meant[0])
        return ConfigError(joined(unknown, extra))
    if meant:
        shown = "' / '".join(f"toolkit help {_without_positions(key)}" for key in meant[:3])
        return ConfigError(joined(unknown, tr("Did you mean '{name}'?", name=shown)))
    if reason := suggest.why_there_is_none(name):
        return ConfigError(joined(unknown, tr("There is none here: {says}.", says=reason)))
    return ConfigError(joined(unknown, tr("All groups: toolkit help keys")))


def _full_name(name: str) -> str:
    """Return a key's name in the list of keys: data.columns -> data.sources.columns, ds_extra.comet -> ds_extra."""
    name = _without_positions(name).rstrip(".")
    section, _, leaf = name.partition(".")
    if section == "ds_extra":
        return section
    return f"data.sources.{leaf}" if section == "data" and leaf in data_forms.SOURCE_KEYS else name


def _without_positions(name: str) -> str:
    """Return a dotted name without positions in lists: data.sources[0].path -> data.sources.path."""
    return re.sub(r"\[\w*\]", "", name)
