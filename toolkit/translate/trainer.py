"""The Trainer's arguments: batch, schedule, precision, saving; the same for every program that is built on it."""

import math
from pathlib import Path

from toolkit.config.hub import is_hub_name
from toolkit.config.optimizers import OPTIMIZERS
from toolkit.config.schema import TRACKERS, OptimizerName
from toolkit.errors import ConfigError
from toolkit.messages import tr
from toolkit.translate.given import Draft, Given
from toolkit.translate.schedules import translate_schedule

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


def translate_trainer(given: Given, draft: Draft) -> None:
    """Compute what the Trainer's arguments say together.

    Raises:
        ConfigError: a value that cannot be, or the number of ranks is missing.
    """
    _batch(given, draft)
    _length(given, draft)
    translate_schedule(given, draft)
    _optimizer(given, draft)
    _precision(given, draft)
    _compute(given, draft)
    _logging(given, draft)


def translate_model(given: Given, draft: Draft) -> None:
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


def translate_evaluation(given: Given, draft: Draft, has_validation: bool) -> None:
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
        draft.put("evaluate.at_start", False, *(["eval_on_start"] if given.has("eval_on_start") else []))
    if given.flag("load_best_model_at_end"):
        metric = str(given.get("metric_for_best_model") or "loss").removeprefix("eval_")
        if not given.get("save_total_limit"):
            return  # all checkpoints are kept, the best among them
        if metric == "loss":
            draft.put("evaluate.keep_best", "eval_loss", "load_best_model_at_end")
        else:
            draft.lost["metric_for_best_model"] = tr("evaluate.keep_best takes eval_loss and evaluate.metrics")


def _batch(given: Given, draft: Draft) -> None:
    if given.world_size is None:
        raise ConfigError(
            tr(
                "{place}: per_device_train_batch_size = {rows} are the rows of one rank, and it is not said of how "
                "many. Add world_size=N: the number of GPUs that this config is started on.",
                place=given.place("per_device_train_batch_size"),
                rows=given.get("per_device_train_batch_size"),
            )
        )
    rows = given.number("per_device_train_batch_size", int)
    times = given.number("gradient_accumulation_steps", int)
    stated = [name for name in ("per_device_train_batch_size", "gradient_accumulation_steps") if given.has(name)]
    draft.put("batch.micro_per_gpu", rows, *[name for name in stated if name.startswith("per_device")])
    draft.put("batch.global_size", rows * times * given.world_size, *stated)


def _length(given: Given, draft: Draft) -> None:
    steps = given.number("max_steps", int)
    if steps > 0:
        draft.put("train.max_steps", steps, "max_steps")
        return
    epochs = given.number("num_train_epochs")
    if not 0 < epochs < math.inf:
        raise ConfigError(
            tr(
                "{place}: num_train_epochs = {value} trains nothing.",
                place=given.place("num_train_epochs"),
                value=epochs,
            )
        )
    if epochs != int(epochs):
        draft.lost["num_train_epochs"] = tr("whole epochs only; the recipe has {epochs}", epochs=math.ceil(epochs))
    draft.put("train.epochs", math.ceil(epochs), *(["num_train_epochs"] if given.has("num_train_epochs") else []))


def _optimizer(given: Given, draft: Draft) -> None:
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
    stated = [name for name in ("adam_beta1", "adam_beta2") if given.has(name)]
    draft.put("optim.betas", [given.number("adam_beta1"), given.number("adam_beta2")], *stated)


def _precision(given: Given, draft: Draft) -> None:
    fp16, bf16 = given.flag("fp16"), given.flag("bf16")
    if fp16 and bf16:
        raise ConfigError(tr("{place}: fp16 and bf16 are both true. Keep one of them.", place=given.place("bf16")))
    if fp16 or bf16:
        draft.put("precision.dtype", "fp16" if fp16 else "bf16", "fp16" if fp16 else "bf16")
    else:
        draft.put("precision.dtype", "fp32", *[name for name in ("fp16", "bf16") if given.has(name)])


def _compute(given: Given, draft: Draft) -> None:
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


def _whole_steps(given: Given, draft: Draft, name: str) -> int:
    """Return a number of steps; 0 where it is a fraction of all steps, which has no counterpart."""
    steps = given.number(name)
    if 0 < steps < 1:
        draft.lost[name] = tr("steps only; a fraction of all steps has no counterpart")
        return 0
    return max(0, int(steps))


def _logging(given: Given, draft: Draft) -> None:
    if given.has("logging_steps") and (steps := _whole_steps(given, draft, "logging_steps")):
        draft.put("train.log_every", steps, "logging_steps")
    strategy = str(given.get("save_strategy")).lower()
    if strategy == "steps" and (steps := _whole_steps(given, draft, "save_steps")):
        draft.put("checkpoint.every", steps, *(["save_steps"] if given.has("save_steps") else []))
    elif strategy not in ("steps", "no"):
        draft.lost["save_strategy"] = tr("checkpoint.every counts steps; the recipe saves at the end only")
    limit = given.get("save_total_limit")
    keep = given.number("save_total_limit", int) if limit is not None else 0
    draft.put("checkpoint.keep", max(0, keep), *(["save_total_limit"] if limit is not None else []))
    _trackers(given, draft)


def _trackers(given: Given, draft: Draft) -> None:
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
        draft.put("track.trackio.project", str(given.get("project")), *(["project"] if given.has("project") else []))
        if given.has("trackio_space_id"):
            draft.put("track.trackio.space", str(given.get("trackio_space_id")), "trackio_space_id")
