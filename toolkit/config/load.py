"""From a command line to a RunConfig, through Hydra's compose API; the only place that sees Hydra.

`@hydra.main` is not used: it would run what a recipe puts under `hydra.callbacks` before our first line, and it rejects
the launcher's --local_rank. Every file is held against the schema, with its line numbers, before Hydra merges anything.
"""

import dataclasses
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import OmegaConf
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException

from toolkit.config import files
from toolkit.config.files import Document, known_recipes
from toolkit.config.keys import check_tree, field_type, unknown_key
from toolkit.config.schema import RunConfig
from toolkit.config.suggest import did_you_mean
from toolkit.errors import ConfigError
from toolkit.messages import tr
from toolkit.secrets import hide_all

CHOSEN = "chosen"
"""The name under which Hydra knows the chosen recipe: its own may hold what Hydra's grammar refuses, or be the name of
the recipe that it builds on."""
HYDRA_KEYS = ("defaults",)
SEVERAL = ("track",)
"""Groups of which several files may be chosen: track=[tensorboard,wandb]."""
FREE = ("ds_extra", "launch.env")
"""Sections whose keys the schema does not name."""


@dataclass(kw_only=True, slots=True)
class Loaded:
    """A config and where its values come from."""

    cfg: RunConfig
    """The config."""
    where: dict[str, str] = field(default_factory=dict)
    """Dotted key -> "recipes/x.yaml:12", "conf/zero/stage2.yaml:3" or "command line"; absent: the schema's default."""
    explicit: set[str] = field(default_factory=set)
    """Keys that somebody chose: set by the recipe, by one that it builds on, by a group's file that the recipe or the
    command line picked, or on the command line."""


def group_choices(config_dir: str = "") -> dict[str, list[str]]:
    """Return the choices of every group.

    Args:
        config_dir: a further folder of groups; "" none.
    """
    return {group: list(choices) for group, choices in _groups(config_dir).items()}


def load(overrides: Sequence[str], *, config_dir: str = "") -> Loaded:
    """Compose a config.

    Args:
        overrides: words in Hydra's grammar: recipe=NAME|PATH, zero=stage3, zero.stage=3, +known.key=value.
        config_dir: a further folder of groups, beside conf/; "" none.

    Raises:
        ConfigError: anything wrong with recipe, group files or overrides.
    """
    if config_dir and not Path(config_dir).is_dir():
        raise ConfigError(tr("--config-dir {folder} is not a folder.", folder=config_dir))
    groups = _groups(config_dir)
    parsed = [_parse(word) for word in overrides]
    recipe, path, recipes = _choose_recipe(parsed)
    words = [f"recipe={CHOSEN}"]
    own = _groups("")
    values: dict[str, Any] = {}
    for override in parsed:
        if override.key_or_group == "recipe":
            continue
        if override.key_or_group in groups and _is_choice(override.key_or_group, override.value()):
            _check_choice(override.key_or_group, override.value(), groups)
            # Hydra wants the + for a group that conf/config.yaml does not list, and only for that.
            added = "" if override.key_or_group in own else "+"
            words.append(added + str(override.input_line).lstrip("+"))
        else:
            words.append(_value_override(override, values))
    if config_dir:
        folder = str(Path(config_dir).absolute()).replace("'", "\\'")
        words.append(f"hydra.searchpath=['file://{folder}']")
    loaded = _compose(words, path, recipes, groups)
    for key in values:
        loaded.where[key] = tr("command line")
        loaded.explicit.add(key)
    # A resolved config (runs/NAME/config.yaml) keeps the name of the recipe that it was made from.
    loaded.cfg.recipe = loaded.cfg.recipe or recipe
    return loaded


