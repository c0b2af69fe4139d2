"""Applies the tables of rule_tables.py, and the rules that compute. Each message says both values and the mend."""

import math
import operator
import re
from collections.abc import Iterable, Iterator
from typing import Any

from toolkit.config import rule_tables as tables
from toolkit.config.load import JSON, LoadedConfig, to_plain
from toolkit.config.mesh import accumulation, check_split, mesh_of, model_ranks, nearest_multiples, with_micro_batch
from toolkit.config.preflight import CUSTOM_FILES, FILES, HERE, check_tuning_here
from toolkit.config.rule_tables import ReadWhen, Rule
from toolkit.config.schema import (
    AUTO,
    EVAL_LOSS,
    INTERFACES,
    Init,
    Metric,
    OptimizerName,
    RunConfig,
    SourceConfig,
    TuningMethod,
    as_text,
    bounds,
    get_value,
)
from toolkit.errors import ConfigError
from toolkit.messages import did_you_mean, filled, joined, tr
from toolkit.problems import Problems, raise_all
from toolkit.secrets import is_under_secret_name


def check_rules(
    loaded: LoadedConfig,
    world_size: int | None = None,
    *,
    files: bool = True,
    custom: bool = False,
    problems: Problems | None = None,
) -> None:
    """Apply every rule.

    Args:
        loaded: the config and where its values come from; receives notices.
        world_size: number of ranks; None leaves out the rules that need it.
        files: whether files, directories and devices that the config names must exist here; False for a config that is
            only exported for another machine.
        custom: whether a program trains a custom model and dataset with it.
        problems: errors found before, and where those found here are added; None raises them.

    Raises:
        ConfigError: every rule that does not hold, in one message.
    """
    found = Problems() if problems is None else problems
    found.settle()
    found.apply((_check_bounds,), loaded)
    found.apply((_check_table,), loaded, tables.RANGES)
    found.settle()
    if custom:
        found.apply((_check_table,), loaded, tables.INCOMPATIBLE_WITH_CUSTOM_MODELS)
    found.apply((_check_both_given, _check_restarts), loaded)
    found.apply((_check_table,), loaded, tables.INCOMPATIBLE)
    found.apply((_check_world_sizes, _check_weights, _check_random_ltd, _check_shape), loaded)
    found.apply((_check_requirements, _check_untested, _check_variables), loaded)
    if not custom:
        found.apply((_check_keep_best,), loaded)
        found.apply((_check_table,), loaded, tables.INCOMPATIBLE_OF_MODELS)
    found.apply(
        (check_unused_keys,),
        loaded,
        (tables.READ_BY_LANGUAGE_MODELS, *tables.READ_WHEN) if custom else tables.READ_WHEN,
    )
    found.attempt(_check_batch, loaded, world_size or model_ranks(loaded.cfg))
    if world_size is not None:
        found.apply((_check_ranks,), loaded, world_size)
    if files:
        found.apply((*CUSTOM_FILES, *HERE) if custom else (*FILES, *HERE, check_tuning_here), loaded)
    if problems is None:
        found.raise_all()


def check_without_validation(loaded: LoadedConfig) -> None:
    """Raise an error about each setting of evaluations that was changed in a program without validation data."""
    raise_all(check_unused_keys(loaded, [tables.READ_WITH_VALIDATION]))


def _check_table(loaded: LoadedConfig, rules: Iterable[Rule]) -> Iterator[ConfigError]:
    """Yield an error for each rule of a table that is broken."""
    for rule in rules:
        if rule.broken(loaded.cfg):
            yield loaded.error(rule.key, _sentence(loaded.cfg, rule))


def _sentence(cfg: RunConfig, rule: Rule) -> str:
    def value_of(name: str) -> str:
        if name == "reason":
            return filled(rule.reason, value_of)
        return rule.key if name == "key" else _written(get_value(cfg, rule.key if name == "value" else name), ", ")

    return filled(rule.sentence, value_of)


