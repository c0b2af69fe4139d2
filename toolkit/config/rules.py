"""Checks a config by the tables of rule_tables.py and by functions. Messages give both values and a fix."""

import math
import operator
import re
from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta
from itertools import accumulate
from typing import Any

from toolkit.config import dotted_keys, mesh, objective, paths, requirements, rule_tables, schema
from toolkit.config.load import JSON, LoadedConfig, as_typed
from toolkit.messages import ConfigError, Problems, did_you_mean, raise_all, tr
from toolkit.secrets import is_under_secret_name


def check_rules(
    loaded: LoadedConfig,
    world_size: int | None = None,
    *,
    files: bool = True,
    devices: bool = True,
    custom: bool = False,
    problems: Problems | None = None,
) -> None:
    """Apply every rule. Errors are added to `problems`, or without it raised as one ConfigError; notices to `loaded`.

    `world_size`: number of ranks, None skips rules that need it; `files`: check what this machine has, not for a config
    that is exported for another one; `devices`: check its devices too, not for a config that is checked for other GPUs;
    `custom`: for a program that trains a custom model on its own dataset.
    """
    all_problems = Problems() if problems is None else problems
    all_problems.settle()  # rules skip keys that are wrong already; and below, those that are out of their bounds
    all_problems.apply((_check_bounds,), loaded)
    all_problems.apply((_check_table,), loaded, rule_tables.RANGES)
    all_problems.settle()
    _report_unusual(loaded)
    if custom:
        all_problems.apply((_check_table,), loaded, rule_tables.INCOMPATIBLE_WITH_CUSTOM_MODELS)
    all_problems.apply((_check_both_given,), loaded)
    all_problems.apply((_check_table,), loaded, rule_tables.INCOMPATIBLE)
    all_problems.apply((_check_world_sizes, _check_weights, _check_requirements, _check_untested), loaded)
    all_problems.apply((_check_variables, _check_deadline), loaded)
    if not custom:
        all_problems.apply((_check_keep_best, _check_shape, _check_formats, _check_general), loaded)
        all_problems.apply((_check_table,), loaded, rule_tables.INCOMPATIBLE_OF_MODELS)
    read_by_models = (rule_tables.READ_BY_LANGUAGE_MODELS,) if custom else ()
    all_problems.apply((check_unused_keys,), loaded, (*read_by_models, *rule_tables.READ_WHEN))
    ranks, position = world_size or mesh.model_ranks(loaded.cfg), loaded.position("batch.global_size")
    all_problems.attempt(mesh.accumulation, mesh.with_micro_batch(loaded.cfg), ranks, position)
    if world_size is not None:
        all_problems.apply((_check_ranks,), loaded, world_size)
    if files:
        all_problems.apply(paths.CUSTOM_FILES if custom else (*paths.FILES, *requirements.RULES), loaded)
        if devices:
            all_problems.apply((requirements.check_devices,), loaded)
    if problems is None:
        all_problems.raise_all()


def check_without_validation(loaded: LoadedConfig) -> None:
    """Raise ConfigError if a custom program without validation data has changed settings of evaluations."""
    raise_all(check_unused_keys(loaded, [rule_tables.READ_WITH_VALIDATION]))


def _check_table(loaded: LoadedConfig, rules: Iterable[rule_tables.Rule]) -> Iterator[ConfigError]:
    """Yield an error for each broken rule of a table."""
    for rule in rules:
        if rule.broken(loaded.cfg):
            reason = loaded.fill(rule.key, rule.reason)
            yield loaded.about(rule.key, loaded.fill(rule.key, rule.sentence, reason=reason))


