"""What the settings of a config are to each other, as tables of conditions (`when`): rules.py applies them.

Sentences are English templates, looked up in locale/zh.yaml; their placeholders are keys.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from fnmatch import fnmatchcase
from functools import cache
from math import inf
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import yaml

from toolkit.config.files import is_hub_name
from toolkit.config.schema import STAGE3_KEYS, TRACKERS, OptimConfig, OptimizerName, RunConfig, SourceConfig, all_keys

Test = Callable[[RunConfig], object]


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerTraits:
    """One of `optim.name`."""

    ds_type: str
    """What DeepSpeed's JSON calls it; "" where it has no name for it."""
    reads: tuple[str, ...]
    """Settings of `optim` that it reads in addition to those that all do."""
    state_bytes: float
    """Bytes that it keeps per trained parameter next to float32 weights. Of Muon the most: with ZeRO-1 and 2 the
    momentum of a step is there twice until the step counts."""
    is_adam: bool = False
    """Whether its states are Adam's, which are all that DeepSpeed's universal checkpoints hold."""
    takes_adam: bool = False
    """Whether DeepSpeed has an Adam of its own for it, or PyTorch's with `optim.torch`."""
    is_known: bool = True
    """Whether DeepSpeed's ZeRO takes it unasked, which concerns those that it has tested."""


OPTIMIZERS = {
    OptimizerName.adamw: OptimizerTraits(
        ds_type="AdamW", reads=("betas", "eps"), state_bytes=8, is_adam=True, takes_adam=True
    ),
    OptimizerName.adam: OptimizerTraits(
        ds_type="Adam", reads=("betas", "eps"), state_bytes=8, is_adam=True, takes_adam=True
    ),
    # Two numbers of 8 bits, and for each 256 of them a float32 scale (bitsandbytes 0.50, optim/optimizer.py).
    OptimizerName.adamw_8bit: OptimizerTraits(ds_type="", reads=("betas", "eps"), state_bytes=2.04, is_known=False),
    OptimizerName.muon: OptimizerTraits(
        ds_type="Muon", reads=("betas", "eps", "momentum", "adam_lr"), state_bytes=8, takes_adam=True, is_known=False
    ),
    OptimizerName.lion: OptimizerTraits(ds_type="Lion", reads=("betas",), state_bytes=4),
    # A row and a column for each matrix.
    OptimizerName.adafactor: OptimizerTraits(ds_type="Adafactor", reads=(), state_bytes=0.1, is_known=False),
    OptimizerName.sgd: OptimizerTraits(ds_type="SGD", reads=("momentum",), state_bytes=4, is_known=False),
    OptimizerName.adagrad: OptimizerTraits(ds_type="Adagrad", reads=("eps",), state_bytes=4),
}
SOMETIMES_READ = ("betas", "eps", "momentum", "adam_lr")
"""Settings that not every optimizer reads."""

GROUPING = ("optim.decay", "optim.layer_lr_decay", "optim.adam_lr")
"""Keys that make several groups of parameters."""


def is_client(optim: OptimConfig) -> bool:
    """Whether the optimizer is made here and handed to DeepSpeed, which else makes its own by name."""
    return optim.name is OptimizerName.adamw_8bit or (optim.name is OptimizerName.lion and optim.torch is True)


def is_grouped(optim: OptimConfig) -> bool:
    """Whether parameters differ in learning rate or weight decay."""
    return optim.decay.value != "all" or optim.layer_lr_decay != 1 or bool(optim.adam_lr)


def when(condition: str) -> Test:
    """Return the test of a condition: words that all have to hold, or such words on one side of an " or ".

    KEY is neither 0, blank nor false, !KEY is; KEY=A|B has one of these values, KEY!=A|B has none, KEY>N is above N.
    """
    alternatives = [[_word(word) for word in words.split()] for words in condition.split(" or ")]
    return lambda cfg: any(all(test(cfg) for test in tests) for tests in alternatives)


def _word(word: str) -> Test:
    negation, key, sign, text = _WORD.findall(word)[0]
    get: Callable[[RunConfig], Any] = attrgetter(key)
    default = get(_DEFAULTS)  # a key or a value that the schema does not know raises an error here, at import
    if not sign:
        return lambda cfg: bool(value.strip() if isinstance(value := get(cfg), str) else value) != bool(negation)
    if sign == ">":
        return lambda cfg: get(cfg) > float(text)
    options = [
        type(default)[option] if isinstance(default, Enum) else yaml.safe_load(option) if option else ""
        for option in text.split("|")
    ]
    return lambda cfg: (get(cfg) in options) == (sign == "=")


