"""The YAML files of a config: recipes are handed to Hydra, every file is held against the schema first."""

from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from toolkit.config import files, short_forms, validate
from toolkit.config.files import YamlDocument
from toolkit.config.schema import RunConfig
from toolkit.config.validate import about, field_type, unknown_key, validate_tree
from toolkit.errors import ConfigError
from toolkit.messages import did_you_mean, joined, tr
from toolkit.problems import Problems

CHOSEN = "chosen"
"""The name under which Hydra knows the chosen recipe: its own may hold what Hydra's grammar refuses, or be the name of
the recipe that it builds on."""
SEVERAL = ("track",)
"""Groups of which several files may be chosen: track=[tensorboard,wandb]."""


def is_choice(group: str, value: Any) -> bool:
    """Return whether a value names a file of a group, or several where that is possible."""
    names = value if isinstance(value, list) and group in SEVERAL else [value]
    return all(isinstance(name, str) for name in names)


def check_choice(group: str, chosen: Any, groups: dict[str, dict[str, Path]], place: str = "") -> None:
    """Check that a choice of a group exists.

    Raises:
        ConfigError: it does not.
    """
    for name in chosen if isinstance(chosen, list) else [chosen]:
        if name in groups[group]:
            continue
        sentence = tr(
            "{place}: unknown choice '{group}={name}'.", place=place or tr("command line"), group=group, name=name
        )
        known = tr("Known: {choices}.", choices=", ".join(groups[group]))
        raise about(group, joined(sentence, did_you_mean(name, groups[group]), known))


def register_recipes(
    store: ConfigStore,
    chosen: Path,
    recipes: dict[str, Path],
    groups: dict[str, dict[str, Path]],
    problems: Problems,
) -> dict[str, YamlDocument]:
    """Hand the chosen recipe, and those it builds on, to Hydra as the group `recipe`; return what was read."""
    documents: dict[str, YamlDocument] = {}
    # Name, file, and the files that build on it: a recipe cannot build on itself.
    waiting: list[tuple[str, Path, tuple[Path, ...]]] = [(CHOSEN, chosen, ())]
    while waiting:
        name, path, above = waiting.pop()
        document = documents[name] = files.read(path)
        _refuse_foreign(document)
        short_forms.in_recipe(document.values)
        defaults = document.values.get("defaults", [])
        if not isinstance(defaults, list):
            raise ConfigError(tr("{place}: 'defaults' must be a list.", place=document.place("defaults")))
        right = []
        for index, item in enumerate(map(_written_out, defaults)):
            place = document.place(f"defaults[{index}]")
            base = problems.attempt(_check_default, item, place, recipes, groups)
            if base is not None:
                right.append(item)
            if base:
                if recipes[base].resolve() in (path.resolve(), *above):
                    raise _wrong_default(item, place)
                waiting.append((base, recipes[base], (path.resolve(), *above)))
        if defaults:
            document.values["defaults"] = right
        list(check_document(document, "", problems))
        store.store(group="recipe", name=name, node=OmegaConf.create(document.values), package="_global_")
    return documents


def _refuse_foreign(document: YamlDocument) -> None:
    """Refuse another program's config, whose keys would be told one by one.

    Raises:
        ConfigError: how to make a recipe of it.
    """
    own = {item.name for item in fields(RunConfig)} | {"defaults"}
    others = [str(key) for key in document.values if key not in own and validate.is_foreign(str(key))]
    if len(others) >= 2 and 2 * len(others) > len(document.values):
        raise ConfigError(
            tr(
                "{file} is no recipe but another program's config ({keys}, …). Make a recipe of it:  toolkit "
                "import-config {file} output=NAME.yaml",
                file=document.shown,
                keys=", ".join(others[:3]),
            )
        )


def _written_out(item: Any) -> Any:
    """Return an item of a defaults list in which `override /zero: 3` means stage3."""
    if isinstance(item, dict) and len(item) == 1:
        [(key, value)] = item.items()
        return {key: short_forms.choice(str(key).rpartition("/")[2], value)}
    return item


def _check_default(item: Any, place: str, recipes: dict[str, Path], groups: dict[str, dict[str, Path]]) -> str:
    """Check an item of a recipe's defaults list; return the name of the recipe that it builds on, or ""."""
    if item == "_self_":
        return ""
    if isinstance(item, str):
        if item not in recipes:
            raise ConfigError(
                joined(tr("{place}: unknown recipe '{name}'.", place=place, name=item), did_you_mean(item, recipes))
            )
        return item
    if isinstance(item, dict) and len(item) == 1:
        [(key, value)] = item.items()
        group = str(key).removeprefix("override").strip().lstrip("/")
        if str(key).startswith("override /") and group in groups and is_choice(group, value):
            check_choice(group, value, groups, place)
            return ""
        if str(key).startswith("override /") and group not in groups:
            raise ConfigError(
                joined(
                    tr("{place}: unknown group '{group}'.", place=place, group=group),
                    did_you_mean(group, groups),
                    tr("Known: {choices}.", choices=", ".join(groups)),
                )
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


def documents(
    order: Sequence[Any], recipes: dict[str, YamlDocument], groups: dict[str, dict[str, Path]], layers: dict[str, int]
) -> Iterator[tuple[YamlDocument, str, int]]:
    """Yield the YAML files in the order in which they are merged, with their package and layer.

    It is Hydra's order, but a group that the command line chose comes after the recipes: what is typed beats them.

    Args:
        order: Hydra's list of defaults.
        recipes: the recipes that were read.
        groups: each group's choices.
        layers: groups that the command line chose -> its layer; receives those that recipes chose.
    """
    config = files.read(files.conf_folder() / "config.yaml")
    ordinary = {
        f"{key}/{value}" for item in config.values["defaults"] if isinstance(item, dict) for key, value in item.items()
    }
    typed = set(layers)
    order = sorted(order, key=lambda item: (item.config_path or "").rpartition("/")[0] in typed)
    named = [path.removeprefix("recipe/") for item in order if (path := item.config_path or "").startswith("recipe/")]
    for number, name in enumerate(named, start=1):
        for item in recipes[name].values.get("defaults", []):
            for key in item if isinstance(item, dict) else ():
                group = str(key).rpartition("/")[2]
                layers[group] = max(layers.get(group, 0), number)
    for item in order:
        path = item.config_path or ""
        group, _, name = path.rpartition("/")
        if group == "recipe":
            yield recipes[name], "", named.index(name) + 1
        elif group in groups:
            layer = layers.get(group, 0 if path in ordinary else 1)
            yield files.read(groups[group][name]), item.package or "", layer
        elif path == "config":
            yield config, "", 0


def check_document(document: YamlDocument, package: str, problems: Problems) -> Iterator[tuple[str, str]]:
    """Hold one file against the schema; yield each of its right leaves and where it stands, remove the others."""

    def place(path: str) -> str:
        return document.place(path.removeprefix(f"{package}.") if package else path)

    defaults = document.values.pop("defaults", None)
    kind = field_type(package) if package else RunConfig
    if not package and document.values.pop("hydra", None) is not None:
        place_of_it = document.place("hydra")
        problems.add(ConfigError(tr("{place}: a 'hydra:' section is not allowed in a recipe.", place=place_of_it)))
    if kind is None:  # a group of --config-dir whose name is no section, without `# @package _global_`
        raise unknown_key(package, lambda _: document.shown)
    for path, _ in validate_tree(document.values, kind, package, place, problems):
        yield path, place(path)
    if defaults is not None:
        document.values["defaults"] = defaults
