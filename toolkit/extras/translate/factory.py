"""What the keys of LLaMA-Factory become in a recipe."""

import os
from pathlib import Path
from typing import Any

from toolkit.config.program_keys import names_of
from toolkit.extras.translate.programs import (
    RecipeDraft,
    limit_rows,
    lora_settings,
    named_format,
    set_added_tokens,
    set_chat_template,
    set_evaluation,
    set_held_out,
    set_preference,
)
from toolkit.extras.translate.read import ForeignConfig
from toolkit.messages import ConfigError, did_you_mean, joined, json_object, tr

_INFO = "dataset_info.json"
_MEDIA = ("images", "videos", "audios")
_STAGES = ("sft", "pt", "dpo", "kto", "rm")


def translate_own_keys(config: ForeignConfig, draft: RecipeDraft) -> None:
    """Translate the keys that only LLaMA-Factory has."""
    set_chat_template(config, draft, "template", "replaced_templates")
    set_added_tokens(config, draft, "add_tokens", "add_special_tokens")
    stage = str(config.get("stage"))
    if stage not in _STAGES:
        raise config.without_counterpart("stage", _STAGES)
    if not config.flag("do_train"):
        raise ConfigError(
            "{place}: do_train is not true, so this config trains nothing. `toolkit eval` scores, `toolkit "
            "generate` answers, `toolkit export-model` merges.",
            place=config.location("do_train"),
        )
    if stage in ("sft", "dpo", "kto"):  # texts have no template, reward models train no token
        config.remark("template", "alpaca_system" if config.get("template") == "alpaca" else "line_feed")
    _method(config, draft)
    if stage in ("dpo", "kto"):
        _preference(config, draft, stage)
    elif stage == "rm":
        draft.groups["task"] = "reward"
        draft.put("task.kind", "reward", "stage")
    if config.flag("pure_bf16"):  # LLaMA-Factory's bf16 without autocast
        draft.put("precision.dtype", "bf16", "pure_bf16")
    elif draft.values["precision.dtype"][0] == "fp32" and draft.values["tuning.method"][0] == "lora":
        draft.notes.append(
            tr(
                "bf16 and fp16 are not set: there frozen weights have the type that the model's config.json names, "
                "mostly bfloat16; the recipe computes in float32. precision=bf16 comes near."
            )
        )
    recompute = not config.flag("disable_gradient_checkpointing")
    draft.put("train.activation_checkpointing.enabled", recompute, "disable_gradient_checkpointing")
    if config.flag("enable_liger_kernel"):
        draft.put("kernels.liger", "always", "enable_liger_kernel")
    _data(config, draft, stage)
    if config.flag("use_swanlab"):
        draft.put("track.swanlab.enabled", True, "use_swanlab")
        draft.put("track.swanlab.project", str(config.get("swanlab_project")), "swanlab_project")
        if config.has("swanlab_workspace"):
            draft.put("track.swanlab.workspace", str(config.get("swanlab_workspace")), "swanlab_workspace")
        mode = str(config.get("swanlab_mode")).lower()
        if mode in ("cloud", "local", "offline"):
            draft.put("track.swanlab.mode", "online" if mode == "cloud" else "offline", "swanlab_mode")
        else:
            draft.lost["swanlab_mode"] = tr("there are cloud and local")


def _preference(config: ForeignConfig, draft: RecipeDraft, stage: str) -> None:
    """Set LLaMA-Factory's loss of pairs or rated answers; `stage`: dpo or kto."""
    loss = "kto" if stage == "kto" else str(config.get("pref_loss"))
    losses = ("sigmoid", "hinge", "ipo", "orpo", "simpo")
    if stage != "kto" and loss not in losses:
        raise config.without_counterpart("pref_loss", losses)
    keys = {"beta": "pref_beta", "loss": "stage" if loss == "kto" else "pref_loss", "smoothing": "dpo_label_smoothing"}
    set_preference(config, draft, loss, keys, {"pref_ftx": config.number("pref_ftx")})
    if loss == "simpo":  # LLaMA-Factory's SimPO does not read dpo_label_smoothing
        draft.put("preference.label_smoothing", 0.0)
    if loss == "kto":
        draft.put("preference.desirable_weight", config.number("kto_chosen_weight"), "kto_chosen_weight")
        draft.put("preference.undesirable_weight", config.number("kto_rejected_weight"), "kto_rejected_weight")
        if config.number("pref_ftx"):
            draft.lost["pref_ftx"] = tr("preference=kto has no such term")


