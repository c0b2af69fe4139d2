"""Translates the arguments of transformers' Trainer and of TRL, which other programs share, to settings of a recipe."""

import math
import os
from dataclasses import dataclass, field
from typing import Any

from toolkit.config import files, rule_tables, schema, validate
from toolkit.config.program_keys import Key, names_of, sentence
from toolkit.extras.translate.read import (
    AXOLOTL_NAME,
    CHATGLM_NAME,
    FACTORY_NAME,
    FASTCHAT_NAME,
    FIREFLY_NAME,
    GLM_DEMO_NAME,
    HF_NAME,
    SWIFT_NAME,
    ForeignConfig,
    typed,
)
from toolkit.messages import ConfigError, did_you_mean, joined, parsed_json, tr

_LR_END = 1e-7
"""Last learning rate of transformers' polynomial schedule (5.23, get_polynomial_decay_schedule_with_warmup)."""


@dataclass(kw_only=True, slots=True)
class RecipeDraft:
    """Settings of this toolkit translated from another program's config, and notes about the translation."""

    config: ForeignConfig
    """The config of the other program, whose keys are translated."""
    values: dict[str, tuple[Any, str]] = field(default_factory=dict)
    """Our key -> (value, the keys that it comes from; "" for a default of the other program)."""
    groups: dict[str, str] = field(default_factory=dict)
    """Groups that are chosen by name: {model: chatglm_6b}."""
    lost: dict[str, str] = field(default_factory=dict)
    """Key of the other program -> why its value has no counterpart here."""
    gaps: list[str] = field(default_factory=list)
    """What the config does not say, or says in a file that is not here: training depends on it."""
    notes: list[str] = field(default_factory=list)
    """Further sentences for the user."""

    def put(self, key: str, value: Any, *sources: str) -> None:
        """Set a key of ours. `sources`: the other program's keys that it comes from, none for that program's default;
        only those that the config sets are noted.
        """
        self.values[key] = (value, ", ".join(map(self.config.spelling, filter(self.config.has, sources))))


OWNERS = ("thudm", "zai-org", "zhipuai")


def translate(config: ForeignConfig) -> RecipeDraft:
    """Translate a config's keys to settings of ours; ConfigError if its values cannot be understood."""
    draft = RecipeDraft(config=config)
    module = _program_module(config.program)
    if hasattr(module, "set_derived_defaults"):
        module.set_derived_defaults(config, draft)
    trl = _trl_loss(config)
    rate = _TRL_RATES.get(trl or config.script) if config.program == HF_NAME else None  # None: no config of TRL
    if rate:  # TRL's configs have other defaults than the Trainer's (DPOConfig and others, 1.16)
        defaults = {"learning_rate": rate, "gradient_checkpointing": True, "max_length": 1024}
        defaults["bf16"] = not config.flag("fp16")
        config.set_defaults(defaults)
    _launcher(config, draft)
    for name, key in config.keys.items():  # those with one counterpart of the same meaning
        value = config.get(name)  # or the program's default, which may differ from ours
        if key.to and not key.made and value is not None:
            draft.put(key.to, typed(value, validate.field_type(key.to), f"{config.location(name)}: {name}"), name)
    _batch_and_length(config, draft)
    _schedule(config, draft)
    _optimizer(config, draft)
    _compute(config, draft)
    _logging(config, draft)
    _model(config, draft)
    if module:
        module.translate_own_keys(config, draft)
    else:
        _peft(config, draft)
        _named_data(config, draft, trl)
        _trl_settings(config, draft, trl)
    _fsdp(config, draft)
    micro_batches = config.number("gradient_accumulation_steps", int) * (config.world_size or 1)
    if config.program in _MICRO_MEANS and micro_batches > 1 and "preference" not in draft.groups:
        config.remark("per_device_train_batch_size", "micro_means")
    if config.program == AXOLOTL_NAME and (config.world_size or 1) > 1 and draft.groups.keys().isdisjoint(_NO_TOKENS):
        config.remark("per_device_train_batch_size", "rank_means")
    return draft


_NO_TOKENS = ("preference", "task")
"""Groups whose losses are not means over tokens."""
_MICRO_MEANS = (CHATGLM_NAME, GLM_DEMO_NAME, FASTCHAT_NAME, FIREFLY_NAME)
"""Programs on versions of transformers that average the micro-batches' means."""


def _program_module(program: str) -> Any:
    """Return the module of this package that translates the keys that only this program has, imported here as it
    imports this one; None for the Trainer's and TRL's, which are translated here.
    """
    from toolkit.extras.translate import axolotl, chatglm, factory, fastchat, firefly, glm_demo, swift

    modules = {
        SWIFT_NAME: swift,
        AXOLOTL_NAME: axolotl,
        CHATGLM_NAME: chatglm,
        FACTORY_NAME: factory,
        FASTCHAT_NAME: fastchat,
        FIREFLY_NAME: firefly,
        GLM_DEMO_NAME: glm_demo,
    }
    return modules.get(program)


_ZERO = ("", "0", "1", "2", "3")
_DEVICES = ("none", "cpu")