def check_unused_keys(loaded: LoadedConfig, table: Iterable[ReadWhen]) -> Iterator[ConfigError]:
    """Yield an error for every key that was changed but is not read in this configuration.

    It is an error where the same layer made it so, or a higher one set the key: a recipe or a command line that
    contradicts itself. Where a higher layer switched off what reads it, as `precision=bf16` does over a recipe with
    fp16's keys, it is a notice in `loaded`.
    """
    cfg, default, seen = loaded.cfg, RunConfig(), set[str]()
    for row in table:
        owners = row.owners.split()
        unread = set() if row.is_read(cfg) else {*tables.expand(row.keys)} & loaded.where.keys() - {*owners, *seen}
        for key in sorted(unread):
            layer, value = loaded.layers.get(key, 0), get_value(cfg, key)
            # What DeepSpeed's JSON names without effect its import has listed; DeepSpeed ignores it too.
            if layer == JSON or value == get_value(default, key):
                continue
            seen.add(key)
            reason = (
                filled(row.reason, lambda name: _written(get_value(cfg, name)))
                if row.reason
                else tr("{key} is {value}", key=owners[0], value=_written(get_value(cfg, owners[0])))
            )
            if any(loaded.layer_of(owner) > layer for owner in owners):
                sentence = tr(
                    "{key} = {value} has no effect here: {reason}.", key=key, value=_written(value), reason=reason
                )
                loaded.notices.append(loaded.position(key) + sentence)
            else:
                sentence = tr(
                    "{key} = {value} has no effect: {reason}. Remove it, or set {key}={default}.",
                    key=key,
                    value=_written(value),
                    reason=reason,
                    default=_written(get_value(default, key)),
                )
                yield loaded.error(key, sentence)


def _written(value: object, comma: str = ",") -> str:
    """Return a value as one writes it on the command line."""
    if isinstance(value, list):
        return f"[{comma.join(_written(item) for item in value)}]"
    return as_text(to_plain(value)) or '""'


def _check_bounds(loaded: LoadedConfig) -> Iterator[ConfigError]:
    """Yield each number that is out of the bounds at its field."""
    for key, limits in bounds().items():
        value: Any = get_value(loaded.cfg, key)
        if not isinstance(value, (int, float)) or _is_within(value, limits):
            continue
        least = getattr(limits[0], "ge", 0)
        sentences = {
            "Ge": tr("{key} = {value} must be at least {least}.", key=key, value=value, least=least),
            "Ge Lt": tr("{key} = {value} must be from 0 to below 1.", key=key, value=value),
            "Ge Le": tr("{key} = {value} must be from 0 to 1.", key=key, value=value),
            "Gt": tr("{key} = {value} must be above 0.", key=key, value=value),
            "Gt Lt": tr("{key} = {value} must be above 0 and below 1.", key=key, value=value),
            "Gt Le": tr("{key} = {value} must be above 0 and at most 1.", key=key, value=value),
        }
        yield loaded.error(key, sentences[" ".join(type(limit).__name__ for limit in limits)])


def _is_within(value: float, limits: Iterable[Any]) -> bool:
    tests = {"ge": operator.ge, "gt": operator.gt, "le": operator.le, "lt": operator.lt}
    holds = (
        test(value, getattr(limit, name)) for limit in limits for name, test in tests.items() if hasattr(limit, name)
    )
    return all(holds) and value < math.inf


def _check_batch(loaded: LoadedConfig, world_size: int) -> None:
    accumulation(with_micro_batch(loaded.cfg), world_size, loaded.position("batch.global_size"))


def _check_both_given(loaded: LoadedConfig) -> Iterator[ConfigError]:
    """Two keys for one thing, from one file or the command line, contradict each other; else one overrides."""

    def are_from_one_place(*keys: str) -> bool:
        return len({loaded.where.get(key, "").split(":")[0] for key in keys}) == 1

    train, schedule = loaded.cfg.train, loaded.cfg.schedule
    length = ("train.max_steps", "train.epochs")
    if train.max_steps and train.epochs != 1 and loaded.explicit >= set(length) and are_from_one_place(*length):
        yield loaded.error(
            "train.max_steps",
            "train.max_steps = {steps} and train.epochs = {epochs} are both given: keep one of them.",
            steps=train.max_steps,
            epochs=train.epochs,
        )
    if schedule.warmup_steps and schedule.warmup_ratio:
        sentence = tr(
            "schedule.warmup_steps = {steps} and schedule.warmup_ratio = {ratio} are both given: keep one of them.",
            steps=schedule.warmup_steps,
            ratio=schedule.warmup_ratio,
        )
        is_one = are_from_one_place("schedule.warmup_steps", "schedule.warmup_ratio")
        yield loaded.error("schedule.warmup_steps", joined(sentence, "" if is_one else tr("Set the other to 0.")))


