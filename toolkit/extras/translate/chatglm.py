"""What the arguments of main.py in the ChatGLM-6B and ChatGLM2-6B repositories become in a recipe."""

from typing import Any

from toolkit.extras.translate.programs import RecipeDraft, set_evaluation
from toolkit.extras.translate.read import ForeignConfig
from toolkit.messages import ConfigError

_PREFIX_DROPOUT = 0.1


def translate_own_keys(config: ForeignConfig, draft: RecipeDraft) -> None:
    """Translate the keys that only these programs have. Without pre_seq_len and ptuning_checkpoint main.py trains all
    parameters, as a recipe does that names no method.
    """
    if not config.flag("do_train"):
        raise ConfigError(
            "{file}: without --do_train this command trains nothing. `toolkit generate` and `toolkit eval` answer "
            "and score.",
            file=config.shown,
        )
    if config.has("pre_seq_len") or config.has("ptuning_checkpoint"):
        draft.put("tuning.method", "ptuning_v2", "pre_seq_len")
        draft.put("tuning.dropout", _PREFIX_DROPOUT)
        draft.put("precision.dtype", "fp16")  # main.py calls model.half() for a prefix
    if config.has("ptuning_checkpoint"):
        draft.put("tuning.adapter", str(config.get("ptuning_checkpoint")), "ptuning_checkpoint")
    elif config.has("pre_seq_len"):
        draft.put("tuning.num_tokens", config.number("pre_seq_len", int), "pre_seq_len")
        if config.flag("prefix_projection"):
            draft.put("tuning.projection", True, "prefix_projection")
    _data(config, draft)
    # main.py does so whatever it is told.
    draft.put("train.activation_checkpointing.enabled", True)


def _data(config: ForeignConfig, draft: RecipeDraft) -> None:
    """Set the data and the maximum length, in tokens, of main.py's arguments. Its columns are those of our format
    prompt_response, which are listed only where their names differ.
    """
    fields = {"prompt": "prompt_column", "response": "response_column", "history": "history_column"}
    columns = {
        name: str(config.get(key)) for name, key in fields.items() if config.has(key) and config.get(key) != name
    }
    rows: dict[str, Any] = {"format": "prompt_response"} | ({"columns": columns} if columns else {})
    if config.has("train_file"):
        draft.put("data.sources", [{"path": str(config.get("train_file")), **rows}], "train_file", *fields.values())
    elif config.has("dataset_name"):
        subset = {"subset": str(config.get("dataset_config_name"))} if config.has("dataset_config_name") else {}
        source = {"hub": str(config.get("dataset_name")), **subset, **rows}
        draft.put("data.sources", [source], "dataset_name", *fields.values())
    else:
        raise ConfigError("{file}: there is no --train_file.", file=config.shown)
    if config.has("validation_file"):
        source = {"path": str(config.get("validation_file")), **rows}
        draft.put("data.validation", [source], "validation_file", *fields.values())
    else:
        draft.put("data.validation_fraction", 0.0)
    set_evaluation(config, draft, config.has("validation_file"))
    # ChatGLM2's own end token comes on top of the two lengths; ChatGLM-6B's lies within.
    own_end = 0 if draft.groups.get("model") == "chatglm_6b" else 1
    length = config.number("max_source_length", int) + config.number("max_target_length", int) + own_end
    draft.put("data.max_length", length, "max_source_length", "max_target_length")