def keys_in(condition: str) -> tuple[str, ...]:
    """Return the keys of a condition in their order."""
    return tuple(_WORD.findall(word)[0][1] for word in condition.split() if word != "or")


_WORD = re.compile(r"(!?)([\w.]+)(?:(!?=|>)(.*))?")
_DEFAULTS = RunConfig()


class Rule(NamedTuple):
    """A sentence about settings that contradict each other, with placeholders that are keys: {zero.stage}."""

    key: str
    """The key that the error is about, {value} in the sentence."""
    broken: Test
    sentence: str
    reason: str = ""
    """{reason} in the sentence."""


def _rules(sentences: Mapping[str, str], *, both: str = "", sentence: str = "") -> tuple[Rule, ...]:
    """Return the rules of conditions and their sentences, each about the first key of its condition.

    With `sentence` that is the sentence of all, and those of the table are its {reason}; `both` is a condition that has
    to hold too: "{}" is where that of the table goes.
    """
    full = {(both or "{}").format(condition): text for condition, text in sentences.items()}
    return tuple(
        Rule(keys_in(condition)[0], when(condition), sentence or text, text if sentence else "")
        for condition, text in full.items()
    )


class ReadWhen(NamedTuple):
    """Keys that some configurations do not read: a changed value without effect is an error, never silence."""

    keys: str
    owners: tuple[str, ...]
    """Keys that decide it; {key} and {value} in the reason are those of the first."""
    is_read: Test
    reason: str


def _read(keys: str, condition: str, reason: str = "{key} is {value}", test: Test | None = None) -> ReadWhen:
    return ReadWhen(keys, keys_in(condition), test or when(condition), reason)


@cache
def expand(patterns: str) -> tuple[str, ...]:
    """Return the keys of the schema that match patterns."""
    return tuple(key for pattern in patterns.split() for key in all_keys() if fnmatchcase(key, pattern))


_ADAPTER = {
    "tuning.rank tuning.alpha tuning.rslora tuning.dora tuning.target_modules tuning.save_modules": "lora|qlora",
    "tuning.num_tokens": "ptuning_v2|prompt",
    "tuning.projection": "ptuning_v2",
    "tuning.init_text": "prompt",
}
"""What an adapter is, and which methods read it."""
_TUNING = _ADAPTER | {
    "tuning.adapter": "lora|qlora|ptuning_v2|prompt",
    "tuning.dropout": "lora|qlora|ptuning_v2",
    "tuning.last_layers tuning.patterns": "freeze",
}
_NVME = ("nvme_path", "buffer_count", "buffer_size", "max_in_cpu", "fast_init", "pipeline_read", "pipeline_write")