def _check_restarts(loaded: LoadedConfig) -> Iterator[ConfigError]:
    """A restarted run has to resume: it may neither start over nor be rejected."""
    cfg = loaded.cfg
    wanted = {
        "run.name=NAME": cfg.run.name,
        "checkpoint.every=100": cfg.checkpoint.every,
        "resume=auto": cfg.resume in ("auto", "must"),
    }
    missing = [override for override, is_given in wanted.items() if not is_given]
    if cfg.run.max_restarts and missing:
        yield loaded.error(
            "run.max_restarts",
            "run.max_restarts = {most} needs a run that can go on from its checkpoints. Add {words}.",
            most=cfg.run.max_restarts,
            words=" ".join(missing),
        )


def _check_world_sizes(loaded: LoadedConfig) -> Iterator[ConfigError]:
    """Reject a global batch that one of `batch.world_sizes` cannot divide evenly; say which ones all of them can."""
    cfg, key = loaded.cfg, "batch.world_sizes"
    sizes, size = cfg.batch.world_sizes, cfg.batch.global_size
    if any(ranks < 1 for ranks in sizes):
        yield loaded.error(key, "{key} = {value} must hold numbers of at least 1.", key=key, value=sizes)
        return
    micro = 1 if cfg.batch.micro_per_gpu == AUTO else int(cfg.batch.micro_per_gpu)
    try:
        unit = micro * math.lcm(*(mesh_of(cfg, ranks).data_ranks for ranks in sizes))
    except ConfigError as error:
        yield loaded.error(key, str(error))
        return
    if cfg.parallel.tensor > 1 and len(set(sizes)) > 1:
        yield loaded.error(
            key,
            "{key} = {value}: with parallel.tensor = {tensor} a run goes on on as many ranks as it was saved by "
            "only. Take it out.",
            key=key,
            value=sizes,
            tensor=cfg.parallel.tensor,
        )
    if not sizes or size % unit == 0:
        return
    yield loaded.error(
        "batch.global_size",
        joined(
            tr(
                "batch.global_size = {size} cannot be divided on each of batch.world_sizes = {ranks}: with "
                "batch.micro_per_gpu = {micro} it must be a multiple of {unit}.",
                size=size,
                ranks=sizes,
                micro=cfg.batch.micro_per_gpu,
                unit=unit,
            ),
            nearest_multiples(size, unit),
        ),
    )


def _check_weights(loaded: LoadedConfig) -> Iterator[ConfigError]:
    """Weights that change: points in their order, something to mix, and always a source to take rows from."""
    sources = loaded.cfg.data.sources
    if not any(source.weights for source in sources):
        return
    key = "data.sources"
    if len(sources) < 2:
        yield loaded.error(key, tr("weights of the only source have no effect: there is nothing to mix it with."))
        return
    if loaded.cfg.data.curriculum.steps:
        yield loaded.error(
            "data.curriculum.steps",
            tr(
                "data.curriculum and weights of a source that change both decide which rows come when: keep one of "
                "them."
            ),
        )
    wrong = [error for number, source in enumerate(sources) for error in _wrong_weights(loaded, number, source)]
    yield from wrong
    times = sorted({0.0, 1.0, *(point.at for source in sources for point in source.weights)})
    empty = [] if wrong else [time for time in times if not any(source.weight_at(time) for source in sources)]
    if empty:
        places = ", ".join(map(str, empty))
        yield loaded.error(key, "no source has a weight above 0 at {place} of the run.", place=places)


