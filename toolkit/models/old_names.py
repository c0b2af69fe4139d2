"""Names of settings that transformers 4 reads, written beside or in place of those of transformers 5."""

import json
from pathlib import Path
from typing import Any

from toolkit.messages import ModelError, json_object

_OLD_ROPE: dict[str, dict[str, str]] = {
    "gpt_neox": {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"},
    "gpt_neox_japanese": {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"},
    "gemma3_text": {"rope_theta": "rope_theta", "sliding": "rope_local_base_freq"},
    "gemma3n_text": {"rope_theta": "rope_theta", "sliding": "rope_local_base_freq"},
    "modernbert-decoder": {"rope_theta": "global_rope_theta", "sliding": "local_rope_theta"},
    "olmo3": {"rope_theta": "rope_theta"},
}
"""Type of model -> key of rope_parameters -> its name in transformers 4 (4.57), where that is another one, or kinds of
layers have bases of their own (`sliding`: those with a window)."""
_OLD_LAYERS = {"granitemoehybrid": {"linear_attention": "mamba", "full_attention": "attention"}}
"""Type of model -> kind of layer -> its name in transformers 4; transformers 5 reads both."""


def add_to_config(file: Path) -> None:
    """Write beside the keys of transformers 5 those that version 4 reads: without a word it would take its defaults for
    the base and the share of rotary embeddings and the number of experts, and compute other logits.
    """
    config = json_object(file, ModelError)
    for section in [config, *(value for value in config.values() if isinstance(value, dict))]:
        kind, rope = section.get("model_type", ""), section.get("rope_parameters")
        if isinstance(rope, dict):
            for key, value in _old_rope(rope, _OLD_ROPE.get(kind)).items():
                section.setdefault(key, value)
        if kind == "qwen3_moe" and "num_local_experts" in section:
            section.setdefault("num_experts", section["num_local_experts"])
        if kind in _OLD_LAYERS:
            section["layer_types"] = [_OLD_LAYERS[kind].get(name, name) for name in section["layer_types"]]
        for key, value in section.items():  # transformers 5 writes {"__float__": "Infinity"}
            if isinstance(value, list):
                section[key] = [float(element["__float__"]) if _is_tagged(element) else element for element in value]
    file.write_text(json.dumps(config, indent=2, ensure_ascii=False, sort_keys=True) + "\n", encoding="utf-8")


def _is_tagged(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() == {"__float__"}


def _old_rope(rope: dict[str, Any], names: dict[str, str] | None) -> dict[str, Any]:
    """Return what transformers 4 reads in place of rope_parameters; nothing where it knows no such models."""
    if names is None:
        has_kinds = any(isinstance(value, dict) for value in rope.values())
        names = {} if has_kinds else {key: key for key in ("rope_theta", "partial_rotary_factor")}
    full_attention, sliding = (rope.get(kind) or {} for kind in ("full_attention", "sliding_attention"))
    full_attention = full_attention or rope
    values = [("sliding", sliding.get("rope_theta")), *full_attention.items()]
    old = {names[name]: value for name, value in values if name in names and isinstance(value, (int, float))}
    is_scaled = full_attention.get("rope_type", "default") != "default"
    return old | ({"rope_scaling": full_attention} if old and is_scaled else {})


def add_to_tokenizer(folder: Path) -> None:
    """Write a saved tokenizer's settings in the names that every release of transformers since 4.0 knows: 4.57 knows no
    TokenizersBackend and no list of extra_special_tokens, which 5 writes.
    """
    file = folder / "tokenizer_config.json"
    values = json_object(file, ModelError)
    if values.get("tokenizer_class") == "TokenizersBackend":
        values["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(values.get("extra_special_tokens"), list):  # a mapping gives names, as in 4.57
        values["additional_special_tokens"] = values.pop("extra_special_tokens")
    values.pop("backend", None)
    file.write_text(json.dumps(values, ensure_ascii=False, indent=2, sort_keys=True) + "\n", encoding="utf-8")