def _launcher(config: ForeignConfig, draft: RecipeDraft) -> None:
    """Translate the options of `accelerate launch` that the Trainer reads where its own arguments say nothing else:
    precision, DeepSpeed JSON, ZeRO and FSDP, in this order. They become values of `config`, or the group zero of
    `draft`. The other options are noted as lost.
    """
    # Each step takes what it has translated out of `options`: what is left at the end is lost.
    left_out = names_of("accelerate")  # options that change nothing of what is trained, or are read elsewhere
    options = {name: value for name, value in config.accelerate.items() if name not in left_out}
    if options.get("mixed_precision") in ("no", "bf16", "fp16"):
        dtype = options.pop("mixed_precision")
        if dtype != "no" and not config.flag("bf16") and not config.flag("fp16"):
            config.values[dtype] = True
    if options.get("mixed_precision") == "fp8" and "fp8" not in config.keys:  # the Trainer has no such argument
        del options["mixed_precision"]
        config.keys = {**config.keys, "fp8": Key(default=False, to="precision.fp8", says="fp8", made=True)}
        config.values["fp8"], config.spelled["fp8"] = True, "--mixed_precision"
    if options.get("deepspeed_config_file"):
        config.values.setdefault("deepspeed", options.pop("deepspeed_config_file"))
    # A DeepSpeed JSON counts more than accelerate's options about ZeRO.
    is_zero_of_options = "use_deepspeed" in config.accelerate and not config.has("deepspeed")
    if is_zero_of_options and options.get("zero_stage", "") in _ZERO:
        stage = options.pop("zero_stage", "") or "2"  # accelerate's default
        parts = [name for name in ("offload_optimizer_device", "offload_param_device") if options.get(name) in _DEVICES]
        devices = [options.pop(name) for name in parts]
        is_offloaded = "cpu" in devices and stage in ("2", "3")
        draft.groups["zero"] = f"stage{stage}{'_offload' if is_offloaded else ''}"
    if "use_fsdp" in options:  # as the Trainer's argument, which `_fsdp` reads
        fsdp = {name: options.pop(name) for name in [*options] if name.startswith(("fsdp_", "use_fsdp"))}
        config.values.setdefault("fsdp_config", fsdp)
        config.spelled["fsdp_config"] = "--use_fsdp"
    if "config_file" in options:
        draft.lost["--config_file"] = tr("accelerate's file is not read: give what it says as options instead")
    if unread := [f"--{name}" for name in options if name != "config_file"]:
        draft.lost[", ".join(unread)] = tr("of the options of accelerate launch those are not read")


_FSDP = ("fsdp", "fsdp_config", "fsdp_version", "dp_shard_size")


def _fsdp(config: ForeignConfig, draft: RecipeDraft) -> None:
    """Choose the stage of ZeRO that splits what FSDP splits: 3 for full_shard, 2 for shard_grad_op, 0 for no_shard, and
    at most 2 for QLoRA, with a note. Without FSDP, or where a DeepSpeed JSON is named, nothing is chosen.
    """
    names = [name for name in _FSDP if config.values.get(name) not in (None, "", [], False)]
    if not names or config.has("deepspeed"):
        return
    options = str(config.get("fsdp")).lower()  # such as "full_shard offload"
    settings: Any = config.get("fsdp_config")
    settings = settings if isinstance(settings, dict) else {}
    values = {str(name).lower().removeprefix("fsdp_"): str(value).lower() for name, value in settings.items()}
    # FSDP 1 names a strategy, or its number in torch: 1 full_shard, 2 shard_grad_op, 3 no_shard. FSDP 2 says whether
    # parameters are split again after the forward pass.
    strategy, reshard = values.get("sharding_strategy", options), values.get("reshard_after_forward", "true")
    keeps_parameters = reshard in ("false", "shard_grad_op")
    stage = 0 if strategy in ("3", "no_shard") else 3
    if strategy == "2" or "shard_grad_op" in strategy or "zero2" in strategy or keeps_parameters:
        stage = 2
    if draft.values.get("tuning.method", ("",))[0] == "qlora" and stage == 3:
        stage = 2  # zero=stage3 does not go with QLoRA (config/rules.yaml)
        draft.notes.append(
            tr("FSDP splits 4-bit weights too; ZeRO does up to zero=stage2 there, and each GPU has all of them.")
        )
    is_offloaded = stage > 0 and ("offload" in options or values.get("offload_params") == "true")  # FSDP 1, or 2
    draft.groups["zero"] = f"stage{stage}{'_offload' if is_offloaded else ''}"
    draft.put("zero.stage", stage, *names)


def _schedule(config: ForeignConfig, draft: RecipeDraft) -> None:
    """Set the learning-rate schedule and its warm-up. As in the Trainer, warmup_steps counts before warmup_ratio."""
    name = str(config.get("lr_scheduler_type")).lower()
    schedules = names_of("schedules")
    if name in schedules:
        draft.put("schedule.name", schedules[name], "lr_scheduler_type")
    else:
        draft.lost["lr_scheduler_type"] = joined(
            tr("there are {names}; the recipe takes cosine", names=", ".join(schedules)), did_you_mean(name, schedules)
        )
    if config.has("lr_scheduler_kwargs") or name in names_of("schedule_arguments"):
        _schedule_arguments(config, draft, name)
    steps = config.number("warmup_steps")
    ratio = config.number("warmup_ratio") if config.has("warmup_ratio") and not steps else 0.0
    key = "warmup_steps" if steps else "warmup_ratio"
    schedule = draft.values.get("schedule.name", ("cosine",))[0]
    # DeepSpeed has these here, whose warm-up differs a little from the Trainer's.
    if schedule == "linear" or (schedule in ("cosine", "constant") and (steps or ratio)):
        config.remark(key, "warmup_start")
    if (steps or ratio) and name == "constant":
        draft.lost[key] = tr("lr_scheduler_type = constant does not read it; constant_with_warmup does")
    elif steps >= 1:
        draft.put("schedule.warmup_steps", int(steps), key)
    elif steps or ratio:  # warmup_steps below 1 is a fraction, too
        draft.put("schedule.warmup_ratio", steps or ratio, key)
    if name == "constant" or not (steps or ratio):  # without a warm-up nothing reads it
        draft.values.pop("schedule.warmup_min_ratio", None)


