"""What the arguments of ms-swift's `swift sft`, `swift pt` and `swift rlhf` become in a recipe."""

import math
import os
from typing import Any

from toolkit.config import files
from toolkit.config.program_keys import names_of, sentence
from toolkit.extras.translate.programs import (
    RecipeDraft,
    limit_rows,
    lora_settings,
    set_added_tokens,
    set_chat_template,
    set_evaluation,
    set_preference,
    set_reward,
)
from toolkit.extras.translate.read import ForeignConfig
from toolkit.messages import ConfigError, parsed_json, tr

_METHODS = ("lora", "full")
_LOSSES = ("dpo", "orpo", "simpo", "cpo", "kto", "rm", "gkd")
_DIVERGENCES = {0.0: "forward_kl", 1.0: "reverse_kl"}
"""Of GKD, by its beta; between them it is jsd."""
_DPO = ("sigmoid", "robust", "hinge", "ipo")
_RATES = {"full": 1e-5}
_RATE = 1e-4
"""Learning rates by --tuner_type where none is given (SftArguments); of all others the second."""
_GLOBAL_BATCH = 16
_BETAS = {"simpo": 2.0}
_BETA = 0.1
_GKD_BETA, _GKD_TEMPERATURE = 0.5, 0.9
_TOO_LONG = {"delete": "drop", "left": "truncate", "right": "truncate", "split": "split"}


def set_derived_defaults(config: ForeignConfig, draft: RecipeDraft) -> None:
    """Before translating: add the defaults that ms-swift derives from other arguments to the keys of `config`, and
    rename its own spellings to the Trainer's.
    """
    rows, ranks = config.number("per_device_train_batch_size", int), config.world_size or 1
    # ms-swift evaluates when it saves, and accumulates up to _GLOBAL_BATCH rows for an optimizer step.
    strategy = config.get("save_strategy") if _has_validation(config) else "no"
    dtype = str(config.get("torch_dtype") or "bfloat16")
    if config.get("rlhf_type") == "gkd" and not config.has("temperature"):
        config.set_defaults({"temperature": _GKD_TEMPERATURE})
    defaults = {
        "gradient_accumulation_steps": max(1, math.ceil(_GLOBAL_BATCH / rows / ranks)),
        "learning_rate": _RATES.get(_method(config), _RATE),
        "eval_strategy": strategy,
        "eval_steps": config.get("save_steps"),
        "bf16": dtype == "bfloat16" and not config.flag("fp16"),
        "fp16": dtype != "bfloat16" and not config.flag("bf16"),
    }
    config.set_defaults(defaults)
    if strategy == "steps" and not config.has("eval_steps"):  # as if it were set: `set_evaluation` asks for that
        config.values.setdefault("eval_steps", defaults["eval_steps"])
    if dtype == "float32" and config.flag("fp16"):
        draft.lost["torch_dtype"] = tr("ms-swift trains in fp16 with weights in float32; the recipe has precision=fp16")
    if config.get("optimizer") == "muon":  # ms-swift's own key, which counts before the Trainer's optim
        config.values["optim"] = config.values.pop("optimizer")
        config.spelled["optim"] = "optimizer"
    elif config.has("optimizer"):
        draft.lost["optimizer"] = tr("of those only muon has a counterpart")
    if not config.flag("use_hf") and files.is_hub_name(str(config.get("model_name_or_path"))):
        draft.notes.append(f"model: {sentence('modelscope')}.")
    presets = names_of("swift_zero")  # ms-swift brings a DeepSpeed JSON for each of these names
    if config.get("deepspeed") in presets:
        draft.groups["zero"] = presets[config.values.pop("deepspeed")]


