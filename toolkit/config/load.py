"""From a command line to a RunConfig, through Hydra's compose API; the only place that sees Hydra.

`@hydra.main` is not used: it would run what a recipe puts under `hydra.callbacks` before our first line, and it rejects
the launcher's --local_rank. Every file is held against the schema, with its line numbers, before Hydra merges anything.
"""

import dataclasses
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

from hydra import initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException

from toolkit.config import files, short_forms
from toolkit.config.documents import CHOSEN, check_choice, check_document, documents, is_choice, register_recipes
from toolkit.config.files import known_recipes
from toolkit.config.schema import RunConfig, TuningMethod
from toolkit.config.validate import field_type, unknown_key, validate_tree
from toolkit.errors import ConfigError
from toolkit.messages import did_you_mean, joined, tr
from toolkit.problems import Problems
from toolkit.secrets import hide_all

JSON, TYPED = 500, 1000
"""Layers of a user's DeepSpeed JSON and of the command line; recipes count from 1."""
FREE = ("ds_extra", "launch.env")
_LONGEST_WORD = 200
"""Characters of an argument that a message shows."""
"""Sections whose keys the schema does not name."""


@dataclass(kw_only=True, slots=True)
class LoadedConfig:
    """A config and where its values come from."""

    cfg: RunConfig
    """The config."""
    where: dict[str, str] = field(default_factory=dict)
    """Dotted key -> "recipes/x.yaml:12", "conf/zero/stage2.yaml:3" or "command line"; absent: the schema's default."""
    explicit: set[str] = field(default_factory=set)
    """Keys that somebody chose: set by the recipe, by one that it builds on, by a group's file that the recipe or the
    command line picked, or on the command line."""
    layers: dict[str, int] = field(default_factory=dict)
    """Dotted key, or group that was chosen -> how high the layer is that set it: 0 for conf/, then the recipes, the one
    that was named last, then `JSON` and `TYPED`."""
    notices: list[str] = field(default_factory=list)
    """What a user may want to know about the config, but need not correct."""

    def position(self, key: str) -> str:
        """Return "file:line: " of a key that somebody set, else ""."""
        place = self.where.get(key, "")
        return tr("{place}: ", place=place) if place else ""

    def error(self, key: str, sentence: str) -> ConfigError:
        """Return the error about a key, with its place in front."""
        error = ConfigError(self.position(key) + sentence)
        error.keys = (key,)
        return error

    def layer_of(self, key: str) -> int:
        """Return the layer of a key's value; where nothing sets it, that of the choice of its group."""
        parts = key.split(".")
        return max(self.layers.get(".".join(parts[:count]), 0) for count in range(1, len(parts) + 1))


def group_choices(config_dir: str = "") -> dict[str, list[str]]:
    """Return the choices of every group.

    Args:
        config_dir: a further folder of groups; "" none.
    """
    return {group: list(choices) for group, choices in _groups(config_dir).items()}


def load(overrides: Sequence[str], *, config_dir: str = "", problems: Problems | None = None) -> LoadedConfig:
    """Compose a config.

    Args:
        overrides: arguments in Hydra's grammar: recipe=NAME|PATH, zero=stage3, zero.stage=3, +known.key=value.
        config_dir: a further directory of groups, next to conf/; "" none.
        problems: receives wrong keys and values, which are left out of the config; None raises them.

    Raises:
        ConfigError: what keeps a config from being composed; without `problems` anything wrong with recipe, group
            files or overrides.
    """
    found = Problems() if problems is None else problems
    if config_dir and not Path(config_dir).is_dir():
        raise ConfigError(tr("--config-dir {folder} is not a folder.", folder=config_dir))
    groups = _groups(config_dir)
    parsed = [override for word in overrides if (override := found.attempt(_parse, word)) is not None]
    if (chosen := found.attempt(_choose_recipe, parsed)) is None:
        found.raise_all()
        raise AssertionError("no recipe, and no error about it")
    recipe, path, recipes = chosen
    words = [f"recipe={CHOSEN}"]
    values: dict[str, Any] = {}
    for override in parsed:
        if override.key_or_group != "recipe":
            words += found.attempt(_override, override, groups, values, found) or []
    if config_dir:
        folder = str(Path(config_dir).absolute()).replace("'", "\\'")
        words.append(f"hydra.searchpath=['file://{folder}']")
    loaded = _compose(words, path, recipes, groups, found)
    if problems is None:
        found.raise_all()
    for key in values:
        loaded.where[key] = tr("command line")
        loaded.explicit.add(key)
        loaded.layers[key] = TYPED
    follow_method(loaded)
    # A resolved config (runs/NAME/config.yaml) keeps the name of the recipe that it was made from.
    loaded.cfg.recipe = loaded.cfg.recipe or recipe
    return loaded