def _schedule_arguments(config: ForeignConfig, draft: RecipeDraft, name: str) -> None:
    """Set what `lr_scheduler_kwargs` says of the schedule `name`; ConfigError if a required argument is missing."""
    location = f"{config.location('lr_scheduler_kwargs')}: lr_scheduler_kwargs"
    values: Any = config.get("lr_scheduler_kwargs") or {}
    if isinstance(values, str):
        try:
            values = parsed_json(values)
        except ValueError as error:
            raise ConfigError("{place} is no JSON object: {reason}", place=location, reason=error) from error
    values = values if isinstance(values, dict) else {}

    def put(ours: str, theirs: str, kind: type, default: Any = None, divide_by: float = 1.0) -> None:
        """Set schedule.`ours` to the argument `theirs`, or its default, divided by `divide_by`: ours are ratios to the
        peak rate, where transformers has rates.
        """
        value = typed(values.get(theirs, default), kind, f"{location}.{theirs}")
        draft.put(f"schedule.{ours}", value / divide_by if divide_by != 1 else value, "lr_scheduler_kwargs")

    peak = config.number("learning_rate")
    if name == "cosine_with_min_lr":  # where it ends: a rate, or a fraction of the peak
        if ("min_lr" in values) == ("min_lr_rate" in values):
            raise ConfigError("{place}: cosine_with_min_lr needs one of min_lr and min_lr_rate.", place=location)
        if "min_lr" in values:
            put("min_lr_ratio", "min_lr", float, divide_by=peak)
        else:
            put("min_lr_ratio", "min_lr_rate", float)
    elif name == "polynomial":
        put("min_lr_ratio", "lr_end", float, _LR_END, divide_by=peak)
        put("power", "power", float, 1.0)
    elif name == "inverse_sqrt":
        if values.get("timescale"):
            put("timescale", "timescale", int)
    elif name == "warmup_stable_decay":
        if "num_decay_steps" not in values:
            raise ConfigError("{place}: warmup_stable_decay needs num_decay_steps.", place=location)
        put("decay_steps", "num_decay_steps", int)
        put("min_lr_ratio", "min_lr_ratio", float, 0.0)
        put("warmup_min_ratio", "min_lr_ratio", float, 0.0)  # its warm-up begins at the rate where its decay ends
        _decay_shape(values, draft)
    read = names_of("schedule_arguments").get(name, [])
    unread = [key for key, value in values.items() if key not in read and (key, value) != ("num_cycles", 0.5)]
    if unread:  # num_cycles = 0.5 is the default
        draft.lost["lr_scheduler_kwargs"] = tr("{keys} has no counterpart", keys=", ".join(unread))


def _decay_shape(values: dict[str, Any], draft: RecipeDraft) -> None:
    """Set the decay of warmup_stable_decay, by its arguments `values`; note as lost what has no counterpart."""
    decay, warmup = str(values.get("decay_type", "cosine")), str(values.get("warmup_type", "linear"))
    decays = names_of("decays")
    is_half_wave = values.get("num_cycles", 0.5) == 0.5  # of the cosine: falls once and does not rise again
    if decay in decays and warmup == "linear" and is_half_wave:
        draft.put("schedule.decay_type", decays[decay], "lr_scheduler_kwargs")
    else:
        draft.lost["lr_scheduler_kwargs"] = tr("a linear warm-up, and a decay that is linear, cosine or 1-sqrt")


def _model(config: ForeignConfig, draft: RecipeDraft) -> None:
    """Set the model and its revision: a group for the published ChatGLM models, model.path for all others. A group
    already names the published files, so that model.path is set besides it only for a copy or another revision.
    """
    path = config.get("model_name_or_path")
    if not path:
        return
    text = str(path).rstrip("/")
    owner, _, name = text.lower().rpartition("/")
    group = names_of("models").get(name)
    if group:
        draft.groups["model"] = group
    revision = config.get("model_revision") if config.has("model_revision") else "main"
    is_published = group and owner in OWNERS and not os.path.isdir(text)
    if not is_published or revision != "main":
        draft.put("model.path", text, "model_name_or_path")
    if revision != "main" and files.is_hub_name(text):
        draft.put("model.revision", str(revision), "model_revision")
    elif revision != "main":
        draft.lost["model_revision"] = tr("model.path is a directory")


_TRL_PREFERENCE_KEYS = ("loss_type", "beta", "label_smoothing", "rpo_alpha", "cpo_alpha", "simpo_gamma")
_TRL_KTO = ("desirable_weight", "undesirable_weight")

_TRL_LOSSES = ("sigmoid", "robust", "hinge", "ipo", "simpo", "cpo", "orpo", "kto")
_TRL_RATES = {"sft": 2e-5, "reward": 1e-4, **dict.fromkeys(_TRL_LOSSES, 1e-6)}
"""Learning rates of TRL 1.16's configs by what is trained; its other defaults are the same in all."""


