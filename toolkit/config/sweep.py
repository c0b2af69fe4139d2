"""Hydra's sweep grammar: comma lists, choice(), range(), glob() and interval() in overrides become axes of a sweep."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override
from hydra.errors import HydraException

from toolkit.config.files import known_recipes
from toolkit.config.load import group_choices, quoted
from toolkit.errors import ConfigError


@dataclass(kw_only=True, slots=True)
class Axis:
    """One override that names several values."""

    key: str
    """Key or group, with the + of the word."""
    values: list[str] = field(default_factory=list)
    """Its values, as words have them; empty for an interval."""
    low: float = 0.0
    """interval: its lower end."""
    high: float = 0.0
    """interval: its upper end."""
    is_log: bool = False
    """interval: drawn by its logarithm: tag(log, interval(1e-5, 1e-3))."""
    is_whole: bool = False
    """interval: whole numbers only: int(interval(1, 8))."""

    def ends(self) -> list[str]:
        """Return the first and the last value, as words have them."""
        if self.values:
            return [self.values[0], self.values[-1]]
        return [written(end, self.is_whole) for end in (self.low, self.high)]

    def __str__(self) -> str:
        """Return it as a word of a command line."""
        if self.values:
            return f"{self.key}={','.join(self.values)}"
        interval = f"interval({','.join(self.ends())})"
        kind = f"int({interval})" if self.is_whole else interval
        return f"{self.key}={f'tag(log,{kind})' if self.is_log else kind}"


class _Groups:
    """What Hydra's parser asks for the choices of glob()."""

    def __init__(self, config_dir: str) -> None:
        self._choices = {"recipe": list(known_recipes()), **group_choices(config_dir)}

    def get_group_options(self, group: str, **_: Any) -> list[str]:
        """Return the choices of a group."""
        return self._choices.get(group, [])


def read(words: Sequence[str], config_dir: str = "") -> tuple[list[str], list[Axis]]:
    """Return the overrides that name one value, as they are typed, and those that name several as axes, in order.

    Raises:
        ConfigError: if a word is no override, or names its values in an order by chance.
    """
    parser, groups = OverridesParser.create(), _Groups(config_dir)
    fixed: list[str] = []
    axes: list[Axis] = []
    for word in words:
        try:
            override = parser.parse_override(quoted(word))
            override.config_loader = groups
            if override.is_sweep_override():
                axes.append(_axis(override, word))
            else:
                fixed.append(word)
        except (HydraException, RecursionError) as error:
            raise ConfigError(
                "command line: cannot read '{word}': {reason}", word=word, reason=" ".join(str(error).split())
            ) from error
    if twice := {axis.key for axis in axes if [other.key for other in axes].count(axis.key) > 1}:
        raise ConfigError("command line: {key} names several values twice.", key=", ".join(sorted(twice)))
    return fixed, axes


def grid(axes: Sequence[Axis]) -> list[list[str]]:
    """Return the words of every combination, the last axis changing fastest.

    Raises:
        ConfigError: an interval, which has no end of values.
    """
    for axis in axes:
        if not axis.values:
            raise ConfigError(
                "command line: {key}: an interval needs trials=N metric=NAME, which choose values in it; without "
                "them list the values: {key}=A,B,C.",
                key=axis.key,
            )
    return [
        [f"{axis.key}={value}" for axis, value in zip(axes, values, strict=True)]
        for values in itertools.product(*(axis.values for axis in axes))
    ]


def written(value: float, is_whole: bool) -> str:
    """Return a number as a word has it."""
    return str(round(value)) if is_whole else f"{value:.6g}"


def _axis(override: Override, word: str) -> Axis:
    key = override.get_key_element()
    value = override.value()
    if getattr(value, "shuffle", False):
        raise ConfigError(
            "command line: '{word}': the order would be another each time, and a sweep could not go on. Leave "
            "shuffle() out.",
            word=word,
        )
    if isinstance(value, IntervalSweep):
        low, high = value.start, value.end
        is_log = "log" in (value.tags or ())
        if low is None or high is None or not -math.inf < low < high < math.inf or (is_log and low <= 0):
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