READ_WHEN: tuple[ReadWhen, ...] = (
    _read(
        "precision.*loss_scale* precision.initial_scale_power precision.*hysteresis precision.auto_cast",
        "precision.dtype=fp16",
        "precision.dtype is {precision.dtype}, not fp16",
    ),
    _read(
        "precision.initial_scale_power precision.loss_scale_window precision.*hysteresis precision.min_loss_scale",
        "!precision.loss_scale",
        "precision.loss_scale = {precision.loss_scale} is fixed",
    ),
    _read("precision.tf32", "precision.dtype=fp32", "precision.dtype is {precision.dtype}, not fp32"),
    _read(" ".join(f"zero.{name}" for name in STAGE3_KEYS), "zero.stage=3"),
    _read("zero.allgather_* zero.round_robin_gradients", "zero.stage=1|2"),
    _read("zero.contiguous_gradients zero.overlap_comm zero.reduce_*", "zero.stage=1|2|3"),
    *(
        row
        for section in ("zero.offload_optimizer", "zero.offload_param")
        for row in (
            _read(f"{section}.*", f"{section}.device=cpu|nvme"),
            # The optimizer's path may name the place of the parameters too (conf/zero/stage3_nvme.yaml).
            _read(" ".join(f"{section}.{name}" for name in _NVME), f"{section}.device=nvme|none"),
        )
    ),
    _read("zero.offload_optimizer.ratio", "zero.stage=3"),
    _read("zero.offload_optimizer.cpuadam_cores_perc", "zero.offload_optimizer.super_offload"),
    _read("zero.zenflow.*", "zero.zenflow.enabled"),
    _read("zero.zenflow.pt_reserved_cores_perc", "zero.zenflow.overlap_step"),
    _read(
        "zero.aio.*",
        "zero.offload_optimizer.device=nvme or zero.offload_param.device=nvme",
        "nothing is offloaded to nvme",
    ),
    _read("train.activation_checkpointing.*", "train.activation_checkpointing.enabled"),
    _read("compile.*", "compile.enabled"),
    _read("compile.mode", "compile.backend=inductor", "compile.backend is {compile.backend}, not inductor"),
    *(
        _read(
            f"optim.{name}", f"optim.name={'|'.join(key.value for key, one in OPTIMIZERS.items() if name in one.reads)}"
        )
        for name in SOMETIMES_READ
    ),
    _read("optim.decay", "optim.weight_decay", "optim.weight_decay is 0"),
    _read("schedule.min_lr_ratio", "schedule.name=cosine|polynomial|wsd"),
    _read("schedule.warmup_type", "schedule.name=constant|linear|cosine"),
    _read("schedule.power", "schedule.name=polynomial"),
    _read("schedule.timescale", "schedule.name=inverse_sqrt"),
    _read("schedule.decay_*", "schedule.name=wsd"),
    _read("schedule.decay_ratio", "!schedule.decay_steps", "schedule.decay_steps is given"),
    _read(
        "schedule.warmup_type schedule.warmup_min_ratio",
        "schedule.warmup_steps or schedule.warmup_ratio",
        "there is no warm-up",
    ),
    _read("data.max_bad_fraction", "data.on_bad_row=skip", "data.on_bad_row is {data.on_bad_row}, not skip"),
    _read("data.packing_window", "data.packing=packed", "data.packing is {data.packing}, not packed"),
    _read("data.curriculum.*", "data.curriculum.steps"),
    _read(
        "data.curriculum.levels",
        "data.curriculum.shape=discrete",
        "data.curriculum.shape is {data.curriculum.shape}, not discrete",
    ),
    _read("data.validation_fraction", "!data.validation", "data.validation is given"),
    _read("train.random_ltd.*", "train.random_ltd.steps"),
    *(_read(names, f"tuning.method={methods}") for names, methods in _TUNING.items()),
    _read(" ".join(_ADAPTER), "!tuning.adapter", "tuning.adapter decides it"),
    _read("tuning.dropout", "!tuning.adapter or tuning.method!=lora|qlora", "tuning.adapter decides it"),
    _read(
        "evaluate.metrics evaluate.keep_best",
        "data.validation or data.validation_fraction",
        "there is no validation data",
    ),
    _read("evaluate.keep_best", "checkpoint.keep or checkpoint.max_gib", "all checkpoints are kept"),
    _read(
        "evaluate.max_answers evaluate.batch_size evaluate.temperature evaluate.top_* evaluate.seed",
        "evaluate.metrics",
        "evaluate.metrics is empty",
    ),
    _read("evaluate.top_* evaluate.seed", "evaluate.temperature", "evaluate.temperature is 0, so nothing is drawn"),
    _read("checkpoint.keep_weights", "checkpoint.keep", "all checkpoints are kept"),
    _read("checkpoint.verify_export", "checkpoint.export"),
    _read("track.patience_s", " or ".join(f"track.{name}.enabled" for name in TRACKERS), "no tracker is enabled"),
    *(
        _read(f"{section}.*", f"{section}.enabled")
        for section in (*(f"track.{name}" for name in TRACKERS), "report", "profile.flops", "profile.comms")
    ),
    _read("profile.comms.prof_ops", "!profile.comms.prof_all"),
    _read("model.path model.revision model.trust_remote_code model.router_loss", "model.init=pretrained"),
    _read("model.revision", "model.path", "model.path is a directory", lambda c: is_hub_name(c.model.path)),
    _read("model.shape.*", "model.init=random"),
)