def _trl_loss(config: ForeignConfig) -> str:
    """Return what a config of TRL trains: a loss of `_TRL_LOSSES`, "reward", or "" if it is no DPO, CPO, KTO or
    RewardConfig. A config does not name its class: the script says which it is, or keys that only one class has.
    ConfigError for a loss without counterpart.
    """
    has_preference_keys = any(map(config.has, (*_TRL_PREFERENCE_KEYS, *_TRL_KTO)))
    script = names_of("trl").get(config.script, "")  # what it trains, "" for sft and unknown scripts
    if config.program != HF_NAME or not (has_preference_keys or script):
        return ""
    if script in ("reward", "orpo"):
        return script
    losses = config.names("loss_type") or ["sigmoid"]  # DPO's loss, and the default
    kind = losses[0]
    is_cpo = config.has("cpo_alpha") or config.has("simpo_gamma") or script == "cpo"
    if script == "kto" or any(map(config.has, _TRL_KTO)):
        kind = "kto"
    elif is_cpo and kind == "sigmoid":  # CPO's own default
        kind = "cpo"
    is_other_cpo = is_cpo and kind not in ("cpo", "simpo")  # such as hinge, which CPO computes without a reference
    if kind not in _TRL_LOSSES or is_other_cpo or len(losses) > 1:
        raise config.without_counterpart("loss_type", _TRL_LOSSES)
    return kind


def _peft(config: ForeignConfig, draft: RecipeDraft) -> None:
    """Set LoRA as TRL's ModelConfig says, which counts only with use_peft."""
    if not config.flag("use_peft"):
        return
    kind = "qlora" if config.flag("load_in_4bit") else "lora"
    draft.put("tuning.method", kind, "use_peft", *(["load_in_4bit"] if kind == "qlora" else []))
    lora_settings(config, draft, rank="lora_r", targets="lora_target_modules", saved="lora_modules_to_save")
    if not config.has("lora_target_modules"):  # which layers PEFT would take depends on the model, which is not read
        draft.notes.append(f"lora_target_modules: {sentence('lora_target_modules')}")


def _named_data(config: ForeignConfig, draft: RecipeDraft, trl: str) -> None:
    """Set the data and their validation: of a mixture, of a dataset on Hugging Face, or of files, whichever of these is
    named, in this order. `trl`: as returned by `_trl_loss`.
    """
    is_evaluated = str(config.get("eval_strategy")).lower() != "no"
    if trl:
        rows = {"format": {"kto": "labeled", "reward": "reward"}.get(trl, "preference")}
    else:
        rows = _set_text_options(config, draft)
    if any(map(config.has, _MIXTURES)):
        has_validation = _mixed_data(config, draft, rows, is_evaluated)
    elif config.has("dataset_name"):
        has_validation = bool(trl) and is_evaluated  # TRL's scripts evaluate on the test split if they evaluate at all
        _named_dataset(config, draft, rows, has_validation)
    else:
        has_validation = config.has("validation_file")
        for ours, theirs in {"data.sources": "train_file", "data.validation": "validation_file"}.items():
            if config.has(theirs):
                draft.put(ours, [{"path": str(config.get(theirs)), **rows}], theirs)
        if not config.has("train_file"):
            draft.gaps.append(tr("Training data are not named there: write data.sources (docs/data.md)."))
    set_evaluation(config, draft, has_validation)
    is_held_out = bool({"data.validation_rows", "data.validation_fraction"} & draft.values.keys())
    if not has_validation and not is_held_out:
        draft.put("data.validation_fraction", 0.0)


def _mixed_data(config: ForeignConfig, draft: RecipeDraft, rows: dict[str, Any], is_evaluated: bool) -> bool:
    """Set the data of a mixture; return whether the model is evaluated on some. `rows`: the format of all rows."""
    mixtures = [name for name in _MIXTURES if config.has(name)]
    sources, validation, held_out = _mixture(config)
    has_validation = is_evaluated and bool(validation or held_out)
    draft.put("data.sources", [source | rows for source in sources], *mixtures, "dataset_splits", "dataset_configs")
    if held_out:
        set_held_out(draft, held_out, *mixtures)
    elif has_validation:
        draft.put("data.validation", [source | rows for source in validation], *mixtures, "dataset_splits")
    return has_validation


def _named_dataset(config: ForeignConfig, draft: RecipeDraft, rows: dict[str, Any], has_validation: bool) -> None:
    """Set the split of `dataset_name` for training, with `has_validation` also for tests. `rows`: their format."""
    name, subset = str(config.get("dataset_name")), config.get("dataset_config") or config.get("dataset_config_name")
    source = {"hub" if files.is_dataset_name(name) else "path": name}
    source |= ({"subset": str(subset)} if subset else {}) | rows
    splits = {"data.sources": "dataset_train_split"}
    splits |= {"data.validation": "dataset_test_split"} if has_validation else {}
    for ours, theirs in splits.items():
        split = {"split": str(config.get(theirs))} if config.get(theirs) != "train" else {}
        draft.put(ours, [source | split], "dataset_name", "dataset_config", "dataset_config_name", theirs)


_MIXTURES = ("dataset_mixture", "dataset_mixer")


