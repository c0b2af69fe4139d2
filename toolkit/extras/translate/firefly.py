"""What Firefly's train_args/*.json become in a recipe."""

from toolkit.extras.translate.programs import (
    RecipeDraft,
    lora_settings,
    set_chat_template,
    set_evaluation,
    set_preference,
)
from toolkit.extras.translate.read import ForeignConfig

_METHODS = ("full", "lora", "qlora")
_FORMATS = {"sft": "conversation", "pretrain": "text", "dpo": "preference"}


def translate_own_keys(config: ForeignConfig, draft: RecipeDraft) -> None:
    """Translate the keys that only Firefly has."""
    task, method = str(config.get("task_type")), str(config.get("train_mode"))
    if task not in _FORMATS:
        raise config.without_counterpart("task_type", _FORMATS)
    if method not in _METHODS:
        raise config.without_counterpart("train_mode", _METHODS)
    draft.put("tuning.method", method, "train_mode")
    if method != "full":
        lora_settings(config, draft, rank="lora_rank")  # on all linear layers
    if not config.has("train_file"):
        raise config.without_data("train_file")
    source = {"path": str(config.get("train_file")), "format": _FORMATS[task]}
    draft.put("data.sources", [source], "train_file", "task_type")
    draft.put("data.validation_fraction", 0.0)  # it evaluates nothing
    set_evaluation(config, draft, False)
    if task != "sft":
        config.remark("max_seq_length", "")  # its sentence is about conversations
    if task == "pretrain":  # it joins all texts and cuts them into blocks
        draft.put("data.packing", "packed", "task_type")
        draft.put("data.too_long", "split", "task_type")
        return
    set_chat_template(config, draft, "template_name", "firefly_templates")
    if task == "sft":
        draft.put("data.train_on", "all")
        return
    keys = {"beta": "beta", "loss": "task_type", "smoothing": "label_smoothing_factor"}
    set_preference(config, draft, "sigmoid", keys, {})
