"""A fine-tuning command of the ChatGLM-6B and ChatGLM2-6B repositories."""

from typing import Any

from toolkit.errors import ConfigError
from toolkit.messages import tr
from toolkit.translate.given import Draft, Given
from toolkit.translate.trainer import translate_evaluation, translate_model

PREFIX_DROPOUT = 0.1


def translate_chatglm(given: Given, draft: Draft) -> None:
    """Compute what main.py makes of its arguments.

    Raises:
        ConfigError: it does not train, or its data are not named.
    """
    if not given.flag("do_train"):
        raise ConfigError(
            tr(
                "{file}: without --do_train this command trains nothing. `toolkit generate` and `toolkit eval` answer "
                "and score.",
                file=given.shown,
            )
        )
    translate_model(given, draft)
    _tuning(given, draft)
    _data(given, draft)
    # main.py does so whatever it is told.
    draft.put("train.activation_checkpointing.enabled", True)


def _tuning(given: Given, draft: Draft) -> None:
    if given.has("pre_seq_len") or given.has("ptuning_checkpoint"):
        draft.put("tuning.method", "ptuning_v2", "pre_seq_len")
        draft.put("tuning.dropout", PREFIX_DROPOUT)
        draft.put("precision.dtype", "fp16")  # model.half()
        if given.has("ptuning_checkpoint"):
            draft.put("tuning.adapter", str(given.get("ptuning_checkpoint")), "ptuning_checkpoint")
            return
        draft.put("tuning.num_tokens", given.number("pre_seq_len", int), "pre_seq_len")
        if given.flag("prefix_projection"):
            draft.put("tuning.projection", True, "prefix_projection")


def _data(given: Given, draft: Draft) -> None:
    fields = {"prompt": "prompt_column", "response": "response_column", "history": "history_column"}
    columns = {name: str(given.get(key)) for name, key in fields.items() if given.has(key) and given.get(key) != name}
    rest: dict[str, Any] = {"format": "prompt_response"} | ({"columns": columns} if columns else {})
    named = [key for key in fields.values() if given.has(key)]
    if given.has("train_file"):
        draft.put("data.sources", [{"path": str(given.get("train_file")), **rest}], "train_file", *named)
    elif given.has("dataset_name"):
        subset = {"subset": str(given.get("dataset_config_name"))} if given.has("dataset_config_name") else {}
        source = {"hub": str(given.get("dataset_name")), **subset, **rest}
        draft.put("data.sources", [source], "dataset_name", *named)
    else:
        raise ConfigError(tr("{file}: there is no --train_file.", file=given.shown))
    if given.has("validation_file"):
        source = {"path": str(given.get("validation_file")), **rest}
        draft.put("data.validation", [source], "validation_file", *named)
    else:
        draft.put("data.validation_fraction", 0.0)
    translate_evaluation(given, draft, given.has("validation_file"))
    # ChatGLM2's own end token comes on top of the two lengths; ChatGLM-6B's lies within.
    own_end = 0 if draft.groups.get("model") == "chatglm_6b" else 1
    length = given.number("max_source_length", int) + given.number("max_target_length", int) + own_end
    stated = [name for name in ("max_source_length", "max_target_length") if given.has(name)]
    draft.put("data.max_length", length, *stated)