def translate_own_keys(config: ForeignConfig, draft: RecipeDraft) -> None:
    """Translate the keys that only ms-swift has."""
    rlhf = _rlhf_type(config)
    if config.has("torch_dtype"):
        dtype, _ = draft.values["precision.dtype"]
        names = ("torch_dtype", *(name for name in ("fp16", "bf16") if name in config.values))
        draft.values["precision.dtype"] = dtype, ", ".join(names)  # the keys that it comes from
    _method_and_adapter(config, draft)
    set_added_tokens(config, draft, "new_special_tokens")
    set_chat_template(config, draft, "template", "swift_templates")
    _data(config, draft, rlhf)
    if rlhf == "rm":
        set_reward(config, draft, "rlhf_type")
    elif rlhf == "gkd":
        _distillation(config, draft)
    elif config.get("task_type") == "seq_cls":
        draft.groups["task"] = "classify"
        draft.put("task.kind", "classify", "task_type")
    elif rlhf:
        _preference(config, draft, rlhf)
    for theirs, ours in {
        "deepspeed_autotp_size": "parallel.tensor",
        "sequence_parallel_size": "parallel.sequence",
        "zero_hpz_partition_size": "zero.zero_hpz_partition_size",
    }.items():
        if config.has(theirs) and config.number(theirs, int) > 1:
            draft.put(ours, config.number(theirs, int), theirs)
    if "swanlab" in config.names("report_to"):
        draft.put("track.swanlab.project", str(config.get("swanlab_project")), "swanlab_project")
        if config.has("swanlab_workspace"):
            draft.put("track.swanlab.workspace", str(config.get("swanlab_workspace")), "swanlab_workspace")
        draft.put(
            "track.swanlab.mode", "offline" if config.get("swanlab_mode") == "local" else "online", "swanlab_mode"
        )


def _rlhf_type(config: ForeignConfig) -> str:
    """Return what `swift rlhf` trains (its rlhf_type), "" for other commands. ConfigError if that, or the task_type,
    has no counterpart: of tasks only causal_lm has one, and seq_cls with one label out of several.
    """
    problem = str(config.get("problem_type") or "single_label_classification")
    is_classifier = config.get("task_type") == "seq_cls" and problem == "single_label_classification"
    if config.get("task_type") != "causal_lm" and not (is_classifier and config.number("num_labels", int) > 1):
        raise ConfigError(
            "{place}: task_type = {value} is not translated. Recipes for it begin with task=classify, task=embed or "
            "task=reward (docs/recipes.md).",
            place=config.location("task_type"),
            value=config.get("task_type"),
        )
    if config.script != "swift rlhf" and not config.has("rlhf_type"):
        return ""
    rlhf = str(config.get("rlhf_type"))
    if rlhf not in _LOSSES:
        raise config.without_counterpart("rlhf_type", _LOSSES)
    return rlhf


def _distillation(config: ForeignConfig, draft: RecipeDraft) -> None:
    """Set teacher and divergence of GKD, and how often the student answers; ConfigError if the teacher is to answer.
    GKD's beta 0 is the forward and 1 the reverse KL divergence; its lmbda is the share of batches that the student
    answers itself. It has no loss on the answers of the data, so that the divergence's weight is 1.
    """
    if config.flag("seq_kd") or not config.has("teacher_model"):
        raise ConfigError(
            "{place}: GKD has a counterpart with --teacher_model, and without --seq_kd (answers of the teacher: let it "
            "write them to a file before, and train on that).",
            place=config.location("seq_kd"),
        )
    if not config.has("beta"):
        config.set_defaults({"beta": _GKD_BETA})
    beta, temperature = config.number("beta"), config.number("temperature") or 1.0
    draft.groups["task"] = "distill"
    draft.put("task.kind", "distill", "rlhf_type")
    draft.put("distill.teacher", str(config.get("teacher_model")), "teacher_model")
    draft.put("distill.weight", 1.0)
    draft.put("distill.loss", _DIVERGENCES.get(beta, "jsd"), "beta")
    if beta not in _DIVERGENCES:
        draft.put("distill.beta", beta, "beta")
    draft.put("distill.temperature", temperature, "temperature")
    config.remark("temperature", "gkd_temperature")
    if share := config.number("lmbda"):
        draft.put("distill.on_policy", share, "lmbda")
        draft.put("distill.rollouts.temperature", temperature, "temperature")
        draft.put(
            "distill.rollouts.max_new_tokens", config.number("max_completion_length", int), "max_completion_length"
        )


