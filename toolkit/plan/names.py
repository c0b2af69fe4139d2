"""Which parameters a way of tuning means, by their names alone. No torch."""

from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase

from toolkit.config.suggest import did_you_mean
from toolkit.errors import ConfigError
from toolkit.messages import joined, tr

ALL_LINEAR = "all-linear"
_ATTENTION = {"chatglm": ["query_key_value"], "glm": ["q_proj", "k_proj", "v_proj"]}
"""By model type, what the ChatGLM repositories train: query, key and value, one matrix in their own code."""
_USUAL = (["q_proj", "k_proj", "v_proj"], ["query_key_value"], ["qkv_proj"], ["c_attn"], ["Wqkv"])
"""What query, key and value are called elsewhere."""


def matches(name: str, pattern: str) -> bool:
    """Whether a name, or its end from a dot on, is what a pattern (`*`, `?`) says."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")


def chosen(names: Iterable[str], patterns: Collection[str]) -> list[str]:
    """Return the names that match any of the patterns."""
    return [name for name in names if any(matches(name, pattern) for pattern in patterns)]


def default_targets(model_type: str, linear: Collection[str]) -> list[str]:
    """Return what LoRA is added to where nothing is said: query, key and value, else every linear layer.

    Args:
        model_type: of the config.
        linear: names of the linear layers of the decoder.
    """
    known = _ATTENTION.get(model_type)
    usual = (names for names in _USUAL if all(chosen(linear, [name]) for name in names))
    return known or next(usual, [ALL_LINEAR])


def check_matches(key: str, pattern: str, names: Collection[str]) -> list[str]:
    """Return the names that match a pattern.

    Args:
        key: whose value the pattern is part of.
        pattern: see `matches`.
        names: what there is.

    Raises:
        ConfigError: none does; the nearest are named.
    """
    found = chosen(names, [pattern])
    if not found:
        ends = sorted({".".join(name.split(".")[-2:]) if "." in pattern else name.rpartition(".")[2] for name in names})
        raise ConfigError(
            joined(
                tr("{key}: nothing in this model is called '{pattern}'.", key=key, pattern=pattern),
                did_you_mean(pattern, ends),
                tr("Known: {names}.", names=", ".join(ends)),
            )
        )
    return found
