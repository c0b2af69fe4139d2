"""A LLaMA-Factory config: method and data beside the Trainer's arguments."""

from toolkit.errors import ConfigError
from toolkit.messages import tr
from toolkit.translate.datasets import sources_of
from toolkit.translate.given import Draft, Given
from toolkit.translate.trainer import translate_evaluation, translate_model

GLM_NAMES = {
    "query_key_value": ("q_proj", "k_proj", "v_proj"),
    "dense": ("o_proj",),
    "dense_h_to_4h": ("gate_up_proj",),
    "dense_4h_to_h": ("down_proj",),
}
"""Linear layers of ChatGLM2 and later: the official code's names and transformers'."""


def translate_factory(given: Given, draft: Draft) -> None:
    """Compute what LLaMA-Factory makes of its arguments.

    Raises:
        ConfigError: a stage or a method that is not here.
    """
    stage = str(given.get("stage"))
    if stage not in ("sft", "pt"):
        raise ConfigError(
            tr("{place}: stage = {value} has no counterpart: sft and pt have.", place=given.place("stage"), value=stage)
        )
    if not given.flag("do_train"):
        raise ConfigError(
            tr(
                "{place}: do_train is not true, so this config trains nothing. `toolkit eval` scores, `toolkit "
                "generate` answers, `toolkit export-model` merges.",
                place=given.place("do_train"),
            )
        )
    translate_model(given, draft)
    _method(given, draft)
    _model(given, draft)
    _data(given, draft, stage)
    if given.flag("use_swanlab"):
        _swanlab(given, draft)


def _swanlab(given: Given, draft: Draft) -> None:
    draft.put("track.swanlab.enabled", True, "use_swanlab")
    stated = ["swanlab_project"] if given.has("swanlab_project") else []
    draft.put("track.swanlab.project", str(given.get("swanlab_project")), *stated)
    if given.has("swanlab_workspace"):
        draft.put("track.swanlab.workspace", str(given.get("swanlab_workspace")), "swanlab_workspace")
    mode = str(given.get("swanlab_mode")).lower()
    if mode in ("cloud", "local", "offline"):
        stated = ["swanlab_mode"] if given.has("swanlab_mode") else []
        draft.put("track.swanlab.mode", "online" if mode == "cloud" else "offline", *stated)
    else:
        draft.lost["swanlab_mode"] = tr("there are cloud and local")


def _method(given: Given, draft: Draft) -> None:
    method = str(given.get("finetuning_type"))
    stated = ["finetuning_type"] if given.has("finetuning_type") else []
    bits = given.get("quantization_bit")
    if method == "lora":
        quantized = bits is not None and given.number("quantization_bit", int) == 4
        if bits is not None and not quantized:
            draft.lost["quantization_bit"] = tr("4 bits are there (tuning=qlora), {bits} are not", bits=bits)
        named = [*stated, "quantization_bit"] if quantized else stated
        draft.put("tuning.method", "qlora" if quantized else "lora", *named)
        _lora(given, draft)
    elif method == "freeze":
        draft.put("tuning.method", "freeze", *stated)
        _freeze(given, draft)
    elif method == "full":
        draft.put("tuning.method", "full", *stated)
    else:
        raise ConfigError(
            tr(
                "{place}: finetuning_type = {value} has no counterpart: lora, freeze and full have.",
                place=given.place("finetuning_type"),
                value=method,
            )
        )


def _lora(given: Given, draft: Draft) -> None:
    dropout = ["lora_dropout"] if given.has("lora_dropout") else []
    adapters = given.names("adapter_name_or_path")
    if len(adapters) == 1 and not given.flag("create_new_adapter"):
        draft.put("tuning.adapter", adapters[0], "adapter_name_or_path")
        return
    if adapters:
        draft.lost["adapter_name_or_path"] = tr("several adapters: merge them into the model before")
    rank = given.number("lora_rank", int)
    draft.put("tuning.rank", rank, *(["lora_rank"] if given.has("lora_rank") else []))
    alpha = given.number("lora_alpha") if given.get("lora_alpha") else 2.0 * rank
    draft.put("tuning.alpha", alpha, *(["lora_alpha"] if given.has("lora_alpha") else []))
    draft.put("tuning.dropout", given.number("lora_dropout"), *dropout)
    for theirs, ours in (("use_rslora", "rslora"), ("use_dora", "dora")):
        if given.flag(theirs):
            draft.put(f"tuning.{ours}", True, theirs)
    targets = given.names("lora_target")
    if targets == ["all"]:
        targets = ["all-linear"]
    elif draft.groups.get("model", "chatglm_6b") != "chatglm_6b":
        targets = [name for target in targets for name in GLM_NAMES.get(target, (target,))]
    draft.put("tuning.target_modules", targets, *(["lora_target"] if given.has("lora_target") else []))
    if given.has("additional_target"):
        draft.put("tuning.save_modules", given.names("additional_target"), "additional_target")


def _freeze(given: Given, draft: Draft) -> None:
    layers = given.number("freeze_trainable_layers", int)
    whole = given.names("freeze_trainable_modules") == ["all"]
    if layers <= 0:
        raise ConfigError(
            tr(
                "{place}: freeze_trainable_layers = {layers} trains the first layers, which has no counterpart: the "
                "last ones can be trained, with a number above 0.",
                place=given.place("freeze_trainable_layers"),
                layers=layers,
            )
        )
    if not whole:
        draft.lost["freeze_trainable_modules"] = tr("the recipe trains whole layers")
    stated = ["freeze_trainable_layers"] if given.has("freeze_trainable_layers") else []
    draft.put("tuning.last_layers", layers, *stated)
    if given.has("freeze_extra_modules"):
        patterns = [f"*{name}*" for name in given.names("freeze_extra_modules")]
        draft.put("tuning.patterns", patterns, "freeze_extra_modules")


def _model(given: Given, draft: Draft) -> None:
    if given.flag("pure_bf16"):
        draft.put("precision.dtype", "bf16", "pure_bf16")
    recompute = not given.flag("disable_gradient_checkpointing")
    stated = ["disable_gradient_checkpointing"] if given.has("disable_gradient_checkpointing") else []
    draft.put("train.activation_checkpointing.enabled", recompute, *stated)
    if given.flag("enable_liger_kernel"):
        draft.put("kernels.liger", "always", "enable_liger_kernel")
    attention = str(given.get("flash_attn")).lower()
    if attention == "sdpa":
        draft.put("model.attention", "sdpa", "flash_attn")
    elif attention in ("disabled", "false"):
        draft.put("model.attention", "eager", "flash_attn")


def _data(given: Given, draft: Draft, stage: str) -> None:
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
        draft.put("data.validation_fraction", 0.0, *(["val_size"] if given.has("val_size") else []))
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
        draft.put("data.packing", "packed", *[name for name in ("packing", "neat_packing") if given.has(name)])
    stated = ["mask_history"] if given.has("mask_history") else []
    draft.put("data.train_on", "last" if given.flag("mask_history") else "all", *stated)