def check_unused_keys(loaded: LoadedConfig, table: Iterable[rule_tables.ReadWhen]) -> Iterator[ConfigError]:
    """Yield an error for each key that is set to another value than its default but that nothing reads in this
    configuration, as a recipe or a command line contradicts itself; only a notice in `loaded` if `_is_overruled`.
    """
    default, reported = schema.RunConfig(), set[str]()
    for row in table:
        if row.is_read(loaded.cfg):
            continue
        for key in sorted(row.settings & loaded.where.keys() - reported):
            value, default_value = (dotted_keys.get_value(cfg, key) for cfg in (loaded.cfg, default))
            # The import of a DeepSpeed JSON has noted its keys without effect already.
            if value == default_value or loaded.layers.get(key, 0) == JSON:
                continue
            reported.add(key)
            reason = loaded.fill(row.owners[0] if row.owners else key, row.reason)
            shown = as_typed(value)
            if _is_overruled(loaded, key, row.owners):
                sentence = tr("{key} = {value} has no effect here: {reason}.", key=key, value=shown, reason=reason)
                loaded.notices.append(loaded.position(key) + sentence)
            else:
                yield loaded.error(
                    key,
                    "{key} = {value} has no effect: {reason}. Remove it, or set {key}={default}.",
                    value=shown,
                    reason=reason,
                    default=as_typed(default_value),
                )


def _is_overruled(loaded: LoadedConfig, key: str, owners: Iterable[str]) -> bool:
    """Whether a key that nothing reads is no mistake: a run's config.yaml set it, which lists all keys, or a higher
    layer set one of the keys that decide whether it is read (`owners`), such as precision=bf16 on the command line for
    a recipe with fp16's keys.
    """
    layer = loaded.layers.get(key, 0)  # 0: conf/ or a run's config.yaml
    # Of zero.stage the key zero.stage, and zero, a group whose choice sets that key.
    deciding = [name for owner in owners for name in accumulate(owner.split("."), "{}.{}".format)]
    return layer == 0 or any(loaded.layers.get(name, 0) > layer for name in deciding)


def _check_bounds(loaded: LoadedConfig) -> Iterator[ConfigError]:
    """Yield an error for each number outside of the bounds that its field in the schema declares."""
    tests = {"ge": operator.ge, "gt": operator.gt, "le": operator.le, "lt": operator.lt}
    for key, limits in dotted_keys.bounds().items():
        value: Any = dotted_keys.get_value(loaded.cfg, key)
        if not isinstance(value, (int, float)):  # auto
            continue
        # Such as [("ge", 0), ("lt", 1)], the lower bound first.
        ends = [(name, getattr(limit, name)) for limit in limits for name in tests if hasattr(limit, name)]
        if not (value < math.inf and all(tests[name](value, end) for name, end in ends)):
            sentence = rule_tables.BOUNDS[" ".join(name for name, _ in ends)]
            yield loaded.about(key, loaded.fill(key, sentence, least=ends[0][1], most=ends[-1][1]))


def _report_unusual(loaded: LoadedConfig) -> None:
    """Add a notice for each number that is more likely a slip than meant."""
    for key, most in rule_tables.UNUSUAL.items():
        value: Any = dotted_keys.get_value(loaded.cfg, key)
        if value > most:
            sentence = tr("{key} = {value} is unusual: above {most:g}. Is it meant?", key=key, value=value, most=most)
            loaded.notices.append(loaded.position(key) + sentence)


def _check_both_given(loaded: LoadedConfig) -> Iterator[ConfigError]:
    """Yield an error for two lengths of the run, or of the warm-up, if one place sets both; else the later one counts.
    A place is a file or the command line.
    """

    def are_from_one_place(*keys: str) -> bool:
        return len({loaded.where.get(key, "").split(":")[0] for key in keys}) == 1

    train, schedule = loaded.cfg.train, loaded.cfg.schedule
    length = ("train.max_steps", "train.epochs")
    if train.max_steps and train.epochs != 1 and loaded.explicit >= set(length) and are_from_one_place(*length):
        yield loaded.error(
            length[0],
            "train.max_steps = {train.max_steps} and train.epochs = {train.epochs} are both given: keep one of them.",
        )
    if schedule.warmup_steps and schedule.warmup_ratio:
        yield loaded.error(
            "schedule.warmup_steps",
            "schedule.warmup_steps = {schedule.warmup_steps} and schedule.warmup_ratio = {schedule.warmup_ratio} are "
            "both given: keep one of them.",
        )