def _mixture(config: ForeignConfig) -> tuple[list[dict[str, Any]], list[dict[str, Any]], float]:
    """Return the sources of training and of validation that a mixture names, and what it holds out of the former for
    validation: a fraction or a number of rows, or 0.

    open-r1's `dataset_mixture` is {"datasets": [{"id", "config", "split", "weight"}, …], "test_split_size": …}.
    alignment-handbook's `dataset_mixer` is {NAME: FRACTION}, besides `dataset_configs`, a subset for each name in the
    same order, and `dataset_splits`, of which those with "test" in their names are for validation.
    """
    mixture, mixer = config.get("dataset_mixture"), config.get("dataset_mixer")
    entries: list[dict[str, Any]] = []
    tests: list[dict[str, Any]] = []
    held_out = 0.0
    if isinstance(mixture, dict):
        entries = mixture.get("datasets") or []
        location = f"{config.location('dataset_mixture')}: test_split_size"
        held_out = typed(mixture.get("test_split_size") or 0, float, location)
    elif isinstance(mixer, dict):
        subsets = config.names("dataset_configs")
        for number, (name, weight) in enumerate(mixer.items()):
            entry = {"id": name, "config": subsets[number] if number < len(subsets) else None}
            for split in config.names("dataset_splits") or ["train", "test"]:
                if "test" in split:
                    tests.append({**entry, "split": split})
                else:
                    entries.append({**entry, "split": split, "weight": weight})
    return [*map(_source_of_mixture, entries)], [*map(_source_of_mixture, tests)], held_out


def _source_of_mixture(entry: dict[str, Any]) -> dict[str, Any]:
    """Return an item of `data.sources` for one of a mixture's datasets, without what is the default anyway."""
    names = {"hub": "id", "subset": "config", "split": "split", "weight": "weight"}
    return {ours: entry[theirs] for ours, theirs in names.items() if entry.get(theirs) not in (None, "train", 1)}


def _set_text_options(config: ForeignConfig, draft: RecipeDraft) -> dict[str, Any]:
    """Set length, packing and loss mask of transformers' run_clm or TRL's sft; return the format of their rows and its
    columns, as items of `data.sources` have them: {} where the config does not say, and the rows themselves show it.
    """
    if config.script == "run_clm" or config.has("block_size"):  # a key of run_clm alone
        draft.put("data.max_length", config.number("block_size", int), "block_size")
        draft.put("data.packing", "packed", "block_size")  # run_clm joins all texts and cuts them into blocks
        draft.put("data.too_long", "split", "block_size")
        return {"format": "text"}
    if config.flag("packing"):
        draft.put("data.packing", "packed", "packing")
    if config.flag("assistant_only_loss"):
        draft.put("data.train_on", "all", "assistant_only_loss")
    elif config.script == "sft":
        draft.notes.append(f"assistant_only_loss: {sentence('train_on_prompt')}")
    if not config.has("dataset_text_field"):
        return {}
    return named_format("text", {"text": config.get("dataset_text_field")})


def _trl_settings(config: ForeignConfig, draft: RecipeDraft, trl: str) -> None:
    """Set what TRL's preference and reward configs mean; `trl`: as returned by `_trl_loss`. A note says so where only
    the name of the file's directory tells whose config it is.
    """
    names_script = config.script in names_of("trl")
    is_command = config.shown.endswith((".sh", ".bash"))  # which names the script itself
    is_reward = config.has("center_rewards_coefficient")  # a key that RewardConfig alone has
    if names_script and not is_command and not is_reward:
        draft.notes.append(
            tr(
                "{file}: read as a config of TRL's {script}, as its directory is called.",
                file=config.shown,
                script=config.script,
            )
        )
    if trl and names_script:
        for name in ("loss_type", "beta"):
            config.remark(name, "")  # their sentence says that the config's class was guessed
    if trl == "reward":
        set_reward(config, draft)
    if trl in ("", "reward"):
        return
    terms = {"cpo_alpha": config.number("cpo_alpha")} if trl in ("cpo", "simpo") else {}
    if config.get("rpo_alpha") is not None and trl != "kto":
        terms = {"rpo_alpha": config.number("rpo_alpha")}
    set_preference(config, draft, trl, {"beta": "beta", "loss": "loss_type", "smoothing": "label_smoothing"}, terms)


def set_reward(config: ForeignConfig, draft: RecipeDraft, *sources: str) -> None:
    """Choose the reward task, with the coefficient of TRL's RewardConfig; `sources`: keys that choose it."""
    draft.groups["task"] = "reward"
    draft.put("task.kind", "reward", *sources)
    if config.has("center_rewards_coefficient"):
        draft.put("task.center", config.number("center_rewards_coefficient"), "center_rewards_coefficient")


def set_preference(
    config: ForeignConfig, draft: RecipeDraft, loss: str, keys: dict[str, str], terms: dict[str, float]
) -> None:
    """Set a preference loss, one of `preference.loss`. `keys`: the program's names of beta, loss and smoothing;
    `terms`: its key -> weight of the cross entropy of chosen answers that is added to the loss, none for {}.
    """
    draft.groups["preference"] = "dpo" if loss == "sigmoid" else loss  # which sets sigmoid
    draft.put("preference.loss", loss, keys["loss"])
    draft.put("preference.beta", config.number(keys["beta"]), keys["beta"])
    if loss in ("sigmoid", "robust", "simpo", "cpo"):
        draft.put("preference.label_smoothing", config.number(keys["smoothing"]), keys["smoothing"])
    if loss == "simpo":
        draft.put("preference.gamma", config.number("simpo_gamma"), "simpo_gamma")
    if loss == "kto" and "desirable_weight" in config.keys:  # TRL's names; LLaMA-Factory's are set in its module
        for key in _TRL_KTO:
            draft.put(f"preference.{key}", config.number(key), key)
    elif loss != "kto":
        own_term = 1.0 if loss == "orpo" else 0.0  # ORPO's loss has a cross entropy of its own
        draft.put("preference.sft_weight", float(sum(terms.values()) + own_term), *terms)