def replace(loaded: LoadedConfig, values: dict[str, tuple[object, str]], layer: int = TYPED) -> LoadedConfig:
    """Return a copy with other values.

    Args:
        loaded: what is copied.
        values: dotted key -> (value, where it comes from).
        layer: of these values.

    Raises:
        ConfigError: unknown key or wrong type.
    """
    tree = OmegaConf.merge(_schema(), escaped(to_plain(loaded.cfg)))
    problems = Problems()
    for key, (value, place) in values.items():
        kind = field_type(key)
        if kind is None:
            raise unknown_key(key, lambda _, place=place: place)  # type: ignore[misc]
        named = value.name if isinstance(value, Enum) else value
        before = problems.count
        list(validate_tree(named, kind, key, lambda _, place=place: place, problems))  # type: ignore[misc]
        if problems.count > before:
            continue
        if isinstance(named, list):  # its items may be sections, which `update` takes as objects only
            tree = OmegaConf.merge(tree, OmegaConf.create(_nested(key, named)))
        else:
            OmegaConf.update(tree, key, named, merge=False, force_add=key.startswith(FREE))
    problems.raise_all()
    cfg = OmegaConf.to_object(tree)
    assert isinstance(cfg, RunConfig)
    return LoadedConfig(
        cfg=cfg,
        where=loaded.where | {key: place for key, (_, place) in values.items()},
        explicit=set(loaded.explicit),
        layers=loaded.layers | dict.fromkeys(values, layer),
        notices=list(loaded.notices),
    )


@cache
def _schema() -> DictConfig:
    """Return the schema's defaults as OmegaConf has them; merging copies them."""
    return OmegaConf.structured(RunConfig)


def _nested(key: str, value: Any) -> dict[str, Any]:
    """Return a value below a dotted key, or at the top for "", as nested dictionaries."""
    for name in reversed(key.split(".") if key else []):
        value = {name: value}
    return dict(value)


def to_yaml(cfg: RunConfig) -> str:
    """Return the whole config as YAML; it is a recipe itself (`recipe=runs/NAME/config.yaml`)."""
    return str(OmegaConf.to_yaml(OmegaConf.create(escaped(to_dict(cfg)))))


def to_dict(cfg: RunConfig) -> dict[str, Any]:
    """Return a config as dicts, lists and plain values, as it may be written down: without secrets."""
    return dict(hide_all(to_plain(cfg)))


