"""Rules that join several keys. Each message says both values and the mend."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from toolkit.config.bounds import check_numbers
from toolkit.config.checks_code import check_code
from toolkit.config.checks_data import DATA_RULES
from toolkit.config.checks_optim import check_optim, check_optim_here
from toolkit.config.checks_own import _READ, check_own, unread_own
from toolkit.config.checks_pipeline import check_pipeline
from toolkit.config.checks_sequence import check_sequence
from toolkit.config.checks_tensor import check_tensor
from toolkit.config.checks_track import check_track
from toolkit.config.checks_tuning import check_tuning
from toolkit.config.checks_zero import check_ranks, check_zero, check_zero_here
from toolkit.config.load import LoadedConfig
from toolkit.config.mesh import accumulation, model_ranks, with_micro_batch
from toolkit.config.preflight import FILES, OWN_FILES, check_device, check_tuning_here
from toolkit.config.schema import EVAL_LOSS, INDUCTOR, INTERFACES, Device, Metric, as_text
from toolkit.config.unread import check_effect
from toolkit.errors import ConfigError
from toolkit.messages import did_you_mean, joined, tr
from toolkit.problems import Problems, raise_all
from toolkit.secrets import is_under_secret_name


def check_rules(
    loaded: LoadedConfig,
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


def _divided(loaded: LoadedConfig, world_size: int) -> None:
    accumulation(with_micro_batch(loaded.cfg), world_size, loaded.position("batch.global_size"))


def _batch(loaded: LoadedConfig) -> Iterator[ConfigError]:
    batch, key = with_micro_batch(loaded.cfg).batch, "batch.micro_per_gpu"
    if isinstance(batch.micro_per_gpu, str):  # through a reference to another key
        wanted = tr("{key} = {value} must be a whole number or auto.", key=key, value=batch.micro_per_gpu)
        yield loaded.error(key, wanted)


def _from_one_place(loaded: LoadedConfig, *keys: str) -> bool:
    """Return whether one file, or the command line, set all the keys: a contradiction rather than an override."""
    return len({loaded.where.get(key, "").split(":")[0] for key in keys}) == 1


def _length_of_run(loaded: LoadedConfig) -> Iterator[ConfigError]:
    train = loaded.cfg.train
    if (
        train.max_steps
        and train.epochs != 1
        and "train.epochs" in loaded.explicit
        and "train.max_steps" in loaded.explicit
    ) and _from_one_place(loaded, "train.max_steps", "train.epochs"):
        yield loaded.error(
            "train.max_steps",
            tr(
                "train.max_steps = {steps} and train.epochs = {epochs} are both given: keep one of them.",
                steps=train.max_steps,
                epochs=train.epochs,
            ),
        )


def _schedule(loaded: LoadedConfig) -> Iterator[ConfigError]:
    schedule = loaded.cfg.schedule
    if schedule.warmup_steps and schedule.warmup_ratio:
        both_from_one = _from_one_place(loaded, "schedule.warmup_steps", "schedule.warmup_ratio")
        yield loaded.error(
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
        yield loaded.error(
            "schedule.warmup_steps",
            tr(
                "schedule.warmup_steps = {warmup} is more than train.max_steps = {steps}: the run would end while the "
                "learning rate still rises.",
                warmup=schedule.warmup_steps,
                steps=loaded.cfg.train.max_steps,
            ),
        )


def _zero(loaded: LoadedConfig) -> Iterator[ConfigError]:
    stage = loaded.cfg.zero.stage
    if stage not in (0, 1, 2, 3):
        yield loaded.error("zero.stage", tr("zero.stage = {stage} must be 0, 1, 2 or 3.", stage=stage))


def _offload(loaded: LoadedConfig) -> Iterator[ConfigError]:
    zero = loaded.cfg.zero
    optimizer, param = zero.offload_optimizer.device, zero.offload_param.device
    if param is not Device.none and zero.stage != 3:
        key = "zero.offload_param.device"
        yield loaded.error(
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
        yield loaded.error(
            key,
            tr("{key} = {device} needs zero.stage 1, 2 or 3, but it is 0.", key=key, device=optimizer.value),
        )
    elif optimizer is Device.nvme and zero.stage != 3:
        key = "zero.offload_optimizer.device"
        yield loaded.error(
            key,
            tr("{key} = nvme needs zero.stage = 3, but it is {stage}. Use cpu.", key=key, stage=zero.stage),
        )
    if optimizer is Device.nvme and loaded.cfg.checkpoint.keep_weights:
        key = "checkpoint.keep_weights"
        yield loaded.error(
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
        yield loaded.error(
            key,
            tr(
                "{key} = true needs partition_activations = true (it is {partition}) and number_checkpoints, "
                "the number of layers (it is {number}).",
                key=key,
                partition=str(checkpointing.partition_activations).lower(),
                number=checkpointing.number_checkpoints,
            ),
        )


def _compile(loaded: LoadedConfig) -> Iterator[ConfigError]:
    config, stage = loaded.cfg.compile, loaded.cfg.zero.stage
    key = "compile.deepcompile"
    if config.deepcompile and stage == 0:
        yield loaded.error(key, tr("{key} = true needs zero.stage 1, 2 or 3, but it is 0.", key=key))
    if config.deepcompile and config.backend not in (INDUCTOR, "eager"):
        yield loaded.error(
            key,
            tr("{key} = true needs compile.backend = inductor, but it is {backend}.", key=key, backend=config.backend),
        )


def _profile(loaded: LoadedConfig) -> Iterator[ConfigError]:
    """A profile of a step that never comes would be missed at the end only."""
    cfg, key = loaded.cfg, "profile.flops.profile_step"
    flops, steps = cfg.profile.flops, cfg.train.max_steps
    if flops.enabled and steps and flops.profile_step >= steps:
        yield loaded.error(
            key,
            tr(
                "{key} = {value} must be less than train.max_steps = {steps}.",
                key=key,
                value=flops.profile_step,
                steps=steps,
            ),
        )


def _names(loaded: LoadedConfig) -> Iterator[ConfigError]:
    cfg = loaded.cfg
    if cfg.language not in ("", "en", "zh"):
        yield loaded.error("language", tr("language = {value} must be en, zh or empty.", value=cfg.language))
    name = cfg.run.name
    if name and (Path(name).name != name or name.startswith((".", "-")) or not name.isprintable()):
        yield loaded.error(
            "run.name",
            tr("run.name = {name} must be a plain folder name; the folder around it is run.dir.", name=name),
        )
    shard = cfg.prepare.shard
    if shard and not ((match := re.fullmatch(r"(\d+)/(\d+)", shard)) and 0 < int(match[1]) <= int(match[2])):
        yield loaded.error(
            "prepare.shard",
            tr("prepare.shard = {value} must be i/n, such as 1/4 to 4/4 for four machines.", value=shard),
        )


def _restarts(loaded: LoadedConfig) -> Iterator[ConfigError]:
    """A run that is started again has to go on, not to begin anew or to be refused."""
    cfg = loaded.cfg
    words = {
        "run.name=NAME": not cfg.run.name,
        "checkpoint.every=100": not cfg.checkpoint.every,
        "resume=auto": cfg.resume not in ("auto", "must"),
    }
    missing = [word for word, is_missing in words.items() if is_missing]
    if cfg.run.max_restarts and missing:
        yield loaded.error(
            "run.max_restarts",
            tr(
                "run.max_restarts = {most} needs a run that can go on from its checkpoints. Add {words}.",
                most=cfg.run.max_restarts,
                words=" ".join(missing),
            ),
        )


def _evaluate(loaded: LoadedConfig) -> Iterator[ConfigError]:
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


def check_without_validation(loaded: LoadedConfig) -> None:
    """Refuse settings of evaluations in a program without validation data.

    Raises:
        ConfigError: those that were changed.
    """
    reason = tr("the program gives no validation=")
    raise_all(check_effect(loaded, [(key, reason, "") for key in _READ if key.startswith("evaluate.")]))


_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OWNED = re.compile(
    r"RANK|(?:LOCAL|GROUP|ROLE|CROSS)_RANK|(?:|LOCAL_|GROUP_|ROLE_|CROSS_)WORLD_SIZE|LOCAL_SIZE|CROSS_SIZE|MASTER_(?:ADDR|PORT)"
    r"|\w+_VISIBLE_DEVICES|ZE_AFFINITY_MASK|(?:OMPI_COMM_WORLD|PMI|PMIX|MPI|SLURM|TORCHELASTIC)_\w+"
    r"|(?:PYTHON|LC)_TOOLKIT_\w+"
)
"""What says which rank a process is, and on which GPU: launchers set it for each one, and we."""
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def check_variables(loaded: LoadedConfig) -> Iterator[ConfigError]:
    """Refuse variables that cannot be set, that launchers own, and secrets.

    Yields:
        What does not hold.
    """
    for name, value in loaded.cfg.launch.env.items():
        if reason := _reason(name, value, loaded.cfg.distributed.interface):
            yield loaded.error(f"launch.env.{name}", f"launch.env.{name}: {reason}")


def _reason(name: str, value: Any, interface: str) -> str:
    """Return why a variable is refused, "" if it is not; never with its value, which may be a secret."""
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