def _check_world_sizes(loaded: LoadedConfig) -> Iterator[ConfigError]:
    """Yield an error for a global batch that one of `batch.world_sizes` cannot divide; it names those that all can."""
    cfg, key = loaded.cfg, "batch.world_sizes"
    sizes, size = cfg.batch.world_sizes, cfg.batch.global_size
    if any(ranks < 1 for ranks in sizes):
        yield loaded.error(key, "{key} = {value} must hold numbers of at least 1.")
        return
    micro = 1 if cfg.batch.micro_per_gpu == schema.AUTO else int(cfg.batch.micro_per_gpu)
    try:
        unit = micro * math.lcm(*(mesh.mesh_of(cfg, ranks).data_ranks for ranks in sizes))
    except ConfigError as error:
        yield loaded.about(key, str(error))
        return
    if sizes and size % unit:
        yield loaded.error(
            "batch.global_size",
            "batch.global_size = {value} cannot be divided on each of batch.world_sizes = {batch.world_sizes}: with "
            "batch.micro_per_gpu = {batch.micro_per_gpu} it must be a multiple of {unit}. {multiples}",
            unit=unit,
            multiples=mesh.nearest_multiples(size, unit),
        )


def _check_weights(loaded: LoadedConfig) -> Iterator[ConfigError]:
    """Yield an error for weights of sources that have no effect, are out of order or negative, or leave no source to
    take rows from.
    """
    for number, source in enumerate(loaded.cfg.data.validation):
        changed = [name for name in ("weight", "weights") if getattr(source, name) != getattr(_DEFAULT_SOURCE, name)]
        for name in changed:
            yield loaded.error(
                "data.validation",
                "data.validation[{number}].{name} has no effect: each validation sample is used once. Remove it.",
                number=number,
                name=name,
            )
    sources, key = loaded.cfg.data.sources, "data.sources"
    wrong = [error for number, source in enumerate(sources) for error in _wrong_weights(loaded, number, source)]
    yield from wrong
    if not any(source.weights for source in sources):
        return
    if len(sources) < 2:
        yield loaded.error(key, "weights of the only source have no effect: there is nothing to mix it with.")
        return
    if loaded.cfg.data.curriculum.steps:
        yield loaded.error(
            "data.curriculum.steps",
            "data.curriculum and weights of a source that change both decide which rows come when: keep one of them.",
        )
    times = sorted({0.0, 1.0, *(point.at for source in sources for point in source.weights)})
    empty = [str(time) for time in times if not any(source.weight_at(time) for source in sources)]
    if empty and not wrong:
        yield loaded.error(key, "no source has a weight above 0 at {place} of the run.", place=", ".join(empty))


_DEFAULT_SOURCE = schema.SourceConfig()


def _wrong_weights(loaded: LoadedConfig, number: int, source: schema.SourceConfig) -> Iterator[ConfigError]:
    """Yield an error for each mistake in the weights of training source `number`."""
    key, points = "data.sources", [point.at for point in source.weights]
    if source.weights and source.weight != 1:
        yield loaded.error(
            key, "data.sources[{number}]: weight and weights are both given: keep one of them.", number=number
        )
    if points != sorted({at for at in points if 0 <= at <= 1}):  # not in order, twice (a set has it once), or outside
        yield loaded.error(
            key,
            "data.sources[{number}].weights: the points {points} must rise from 0, the beginning of the run, to at "
            "most 1, its end.",
            number=number,
            points=points,
        )
    if not 0 < source.weight < math.inf:
        yield loaded.error(
            key,
            "{place}.weight = {weight} must be above 0; remove the source instead.",
            place=f"data.sources[{number}]",
            weight=source.weight,
        )
    if any(not 0 <= point.weight < math.inf for point in source.weights):
        yield loaded.error(key, "data.sources[{number}]: a weight must be a number of at least 0.", number=number)


