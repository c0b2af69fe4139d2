"""Composes a RunConfig from layers: files of conf/, recipes, a DeepSpeed JSON, and the command line.

Hydra's defaults list determines the files and their order. `@hydra.main` is not used: it
would run code that a recipe names under `hydra.callbacks`, and rejects the launcher's --local_rank. Each file is
checked against the schema, with its line numbers, before anything is merged.
"""

import dataclasses
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cache, partial
from pathlib import Path
from typing import Any

from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.default_element import ResultDefault
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import OmegaConf
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException

from toolkit.config import data_forms, dotted_keys, files, objective, schema
from toolkit.config.command_words import (
    CommandLine,
    Groups,
    choose_recipe,
    is_choice,
    parse_word,
    same_location,
    zero_stage_choice,
)
from toolkit.config.dotted_keys import merge
from toolkit.config.validate import TreeReader, error_about, field_type, unknown_key
from toolkit.messages import ConfigError, Problems, did_you_mean, filled, joined, shortlist, tr
from toolkit.secrets import hide_all, learn_from

JSON, TYPED = 500, 1000
"""Numbers of the layers of a DeepSpeed JSON and of the command line; recipes are 1, 2, …"""
_CHOSEN_RECIPE = "chosen"
"""Hydra's name for the chosen recipe, whose own name may be invalid in Hydra's grammar, or equal the name of the recipe
that it builds on."""


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

    def note_origins(self, where: Mapping[str, str], layer: int) -> None:
        """Note that a layer sets keys. `where`: key -> its place; layer 0 is conf/, whose values no user has chosen."""
        self.where |= where
        self.layers |= dict.fromkeys(where, layer)
        self.explicit = self.explicit.union(where) if layer else self.explicit.difference(where)

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
    """Return the config that overrides in Hydra's grammar make: recipe=NAME|PATH, zero=stage3, zero.stage=3,
    +known.key=value. `config_dir`: a further directory of groups, "" for none. Wrong keys and values are added to
    `problems` and keep their defaults; without `problems` they are a ConfigError. That is always raised where nothing
    can be composed: there is no recipe, a file cannot be read, a reference leads nowhere.
    """
    all_problems = Problems() if problems is None else problems
    if config_dir and not os.path.isdir(config_dir):
        raise ConfigError("--config-dir {folder} is not a directory.", folder=config_dir)
    groups = _groups(config_dir)
    parsed = [override for word in overrides if (override := all_problems.attempt(parse_word, word)) is not None]
    name_and_path = all_problems.attempt(choose_recipe, parsed)
    if name_and_path is None:
        all_problems.raise_all()
    assert name_and_path is not None
    (name, path), typed = name_and_path, CommandLine()
    for override in parsed:
        if override.key_or_group != "recipe":
            all_problems.attempt(typed.take, override, groups, all_problems)
    loaded, tree = LoadedConfig(cfg=schema.RunConfig()), dict[str, Any]()
    try:
        recipes = _read_recipes(path, groups, all_problems)
        order = _file_order(recipes, typed.choices, config_dir)
        loaded.layers = _layers_of_groups(order, recipes, typed.choices)
        for file, package, layer in _files_to_merge(order, recipes, groups, loaded.layers, all_problems):
            loaded.note_origins(file.leaves, layer)
            merge(tree, file.document.values, *filter(None, package.split(".")))
            all_problems.attempt(data_forms.set_source, tree, file.source, file.document.location("data"))
        loaded.note_origins(dict.fromkeys(typed.keys, tr("command line")), TYPED)
        for key, value in typed.values:
            *parents, last = key.split(".")
            merge(tree, {last: value}, *parents)
        all_problems.attempt(data_forms.set_source, tree, typed.source, tr("command line"))
        if "${" in repr(tree):  # resolves references to other keys, such as ${run.name}
            values = to_plain(schema.RunConfig())
            merge(values, tree)
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
    _let_the_later_setting_count(loaded)
    _apply_default_rate(loaded)
    _apply_defaults_of_task(loaded)
    _drop_questions_about_other_data(loaded)
    # A resolved config (runs/NAME/config.yaml) keeps the name of the recipe that it was made from.
    loaded.cfg.recipe = loaded.cfg.recipe or name
    return loaded


