"""Tables of rules about settings and their relations, as conditions (`when`), which rules.py applies.

Most rows are in rules.yaml; here are those that need code. Sentences are English templates, translated by
locale/zh.yaml; their placeholders are keys.
"""

import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from fnmatch import fnmatchcase
from functools import cache
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import yaml

from toolkit.config import dotted_keys, files, schema
from toolkit.messages import read_table

Test = Callable[[schema.RunConfig], object]
_TABLES: dict[str, Any] = read_table("config/rules.yaml")


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerTraits:
    """Properties of an optimizer, a value of `optim.name`."""

    ds_type: str
    """Its name in DeepSpeed's JSON, "" if DeepSpeed has none."""
    reads: list[str]
    """Settings of `optim` that it reads in addition to those that all read."""
    state_bytes: float
    """Bytes of its states per trained parameter, without float32 weights. For Muon the maximum, as with ZeRO-1 and 2
    the momentum exists twice until a step is accepted.
    """
    is_adam: bool = False
    """Whether DeepSpeed calls it Adam."""
    takes_adam: bool = False
    """Whether DeepSpeed uses its own Adam for it, or PyTorch's with `optim.torch`."""
    is_known: bool = True
    """Whether it is on DeepSpeed's list of optimizers that are tested with ZeRO."""


OPTIMIZERS = {schema.OptimizerName[name]: OptimizerTraits(**row) for name, row in _TABLES["optimizers"].items()}
SOMETIMES_READ = ("betas", "eps", "momentum", "adam_lr")
"""Settings that not every optimizer reads."""
GROUPING = ("optim.decay", "optim.layer_lr_decay", "optim.lora_plus_ratio", "optim.adam_lr")
"""Keys that divide parameters into several groups."""


def is_client(optim: schema.OptimConfig) -> bool:
    """Whether the toolkit makes the optimizer and passes it to DeepSpeed, which makes all others by name."""
    return optim.name is schema.OptimizerName.adamw_8bit or (
        optim.name is schema.OptimizerName.lion and optim.torch is True
    )


def has_bf16_states(cfg: schema.RunConfig) -> bool:
    """Whether master weights, gradients and the optimizer's states are in bf16."""
    precision = cfg.precision
    return precision.dtype is schema.Dtype.bf16 and precision.optimizer_states is schema.StateDtype.bf16


def state_bytes(cfg: schema.RunConfig) -> tuple[int, float]:
    """Return the bytes of a trained parameter's master weight (4, or 2 in bf16), and of the optimizer's states."""
    size = OPTIMIZERS[cfg.optim.name].state_bytes
    return (2, size / 2) if has_bf16_states(cfg) else (4, size)


def is_grouped(optim: schema.OptimConfig) -> bool:
    """Whether parameter groups differ in learning rate or weight decay."""
    factors = (optim.layer_lr_decay, optim.lora_plus_ratio)
    return optim.decay.value != "all" or factors != (1, 1) or bool(optim.adam_lr)


def when(condition: str) -> Test:
    """Return the test of a condition: words separated by spaces, which must all hold, or several such lists, separated
    by " or ", of which one must.

    KEY is neither 0, blank nor false, !KEY is; KEY=A|B has one of these values, KEY!=A|B has none. KEY>N is above N, a
    number or another key; KEY>=N is that or equal.
    """
    alternatives = [[_test_of_word(word) for word in words.split()] for words in condition.split(" or ")]
    return lambda cfg: any(all(test(cfg) for test in tests) for tests in alternatives)


def _test_of_word(word: str) -> Test:
    """Return the test of one word of a condition (see `when`), such as "zero.stage>=2"; a key or value that the schema
    does not know raises at once, for the tables here when this module is imported.
    """
    negation, key, sign, text = _WORD.findall(word)[0]
    get: Callable[[schema.RunConfig], Any] = attrgetter(key)
    default = get(_DEFAULTS)  # raises for an unknown key

    def is_set(cfg: schema.RunConfig) -> bool:
        value = get(cfg)
        return bool(value.strip() if isinstance(value, str) else value)

    if not sign:
        return lambda cfg: is_set(cfg) != bool(negation)
    if sign.startswith(">"):
        compare = operator.gt if sign == ">" else operator.ge
        if text[0].isalpha():  # another key
            limit: Callable[[schema.RunConfig], Any] = attrgetter(text)
            limit(_DEFAULTS)  # raises, too
            return lambda cfg: compare(get(cfg), limit(cfg))
        number = float(text)
        return lambda cfg: compare(get(cfg), number)
    texts = text.split("|")
    if isinstance(default, Enum):
        options: list[Any] = [type(default)[name] for name in texts]
    else:
        options = [yaml.safe_load(name) if name else "" for name in texts]  # YAML reads "" as null
    return lambda cfg: (get(cfg) in options) == (sign == "=")