def _preference(config: ForeignConfig, draft: RecipeDraft, rlhf: str) -> None:
    """Set the loss of pairs or rated answers with its weights; `rlhf`: the value of `rlhf_type`. For dpo the loss_type
    chooses among the losses of TRL's DPOTrainer.
    """
    losses = config.names("loss_type") or ["sigmoid"]
    if rlhf == "dpo" and (len(losses) > 1 or losses[0] not in _DPO):
        raise config.without_counterpart("loss_type", _DPO)
    loss = losses[0] if rlhf == "dpo" else rlhf
    if not config.has("beta"):
        config.set_defaults({"beta": _BETAS.get(rlhf, _BETA)})
    terms = {"cpo_alpha": config.number("cpo_alpha")} if rlhf in ("cpo", "simpo") else {}
    if config.has("rpo_alpha") and rlhf == "dpo":
        terms = {"rpo_alpha": config.number("rpo_alpha")}
    keys = {
        "beta": "beta",
        "loss": "loss_type" if config.has("loss_type") else "rlhf_type",
        "smoothing": "label_smoothing",
    }
    set_preference(config, draft, loss, keys, terms)


def _method(config: ForeignConfig) -> str:
    """Return the tuning method (lora, full), whichever of its three names is used."""
    name = next((name for name in ("tuner_type", "train_type", "sft_type") if config.has(name)), "tuner_type")
    if str(config.get(name)) not in _METHODS:
        raise config.without_counterpart(name, _METHODS)
    return str(config.get(name))


def _method_and_adapter(config: ForeignConfig, draft: RecipeDraft) -> None:
    """Set the tuning method, with the adapter that is continued or the shape of a new one. LoRA on a model that is
    quantized when it is loaded is QLoRA.
    """
    method, names = _method(config), ("tuner_type", "train_type", "sft_type")
    draft.put("tuning.method", method, *names)
    if method != "lora":
        return
    if config.has("quant_bits") or config.has("quant_method"):
        if (str(config.get("quant_method")), str(config.get("quant_bits"))) == ("bnb", "4"):
            draft.put("tuning.method", "qlora", *names, "quant_method", "quant_bits")
        else:
            draft.lost["quant_bits"] = tr("bnb with 4 bits is there (tuning=qlora), others are not")
    adapters = config.values.get("adapters")
    adapters = adapters if isinstance(adapters, list) else [adapters] if adapters else []
    if len(adapters) == 1:
        draft.put("tuning.adapter", str(adapters[0]), "adapters")
        return
    if adapters:
        draft.lost["adapters"] = tr("several adapters: merge them into the model before")
    lora_settings(config, draft, rank="lora_rank", targets="target_modules", saved="modules_to_save")


def _has_validation(config: ForeignConfig) -> bool:
    """Whether validation data are named or split off."""
    return config.has("val_dataset") or config.number("split_dataset_ratio") > 0


