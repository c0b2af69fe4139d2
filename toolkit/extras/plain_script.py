"""A recipe as a plain program of transformers' Trainer, with its DeepSpeed JSON and its tokenized data."""

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
from transformers import PreTrainedModel

from toolkit.cli.export_model import DTYPES
from toolkit.config import schema
from toolkit.data import sampler
from toolkit.data.store import TokenizedCache
from toolkit.engine.ds_config import build_ds_config, warmup_steps
from toolkit.messages import ConfigError, tr
from toolkit.models import fine_tuning
from toolkit.models.load import load_empty
from toolkit.plan.tuning_targets import tuning_of
from toolkit.tasks import language_batches
from toolkit.tasks.language_data import LanguageData
from toolkit.train.schedule import learning_rate

SCRIPT, JSON = "train.py", "ds_config.json"
_LORA_KEYS = (
    *("r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora", "target_modules", "target_parameters"),
    *("modules_to_save", "fan_in_fan_out", "init_lora_weights", "task_type"),
)
_METHODS = (schema.TuningMethod.full, schema.TuningMethod.freeze, schema.TuningMethod.lora)


def check(cfg: schema.RunConfig) -> None:
    """Raise ConfigError for a recipe that a plain program of the Trainer cannot train."""
    parallel, reason = cfg.parallel, ""
    if not cfg.task.is_language or cfg.preference.loss is not schema.PreferenceLoss.none:
        reason = tr("it trains a language model on texts and conversations alone (task=language, preference=none)")
    elif cfg.tuning.method not in _METHODS or cfg.tuning.adapter:
        reason = tr("possible are tuning=full, freeze and lora, without tuning.adapter")
    elif max(parallel.tensor, parallel.sequence, parallel.pipeline, parallel.expert) > 1:
        reason = tr("it divides the model by ZeRO alone (parallel=data)")
    elif cfg.model.init is schema.Init.random:
        reason = tr("it needs a model's directory or name (model.path)")
    elif json.loads((Path(cfg.model.path) / "config.json").read_text(encoding="utf-8"))["model_type"] == "chatglm":
        reason = tr("transformers has no ChatGLM: convert it first, toolkit export-model PATH output=DIR")
    if reason:
        raise ConfigError("script= cannot carry this recipe: {reason}.", reason=reason)


def write(cfg: schema.RunConfig, data: LanguageData, ranks: int, folder: Path) -> None:
    """Write the program for so many ranks, its JSON and its data to a new directory `folder`: tokenized samples, their
    order in each epoch, and the learning rate of each step (as a factor of `optim.lr`).
    """
    steps = cfg.train.max_steps or math.ceil(cfg.train.epochs * language_batches.epoch_steps(cfg, data))
    # DeepSpeed's own schedules take some steps at other rates: the program has the rate of each step.
    constant = schema.ScheduleConfig(name=schema.ScheduleName.constant)
    ds = build_ds_config(replace(cfg, schedule=constant), ranks, steps)
    warmup = warmup_steps(cfg, steps)
    rates = [learning_rate(cfg.schedule, 1.0, done, steps, warmup) for done in range(steps)]
    shell = load_empty(Path(cfg.model.path))  # without weights: only names and shapes are needed
    lora, trained = _tuning(cfg, shell)
    arguments = _arguments(cfg, ds.values, steps, data.validation is not None)
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)  # noqa: S701  # Python, whose values `pprint` quotes
    template = (resources.files("toolkit.extras") / "plain_script.py.j2").read_text(encoding="utf-8")
    loading = {"dtype": DTYPES[cfg.precision.dtype.value]}
    if cfg.model.attention != schema.AUTO:
        loading["attn_implementation"] = cfg.model.attention
    text = environment.from_string(template).render(
        model=cfg.model.path,
        pad_id=data.pad_id,
        ranks=ranks,
        notes=[*_notes(cfg), *ds.missing],
        arguments=arguments,
        loading=", ".join(f"{name}={value!r}" for name, value in loading.items()),
        lora=lora,
        trained=trained,
        evaluates=data.validation is not None,
    )
    folder.mkdir(parents=True)
    (folder / SCRIPT).write_text(text, encoding="utf-8")
    (folder / JSON).write_text(json.dumps(ds.values, indent=2) + "\n", encoding="utf-8")
    (folder / "rates.json").write_text(json.dumps(rates) + "\n", encoding="utf-8")
    _write_lines(folder / "train.jsonl", _samples(data.train))
    if data.validation is not None:
        _write_lines(folder / "validation.jsonl", _samples(data.validation))
    _write_lines(folder / "order.jsonl", _epochs(cfg, data, steps))


def _tuning(cfg: schema.RunConfig, shell: PreTrainedModel) -> tuple[dict[str, Any], list[str]]:
    """Return the settings of peft's LoRA, {} without, and the names of what is trained, [] for all."""
    tuning = tuning_of(cfg)
    if tuning.method is schema.TuningMethod.lora:
        settings = fine_tuning.new_settings(shell, tuning, cfg.model.path)
        # None and False are peft's defaults.
        return {key: settings[key] for key in _LORA_KEYS if settings[key] not in (None, False)}, []
    if tuning.method is schema.TuningMethod.freeze:
        fine_tuning.freeze(shell, tuning)
        return {}, [name for name, parameter in shell.named_parameters() if parameter.requires_grad]
    return {}, []


