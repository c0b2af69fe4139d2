"""What the keys of an axolotl YAML become in a recipe."""

import re
from pathlib import Path
from typing import Any

from toolkit.config import files
from toolkit.config.program_keys import names_of
from toolkit.extras.translate.programs import (
    RecipeDraft,
    lora_settings,
    named_format,
    set_added_tokens,
    set_chat_template,
    set_evaluation,
    set_held_out,
    set_preference,
    set_reward,
    set_trackio,
)
from toolkit.extras.translate.read import ForeignConfig
from toolkit.messages import tr

_METHODS = ("lora", "qlora")
_LOSSES = {"dpo": "sigmoid", "ipo": "ipo", "orpo": "orpo", "simpo": "simpo", "kto": "kto"}
_DPO_LOSSES = ("sigmoid", "robust", "hinge", "ipo")
_WARMUP = 0.03
"""The fraction of the steps, at most 100 of them, where a config names no warmup."""
_LIGER, _CUT = "LigerPlugin", "CutCrossEntropyPlugin"
_TRACKERS = ("wandb", "mlflow", "tensorboard", "trackio", "swanlab")
_READ = (
    *("path", "type", "name", "split", "revision", "data_files", "ds_type", "field", "field_messages", "field_tools"),
    *("field_chosen", "field_rejected", "text_column", "message_property_mappings", "message_field_role"),
    *("message_field_content", "message_field_training", "trust_remote_code", "chat_template"),
)
"""Keys of a dataset that are read, or say nothing here."""
_ASSISTANT = ("assistant", "gpt", "model")
_OF_ALL_LAYERS = {"model", "language_model", "layers", "self_attn", "mlp"}
"""Words before a module's name in a pattern that stands for this module in each layer."""