RANGES: tuple[Rule, ...] = (
    *_rules(
        {
            "zero.stage!=0|1|2|3": "zero.stage = {value} must be 0, 1, 2 or 3.",
            "language!=|en|zh": "language = {value} must be en, zh or empty.",
        }
    ),
    Rule(
        "optim.betas",
        lambda c: len(c.optim.betas) != 2 or not all(0 <= beta < 1 for beta in c.optim.betas),
        "optim.betas = {value} must be two numbers from 0 to below 1.",
    ),
    Rule(
        "schedule.warmup_min_ratio",
        lambda c: not 0 <= c.schedule.warmup_min_ratio < 1 and c.schedule.warmup_min_ratio != -1,
        "schedule.warmup_min_ratio = {value} must be from 0 to below 1.",
    ),
    Rule(
        "run.name",
        lambda c: (
            not (Path(c.run.name).name == c.run.name and re.match("[^.-]|$", c.run.name) and c.run.name.isprintable())
        ),
        "run.name = {value} must be a plain directory name; the directory around it is run.dir.",
    ),
    Rule(
        "prepare.shard",
        lambda c: (
            c.prepare.shard
            and not ((part := re.fullmatch(r"(\d+)/(\d+)", c.prepare.shard)) and 0 < int(part[1]) <= int(part[2]))
        ),
        "prepare.shard = {value} must be i/n, such as 1/4 to 4/4 for four nodes.",
    ),
)
"""What single values must be, beyond the bounds at their fields."""
BOUNDS = {
    "ge": "{key} = {value} must be at least {least}.",
    "ge lt": "{key} = {value} must be from 0 to below 1.",
    "ge le": "{key} = {value} must be from 0 to 1.",
    "gt": "{key} = {value} must be above 0.",
    "gt lt": "{key} = {value} must be above 0 and below 1.",
    "gt le": "{key} = {value} must be above 0 and at most 1.",
}
"""Kinds of bounds at a field -> the sentence about a number that is not within."""
WRONG_WEIGHTS: tuple[tuple[Callable[[SourceConfig], object], str], ...] = (
    (
        lambda source: source.weights and source.weight != 1,
        "data.sources[{number}]: weight and weights are both given: keep one of them.",
    ),
    (
        lambda source: [p.at for p in source.weights] != sorted({p.at for p in source.weights if 0 <= p.at <= 1}),
        "data.sources[{number}].weights: the points {points} must rise from 0, the beginning of the run, to at most 1, "
        "its end.",
    ),
    (
        lambda source: any(not 0 <= weight < inf for weight in [source.weight, *(p.weight for p in source.weights)]),
        "data.sources[{number}]: a weight must be a number of at least 0.",
    ),
)
"""What is wrong with one of several sources whose weights change."""


PARALLEL = ("parallel.tensor", "parallel.sequence", "parallel.pipeline")
_ONE, _OFF = "it was not tried. Set it to 1.", "it was not tried. Set it to false."
_ANSWERS = "the layers that an answer needs are on several ranks. Ask the model after the run: toolkit generate."
_PARTITION = "train.activation_checkpointing.partition_activations"
_NO_PARTITION = f"{_PARTITION} = true has no effect with it. Set it to false"
_CANNOT_BE = "{key} = {value} cannot be: {reason}."