def _wrong_weights(loaded: LoadedConfig, number: int, source: SourceConfig) -> Iterator[ConfigError]:
    key, places = "data.sources", [point.at for point in source.weights]
    if source.weights and source.weight != 1:
        yield loaded.error(
            key,
            "data.sources[{number}]: weight and weights are both given: keep one of them.",
            number=number,
        )
    if any(not 0 <= place <= 1 for place in places) or places != sorted(set(places)):
        yield loaded.error(
            key,
            "data.sources[{number}].weights: the points {places} must rise from 0, the beginning of the run, "
            "to at most 1, its end.",
            number=number,
            places=places,
        )
    if any(not 0 <= weight < math.inf for weight in [source.weight, *(point.weight for point in source.weights)]):
        yield loaded.error(key, "data.sources[{number}]: a weight must be a number of at least 0.", number=number)


def _check_random_ltd(loaded: LoadedConfig) -> Iterator[ConfigError]:
    """Tokens can be dropped where layers are transformers' own, whole, and called as they are."""
    cfg, key = loaded.cfg, "train.random_ltd.steps"
    parallel = cfg.parallel
    if not cfg.train.random_ltd.steps:
        return
    tuning = f"tuning.method = {cfg.tuning.method.value}"
    reasons = {
        tuning: cfg.tuning.method not in (TuningMethod.full, TuningMethod.freeze),
        f"parallel.tensor = {parallel.tensor}": parallel.tensor > 1,
        f"parallel.sequence = {parallel.sequence}": parallel.sequence > 1,
        f"parallel.pipeline = {parallel.pipeline}": parallel.pipeline > 1,
        "compile.enabled = true": cfg.compile.enabled,
    }
    if any(reasons.values()):
        yield loaded.error(
            key,
            "train.random_ltd cannot be used with {setting}: it works where all or some layers are trained "
            "(tuning=full or freeze), each whole on its rank and not compiled. Set train.random_ltd.steps=0.",
            setting=", ".join(setting for setting, is_so in reasons.items() if is_so),
        )


def _check_shape(loaded: LoadedConfig) -> Iterator[ConfigError]:
    """The sizes of a random model must divide over `parallel.tensor`."""
    shape, size = loaded.cfg.model.shape, loaded.cfg.parallel.tensor
    sizes = {"heads": shape.num_heads, "key_heads": shape.num_kv_heads, "inner": shape.intermediate_size}
    try:
        check_split(sizes, size if loaded.cfg.model.init is Init.random else 1)
    except ConfigError as error:
        yield loaded.error("parallel.tensor", str(error))


def _check_requirements(loaded: LoadedConfig) -> Iterator[ConfigError]:
    """What ZeRO++, ZenFlow, SuperOffload and DeepCompile need of the others; all work in data parallelism only."""
    cfg = loaded.cfg
    for key, (is_on, wanted) in tables.REQUIRES.items():
        missing = [override for override, is_so in wanted.items() if not is_so(cfg)]
        missing += [f"{parallel}=1" for parallel in tables.PARALLEL if get_value(cfg, parallel) != 1]
        if is_on(cfg) and missing:
            yield loaded.error(
                key,
                "{key} = {value} cannot be with the other settings; docs/zero.md says why. Add {words}, or leave "
                "it out.",
                key=key,
                value=_written(get_value(cfg, key)),
                words=" ".join(missing),
            )


def _check_untested(loaded: LoadedConfig) -> Iterator[ConfigError]:
    """What has not been tried together, and would go wrong in silence if it did."""
    cfg = loaded.cfg
    changed = [key for key in tables.GROUPING if get_value(cfg, key) != get_value(RunConfig(), key)]
    is_muon = cfg.optim.name is OptimizerName.muon
    if not (changed or is_muon or cfg.optim.name is OptimizerName.adamw_8bit):
        return
    key = changed[0] if changed else "optim.name"
    for other, is_on in (tables.UNTESTED | (tables.UNTESTED_WITH_MUON if is_muon else {})).items():
        if is_on(cfg):
            yield loaded.error(
                key,
                "{key} = {value} and {other} = {theirs} do not go together: untested. Leave one of them out.",
                key=key,
                value=_written(get_value(cfg, key)),
                other=other,
                theirs=_written(get_value(cfg, other)),
            )


