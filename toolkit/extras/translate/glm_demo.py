"""What the configs of ChatGLM3's finetune_demo and GLM-4's finetune directory become in a recipe."""

import os
from typing import Any

from toolkit.extras.translate.programs import RecipeDraft, lora_settings, set_evaluation
from toolkit.extras.translate.read import ForeignConfig
from toolkit.messages import tr

_METHODS = {"LORA": "lora", "PREFIX_TUNING": "ptuning_v2"}
_PREFIX_DROPOUT = 0.1
"""Of the prefix encoder in ChatGLM3's own code."""


def translate_own_keys(config: ForeignConfig, draft: RecipeDraft) -> None:
    """Translate the keys that only these programs have. `combine` is in GLM-4's configs alone."""
    is_glm4 = config.has("combine")
    if not config.has("model_name_or_path"):
        draft.groups["model"] = "glm4_9b" if is_glm4 else "chatglm3_6b"
        draft.gaps.append(
            tr(
                "The command names the model and the directory of the data, this file does not: set model.path=DIR, "
                "and the paths in data.sources and data.validation."
            )
        )
    _method(config, draft, is_glm4)
    _data(config, draft, is_glm4)
    # The two lengths do not count the end token.
    length = config.number("max_input_length", int) + config.number("max_output_length", int) + 1
    draft.put("data.max_length", length, "max_input_length", "max_output_length")
    if not is_glm4:  # ChatGLM3's always does
        draft.put("train.activation_checkpointing.enabled", True)


def _method(config: ForeignConfig, draft: RecipeDraft, is_glm4: bool) -> None:
    """Set the tuning method, and the precision that the weights are loaded in: without bf16 and fp16, GLM-4's program
    loads bf16, and ChatGLM3's fp16 for LoRA and prefixes. `peft_type` is peft's name of the method; without one all
    parameters are trained.
    """
    method = _METHODS.get(str(config.get("peft_type")).upper(), "") if config.has("peft_type") else "full"
    if not method:
        raise config.without_counterpart("peft_type", _METHODS)
    draft.put("tuning.method", method, "peft_type")
    is_half = config.flag("bf16") or config.flag("fp16")
    if is_glm4 and not is_half:
        draft.put("precision.dtype", "bf16")
    elif method != "full" and not is_half:
        draft.put("precision.dtype", "fp16")
        config.remark("peft_type", "demo_precision")
    if method == "lora":
        lora_settings(config, draft, rank="r", targets="target_modules", saved="modules_to_save")
    elif method == "ptuning_v2":
        draft.put("tuning.num_tokens", config.number("num_virtual_tokens", int), "num_virtual_tokens")
        draft.put("tuning.dropout", 0.0 if is_glm4 else _PREFIX_DROPOUT)


def _data(config: ForeignConfig, draft: RecipeDraft, is_glm4: bool) -> None:
    """Set the data, and which answers are trained."""
    rows = {"format": "messages"} if is_glm4 else {"format": "messages", "columns": {"messages": "conversations"}}
    folder = str(config.get("data_dir") or "")
    if not config.has("train_file"):
        raise config.without_data("train_file")
    strategy = "evaluation_strategy" if config.has("evaluation_strategy") else "eval_strategy"
    has_validation = config.has("val_file") and str(config.get(strategy)).lower() != "no"

    def source(key: str) -> list[dict[str, Any]]:
        """Return the one item of `data.sources` or `data.validation` for the file that `key` names."""
        return [{"path": os.path.join(folder, str(config.get(key))), **rows}]

    draft.put("data.sources", source("train_file"), "train_file", "data_dir")
    if has_validation:
        draft.put("data.validation", source("val_file"), "val_file", "data_dir")
    else:
        draft.put("data.validation_fraction", 0.0)
    set_evaluation(config, draft, has_validation)
    # With `combine`, GLM-4's program trains the last answer alone.
    draft.put("data.train_on", "last" if is_glm4 and config.flag("combine") else "all", "combine")