INCOMPATIBLE: tuple[Rule, ...] = (
    Rule(
        "schedule.warmup_steps",
        lambda c: 0 < c.train.max_steps < c.schedule.warmup_steps,
        "schedule.warmup_steps = {value} is more than train.max_steps = {train.max_steps}: the run would end while "
        "the learning rate still rises.",
    ),
    Rule(
        "schedule.decay_steps",
        lambda c: (
            c.schedule.name.value == "wsd" and 0 < c.train.max_steps < c.schedule.warmup_steps + c.schedule.decay_steps
        ),
        "schedule.warmup_steps = {schedule.warmup_steps} and schedule.decay_steps = {value} are more together than "
        "train.max_steps = {train.max_steps}.",
    ),
    Rule(
        "profile.flops.profile_step",  # a profile of a step that never comes would be missed at the end only
        lambda c: c.profile.flops.enabled and 0 < c.train.max_steps <= c.profile.flops.profile_step,
        "profile.flops.profile_step = {value} must be less than train.max_steps = {train.max_steps}.",
    ),
    Rule(
        "data.curriculum.start_length",
        lambda c: c.data.curriculum.steps and c.data.curriculum.start_length >= c.data.max_length,
        "data.curriculum.start_length = {value} must be less than data.max_length = {data.max_length}.",
    ),
    Rule(
        "train.activation_checkpointing.contiguous_memory_optimization",
        lambda c: (
            (kept := c.train.activation_checkpointing).contiguous_memory_optimization
            and not (kept.partition_activations and kept.number_checkpoints)
        ),
        "{key} = true needs partition_activations = true (it is "
        "{train.activation_checkpointing.partition_activations}) and number_checkpoints, the number of layers (it is "
        "{train.activation_checkpointing.number_checkpoints}).",
    ),
    Rule(
        "zero.zenflow.select_interval",
        lambda c: c.zero.zenflow.enabled and c.zero.zenflow.select_interval % c.zero.zenflow.update_interval,
        "zero.zenflow.select_interval = {value} must be a multiple of zero.zenflow.update_interval = "
        "{zero.zenflow.update_interval}.",
    ),
    Rule(
        "track.mlflow.uri",
        lambda c: "@" in urlsplit(c.track.mlflow.uri).netloc,
        "track.mlflow.uri holds a user or a password. Take them out and set MLFLOW_TRACKING_USERNAME and "
        "MLFLOW_TRACKING_PASSWORD in the environment.",
    ),
    *_rules(
        {
            "zero.offload_param.device!=none zero.stage!=3": "zero.offload_param.device = {value} needs zero.stage = "
            "3, but it is {zero.stage}. Use zero.stage=3, or zero.offload_param.device=none.",
            "zero.offload_optimizer.device!=none !zero.stage": "zero.offload_optimizer.device = {value} needs "
            "zero.stage 1, 2 or 3, but it is 0.",
            "zero.offload_optimizer.device=nvme zero.stage=1|2": "zero.offload_optimizer.device = nvme needs "
            "zero.stage = 3, but it is {zero.stage}. Use cpu.",
            "checkpoint.keep_weights zero.offload_optimizer.device=nvme": "checkpoint.keep_weights = {value} cannot "
            "be: the weights of a run whose optimizer is offloaded to NVMe cannot be taken from its checkpoints. Set "
            "it to 0.",
            "compile.deepcompile !zero.stage": "compile.deepcompile = true needs zero.stage 1, 2 or 3, but it is 0.",
            "compile.deepcompile compile.backend!=inductor|eager": "compile.deepcompile = true needs compile.backend = "
            "inductor, but it is {compile.backend}.",
            "zero.zenflow.enabled zero.stage=3": "zero.zenflow.enabled = true and zero.stage = 3 do not go together: "
            "ZenFlow turns whole weights before it splits them, and here they are split as they are read. Use "
            "zero.stage=2.",
            "optim.layer_lr_decay!=1 tuning.method=ptuning_v2|prompt": "optim.layer_lr_decay = {value} needs layers to "
            "train, and tuning.method = {tuning.method} trains none.",
            # measured, see docs/optimizers.md
            "optim.name=adafactor zero.stage": "optim.name = adafactor and zero.stage = {zero.stage} do not go "
            "together: it factors matrices, and ZeRO hands it flat pieces of them, from which every stage and number "
            "of ranks computes something else. Use zero=stage0, or optim=adamw_8bit.",
            "optim.name=adagrad zero.stage": "optim.name = adagrad and zero.stage = {zero.stage} do not go "
            "together: DeepSpeed builds it again, and the schedule and parameter groups are lost. Use zero=stage0, "
            "or optim=adamw.",
            "optim.name=muon tuning.method=ptuning_v2|prompt": "optim.name = muon needs matrices of layers to train, "
            "and tuning.method = {tuning.method} trains none. Use optim=adamw.",
            "train.gradient_clipping optim.name=muon": "train.gradient_clipping = {value} and optim.name = muon do not "
            "go together: under most ZeRO stages DeepSpeed would clip Muon's updates, which all have the same size, to "
            "next to nothing. Set train.gradient_clipping=0.",
            "optim.name=muon zero.offload_optimizer.device=nvme or optim.name=muon zero.offload_param.device=nvme": (
                "optim.name = muon and offloading to NVMe are untested together. Offload to cpu, or use optim=adamw."
            ),
            **{
                f"!track.{key} track.{key.partition('.')[0]}.enabled": "{key} must not be empty."
                for key in ("wandb.project", "mlflow.experiment", "swanlab.project", "trackio.project")
            },
            # Each rank draws its own noise, so ranks that share sequences would disagree about it.
            **{
                f"train.neftune_alpha {key}>1": f"train.neftune_alpha cannot be used with {key} = {{{key}}}: each rank "
                "draws its own noise, and these ranks share rows. Set train.neftune_alpha=0."
                for key in PARALLEL
            },
            **{
                f"train.random_ltd.steps {condition}": f"train.random_ltd cannot be used with {key} = {{{key}}}: it "
                "works where all or some layers are trained (tuning=full or freeze), each whole on its rank and not "
                "compiled. Set train.random_ltd.steps=0."
                for condition in ("tuning.method!=full|freeze", "compile.enabled", *(f"{key}>1" for key in PARALLEL))
                for key in keys_in(condition)
            },
        }
    ),
    *_rules(
        {
            "zero.stage>1": "DeepSpeed's pipelines know stages 0 and 1. Use zero=stage1, or zero=stage3 without "
            "parallel=pipeline.",
            "zero.offload_optimizer.device!=none": "it was not tried. Use none, or zero=stage2_offload without "
            "parallel=pipeline.",
            "precision.dtype=fp16": "an overflow on one stage would have to be known to all. Use precision=bf16 or "
            "precision=fp32.",
            "!zero.stage precision.dtype=bf16": "in bf16 gradients would be added up in bf16. Use zero=stage1, which "
            "adds them up in fp32.",
            "tuning.method!=full": "stages train all parameters of their layers. Use tuning=full, or leave "
            "parallel=pipeline out.",
            "evaluate.metrics": _ANSWERS,
            "evaluate.prompts": _ANSWERS,
            "parallel.tensor>1": _ONE,
            "parallel.sequence>1": _ONE,
            "batch.micro_per_gpu=auto": "how much of a model a rank holds depends on its stage. Give a number.",
            "plan.auto": _OFF,
            "kernels.mlp_pieces>1": _ONE,
            "compile.enabled": _OFF,
            "profile.flops.enabled": _OFF,
            f"{_PARTITION} train.activation_checkpointing.enabled": _OFF,
        },
        both="{} parallel.pipeline>1",
        sentence="{key} = {value} cannot be together with parallel.pipeline = {parallel.pipeline}: {reason}",
    ),
    *_rules(
        {
            "compile.enabled": "layers in pieces cannot be compiled. Set compile.enabled=false",
            "tuning.dropout tuning.method=lora|qlora": "each piece is computed twice, and tuning.dropout = "
            "{tuning.dropout} would drop something else the second time. Set it to 0",
        },
        both="kernels.mlp_pieces>1 {}",
        sentence=_CANNOT_BE,
    ),
    *_rules(
        {
            **dict.fromkeys(
                ("parallel.tensor>1", "parallel.pipeline>1"),
                "the ranks of one model share either rows (sequence), matrices (tensor) or layers (pipeline)",
            ),
            "tuning.method=ptuning_v2|prompt": "what tuning={tuning.method} learns stands before a row, and would "
            "stand before each part of it. Use tuning=lora",
            "model.attention!=auto": "model.attention = {model.attention} is computed on one rank. Leave it at auto",
            _PARTITION: _NO_PARTITION,
            "compile.enabled": "what ranks exchange within attention cannot be compiled. Set compile.enabled=false",
        },
        both="parallel.sequence>1 {}",
        sentence=_CANNOT_BE,
    ),
    *_rules(
        {
            "zero.stage=3": "zero.stage = 3 is not supported with it. Use zero=stage1 or zero=stage2, or "
            "parallel.tensor=1",
            "zero.zenflow.enabled": "zero.zenflow.enabled = true is not supported with it. Set it to false",
            "tuning.method!=full|freeze": "tuning.method = {tuning.method} adds parameters that are not split with the "
            "layers that they belong to. Use tuning=full or tuning=freeze, or parallel.tensor=1",
            "optim.name=adafactor": "optim.name = adafactor keeps a row and a column for each whole matrix, and ranks "
            "have parts. Use optim=adamw",
            _PARTITION: _NO_PARTITION,
            "compile.enabled": "compile.enabled = true is not supported with it. Set it to false",
            "plan.auto": "plan.auto = true looks for ZeRO's stages, also those that do not go together with it. Set it "
            "to false",
        },
        both="parallel.tensor>1 {}",
        sentence=_CANNOT_BE,
    ),
)
"""Settings that contradict each other in any program."""

