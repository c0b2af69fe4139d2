"""What the arguments of Qwen's finetune.py, FastChat's train.py and Baichuan2's fine-tune.py become in a recipe."""

from typing import Any

from toolkit.extras.translate.programs import RecipeDraft, lora_settings, set_evaluation
from toolkit.extras.translate.read import ForeignConfig

_QWEN, _BAICHUAN = "finetune", "fine-tune"
_LORA: dict[str, dict[str, Any]] = {
    _QWEN: {
        "lora_r": 64,
        "lora_alpha": 16,
        "lora_dropout": 0.05,
        "lora_target_modules": ["c_attn", "c_proj", "w1", "w2"],
        "model_max_length": 8192,
    },
    _BAICHUAN: {"lora_r": 1, "lora_alpha": 32, "lora_dropout": 0.1, "lora_target_modules": ["W_pack"]},
    "": {"lora_r": 8, "lora_alpha": 16, "lora_dropout": 0.05, "lora_target_modules": ["q_proj", "v_proj"]},
}
"""Defaults of the LoRA arguments by the script; those of FastChat's train_lora.py for all others."""


def set_derived_defaults(config: ForeignConfig, draft: RecipeDraft) -> None:
    """Before translating: set the defaults of the script."""
    config.set_defaults(_LORA.get(config.script, _LORA[""]))


def translate_own_keys(config: ForeignConfig, draft: RecipeDraft) -> None:
    """Translate the keys that only these programs have."""
    is_quantized = config.flag("q_lora")
    if config.flag("use_lora") or is_quantized or config.script.startswith("train_lora"):
        draft.put("tuning.method", "qlora" if is_quantized else "lora", "use_lora", "q_lora")
        lora_settings(config, draft, rank="lora_r", targets="lora_target_modules")
        is_chat = "chat" in str(config.get("model_name_or_path")).lower()
        if config.script == _QWEN and not is_chat and not is_quantized:
            # As Qwen's finetune.py does: a base model has not learned the tokens that mark turns.
            draft.put("tuning.save_modules", ["wte", "lm_head"], "model_name_or_path")
    if not config.has("data_path"):
        raise config.without_data("data_path")
    # All three programs read conversations, with `from` and `value`.
    for ours, theirs in {"data.sources": "data_path", "data.validation": "eval_data_path"}.items():
        if config.has(theirs):
            draft.put(ours, [{"path": str(config.get(theirs)), "format": "sharegpt"}], theirs)
    has_validation = config.has("eval_data_path")
    if not has_validation:
        draft.put("data.validation_fraction", 0.0)
    set_evaluation(config, draft, has_validation)
    draft.put("data.train_on", "all")
