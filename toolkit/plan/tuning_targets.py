"""Which parameters and layers of a model tuning means: by patterns of their names, or the usual ones. No torch."""

from collections.abc import Collection, Iterable
from dataclasses import replace
from fnmatch import fnmatchcase

from toolkit.config import schema
from toolkit.messages import ConfigError, did_you_mean, joined, tr

SCORE = "score.weight"
"""What transformers calls the head of a sequence classifier."""
ALL_LINEAR = "all-linear"
_ATTENTION = {"chatglm": ["query_key_value"], "glm": ["q_proj", "k_proj", "v_proj"]}
"""By model type, what the ChatGLM repositories train: query, key and value, one matrix in their own code."""
_USUAL = (
    ["q_proj", "k_proj", "v_proj"],
    ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"],
    ["q_a_proj", "q_b_proj", "kv_proj"],
    ["query_key_value"],
    ["qkv_proj"],
    ["c_attn"],
    ["Wqkv"],
)
"""What query, key and value are called elsewhere."""


def select_names(names: Iterable[str], patterns: Collection[str]) -> list[str]:
    """Return the names that match any of the patterns (`*`, `?`) as a whole or from a dot on."""
    return [name for name in names if any(fnmatchcase(f".{name}", f"*.{pattern}") for pattern in patterns)]


def default_targets(model_type: str, linear: Collection[str]) -> list[str]:
    """Return LoRA's default `target_modules`: query, key and value, else every linear layer (`linear`: their names)."""
    usual = (names for names in _USUAL if all(select_names(linear, [name]) for name in names))
    return _ATTENTION.get(model_type) or next(usual, [ALL_LINEAR])


def matching_names(key: str, pattern: str, names: Collection[str]) -> list[str]:
    """Return the names that match a pattern; ConfigError, which names the config's `key`, if there are none."""
    if matching := select_names(names, [pattern]):
        return matching
    ends = sorted({".".join(name.split(".")[-2:]) if "." in pattern else name.rpartition(".")[2] for name in names})
    raise ConfigError(
        joined(
            tr("{key}: nothing in this model is called '{pattern}'.", key=key, pattern=pattern),
            did_you_mean(pattern, ends),
            tr("Known: {names}.", names=", ".join(ends)),
        )
    )


def tuning_of(cfg: schema.RunConfig) -> schema.TuningConfig:
    """Return `tuning`; with the head of a task that adds one, which is always trained."""
    if not cfg.task.has_head:
        return cfg.tuning
    tuning, module = cfg.tuning, SCORE.partition(".")[0]
    return replace(tuning, patterns=[*tuning.patterns, SCORE], save_modules=[*tuning.save_modules, module])