INCOMPATIBLE_OF_MODELS: tuple[Rule, ...] = (
    Rule(  # a mistyped folder must not run a stranger's code, nor a branch what is pushed to it after one has read it
        "model.revision",
        lambda c: (
            c.model.trust_remote_code
            and c.model.init.value == "pretrained"
            and is_hub_name(c.model.path)
            and not re.fullmatch("[0-9a-f]{40}", c.model.revision)
        ),
        "model.trust_remote_code = true and model.path = {model.path}, which is not a directory here "
        "but a name on Hugging Face, needs the commit that you have read: model.revision=COMMIT, all "
        "40 digits.",
    ),
    *_rules(
        {
            "checkpoint.keep_weights model.trust_remote_code model.init=pretrained": "checkpoint.keep_weights = "
            "{value} and model.trust_remote_code = true do not go together: exports of old checkpoints run no code of "
            "a model's own. Set it to 0.",
            "!tuning.last_layers !tuning.patterns tuning.method=freeze": "tuning.method = freeze trains nothing: set "
            "tuning.last_layers or tuning.patterns.",
            "tuning.method=qlora zero.stage=3": "tuning.method = qlora and zero.stage = 3 do not go together: ZeRO-3 "
            "cuts weights into flat pieces of the training precision and gathers them again, by which numbers of 4 "
            "bits lose what they mean. Use zero=stage2, or tuning=lora.",
            # peft 0.21, tuners/lora/dora.py: `lora_A.weight.shape[1]` of a weight that is not gathered (IndexError,
            # measured).
            "tuning.dora zero.stage=3": "tuning.dora = true and zero.stage = 3 do not go together: DoRA measures whole "
            "weights, also where ZeRO-3 has not gathered them. Use zero=stage2, or leave dora out.",
        }
    ),
)
"""Settings of a language model that contradict each other."""