def keys_in(condition: str) -> tuple[str, ...]:
    """Return the keys of a condition in their order: zero.stage and batch.size of "zero.stage>1 !batch.size"."""
    return tuple(_WORD.findall(word)[0][1] for word in condition.split() if word != "or")


_WORD = re.compile(r"(!?)([\w.]+)(?:(!?=|>=?)(.*))?")  # "zero.stage>=2" -> "", "zero.stage", ">=", "2"
_DEFAULTS = schema.RunConfig()


class Rule(NamedTuple):
    """A rule that settings may break, with the sentence of the error; its placeholders are keys: {zero.stage}."""

    key: str
    """The key that the error is about, {value} in the sentence."""
    broken: Test
    sentence: str
    reason: str = ""
    """{reason} in the sentence."""


def _rules(rules: Mapping[str, str], *, both: str = "{}", sentence: str = "") -> tuple[Rule, ...]:
    """Return a rule for each condition of a table, about the first key of the condition. `rules`: condition under which
    a rule is broken -> its sentence, or with `sentence`, which then is that of all, the {reason} in it; `both`: what
    all conditions have in common, with {} in the place of each: "{} !zero.stage".
    """
    texts = {both.format(condition): text for condition, text in rules.items()}
    return tuple(
        Rule(keys_in(condition)[0], when(condition), sentence or text, text if sentence else "")
        for condition, text in texts.items()
    )


def _rules_of(table: str) -> Iterator[Rule]:
    """Yield the rules of the groups of a table in rules.yaml."""
    for group in _TABLES[table]:
        yield from _rules(**group)


class ReadWhen(NamedTuple):
    """Keys that only some configurations read: in others a changed value is an error."""

    keys: str
    owners: tuple[str, ...]
    """Keys that decide whether these are read; {key} and {value} in the reason are the first one's."""
    is_read: Test
    reason: str

    @property
    def settings(self) -> set[str]:
        """The keys of the schema that match `keys`, without the owners."""
        return {*expand(self.keys)} - {*self.owners}


def _read_when(keys: str, condition: str, reason: str = "{key} is {value}", test: Test | None = None) -> ReadWhen:
    """Return the row for keys that are read only where `condition` holds; `test`: the same as a function."""
    return ReadWhen(keys, keys_in(condition), test or when(condition), reason)


@cache
def expand(patterns: str) -> tuple[str, ...]:
    """Return the keys of the schema that match patterns; ValueError for a pattern that matches none."""
    keys = {name: [key for key in dotted_keys.all_keys() if fnmatchcase(key, name)] for name in patterns.split()}
    if not all(keys.values()):
        raise ValueError(f"a pattern matches no key: {patterns}")
    return tuple(chain.from_iterable(keys.values()))


