"""Settings that differ: of a run from its recipe and from the defaults, and of several runs from one another."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from toolkit.config.files import known_recipes
from toolkit.config.load import load, recorded
from toolkit.config.schema import RunConfig
from toolkit.errors import ToolkitError
from toolkit.report.folder import Run
from toolkit.secrets import are_same

_OWN = ("run.name", "run.dir", "recipe", "resume")
"""What differs between any two runs and says nothing of them."""
_NONE = "—"


@dataclass(frozen=True, slots=True)
class Changed:
    """A setting."""

    key: str
    values: Sequence[str]
    """Of the run, its recipe and the defaults; or of each run."""
    is_new: bool
    """Whether the run's value is not its recipe's either."""


def of_run(run: Run) -> tuple[list[Changed], bool]:
    """Return what a run sets otherwise than the defaults, with its recipe's values; and whether that was found."""
    ours, defaults = dict(_leaves(run.config)), dict(_leaves(recorded(RunConfig())))
    recipe = _recipe(str(run.config.get("recipe", "")))
    found = []
    for key in dict.fromkeys([*ours, *(recipe or {})]):
        value, default = ours.get(key), defaults.get(key)
        its = recipe.get(key) if recipe is not None else default
        if key not in _OWN and key in ours and not (are_same(value, default) and are_same(value, its)):
            found.append(Changed(key, [_text(value), _text(its), _text(default)], not are_same(value, its)))
    return sorted(found, key=lambda one: not one.is_new), recipe is not None


def between(runs: Sequence[Run]) -> list[Changed]:
    """Return the settings in which runs differ."""
    leaves = [dict(_leaves(run.config)) for run in runs]
    keys = dict.fromkeys(key for one in leaves for key in one)
    return [
        Changed(key, [_text(one.get(key)) for one in leaves], True)
        for key in keys
        if key not in _OWN and any(not are_same(one.get(key), leaves[0].get(key)) for one in leaves[1:])
    ]


def _recipe(name: str) -> dict[str, Any] | None:
    """Return the settings of a recipe as it is here; None where there is none of this name, or it cannot be read."""
    if name not in known_recipes():
        return None
    try:
        return dict(_leaves(recorded(load([f"recipe={name}"]).cfg)))
    except ToolkitError:
        return None


def _leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _text(value: object) -> str:
    """Return a value as YAML has it."""
    if value is None:
        return _NONE
    if isinstance(value, str):
        return value or '""'
    text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=10**6, sort_keys=False)
    return text.removesuffix("\n").removesuffix("\n...")