def _check_shape(loaded: LoadedConfig) -> Iterator[ConfigError]:
    """Yield an error if the sizes of a random model do not fit each other, or do not divide over `parallel.tensor`."""
    shape, size = loaded.cfg.model.shape, loaded.cfg.parallel.tensor
    if loaded.cfg.model.init is not schema.Init.random:
        return
    if shape.hidden_size % shape.num_heads or shape.num_heads % shape.num_kv_heads:
        yield loaded.error(
            "model.shape.num_heads",
            "model.shape: hidden_size {model.shape.hidden_size} must be a multiple of num_heads {value}, and that "
            "of num_kv_heads {model.shape.num_kv_heads}.",
        )
    elif shape.hidden_size // shape.num_heads % 4:
        yield loaded.error(
            "model.shape.num_heads",
            "model.shape: hidden_size {model.shape.hidden_size} / num_heads {value} = {size} must be a multiple "
            "of 4, because half of a head is rotated in pairs.",
            size=shape.hidden_size // shape.num_heads,
        )
    if size == 1:
        return
    from toolkit.config.tensor_split import check_split

    sizes = {"heads": shape.num_heads, "key_heads": shape.num_kv_heads, "inner": shape.intermediate_size}
    try:
        check_split(sizes, size)
    except ConfigError as error:
        yield loaded.about("parallel.tensor", str(error))


def _check_formats(loaded: LoadedConfig) -> Iterator[ConfigError]:
    """Yield an error for each source whose format the task, or the preference loss, does not read."""
    data, preference, wanted = loaded.cfg.data, loaded.cfg.preference, objective.wanted_format(loaded.cfg)
    of_pairs = (schema.RowFormat.preference, schema.RowFormat.labeled)
    of_scores = (schema.RowFormat.reward, schema.RowFormat.classify, schema.RowFormat.embed)
    for key, sources in (("data.sources", data.sources), ("data.validation", data.validation)):
        for number, source in enumerate(sources):
            is_read = source.format is wanted if wanted else source.format not in of_pairs + of_scores
            if is_read:
                continue
            location, row_format = f"{key}[{number}].format", source.format.value
            if wanted and not preference.is_on:
                sentence = tr(
                    "{place} = {format} is not the format that task={kind} reads ({wanted}). Leave the format out.",
                    place=location,
                    format=row_format,
                    kind=loaded.cfg.task.kind.value,
                    wanted=wanted.value,
                )
            elif preference.is_on:
                sentence = tr(
                    "{place} = {format} is not the format that preference.loss = {loss} reads ({wanted}). Leave the "
                    "format out, or use preference=none.",
                    place=location,
                    format=row_format,
                    loss=preference.loss.value,
                    wanted=preference.row_format.value,
                )
            elif source.format in of_scores:
                sentence = tr("{place} = {format} needs task={format}.", place=location, format=row_format)
            else:
                loss = "dpo" if source.format is schema.RowFormat.preference else "kto"
                sentence = tr(
                    "{place} = {format} needs a preference loss, for example preference={loss}.",
                    place=location,
                    format=row_format,
                    loss=loss,
                )
            yield loaded.about(key, sentence)


def _check_general(loaded: LoadedConfig) -> Iterator[ConfigError]:
    """Yield an error for sources marked `general` without effect, and if none is where task=distill has no teacher."""
    cfg, is_distilled = loaded.cfg, loaded.cfg.task.kind is schema.TaskKind.distill
    for key, sources in (("data.sources", cfg.data.sources), ("data.validation", cfg.data.validation)):
        marked = [number for number, source in enumerate(sources) if source.general]
        if marked and not (is_distilled and not cfg.distill.teacher):
            sentence = tr(
                "{place}.general has an effect with task=distill and no distill.teacher only. Remove it.",
                place=f"{key}[{marked[0]}]",
            )
            yield loaded.about(key, sentence)
    if not is_distilled or cfg.distill.teacher:
        return
    if not any(source.general for source in cfg.data.sources):
        sentence = tr(
            "task=distill has nothing to learn from: give distill.teacher=DIR, or mark the sources whose samples must "
            "not be forgotten: data.sources=[{{path: MINE.jsonl}}, {{path: GENERAL.jsonl, general: true}}]."
        )
        yield loaded.about("task.kind", sentence)
    if cfg.distill.general_share and any(source.weights for source in cfg.data.sources):
        yield loaded.error(
            "distill.general_share",
            "distill.general_share and weights of a source that change both decide how much comes from where: keep one "
            "of them.",
        )


def _check_requirements(loaded: LoadedConfig) -> Iterator[ConfigError]:
    """Yield an error for each setting that needs another one which is off (`rule_tables.REQUIRES`)."""
    for row in rule_tables.REQUIRES:
        missing = [override for override, is_so in row.needs.items() if not is_so(loaded.cfg)]
        if row.is_on(loaded.cfg) and missing:
            yield loaded.about(row.key, loaded.fill(row.key, row.sentence, words=" ".join(missing)))


