"""Arguments of `generate` and `chat`: which model is asked, and how it samples."""

from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.arguments import non_negative_int, number, positive_int
from toolkit.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from toolkit.evaluate.generate import Sampling

MODEL = ("model.path", "model.family", "adapter")
SAMPLING = ("max_new_tokens", "temperature", "top_p", "top_k", "seed")


def check_model(given: dict[str, str], usage: str) -> None:
    """Reject a command that names neither a model nor an adapter, which knows its base, or one that does not exist."""
    if not given.get("model.path") and not given.get("adapter"):
        raise ConfigError("{name} is missing: {usage}", name="model.path", usage=usage)
    for name in ("model.path", "adapter"):
        if given.get(name) and not Path(given[name]).is_dir():
            raise ModelError("there is no directory {path} ({name}).", path=given[name], name=name)


def sampling_arguments(given: dict[str, str], max_new_tokens: int) -> "Sampling":
    """Return how tokens are chosen; an argument that greedy decoding ignores is an error."""
    temperature = number(given, "temperature", 0.0)
    drawn = [name for name in ("top_p", "top_k", "seed") if name in given]
    if drawn and not temperature:
        raise ConfigError(
            "{name} has no effect without temperature: the likeliest token is taken. Remove it.", name=drawn[0]
        )
    from toolkit.evaluate.generate import Sampling

    return Sampling(
        max_new_tokens=positive_int(given, "max_new_tokens") or max_new_tokens,
        temperature=temperature,
        top_p=number(given, "top_p", 1.0, most=1.0),
        top_k=non_negative_int(given, "top_k", 0),
        seed=non_negative_int(given, "seed", 0),
    )