_ALTERNATIVES = (
    ("schedule.warmup_steps", "schedule.warmup_ratio"),
    ("schedule.warmup_ratio", "schedule.warmup_steps"),
    ("train.max_steps", "train.epochs"),
)
"""Key that is 0 in effect if a later layer sets the other one of the pair; max_steps that are set later win anyway."""


def _let_the_later_setting_count(loaded: LoadedConfig) -> None:
    """Set a length of the run or of its warm-up to 0 if a later layer gives it in another unit."""
    for key, other in _ALTERNATIVES:
        if dotted_keys.get_value(loaded.cfg, key) and loaded.layers.get(key, 0) < loaded.layers.get(other, 0):
            section, name = key.split(".")
            setattr(getattr(loaded.cfg, section), name, 0)
            loaded.where[key] = loaded.where[other]


def _apply_default_rate(loaded: LoadedConfig) -> None:
    """Set the learning rate, unless it is set, to its method's default; note if a recipe's is high for a later loss."""
    cfg, method = loaded.cfg, loaded.cfg.tuning.method
    usual_rate = schema.LEARNING_RATES[method] / (schema.PREFERENCE_RATE if cfg.preference.is_on else 1)
    rate = float(f"{usual_rate:.6g}")  # without the digits that a division adds: 5e-07, not 4.9999999999999996e-07
    if "optim.lr" not in loaded.where and cfg.optim.lr != rate:
        cfg.optim.lr = rate
        loaded.where["optim.lr"] = tr("default of tuning.method = {method}", method=method.value)
    loss_layer = max(loaded.layers.get(key, 0) for key in ("preference", "preference.loss"))
    is_of_earlier_layer = 0 < loaded.layers.get("optim.lr", 0) < loss_layer
    if cfg.preference.is_on and cfg.optim.lr > rate and is_of_earlier_layer:
        text = tr(
            "optim.lr = {lr} is the recipe's, for its own task: {usual} is usual with preference.loss = {loss}.",
            lr=cfg.optim.lr,
            usual=rate,
            loss=cfg.preference.loss.value,
        )
        loaded.notices.append(loaded.position("optim.lr") + text)


def _apply_defaults_of_task(loaded: LoadedConfig) -> None:
    """Set what the task or the preference loss needs, unless it is set: formats of sources, train_on, too_long."""
    cfg, wanted = loaded.cfg, objective.wanted_format(loaded.cfg)
    if wanted is None:
        return
    if cfg.data.train_on is schema.TrainOn.auto:
        cfg.data.train_on = schema.TrainOn.last
    if "data.too_long" not in loaded.where and (cfg.preference.is_on or cfg.task.kind is schema.TaskKind.reward):
        cfg.data.too_long = schema.TooLong.drop
    for source in (*cfg.data.sources, *cfg.data.validation):
        # Pairs of preferences are a reward model's data, too.
        is_preference = source.format is schema.RowFormat.preference and wanted is schema.RowFormat.reward
        if source.format is schema.RowFormat.auto or is_preference:
            source.format = wanted


def _drop_questions_about_other_data(loaded: LoadedConfig) -> None:
    """Drop `evaluate.prompts` of a recipe that chose a group of data, if a later layer replaces these data."""
    key, layers = "evaluate.prompts", loaded.layers
    chose_data_too = layers.get(key) == layers.get("data", -1)  # the layer that set the questions; -1: none chose data
    if not loaded.cfg.evaluate.prompts or not chose_data_too:
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
        kind, value, locate = field_type(key), to_plain(value), partial(same_location, origin)
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


@dataclass(frozen=True, slots=True)
class _CheckedFile:
    """A YAML file without its values that the schema does not allow."""

    document: files.YamlDocument
    leaves: dict[str, str]
    """Each key of the schema that it sets -> where."""
    source: dict[str, Any]
    """What it says of the only source in `data` itself, such as `columns`, taken out of its values."""