def set_evaluation(config: ForeignConfig, draft: RecipeDraft, has_validation: bool) -> None:
    """Set how often the model is evaluated and whether the best is kept; without validation data note what is lost.
    Both names of the strategy are read: transformers has renamed it.
    """
    name = "evaluation_strategy" if config.has("evaluation_strategy") else "eval_strategy"
    strategy = str(config.get(name)).lower()
    if not has_validation:
        for key in ("eval_strategy", "evaluation_strategy", "eval_steps", "eval_on_start", "load_best_model_at_end"):
            if config.has(key) and config.get(key) not in (config.keys[key].default, False, "no"):
                draft.lost[key] = tr("no validation data are named: data.validation and evaluate.* say both")
        return
    steps = "eval_steps" if config.has("eval_steps") else "logging_steps"  # as the Trainer does
    if strategy == "steps" and (every := _whole_steps(config, draft, steps)):
        draft.put("evaluate.every", every, name, steps)
    elif strategy == "epoch" and config.has(name):
        draft.lost[name] = tr("{key} counts steps; it stays 0, which evaluates at the end", key="evaluate.every")
    if not config.flag("eval_on_start"):
        draft.put("evaluate.at_start", False, "eval_on_start")
    # Without a limit all checkpoints are kept, the best among them.
    if config.flag("load_best_model_at_end") and config.get("save_total_limit"):
        metric = str(config.get("metric_for_best_model") or "loss").removeprefix("eval_")
        if metric == "loss":
            draft.put("evaluate.keep_best", "eval_loss", "load_best_model_at_end")
        else:
            draft.lost["metric_for_best_model"] = tr("evaluate.keep_best takes eval_loss and evaluate.metrics")


def _batch_and_length(config: ForeignConfig, draft: RecipeDraft) -> None:
    """Set batch sizes, and the number of steps or epochs; an unknown number of ranks is taken as one, with a note.
    ConfigError for a number of epochs that trains nothing.
    """
    rows = config.number("per_device_train_batch_size", int)
    accumulation = config.number("gradient_accumulation_steps", int)
    draft.put("batch.micro_per_gpu", rows, "per_device_train_batch_size")
    global_size = rows * accumulation * (config.world_size or 1)
    if config.world_size is None:
        config.world_size = 1
        draft.gaps.append(
            tr("world_size=1 is assumed: batch.global_size = {size}. For N GPUs add world_size=N.", size=global_size)
        )
    draft.put("batch.global_size", global_size, "per_device_train_batch_size", "gradient_accumulation_steps")
    steps = config.number("max_steps", int)
    if steps > 0:
        draft.put("train.max_steps", steps, "max_steps")
        return
    epochs = config.number("num_train_epochs")
    if not 0 < epochs < math.inf:
        raise ConfigError(
            "{place}: num_train_epochs = {value} trains nothing.",
            place=config.location("num_train_epochs"),
            value=epochs,
        )
    draft.put("train.epochs", int(epochs) if epochs.is_integer() else epochs, "num_train_epochs")


def _optimizer(config: ForeignConfig, draft: RecipeDraft) -> None:
    """Set the optimizer, its parameters, weight decay and clipping. Settings that our optimizer does not read
    (`rule_tables.OPTIMIZERS`) are left out: a recipe with them is rejected.
    """
    name, key = str(config.get("optim")).lower(), "optim"
    if "use_muon" in config.keys and config.flag("use_muon"):  # LLaMA-Factory has a switch of its own for Muon
        name = key = "use_muon"
    if name == "adamw_torch_8bit":
        config.remark("optim", "eight_bits")
    bare_name = name.removeprefix("use_")
    our_name = next((ours for ours, theirs in names_of("optimizers").items() if bare_name in theirs), "")
    kind = schema.OptimizerName(our_name or "adamw")
    if not our_name:
        draft.lost["optim"] = tr(
            "there are {names}; the recipe takes AdamW instead of {name}",
            names=", ".join(optimizer.value for optimizer in schema.OptimizerName),
            name=name,
        )
    if kind is not schema.OptimizerName.adamw:
        draft.put("optim.name", kind.value, key)
    if kind is schema.OptimizerName.muon:  # for matrices; AdamW, with a rate of its own, for all other parameters
        draft.put("optim.momentum", 0.95, key)
        draft.put("optim.adam_lr", config.number("learning_rate"), "learning_rate")
        draft.put("train.gradient_clipping", 0.0)
        if config.number("max_grad_norm"):
            draft.lost["max_grad_norm"] = tr("optim.name = muon needs train.gradient_clipping = 0")
        if key == "optim":
            draft.notes.append(f"optim = muon: {sentence('muon')}")
    if config.number("weight_decay"):
        draft.put("optim.decay", "matrices", "weight_decay")  # the Trainer leaves biases and norms out
    if kind is schema.OptimizerName.adagrad:
        draft.put("optim.eps", 1e-10)  # PyTorch's default: the Trainer does not hand adam_epsilon to Adagrad
    elif "eps" not in rule_tables.OPTIMIZERS[kind].reads:
        draft.values.pop("optim.eps", None)
    if kind is schema.OptimizerName.adafactor:
        draft.notes.append(
            tr(
                "optim = adafactor: PyTorch's, whose step is a share of each parameter's own size, "
                "which the Trainer's is not. Choose optim.lr again; 1e-3 to 1e-2 is usual."
            )
        )
    if "betas" in rule_tables.OPTIMIZERS[kind].reads:
        draft.put("optim.betas", [config.number("adam_beta1"), config.number("adam_beta2")], "adam_beta1", "adam_beta2")


