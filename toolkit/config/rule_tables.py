"""What the settings of a config are to each other, as tables of conditions (`when`): rules.py applies them.

Most rows are in rules.yaml; here are those that compute. Sentences are English templates, looked up in locale/zh.yaml;
their placeholders are keys.
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

from toolkit.config import files, schema
from toolkit.messages import read_table

Test = Callable[[schema.RunConfig], object]
_TABLES: dict[str, Any] = read_table("config/rules.yaml")


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
    """Whether DeepSpeed calls it Adam."""
    takes_adam: bool = False
    """Whether DeepSpeed has an Adam of its own for it, or PyTorch's with `optim.torch`."""
    is_known: bool = True
    """Whether DeepSpeed's ZeRO takes it unasked, which concerns those that it has tested."""


OPTIMIZERS = {
    schema.OptimizerName.adamw: OptimizerTraits(
        ds_type="AdamW", reads=("betas", "eps"), state_bytes=8, is_adam=True, takes_adam=True
    ),
    schema.OptimizerName.adam: OptimizerTraits(
        ds_type="Adam", reads=("betas", "eps"), state_bytes=8, is_adam=True, takes_adam=True
    ),
    # Two numbers of 8 bits, and for each 256 of them a float32 scale (bitsandbytes 0.50, optim/optimizer.py).
    schema.OptimizerName.adamw_8bit: OptimizerTraits(
        ds_type="", reads=("betas", "eps"), state_bytes=2.04, is_known=False
    ),
    schema.OptimizerName.muon: OptimizerTraits(
        ds_type="Muon",
        reads=("betas", "eps", "momentum", "adam_lr"),
        state_bytes=8,
        takes_adam=True,
        is_known=False,
    ),
    schema.OptimizerName.lion: OptimizerTraits(ds_type="Lion", reads=("betas",), state_bytes=4),
    # A row and a column for each matrix.
    schema.OptimizerName.adafactor: OptimizerTraits(ds_type="Adafactor", reads=(), state_bytes=0.1, is_known=False),
    schema.OptimizerName.sgd: OptimizerTraits(ds_type="SGD", reads=("momentum",), state_bytes=4, is_known=False),
    schema.OptimizerName.adagrad: OptimizerTraits(ds_type="Adagrad", reads=("eps",), state_bytes=4),
}
SOMETIMES_READ = ("betas", "eps", "momentum", "adam_lr")
"""Settings that not every optimizer reads."""

GROUPING = ("optim.decay", "optim.layer_lr_decay", "optim.adam_lr")
"""Keys that make several groups of parameters."""


def is_client(optim: schema.OptimConfig) -> bool:
    """Whether the optimizer is made here and handed to DeepSpeed, which else makes its own by name."""
    return optim.name is schema.OptimizerName.adamw_8bit or (
        optim.name is schema.OptimizerName.lion and optim.torch is True
    )


def is_grouped(optim: schema.OptimConfig) -> bool:
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
    get: Callable[[schema.RunConfig], Any] = attrgetter(key)
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
_DEFAULTS = schema.RunConfig()


class Rule(NamedTuple):
    """A sentence about settings that contradict each other, with placeholders that are keys: {zero.stage}."""

    key: str
    """The key that the error is about, {value} in the sentence."""
    broken: Test
    sentence: str
    reason: str = ""
    """{reason} in the sentence."""


def _rules(rules: Mapping[str, str], *, both: str = "{}", sentence: str = "") -> tuple[Rule, ...]:
    """Return the rules of conditions and their sentences, each about the first key of its condition.

    With `sentence` that is the sentence of all, and those of the table are its {reason}; `both` is a condition that has
    to hold too: "{}" is where that of the table goes.
    """
    full = {both.format(condition): text for condition, text in rules.items()}
    return tuple(
        Rule(keys_in(condition)[0], when(condition), sentence or text, text if sentence else "")
        for condition, text in full.items()
    )


def _rules_of(table: str) -> Iterator[Rule]:
    """Yield the rules of the groups of a table in rules.yaml."""
    for group in _TABLES[table]:
        yield from _rules(**group)


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
    return tuple(key for pattern in patterns.split() for key in schema.all_keys() if fnmatchcase(key, pattern))


READ_WHEN: tuple[ReadWhen, ...] = (
    *(_read(*row) for row in _TABLES["read_when"]),
    *(
        _read(
            f"optim.{name}", f"optim.name={'|'.join(key.value for key, one in OPTIMIZERS.items() if name in one.reads)}"
        )
        for name in SOMETIMES_READ
    ),
    _read(
        "track.patience_s", " or ".join(f"track.{name}.enabled" for name in schema.TRACKERS), "no tracker is enabled"
    ),
    *(_read(f"track.{name}.*", f"track.{name}.enabled") for name in schema.TRACKERS),
    _read("model.revision", "model.path", "model.path is a directory", lambda c: files.is_hub_name(c.model.path)),
    _read(
        "distill.teacher_revision",
        "distill.teacher",
        "distill.teacher is no name on Hugging Face",
        lambda c: files.is_hub_name(c.distill.teacher),
    ),
)


