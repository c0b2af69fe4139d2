"""Reads the overrides of a config: the recipe that is chosen, groups and keys, with the short forms of some values."""

import os
import re
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from toolkit.config import data_forms, files
from toolkit.config.dotted_keys import merge
from toolkit.config.validate import TreeReader, field_type, unknown_key
from toolkit.messages import ConfigError, Problems, did_you_mean, joined, shortlist, tr

_MULTIPLE_CHOICE = ("track",)
"""Groups that allow several choices: track=[tensorboard,wandb]."""
_MAX_SHOWN_CHARS = 200
"""Characters of an argument that a message quotes."""
Groups = dict[str, dict[str, Path]]
"""Group -> its choices -> their files."""


def parse_word(word: str) -> Override:
    """Return Hydra's reading of an argument, `key=value`; ConfigError unless it sets one key to one value."""
    # After each letter: how many brackets are open.
    depths = accumulate({"[": 1, "{": 1, "]": -1, "}": -1}.get(letter, 0) for letter in word)
    if max(depths, default=0) > files.DEEPEST_NESTING:
        limit, shown = files.DEEPEST_NESTING, word[:_MAX_SHOWN_CHARS]
        raise ConfigError("command line: '{word}' nests deeper than {limit} levels.", word=shown, limit=limit)
    try:
        override = OverridesParser.create().parse_override(quote_text(word))
        if override.package is not None:  # key@package=value
            raise HydraException("no packages")
    except (HydraException, RecursionError, ValueError) as error:  # ValueError: a number of thousands of digits
        from toolkit.config.suggest import unreadable  # read in errors alone

        raise unreadable(word[:_MAX_SHOWN_CHARS]) from error
    key = override.key_or_group
    if key == "hydra" or key.startswith("hydra."):
        raise ConfigError("command line: '{word}': Hydra's own settings cannot be changed here.", word=word)
    if override.is_delete():
        raise ConfigError("command line: '{word}': keys cannot be removed; set a value instead.", word=word)
    if override.is_sweep_override():
        raise ConfigError(
            "command line: '{word}' names several values; one run takes one. A list is '{list}]'.",
            word=word,
            list=word.replace("=", "=[", 1),
        )
    return override


def quote_text(word: str) -> str:
    """Return an argument with non-ASCII texts in its value quoted, as Hydra needs: data=[数据] as data=['数据']."""
    key, equals, value = word.partition("=")
    if value.isascii() or re.search(r"""['"\\]""", value):
        return word

    def quote(match: re.Match[str]) -> str:
        return match[0] if match[0].isascii() else f"'{match[0].rstrip()}'"

    return key + equals + re.sub(r"[^\s\[\]{}(),:][^\[\]{}(),:]*", quote, value)  # each stretch without punctuation


def choose_recipe(parsed: list[Override]) -> tuple[str, Path]:
    """Return the name and the file of the recipe that the arguments choose; ConfigError unless there is exactly one."""
    recipes = files.known_recipes()
    typed = [str(override.value()) for override in parsed if override.key_or_group == "recipe"]
    name = typed[-1] if typed else ""
    # The quickstart first: it runs anywhere.
    known_names = sorted(recipes, key=lambda known: (known != "quickstart", known))
    listing = tr("Known: {recipes}.", recipes=shortlist(known_names, "toolkit recipes", like=name))
    if not typed:
        how = tr(
            "no recipe is chosen: add recipe=NAME or PATH.yaml. recipe=lora trains any model; `toolkit new` writes one."
        )
        raise ConfigError(joined(how, listing))
    if len(set(typed)) > 1:
        raise ConfigError(
            "command line: several recipes, {names}: give one. A value with spaces needs quotes: data='my chat.jsonl'.",
            names=", ".join(dict.fromkeys(typed)),
        )
    is_yaml = name.endswith((".yaml", ".yml"))
    if os.path.exists(name) and name not in recipes and not is_yaml:
        from toolkit.config.suggest import no_recipe  # read in errors alone

        raise no_recipe(Path(name))
    if is_yaml or os.sep in name:
        path = Path(name)
        if not os.path.isfile(path):
            raise ConfigError(joined(tr("command line: there is no recipe file {path}.", path=name), listing))
        return path.stem, path.resolve()
    if name not in recipes:
        sentence = tr("command line: unknown recipe '{name}'.", name=name)
        raise ConfigError(joined(sentence, did_you_mean(name, recipes), listing))
    return name, recipes[name]


