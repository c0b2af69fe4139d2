"""Composes a RunConfig from layers: files of conf/, recipes, a DeepSpeed JSON, and the command line.

Hydra's defaults list determines the files and their order; no other module uses Hydra. `@hydra.main` is not used: it
would run code that a recipe names under `hydra.callbacks`, and rejects the launcher's --local_rank. Each file is
checked against the schema, with its line numbers, before anything is merged.
"""

import dataclasses
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cache, partial
from itertools import accumulate
from pathlib import Path
from typing import Any

from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.default_element import ResultDefault
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import OmegaConf
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException

from toolkit.config import data_forms, dotted_keys, files, objective, schema
from toolkit.config.validate import TreeReader, error_about, field_type, unknown_key
from toolkit.messages import ConfigError, Problems, did_you_mean, filled, joined, shortlist, tr
from toolkit.secrets import hide_all, learn_from

JSON, TYPED = 500, 1000
"""Numbers of the layers of a DeepSpeed JSON and of the command line; recipes are 1, 2, …"""
_CHOSEN_RECIPE = "chosen"
"""Hydra's name for the chosen recipe, whose own name may be invalid in Hydra's grammar, or equal the name of the recipe
that it builds on."""
_MULTIPLE_CHOICE = ("track",)
"""Groups that allow several choices: track=[tensorboard,wandb]."""
_MAX_SHOWN_CHARS = 200
"""Characters of an argument that a message quotes."""

Groups = dict[str, dict[str, Path]]
"""Group -> its choices -> their files."""


@dataclass(kw_only=True, slots=True)
class LoadedConfig:
    """A config and where its values come from."""

    cfg: schema.RunConfig
    where: dict[str, str] = field(default_factory=dict)
    """Dotted key -> "recipes/x.yaml:12", "conf/zero/stage2.yaml:3" or "command line"; absent: the schema's default."""
    explicit: set[str] = field(default_factory=set)
    """Keys that a user chose: set on the command line, in the recipe, in one that it builds on, or in the file of a
    group that the recipe or the command line chose.
    """
    layers: dict[str, int] = field(default_factory=dict)
    """Dotted key or chosen group -> number of the layer that set it: 0 for conf/ and a run's config.yaml, then recipes,
    of which the chosen one is the last, then `JSON` and `TYPED`.
    """
    notices: list[str] = field(default_factory=list)
    """Sentences about the config that a user may want to know, but need not act on."""

    def position(self, key: str) -> str:
        """Return "file:line: " of a key that is set, else ""."""
        location = self.where.get(key, "")
        return tr("{place}: ", place=location) if location else ""

    def location(self, path: str) -> str:
        """Return "file:line" of a key, or of the section or list that it is in; "" if neither is set."""
        while path and path not in self.where:
            path = path[: max(path.rfind("."), path.rfind("["), 0)]
        return self.where.get(path, "")

    def error(self, about_key: str, template: str, /, **values: object) -> ConfigError:
        """Return an error about a key that begins with its position; the template is filled in by `fill`."""
        return self.about(about_key, self.fill(about_key, template, **values))

    def about(self, key: str, sentence: str) -> ConfigError:
        """Return an error about a key: its position, and a sentence that is filled in already."""
        return error_about(self.position(key) + sentence, key)

    def fill(self, about_key: str, template: str, /, **values: object) -> str:
        """Fill in a template: {key} is `about_key`, {value} its value, {zero.stage} the value of another key."""

        def value_of(name: str) -> object:
            if name in values or name == "key":
                return values.get(name, about_key)
            return as_typed(dotted_keys.get_value(self.cfg, about_key if name == "value" else name), ", ")

        return filled(template, value_of).rstrip()  # the last placeholder may be empty


def group_choices(config_dir: str = "") -> dict[str, list[str]]:
    """Return the choices of every group; `config_dir` is a further directory of groups, "" none."""
    return {group: list(choices) for group, choices in _groups(config_dir).items()}


