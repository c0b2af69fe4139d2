"""Whether the longest sample fits into the model's positions, by config.json alone. No torch here."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from toolkit.config.load import Loaded
from toolkit.config.places import fail
from toolkit.config.schema import Init, TuningMethod
from toolkit.messages import tr

_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len")
# These scale whatever positions the model had before; the others (llama3, longrope) come with the scaled number.
_SCALES = ("linear", "dynamic", "ntk", "yarn")
# Published with linear scaling and the scaled number.
_IS_COUNTED = ("gemma3", "gemma3_text", "glm")
_LEARNED = ("gpt2", "gpt_bigcode", "gpt_neo", "opt", "xglm", "biogpt", "mpt")
_EXAMPLE = '"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": %d}'


def position_limit(config: Mapping[str, Any]) -> int | None:
    """Return the most tokens that a model of some config.json has positions for; None if it has no limit.

    Scaling of rotary positions that config.json names counts.
    """
    if "position_encoding_2d" in config:
        return _number(config, "max_sequence_length")
    if "padded_vocab_size" in config:  # official ChatGLM2 and later: rope_ratio is counted in
        return _number(config, "seq_length")
    inner = config.get("text_config")
    config = {**config, **inner} if isinstance(inner, Mapping) else config
    own = next((found for key in _KEYS if (found := _number(config, key))), None)
    if own is None or config.get("alibi"):
        return None
    return max([own, *_scaled(config, own)])


def _number(config: Mapping[str, Any], key: str) -> int | None:
    value = config.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**63 else None


def _scaled(config: Mapping[str, Any], own: int) -> Iterator[int]:
    """Yield the positions of each scaling in a config; some models have one for each kind of layer."""
    for key in ("rope_scaling", "rope_parameters"):
        given = config.get(key)
        for scaling in [given, *given.values()] if isinstance(given, Mapping) else []:
            if not isinstance(scaling, Mapping):
                continue
            kind, factor = scaling.get("rope_type") or scaling.get("type"), scaling.get("factor")
            is_counted = kind == "linear" and config.get("model_type") in _IS_COUNTED
            if kind in _SCALES and isinstance(factor, (int, float)) and 0 < factor < 2**20 and not is_counted:
                yield int((_number(scaling, "original_max_position_embeddings") or own) * factor)


def check_positions(loaded: Loaded) -> None:
    """Compare `data.max_length` with the positions of the model that is trained.

    Args:
        loaded: checked config; a model on Hugging Face is in its local directory already.

    Raises:
        ConfigError: a sample may be longer than the model has positions.
    """
    cfg = loaded.cfg
    config: Any = {}
    if cfg.model.init is Init.random:
        limit: int | None = cfg.model.shape.max_positions
    else:
        file = Path(cfg.model.path) / "config.json"
        try:
            config = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError):  # reported by what loads the model
            return
        limit = position_limit(config) if isinstance(config, dict) else None
    learned = cfg.tuning.num_tokens if cfg.tuning.method is TuningMethod.prompt else 0
    if limit is None or cfg.data.max_length + learned <= limit:
        return
    length = f"data.max_length = {cfg.data.max_length}"
    if learned:
        length = f"data.max_length + tuning.num_tokens = {cfg.data.max_length} + {learned}"
    sentence = tr(
        "{length}: more than the {limit} positions that the model has. Set data.max_length={left} (longer samples: "
        "data.too_long), {remedy}.",
        length=length,
        limit=limit,
        left=limit - learned,
        remedy=_remedy(cfg.model.init, config, limit),
    )
    raise fail(loaded, "data.max_length", sentence)


def _remedy(init: Init, config: Mapping[str, Any], limit: int) -> str:
    if init is Init.random:
        return tr("or raise model.shape.max_positions")
    if "position_encoding_2d" in config or "padded_vocab_size" in config:
        return tr("or train the variant for long texts, such as chatglm3-6b-32k, chatglm3-6b-128k or glm-4-9b-chat-1m")
    if config.get("model_type") in _LEARNED:
        return tr("or train a model with more positions: this one has learned an embedding for each")
    return tr(
        "train the variant of the model for long texts, or extend its positions by rope_scaling in its config.json: "
        "{example}",
        example=_EXAMPLE % limit,
    )