def _check_untested(loaded: LoadedConfig) -> Iterator[ConfigError]:
    """Yield an error for combinations that are untested, and whose errors would be silent."""
    cfg, default = loaded.cfg, schema.RunConfig()
    changed = [
        key for key in rule_tables.GROUPING if dotted_keys.get_value(cfg, key) != dotted_keys.get_value(default, key)
    ]
    is_muon = cfg.optim.name is schema.OptimizerName.muon
    if changed or is_muon or cfg.optim.name is schema.OptimizerName.adamw_8bit:
        for condition in rule_tables.UNTESTED + (rule_tables.UNTESTED_WITH_MUON if is_muon else ()):
            if rule_tables.when(condition)(cfg):
                [other] = rule_tables.keys_in(condition)  # each of these conditions has one key
                yield loaded.error(
                    changed[0] if changed else "optim.name",
                    "{key} = {value} and {other} = {theirs} do not go together: untested. Leave one of them out.",
                    other=other,
                    theirs=as_typed(dotted_keys.get_value(cfg, other)),
                )


_VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_RANK_VARIABLES = re.compile(
    r"RANK|(?:LOCAL|GROUP|ROLE|CROSS)_RANK|(?:|LOCAL_|GROUP_|ROLE_|CROSS_)WORLD_SIZE|LOCAL_SIZE|CROSS_SIZE|MASTER_(?:ADDR|PORT)"
    r"|\w+_VISIBLE_DEVICES|ZE_AFFINITY_MASK|(?:OMPI_COMM_WORLD|PMI|PMIX|MPI|SLURM|TORCHELASTIC)_\w+"
    r"|(?:PYTHON|LC)_TOOLKIT_\w+"
)
"""Variables that give each process its rank and GPU; launchers and the toolkit set them."""
_CONTROL_CHARACTER = re.compile(r"[\x00-\x1f\x7f]")
_UNITS = {"d": "days", "h": "hours", "m": "minutes", "s": "seconds"}


def is_duration(text: str) -> bool:
    """Whether `run.deadline` is a duration, which does not depend on the clock."""
    return bool(re.fullmatch(r"(\d+(\.\d+)?[dhms] ?)+", text.strip()))


def parse_deadline(text: str, now: datetime) -> datetime | None:
    """Return the time of `run.deadline`, relative to `now`, in the machine's time zone; None if the text is no time."""
    text = text.strip()
    try:
        if is_duration(text):
            parts = re.findall(r"([\d.]+)([dhms])", text)
            return now + sum((timedelta(**{_UNITS[unit]: float(count)}) for count, unit in parts), timedelta())
        if re.fullmatch(r"\d{1,2}:\d{2}", text):
            at = datetime.combine(now, datetime.strptime(text, "%H:%M").time())
            return at if at > now else at + timedelta(days=1)
        return datetime.fromisoformat(text)
    except (ValueError, OverflowError):
        return None


def _check_deadline(loaded: LoadedConfig) -> Iterator[ConfigError]:
    """Yield an error if `run.deadline` is no time."""
    if loaded.cfg.run.deadline and parse_deadline(loaded.cfg.run.deadline, datetime.now()) is None:
        yield loaded.error(
            "run.deadline",
            '{key} = {value} is no time: give a time of day ("18:00"), a date and time ("2026-11-26 08:00") or a '
            'duration ("2h30m").',
        )


def check_time_left(loaded: LoadedConfig) -> None:
    """Raise ConfigError if `run.deadline` is past. Not in `check_rules`, which also read configs of old runs."""
    now = datetime.now()
    at = parse_deadline(loaded.cfg.run.deadline, now)
    if at is not None and at.timestamp() <= now.timestamp():
        raise loaded.error("run.deadline", "{key} = {value} is past. Name a later time, or run.deadline= for none.")