_OF_CUSTOM_MODELS = "{key} = {value}: which parameters of a custom model are layers, embeddings or output is not "
INCOMPATIBLE_WITH_CUSTOM_MODELS: tuple[Rule, ...] = (
    *_rules(
        {
            **dict.fromkeys(
                [f"{key}>1" for key in PARALLEL],
                "{key} = {value}: how to split a custom model is not known; its ranks share the data. Set it to 1; "
                "zero=stage3 splits the parameters of any model.",
            ),
            **dict.fromkeys(
                ("batch.micro_per_gpu=auto", "plan.auto"),
                "{key} = {value}: the memory of a custom model is unknown. Give batch.micro_per_gpu a "
                "number, and choose zero= yourself.",
            ),
            "optim.decay=hidden": _OF_CUSTOM_MODELS + "known. Possible: all, matrices.",
            "optim.layer_lr_decay!=1": _OF_CUSTOM_MODELS + "known. Possible: 1.",
        }
    ),
    Rule(
        "evaluate.keep_best",
        lambda c: c.evaluate.keep_best and not re.fullmatch(r"eval_\w+", c.evaluate.keep_best),
        "evaluate.keep_best = {value} must be eval_loss, or eval_ and the name of a metric.",
    ),
)
"""What needs to know the model, in a program that brings its own."""

_CUSTOM_MODELS_READ = "data.num_workers evaluate.every evaluate.at_start evaluate.keep_best"
READ_BY_LANGUAGE_MODELS = _read(
    " ".join(
        key
        for key in expand(
            "model.* tuning.* data.* prepare.* kernels.* evaluate.* train.activation_checkpointing.* "
            "train.neftune_alpha train.random_ltd.*"
        )
        if key not in _CUSTOM_MODELS_READ.split()
    ),
    "",
    "the program brings its own model, data and loss",
    lambda c: False,
)
READ_WITH_VALIDATION = _read(
    "evaluate.every evaluate.at_start evaluate.keep_best", "", "the program gives no validation=", lambda c: False
)


def updates_early(cfg: RunConfig) -> str:
    """Return the key by which weights change while gradients still come, before a step can be judged; "" if none."""
    if cfg.zero.zenflow.enabled:
        return "zero.zenflow.enabled"
    if cfg.zero.offload_optimizer.super_offload and not cfg.train.gradient_clipping:
        return "zero.offload_optimizer.super_offload"
    return ""


class Requirement(NamedTuple):
    """A setting that needs others."""

    key: str
    is_on: Test
    needs: dict[str, Test]
    """Override, one of the {words} of the sentence -> whether the config can do without it."""
    sentence: str


def _requirement(
    condition: str,
    needs: Mapping[str, str | Test],
    sentence: str = "{key} = {value} cannot be with the other settings; docs/zero.md says why. Add {words}, or leave "
    "it out.",
) -> Requirement:
    """Return what settings need by which the first key of a condition is on.

    `needs`: override -> condition or test by which a config can do without it; "" is the override itself.
    """
    tests = {word: test if callable(test) else when(test or word) for word, test in needs.items()}
    return Requirement(keys_in(condition)[0], when(condition), tests, sentence)


