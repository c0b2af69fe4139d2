"""What `generate` and `chat` have in common: which model is asked, and how."""

from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.arguments import non_negative_int, number, positive_int
from toolkit.errors import ConfigError, ModelError
from toolkit.messages import tr

if TYPE_CHECKING:
    from toolkit.evaluate.generate import Sampling
    from toolkit.models.chat import AnyChatEncoder

MODEL = ("model.path", "model.family", "adapter")
SAMPLING = ("max_new_tokens", "temperature", "top_p", "top_k", "seed")


def check_model(given: dict[str, str], usage: str) -> None:
    """Refuse a command that names no model, or one that does not exist. No torch.

    Raises:
        ConfigError: neither a path nor an adapter, which knows its base.
        ModelError: there is no such directory.
    """
    if not given.get("model.path") and not given.get("adapter"):
        raise ConfigError(tr("{name} is missing: {usage}", name="model.path", usage=usage))
    for name in ("model.path", "adapter"):
        if given.get(name) and not Path(given[name]).is_dir():
            raise ModelError(tr("there is no directory {path} ({name}).", path=given[name], name=name))


def sampling_of(given: dict[str, str], max_new_tokens: int) -> "Sampling":
    """Return how tokens are chosen.

    Args:
        given: the command's arguments.
        max_new_tokens: where they do not say.

    Raises:
        ConfigError: a value that cannot be, or one that greedy answers ignore.
    """
    temperature = number(given, "temperature", 0.0)
    drawn = [name for name in ("top_p", "top_k", "seed") if name in given]
    if drawn and not temperature:
        raise ConfigError(
            tr("{name} has no effect without temperature: the likeliest token is taken. Remove it.", name=drawn[0])
        )
    from toolkit.evaluate.generate import Sampling

    return Sampling(
        max_new_tokens=positive_int(given, "max_new_tokens") or max_new_tokens,
        temperature=temperature,
        top_p=number(given, "top_p", 1.0, most=1.0),
        top_k=non_negative_int(given, "top_k", 0),
        seed=non_negative_int(given, "seed", 0),
    )


def check_system(encoder: "AnyChatEncoder", system: str) -> None:
    """Refuse a system message that the model would not see.

    Raises:
        ConfigError: its chat format has no place for one.
    """
    from toolkit.evaluate.answers import has_system_role

    if system and not has_system_role(encoder):
        family = getattr(encoder.tokenizer, "family", None)
        raise ConfigError(
            tr(
                "the chat format of {name} has no system message: the model would not see it. Leave it out, or put it "
                "into the question.",
                name=family.value if family else encoder.tokenizer.name_or_path,
            )
        )
