"""Settings under the names that transformers 4 reads, in files that transformers 5 has written."""

import json
from pathlib import Path
from typing import Any

from toolkit.messages import ModelError, json_object
from toolkit.models.directory import sections_of

_OLD_ROPE: dict[str, dict[str, str]] = {
    "gpt_neox": {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"},
    "gpt_neox_japanese": {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"},
    "gemma3_text": {"rope_theta": "rope_theta", "sliding": "rope_local_base_freq"},
    "gemma3n_text": {"rope_theta": "rope_theta", "sliding": "rope_local_base_freq"},
    "modernbert-decoder": {"rope_theta": "global_rope_theta", "sliding": "local_rope_theta"},
    "olmo3": {"rope_theta": "rope_theta"},
}
"""Model type -> key of rope_parameters -> its name in transformers 4.57. `sliding`: base of sliding-window layers."""
_OLD_LAYERS = {"granitemoehybrid": {"linear_attention": "mamba", "full_attention": "attention"}}
"""Model type -> value of layer_types -> its name in transformers 4; transformers 5 reads both."""


def add_to_config(file: Path) -> None:
    """Add the keys that transformers 4 reads to a config.json. Without them it would silently take its defaults of
    rotary embeddings and the number of experts, and compute other logits.
    """
    config = json_object(file, ModelError)
    for section in sections_of(config):
        kind, rope = section.get("model_type", ""), section.get("rope_parameters")
        if isinstance(rope, dict):
            for key, value in _old_rope(rope, _OLD_ROPE.get(kind)).items():
                section.setdefault(key, value)
        if kind == "qwen3_moe" and "num_local_experts" in section:
            section.setdefault("num_experts", section["num_local_experts"])
        if kind in _OLD_LAYERS:
            section["layer_types"] = [_OLD_LAYERS[kind].get(name, name) for name in section["layer_types"]]
        for key, value in section.items():  # transformers 4 takes plain numbers alone
            if isinstance(value, list):
                section[key] = [float(element["__float__"]) if _is_tagged(element) else element for element in value]
    file.write_text(json.dumps(config, indent=2, ensure_ascii=False, sort_keys=True) + "\n", encoding="utf-8")


def _is_tagged(value: Any) -> bool:
    """Whether a value is a float in the form of transformers 5, such as {"__float__": "Infinity"}."""
    return isinstance(value, dict) and value.keys() == {"__float__"}


def _old_rope(rope: dict[str, Any], names: dict[str, str] | None) -> dict[str, Any]:
    """Return the keys and values that transformers 4 reads in place of `rope`, a section's rope_parameters; {} if it
    knows none. `names`: what `_OLD_ROPE` has for the model type, None without an entry. GPT-NeoX: {"rope_theta": 1e4,
    "partial_rotary_factor": 0.25} -> {"rotary_emb_base": 1e4, "rotary_pct": 0.25}.
    """
    if names is None:  # the same names, where all layers have the same parameters
        has_kinds = any(isinstance(value, dict) for value in rope.values())
        names = {} if has_kinds else {key: key for key in ("rope_theta", "partial_rotary_factor")}
    # Parameters of the whole model, or of each kind of layers.
    full_attention, sliding = rope.get("full_attention") or rope, rope.get("sliding_attention") or {}
    values = [("sliding", sliding.get("rope_theta")), *full_attention.items()]
    old = {names[name]: value for name, value in values if name in names and isinstance(value, (int, float))}
    is_scaled = full_attention.get("rope_type", "default") != "default"
    return old | ({"rope_scaling": full_attention} if old and is_scaled else {})


def add_to_tokenizer(folder: Path) -> None:
    """Rewrite a saved tokenizer_config.json so that transformers 4 (4.57) reads it, too."""
    file = folder / "tokenizer_config.json"
    values = json_object(file, ModelError)
    if values.get("tokenizer_class") == "TokenizersBackend":
        values["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(values.get("extra_special_tokens"), list):  # a mapping gives names, as in 4.57
        values["additional_special_tokens"] = values.pop("extra_special_tokens")
    values.pop("backend", None)
    file.write_text(json.dumps(values, ensure_ascii=False, indent=2, sort_keys=True) + "\n", encoding="utf-8")