def load(overrides: Sequence[str], *, config_dir: str = "", problems: Problems | None = None) -> LoadedConfig:
    """Compose a config from overrides in Hydra's grammar: recipe=NAME|PATH, zero=stage3, zero.stage=3,
    +known.key=value. `config_dir`: a further directory of groups. Wrong keys and values are added to `problems` and
    omitted from the config; without `problems` they are a ConfigError. So is always what prevents composition.
    """
    all_problems = Problems() if problems is None else problems
    if config_dir and not os.path.isdir(config_dir):
        raise ConfigError("--config-dir {folder} is not a directory.", folder=config_dir)
    groups = _groups(config_dir)
    parsed = [override for word in overrides if (override := all_problems.attempt(_parse, word)) is not None]
    chosen = all_problems.attempt(_choose_recipe, parsed)
    if chosen is None:
        all_problems.raise_all()
    assert chosen is not None
    (name, path), typed = chosen, _CommandLine()
    for override in parsed:
        if override.key_or_group != "recipe":
            all_problems.attempt(typed.take, override, groups, all_problems)
    loaded, tree = LoadedConfig(cfg=schema.RunConfig()), dict[str, Any]()
    try:
        documents = _read_recipes(path, groups, all_problems)
        order = _defaults_list(documents, typed.choices, config_dir)
        for document, package, layer in _layers(order, documents, groups, typed, loaded, all_problems):
            keys = [key for key, _ in document.leaves]
            loaded.where |= document.leaves
            loaded.layers |= dict.fromkeys(keys, layer)
            # Values of conf/ are not chosen by a user.
            loaded.explicit = loaded.explicit.union(keys) if layer else loaded.explicit.difference(keys)
            _merge(tree, document.values, *filter(None, package.split(".")))
            all_problems.attempt(data_forms.set_source, tree, document.source, document.location("data"))
        loaded.where |= dict.fromkeys(typed.keys, tr("command line"))
        loaded.layers |= dict.fromkeys(typed.keys, TYPED)
        loaded.explicit |= typed.keys
        for key, value in typed.values:
            *parents, last = key.split(".")
            _merge(tree, {last: value}, *parents)
        all_problems.attempt(data_forms.set_source, tree, typed.source, tr("command line"))
        if "${" in repr(tree):  # resolves references to other keys, such as ${run.name}
            values = to_plain(schema.RunConfig())
            _merge(values, tree)
            tree = dict(OmegaConf.to_container(OmegaConf.create(values), resolve=True))  # type: ignore[arg-type]
        reader = TreeReader(lambda path: loaded.location(path) or name, all_problems, is_resolved=True)
        _, loaded.cfg = reader.read(tree, schema.RunConfig)
    except (HydraException, OmegaConfBaseException, RecursionError) as error:
        all_problems.raise_all()  # an error in a group's file makes Hydra fail too, with a worse message
        reason = tr("cannot compose the config: {reason}", reason=" ".join(str(error).split()))
        if isinstance(error, InterpolationResolutionError):
            reason = joined(reason, tr("Where ${{ is meant as it stands, write \\${{."))
        raise ConfigError(reason) from error
    learn_from(tree)
    if problems is None:
        all_problems.raise_all()
    _apply_dependent_defaults(loaded)
    _drop_questions_about_other_data(loaded)
    # A resolved config (runs/NAME/config.yaml) keeps the name of the recipe that it was made from.
    loaded.cfg.recipe = loaded.cfg.recipe or name
    return loaded