def _arguments(cfg: schema.RunConfig, ds: dict[str, Any], steps: int, evaluates: bool) -> dict[str, Any]:
    """Return the keys of TrainingArguments; where they repeat the DeepSpeed JSON, the Trainer wants equal values."""
    optim, every = cfg.optim, cfg.checkpoint.every
    arguments: dict[str, Any] = {
        "max_steps": steps,
        "per_device_train_batch_size": ds["train_micro_batch_size_per_gpu"],
        "per_device_eval_batch_size": ds["train_micro_batch_size_per_gpu"],
        "gradient_accumulation_steps": ds["gradient_accumulation_steps"],
        "learning_rate": optim.lr,
        "weight_decay": optim.weight_decay,
        "adam_beta1": optim.betas[0],
        "adam_beta2": optim.betas[1],
        "adam_epsilon": optim.eps,
        "max_grad_norm": cfg.train.gradient_clipping,
        "bf16": cfg.precision.dtype is schema.Dtype.bf16,
        "fp16": cfg.precision.dtype is schema.Dtype.fp16,
        "gradient_checkpointing": cfg.train.activation_checkpointing.enabled,
        "seed": cfg.run.seed,
        "logging_steps": cfg.train.log_every,
        "save_strategy": "steps" if every else "no",
        "report_to": "none",  # else the Trainer reports to every tracker that is installed
    }
    arguments |= {"save_steps": every, "save_total_limit": cfg.checkpoint.keep or None} if every else {}
    if arguments["gradient_checkpointing"]:
        arguments["gradient_checkpointing_kwargs"] = {"use_reentrant": False}
    if evaluates:
        arguments |= {"eval_strategy": "steps", "eval_steps": cfg.evaluate.every or steps, "eval_on_start": True}
    if cfg.train.neftune_alpha:
        arguments["neftune_noise_alpha"] = cfg.train.neftune_alpha
    if cfg.compile.enabled:
        arguments |= {"torch_compile": True, "torch_compile_backend": cfg.compile.backend}
    if optim.name is schema.OptimizerName.adamw_8bit:
        arguments["optim"] = "adamw_bnb_8bit"
    return arguments


def _notes(cfg: schema.RunConfig) -> list[str]:
    """Return sentences about what the program cannot carry, or does in another way."""
    notes = []
    if cfg.data.packing is not schema.Packing.none:
        notes.append(
            tr(
                "data.packing = {packing}: the recipe fills sequences of {length} tokens with several samples; here "
                "each sample is a sequence, so that a step trains fewer tokens. Raise per_device_train_batch_size.",
                packing=cfg.data.packing.value,
                length=cfg.data.max_length,
            )
        )
    if cfg.tuning.init in (schema.LoraInit.pissa, schema.LoraInit.olora):
        notes.append(
            tr(
                "tuning.init = {value}: peft changes the weights of the base, and the adapter is for these. To use it "
                "on the original, save it with path_initial_model_for_weight_conversion (peft's documentation).",
                value=cfg.tuning.init.value,
            )
        )
    if cfg.tuning.method is schema.TuningMethod.full:
        notes.append(tr("The embedding of the padding token gets no gradient in transformers (padding_idx)."))
    if cfg.data.validation or cfg.data.validation_fraction or cfg.data.validation_rows:
        notes.append(tr("eval_loss is the mean of batches, not of tokens."))
    if cfg.evaluate.metrics or cfg.evaluate.prompts:
        notes.append(tr("No answers are generated and scored (evaluate.metrics, evaluate.prompts)."))
    notes.append(
        tr(
            "A last step of an epoch that does not fill all ranks repeats some samples. NaN and spikes are not "
            "skipped, the longest batch is not tried first, and checkpoints resume on as many ranks as saved them."
        )
    )
    return notes


def _samples(store: TokenizedCache) -> Iterator[Any]:
    """Yield the samples of a tokenized cache, with -100 for tokens that are not trained."""
    for number in range(len(store)):
        ids, is_trained = store[number]
        labels = [token if trained else -100 for token, trained in zip(ids.tolist(), is_trained.tolist(), strict=True)]
        yield {"input_ids": ids.tolist(), "labels": labels}


def _epochs(cfg: schema.RunConfig, data: LanguageData, steps: int) -> Iterator[list[int]]:
    """Yield the samples' numbers of each epoch in the order of the recipe's steps: those of all ranks, as one would
    train them. `steps`: of the whole run; the last epoch may be longer than what they need.
    """
    num_rows, size = language_batches.epoch_rows(cfg, data), language_batches.rows_per_step(cfg, data.packing)[0]
    position, order = sampler.BEGINNING, list[int]()
    for _ in range(math.ceil(steps / sampler.steps_per_epoch(num_rows, size))):
        epoch = position.epoch
        while position.epoch == epoch:
            [micro_batches] = language_batches.step_samples(cfg, data, 1, position)  # of the one rank
            order += [number for micro_batch in micro_batches for number in micro_batch]
            position = sampler.next_position(position, num_rows, size)
        yield order
        order = []


def _write_lines(file: Path, values: Iterator[Any]) -> None:
    with file.open("w", encoding="utf-8") as lines:
        for value in values:
            lines.write(json.dumps(value) + "\n")
