"""The Trainer's arguments: batch, schedule, precision, saving; the same for every program that is built on it."""

import json
import math
from pathlib import Path
from typing import Any

from toolkit.config.files import is_hub_name
from toolkit.config.rule_tables import OPTIMIZERS
from toolkit.config.schema import TRACKERS, OptimizerName
from toolkit.errors import ConfigError
from toolkit.messages import did_you_mean, joined, tr
from toolkit.translate.draft import ForeignConfig, RecipeDraft, typed

SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
    "cosine_with_min_lr": "cosine",
    "polynomial": "polynomial",
    "inverse_sqrt": "inverse_sqrt",
    "warmup_stable_decay": "wsd",
}
_DECAYS = {"linear": "linear", "cosine": "cosine", "1-sqrt": "sqrt"}
_LR_END = 1e-7
"""Where transformers' polynomial schedule ends (5.23, get_polynomial_decay_schedule_with_warmup)."""


ADAMW = ("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused", "adamw_torch_xla", "adamw_torch_npu_fused")
OPTIMIZERS_THERE = {
    "adafactor": "adafactor",
    "sgd": "sgd",
    "adagrad": "adagrad",
    "adamw_bnb_8bit": "adamw_8bit",
    "adamw_8bit": "adamw_8bit",
    "paged_adamw_8bit": "adamw_8bit",
    "lion_32bit": "lion",
    "paged_lion_32bit": "lion",
    "lion_8bit": "lion",
    "paged_lion_8bit": "lion",
}
"""The Trainer's name -> ours; paged ones differ in where states lie, and Lion has its state in float32 here."""
MODELS = {
    "chatglm-6b": "chatglm_6b",
    "chatglm2-6b": "chatglm2_6b",
    "chatglm3-6b": "chatglm3_6b",
    "glm-4-9b-chat": "glm4_9b",
}
"""Last part of a model's path or name -> the group model."""
OWNERS = ("thudm", "zai-org", "zhipuai")


def translate_trainer(given: ForeignConfig, draft: RecipeDraft) -> None:
    """Compute what the Trainer's arguments say together."""
    _batch(given, draft)
    _length(given, draft)
    _schedule(given, draft)
    _optimizer(given, draft)
    _compute(given, draft)
    _logging(given, draft)


def _schedule(given: ForeignConfig, draft: RecipeDraft) -> None:
    name = str(given.get("lr_scheduler_type")).lower()
    if name in SCHEDULES:
        draft.put("schedule.name", SCHEDULES[name], "lr_scheduler_type")
    else:
        draft.lost["lr_scheduler_type"] = joined(
            tr("there are {names}; the recipe takes cosine", names=", ".join(SCHEDULES)), did_you_mean(name, SCHEDULES)
        )
    if name in ("cosine_with_min_lr", "polynomial", "inverse_sqrt", "warmup_stable_decay"):
        _schedule_arguments(given, draft, name)
    steps = given.number("warmup_steps")
    ratio = given.number("warmup_ratio") if given.has("warmup_ratio") and not steps else 0.0
    key = "warmup_steps" if steps else "warmup_ratio"
    if (steps or ratio) and name == "constant":
        draft.lost[key] = tr("lr_scheduler_type = constant does not read it; constant_with_warmup does")
    elif steps >= 1:
        draft.put("schedule.warmup_steps", int(steps), key)
    elif steps or ratio:
        draft.put("schedule.warmup_ratio", steps or ratio, key)
    if name == "constant" or not (steps or ratio):
        draft.values.pop("schedule.warmup_min_ratio", None)


def _schedule_arguments(given: ForeignConfig, draft: RecipeDraft, name: str) -> None:
    """Take over lr_scheduler_kwargs."""
    place = f"{given.place('lr_scheduler_kwargs')}: lr_scheduler_kwargs"
    values: Any = given.get("lr_scheduler_kwargs") or {}
    if isinstance(values, str):
        try:
            values = json.loads(values)
        except json.JSONDecodeError as error:
            raise ConfigError("{place} is no JSON object: {reason}", place=place, reason=error.msg) from error
    values = values if isinstance(values, dict) else {}

    def put(ours: str, theirs: str, kind: type, default: Any = None, divide_by: float = 1.0) -> None:
        value = typed(values.get(theirs, default), kind, f"{place}.{theirs}")
        draft.put(f"schedule.{ours}", value / divide_by if divide_by != 1 else value, "lr_scheduler_kwargs")

    peak = given.number("learning_rate")
    if name == "cosine_with_min_lr":  # where it ends: a rate, or a fraction of the peak
        if ("min_lr" in values) == ("min_lr_rate" in values):
            raise ConfigError("{place}: cosine_with_min_lr needs one of min_lr and min_lr_rate.", place=place)
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
    else:  # warm-up, stable, decay: its warm-up begins where its decay ends
        if "num_decay_steps" not in values:
            raise ConfigError("{place}: warmup_stable_decay needs num_decay_steps.", place=place)
        put("decay_steps", "num_decay_steps", int)
        decay, warmup = str(values.get("decay_type", "cosine")), str(values.get("warmup_type", "linear"))
        if decay in _DECAYS and warmup == "linear" and values.get("num_cycles", 0.5) == 0.5:
            draft.put("schedule.decay_type", _DECAYS[decay], "lr_scheduler_kwargs")
        else:
            draft.lost["lr_scheduler_kwargs"] = tr("a linear warm-up, and a decay that is linear, cosine or 1-sqrt")
        put("min_lr_ratio", "min_lr_ratio", float, 0.0)
        put("warmup_min_ratio", "min_lr_ratio", float, 0.0)