def _read_recipes(chosen: Path, groups: Groups, problems: Problems) -> dict[str, _CheckedFile]:
    """Return name -> content of the chosen recipe (_CHOSEN_RECIPE) and its bases; `problems` gets what is wrong."""
    checked: dict[str, _CheckedFile] = {}
    recipes = files.known_recipes()
    # Name, file, and the files that build on it: a recipe cannot build on itself.
    waiting: list[tuple[str, Path, tuple[Path, ...]]] = [(_CHOSEN_RECIPE, chosen, ())]
    while waiting:
        name, path, above = waiting.pop()
        document = files.read(path, schema.RunConfig)
        _reject_foreign(document)
        _expand_short_forms(document, problems)
        above = (path.resolve(), *above)
        for base in _take_defaults(document, recipes, groups, above, problems):
            waiting.append((base, recipes[base], above))
        checked[name] = _checked_file(document, "", problems)
    return checked


def _take_defaults(
    document: files.YamlDocument, recipes: dict[str, Path], groups: Groups, above: Sequence[Path], problems: Problems
) -> list[str]:
    """Move a recipe's defaults list from its values to `defaults`, without wrong items, whose errors go to `problems`;
    return the names of the recipes in it. `above`: this file and those that build on it. ConfigError if it is no list,
    or names a recipe behind _self_ or one of the files `above`.
    """
    defaults = document.values.pop("defaults", [])
    if not isinstance(defaults, list):
        location = document.location("defaults")
        raise ConfigError("{place}: 'defaults' must be a list, such as [quickstart, _self_].", place=location)
    bases: list[str] = []
    for index, item in enumerate(defaults):
        if isinstance(item, dict):  # {"override /zero": 3} becomes {"override /zero": "stage3"}
            item.update({key: zero_stage_choice(str(key).rpartition("/")[2], value) for key, value in item.items()})
        location = document.location(f"defaults[{index}]")
        base = problems.attempt(_base_in_default, item, location, recipes, groups)  # None if the item is wrong
        if base is not None:
            document.defaults.append(item)
        if not base:  # _self_, or the choice of a group
            continue
        if "_self_" in defaults[:index]:
            raise ConfigError(
                "{place}: '{item}' follows _self_, so that its keys would replace those of this file. Put _self_ "
                "behind it.",
                place=location,
                item=item,
            )
        if recipes[base].resolve() in above:
            raise _wrong_default(item, location)
        bases.append(base)
    return bases


def _reject_foreign(document: files.YamlDocument) -> None:
    """Raise ConfigError if most keys of a recipe are another program's, in place of an error for each key."""
    sections = {item.name for item in dataclasses.fields(schema.RunConfig)} | {"defaults"}
    unknown = [str(key) for key in document.values if key not in sections]
    if len(unknown) < 2:
        return
    from toolkit.config.suggest import reject_foreign_keys  # a right recipe needs none of its tables

    reject_foreign_keys(document.shown, unknown, len(document.values))


def _expand_short_forms(document: files.YamlDocument, problems: Problems) -> None:
    """Replace the short forms of `data` and `zero` in a recipe's values, in place; wrong ones go to `problems`."""
    data, zero = document.values.get("data"), document.values.get("zero")
    if data_forms.is_path(data) or isinstance(data, list):
        document.values["data"] = {"sources": data_forms.as_sources(data)}
    elif isinstance(data, dict):
        names = {*data}
        problems.attempt(data_forms.expand, data, document.location("data.validation"))
        line = document.lines.get("data.validation", 0)  # of the keys that this one became
        document.lines.update({f"data.{name}": line for name in data if name not in names})
    if zero_stage_choice("zero", zero) != zero:
        document.values["zero"] = {"stage": zero}