_DTYPES = {"bfloat16": "bf16", "float16": "fp16"}


def _compute(config: ForeignConfig, draft: RecipeDraft) -> None:
    """Set precision, activation checkpointing, compilation, attention and kernels."""
    _precision(config, draft)
    recompute = [name for name in ("activation_checkpointing", "gradient_checkpointing") if config.flag(name)]
    if recompute:
        draft.put("train.activation_checkpointing.enabled", True, recompute[0])
    compile_options = [name for name in ("backend", "mode") if config.has(f"torch_compile_{name}")]
    if config.flag("torch_compile") or compile_options:  # an option turns it on, too
        sources = ["torch_compile"] if config.has("torch_compile") else [f"torch_compile_{compile_options[0]}"]
        draft.put("compile.enabled", True, *sources)
        for name in compile_options:
            draft.put(f"compile.{name}", str(config.get(f"torch_compile_{name}")), f"torch_compile_{name}")
    name = "flash_attn" if "flash_attn" in config.keys else "attn_implementation"
    if attention := names_of("attention").get(str(config.values.get(name)).lower()):
        draft.put("model.attention", attention, name)
    if config.flag("use_liger_kernel"):
        draft.put("kernels.liger", "always", "use_liger_kernel")


def _precision(config: ForeignConfig, draft: RecipeDraft) -> None:
    """Set the precision, fp8 and TF32; ConfigError if fp16 and bf16 are both true. fp8 computes in bf16 besides.

    In configs of the Trainer and TRL, `dtype` is what weights are loaded in; without fp16 and bf16 also trained in.
    """
    fp16, bf16 = config.flag("fp16"), config.flag("bf16")
    if fp16 and bf16:
        raise ConfigError("{place}: fp16 and bf16 are both true. Keep one of them.", place=config.location("bf16"))
    fp8 = "fp8" in config.keys and config.flag("fp8")
    dtype = "fp16" if fp16 else "bf16" if bf16 or fp8 else "fp32"
    sources = ["fp16", "bf16"] if dtype == "fp32" else [dtype]
    for name in ("dtype", "torch_dtype") if config.program == HF_NAME else ():
        loaded_in = _DTYPES.get(str(config.get(name)), "") if config.has(name) else ""
        if not loaded_in:  # unset, float32 or auto: fp16 and bf16 say it all
            config.remark(name, "")
        elif dtype in (loaded_in, "fp32"):
            dtype = loaded_in
            sources.append(name)
    draft.put("precision.dtype", dtype, *sources)
    if fp8 and fp16:
        draft.lost["fp8"] = tr("precision.fp8 needs bf16")
    elif fp8:
        draft.put("precision.fp8", "rowwise" if config.program == FACTORY_NAME else "tensorwise", "fp8")
    if dtype == "fp32" and config.flag("tf32"):
        draft.put("precision.tf32", True, "tf32")


def _whole_steps(config: ForeignConfig, draft: RecipeDraft, name: str) -> int:
    """Return a key's number of steps; 0, noted as lost, if it is a fraction of all steps."""
    steps = config.number(name)
    if 0 < steps < 1:
        draft.lost[name] = tr("steps only; a fraction of all steps has no counterpart")
        return 0
    return max(0, int(steps))


def _logging(config: ForeignConfig, draft: RecipeDraft) -> None:
    """Set logging, saving, how many checkpoints are kept, and trackers."""
    if config.has("logging_steps") and (steps := _whole_steps(config, draft, "logging_steps")):
        draft.put("train.log_every", steps, "logging_steps")
    strategy = str(config.get("save_strategy")).lower()
    draft.put("checkpoint.minutes", 0.0, "save_strategy")  # the Trainer saves by steps or epochs, never by time
    if strategy == "steps" and (steps := _whole_steps(config, draft, "save_steps")):
        draft.put("checkpoint.every", steps, "save_steps")
    elif strategy not in ("steps", "no") and config.has("save_strategy"):
        draft.lost["save_strategy"] = tr("checkpoint.every counts steps; the recipe saves at the end only")
    keep = config.number("save_total_limit", int) if config.has("save_total_limit") else 0
    draft.put("checkpoint.keep", max(0, keep), "save_total_limit")
    trackers = [name.lower() for name in config.names("report_to") if name.lower() not in ("", "none")]
    for name in trackers:
        if name in schema.TRACKERS:
            draft.put(f"track.{name}.enabled", True, "report_to")
    tracker_names = ", ".join(schema.TRACKERS)
    if "all" in trackers:
        draft.lost["report_to"] = tr(
            "all is whatever is installed there, which the file does not say; name them: track=[…] of {known}",
            known=tracker_names,
        )
    elif unknown := [name for name in trackers if name not in schema.TRACKERS]:
        draft.lost["report_to"] = tr("{names}: there are {known}", names=", ".join(unknown), known=tracker_names)
    if "trackio" in trackers:
        set_trackio(config, draft)