def replace(loaded: Loaded, values: dict[str, tuple[object, str]]) -> Loaded:
    """Return a copy with other values.

    Args:
        loaded: what is copied.
        values: dotted key -> (value, where it comes from).

    Raises:
        ConfigError: unknown key or wrong type.
    """
    tree = OmegaConf.merge(OmegaConf.structured(RunConfig), escaped(plain(loaded.cfg)))
    for key, (value, place) in values.items():
        kind = field_type(key)
        if kind is None:
            raise unknown_key(key, lambda _, place=place: place)  # type: ignore[misc]
        named = value.name if isinstance(value, Enum) else value
        list(check_tree(named, kind, key, lambda _, place=place: place))  # type: ignore[misc]
        if isinstance(named, list):  # its items may be sections, which `update` takes as objects only
            tree = OmegaConf.merge(tree, OmegaConf.create(_nested(key, named)))
        else:
            OmegaConf.update(tree, key, named, merge=False, force_add=key.startswith(FREE))
    cfg = OmegaConf.to_object(tree)
    assert isinstance(cfg, RunConfig)
    return Loaded(
        cfg=cfg,
        where=loaded.where | {key: place for key, (_, place) in values.items()},
        explicit=set(loaded.explicit),
    )


def _nested(key: str, value: Any) -> dict[str, Any]:
    """Return a value below a dotted key as nested dictionaries."""
    for name in reversed(key.split(".")):
        value = {name: value}
    return dict(value)


def to_yaml(cfg: RunConfig) -> str:
    """Return the whole config as YAML; it is a recipe itself (`recipe=runs/NAME/config.yaml`)."""
    return str(OmegaConf.to_yaml(OmegaConf.create(escaped(recorded(cfg)))))


def recorded(cfg: RunConfig) -> dict[str, Any]:
    """Return a config as dicts, lists and plain values, as it may be written down: without secrets."""
    return dict(hide_all(plain(cfg)))