def _base_in_default(item: Any, location: str, recipes: dict[str, Path], groups: Groups) -> str:
    """Return the recipe that an item of a recipe's defaults list names, to build on it; "" for _self_ and for the
    choice of a group, {"override /zero": "stage3"}. ConfigError for anything else.
    """
    if isinstance(item, str) and item != "_self_":
        if item not in recipes:
            sentence = tr("{place}: unknown recipe '{name}'.", place=location, name=item)
            raise ConfigError(joined(sentence, did_you_mean(item, recipes)))
        return item
    if item == "_self_":
        return ""
    key, value = next(iter(item.items())) if isinstance(item, dict) and len(item) == 1 else ("", item)
    group = str(key).removeprefix("override").strip().lstrip("/")
    is_override = str(key).startswith("override /")
    if is_override and group not in groups:
        sentence = tr("{place}: unknown group '{group}'.", place=location, group=group)
        group_names = tr("Known: {choices}.", choices=shortlist(groups, "conf/"))
        raise ConfigError(joined(sentence, did_you_mean(group, groups), group_names))
    if not (is_override and is_choice(group, value, groups, location)):
        raise _wrong_default(item, location)
    return ""


def _wrong_default(item: Any, location: str) -> ConfigError:
    """Return the error for an item of a recipe's defaults list that names neither a group nor another recipe."""
    return ConfigError(
        "{place}: '{item}': write `- override /GROUP: CHOICE`, or the name of another recipe.",
        place=location,
        item=item,
    )


def _file_order(recipes: dict[str, _CheckedFile], choices: dict[str, Any], config_dir: str) -> Sequence[ResultDefault]:
    """Return the files of a config in the order in which Hydra merges them. `recipes`: name -> the chosen one and those
    that it builds on; `choices`: group -> name, or names, chosen on the command line; `config_dir`: as of `load`. Hydra
    begins with conf/config.yaml, which chooses a file of every group and no recipe; overrides change its choices.
    """
    overrides = [f"recipe={_CHOSEN_RECIPE}", *(_override(group, chosen) for group, chosen in choices.items())]
    # As text: the arguments of a cached function must be hashable.
    defaults = json.dumps({name: recipe.document.defaults for name, recipe in recipes.items()})
    conf = str(files.conf_folder())
    if not config_dir:
        return _cached_order(conf, defaults, tuple(overrides))
    folder = str(Path(config_dir).absolute()).replace("'", "\\'")
    overrides.append(f"hydra.searchpath=['file://{folder}']")
    return _hydras_order(conf, defaults, tuple(overrides))  # not cached: its files may change while the board runs


def _override(group: str, chosen: str | list[str]) -> str:
    """Return the choice of a group in Hydra's grammar: zero=stage3, track=[csv,wandb], +mine='my choice'. Hydra needs a
    + for a group that conf/config.yaml does not list, as for all that --config-dir adds, and forbids it for others.
    """
    names = [chosen] if isinstance(chosen, str) else chosen
    quoted = ",".join(name if re.fullmatch(r"[\w.-]+", name, re.ASCII) else f"'{name}'" for name in names)
    plus = "" if group in _groups("") else "+"
    return f"{plus}{group}={quoted if isinstance(chosen, str) else f'[{quoted}]'}"