def to_plain(value: Any) -> Any:
    """Return a config as dicts, lists and plain values."""
    if dataclasses.is_dataclass(value):
        return {item.name: to_plain(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if isinstance(value, list):
        return [to_plain(item) for item in value]
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
    except (HydraException, RecursionError, ValueError) as error:  # ValueError: a number of thousands of digits
        raise ConfigError(
            tr(
                "command line: cannot read '{word}': write key=value (quote spaces and brackets for the shell).",
                word=word[:_LONGEST_WORD],
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
        raise ConfigError(joined(tr("no recipe is chosen: add recipe=NAME or recipe=PATH.yaml."), listing))
    name = chosen[-1]
    if name.endswith((".yaml", ".yml")) or os.sep in name:
        path = Path(name)
        if not path.is_file():
            raise ConfigError(joined(tr("command line: there is no recipe file {path}.", path=name), listing))
        return path.stem, path.resolve(), recipes
    if name.endswith((".json", ".sh")) and Path(name).is_file():
        raise ConfigError(
            tr(
                "command line: {path} is no recipe. A DeepSpeed JSON goes with a recipe: recipe=NAME "
                "deepspeed_json={path}. Of another program's config make one:  toolkit import-config {path} "
                "output=NAME.yaml",
                path=name,
            )
        )
    if name not in recipes:
        raise ConfigError(
            joined(tr("command line: unknown recipe '{name}'.", name=name), did_you_mean(name, recipes), listing)
        )
    return name, recipes[name], recipes


def _override(
    override: Override, groups: dict[str, dict[str, Path]], values: dict[str, Any], problems: Problems
) -> list[str]:
    """Check one argument and return it as Hydra should get it, [] if it is wrong; note the keys that it sets."""
    group = override.key_or_group
    written = short_forms.argument(group, override.value(), groups["data"])
    if written:
        return _override(_parse(written), groups, values, problems)
    if group not in groups or not is_choice(group, override.value()):
        return _value_override(override, values, problems)
    check_choice(group, override.value(), groups)
    # Hydra wants the + for a group that conf/config.yaml does not list, and only for that.
    added = "" if group in _groups("") else "+"
    return [added + str(override.input_line).lstrip("+")]


def _value_override(override: Override, values: dict[str, Any], problems: Problems) -> list[str]:
    """Check one key=value argument, note it in `values` and return it as Hydra should get it, [] if it is wrong."""
    key = override.key_or_group

    def place(_: str) -> str:
        return tr("command line")

    kind = field_type(key)
    if kind is None or "_target_" in key.split("."):
        raise unknown_key(key, place)
    before = problems.count
    leaves = dict(validate_tree(override.value(), kind, key, place, problems))
    if problems.count > before:
        return []
    values |= leaves
    word = str(override.input_line).lstrip("+")
    if key.startswith("launch.env.") and isinstance(override.value(), (bool, int, float)):
        name, _, typed = word.partition("=")
        word = f"{name}='{typed.strip()}'"  # as it was typed: 1e3, not 1000.0
    # `+` on a known key adds nothing and, with a plain dataclass, would lose the value; in free sections it is needed.
    return [("++" if key.startswith(FREE) else "") + word]


def _compose(
    words: list[str],
    recipe: Path,
    recipes: dict[str, Path],
    groups: dict[str, dict[str, Path]],
    problems: Problems,
) -> LoadedConfig:
    store = ConfigStore.instance()
    store.store(name="run_schema", node={})  # Hydra orders the files; their values are merged onto the schema here
    recipes_read = register_recipes(store, recipe, recipes, groups, problems)
    GlobalHydra.instance().clear()
    where: dict[str, str] = {}
    explicit: set[str] = set()
    trees: list[DictConfig] = []
    try:
        with initialize_config_dir(str(files.conf_folder()), version_base="1.3"):
            loader = GlobalHydra.instance().config_loader()
            defaults = loader.compute_defaults_list("config", words, RunMode.RUN)
            typed = {word.lstrip("+").partition("=")[0] for word in words[1:]} & set(groups)
            layers = dict.fromkeys(typed, TYPED)
            for document, package, layer in documents(defaults.defaults, recipes_read, groups, layers):
                for path, place in check_document(document, package, problems):
                    where[path], layers[path] = place, layer
                    (explicit.add if layer else explicit.discard)(path)
                values = {key: value for key, value in document.values.items() if key != "defaults"}
                trees.append(OmegaConf.create(_nested(package, values)))
            # What Hydra's `compose` does, which would make the defaults list and read all files a second time.
            tree = OmegaConf.merge(_schema(), *trees)
            OmegaConf.set_struct(tree, True)
            values_typed = [one for one in defaults.config_overrides if not one.is_hydra_override()]
            ConfigLoaderImpl._apply_overrides_to_config(values_typed, tree)
            cfg = OmegaConf.to_object(tree)
    except (HydraException, OmegaConfBaseException, RecursionError) as error:
        problems.raise_all()  # what is wrong with a group's file ends Hydra too, with less to say about it
        reason = tr("cannot compose the config: {reason}", reason=" ".join(str(error).split()))
        if isinstance(error, InterpolationResolutionError):
            reason = joined(reason, tr("Where ${{ is meant as it stands, write \\${{."))
        raise ConfigError(reason) from error
    if not isinstance(cfg, RunConfig):
        raise TypeError("conf/config.yaml must list run_schema first")
    return LoadedConfig(cfg=cfg, where=where, explicit=explicit, layers=layers)


LEARNING_RATES = {
    TuningMethod.full: 2e-5,
    TuningMethod.freeze: 2e-5,
    TuningMethod.lora: 2e-4,
    TuningMethod.qlora: 2e-4,
    TuningMethod.ptuning_v2: 5e-3,  # the original's 2e-2 diverges in float16
    TuningMethod.prompt: 3e-2,  # as in peft's own examples
}
"""Peak rates with AdamW. Few new parameters that begin at 0 or at random need larger ones than trained weights."""


def follow_method(loaded: LoadedConfig) -> None:
    """Set `optim.lr` by `tuning.method` where nothing names it."""
    method = loaded.cfg.tuning.method
    if "optim.lr" in loaded.where or loaded.cfg.optim.lr == LEARNING_RATES[method]:
        return
    loaded.cfg.optim.lr = LEARNING_RATES[method]
    loaded.where["optim.lr"] = tr("default of tuning.method = {method}", method=method.value)
