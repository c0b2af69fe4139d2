"""Overrides with several values, the axes of a sweep, in Hydra's grammar."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from math import inf
from types import SimpleNamespace
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override
from hydra.errors import HydraException

from toolkit.config import files
from toolkit.config.command_words import quote_text
from toolkit.config.load import group_choices
from toolkit.messages import ConfigError


@dataclass(kw_only=True, slots=True)
class Axis:
    """An override with several values: an axis of a sweep."""

    key: str
    """Key or group, with the + of the argument."""
    values: list[str] = field(default_factory=list)
    """Values in the form of the command line; [] for an interval."""
    low: float = 0.0
    high: float = 0.0
    is_log: bool = False
    """interval: drawn by its logarithm: tag(log, interval(1e-5, 1e-3))."""
    is_whole: bool = False
    """interval: whole numbers only: int(interval(1, 8))."""

    def typed(self, value: Any) -> str:
        """Return one of its values in the form of the command line."""
        if self.values:
            return str(value)
        return str(round(value)) if self.is_whole else f"{value:.6g}"

    def ends(self) -> list[str]:
        """Return the first and the last value in the form of the command line."""
        ends: list[Any] = [*self.values] or [self.low, self.high]
        return [self.typed(ends[0]), self.typed(ends[-1])]

    def __str__(self) -> str:
        """Return the axis as an argument."""
        if self.values:
            return f"{self.key}={','.join(self.values)}"
        interval = f"interval({','.join(self.ends())})"
        kind = f"int({interval})" if self.is_whole else interval
        return f"{self.key}={f'tag(log,{kind})' if self.is_log else kind}"


def split_axes(words: Sequence[str], config_dir: str = "") -> tuple[list[str], list[Axis]]:
    """Return the overrides with one value, unchanged, and those with several (Hydra's sweep grammar) as axes.
    ConfigError if an argument is no override, or its values have a random order.
    """
    choices = {"recipe": list(files.known_recipes()), **group_choices(config_dir)}
    # Hydra's parser asks this object for the choices of glob().
    groups = SimpleNamespace(get_group_options=lambda group, **_: choices.get(group, []))
    fixed: list[str] = []
    axes: list[Axis] = []
    for word in words:
        try:
            override = OverridesParser.create().parse_override(quote_text(word))
            override.config_loader = groups
            if override.is_sweep_override():
                axes.append(_axis(override, word))
            else:
                fixed.append(word)
        except (HydraException, RecursionError) as error:
            raise ConfigError(
                "command line: cannot read '{word}': {reason}", word=word, reason=" ".join(str(error).split())
            ) from error
    keys = [axis.key for axis in axes]
    if twice := {key for key in keys if keys.count(key) > 1}:
        raise ConfigError("command line: {key} names several values twice.", key=", ".join(sorted(twice)))
    return fixed, axes


def grid(axes: Sequence[Axis]) -> list[list[str]]:
    """Return the arguments of every combination, the last axis changing fastest; ConfigError for an interval."""
    if endless := [axis.key for axis in axes if not axis.values]:
        raise ConfigError(
            "command line: {key}: an interval needs trials=N metric=NAME, which choose values in it; without "
            "them list the values: {key}=A,B,C.",
            key=endless[0],
        )
    words_of_axes = [[f"{axis.key}={value}" for value in axis.values] for axis in axes]
    return [list(words) for words in product(*words_of_axes)]


def _axis(override: Override, word: str) -> Axis:
    """Return the axis of a parsed argument, an interval or a list of values; ConfigError if it is neither."""
    key = override.get_key_element()
    value = override.value()
    if getattr(value, "shuffle", False):
        raise ConfigError(
            "command line: '{word}': the order would be another each time, and a sweep could not be "
            "resumed. Leave shuffle() out.",
            word=word,
        )
    if isinstance(value, IntervalSweep):
        low, high = value.start, value.end
        is_log = "log" in (value.tags or ())
        if low is None or high is None or not -inf < low < high < inf or (is_log and low <= 0):
            raise ConfigError(
                "command line: '{word}': an interval goes from a number to a larger one, above 0 if it is drawn by "
                "its logarithm.",
                word=word,
            )
        return Axis(key=key, low=low, high=high, is_log=is_log, is_whole=isinstance(low, int))
    values = list(override.sweep_string_iterator())
    if not values:
        raise ConfigError("command line: '{word}' names no value.", word=word)
    return Axis(key=key, values=list(dict.fromkeys(values)))
