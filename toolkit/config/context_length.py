"""How many positions a model has, by its config.json, and whether the samples of a config fit into them."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from toolkit.config import schema
from toolkit.config.load import LoadedConfig
from toolkit.messages import file_bytes, parsed_json, tr

_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len")
# These scale whatever positions the model had before; the others (llama3, longrope) come with the scaled number.
_SCALES = ("linear", "dynamic", "ntk", "yarn")
# Published with linear scaling, and with the number of positions that this gives.
_SCALED_ALREADY = ("gemma3", "gemma3_text", "glm")
_AFTER_PADDING = (
    *("roberta", "roberta-prelayernorm", "camembert", "xlm-roberta", "xlm-roberta-xl", "xmod", "data2vec-text"),
)
"""Of these the first token has the position after that of padding, whose number is `pad_token_id`."""
_LEARNED = ("gpt2", "gpt_bigcode", "gpt_neo", "opt", "xglm", "biogpt", "mpt", *_AFTER_PADDING)
_EXAMPLE = '"rope_scaling": {"rope_type": "yarn", "factor": %.1f, "original_max_position_embeddings": %d}'


def position_limit(config: Mapping[str, Any]) -> int | None:
    """Return the most tokens that a config.json's model has positions for, scaled ones too; None without a limit."""
    if "position_encoding_2d" in config:  # official ChatGLM-6B
        return _number(config, "max_sequence_length")
    if "padded_vocab_size" in config:  # official ChatGLM2 and later: rope_ratio is counted in
        return _number(config, "seq_length")
    of_text_model = config.get("text_config")
    config = {**config, **of_text_model} if isinstance(of_text_model, Mapping) else config
    unscaled = next((number for key in _KEYS if (number := _number(config, key))), None)
    if unscaled is None or config.get("alibi"):  # ALiBi has biases by distance, for any length
        return None
    if config.get("model_type") in _AFTER_PADDING:
        unscaled -= 1 + (_number(config, "pad_token_id") or 0)
    limits = [unscaled]
    sections = [config.get("rope_scaling"), config.get("rope_parameters")]
    # Some models have a scaling for each kind of layer in these.
    sections += [inner for section in sections if isinstance(section, Mapping) for inner in section.values()]
    for scaling in sections:
        if not isinstance(scaling, Mapping):
            continue
        kind, factor = scaling.get("rope_type") or scaling.get("type"), scaling.get("factor")
        is_scaled = kind == "linear" and config.get("model_type") in _SCALED_ALREADY
        # Below a bound, as the file may hold anything, infinity too.
        if kind in _SCALES and not is_scaled and isinstance(factor, (int, float)) and 0 < factor < 2**20:
            before_scaling = _number(scaling, "original_max_position_embeddings") or unscaled
            limits.append(int(before_scaling * factor))
    return max(limits)


def _number(config: Mapping[str, Any], key: str) -> int | None:
    """Return the value of a key if it is a whole number above 0 that can be meant (of 64 bits), else None."""
    value = config.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**63 else None


def check_positions(loaded: LoadedConfig) -> None:
    """Raise ConfigError if a sample, with prompt tuning's tokens, could exceed the positions of the model on disk."""
    cfg = loaded.cfg
    config: Any = {}
    if cfg.model.init is schema.Init.random:
        limit: int | None = cfg.model.shape.max_positions
    else:
        try:
            config = parsed_json(file_bytes(Path(cfg.model.path) / "config.json"))
        except (OSError, ValueError):  # reported by what loads the model
            return
        limit = position_limit(config) if isinstance(config, dict) else None
    prompt_tokens = cfg.tuning.num_tokens if cfg.tuning.method is schema.TuningMethod.prompt else 0
    if limit is None or cfg.data.max_length + prompt_tokens <= limit:
        return
    if cfg.model.init is schema.Init.random:
        remedy = tr("or raise model.shape.max_positions")
    elif "position_encoding_2d" in config or "padded_vocab_size" in config:
        remedy = tr(
            "or train the variant for long texts, such as chatglm3-6b-32k, chatglm3-6b-128k or glm-4-9b-chat-1m"
        )
    elif config.get("model_type") in _LEARNED:
        remedy = tr("or train a model with more positions: this one has learned an embedding for each")
    else:
        remedy = tr(
            "train the variant of the model for long texts, or extend its positions by rope_scaling in its "
            "config.json: {example}",
            example=_EXAMPLE % (math.ceil((cfg.data.max_length + prompt_tokens) / limit), limit),
        )
    with_prompt = f"data.max_length + tuning.num_tokens = {cfg.data.max_length} + {prompt_tokens}"
    raise loaded.error(
        "data.max_length",
        "{length}: more than the {limit} positions that the model has. Set data.max_length={left} (longer samples: "
        "data.too_long), {remedy}.",
        length=with_prompt if prompt_tokens else f"data.max_length = {cfg.data.max_length}",
        limit=limit,
        left=limit - prompt_tokens,
        remedy=remedy,
    )