def _data(config: ForeignConfig, draft: RecipeDraft, rlhf: str) -> None:
    """Set data, handling of too long rows, packing, and which answers are trained; `rlhf`: as of `_rlhf_type`."""
    is_text = config.script == "swift pt"
    if is_text:
        draft.notes.append(
            tr(
                "swift pt: rows are read as texts under the key text; columns: {{text: KEY}} in data.sources names "
                "another."
            )
        )
    draft.put("data.sources", _sources(config, draft, "dataset", rlhf, is_text), "dataset", "columns")
    if config.has("val_dataset"):
        draft.put("data.validation", _sources(config, draft, "val_dataset", rlhf, is_text), "val_dataset", "columns")
    else:
        draft.put("data.validation_fraction", config.number("split_dataset_ratio"), "split_dataset_ratio")
    set_evaluation(config, draft, _has_validation(config))
    strategy = str(config.get("truncation_strategy"))
    if strategy not in _TOO_LONG:
        raise config.without_counterpart("truncation_strategy", _TOO_LONG)
    is_language = rlhf in ("", "gkd") and config.get("task_type") == "causal_lm"
    if rlhf not in ("", "gkd") and strategy != "delete":
        draft.lost["truncation_strategy"] = tr("pairs and rated answers that are too long are dropped")
    else:
        draft.put("data.too_long", _TOO_LONG[strategy], "truncation_strategy")
    if not is_language:
        return
    if config.flag("packing"):
        draft.put("data.packing", "packed", "packing")
    scale = str(config.get("loss_scale")).partition("+")[0]  # of "last_round+ignore_empty_think" the first part
    if not is_text:
        draft.notes.append(f"template: {sentence('swift_turn_ends')}")
        draft.put("data.train_on", "last" if scale == "last_round" else "all", "loss_scale")
    if scale not in ("default", "last_round") and not is_text:
        draft.lost["loss_scale"] = tr("default and last_round have counterparts; the recipe trains all answers")


def _sources(config: ForeignConfig, draft: RecipeDraft, name: str, rlhf: str, is_text: bool) -> list[dict[str, Any]]:
    """Return the items of `data.sources` for the datasets in the key `name`, spelled as `_dataset_parts` says; those on
    ModelScope, ms-swift's own hub, are left to the user with a note. `rlhf`: what `_rlhf_type` returns; `is_text`: for
    plain texts.
    """
    value = config.values.get(name)
    if not value:
        raise config.without_data(name)
    formats = {"": "auto", "gkd": "auto", "rm": "reward", "kto": "labeled"}
    row_format = "text" if is_text else formats.get(rlhf, "preference")
    if config.get("task_type") == "seq_cls":
        row_format = "classify"
    columns = _columns(config)
    row_settings = {"format": row_format} | ({"columns": columns} if columns else {})
    sources = []
    for item in value if isinstance(value, list) else [value]:
        shown, hub, bare, subset, count = _dataset_parts(str(item))
        if not files.is_dataset_name(bare):
            sources.append({"path": bare, **limit_rows(shown, count, draft), **row_settings})
        elif hub == "HF" or config.flag("use_hf"):
            limit = limit_rows(shown, count, draft)
            sources.append({"hub": bare, **({"subset": subset} if subset else {}), **limit, **row_settings})
        else:
            draft.gaps.append(
                tr(
                    "the dataset {name} is on ModelScope: `modelscope download --dataset {name} --local_dir DIR`, then "
                    "add {item} to data.sources.",
                    name=bare,
                    item=str({"path": "DIR"} | ({"max_samples": count} if count else {}) | row_settings),
                )
            )
    return sources


def _dataset_parts(text: str) -> tuple[str, str, str, str, int]:
    """Return the parts of [HF::|MS::]ID[:subset][#rows], of which ID may be a path: what is before #rows, hub, ID,
    subset, rows (0: all). HF::me/d:en#9 -> ("HF::me/d:en", "HF", "me/d", "en", 9).
    """
    before, mark, rows = text.rpartition("#")
    text, count = (before, int(rows)) if mark and rows.isdecimal() else (text, 0)
    hub, separator, name = text.partition("::")
    if not separator:
        hub, name = "", text
    name, _, subset = (name, "", "") if os.path.exists(name) else name.partition(":")  # a path may hold a colon
    return text, hub.upper(), name, subset, count


def _columns(config: ForeignConfig) -> dict[str, str]:
    """Return our name -> the file's name of columns; ms-swift's `columns`, {"FILE'S": "OURS"}, are the other way round,
    and JSON on a command line.
    """
    value = config.get("columns")
    if isinstance(value, str):
        try:
            value = parsed_json(value)
        except ValueError as error:
            location = f"{config.location('columns')}: columns"
            raise ConfigError("{place} is no JSON object: {reason}", place=location, reason=error) from error
    return {str(ours): str(theirs) for theirs, ours in value.items()} if isinstance(value, dict) else {}