READ_WHEN: tuple[ReadWhen, ...] = (
    *(_read_when(*row) for row in _TABLES["read_when"]),
    # engine.py, zero_allgather_partitions, and stage3.py, offload_optimizer_fast_init: nothing asks for either.
    _read_when(
        "zero.allgather_partitions zero.offload_optimizer.fast_init",
        "",
        "DeepSpeed 0.19.8 does not read it",
        lambda c: False,
    ),
    *(
        _read_when(
            f"optim.{name}",
            f"optim.name={'|'.join(key.value for key, traits in OPTIMIZERS.items() if name in traits.reads)}",
        )
        for name in SOMETIMES_READ
    ),
    _read_when(
        "track.patience_s", " or ".join(f"track.{name}.enabled" for name in schema.TRACKERS), "no tracker is enabled"
    ),
    *(
        _read_when(f"track.{name}.*", f"track.{name}.enabled") for name in schema.TRACKERS if name != "csv"
    ),  # no other keys
    _read_when("model.revision", "model.path", "model.path is a directory", lambda c: files.is_hub_name(c.model.path)),
    _read_when(
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
            or c.run.name != c.run.name.strip()
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
"""Rules about single values, in addition to the bounds at their fields."""
BOUNDS: dict[str, str] = _TABLES["bounds"]
"""Kinds of bounds of a field -> the sentence about a number beyond them."""
UNUSUAL: dict[str, float] = _TABLES["unusual"]
"""Key -> the largest usual value."""
PARALLEL = ("parallel.tensor", "parallel.sequence", "parallel.pipeline")

INCOMPATIBLE: tuple[Rule, ...] = (
    Rule(
        "schedule.decay_steps",
        lambda c: (
            c.schedule.name.value == "wsd" and 0 < c.train.max_steps < c.schedule.warmup_steps + c.schedule.decay_steps
        ),
        "schedule.warmup_steps = {schedule.warmup_steps} and schedule.decay_steps = {value} are more together than "
        "train.max_steps = {train.max_steps}.",
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
    Rule(
        "distill.rollouts.url",
        lambda c: c.distill.rollouts.url and not re.fullmatch(r"https?://[^@\s]+", c.distill.rollouts.url),
        "distill.rollouts.url must begin with http:// or https:// and hold no user. Put a token into ROLLOUTS_API_KEY.",
    ),
    *_rules_of("incompatible"),
    *_rules(
        {
            # Each rank draws its own noise, so ranks that share sequences would disagree about it.
            **{
                f"train.neftune_alpha {key}>1": f"train.neftune_alpha cannot be used with {key} = {{{key}}}: each rank "
                "draws its own noise, and these ranks share rows. Set train.neftune_alpha=0."
                for key in PARALLEL
            },
            **{
                f"!track.{name}.{key} track.{name}.enabled": "{key} must not be empty."
                for name in schema.TRACKERS
                for key in ("project", "experiment")
                if hasattr(getattr(schema.TrackConfig(), name), key)
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
        "model.trust_remote_code = true and model.path = {model.path}, which is not a directory here but a name on "
        "Hugging Face, needs the commit that you have read: model.revision=COMMIT, all 40 digits.",
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
"""Settings that a program with a custom model cannot use."""
_CUSTOM_MODELS_READ = "data.num_workers evaluate.every evaluate.at_start evaluate.keep_best"
READ_BY_LANGUAGE_MODELS = _read_when(
    " ".join(
        key
        for key in expand(
            "model.* tuning.* data.* preference.* task.* distill.* prepare.* kernels.* evaluate.* export.* "
            "train.activation_checkpointing.* train.neftune_alpha"
        )
        if key not in _CUSTOM_MODELS_READ.split()
    ),
    "",
    "the program brings its own model, data and loss",
    lambda c: False,
)
READ_WITH_VALIDATION = _read_when(
    "evaluate.every evaluate.at_start evaluate.keep_best", "", "the program gives no validation=", lambda c: False
)


class Requirement(NamedTuple):
    """A setting that requires others."""

    key: str
    is_on: Test
    needs: dict[str, Test]
    """Override, one of the {words} of the sentence -> the test that the config has what it would set."""
    sentence: str


_CANNOT_STAY = "{key} = {value} cannot be with the other settings; docs/zero.md says why. Add {words}, or leave it out."


def _requirement(
    when_on: str, needs: Mapping[str, str], shared: Mapping[str, str] | None = None, sentence: str = _CANNOT_STAY
) -> Requirement:
    """Return the requirement of a row of rules.yaml: of the setting that is the first key of the condition `when_on`.
    `needs` and `shared`: override -> the condition that has it met, "" for the override itself.
    """
    tests = {override: when(condition or override) for override, condition in {**needs, **(shared or {})}.items()}
    return Requirement(keys_in(when_on)[0], when(when_on), tests, sentence)


REQUIRES: tuple[Requirement, ...] = tuple(_requirement(**row) for row in _TABLES["requires"])
"""What ZeRO++, ZenFlow, SuperOffload and DeepCompile (docs/zero.md), and restarts, need of other settings."""
UNTESTED = ("parallel.pipeline>1", "zero.zenflow.enabled", "zero.offload_optimizer.super_offload")
"""Conditions untested with parameter groups, and with other optimizers than DeepSpeed's and PyTorch's."""
UNTESTED_WITH_MUON = ("parallel.tensor>1", "parallel.sequence>1", "zero.zero_hpz_partition_size>1")
"""Conditions untested with Muon."""