def _apply_dependent_defaults(loaded: LoadedConfig) -> None:
    """Set keys whose defaults depend on other keys, unless they are set: the learning rate depends on the tuning
    method, `data` and the formats of its sources on the task or the preference loss.
    """
    cfg, method = loaded.cfg, loaded.cfg.tuning.method
    rate = float(f"{schema.LEARNING_RATES[method] / (schema.PREFERENCE_RATE if cfg.preference.is_on else 1):.6g}")
    if "optim.lr" not in loaded.where and cfg.optim.lr != rate:
        cfg.optim.lr = rate
        loaded.where["optim.lr"] = tr("default of tuning.method = {method}", method=method.value)
    wanted = objective.wanted_format(cfg)
    if wanted is None:
        return
    if cfg.data.train_on is schema.TrainOn.auto:
        cfg.data.train_on = schema.TrainOn.last
    if "data.too_long" not in loaded.where and (cfg.preference.is_on or cfg.task.kind is schema.TaskKind.reward):
        cfg.data.too_long = schema.TooLong.drop
    for source in (*cfg.data.sources, *cfg.data.validation):
        if source.format is schema.RowFormat.auto or (source.format, wanted) == (
            schema.RowFormat.preference,
            schema.RowFormat.reward,
        ):
            source.format = wanted


def _drop_questions_about_other_data(loaded: LoadedConfig) -> None:
    """Drop `evaluate.prompts` of a recipe that chose a group of data, if a later layer replaces these data."""
    key, layers = "evaluate.prompts", loaded.layers
    if not loaded.cfg.evaluate.prompts or layers.get(key) != layers.get("data", -1):
        return
    if layers.get("data.sources", 0) > layers[key]:
        loaded.cfg.evaluate.prompts = []
        loaded.notices.append(
            loaded.position(key)
            + tr(
                "evaluate.prompts is dropped: its questions are about the recipe's data, not yours. To see answers at "
                "the end, set evaluate.prompts=['…']."
            )
        )
        loaded.where[key], layers[key] = loaded.where["data.sources"], layers["data.sources"]


def replace(loaded: LoadedConfig, values: dict[str, tuple[object, str]], layer: int = TYPED) -> LoadedConfig:
    """Return a copy with other values; `values`: dotted key -> (value, its origin for messages), `layer`: of all of
    them. ConfigError if a key is unknown or a value has the wrong type.
    """
    tree, problems = to_plain(loaded.cfg), Problems()
    for key, (value, origin) in values.items():
        kind, value, locate = field_type(key), to_plain(value), partial(_same_location, origin)
        if kind is None:
            raise unknown_key(key, locate)
        TreeReader(locate, problems).read(value, kind, key)
        dotted_keys.set_leaf(tree, key, value)
    problems.raise_all()
    _, cfg = TreeReader(str, problems, is_resolved=True).read(tree, schema.RunConfig)
    problems.raise_all()
    return dataclasses.replace(
        loaded,
        cfg=cfg,
        where=loaded.where | {key: origin for key, (_, origin) in values.items()},
        explicit=set(loaded.explicit),
        layers=loaded.layers | dict.fromkeys(values, layer),
        notices=list(loaded.notices),
    )


def to_yaml(cfg: schema.RunConfig) -> str:
    """Return a config as YAML, which is a recipe too (`recipe=runs/NAME/config.yaml`)."""
    return str(OmegaConf.to_yaml(OmegaConf.create(escaped(to_dict(cfg)))))


def to_dict(cfg: schema.RunConfig) -> dict[str, Any]:
    """Return a config as dicts, lists and plain values, with secrets masked, for files and reports."""
    return dict(hide_all(to_plain(cfg)))