RANGES: tuple[Rule, ...] = (
    *_rules(_TABLES["ranges"]),
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
        "preference.label_smoothing",
        lambda c: c.preference.label_smoothing >= 0.5,
        "preference.label_smoothing = {value} must be below 0.5. If more pairs are mislabelled, swap their answers.",
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
BOUNDS: dict[str, str] = _TABLES["bounds"]
"""Kinds of bounds at a field -> the sentence about a number that is not within."""
WRONG_WEIGHTS: tuple[tuple[Callable[[schema.SourceConfig], object], str], ...] = (
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

INCOMPATIBLE: tuple[Rule, ...] = (
    Rule(
        "launch.max_nodes",
        lambda c: 0 < c.launch.max_nodes < c.launch.min_nodes,
        "launch.max_nodes = {value} is less than launch.min_nodes = {launch.min_nodes}.",
    ),
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
    *_rules_of("incompatible"),
    *_rules(
        {
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
)
"""Settings that contradict each other in any program."""

INCOMPATIBLE_OF_MODELS: tuple[Rule, ...] = (
    Rule(  # a mistyped folder must not run a stranger's code, nor a branch what is pushed to it after one has read it
        "model.revision",
        lambda c: (
            c.model.trust_remote_code
            and c.model.init.value == "pretrained"
            and files.is_hub_name(c.model.path)
            and not re.fullmatch("[0-9a-f]{40}", c.model.revision)
        ),
        "model.trust_remote_code = true and model.path = {model.path}, which is not a directory here "
        "but a name on Hugging Face, needs the commit that you have read: model.revision=COMMIT, all "
        "40 digits.",
    ),
    *_rules_of("incompatible_of_models"),
)
"""Settings of a language model that contradict each other."""

INCOMPATIBLE_WITH_CUSTOM_MODELS: tuple[Rule, ...] = (
    *_rules_of("incompatible_with_custom_models"),
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
            "model.* tuning.* data.* preference.* task.* distill.* prepare.* kernels.* evaluate.* "
            "train.activation_checkpointing.* train.neftune_alpha train.random_ltd.*"
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


def updates_early(cfg: schema.RunConfig) -> str:
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


def _requirement(when_on: str, needs: Mapping[str, str], shared: str = "none", sentence: str = "") -> Requirement:
    """Return what settings need by which the first key of a condition is on.

    `needs`: override -> condition by which a config can do without it; "" is the override itself. `shared` names what
    several need.
    """
    tests = {
        word: test if callable(test) else when(test or word) for word, test in {**needs, **_SHARED[shared]}.items()
    }
    return Requirement(keys_in(when_on)[0], when(when_on), tests, sentence or _CANNOT_STAY)


_CANNOT_STAY = "{key} = {value} cannot be with the other settings; docs/zero.md says why. Add {words}, or leave it out."
_DATA_PARALLEL = {f"{key}=1": "" for key in (*PARALLEL, "parallel.expert")}
_UPDATES_ADAMW: dict[str, str | Test] = {
    "optim.name=adamw": "",
    "optim.torch=false": "optim.torch!=true",
    "run.max_restarts=0": lambda c: (
        not (c.run.max_restarts and (c.zero.offload_optimizer.super_offload or c.zero.zenflow.overlap_step))
    ),
    "plan.auto=false": "",
    "train.rehearse=false": lambda c: not (updates_early(c) and c.train.rehearse),
    "train.on_bad_step=stop": lambda c: not updates_early(c) or c.train.on_bad_step.value == "stop",
    "train.max_grad_norm_ratio=0": lambda c: not updates_early(c) or c.train.max_grad_norm_ratio == 0,
    "batch.micro_per_gpu=1": lambda c: not updates_early(c) or c.batch.micro_per_gpu != "auto",
    "train.on_bad_step=skip": lambda c: updates_early(c) or c.train.on_bad_step.value != "rewind",
    **_DATA_PARALLEL,
}
"""What cannot be where weights change before a step is judged, and where another process keeps states."""
_SHARED: dict[str, Mapping[str, str | Test]] = {
    "none": {},
    "data_parallel": _DATA_PARALLEL,
    "updates_adamw": _UPDATES_ADAMW,
}
REQUIRES: tuple[Requirement, ...] = tuple(_requirement(**row) for row in _TABLES["requires"])
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