def translate_model(given: ForeignConfig, draft: RecipeDraft) -> None:
    """A folder becomes model.path; the published ChatGLM models have groups of their own."""
    path = given.get("model_name_or_path")
    if not path:
        return
    text = str(path).rstrip("/")
    owner, _, name = text.lower().rpartition("/")
    group = MODELS.get(name)
    if group:
        draft.groups["model"] = group
    revision = given.get("model_revision") if given.has("model_revision") else "main"
    if not (group and owner in OWNERS and not Path(text).is_dir()) or revision != "main":
        draft.put("model.path", text, "model_name_or_path")
    if revision != "main" and is_hub_name(text):
        draft.put("model.revision", str(revision), "model_revision")
    elif revision != "main":
        draft.lost["model_revision"] = tr("model.path is a folder")


def translate_evaluation(given: ForeignConfig, draft: RecipeDraft, has_validation: bool) -> None:
    """How often is evaluated, and whether the best is kept; nothing of it without validation data."""
    name = "evaluation_strategy" if given.has("evaluation_strategy") else "eval_strategy"
    strategy = str(given.get(name)).lower()
    if not has_validation:
        for key in ("eval_strategy", "evaluation_strategy", "eval_steps", "eval_on_start", "load_best_model_at_end"):
            if given.has(key) and given.get(key) not in (given.keys[key].default, False, "no"):
                draft.lost[key] = tr("no validation data are named: data.validation and evaluate.* say both")
        return
    steps = "eval_steps" if given.has("eval_steps") else "logging_steps"
    if strategy == "steps" and (every := _whole_steps(given, draft, steps)):
        draft.put("evaluate.every", every, name, steps)
    elif strategy == "epoch":
        draft.lost[name] = tr("{key} counts steps; it stays 0, which evaluates at the end", key="evaluate.every")
    if not given.flag("eval_on_start"):
        draft.put("evaluate.at_start", False, "eval_on_start")
    if given.flag("load_best_model_at_end"):
        metric = str(given.get("metric_for_best_model") or "loss").removeprefix("eval_")
        if not given.get("save_total_limit"):
            return  # all checkpoints are kept, the best among them
        if metric == "loss":
            draft.put("evaluate.keep_best", "eval_loss", "load_best_model_at_end")
        else:
            draft.lost["metric_for_best_model"] = tr("evaluate.keep_best takes eval_loss and evaluate.metrics")


def _batch(given: ForeignConfig, draft: RecipeDraft) -> None:
    if given.world_size is None:
        raise ConfigError(
            "{place}: per_device_train_batch_size = {rows} are the rows of one rank, and it is not said of how "
            "many. Add world_size=N: the number of GPUs that this config is started on.",
            place=given.place("per_device_train_batch_size"),
            rows=given.get("per_device_train_batch_size"),
        )
    rows = given.number("per_device_train_batch_size", int)
    times = given.number("gradient_accumulation_steps", int)
    draft.put("batch.micro_per_gpu", rows, "per_device_train_batch_size")
    global_size = rows * times * given.world_size
    draft.put("batch.global_size", global_size, "per_device_train_batch_size", "gradient_accumulation_steps")


def _length(given: ForeignConfig, draft: RecipeDraft) -> None:
    steps = given.number("max_steps", int)
    if steps > 0:
        draft.put("train.max_steps", steps, "max_steps")
        return
    epochs = given.number("num_train_epochs")
    if not 0 < epochs < math.inf:
        raise ConfigError(
            "{place}: num_train_epochs = {value} trains nothing.", place=given.place("num_train_epochs"), value=epochs
        )
    if epochs != int(epochs):
        draft.lost["num_train_epochs"] = tr("whole epochs only; the recipe has {epochs}", epochs=math.ceil(epochs))
    draft.put("train.epochs", math.ceil(epochs), "num_train_epochs")