_DATA_PARALLEL = {f"{key}=1": "" for key in PARALLEL}
_UPDATES_ADAMW: dict[str, str | Test] = {
    "optim.name=adamw": "",
    "optim.torch=false": "optim.torch!=true",
    "run.max_restarts=0": "",
    "plan.auto=false": "",
    "train.rehearse=false": lambda c: not (updates_early(c) and c.train.rehearse),
    "train.on_bad_step=stop": lambda c: not updates_early(c) or c.train.on_bad_step.value == "stop",
    "train.max_grad_norm_ratio=0": lambda c: not updates_early(c) or c.train.max_grad_norm_ratio == 0,
    "batch.micro_per_gpu=1": lambda c: not updates_early(c) or c.batch.micro_per_gpu != "auto",
    "train.on_bad_step=skip": lambda c: updates_early(c) or c.train.on_bad_step.value != "rewind",
    **_DATA_PARALLEL,
}
"""What cannot be where weights change before a step is judged, and where states are not saved."""
REQUIRES: tuple[Requirement, ...] = (
    _requirement("zero.zero_hpz_partition_size>1", {"zero.offload_param.device=none": "", **_DATA_PARALLEL}),
    _requirement(
        # 0.19.8, csrc/quantization/pt_binding.cpp: ds_swizzle_quant reads whatever it gets as __half.
        "zero.zero_quantized_gradients",
        {"precision=fp16": "precision.dtype=fp16", "zero.reduce_scatter=true": "", **_DATA_PARALLEL},
    ),
    _requirement(
        # Its graph has gathers and reductions of its own (0.19.8, compile/init_z3.py), which know none of these.
        "compile.deepcompile",
        {
            "zero.zero_hpz_partition_size=1": "",
            "zero.zero_quantized_weights=false": "",
            "zero.zero_quantized_gradients=false": "",
            "zero.offload_param.device=cpu": "zero.offload_param.device!=nvme",
            "zero.offload_optimizer.super_offload=false": "",
            "zero.zenflow.enabled=false": "",
            **_DATA_PARALLEL,
        },
    ),
    _requirement(
        # Its process has a DeepSpeedCPUAdam that knows AdamW only (0.19.8, superoffload_utils.py).
        "zero.offload_optimizer.super_offload",
        {
            "zero.stage=3": "",
            "zero.offload_optimizer.device=cpu": "",
            # Without clipping it updates before the loss scale is divided out (0.19.8, superoffload_stage3.py).
            "precision=bf16": "precision.dtype!=fp16 or train.gradient_clipping",
            **_UPDATES_ADAMW,
        },
    ),
    _requirement(
        "zero.zenflow.enabled",
        {
            "zero.stage=2": "zero.stage",
            "zero.offload_optimizer.device=cpu": "",
            "zero.reduce_scatter=true": "",
            "zero.contiguous_gradients=true": "",
            "zero.overlap_comm=true": "zero.overlap_comm or !zero.zenflow.offload",
            "precision=bf16": "precision.dtype!=fp16",  # selected gradients keep the loss scale
            **_UPDATES_ADAMW,
        },
    ),
    _requirement(  # a restarted run has to resume: it may neither start over nor be rejected
        "run.max_restarts",
        {
            "run.name=NAME": "run.name",
            "checkpoint.every=100": "checkpoint.every or checkpoint.minutes",
            "resume=auto": "resume=auto|must",
        },
        "run.max_restarts = {value} needs a run that can resume from its checkpoints. Add {words}.",
    ),
)
"""What ZeRO++, ZenFlow, SuperOffload and DeepCompile (docs/zero.md), and restarts, need of other settings."""
UNTESTED = ("parallel.pipeline>1", "zero.zenflow.enabled", "zero.offload_optimizer.super_offload")
"""What has not been tried with groups of parameters, nor with optimizers other than DeepSpeed's and PyTorch's own."""
UNTESTED_WITH_MUON = ("parallel.tensor>1", "parallel.sequence>1", "zero.zero_hpz_partition_size>1")
"""What has not been tried with Muon either."""


def sentences() -> Iterator[str]:
    """Yield the English templates of all tables, for the test of their Chinese."""
    for row in (*READ_WHEN, READ_BY_LANGUAGE_MODELS, READ_WITH_VALIDATION):
        yield row.reason
    for rule in (*RANGES, *INCOMPATIBLE, *INCOMPATIBLE_OF_MODELS, *INCOMPATIBLE_WITH_CUSTOM_MODELS):
        yield from (rule.sentence, rule.reason)
    yield from (*BOUNDS.values(), *(sentence for _, sentence in WRONG_WEIGHTS), *(row.sentence for row in REQUIRES))
