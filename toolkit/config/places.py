"""Where a config's values stand, for the messages about them."""

from toolkit.config.load import Loaded
from toolkit.config.schema import RunConfig
from toolkit.errors import ConfigError
from toolkit.messages import tr


def prefix(loaded: Loaded, key: str) -> str:
    """Return "file:line: " of a key that somebody set, else ""."""
    place = loaded.where.get(key, "")
    return tr("{place}: ", place=place) if place else ""


def fail(loaded: Loaded, key: str, sentence: str) -> ConfigError:
    """Return the error about a key, with its place in front."""
    error = ConfigError(prefix(loaded, key) + sentence)
    error.keys = (key,)
    return error


def value_of(cfg: RunConfig, key: str) -> object:
    """Return the value of a dotted key."""
    value: object = cfg
    for part in key.split("."):
        value = getattr(value, part)
    return value