def _hydras_order(conf: str, recipes: str, words: tuple[str, ...]) -> Sequence[ResultDefault]:
    """Return the files in Hydra's order, which takes 80 ms. `conf`: the directory of the groups; `recipes`: JSON, name
    -> defaults list of each recipe; `words`: overrides of groups.
    """
    # Hydra gets recipes as their defaults lists alone, from memory: their files have been read and checked already.
    store = ConfigStore.instance()
    for name, defaults in json.loads(recipes).items():
        node = {"defaults": defaults} if defaults else {}
        store.store(group="recipe", name=name, node=node, package="_global_")
    GlobalHydra.instance().clear()
    with initialize_config_dir(conf, version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        return loader.compute_defaults_list("config", list(words), RunMode.RUN).defaults


_cached_order = cache(_hydras_order)
"""The same, at once for configs with the same groups."""


def _layers_of_groups(
    order: Sequence[ResultDefault], recipes: dict[str, _CheckedFile], choices: dict[str, Any]
) -> dict[str, int]:
    """Return the layer of each group's choice: of the last recipe that chooses one, or the command line's."""
    layers = dict.fromkeys(choices, TYPED)
    for number, name in enumerate(_recipe_names(order), start=1):
        for item in recipes[name].document.defaults:
            for key in item if isinstance(item, dict) else ():
                group = str(key).rpartition("/")[2]
                layers[group] = max(layers.get(group, 0), number)
    return layers


def _recipe_names(order: Sequence[ResultDefault]) -> list[str]:
    """Return the recipes among Hydra's files, the deepest first."""
    paths = [default.config_path or "" for default in order]
    return [path.removeprefix("recipe/") for path in paths if path.startswith("recipe/")]


def _files_to_merge(
    order: Sequence[ResultDefault],
    recipes: dict[str, _CheckedFile],
    groups: Groups,
    layers: dict[str, int],
    problems: Problems,
) -> Iterator[tuple[_CheckedFile, str, int]]:
    """Yield the YAML files in the order of merging, with their package (the section that they fill) and layer (0:
    defaults; recipes from 1 on, the deepest first). The order is Hydra's (`order`), but a group that the command line
    chose comes after the recipes. `layers`: group -> layer of its choice; `problems` gets errors in groups' files.
    """
    config = files.read(files.conf_folder() / "config.yaml")
    defaults = config.values.pop("defaults")
    usual_choices = {f"{key}/{value}" for item in defaults if isinstance(item, dict) for key, value in item.items()}
    recipe_names = _recipe_names(order)
    typed_groups = {group for group, layer in layers.items() if layer == TYPED}
    # False sorts before True: what was typed comes last, all else stays in its order.
    for default in sorted(order, key=lambda item: (item.config_path or "").rpartition("/")[0] in typed_groups):
        path, package = default.config_path or "", default.package or ""
        group, _, name = path.rpartition("/")
        if group == "recipe":
            # A run's config.yaml, which has the key `recipe`, lists every key: that makes none of them a user's choice.
            is_run = "recipe" in recipes[name].document.values
            yield recipes[name], "", 0 if is_run else recipe_names.index(name) + 1
        elif group in groups:
            kind = field_type(package) if package else schema.RunConfig
            file = _checked_file(files.read(groups[group][name], kind), package, problems)
            # 1: chosen by the defaults list of another group's file, as those of --config-dir may have one.
            yield file, package, layers.get(group, 0 if path in usual_choices else 1)
        elif path == "config":
            yield _CheckedFile(config, {}, {}), "", 0


def _checked_file(document: files.YamlDocument, package: str, problems: Problems) -> _CheckedFile:
    """Check a file against the schema and return it without what is wrong, which is added to `problems`. `package`: the
    section that it fills, "" for the whole config; ConfigError if there is no such section.
    """

    def locate(path: str) -> str:
        return document.location(path.removeprefix(f"{package}.") if package else path)

    kind = field_type(package) if package else schema.RunConfig
    if not package and document.values.pop("hydra", None) is not None:
        position = document.location("hydra")
        problems.add(ConfigError("{place}: a 'hydra:' section is not allowed in a recipe.", place=position))
    if kind is None:  # a group of --config-dir whose name is no section, without `# @package _global_`
        raise unknown_key(package, partial(same_location, document.shown))
    leaves, source = dict[str, str](), dict[str, Any]()
    data = document.values if package == "data" else document.values.get("data")
    if package in ("", "data") and isinstance(data, dict):
        of_source = {name: data.pop(name) for name in data_forms.SOURCE_KEYS if name in data}
        source = data_forms.read_source(of_source, locate, problems)
        if of_source:
            leaves["data.sources"] = locate(f"data.{next(iter(of_source))}")
        if {"path", "hub"} & of_source.keys() and "sources" in data:
            problems.add(data_forms.two_sources("path" if "path" in of_source else "hub", leaves["data.sources"]))
    document.values.pop("defaults", None)  # of a group's file: Hydra has read it
    reader = TreeReader(locate, problems)
    reader.read(document.values, kind, package)
    return _CheckedFile(document, leaves | {path: locate(path) for path in reader.leaves}, source)