def _method(config: ForeignConfig, draft: RecipeDraft) -> None:
    """Set LLaMA-Factory's tuning method, with its adapter or the layers that it trains. Its lora with quantization_bit
    is QLoRA; its freeze trains some layers and freezes all others.
    """
    method = str(config.get("finetuning_type"))
    bits = config.get("quantization_bit")
    if method not in ("lora", "freeze", "full"):
        raise config.without_counterpart("finetuning_type", ("lora", "freeze", "full"))
    draft.put("tuning.method", method, "finetuning_type")
    if method == "lora":
        if bits is not None and config.number("quantization_bit", int) == 4:
            draft.put("tuning.method", "qlora", "finetuning_type", "quantization_bit")
        elif bits is not None:
            draft.lost["quantization_bit"] = tr("4 bits are there (tuning=qlora), {bits} are not", bits=bits)
        _lora(config, draft)
    elif method == "freeze":
        _freeze(config, draft)


def _lora(config: ForeignConfig, draft: RecipeDraft) -> None:
    """Set the adapter that LLaMA-Factory continues, or the shape of a new one."""
    adapters = config.names("adapter_name_or_path")
    if len(adapters) == 1 and not config.flag("create_new_adapter"):
        draft.put("tuning.adapter", adapters[0], "adapter_name_or_path")
        return
    if adapters:
        draft.lost["adapter_name_or_path"] = tr("several adapters: merge them into the model before")
    lora_settings(config, draft, rank="lora_rank", targets="lora_target", saved="additional_target")


def _freeze(config: ForeignConfig, draft: RecipeDraft) -> None:
    """Set the last layers that LLaMA-Factory trains; ConfigError if it trains the first ones."""
    layers = config.number("freeze_trainable_layers", int)
    trains_all_modules = config.names("freeze_trainable_modules") == ["all"]
    if layers <= 0:
        raise ConfigError(
            "{place}: freeze_trainable_layers = {layers} trains the first layers, which has no counterpart: the "
            "last ones can be trained, with a number above 0.",
            place=config.location("freeze_trainable_layers"),
            layers=layers,
        )
    if not trains_all_modules:
        draft.lost["freeze_trainable_modules"] = tr("the recipe trains whole layers")
    draft.put("tuning.last_layers", layers, "freeze_trainable_layers")
    if config.has("freeze_extra_modules"):
        patterns = [f"*{name}*" for name in config.names("freeze_extra_modules")]
        draft.put("tuning.patterns", patterns, "freeze_extra_modules")


def _data(config: ForeignConfig, draft: RecipeDraft, stage: str) -> None:
    """Set data with their sample limits, packing, and which answers are trained; `stage`: one of _STAGES."""
    sources = _sources(config, "dataset", stage, draft)
    validation = _sources(config, "eval_dataset", stage, draft) if config.has("eval_dataset") else []
    limit = ["max_samples"] if config.has("max_samples") else []  # the key that limits them, if it is set
    if limit:
        for source in (*sources, *validation):
            source["max_samples"] = config.number("max_samples", int)
        if not sources:
            draft.lost["max_samples"] = tr("add it to each item of data.sources")
    if sources:
        draft.put("data.sources", sources, "dataset", *limit)
    if validation:
        draft.put("data.validation", validation, "eval_dataset", *limit)
    else:
        set_held_out(draft, config.number("val_size"), "val_size")
    set_evaluation(config, draft, bool(validation) or config.number("val_size") > 0)
    if stage in ("dpo", "kto", "rm"):
        return
    packs = config.flag("packing") if config.has("packing") else stage == "pt"  # LLaMA-Factory's default
    packs = packs or config.flag("neat_packing")
    if packs:
        draft.put("data.packing", "packed", "packing", "neat_packing")
        if not config.flag("neat_packing"):  # without it, samples attend to those before them in a block
            config.remark("packing", "mixed_packing")
    if stage == "pt":  # it joins all texts and cuts them into blocks; without packing each is cut off
        draft.put("data.too_long", "split" if packs else "truncate", "stage", "packing")
    draft.put("data.train_on", "last" if config.flag("mask_history") else "all", "mask_history")


def _sources(config: ForeignConfig, name: str, stage: str, draft: RecipeDraft) -> list[dict[str, Any]]:
    """Return items of `data.sources` for LLaMA-Factory's datasets in the key `name`, by dataset_info.json; ConfigError
    if that lacks one, [] with a note if it is not on this disk. `stage`: what is trained, one of _STAGES.
    """
    names = config.names(name)
    folder = str(config.get("dataset_dir"))
    if not names:
        raise config.without_data(name)
    if folder == "ONLINE":  # LLaMA-Factory's word for datasets that are on Hugging Face by these names
        return [{"hub": item} for item in names]
    base = config.find(os.path.join(folder, _INFO)).parent
    if not os.path.isfile(base / _INFO):
        draft.gaps.append(
            tr(
                "{key} = {sets}: {file} is not here, so it is not known which files these are. Run this again where "
                "it is, or write data.sources (docs/data.md).",
                key=name,
                sets=", ".join(names),
                file=Path(folder) / _INFO,
            )
        )
        return []
    info = json_object(base / _INFO, ConfigError)
    if not all(isinstance(entry, dict) for entry in info.values()):
        raise ConfigError("{file} must be an object of objects, {{name: {{…}}}}.", file=base / _INFO)
    sources = []
    for item in names:
        if item not in info:
            location, file = config.location(name), base / _INFO
            unknown = tr("{place}: {file} has no dataset '{name}'.", place=location, file=file, name=item)
            raise ConfigError(joined(unknown, did_you_mean(item, info)))
        if source := _source(item, info[item], base, stage, draft):
            sources.append(source)
    return sources