def plain(value: Any) -> Any:
    """Return a config as dicts, lists and plain values."""
    if dataclasses.is_dataclass(value):
        return {item.name: plain(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if isinstance(value, list):
        return [plain(item) for item in value]
    return value.name if isinstance(value, Enum) else value


def escaped(value: Any) -> Any:
    """Return a value in which no text refers to a key: read by OmegaConf, it is the same again."""
    if isinstance(value, dict):
        return {name: escaped(item) for name, item in value.items()}
    if isinstance(value, list):
        return [escaped(item) for item in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


def _groups(config_dir: str) -> dict[str, dict[str, Path]]:
    """Return each group's choices; a user's own folder adds to ours."""
    found: dict[str, dict[str, Path]] = {}
    for base in filter(None, (str(files.conf_folder()), config_dir)):
        for path in sorted(Path(base).glob("*/*.yaml")):
            found.setdefault(path.parent.name, {}).setdefault(path.stem, path)
    return found


def _parse(word: str) -> Override:
    try:
        override = OverridesParser.create().parse_override(quoted(word))
        if override.package is not None:
            raise HydraException("no packages")
    except (HydraException, RecursionError) as error:
        raise ConfigError(
            tr(
                "command line: cannot read '{word}': write key=value (quote spaces and brackets for the shell).",
                word=word,
            )
        ) from error
    key = override.key_or_group
    if key == "hydra" or key.startswith("hydra."):
        raise ConfigError(tr("command line: '{word}': Hydra's own settings cannot be changed here.", word=word))
    if override.is_delete():
        raise ConfigError(tr("command line: '{word}': keys cannot be removed; set a value instead.", word=word))
    if override.is_sweep_override():
        raise ConfigError(tr("command line: '{word}' names several values; one run takes one.", word=word))
    return override


def quoted(word: str) -> str:
    """Quote the texts that are not plain ASCII, which Hydra's grammar takes in quotes only."""
    key, equals, value = word.partition("=")
    if value.isascii() or re.search(r"""['"\\]""", value):
        return word
    text = r"[^\s\[\]{}(),:][^\[\]{}(),:]*"
    return (
        key + equals + re.sub(text, lambda found: found[0] if found[0].isascii() else f"'{found[0].rstrip()}'", value)
    )


def _choose_recipe(parsed: list[Override]) -> tuple[str, Path, dict[str, Path]]:
    """Return the recipe's name, its file, and all recipes by name."""
    recipes = known_recipes()
    chosen = [str(override.value()) for override in parsed if override.key_or_group == "recipe"]
    listing = tr("Known: {recipes}.", recipes=", ".join(sorted(recipes)))
    if not chosen:
        raise ConfigError(tr("no recipe is chosen: add recipe=NAME or recipe=PATH.yaml.") + " " + listing)
    name = chosen[-1]
    if name.endswith((".yaml", ".yml")) or os.sep in name:
        path = Path(name)
        if not path.is_file():
            raise ConfigError(tr("command line: there is no recipe file {path}.", path=name) + " " + listing)
        return path.stem, path.resolve(), recipes
    if name not in recipes:
        raise ConfigError(
            tr("command line: unknown recipe '{name}'.", name=name) + did_you_mean(name, recipes) + " " + listing
        )
    return name, recipes[name], recipes


def _is_choice(group: str, value: Any) -> bool:
    """Whether a value names a file of a group, or several where that is possible."""
    names = value if isinstance(value, list) and group in SEVERAL else [value]
    return all(isinstance(name, str) for name in names)


def _check_choice(group: str, chosen: Any, groups: dict[str, dict[str, Path]], place: str = "") -> None:
    for name in chosen if isinstance(chosen, list) else [chosen]:
        if name in groups[group]:
            continue
        raise ConfigError(
            tr("{place}: unknown choice '{group}={name}'.", place=place or tr("command line"), group=group, name=name)
            + did_you_mean(name, groups[group])
            + " "
            + tr("Known: {choices}.", choices=", ".join(groups[group]))
        )


def _value_override(override: Override, values: dict[str, Any]) -> str:
    """Check one key=value word, note it in `values` and return it as Hydra should get it."""
    key = override.key_or_group

    def place(_: str) -> str:
        return tr("command line")

    kind = field_type(key)
    if kind is None or "_target_" in key.split("."):
        raise unknown_key(key, place)
    for path, value in check_tree(override.value(), kind, key, place):
        values[path] = value
    word = str(override.input_line).lstrip("+")
    if key.startswith("launch.env.") and isinstance(override.value(), (bool, int, float)):
        name, _, typed = word.partition("=")
        word = f"{name}='{typed.strip()}'"  # as it was typed: 1e3, not 1000.0
    # `+` on a known key adds nothing and, with a plain dataclass, would lose the value; in free sections it is needed.
    return ("++" if key.startswith(FREE) else "") + word


def _compose(words: list[str], recipe: Path, recipes: dict[str, Path], groups: dict[str, dict[str, Path]]) -> Loaded:
    store = ConfigStore.instance()
    store.store(name="run_schema", node=RunConfig)
    documents = _register_recipes(store, recipe, recipes, groups)
    GlobalHydra.instance().clear()
    where: dict[str, str] = {}
    explicit: set[str] = set()
    try:
        with initialize_config_dir(str(files.conf_folder()), version_base="1.3"):
            loader = GlobalHydra.instance().config_loader()
            order = loader.compute_defaults_list("config", words, RunMode.RUN).defaults
            for document, package, chosen in _documents(order, documents, groups):
                for path, place in _check_document(document, package):
                    where[path] = place
                    (explicit.add if chosen else explicit.discard)(path)
            cfg = OmegaConf.to_object(compose("config", overrides=words))
    except (HydraException, OmegaConfBaseException, RecursionError) as error:
        reason = tr("cannot compose the config: {reason}", reason=" ".join(str(error).split()))
        if isinstance(error, InterpolationResolutionError):
            reason += " " + tr("Where ${{ is meant as it stands, write \\${{.")
        raise ConfigError(reason) from error
    if not isinstance(cfg, RunConfig):
        raise TypeError("conf/config.yaml must list run_schema first")
    return Loaded(cfg=cfg, where=where, explicit=explicit)


def _register_recipes(
    store: ConfigStore, chosen: Path, recipes: dict[str, Path], groups: dict[str, dict[str, Path]]
) -> dict[str, Document]:
    """Hand the chosen recipe, and those it builds on, to Hydra as the group `recipe`; return what was read."""
    documents: dict[str, Document] = {}
    # Name, file, and the files that build on it: a recipe cannot build on itself.
    waiting: list[tuple[str, Path, tuple[Path, ...]]] = [(CHOSEN, chosen, ())]
    while waiting:
        name, path, above = waiting.pop()
        document = documents[name] = files.read(path)
        defaults = document.values.get("defaults", [])
        if not isinstance(defaults, list):
            raise ConfigError(tr("{place}: 'defaults' must be a list.", place=document.place("defaults")))
        for index, item in enumerate(defaults):
            place = document.place(f"defaults[{index}]")
            base = _check_default(item, place, recipes, groups)
            if base:
                if recipes[base].resolve() in (path.resolve(), *above):
                    raise _wrong_default(item, place)
                waiting.append((base, recipes[base], (path.resolve(), *above)))
        list(_check_document(document, ""))
        store.store(group="recipe", name=name, node=OmegaConf.create(document.values), package="_global_")
    return documents


def _check_default(item: Any, place: str, recipes: dict[str, Path], groups: dict[str, dict[str, Path]]) -> str:
    """Check an item of a recipe's defaults list; return the name of the recipe that it builds on, or ""."""
    if item == "_self_":
        return ""
    if isinstance(item, str):
        if item not in recipes:
            raise ConfigError(
                tr("{place}: unknown recipe '{name}'.", place=place, name=item) + did_you_mean(item, recipes)
            )
        return item
    if isinstance(item, dict) and len(item) == 1:
        [(key, value)] = item.items()
        group = str(key).removeprefix("override").strip().lstrip("/")
        if str(key).startswith("override /") and group in groups and _is_choice(group, value):
            _check_choice(group, value, groups, place)
            return ""
        if str(key).startswith("override /") and group not in groups:
            raise ConfigError(
                tr("{place}: unknown group '{group}'.", place=place, group=group)
                + did_you_mean(group, groups)
                + " "
                + tr("Known: {choices}.", choices=", ".join(groups))
            )
    raise _wrong_default(item, place)


def _wrong_default(item: Any, place: str) -> ConfigError:
    return ConfigError(
        tr(
            "{place}: '{item}': write `- override /GROUP: CHOICE`, or the name of another recipe.",
            place=place,
            item=item,
        )
    )


def _documents(
    order: Sequence[Any], recipes: dict[str, Document], groups: dict[str, dict[str, Path]]
) -> Iterator[tuple[Document, str, bool]]:
    """Yield the YAML files in the order in which Hydra merges them, with their package and whether somebody chose them.

    A recipe is chosen, and a group's file when it is not the one that conf/config.yaml takes anyway.
    """
    config = files.read(files.conf_folder() / "config.yaml")
    ordinary = {
        f"{key}/{value}" for item in config.values["defaults"] if isinstance(item, dict) for key, value in item.items()
    }
    for item in order:
        path = item.config_path or ""
        group, _, name = path.rpartition("/")
        if group == "recipe":
            yield recipes[name], "", True
        elif group in groups:
            yield files.read(groups[group][name]), item.package or "", path not in ordinary
        elif path == "config":
            yield config, "", False


def _check_document(document: Document, package: str) -> Iterator[tuple[str, str]]:
    """Hold one file against the schema; yield each of its leaves and where it stands."""

    def place(path: str) -> str:
        return document.place(path.removeprefix(f"{package}.") if package else path)

    values = {key: value for key, value in document.values.items() if key not in HYDRA_KEYS}
    kind = field_type(package) if package else RunConfig
    if "hydra" in values and not package:
        raise ConfigError(tr("{place}: a 'hydra:' section is not allowed in a recipe.", place=document.place("hydra")))
    if kind is None:  # a group of --config-dir whose name is no section, without `# @package _global_`
        raise unknown_key(package, lambda _: document.shown)
    for path, _ in check_tree(values, kind, package, place):
        yield path, place(path)
