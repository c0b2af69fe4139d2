"""What LLaMA-Factory's configs and commands of the ChatGLM repositories say beside the Trainer's arguments.

LLaMA-Factory's datasets are names, looked up in dataset_info.json, and become sources.
"""

import json
from pathlib import Path
from typing import Any

from toolkit.errors import ConfigError
from toolkit.messages import did_you_mean, joined, tr
from toolkit.translate.draft import ForeignConfig, RecipeDraft
from toolkit.translate.trainer import translate_evaluation, translate_model

INFO = "dataset_info.json"
_ROLES = {
    "user_tag": ("human", "user"),
    "assistant_tag": ("gpt", "assistant"),
    "observation_tag": ("observation", "tool"),
    "function_tag": ("function_call", "tool_call"),
    "system_tag": ("system",),
}
"""The names of speakers that our formats read, by LLaMA-Factory's word for them."""
_MEDIA = ("images", "videos", "audios")


def sources_of(given: ForeignConfig, name: str, stage: str, draft: RecipeDraft) -> list[dict[str, Any]]:
    """Return the items of `data.sources` for a list of datasets."""
    sets = given.names(name)
    folder = str(given.get("dataset_dir"))
    if not sets:
        raise ConfigError("{file}: {key} is not given: there is nothing to train on.", file=given.shown, key=name)
    if folder == "ONLINE":
        return [{"hub": item} for item in sets]
    base = next((path for path in (Path(folder), given.folder / folder) if (path / INFO).is_file()), None)
    if base is None:
        draft.notes.append(
            tr(
                "{key} = {sets}: {file} is not here, so it is not known which files these are. Run this again where "
                "it is, or write data.sources (docs/data.md).",
                key=name,
                sets=", ".join(sets),
                file=Path(folder) / INFO,
            )
        )
        return []
    try:
        info = json.loads((base / INFO).read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError("cannot read {file}: {reason}", file=base / INFO, reason=error) from error
    if not isinstance(info, dict) or not all(isinstance(entry, dict) for entry in info.values()):
        raise ConfigError("{file} must be an object of objects, {{name: {{…}}}}.", file=base / INFO)
    found = []
    for item in sets:
        if item not in info:
            place, file = given.place(name), base / INFO
            unknown = tr("{place}: {file} has no data set '{name}'.", place=place, file=file, name=item)
            raise ConfigError(joined(unknown, did_you_mean(item, info)))
        if source := _source(item, info[item], base, stage, draft):
            found.append(source)
    return found


def _source(name: str, entry: dict[str, Any], base: Path, stage: str, draft: RecipeDraft) -> dict[str, Any]:
    """Return one source; {} where it cannot be one."""
    columns: dict[str, Any] = entry.get("columns") or {}
    reason = ""
    if entry.get("ranking"):
        reason = tr("it holds preferences, and there is supervised training only")
    elif media := [kind for kind in _MEDIA if columns.get(kind)]:
        reason = tr("it holds {media}, and there are texts only", media=", ".join(media))
    elif not entry.get("file_name") and not entry.get("hf_hub_url"):
        reason = tr("it is neither a file nor on Hugging Face: save it as a file")
    if reason:
        draft.notes.append(tr("the data set {name} is left out: {reason}.", name=name, reason=reason))
        return {}
    if entry.get("num_samples"):
        draft.notes.append(
            tr("the data set {name}: num_samples has no counterpart; weight below 1 takes a part.", name=name)
        )
    names = {"hub": "hf_hub_url", "subset": "subset", "revision": "revision", "split": "split"}
    source = {ours: str(entry[theirs]) for ours, theirs in names.items() if entry.get(theirs)}
    if not entry.get("hf_hub_url"):
        source = {"path": str(base / str(entry["file_name"]))}
    return source | _format(name, entry, columns, stage, draft)


def _format(
    name: str, entry: dict[str, Any], columns: dict[str, Any], stage: str, draft: RecipeDraft
) -> dict[str, Any]:
    """Return format and columns; LLaMA-Factory's prompt, query and response are our instruction, input and output."""
    if stage == "pt":
        return _named("text", {"text": columns.get("prompt", "instruction" if not columns else None)})
    shared = {"system": columns.get("system"), "tools": columns.get("tools")}
    if entry.get("formatting", "alpaca") in ("sharegpt", "openai"):
        tags: dict[str, Any] = entry.get("tags") or {}
        for tag, known in _ROLES.items():
            if tags.get(tag, known[0]) not in known:
                draft.notes.append(
                    tr(
                        "the data set {name}: {tag} = {value} is no name that is read here; known are {known}.",
                        name=name,
                        tag=tag,
                        value=tags[tag],
                        known=", ".join(known),
                    )
                )
        said = {"from": tags.get("role_tag", "from"), "value": tags.get("content_tag", "value")}
        return _named("sharegpt", {"conversations": columns.get("messages", "conversations"), **said, **shared})
    shared["history"] = columns.get("history")
    if columns and not columns.get("query"):
        return _named(
            "prompt_response", {"prompt": columns.get("prompt"), "response": columns.get("response"), **shared}
        )
    asked = {"instruction": columns.get("prompt"), "input": columns.get("query"), "output": columns.get("response")}
    return _named("instruction", asked | shared)


def _named(row_format: str, columns: dict[str, Any]) -> dict[str, Any]:
    """Return the format, and those columns that are called otherwise in the file."""
    renamed = {ours: str(theirs) for ours, theirs in columns.items() if theirs and theirs != ours}
    return {"format": row_format} | ({"columns": renamed} if renamed else {})


PREFIX_DROPOUT = 0.1


def translate_chatglm(given: ForeignConfig, draft: RecipeDraft) -> None:
    """Compute what main.py makes of its arguments."""
    if not given.flag("do_train"):
        raise ConfigError(
            "{file}: without --do_train this command trains nothing. `toolkit generate` and `toolkit eval` answer "
            "and score.",
            file=given.shown,
        )
    translate_model(given, draft)
    if given.has("pre_seq_len") or given.has("ptuning_checkpoint"):
        draft.put("tuning.method", "ptuning_v2", "pre_seq_len")
        draft.put("tuning.dropout", PREFIX_DROPOUT)
        draft.put("precision.dtype", "fp16")  # model.half()
    if given.has("ptuning_checkpoint"):
        draft.put("tuning.adapter", str(given.get("ptuning_checkpoint")), "ptuning_checkpoint")
    elif given.has("pre_seq_len"):
        draft.put("tuning.num_tokens", given.number("pre_seq_len", int), "pre_seq_len")
        if given.flag("prefix_projection"):
            draft.put("tuning.projection", True, "prefix_projection")
    _chatglm_data(given, draft)
    # main.py does so whatever it is told.
    draft.put("train.activation_checkpointing.enabled", True)


def _chatglm_data(given: ForeignConfig, draft: RecipeDraft) -> None:
    fields = {"prompt": "prompt_column", "response": "response_column", "history": "history_column"}
    columns = {name: str(given.get(key)) for name, key in fields.items() if given.has(key) and given.get(key) != name}
    rest: dict[str, Any] = {"format": "prompt_response"} | ({"columns": columns} if columns else {})
    if given.has("train_file"):
        draft.put("data.sources", [{"path": str(given.get("train_file")), **rest}], "train_file", *fields.values())
    elif given.has("dataset_name"):
        subset = {"subset": str(given.get("dataset_config_name"))} if given.has("dataset_config_name") else {}
        source = {"hub": str(given.get("dataset_name")), **subset, **rest}
        draft.put("data.sources", [source], "dataset_name", *fields.values())
    else:
        raise ConfigError("{file}: there is no --train_file.", file=given.shown)
    if given.has("validation_file"):
        source = {"path": str(given.get("validation_file")), **rest}
        draft.put("data.validation", [source], "validation_file", *fields.values())
    else:
        draft.put("data.validation_fraction", 0.0)
    translate_evaluation(given, draft, given.has("validation_file"))
    # ChatGLM2's own end token comes on top of the two lengths; ChatGLM-6B's lies within.
    own_end = 0 if draft.groups.get("model") == "chatglm_6b" else 1
    length = given.number("max_source_length", int) + given.number("max_target_length", int) + own_end
    draft.put("data.max_length", length, "max_source_length", "max_target_length")


GLM_NAMES = {
    "query_key_value": ("q_proj", "k_proj", "v_proj"),
    "dense": ("o_proj",),
    "dense_h_to_4h": ("gate_up_proj",),
    "dense_4h_to_h": ("down_proj",),
}
"""Linear layers of ChatGLM2 and later: the official code's names and transformers'."""


def translate_factory(given: ForeignConfig, draft: RecipeDraft) -> None:
    """Compute what LLaMA-Factory makes of its arguments."""
    stage = str(given.get("stage"))
    if stage not in ("sft", "pt"):
        raise ConfigError(
            "{place}: stage = {value} has no counterpart: sft and pt have.", place=given.place("stage"), value=stage
        )
    if not given.flag("do_train"):
        raise ConfigError(
            "{place}: do_train is not true, so this config trains nothing. `toolkit eval` scores, `toolkit "
            "generate` answers, `toolkit export-model` merges.",
            place=given.place("do_train"),
        )
    translate_model(given, draft)
    _method(given, draft)
    _model(given, draft)
    _data(given, draft, stage)
    if given.flag("use_swanlab"):
        _swanlab(given, draft)


def _swanlab(given: ForeignConfig, draft: RecipeDraft) -> None:
    draft.put("track.swanlab.enabled", True, "use_swanlab")
    draft.put("track.swanlab.project", str(given.get("swanlab_project")), "swanlab_project")
    if given.has("swanlab_workspace"):
        draft.put("track.swanlab.workspace", str(given.get("swanlab_workspace")), "swanlab_workspace")
    mode = str(given.get("swanlab_mode")).lower()
    if mode in ("cloud", "local", "offline"):
        draft.put("track.swanlab.mode", "online" if mode == "cloud" else "offline", "swanlab_mode")
    else:
        draft.lost["swanlab_mode"] = tr("there are cloud and local")


def _method(given: ForeignConfig, draft: RecipeDraft) -> None:
    method = str(given.get("finetuning_type"))
    bits = given.get("quantization_bit")
    if method == "lora":
        quantized = bits is not None and given.number("quantization_bit", int) == 4
        draft.put("tuning.method", method, "finetuning_type")
        if quantized:
            draft.put("tuning.method", "qlora", "finetuning_type", "quantization_bit")
        elif bits is not None:
            draft.lost["quantization_bit"] = tr("4 bits are there (tuning=qlora), {bits} are not", bits=bits)
        _lora(given, draft)
    elif method == "freeze":
        draft.put("tuning.method", "freeze", "finetuning_type")
        _freeze(given, draft)
    elif method == "full":
        draft.put("tuning.method", "full", "finetuning_type")
    else:
        raise ConfigError(
            "{place}: finetuning_type = {value} has no counterpart: lora, freeze and full have.",
            place=given.place("finetuning_type"),
            value=method,
        )


def _lora(given: ForeignConfig, draft: RecipeDraft) -> None:
    adapters = given.names("adapter_name_or_path")
    if len(adapters) == 1 and not given.flag("create_new_adapter"):
        draft.put("tuning.adapter", adapters[0], "adapter_name_or_path")
        return
    if adapters:
        draft.lost["adapter_name_or_path"] = tr("several adapters: merge them into the model before")
    rank = given.number("lora_rank", int)
    draft.put("tuning.rank", rank, "lora_rank")
    alpha = given.number("lora_alpha") if given.get("lora_alpha") else 2.0 * rank
    draft.put("tuning.alpha", alpha, "lora_alpha")
    draft.put("tuning.dropout", given.number("lora_dropout"), "lora_dropout")
    for theirs, ours in (("use_rslora", "rslora"), ("use_dora", "dora")):
        if given.flag(theirs):
            draft.put(f"tuning.{ours}", True, theirs)
    targets = given.names("lora_target")
    if targets == ["all"]:
        targets = ["all-linear"]
    elif draft.groups.get("model", "chatglm_6b") != "chatglm_6b":
        targets = [name for target in targets for name in GLM_NAMES.get(target, (target,))]
    draft.put("tuning.target_modules", targets, "lora_target")
    if given.has("additional_target"):
        draft.put("tuning.save_modules", given.names("additional_target"), "additional_target")


def _freeze(given: ForeignConfig, draft: RecipeDraft) -> None:
    layers = given.number("freeze_trainable_layers", int)
    whole = given.names("freeze_trainable_modules") == ["all"]
    if layers <= 0:
        raise ConfigError(
            "{place}: freeze_trainable_layers = {layers} trains the first layers, which has no counterpart: the "
            "last ones can be trained, with a number above 0.",
            place=given.place("freeze_trainable_layers"),
            layers=layers,
        )
    if not whole:
        draft.lost["freeze_trainable_modules"] = tr("the recipe trains whole layers")
    draft.put("tuning.last_layers", layers, "freeze_trainable_layers")
    if given.has("freeze_extra_modules"):
        patterns = [f"*{name}*" for name in given.names("freeze_extra_modules")]
        draft.put("tuning.patterns", patterns, "freeze_extra_modules")


def _model(given: ForeignConfig, draft: RecipeDraft) -> None:
    if given.flag("pure_bf16"):
        draft.put("precision.dtype", "bf16", "pure_bf16")
    recompute = not given.flag("disable_gradient_checkpointing")
    draft.put("train.activation_checkpointing.enabled", recompute, "disable_gradient_checkpointing")
    if given.flag("enable_liger_kernel"):
        draft.put("kernels.liger", "always", "enable_liger_kernel")
    attention = str(given.get("flash_attn")).lower()
    if attention == "sdpa":
        draft.put("model.attention", "sdpa", "flash_attn")
    elif attention in ("disabled", "false"):
        draft.put("model.attention", "eager", "flash_attn")


def _data(given: ForeignConfig, draft: RecipeDraft, stage: str) -> None:
    sources = sources_of(given, "dataset", stage, draft)
    if sources:
        draft.put("data.sources", sources, "dataset")
    validation = sources_of(given, "eval_dataset", stage, draft) if given.has("eval_dataset") else []
    size = given.number("val_size")
    if validation:
        draft.put("data.validation", validation, "eval_dataset")
    elif 0 < size < 1:
        draft.put("data.validation_fraction", size, "val_size")
    else:
        draft.put("data.validation_fraction", 0.0, "val_size")
        if size:
            draft.lost["val_size"] = tr(
                "a number of rows: set data.validation_fraction to {rows} by the number of all rows", rows=int(size)
            )
    translate_evaluation(given, draft, bool(validation) or 0 < size < 1)
    if given.has("max_samples"):
        if len(given.names("dataset")) == 1:
            draft.put("data.max_samples", given.number("max_samples", int), "max_samples")
        else:
            draft.lost["max_samples"] = tr("data.max_samples takes the first rows of all sources together")
    packs = given.flag("packing") if given.has("packing") else stage == "pt"
    if packs or given.flag("neat_packing"):
        draft.put("data.packing", "packed", "packing", "neat_packing")
    draft.put("data.train_on", "last" if given.flag("mask_history") else "all", "mask_history")