_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OWNED = re.compile(
    r"RANK|(?:LOCAL|GROUP|ROLE|CROSS)_RANK|(?:|LOCAL_|GROUP_|ROLE_|CROSS_)WORLD_SIZE|LOCAL_SIZE|CROSS_SIZE|MASTER_(?:ADDR|PORT)"
    r"|\w+_VISIBLE_DEVICES|ZE_AFFINITY_MASK|(?:OMPI_COMM_WORLD|PMI|PMIX|MPI|SLURM|TORCHELASTIC)_\w+"
    r"|(?:PYTHON|LC)_TOOLKIT_\w+"
)
"""What says which rank a process is, and on which GPU: launchers set it for each one, and we."""
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def _check_variables(loaded: LoadedConfig) -> Iterator[ConfigError]:
    """Reject variables that cannot be set, that launchers own, and secrets."""
    for name, value in loaded.cfg.launch.env.items():
        if reason := _reason(name, value, loaded.cfg.distributed.interface):
            yield loaded.error(f"launch.env.{name}", f"launch.env.{name}: {reason}")


def _reason(name: str, value: Any, interface: str) -> str:
    """Return why a variable is rejected, "" if it is not; never with its value, which may be a secret."""
    if not _NAME.fullmatch(name):
        return tr("this is no name of a variable: letters, digits and _ only, and no digit in front.")
    if _OWNED.fullmatch(name):
        return tr("the launcher sets this variable for each rank. Remove it.")
    if name in INTERFACES and interface:
        return tr("distributed.interface = {interface} sets this variable. Keep one of the two.", interface=interface)
    if isinstance(value, (dict, list)):
        return tr("write a text, a number, true or false, or nothing behind the name.")
    if value is not None and is_under_secret_name(name, as_text(value)):
        return tr(
            "a secret has no place in a recipe. Write `{name}:` without a value (null), and set the variable where you "
            "type the command.",
            name=name,
        )
    if value is not None and _CONTROL.search(as_text(value)):
        return tr("the value holds control characters, such as a line break or a tab.")
    return ""


def _check_keep_best(loaded: LoadedConfig) -> Iterator[ConfigError]:
    """The best checkpoint can be chosen by what is measured only, and only where more or less of it is better."""
    evaluate = loaded.cfg.evaluate
    known = [EVAL_LOSS, *(f"eval_{metric.value}" for metric in evaluate.metrics if metric is not Metric.length)]
    name = evaluate.keep_best
    if not name or name in known:
        return
    key = "evaluate.keep_best"
    could_be = name in {f"eval_{metric.value}" for metric in Metric if metric is not Metric.length}
    yield loaded.error(
        key,
        joined(
            tr("{key} = {value} is none of {known}.", key=key, value=name, known=", ".join(known)),
            tr("Add it to evaluate.metrics.") if could_be else did_you_mean(name, known),
        ),
    )


def _check_ranks(loaded: LoadedConfig, world_size: int) -> Iterator[ConfigError]:
    """Apply the rules that need the number of ranks."""
    cfg = loaded.cfg
    key, size = "zero.zero_hpz_partition_size", cfg.zero.zero_hpz_partition_size
    if world_size % size:
        yield loaded.error(
            key,
            "{key} = {value} must divide the {ranks} ranks of the run.",
            key=key,
            value=size,
            ranks=world_size,
        )
    batch = cfg.batch
    is_known = batch.micro_per_gpu != AUTO
    ranks = mesh_of(cfg, world_size).data_ranks
    if cfg.zero.zenflow.enabled and is_known and batch.global_size != batch.micro_per_gpu * ranks:
        yield loaded.error(
            "zero.zenflow.enabled",
            "zero.zenflow.enabled = true makes an update of every micro-batch, so a step has to have one: "
            "batch.global_size = {size} must be batch.micro_per_gpu ({micro}) x {ranks} ranks. Leave more steps "
            "together with zero.zenflow.update_interval.",
            size=batch.global_size,
            micro=batch.micro_per_gpu,
            ranks=ranks,
        )