def set_trackio(config: ForeignConfig, draft: RecipeDraft) -> None:
    """Set the project of Trackio, and the Space on Hugging Face that shows it, if one is named."""
    draft.put("track.trackio.project", str(config.get("project")), "project")
    if config.has("trackio_space_id"):
        draft.put("track.trackio.space", str(config.get("trackio_space_id")), "trackio_space_id")


def limit_rows(name: str, rows: int, draft: RecipeDraft) -> dict[str, int]:
    """Return {"max_samples": rows} for a dataset from which so many rows are drawn, with a note; {} for 0, all rows."""
    if rows:
        draft.notes.append(
            tr(
                "the dataset {name}: its first {rows} rows are used; there they are drawn at random.",
                name=name,
                rows=rows,
            )
        )
    return {"max_samples": rows} if rows else {}


def named_format(row_format: str, columns: dict[str, Any]) -> dict[str, Any]:
    """Return {"format": row_format}, with "columns" if there are any (our name -> the file's) whose names differ."""
    renamed = {ours: str(theirs) for ours, theirs in columns.items() if theirs and theirs != ours}
    return {"format": row_format} | ({"columns": renamed} if renamed else {})


def set_chat_template(config: ForeignConfig, draft: RecipeDraft, key: str, table: str) -> None:
    """Set the chat template that a config names in `key`, or note which of ours suits a model without one. `table`: in
    program_keys.yaml, of the program's templates that have an equal one here, which replaces the tokenizer's.
    """
    name = str(config.get(key) or "")
    if ours := names_of(table).get(name):
        draft.put("model.chat_template", ours, key)
    elif name:
        ours = names_of("similar_templates").get(name.removeprefix("tokenizer_default_fallback_"))
        draft.notes.append(
            tr(
                "{key} = {name}: the model's own chat template is used; if it has none, set "
                "model.chat_template={ours}.",
                key=key,
                name=name,
                ours=ours or "FILE",
            )
        )


def set_added_tokens(config: ForeignConfig, draft: RecipeDraft, *keys: str) -> None:
    """Set the tokens that a config adds to the vocabulary, in some `keys`: lists, or texts with commas. A token that is
    named twice is added once, at its first place.
    """
    tokens: dict[str, None] = {}
    for value in filter(None, map(config.get, keys)):
        listed = value.split(",") if type(value) is str else value
        tokens |= dict.fromkeys(str(token).strip() for token in listed)
    if tokens:
        draft.put("model.add_tokens", [*tokens], *keys)


def lora_settings(config: ForeignConfig, draft: RecipeDraft, rank: str, targets: str = "", saved: str = "") -> None:
    """Set the shape of a new LoRA adapter; `rank`, `targets`, `saved`: the program's keys for rank, target ("" for all
    linear layers) and fully trained modules ("" for none).
    """
    size = config.number(rank, int)
    draft.put("tuning.rank", size, rank)
    alpha = config.number("lora_alpha") if config.get("lora_alpha") else 2.0 * size  # as LLaMA-Factory
    draft.put("tuning.alpha", alpha, "lora_alpha")
    draft.put("tuning.dropout", config.number("lora_dropout"), "lora_dropout")
    for theirs, ours in (("use_rslora", "rslora"), ("use_dora", "dora")):
        if theirs in config.keys and config.flag(theirs):
            draft.put(f"tuning.{ours}", True, theirs)
    _lora_start(config, draft)
    names = config.names(targets) if targets else ["all"]
    group = draft.groups.get("model", "")  # of ChatGLM models alone
    is_chatglm2_or_later = group not in ("", "chatglm_6b") or config.program == GLM_DEMO_NAME
    if names == ["all"]:
        names = ["all-linear"]
    elif is_chatglm2_or_later:
        # Named as in the official code: query_key_value -> q_proj, k_proj, v_proj, which are layers of their own here.
        names = [name for target in names for name in names_of("layers").get(target, [target])]
    draft.put("tuning.target_modules", names, targets)
    if config.has(saved):
        draft.put("tuning.save_modules", config.names(saved), saved)


def _lora_start(config: ForeignConfig, draft: RecipeDraft) -> None:
    """Set LoRA's initial values, PiSSA and others, and the rates of LoRA+. LLaMA-Factory has the switch `pissa_init`
    and the number `pissa_iter`; others name the values as peft does, `pissa` or `pissa_niter_16` (16 iterations).
    """
    for name in filter(config.has, config.keys):
        if name in ("loraplus_lr_ratio", "lorap_lr_ratio"):
            draft.put("optim.lora_plus_ratio", config.number(name), name)
        elif name == "pissa_init" and config.flag(name):
            draft.put("tuning.init", "pissa", name)
            draft.put("tuning.init_iterations", max(0, config.number("pissa_iter", int)), "pissa_iter")
        elif name in ("init_weights", "peft_init_lora_weights"):
            kind, _, iterations = str(config.get(name)).lower().partition("_niter_")
            if kind in ("gaussian", "pissa", "olora"):
                draft.put("tuning.init", kind, name)
                if iterations.isdecimal():
                    draft.put("tuning.init_iterations", int(iterations), name)
            elif kind != "true":
                draft.lost[name] = tr("tuning.init knows default, gaussian, pissa and olora; pissa is the nearest")


def set_held_out(draft: RecipeDraft, size: float, *sources: str) -> None:
    """Set what is split off the training rows: a fraction, or from 1 on a number of rows. `sources`: their keys."""
    if size >= 1:
        draft.put("data.validation_rows", int(size), *sources)
    else:
        draft.put("data.validation_fraction", size, *sources)