def _optimizer(given: ForeignConfig, draft: RecipeDraft) -> None:
    name, kind = str(given.get("optim")).lower(), OptimizerName.adamw
    if name in OPTIMIZERS_THERE:
        kind = OptimizerName(OPTIMIZERS_THERE[name])
    elif name not in ADAMW:
        draft.lost["optim"] = tr(
            "there are {names}; the recipe takes AdamW instead of {name}",
            names=", ".join(one.value for one in OptimizerName),
            name=name,
        )
    if kind is not OptimizerName.adamw:
        draft.put("optim.name", kind.value, "optim")
    if given.number("weight_decay"):
        draft.put("optim.decay", "matrices", "weight_decay")  # the Trainer leaves biases and norms out
    if kind is OptimizerName.adagrad:
        draft.put("optim.eps", 1e-10)
    elif "eps" not in OPTIMIZERS[kind].reads:
        draft.values.pop("optim.eps", None)
    if kind is OptimizerName.adafactor:
        draft.notes.append(
            tr(
                "optim = adafactor: PyTorch's, whose step is a share of each parameter's own size, which the Trainer's "
                "is not. Choose optim.lr anew; 1e-3 to 1e-2 is usual."
            )
        )
    if "betas" not in OPTIMIZERS[kind].reads:
        return
    draft.put("optim.betas", [given.number("adam_beta1"), given.number("adam_beta2")], "adam_beta1", "adam_beta2")


def _compute(given: ForeignConfig, draft: RecipeDraft) -> None:
    fp16, bf16 = given.flag("fp16"), given.flag("bf16")
    if fp16 and bf16:
        raise ConfigError("{place}: fp16 and bf16 are both true. Keep one of them.", place=given.place("bf16"))
    if fp16 or bf16:
        draft.put("precision.dtype", "fp16" if fp16 else "bf16", "fp16" if fp16 else "bf16")
    else:
        draft.put("precision.dtype", "fp32", "fp16", "bf16")
    recompute = [name for name in ("activation_checkpointing", "gradient_checkpointing") if given.flag(name)]
    if recompute:
        draft.put("train.activation_checkpointing.enabled", True, recompute[0])
    asked = [name for name in ("torch_compile", "torch_compile_backend", "torch_compile_mode") if given.has(name)]
    if given.flag("torch_compile") or {"torch_compile_backend", "torch_compile_mode"} & set(asked):
        draft.put("compile.enabled", True, asked[0])
        for name in asked[1:] if asked[0] == "torch_compile" else asked:
            draft.put(f"compile.{name.removeprefix('torch_compile_')}", str(given.get(name)), name)
    if given.flag("use_liger_kernel"):
        draft.put("kernels.liger", "always", "use_liger_kernel")


def _whole_steps(given: ForeignConfig, draft: RecipeDraft, name: str) -> int:
    """Return a number of steps; 0 where it is a fraction of all steps, which has no counterpart."""
    steps = given.number(name)
    if 0 < steps < 1:
        draft.lost[name] = tr("steps only; a fraction of all steps has no counterpart")
        return 0
    return max(0, int(steps))


def _logging(given: ForeignConfig, draft: RecipeDraft) -> None:
    if given.has("logging_steps") and (steps := _whole_steps(given, draft, "logging_steps")):
        draft.put("train.log_every", steps, "logging_steps")
    strategy = str(given.get("save_strategy")).lower()
    if strategy == "steps" and (steps := _whole_steps(given, draft, "save_steps")):
        draft.put("checkpoint.every", steps, "save_steps")
    elif strategy not in ("steps", "no"):
        draft.lost["save_strategy"] = tr("checkpoint.every counts steps; the recipe saves at the end only")
    limit = given.get("save_total_limit")
    keep = given.number("save_total_limit", int) if limit is not None else 0
    draft.put("checkpoint.keep", max(0, keep), *(["save_total_limit"] if limit is not None else []))
    _trackers(given, draft)


def _trackers(given: ForeignConfig, draft: RecipeDraft) -> None:
    asked = [name.lower() for name in given.names("report_to") if name.lower() not in ("", "none")]
    for name in asked:
        if name in TRACKERS:
            draft.put(f"track.{name}.enabled", True, "report_to")
    known = ", ".join(TRACKERS)
    if "all" in asked:
        draft.lost["report_to"] = tr(
            "all is whatever is installed there, which the file does not say; name them: track=[…] of {known}",
            known=known,
        )
    elif strangers := [name for name in asked if name not in TRACKERS]:
        draft.lost["report_to"] = tr("{names}: there are {known}", names=", ".join(strangers), known=known)
    if "trackio" in asked:
        draft.put("track.trackio.project", str(given.get("project")), "project")
        if given.has("trackio_space_id"):
            draft.put("track.trackio.space", str(given.get("trackio_space_id")), "trackio_space_id")