def set_derived_defaults(config: ForeignConfig, draft: RecipeDraft) -> None:
    """Before translating: add defaults that axolotl derives from other keys; turn its own values into the Trainer's,
    which are then translated as in any program's config.
    """
    values = config.values
    names_other_precision = any(values.get(name) not in (None, False) for name in ("fp16", "float32"))
    defaults: dict[str, Any] = {"bf16": not names_other_precision, "tf32": False}
    for name in defaults:
        if values.get(name) in ("auto", "full"):  # auto: if the GPU has it; full: in evaluation, too
            del values[name]
    if values.get("chat_template") == "tokenizer_default":  # the tokenizer's own, as here where none is named
        del values["chat_template"]
    if isinstance(values.get("gradient_checkpointing"), str):  # "offload" moves what it keeps to the CPU
        values["gradient_checkpointing"] = True
    if values.get("batch_size") and "gradient_accumulation_steps" not in values:
        # axolotl's batch_size is of one rank and an optimizer step; its micro_batch_size is `rows`.
        rows = config.number("per_device_train_batch_size", int)
        values["gradient_accumulation_steps"] = max(1, config.number("batch_size", int) // rows)
        config.spelled["gradient_accumulation_steps"] = "batch_size"
    if not (config.has("warmup_steps") or config.has("warmup_ratio")):
        values["warmup_ratio"] = _WARMUP
        draft.notes.append(tr("warmup_ratio = {ratio}, as axolotl takes where none is given.", ratio=_WARMUP))
    if config.has("save_steps"):
        defaults["save_strategy"] = "steps"
    else:  # what saves_per_epoch says is reported as lost
        defaults["save_strategy"] = "no" if config.has("saves_per_epoch") else "epoch"
    defaults["eval_strategy"] = "steps" if config.has("eval_steps") else "no"
    config.set_defaults(defaults)
    values.pop("report_to", None)  # the Trainer's list of trackers: axolotl has a switch for each, see `_trackers`


def translate_own_keys(config: ForeignConfig, draft: RecipeDraft) -> None:
    """Translate the keys that only axolotl has."""
    if config.has("plugins") or config.has("liger_fused_linear_cross_entropy"):
        _plugins(config, draft)
    _method(config, draft)
    rl = str(config.get("rl") or "")
    if rl and rl not in _LOSSES:
        raise config.without_counterpart("rl", _LOSSES)
    _data(config, draft, rl)
    if config.flag("reward_model"):
        set_reward(config, draft, "reward_model")
    elif rl:
        _preference(config, draft, rl)
    for name, value in {"eager_attention": "eager", "sdp_attention": "sdpa"}.items():
        if config.has(name) and config.flag(name):
            draft.put("model.attention", value, name)
    ratio = config.number("cosine_min_lr_ratio") if config.has("cosine_min_lr_ratio") else None
    if ratio is not None and ratio < 1:
        draft.put("schedule.min_lr_ratio", ratio, "cosine_min_lr_ratio")
    elif ratio is not None:
        draft.lost["cosine_min_lr_ratio"] = tr("below 1 only; schedule=constant keeps the rate")
    set_added_tokens(config, draft, "tokens")
    special: Any = config.get("special_tokens")
    if isinstance(special, dict) and special.keys() <= {"pad_token"}:
        config.remark("special_tokens", "padding", is_harmless=True)
    _chat_template(config, draft)
    sizes = {"tensor_parallel_size": "tensor", "context_parallel_size": "sequence"}
    sizes["sequence_parallel_degree"] = "sequence"  # the older name
    for theirs, ours in sizes.items():
        if config.has(theirs) and config.number(theirs, int) > 1:
            draft.put(f"parallel.{ours}", config.number(theirs, int), theirs)
    if not config.has("save_total_limit"):  # the Trainer's default, which is set already, keeps all checkpoints
        draft.put("checkpoint.keep", config.keys["save_total_limit"].default)
    if config.flag("deepcompile"):
        draft.put("compile.deepcompile", True, "deepcompile")
    _trackers(config, draft)


def _chat_template(config: ForeignConfig, draft: RecipeDraft) -> None:
    """Set the chat template: by axolotl's name of it, or the file that `chat_template: jinja` names in another key."""
    if config.get("chat_template") not in (None, "jinja"):
        set_chat_template(config, draft, "chat_template", "axolotl_templates")
    template = str(config.get("chat_template_jinja") or "")  # a file, or the template's text itself
    if template.endswith((".jinja", ".jinja2", ".j2")):
        draft.put("model.chat_template", template, "chat_template_jinja")
    elif template:
        draft.lost["chat_template_jinja"] = tr("write it to a file: model.chat_template=FILE")


def _trackers(config: ForeignConfig, draft: RecipeDraft) -> None:
    """Set the trackers that the switches `use_NAME` turn on, with their projects. W&B is also on if a project is named
    and its switch is not set.
    """
    for name in _TRACKERS:
        if config.flag(f"use_{name}"):
            draft.put(f"track.{name}.enabled", True, f"use_{name}")
    if config.flag("use_wandb") or (config.values.get("wandb_project") and not config.has("use_wandb")):
        draft.put("track.wandb.enabled", True, "use_wandb", "wandb_project")
        for theirs, ours in (("wandb_project", "project"), ("wandb_entity", "entity")):
            if config.has(theirs):
                draft.put(f"track.wandb.{ours}", str(config.get(theirs)), theirs)
    if config.flag("use_swanlab") and config.values.get("swanlab_project"):
        draft.put("track.swanlab.project", str(config.get("swanlab_project")), "swanlab_project")
    if config.flag("use_trackio"):
        set_trackio(config, draft)


def _plugins(config: ForeignConfig, draft: RecipeDraft) -> None:
    """Translate Liger's plugin; other plugins are noted as lost, but for cut cross entropy, which saves memory only.
    Plugins are named as Python classes: axolotl.integrations.liger.LigerPlugin.
    """
    names = [name.rpartition(".")[2] for name in config.names("plugins")]
    if _LIGER in names:
        draft.put("kernels.liger", "always", "plugins", "liger_fused_linear_cross_entropy")
    if unknown := [name for name in names if name not in (_LIGER, _CUT)]:
        draft.lost["plugins"] = tr("{names} has no counterpart", names=", ".join(unknown))


def _method(config: ForeignConfig, draft: RecipeDraft) -> None:
    """Set the tuning method: full without an adapter; else LoRA, with the adapter to continue or a new one's shape."""
    if not config.get("adapter"):
        draft.put("tuning.method", "full", "adapter")
        return
    method = str(config.get("adapter"))
    if method not in _METHODS:
        raise config.without_counterpart("adapter", _METHODS)
    is_qlora = method == "qlora" or config.flag("load_in_4bit")  # LoRA on 4-bit weights is QLoRA
    draft.put("tuning.method", "qlora" if is_qlora else "lora", "adapter", "load_in_4bit")
    if config.get("lora_model_dir"):
        draft.put("tuning.adapter", str(config.get("lora_model_dir")), "lora_model_dir")
        return
    _list_lora_targets(config, draft)
    lora_settings(config, draft, rank="lora_r", targets="lora_target_modules", saved="lora_modules_to_save")


def _list_lora_targets(config: ForeignConfig, draft: RecipeDraft) -> None:
    """Put a list of LoRA's targets, which `lora_settings` reads, in place of axolotl's switch or regular expression."""
    if config.flag("lora_target_linear"):
        config.values["lora_target_modules"] = ["all-linear"]
        config.spelled["lora_target_modules"] = "lora_target_linear"  # the key to name in messages
    elif isinstance(config.get("lora_target_modules"), str):
        if names := _names_of_pattern(str(config.values.pop("lora_target_modules"))):
            config.values["lora_target_modules"] = names
        else:
            draft.lost["lora_target_modules"] = tr("a regular expression; the recipe takes query, key and value")


def _names_of_pattern(pattern: str) -> list[str]:
    """Return the names of modules that a regular expression over full names ends with: `.*self_attn.(q|k)_proj` gives
    q_proj and k_proj. [] if that cannot be told, or if its beginning restricts it to some layers or to a part such as a
    vision tower: the names alone would then train more.
    """
    before, _, last = pattern.removesuffix("$").rpartition(".")  # ".*self_attn", "(q|k)_proj"
    last_name = re.fullmatch(r"\(?([a-z_|]+)\)?(\w*)", last)  # "q|k", "_proj"
    without_groups = re.sub(r"\([^()]*\)", "", before)
    is_cut = re.search(r"[|()]", without_groups)  # `last` is only a part of an alternative, as in (a.x|b.y)
    has_numbers_or_lookahead = re.search(r"[0-9]|\(\?", before)
    if not last_name or is_cut or has_numbers_or_lookahead:
        return []
    words = re.findall(r"[A-Za-z_]{2,}", before)
    if not _OF_ALL_LAYERS.issuperset(words):
        return []
    return [f"{name}{last_name[2]}" for name in last_name[1].split("|")]


def _preference(config: ForeignConfig, draft: RecipeDraft, rl: str) -> None:
    """Set the loss of pairs or rated answers with its weights; `rl`: the value of this key. With `rl: dpo`, TRL's
    `loss_type` may choose another loss of its DPOTrainer; TRL can add several up, which has no counterpart.
    """
    loss, loss_key = _LOSSES[rl], "rl"
    losses = config.names("loss_type") if rl == "dpo" else []
    if losses:
        loss, loss_key = losses[0], "loss_type"
        if len(losses) > 1 or loss not in _DPO_LOSSES:
            raise config.without_counterpart("loss_type", _DPO_LOSSES)
    terms = {"cpo_alpha": config.number("cpo_alpha")} if rl == "simpo" else {}
    if config.has("rpo_alpha"):
        terms = {"rpo_alpha": config.number("rpo_alpha")}
    set_preference(config, draft, loss, {"beta": "beta", "loss": loss_key, "smoothing": "label_smoothing"}, terms)


def _data(config: ForeignConfig, draft: RecipeDraft, rl: str) -> None:
    """Set data, handling of too long rows, and packing; `rl`: the value of this key, or ""."""
    is_text = config.has("pretraining_dataset")
    key = "pretraining_dataset" if is_text else "datasets"
    if not config.get(key):
        raise config.without_data(key)
    draft.put("data.sources", _sources(config, draft, key, rl), key)
    validation = _sources(config, draft, "test_datasets", rl) if config.has("test_datasets") else []
    if validation:
        draft.put("data.validation", validation, "test_datasets")
    else:
        set_held_out(draft, config.number("val_set_size"), "val_set_size")
    set_evaluation(config, draft, bool(validation) or config.number("val_set_size") > 0)
    strategy = str(config.get("excess_length_strategy"))
    if strategy not in ("drop", "truncate"):  # such as "raise"
        draft.lost["excess_length_strategy"] = tr("rows that are too long are dropped and counted")
        draft.put("data.too_long", "drop")
    elif strategy == "drop" or not rl:  # pairs cannot be truncated here: the recipe's default drops them
        # axolotl cuts the texts of pretraining into blocks, whatever the key says.
        draft.put("data.too_long", "split" if is_text else strategy, "excess_length_strategy")
    if rl or config.flag("reward_model"):  # pairs and rated answers: the rest is for texts and conversations
        return
    if not is_text:
        draft.put("data.train_on", "all")
    if config.flag("sample_packing") or is_text:
        draft.put("data.packing", "packed", "sample_packing")


def _sources(config: ForeignConfig, draft: RecipeDraft, key: str, rl: str) -> list[dict[str, Any]]:
    """Return the items of `data.sources` for the datasets in `key`; those that cannot be read are noted. `rl`: the
    value of `rl`.
    """
    value = config.get(key)
    sources = []
    for item in value if isinstance(value, list) else [value]:
        entry = item if isinstance(item, dict) else {"path": item}
        path = str(entry.get("path") or "")
        if key == "pretraining_dataset":
            row_settings: dict[str, Any] | None = named_format("text", {"text": entry.get("text_column")})
        else:
            row_settings = _format(entry, rl, config.flag("reward_model"))
        if row_settings is None:
            shown = entry.get("type")
            draft.gaps.append(
                tr(
                    "the dataset {name} is skipped: its type {type} has no counterpart (docs/data.md).",
                    name=path,
                    type=shown,
                )
            )
            continue
        if row_settings["format"] == "instruction":
            config.remark(key, "own_prompts")
        if unread := _unread(entry):
            draft.notes.append(tr("the dataset {name}: {keys} has no counterpart.", name=path, keys=", ".join(unread)))
        for location in _locations(entry, path, draft, key):
            sources.append({**location, **row_settings})
    return sources


def _locations(entry: dict[str, Any], path: str, draft: RecipeDraft, key: str) -> list[dict[str, Any]]:
    """Return the places of a dataset's rows, as items of `data.sources` without their format: {"path": FILE} for each
    file, or one {"hub": NAME, "split": …} for a dataset on Hugging Face. `entry`: of the list in axolotl's `key`, with
    `path` as its path, a name or file. Notes of what is read otherwise go to `draft`.
    """
    data_files = entry.get("data_files") or []
    data_files = [data_files] if isinstance(data_files, str) else data_files
    is_local = bool(entry.get("ds_type")) or not files.is_dataset_name(path)  # ds_type: the type of local files
    names = [str(name) for name in data_files] if is_local and data_files else [path]
    settings: dict[str, Any] = {}
    if entry.get("split"):
        # Rows are counted over all files, which are sources of their own here.
        knows_first, has_weights = len(names) == 1, key == "datasets"
        settings = _split_settings(str(entry["split"]), path, draft, knows_first=knows_first, has_weights=has_weights)
    if is_local:
        if not Path(names[0]).is_dir():  # a file is one split
            settings.pop("split", None)
        return [{"path": name, **settings} for name in names]
    if data_files:
        draft.notes.append(tr("the dataset {name}: data_files has no counterpart; the whole split is read.", name=path))
    keys = {"subset": "name", "revision": "revision"}
    return [{"hub": path, **{ours: str(entry[key]) for ours, key in keys.items() if entry.get(key)}, **settings}]


def _split_settings(
    split: str, path: str, draft: RecipeDraft, *, knows_first: bool, has_weights: bool
) -> dict[str, Any]:
    """Return the settings of a source for a split of the dataset `path`, which may be a slice in the syntax of
    `datasets`: `test` -> {"split": "test"}, `test[:100]` -> {"split": "test", "max_samples": 100}, `test[:20%]` ->
    {"split": "test", "weight": 0.2}, with a note. Other slices are read as a whole, which a note says, too.
    `knows_first`: whether one source has the rows, so that its first are theirs; `has_weights`: whether they are for
    training, as only those of `data.sources` may have a weight.
    """
    settings: dict[str, Any] = {}
    if knows_first and (first_rows := re.fullmatch(r"(.+)\[:(\d+)\]", split)):
        split, settings["max_samples"] = first_rows[1], int(first_rows[2])
    first_percent = re.fullmatch(r"(.+)\[:(\d+)%\]", split)
    if first_percent and has_weights:
        split, settings["weight"] = first_percent[1], int(first_percent[2]) / 100
        draft.notes.append(
            tr(
                "the dataset {name}: {percent}% of its rows are drawn; there they are the first.",
                name=path,
                percent=first_percent[2],
            )
        )
    if "[" in split:  # what is left: test[10:20], or a sum of slices
        draft.notes.append(
            tr(
                "the dataset {name}: {part} is read as a whole; max_samples takes a source's first rows.",
                name=path,
                part=split,
            )
        )
        split = split.partition("[")[0]
    return settings if split == "train" else {"split": split} | settings  # train is the default of a source


def _unread(entry: dict[str, Any]) -> list[str]:
    """Return what of a dataset (`entry`) has a meaning in axolotl and none here: its keys, `type.KEY` of a type that is
    a mapping, and `roles: NAME` of names that are not read. Left out are keys whose value says what is done here
    anyway: to train all turns of the assistant, each with its end.
    """
    settings = {key: value for key, value in entry.items() if value not in (None, False, "", [], {})}
    if all(role in _ASSISTANT for role in _listed(settings.get("roles_to_train"))):
        settings.pop("roles_to_train", None)
    if settings.get("train_on_eos") == "turn":
        del settings["train_on_eos"]
    roles = settings.pop("roles", None)  # the role that it means -> its names in the file
    names_of_roles = {name for aliases in names_of("roles").values() for name in aliases}
    values = roles.values() if isinstance(roles, dict) else [roles]
    unknown_roles = [
        f"roles: {name}" for value in values for name in map(str, _listed(value)) if name not in names_of_roles
    ]
    row_type = settings.get("type")
    row_type = row_type if isinstance(row_type, dict) else {}
    type_keys = [f"type.{key}" for key in row_type if not key.startswith("field_")]
    return [*(key for key in settings if key not in _READ), *unknown_roles, *type_keys]


def _listed(value: Any) -> list[Any]:
    """Return a value as a list: itself, [] for None, else of one item."""
    return value if isinstance(value, list) else [] if value is None else [value]


def _format(entry: dict[str, Any], rl: str, is_reward: bool) -> dict[str, Any] | None:
    """Return format and columns of a dataset (`entry`), as `named_format` does; None if its type has no counterpart. A
    type is a name such as alpaca, or a mapping of field names for rows of instruction and output. `rl`: the value of
    `rl`; `is_reward`: for a reward model.
    """
    if rl or is_reward:
        return _preference_format(entry, rl, is_reward)
    row_type = entry.get("type")
    if isinstance(row_type, dict) and row_type:
        names = ("instruction", "input", "output", "system")
        return named_format("instruction", {name: row_type.get(f"field_{name}") for name in names})
    base = _base_type(row_type)
    if base == "alpaca":
        return {"format": "instruction"}
    if base == "completion":
        return named_format("text", {"text": entry.get("field")})
    if base in ("chat_template", "sharegpt"):
        default = "conversations" if base == "sharegpt" else "messages"
        columns = {
            "messages": entry.get("field_messages") or default,
            "tools": entry.get("field_tools"),
            **_roles(entry),
        }
        if base == "sharegpt":  # whose messages have `from` and `value`, unless other names are given
            named = {key: value for key, value in columns.items() if value}
            columns = {"role": "from", "content": "value", **named}
        return named_format("messages", columns)
    return None


def _preference_format(entry: dict[str, Any], rl: str, is_reward: bool) -> dict[str, Any] | None:
    """Return format and columns of a dataset of pairs or rated answers; arguments and None as of `_format`. Types are
    called TEMPLATE.COLUMNS, such as chatml.argilla: the template is the model's here, the columns are looked up.
    """
    row_type = entry.get("type")
    row_format = "labeled" if rl == "kto" else "reward" if is_reward else "preference"
    if isinstance(row_type, dict) and row_type:
        answers = {"completion": "field_completion", "label": "field_label"} if rl == "kto" else _PAIR
        fields = {"system": "field_system", "prompt": "field_prompt", **answers}
        return named_format(row_format, {ours: row_type.get(theirs) for ours, theirs in fields.items()})
    base, columns_name = _base_type(row_type), str(row_type).rpartition(".")[2]
    of_type = {"prompt": "input"} if base == "bradley_terry" else names_of("axolotl_pairs").get(columns_name)
    if of_type is None and base != "chat_template":
        return None
    of_type = of_type or {}  # our column -> the file's
    columns = {name: column for name, column in of_type.items() if name not in _PAIR}
    columns |= {"messages": entry.get("field_messages"), **_roles(entry)}
    if rl != "kto":  # rated answers are no pairs
        columns |= {name: entry.get(f"field_{name}") or of_type.get(name) for name in _PAIR}
    return named_format(row_format, columns)


def _base_type(row_type: Any) -> str:
    """Return the kind of rows that a type such as chat_template.argilla or sharegpt:chat begins with."""
    return str(row_type).partition(":")[0].partition(".")[0]


_PAIR = {"chosen": "field_chosen", "rejected": "field_rejected"}


def _roles(entry: dict[str, Any]) -> dict[str, Any]:
    """Return our column -> the file's name for the role, content and loss of messages, None where none is named."""
    mapping = entry.get("message_property_mappings")
    mapping = mapping if isinstance(mapping, dict) else {}
    names = {name: mapping.get(name) or entry.get(f"message_field_{name}") for name in ("role", "content")}
    return names | {"loss": entry.get("message_field_training")}
