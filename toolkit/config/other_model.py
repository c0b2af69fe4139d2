"""Whether a directory in `model.path` holds the model that the recipe's settings were made for."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from toolkit.config import schema
from toolkit.messages import file_bytes, parsed_json, warn

_KEYS = ("model_type", "hidden_size", "num_hidden_layers", "num_layers")
"""Of config.json, from the most telling. Vocabularies grow, and other sizes follow from these."""


def warn_of_another_model(model: schema.ModelConfig) -> None:
    """Warn of a directory whose config.json differs from that of the model group, `model.published`."""
    if not model.published or model.path == model.hub_id:
        return
    file = Path(model.path) / "config.json"
    try:
        config = parsed_json(file_bytes(file))
    except (OSError, ValueError):  # reported by what loads the model
        return
    if not isinstance(config, Mapping):
        return
    here, expected = _sizes(config), _sizes(model.published)
    differing = [key for key in _KEYS if key in here and key in expected and here[key] != expected[key]]
    if differing:
        warn(
            "model.path = {path} is another model than {name}, for which the recipe's settings are: {key} is {value} "
            "there, not {expected}. For any model: recipe=lora model=hf model.path=DIR",
            path=model.path,
            name=model.name,
            key=differing[0],
            value=here[differing[0]],
            expected=expected[differing[0]],
        )


def _sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that a config.json has for `_KEYS`. Of a multimodal model they are its text model's, without
    `model_type`: the same text model alone has another one.
    """
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        return {key: config[key] for key in _KEYS if key in config}
    both = {**config, **text}
    return {key: both[key] for key in _KEYS if key in both and key != "model_type"}
