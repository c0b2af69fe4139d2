"""Rules that join several keys. Each message says both values and the mend."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from toolkit.config.bounds import check_numbers
from toolkit.config.checks_code import check_code
from toolkit.config.checks_data import DATA_RULES
from toolkit.config.checks_device import check_device
from toolkit.config.checks_files import FILES, OWN_FILES
from toolkit.config.checks_optim import check_optim, check_optim_here
from toolkit.config.checks_own import check_own, unread_own
from toolkit.config.checks_pipeline import check_pipeline
from toolkit.config.checks_sequence import check_sequence
from toolkit.config.checks_tensor import check_tensor
from toolkit.config.checks_track import check_track
from toolkit.config.checks_tuning import check_tuning, check_tuning_here
from toolkit.config.checks_zero import check_ranks, check_zero, check_zero_here
from toolkit.config.layout import layout_of, model_ranks
from toolkit.config.load import Loaded
from toolkit.config.places import fail, prefix
from toolkit.config.schema import AUTO, EVAL_LOSS, INDUCTOR, Device, Metric, RunConfig
from toolkit.config.suggest import did_you_mean
from toolkit.config.unread import check_effect
from toolkit.config.variables import check_variables
from toolkit.errors import ConfigError
from toolkit.messages import joined, tr
from toolkit.problems import Problems


def check(
    loaded: Loaded,
    world_size: int | None = None,
    *,
    files: bool = True,
    own: bool = False,
    problems: Problems | None = None,
) -> None:
    """Apply every rule.

    Args:
        loaded: the config and where its values come from.
        world_size: number of ranks; None leaves out the rules that need it.
        files: whether files, directories and devices that the config names must exist here; False for a config that is
            only exported for another machine.
        own: whether a program trains a custom model and dataset with it.
        problems: errors found before, and where those found here are added; None raises them.

    Raises:
        ConfigError: every rule that does not hold, in one message.
    """
    found = Problems() if problems is None else problems
    found.settle()
    found.apply(_VALUES, loaded)
    found.settle()
    found.apply((check_own, *_RULES) if own else (*_RULES, *_MODEL_RULES), loaded)
    found.apply((check_effect,), loaded, unread_own(loaded.cfg) if own else ())
    found.attempt(_divided, loaded, world_size or model_ranks(loaded.cfg))
    if world_size is not None:
        found.apply((check_ranks,), loaded, world_size)
    if files:
        found.apply((*OWN_FILES, *_HERE) if own else (*FILES, *_HERE, *_MODEL_HERE), loaded)
    if problems is None:
        found.raise_all()


def _divided(loaded: Loaded, world_size: int) -> None:
    accumulation(settled(loaded.cfg), world_size, prefix(loaded, "batch.global_size"))


def micro_rows(cfg: RunConfig) -> int:
    """Return `batch.micro_per_gpu`.

    Raises:
        ConfigError: it is auto, and only training finds the number.
    """
    if isinstance(cfg.batch.micro_per_gpu, str):
        raise ConfigError(
            tr(
                "batch.micro_per_gpu = {value} is a number only when training has begun: it is then in config.yaml of "
                "the run. Here give one: batch.micro_per_gpu=1.",
                value=cfg.batch.micro_per_gpu,
            )
        )
    return cfg.batch.micro_per_gpu


def micro_sizes(cfg: RunConfig, world_size: int) -> list[int]:
    """Return the micro-batches into which the global batch can be divided, ascending; [] if there are none."""
    per_rank, rest = divmod(cfg.batch.global_size, layout_of(cfg, world_size).data_ranks)
    return [] if rest else [rows for rows in range(1, per_rank + 1) if per_rank % rows == 0]


def settled(cfg: RunConfig, rows: int = 1) -> RunConfig:
    """Return a config whose `batch.micro_per_gpu` is a number.

    Args:
        cfg: the config.
        rows: what to put in the place of auto.
    """
    if cfg.batch.micro_per_gpu != AUTO:
        return cfg
    return replace(cfg, batch=replace(cfg.batch, micro_per_gpu=rows))


def accumulation(cfg: RunConfig, world_size: int, where: str = "") -> int:
    """Return micro-batches per rank and step: global_size / (micro_per_gpu x data-parallel ranks).

    Raises:
        ConfigError: micro_per_gpu is auto; or it is no whole number: the message names the nearest sizes that work.
    """
    size, micro = cfg.batch.global_size, micro_rows(cfg)
    ranks = layout_of(cfg, world_size).data_ranks
    unit = micro * ranks
    if size % unit:
        below, above = size // unit * unit, -(-size // unit) * unit
        choices = tr("Use {below} or {above}.", below=below, above=above) if below else tr("Use {above}.", above=above)
        sentence = (
            tr(
                "batch.global_size = {size} is not a multiple of batch.micro_per_gpu ({micro}) x {ranks} ranks "
                "= {unit}.",
                size=size,
                micro=micro,
                ranks=ranks,
                unit=unit,
            )
            if ranks > 1
            else tr(
                "batch.global_size = {size} is not a multiple of batch.micro_per_gpu ({micro}).", size=size, micro=micro
            )
        )
        raise ConfigError(joined(where + sentence, choices))
    return size // unit


def _batch(loaded: Loaded) -> Iterator[ConfigError]:
    batch, key = settled(loaded.cfg).batch, "batch.micro_per_gpu"
    if isinstance(batch.micro_per_gpu, str):  # through a reference to another key
        wanted = tr("{key} = {value} must be a whole number or auto.", key=key, value=batch.micro_per_gpu)
        yield fail(loaded, key, wanted)


def _from_one_place(loaded: Loaded, *keys: str) -> bool:
    """Return whether one file, or the command line, set all the keys: a contradiction rather than an override."""
    return len({loaded.where.get(key, "").split(":")[0] for key in keys}) == 1


def _length_of_run(loaded: Loaded) -> Iterator[ConfigError]:
    train = loaded.cfg.train
    if (
        train.max_steps
        and train.epochs != 1
        and "train.epochs" in loaded.explicit
        and "train.max_steps" in loaded.explicit
    ) and _from_one_place(loaded, "train.max_steps", "train.epochs"):
        yield fail(
            loaded,
            "train.max_steps",
            tr(
                "train.max_steps = {steps} and train.epochs = {epochs} are both given: keep one of them.",
                steps=train.max_steps,
                epochs=train.epochs,
            ),
        )


def _schedule(loaded: Loaded) -> Iterator[ConfigError]:
    schedule = loaded.cfg.schedule
    if schedule.warmup_steps and schedule.warmup_ratio:
        both_from_one = _from_one_place(loaded, "schedule.warmup_steps", "schedule.warmup_ratio")
        yield fail(
            loaded,
            "schedule.warmup_steps",
            joined(
                tr(
                    "schedule.warmup_steps = {steps} and schedule.warmup_ratio = {ratio} are both given: keep one of "
                    "them.",
                    steps=schedule.warmup_steps,
                    ratio=schedule.warmup_ratio,
                ),
                "" if both_from_one else tr("Set the other to 0."),
            ),
        )
    if loaded.cfg.train.max_steps and schedule.warmup_steps > loaded.cfg.train.max_steps:
        yield fail(
            loaded,
            "schedule.warmup_steps",
            tr(
                "schedule.warmup_steps = {warmup} is more than train.max_steps = {steps}: the run would end while the "
                "learning rate still rises.",
                warmup=schedule.warmup_steps,
                steps=loaded.cfg.train.max_steps,
            ),
        )


def _zero(loaded: Loaded) -> Iterator[ConfigError]:
    stage = loaded.cfg.zero.stage
    if stage not in (0, 1, 2, 3):
        yield fail(loaded, "zero.stage", tr("zero.stage = {stage} must be 0, 1, 2 or 3.", stage=stage))


def _offload(loaded: Loaded) -> Iterator[ConfigError]:
    zero = loaded.cfg.zero
    optimizer, param = zero.offload_optimizer.device, zero.offload_param.device
    if param is not Device.none and zero.stage != 3:
        key = "zero.offload_param.device"
        yield fail(
            loaded,
            key,
            joined(
                tr(
                    "{key} = {device} needs zero.stage = 3, but it is {stage}.",
                    key=key,
                    device=param.value,
                    stage=zero.stage,
                ),
                tr("Use zero.stage=3, or zero.offload_param.device=none."),
            ),
        )
    if optimizer is not Device.none and zero.stage == 0:
        key = "zero.offload_optimizer.device"
        yield fail(
            loaded,
            key,
            tr("{key} = {device} needs zero.stage 1, 2 or 3, but it is 0.", key=key, device=optimizer.value),
        )
    elif optimizer is Device.nvme and zero.stage != 3:
        key = "zero.offload_optimizer.device"
        yield fail(
            loaded,
            key,
            tr("{key} = nvme needs zero.stage = 3, but it is {stage}. Use cpu.", key=key, stage=zero.stage),
        )
    if optimizer is Device.nvme and loaded.cfg.checkpoint.keep_weights:
        key = "checkpoint.keep_weights"
        yield fail(
            loaded,
            key,
            tr(
                "{key} = {value} cannot be: the weights of a run whose optimizer is offloaded to NVMe cannot be taken "
                "from its checkpoints. Set it to 0.",
                key=key,
                value=loaded.cfg.checkpoint.keep_weights,
            ),
        )
    checkpointing = loaded.cfg.train.activation_checkpointing
    if checkpointing.contiguous_memory_optimization and not (
        checkpointing.partition_activations and checkpointing.number_checkpoints
    ):
        key = "train.activation_checkpointing.contiguous_memory_optimization"
        yield fail(
            loaded,
            key,
            tr(
                "{key} = true needs partition_activations = true (it is {partition}) and number_checkpoints, "
                "the number of layers (it is {number}).",
                key=key,
                partition=str(checkpointing.partition_activations).lower(),
                number=checkpointing.number_checkpoints,
            ),
        )


def _compile(loaded: Loaded) -> Iterator[ConfigError]:
    config, stage = loaded.cfg.compile, loaded.cfg.zero.stage
    key = "compile.deepcompile"
    if config.deepcompile and stage == 0:
        yield fail(loaded, key, tr("{key} = true needs zero.stage 1, 2 or 3, but it is 0.", key=key))
    if config.deepcompile and config.backend not in (INDUCTOR, "eager"):
        yield fail(
            loaded,
            key,
            tr("{key} = true needs compile.backend = inductor, but it is {backend}.", key=key, backend=config.backend),
        )


def _profile(loaded: Loaded) -> Iterator[ConfigError]:
    """A profile of a step that never comes would be missed at the end only."""
    cfg, key = loaded.cfg, "profile.flops.profile_step"
    flops, steps = cfg.profile.flops, cfg.train.max_steps
    if flops.enabled and steps and flops.profile_step >= steps:
        yield fail(
            loaded,
            key,
            tr(
                "{key} = {value} must be less than train.max_steps = {steps}.",
                key=key,
                value=flops.profile_step,
                steps=steps,
            ),
        )


def _names(loaded: Loaded) -> Iterator[ConfigError]:
    cfg = loaded.cfg
    if cfg.language not in ("", "en", "zh"):
        yield fail(loaded, "language", tr("language = {value} must be en, zh or empty.", value=cfg.language))
    name = cfg.run.name
    if name and (Path(name).name != name or name.startswith((".", "-")) or not name.isprintable()):
        yield fail(
            loaded,
            "run.name",
            tr("run.name = {name} must be a plain folder name; the folder around it is run.dir.", name=name),
        )
    shard = cfg.prepare.shard
    if shard and not ((match := re.fullmatch(r"(\d+)/(\d+)", shard)) and 0 < int(match[1]) <= int(match[2])):
        yield fail(
            loaded,
            "prepare.shard",
            tr("prepare.shard = {value} must be i/n, such as 1/4 to 4/4 for four machines.", value=shard),
        )


def _restarts(loaded: Loaded) -> Iterator[ConfigError]:
    """A run that is started again has to go on, not to begin anew or to be refused."""
    cfg = loaded.cfg
    words = {
        "run.name=NAME": not cfg.run.name,
        "checkpoint.every=100": not cfg.checkpoint.every,
        "resume=auto": cfg.resume not in ("auto", "must"),
    }
    missing = [word for word, is_missing in words.items() if is_missing]
    if cfg.run.max_restarts and missing:
        yield fail(
            loaded,
            "run.max_restarts",
            tr(
                "run.max_restarts = {most} needs a run that can go on from its checkpoints. Add {words}.",
                most=cfg.run.max_restarts,
                words=" ".join(missing),
            ),
        )


def _evaluate(loaded: Loaded) -> Iterator[ConfigError]:
    """The best checkpoint can be chosen by what is measured only, and only where more or less of it is better."""
    evaluate = loaded.cfg.evaluate
    known = [EVAL_LOSS, *(f"eval_{metric.value}" for metric in evaluate.metrics if metric is not Metric.length)]
    name = evaluate.keep_best
    if not name or name in known:
        return
    key = "evaluate.keep_best"
    could_be = name in {f"eval_{metric.value}" for metric in Metric if metric is not Metric.length}
    yield fail(
        loaded,
        key,
        joined(
            tr("{key} = {value} is none of {known}.", key=key, value=name, known=", ".join(known)),
            tr("Add it to evaluate.metrics.") if could_be else did_you_mean(name, known),
        ),
    )


_VALUES = (check_numbers, _batch, _zero, _names)
"""Rules about single values: where one does not hold, those that join it with others say nothing more."""
_RULES = (
    *(_length_of_run, _schedule, _offload, _compile, _profile, _restarts),
    *DATA_RULES,
    *(check_pipeline, check_sequence, check_tensor, check_zero, check_optim, check_track, check_variables),
)
_MODEL_RULES = (_evaluate, check_code, check_tuning)
"""Rules about language models, which a program with a model of its own does not need."""
_HERE = (check_optim_here, check_device, check_zero_here)
_MODEL_HERE = (check_tuning_here,)