def to_plain(value: Any) -> Any:
    """Return a config as dicts, lists and plain values."""
    if dataclasses.is_dataclass(value):
        return {item.name: to_plain(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if isinstance(value, list):
        return [to_plain(item) for item in value]
    return value.name if isinstance(value, Enum) else value


def as_typed(value: object, comma: str = ",") -> str:
    """Return a value in the form of the command line; `comma`: separator of lists."""
    if isinstance(value, list):
        return f"[{comma.join(as_typed(item) for item in value)}]"
    return schema.as_text(to_plain(value)) or '""'


def escaped(value: Any) -> Any:
    """Return a value with `${` escaped in its texts, so that OmegaConf reads it as it is."""
    if isinstance(value, dict):
        return {name: escaped(item) for name, item in value.items()}
    if isinstance(value, list):
        return [escaped(item) for item in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


def _groups(config_dir: str) -> Groups:
    """Return the choices of each group, in conf/ and in `config_dir`, unless that is ""."""
    groups: Groups = {}
    for base in filter(None, (str(files.conf_folder()), config_dir)):
        for path in sorted(Path(base).glob("*/*.yaml")):
            groups.setdefault(path.parent.name, {}).setdefault(path.stem, path)
    return groups


def _parse(word: str) -> Override:
    """Parse an argument in Hydra's grammar; ConfigError unless it sets one key to one value."""
    depths = accumulate({"[": 1, "{": 1, "]": -1, "}": -1}.get(letter, 0) for letter in word)
    if max(depths, default=0) > files.DEEPEST_NESTING:
        limit, shown = files.DEEPEST_NESTING, word[:_MAX_SHOWN_CHARS]
        raise ConfigError("command line: '{word}' nests deeper than {limit} levels.", word=shown, limit=limit)
    try:
        override = OverridesParser.create().parse_override(quote_text(word))
        if override.package is not None:
            raise HydraException("no packages")
    except (HydraException, RecursionError, ValueError) as error:  # ValueError: a number of thousands of digits
        raise ConfigError(
            "command line: cannot read '{word}': write key=value (quote spaces and brackets for the shell).",
            word=word[:_MAX_SHOWN_CHARS],
        ) from error
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
    """Quote texts with other characters than ASCII in an argument, as Hydra's grammar requires."""
    key, equals, value = word.partition("=")
    if value.isascii() or re.search(r"""['"\\]""", value):
        return word
    text = r"[^\s\[\]{}(),:][^\[\]{}(),:]*"
    return (
        key + equals + re.sub(text, lambda match: match[0] if match[0].isascii() else f"'{match[0].rstrip()}'", value)
    )


def _choose_recipe(parsed: list[Override]) -> tuple[str, Path]:
    """Return the name and the file of the chosen recipe; ConfigError without one."""
    recipes = files.known_recipes()
    chosen = [str(override.value()) for override in parsed if override.key_or_group == "recipe"]
    # The quickstart first: it runs anywhere.
    names = sorted(recipes, key=lambda name: (name != "quickstart", name))
    listing = tr("Known: {recipes}.", recipes=shortlist(names, "toolkit recipes", like="".join(chosen[-1:])))
    if not chosen:
        raise ConfigError(joined(tr("no recipe is chosen: add recipe=NAME or recipe=PATH.yaml."), listing))
    if len(set(chosen)) > 1:
        raise ConfigError("command line: several recipes, {names}: give one.", names=", ".join(dict.fromkeys(chosen)))
    name = chosen[-1]
    is_yaml = name.endswith((".yaml", ".yml"))
    if not is_yaml and name not in recipes and not name.endswith((".json", ".sh")) and os.path.exists(name):
        raise ConfigError(
            "command line: {path} is no recipe. Data is data={path}, a model is model.path={path}, both next to a "
            "recipe: recipe=NAME or recipe=PATH.yaml.",
            path=name,
        )
    if is_yaml or os.sep in name:
        path = Path(name)
        if not os.path.isfile(path):
            raise ConfigError(joined(tr("command line: there is no recipe file {path}.", path=name), listing))
        return path.stem, path.resolve()
    if name.endswith((".json", ".sh")) and os.path.isfile(name):
        raise ConfigError(
            "command line: {path} is no recipe. A DeepSpeed JSON goes with a recipe: recipe=NAME "
            "deepspeed_json={path}. Of another program's config make one:  toolkit import-config {path} "
            "output=NAME.yaml",
            path=name,
        )
    if name not in recipes:
        sentence = tr("command line: unknown recipe '{name}'.", name=name)
        raise ConfigError(joined(sentence, did_you_mean(name, recipes), listing))
    return name, recipes[name]


@dataclass(slots=True)
class _CommandLine:
    """Groups and keys that the command line sets."""

    choices: dict[str, Any] = field(default_factory=dict)
    """Group -> its choice, or a list of choices."""
    values: list[tuple[str, Any]] = field(default_factory=list)
    """(key or section, value) in their order."""
    keys: set[str] = field(default_factory=set)
    """Keys that are set, those in sections too."""
    source: dict[str, Any] = field(default_factory=dict)
    """What is said of the only source, by the name of its key."""

    def take(self, override: Override, groups: Groups, problems: Problems) -> None:
        """Check one argument, and add what it sets to this object."""
        key, value, location = override.key_or_group, override.value(), tr("command line")
        if key == "data" and isinstance(value, dict):
            data_forms.expand(value, location)
            inner = [name for name in data_forms.SOURCE_KEYS if name in value]
            for name in inner:
                self._takes_source(f"data.{name}", value.pop(name), location, problems)
            if inner and not value:
                return
        # Short forms: data=chat.jsonl, data.sources=[a,b], data.validation=500, zero=3.
        if key == "data.validation" and (split := data_forms.validation_split(value, location)):
            self.values += [(f"data.{name}", inner) for name, inner in split.items()]
            self.keys.update(f"data.{name}" for name in split)
            return
        is_list = isinstance(value, list) and all(isinstance(item, str | dict) for item in value)
        if key == "data" and (is_list or (data_forms.is_path(value) and value not in groups["data"])):
            key = "data.sources"
        is_source_list = key in ("data.sources", "data.validation")
        value = data_forms.as_sources(value) if is_source_list else _zero_stage_choice(key, value)
        if _is_choice(key, str(value) if isinstance(value, (int, float)) else value, groups, location):
            self.choices[key] = value
            return
        typed = str(override.input_line).partition("=")[2].strip()
        is_text = data_forms.SOURCE_KEYS.get(key.removeprefix("data.")) is str and isinstance(value, (bool, int, float))
        if self._takes_source(key, typed if is_text else value, location, problems):
            return
        kind = field_type(key)
        if kind is None or "_target_" in key.split("."):
            raise unknown_key(key, partial(_same_location, location))
        if (kind is str or key.startswith("launch.env.")) and isinstance(value, (bool, int, float)):
            value = typed  # 1e3, not 1000.0
        elif (kind == list[str] or key == "launch.env") and isinstance(value, (list, dict)):
            value = _as_typed_texts(value, typed)
        reader = TreeReader(partial(_same_location, location), problems)
        is_right, _ = reader.read(value, kind, key)
        if is_right:
            self.values.append((key, value))
            self.keys.update(reader.leaves)

    def _takes_source(self, key: str, value: Any, location: str, problems: Problems) -> bool:
        """Note what an argument says of the only source, and return whether it does; `columns` may stand alone."""
        parts = ["data", *key.split(".")] if key.partition(".")[0] == "columns" else key.split(".")
        section, name, inner = parts[0], parts[1] if len(parts) > 1 else "", parts[2:]
        if section != "data" or name not in data_forms.SOURCE_KEYS or len(inner) > (name == "columns"):
            return False
        read = data_forms.read_source(
            {name: {inner[0]: value} if inner else value}, partial(_same_location, location), problems
        )
        _merge(self.source, read)
        self.keys.add("data.sources")
        if {"path", "hub"} & self.source.keys() and any(key == "data.sources" for key, _ in self.values):
            raise data_forms.two_sources(name, location)
        return True


def _same_location(location: str, path: str) -> str:
    """Return `location` for any key: with `partial` a `Locator` of an argument."""
    return location


def _as_typed_texts(value: Any, typed: str) -> Any:
    """Return a parsed list or map with its numbers and booleans as the texts they were in `typed`, such as `[1.10]`."""
    is_map = isinstance(value, dict)
    items = [*value.values()] if is_map else value
    parts = [part.partition(":")[2] if is_map else part for part in typed[1:-1].split(",")]
    if len(parts) != len(items):  # a comma within quotes or brackets
        parts = [schema.as_text(item) for item in items]
    pairs = zip(items, parts, strict=True)
    texts = [part.strip() if isinstance(item, (bool, int, float)) else item for item, part in pairs]
    return dict(zip(value, texts, strict=True)) if is_map else texts


def _zero_stage_choice(group: str, value: Any) -> Any:
    """Return the choice of a group that a value stands for: `zero=3` is `zero=stage3`."""
    return f"stage{value}" if group == "zero" and isinstance(value, int) and not isinstance(value, bool) else value


def _is_choice(group: str, value: Any, groups: Groups, location: str) -> bool:
    """Return whether a value names a file of a group, or several where possible; a ConfigError for an unknown name."""
    names = value if isinstance(value, list) and group in _MULTIPLE_CHOICE else [value]
    if group not in groups or not all(isinstance(name, str) for name in names):
        return False
    for name in names:
        if name not in groups[group]:
            from toolkit.config.suggest import unknown_choice  # its tables are read in errors alone

            raise unknown_choice(group, name, groups, location)
    return True


def _read_recipes(chosen: Path, groups: Groups, problems: Problems) -> dict[str, files.YamlDocument]:
    """Read the chosen recipe and those it builds on, by name, and skip wrong entries of their defaults lists."""
    documents: dict[str, files.YamlDocument] = {}
    recipes = files.known_recipes()
    # Name, file, and the files that build on it: a recipe cannot build on itself.
    waiting: list[tuple[str, Path, tuple[Path, ...]]] = [(_CHOSEN_RECIPE, chosen, ())]
    while waiting:
        name, path, above = waiting.pop()
        document = documents[name] = files.read(path, schema.RunConfig)
        _reject_foreign(document)
        _expand_short_forms(document, problems)
        defaults = document.values.pop("defaults", [])
        if not isinstance(defaults, list):
            location = document.location("defaults")
            raise ConfigError("{place}: 'defaults' must be a list, such as [quickstart, _self_].", place=location)
        for index, item in enumerate(defaults):
            for key in item if isinstance(item, dict) else ():
                item[key] = _zero_stage_choice(str(key).rpartition("/")[2], item[key])
            location = document.location(f"defaults[{index}]")
            base = problems.attempt(_check_default, item, location, recipes, groups)
            if base is not None:
                document.defaults.append(item)
            if base:
                if "_self_" in defaults[:index]:
                    raise ConfigError(
                        "{place}: '{item}' follows _self_, so that its keys would replace those of this file. Put "
                        "_self_ behind it.",
                        place=location,
                        item=item,
                    )
                if recipes[base].resolve() in (path.resolve(), *above):
                    raise _wrong_default(item, location)
                waiting.append((base, recipes[base], (path.resolve(), *above)))
        _check_document(document, "", problems)
    return documents


def _reject_foreign(document: files.YamlDocument) -> None:
    """Raise ConfigError if most keys of a recipe are another program's, in place of an error for each key."""
    sections = {item.name for item in dataclasses.fields(schema.RunConfig)} | {"defaults"}
    unknown = [str(key) for key in document.values if key not in sections]
    if len(unknown) < 2:
        return
    from toolkit.config.suggest import is_foreign  # a right recipe needs none of its tables

    foreign = [key for key in unknown if is_foreign(key)]
    if len(foreign) >= 2 and 2 * len(foreign) > len(document.values):
        raise ConfigError(
            "{file} is no recipe but another program's config ({keys}, …). Make a recipe of it:  toolkit "
            "import-config {file} output=NAME.yaml",
            file=document.shown,
            keys=", ".join(foreign[:3]),
        )


def _expand_short_forms(document: files.YamlDocument, problems: Problems) -> None:
    """Replace the short forms of `data` and `zero` in a recipe, which are those of the command line."""
    data, zero = document.values.get("data"), document.values.get("zero")
    if data_forms.is_path(data) or isinstance(data, list):
        document.values["data"] = {"sources": data_forms.as_sources(data)}
    elif isinstance(data, dict):
        written = {*data}
        problems.attempt(data_forms.expand, data, document.location("data.validation"))
        line = document.lines.get("data.validation", 0)
        document.lines.update({f"data.{name}": line for name in data if name not in written})
    if _zero_stage_choice("zero", zero) != zero:
        document.values["zero"] = {"stage": zero}


def _check_default(item: Any, location: str, recipes: dict[str, Path], groups: Groups) -> str:
    """Check an item of a recipe's defaults list; return the name of the recipe that it builds on, or ""."""
    if isinstance(item, str) and item != "_self_":
        if item not in recipes:
            sentence = tr("{place}: unknown recipe '{name}'.", place=location, name=item)
            raise ConfigError(joined(sentence, did_you_mean(item, recipes)))
        return item
    [(key, value)] = item.items() if isinstance(item, dict) and len(item) == 1 else [("", item)]
    group = str(key).removeprefix("override").strip().lstrip("/")
    is_override = str(key).startswith("override /")
    if is_override and group not in groups:
        sentence = tr("{place}: unknown group '{group}'.", place=location, group=group)
        group_names = tr("Known: {choices}.", choices=shortlist(groups, "conf/"))
        raise ConfigError(joined(sentence, did_you_mean(group, groups), group_names))
    if item != "_self_" and not (is_override and _is_choice(group, value, groups, location)):
        raise _wrong_default(item, location)
    return ""


def _wrong_default(item: Any, location: str) -> ConfigError:
    """Return the error for an item of a recipe's defaults list that names neither a group nor another recipe."""
    return ConfigError(
        "{place}: '{item}': write `- override /GROUP: CHOICE`, or the name of another recipe.",
        place=location,
        item=item,
    )


def _defaults_list(
    documents: dict[str, files.YamlDocument], choices: dict[str, Any], config_dir: str
) -> Sequence[ResultDefault]:
    """Return Hydra's list of the files of a config, in the order of merging."""
    words = [f"recipe={_CHOSEN_RECIPE}"]
    for group, value in choices.items():
        # Hydra needs a + for a group that conf/config.yaml does not list, and forbids it for others.
        added = "" if group in _groups("") else "+"
        written = [value] if isinstance(value, str) else value
        quotes = [name if re.fullmatch(r"[\w.-]+", name, re.ASCII) else f"'{name}'" for name in written]
        words.append(f"{added}{group}={quotes[0] if isinstance(value, str) else '[' + ','.join(quotes) + ']'}")
    if config_dir:
        folder = str(Path(config_dir).absolute()).replace("'", "\\'")
        words.append(f"hydra.searchpath=['file://{folder}']")
    defaults = json.dumps({name: document.defaults for name, document in documents.items()})
    # Without the cache for a user's groups, which may change while this process runs (the board).
    compose = _compose_defaults.__wrapped__ if config_dir else _compose_defaults
    return compose(str(files.conf_folder()), defaults, tuple(words))


@cache
def _compose_defaults(conf: str, recipes: str, words: tuple[str, ...]) -> Sequence[ResultDefault]:
    """Return Hydra's order of the files, which takes 80 ms: cached for configs with the same groups.

    Args:
        conf: the directory of the groups.
        recipes: JSON, each recipe's defaults list by its name.
        words: overrides of groups.
    """
    store = ConfigStore.instance()
    for name, defaults in json.loads(recipes).items():
        node = {"defaults": defaults} if defaults else {}
        store.store(group="recipe", name=name, node=node, package="_global_")
    GlobalHydra.instance().clear()
    with initialize_config_dir(conf, version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        return loader.compute_defaults_list("config", list(words), RunMode.RUN).defaults


def _layers(
    order: Sequence[ResultDefault],
    recipes: dict[str, files.YamlDocument],
    groups: Groups,
    typed: _CommandLine,
    loaded: LoadedConfig,
    problems: Problems,
) -> Iterator[tuple[files.YamlDocument, str, int]]:
    """Yield the YAML files in the order of merging, with their package (the section that they fill) and layer (0:
    defaults; recipes from 1 on, the deepest first). The order is Hydra's, but a group that the command line chose comes
    after the recipes. `loaded.layers` gets the layer of each group's choice.
    """
    config = files.read(files.conf_folder() / "config.yaml")
    defaults = config.values.pop("defaults")
    ordinary = {f"{key}/{value}" for item in defaults if isinstance(item, dict) for key, value in item.items()}
    layers = loaded.layers
    layers |= dict.fromkeys(typed.choices, TYPED)
    order = sorted(order, key=lambda item: (item.config_path or "").rpartition("/")[0] in typed.choices)
    named = [path.removeprefix("recipe/") for item in order if (path := item.config_path or "").startswith("recipe/")]
    for number, name in enumerate(named, start=1):
        for item in recipes[name].defaults:
            for key in item if isinstance(item, dict) else ():
                group = str(key).rpartition("/")[2]
                layers[group] = max(layers.get(group, 0), number)
    for default in order:
        path = default.config_path or ""
        group, _, name = path.rpartition("/")
        if group == "recipe":  # a run's config.yaml lists every key, which does not make it a choice
            yield recipes[name], "", 0 if "recipe" in recipes[name].values else named.index(name) + 1
        elif group in groups:
            layer = layers.get(group, 0 if path in ordinary else 1)
            kind = field_type(default.package) if default.package else schema.RunConfig
            document = files.read(groups[group][name], kind)
            _check_document(document, default.package or "", problems)
            yield document, default.package or "", layer
        elif path == "config":
            yield config, "", 0


def _check_document(document: files.YamlDocument, package: str, problems: Problems) -> None:
    """Check a file against the schema: add errors to `problems`, remove wrong values from `document`, and fill in its
    `leaves` and `source`.
    """

    def locate(path: str) -> str:
        return document.location(path.removeprefix(f"{package}.") if package else path)

    kind = field_type(package) if package else schema.RunConfig
    if not package and document.values.pop("hydra", None) is not None:
        position = document.location("hydra")
        problems.add(ConfigError("{place}: a 'hydra:' section is not allowed in a recipe.", place=position))
    if kind is None:  # a group of --config-dir whose name is no section, without `# @package _global_`
        raise unknown_key(package, partial(_same_location, document.shown))
    data = document.values if package == "data" else {} if package else document.values.get("data")
    if isinstance(data, dict) and (
        of_source := {name: data.pop(name) for name in data_forms.SOURCE_KEYS if name in data}
    ):
        document.source.update(data_forms.read_source(of_source, locate, problems))
        position_of_source = locate(f"data.{next(iter(of_source))}")
        document.leaves.append(("data.sources", position_of_source))
        if {"path", "hub"} & of_source.keys() and "sources" in data:
            problems.add(data_forms.two_sources("path" if "path" in of_source else "hub", position_of_source))
    document.values.pop("defaults", None)  # of a group's file: Hydra has read it
    reader = TreeReader(locate, problems)
    reader.read(document.values, kind, package)
    document.leaves.extend((path, locate(path)) for path in reader.leaves)


def _merge(tree: dict[str, Any], values: dict[str, Any], *sections: str) -> None:
    """Merge values into a section of a tree: dicts are merged, anything else is replaced."""
    for name in sections:
        if not isinstance(tree.get(name), dict):
            tree[name] = {}
        tree = tree[name]
    for key, value in values.items():
        if isinstance(value, dict):
            _merge(tree, value, key)
        else:
            tree[key] = value