def _source(name: str, entry: dict[str, Any], base: Path, stage: str, draft: RecipeDraft) -> dict[str, Any]:
    """Return one item of `data.sources`, {} with a note if its data cannot be used. `entry`: what dataset_info.json, in
    the directory `base`, says of the dataset `name`; `stage`: what is trained, one of _STAGES.
    """
    columns: dict[str, Any] = entry.get("columns") or {}
    reason = ""
    has_pairs = stage in ("dpo", "rm")
    if bool(entry.get("ranking")) != has_pairs:
        reason = tr("it holds no pairs") if has_pairs else tr("it holds preferences, which stage = dpo trains on")
    elif media := [kind for kind in _MEDIA if columns.get(kind)]:
        reason = tr("it holds {media}, and there are texts only", media=", ".join(media))
    elif not entry.get("file_name") and not entry.get("hf_hub_url"):
        reason = tr("it is neither a file nor on Hugging Face: save it as a file")
    if reason:
        draft.gaps.append(tr("the dataset {name} is skipped: {reason}.", name=name, reason=reason))
        return {}
    names = {"hub": "hf_hub_url", "subset": "subset", "revision": "revision", "split": "split"}
    source = {ours: str(entry[theirs]) for ours, theirs in names.items() if entry.get(theirs)}
    if not entry.get("hf_hub_url"):
        source = {"path": str(base / str(entry["file_name"]))}
    rows = int(entry.get("num_samples") or 0)  # 0: all
    return source | limit_rows(name, rows, draft) | _format(name, entry, columns, stage, draft)


def _format(
    name: str, entry: dict[str, Any], columns: dict[str, Any], stage: str, draft: RecipeDraft
) -> dict[str, Any]:
    """Return format and columns of a LLaMA-Factory dataset, whose prompt, query and response are our instruction, input
    and output; without columns they are called as in Alpaca's data. `name`, `entry`, `stage`: as of `_source`;
    `columns`: the entry's, LLaMA-Factory's name -> the file's.
    """
    if stage == "pt":
        return named_format("text", {"text": columns.get("prompt") if columns else "instruction"})
    row_format = {"dpo": "preference", "rm": "reward", "kto": "labeled"}.get(stage, "")  # "": by the entry's formatting
    answers_of_stage = {"dpo": ("chosen", "rejected"), "rm": ("chosen", "rejected"), "kto": ("kto_tag",)}
    answers: tuple[str, ...] = answers_of_stage.get(stage, ())
    shared = {column: columns.get(column) for column in ("system", "tools", *answers)}
    if entry.get("formatting", "alpaca") in ("sharegpt", "openai"):
        fields = {"conversations": columns.get("messages", "conversations"), **_message_columns(name, entry, draft)}
        return named_format(row_format or "sharegpt", fields | shared)
    shared["history"] = columns.get("history")
    if columns and not columns.get("query"):  # no second text that belongs to the prompt
        fields = {"prompt": columns.get("prompt"), "response": columns.get("response")}
        return named_format(row_format or "prompt_response", fields | shared)
    fields = {"instruction": columns.get("prompt"), "input": columns.get("query"), "output": columns.get("response")}
    return named_format(row_format or "instruction", fields | shared)


def _message_columns(name: str, entry: dict[str, Any], draft: RecipeDraft) -> dict[str, Any]:
    """Return our column -> the file's for the parts of a message, by the entry's tags; note names of roles that are not
    read here. `name`, `entry`: as of `_source`.
    """
    tags: dict[str, Any] = entry.get("tags") or {}
    for tag, aliases in names_of("roles").items():  # user_tag -> what the user's role may be called, …
        if tags.get(tag, aliases[0]) not in aliases:
            draft.notes.append(
                tr(
                    "the dataset {name}: {tag} = {value} is no name that is read here; known are {known}.",
                    name=name,
                    tag=tag,
                    value=tags[tag],
                    known=", ".join(aliases),
                )
            )
    return {"from": tags.get("role_tag", "from"), "value": tags.get("content_tag", "value")}