@dataclass(slots=True)
class CommandLine:
    """Groups and keys that the command line sets."""

    choices: dict[str, Any] = field(default_factory=dict)
    """Group -> its choice, or a list of choices."""
    values: list[tuple[str, Any]] = field(default_factory=list)
    """(key or section, value) in their order."""
    keys: set[str] = field(default_factory=set)
    """Keys that are set, those in sections too."""
    source: dict[str, Any] = field(default_factory=dict)
    """Keys of a config's only source that are set without `data.sources`, such as data.path: name -> value."""

    def take(self, override: Override, groups: Groups, problems: Problems) -> None:
        """Check one argument and add it: a short form (data=FILE, zero=3), the choice of a group, a key of the only
        source or any other key, tried in this order. Wrong parts go to `problems`; ConfigError if all of it is wrong,
        or if it and an earlier one both name data.
        """
        key, value, location = override.key_or_group, override.value(), tr("command line")
        typed = str(override.input_line).partition("=")[2].strip()
        if isinstance(value, list | dict):
            from toolkit.config.typed_texts import as_typed

            value = as_typed(key, value, typed)
        if key == "data" and isinstance(value, dict):
            data_forms.expand(value, location)
            source_names = [name for name in data_forms.SOURCE_KEYS if name in value]
            for name in source_names:
                self._take_source_key(f"data.{name}", value.pop(name), location, problems)
            if source_names and not value:  # nothing else was in it
                return
        # Short forms: data=chat.jsonl, data.sources=[a,b], data.validation=500, zero=3.
        if key == "data.validation" and (split := data_forms.validation_split(value, location)):
            self.values += [(f"data.{name}", setting) for name, setting in split.items()]
            self.keys.update(f"data.{name}" for name in split)
            return
        if key == "data":  # a name alone, data=examples, is a choice of the group
            is_list = isinstance(value, list) and all(isinstance(item, str | dict) for item in value)
            if is_list or (data_forms.is_path(value) and value not in groups["data"]):
                key = "data.sources"
        is_source_list = key in ("data.sources", "data.validation")
        value = data_forms.as_sources(value) if is_source_list else zero_stage_choice(key, value)
        name = str(value) if isinstance(value, (int, float)) else value  # Hydra has made a number of a name of digits
        if is_choice(key, name, groups, location):
            self.choices[key] = value
            return
        # Of a number or a boolean what was typed, where the schema wants a text: 1e3, not 1000.0.
        is_converted = isinstance(value, (bool, int, float))
        is_text_of_source = data_forms.SOURCE_KEYS.get(key.removeprefix("data.")) is str
        source_value = typed if is_converted and is_text_of_source else value
        if self._take_source_key(key, source_value, location, problems):
            return
        kind = field_type(key)
        if kind is None or "_target_" in key.split("."):
            raise unknown_key(key, partial(same_location, location))
        if is_converted and (kind is str or key.startswith("launch.env.")):
            value = typed
        reader = TreeReader(partial(same_location, location), problems)
        is_right, _ = reader.read(value, kind, key)
        if is_right:
            self.values.append((key, value))
            self.keys.update(reader.leaves)
            self._check_one_source(location)

    def _check_one_source(self, location: str) -> None:
        """Raise ConfigError if both the only source and `data.sources` name data."""
        has_list = any(
            key == "data.sources" or (key == "data" and isinstance(value, dict) and "sources" in value)
            for key, value in self.values
        )
        if has_list and (names := [name for name in ("path", "hub") if name in self.source]):
            raise data_forms.two_sources(names[0], location)

    def _take_source_key(self, key: str, value: Any, location: str, problems: Problems) -> bool:
        """Add a key of the only source to `source`: data.path, columns or data.columns.prompt, `columns` with or
        without `data.` before it; return False, and do nothing, if `key` is no such key.
        """
        whole_key = f"data.{key}" if key.partition(".")[0] == "columns" else key
        section, _, rest = whole_key.partition(".")
        name, *fields = rest.split(".")
        most_fields = 1 if name == "columns" else 0  # data.columns.prompt
        if section != "data" or name not in data_forms.SOURCE_KEYS or len(fields) > most_fields:
            return False
        setting = {name: {fields[0]: value} if fields else value}
        merge(self.source, data_forms.read_source(setting, partial(same_location, location), problems))
        self.keys.add("data.sources")
        self._check_one_source(location)
        return True


def same_location(location: str, path: str) -> str:
    """Return `location` for any key: `partial(same_location, "command line")` is the `Locator` of an argument."""
    return location


def zero_stage_choice(group: str, value: Any) -> Any:
    """Return the choice of a group that a value stands for: `zero=3` is `zero=stage3`."""
    return f"stage{value}" if group == "zero" and isinstance(value, int) and not isinstance(value, bool) else value


def is_choice(group: str, value: Any, groups: Groups, location: str) -> bool:
    """Return whether `group=value` chooses a file of a group, and no key; ConfigError for an unknown name of a file."""
    names = value if isinstance(value, list) and group in _MULTIPLE_CHOICE else [value]
    if group not in groups or not all(isinstance(name, str) for name in names):
        return False
    for name in names:
        if name not in groups[group]:
            from toolkit.config.suggest import unknown_choice  # its tables are read in errors alone

            raise unknown_choice(group, name, groups, location)
    return True