def _check_variables(loaded: LoadedConfig) -> Iterator[ConfigError]:
    """Yield an error, without the value, for each variable of `launch.env` that is invalid, secret or a launcher's."""
    interface = loaded.cfg.distributed.interface
    for name, value in loaded.cfg.launch.env.items():
        text = "" if value is None else schema.as_text(value)
        if not _VARIABLE_NAME.fullmatch(name):
            reason = tr("this is no name of a variable: letters, digits and _ only, and no digit in front.")
        elif _RANK_VARIABLES.fullmatch(name):
            reason = tr("the launcher sets this variable for each rank. Remove it.")
        elif name in schema.INTERFACES and interface:
            reason = tr(
                "distributed.interface = {interface} sets this variable. Keep one of the two.", interface=interface
            )
        elif isinstance(value, (dict, list)):
            reason = tr("write a text, a number, true or false, or nothing behind the name.")
        elif value is not None and is_under_secret_name(name, text):
            reason = tr(
                "a secret has no place in a recipe. Write `{name}:` without a value (null), and set the variable where "
                "you type the command.",
                name=name,
            )
        elif _CONTROL_CHARACTER.search(text):
            reason = tr("the value holds control characters, such as a line break or a tab.")
        else:
            continue
        yield loaded.about(f"launch.env.{name}", f"launch.env.{name}: {reason}")


def _check_keep_best(loaded: LoadedConfig) -> Iterator[ConfigError]:
    """Yield an error if `evaluate.keep_best` names no figure of the evaluations by which checkpoints can be ranked."""
    key, evaluate = "evaluate.keep_best", loaded.cfg.evaluate
    figures = [schema.EVAL_LOSS, *(f"eval_{metric.value}" for metric in evaluate.metrics if metric.value != "length")]
    kind, preference = loaded.cfg.task.kind, loaded.cfg.preference
    of_tasks = {schema.TaskKind.classify: schema.EVAL_LABELS, schema.TaskKind.embed: schema.EVAL_EMBED}
    figures += of_tasks.get(kind, ())
    if kind is schema.TaskKind.distill and _has_teacher(loaded.cfg):
        eval_kl, general_loss = schema.EVAL_TAUGHT
        figures += [eval_kl] if loaded.cfg.distill.teacher else [eval_kl, general_loss]
    if preference.is_on or kind is schema.TaskKind.reward:
        accuracies, margins = schema.EVAL_PAIRS
        figures += [accuracies, margins] if preference.is_paired else [accuracies]  # a margin needs two answers
    if evaluate.keep_best and evaluate.keep_best not in figures:
        could_be = evaluate.keep_best in {f"eval_{metric.value}" for metric in schema.Metric} - {"eval_length"}
        yield loaded.error(
            key,
            "{key} = {value} is none of {known}. {advice}",
            known=", ".join(figures),
            advice=tr("Add it to evaluate.metrics.") if could_be else did_you_mean(evaluate.keep_best, figures),
        )


def _has_teacher(cfg: schema.RunConfig) -> bool:
    """Whether validation samples have a teacher: all by another model, else those of sources that are `general`."""
    return bool(cfg.distill.teacher) or any(source.general for source in cfg.data.validation or cfg.data.sources)


def _check_ranks(loaded: LoadedConfig, world_size: int) -> Iterator[ConfigError]:
    """Yield errors of the rules that need the number of ranks: of ZeRO++'s partitions and of ZenFlow."""
    zero, batch = loaded.cfg.zero, loaded.cfg.batch
    if world_size % zero.zero_hpz_partition_size:
        yield loaded.error(
            "zero.zero_hpz_partition_size",
            "{key} = {value} must divide the {ranks} ranks of the run. Set it to the number of GPUs per node: "
            "{key}={best}.",
            ranks=world_size,
            best=mesh.largest_divisor(world_size, zero.zero_hpz_partition_size),
        )
    ranks, micro = mesh.mesh_of(loaded.cfg, world_size).data_ranks, batch.micro_per_gpu
    if zero.zenflow.enabled and micro != schema.AUTO and batch.global_size != micro * ranks:
        yield loaded.error(
            "zero.zenflow.enabled",
            "zero.zenflow.enabled = true updates after every micro-batch: batch.global_size = {batch.global_size} must "
            "be batch.micro_per_gpu ({batch.micro_per_gpu}) x {ranks} ranks. To add up more steps, use "
            "zero.zenflow.update_interval.",
            ranks=ranks,
        )
