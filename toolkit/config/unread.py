"""Settings that a configuration does not read: a changed value without effect is an error, never silence."""

from collections.abc import Iterable, Iterator
from enum import Enum

from toolkit.config.checks_optim import unread_optim
from toolkit.config.checks_tuning import unread_tuning
from toolkit.config.hub import is_hub_name
from toolkit.config.load import JSON, LoadedConfig
from toolkit.config.rule_tables import STAGE3_KEYS
from toolkit.config.schema import (
    INDUCTOR,
    TRACKERS,
    CurriculumShape,
    Device,
    Dtype,
    Init,
    OnBadRow,
    Packing,
    RunConfig,
    ScheduleName,
    get_value,
)
from toolkit.config.validate import all_keys
from toolkit.errors import ConfigError
from toolkit.messages import tr

Unread = tuple[str, str, str]
"""A key that is not read, why, and the key whose value makes it so ("" where it is none of the config's)."""
FP16_KNOBS = (
    "loss_scale",
    "initial_scale_power",
    "loss_scale_window",
    "hysteresis",
    "consecutive_hysteresis",
    "min_loss_scale",
    "auto_cast",
)
STAGE12_KEYS = ("allgather_partitions", "allgather_bucket_size", "round_robin_gradients")
SCHEDULES_READ = {
    "min_lr_ratio": (ScheduleName.cosine, ScheduleName.polynomial, ScheduleName.wsd),
    "warmup_type": (ScheduleName.constant, ScheduleName.linear, ScheduleName.cosine),
    "power": (ScheduleName.polynomial,),
    "timescale": (ScheduleName.inverse_sqrt,),
    "decay_steps": (ScheduleName.wsd,),
    "decay_ratio": (ScheduleName.wsd,),
    "decay_type": (ScheduleName.wsd,),
}
"""Key of `schedule` -> the schedules that read it, where not all do."""
ZERO_KEYS = ("contiguous_gradients", "overlap_comm", "reduce_scatter", "reduce_bucket_size")


def check_effect(loaded: LoadedConfig, more: Iterable[Unread] = ()) -> Iterator[ConfigError]:
    """Report every key that was changed but is not read in this configuration.

    It is an error where the same layer made it so, or a higher one set the key: a recipe or a command line that
    contradicts itself. Where a higher layer switched off what reads it, as `precision=bf16` does over a recipe with
    fp16's keys, it is a notice.

    Args:
        loaded: the config and where its values come from; receives the notices.
        more: further keys that are not read.

    Yields:
        Each such key, and why it is not read.
    """
    default = RunConfig()
    reasons: dict[str, str] = {}
    noticed: dict[str, str] = {}
    for key, reason, owner in (*more, *_unread(loaded.cfg)):
        of_json = loaded.layers.get(key) == JSON  # DeepSpeed ignores it too, and its import has listed it
        if key in loaded.where and not of_json and get_value(loaded.cfg, key) != get_value(default, key):
            reasons.setdefault(key, reason)
            if owner and loaded.layer_of(owner) > loaded.layers.get(key, 0):
                noticed.setdefault(key, reason)
    loaded.notices += [_notice(loaded, key, reason) for key, reason in noticed.items()]
    yield from (
        loaded.error(
            key,
            tr(
                "{key} = {value} has no effect: {reason}. Remove it, or set {key}={default}.",
                key=key,
                value=_as_written(get_value(loaded.cfg, key)),
                reason=reason,
                default=_as_written(get_value(default, key)),
            ),
        )
        for key, reason in reasons.items()
        if key not in noticed
    )


def _notice(loaded: LoadedConfig, key: str, reason: str) -> str:
    return loaded.position(key) + tr(
        "{key} = {value} has no effect here: {reason}.",
        key=key,
        value=_as_written(get_value(loaded.cfg, key)),
        reason=reason,
    )


def _as_written(value: object) -> str:
    """Return a value as one writes it on the command line."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{','.join(map(_as_written, value))}]"
    return str(value.value if isinstance(value, Enum) else value) or '""'


def _unread(cfg: RunConfig) -> Iterator[Unread]:
    """Yield the keys that this configuration does not read, why, and the key that decided it."""
    zero, train = cfg.zero, cfg.train
    if cfg.precision.dtype is not Dtype.fp16:
        reason = tr("precision.dtype is {dtype}, not fp16", dtype=cfg.precision.dtype.value)
        yield from ((f"precision.{name}", reason, "precision.dtype") for name in FP16_KNOBS)
    elif cfg.precision.loss_scale:
        reason = tr("precision.loss_scale = {scale} is fixed", scale=cfg.precision.loss_scale)
        yield from ((f"precision.{name}", reason, "precision.loss_scale") for name in FP16_KNOBS[1:-1])
    if cfg.precision.dtype is not Dtype.fp32:
        reason = tr("precision.dtype is {dtype}, not fp32", dtype=cfg.precision.dtype.value)
        yield "precision.tf32", reason, "precision.dtype"
    stage = tr("zero.stage is {stage}", stage=zero.stage)
    if zero.stage != 3:
        yield from ((f"zero.{name}", stage, "zero.stage") for name in STAGE3_KEYS)
    if zero.stage not in (1, 2):
        yield from ((f"zero.{name}", stage, "zero.stage") for name in STAGE12_KEYS)
    if zero.stage == 0:
        yield from ((f"zero.{name}", stage, "zero.stage") for name in ZERO_KEYS)
    yield from _unread_offload(cfg)
    if not train.activation_checkpointing.enabled:
        reason = tr("train.activation_checkpointing.enabled is false")
        for key in all_keys():
            if key.startswith("train.activation_checkpointing.") and not key.endswith(".enabled"):
                yield key, reason, "train.activation_checkpointing.enabled"
    if not cfg.compile.enabled:
        reason = tr("compile.enabled is false")
        names = ("backend", "mode", "dynamic", "deepcompile")
        yield from ((f"compile.{name}", reason, "compile.enabled") for name in names)
    elif cfg.compile.backend != INDUCTOR:
        reason = tr("compile.backend is {backend}, not inductor", backend=cfg.compile.backend)
        yield "compile.mode", reason, "compile.backend"
    yield from unread_optim(cfg)
    yield from _unread_schedule(cfg)
    yield from _unread_data(cfg)
    yield from _unread_ltd(cfg)
    yield from unread_tuning(cfg)
    yield from _unread_evaluate(cfg)
    if not cfg.checkpoint.keep:
        yield "checkpoint.keep_weights", tr("all checkpoints are kept"), "checkpoint.keep"
    if not cfg.checkpoint.export:
        yield "checkpoint.verify_export", tr("checkpoint.export is false"), "checkpoint.export"
    yield from _unread_observers(cfg)
    if cfg.profile.comms.enabled and cfg.profile.comms.prof_all:
        yield "profile.comms.prof_ops", tr("profile.comms.prof_all is true"), "profile.comms.prof_all"
    if cfg.model.init is Init.random:
        yield from (
            (key, tr("model.init is random"), "model.init")
            for key in ("model.path", "model.revision", "model.trust_remote_code", "model.router_loss")
        )
    else:
        if not is_hub_name(cfg.model.path):
            yield "model.revision", tr("model.path is a folder"), "model.path"
        for key in all_keys():
            if key.startswith("model.shape."):
                yield key, tr("model.init is pretrained"), "model.init"


def _unread_schedule(cfg: RunConfig) -> Iterator[Unread]:
    """Settings of schedules of other names."""
    schedule = cfg.schedule
    reason = tr("schedule.name is {name}", name=schedule.name.value)
    unread = [key for key, names in SCHEDULES_READ.items() if schedule.name not in names]
    yield from ((f"schedule.{key}", reason, "schedule.name") for key in unread)
    if schedule.name is ScheduleName.wsd and schedule.decay_steps:
        yield "schedule.decay_ratio", tr("schedule.decay_steps is given"), "schedule.decay_steps"
    if not (schedule.warmup_steps or schedule.warmup_ratio):
        reason = tr("there is no warm-up")
        names = ("warmup_type", "warmup_min_ratio")
        for owner in ("schedule.warmup_steps", "schedule.warmup_ratio"):
            yield from ((f"schedule.{name}", reason, owner) for name in names)


def _unread_ltd(cfg: RunConfig) -> Iterator[Unread]:
    """Settings of token dropping where nothing is dropped."""
    if not cfg.train.random_ltd.steps:
        reason = tr("train.random_ltd.steps is 0")
        names = ("start_share", "first_layers", "last_layers")
        yield from ((f"train.random_ltd.{name}", reason, "train.random_ltd.steps") for name in names)


def _unread_data(cfg: RunConfig) -> Iterator[Unread]:
    """Settings of data that other settings of it switch off."""
    data = cfg.data
    if data.on_bad_row is not OnBadRow.skip:
        reason = tr("data.on_bad_row is {value}, not skip", value=data.on_bad_row.value)
        yield "data.max_bad_fraction", reason, "data.on_bad_row"
    if data.packing is not Packing.packed:
        reason = tr("data.packing is {value}, not packed", value=data.packing.value)
        yield "data.packing_window", reason, "data.packing"
    if not data.curriculum.steps:
        reason = tr("data.curriculum.steps is 0")
        names = ("start_length", "shape", "levels")
        yield from ((f"data.curriculum.{name}", reason, "data.curriculum.steps") for name in names)
    elif data.curriculum.shape is not CurriculumShape.discrete:
        reason = tr("data.curriculum.shape is {value}, not discrete", value=data.curriculum.shape.value)
        yield "data.curriculum.levels", reason, "data.curriculum.shape"
    if data.validation:
        yield "data.validation_fraction", tr("data.validation is given"), "data.validation"


def _unread_evaluate(cfg: RunConfig) -> Iterator[Unread]:
    """Settings of evaluation, where there is nothing to evaluate, to draw or to choose from."""
    evaluate = cfg.evaluate
    if not (cfg.data.validation or cfg.data.validation_fraction):
        for owner in ("data.validation", "data.validation_fraction"):
            reason = tr("there is no validation data")
            yield from ((f"evaluate.{name}", reason, owner) for name in ("metrics", "keep_best"))
    elif not (cfg.checkpoint.keep or cfg.checkpoint.max_gib):
        yield "evaluate.keep_best", tr("all checkpoints are kept"), "checkpoint.keep"
    if not evaluate.metrics:
        names = ("max_answers", "batch_size", "temperature", "top_p", "top_k", "seed")
        reason = tr("evaluate.metrics is empty")
        yield from ((f"evaluate.{name}", reason, "evaluate.metrics") for name in names)
    elif not evaluate.temperature:
        reason = tr("evaluate.temperature is 0, so nothing is drawn")
        yield from ((f"evaluate.{name}", reason, "evaluate.temperature") for name in ("top_p", "top_k", "seed"))


def _unread_observers(cfg: RunConfig) -> Iterator[Unread]:
    """Settings of trackers, reports and profilers that are switched off."""
    if not cfg.track.enabled:
        yield "track.patience_s", tr("no tracker is enabled"), "track"
    for section in (*(f"track.{name}" for name in TRACKERS), "report", "profile.flops", "profile.comms"):
        if not get_value(cfg, f"{section}.enabled"):
            for key in all_keys():
                if key.startswith(f"{section}.") and not key.endswith(".enabled"):
                    yield key, tr("{section}.enabled is false", section=section), f"{section}.enabled"


def _unread_offload(cfg: RunConfig) -> Iterator[Unread]:
    for name in ("offload_optimizer", "offload_param"):
        section = f"zero.{name}"
        device = getattr(cfg.zero, name).device
        reason = tr("{section}.device is {device}", section=section, device=device.value)
        nvme_only = {
            "nvme_path",
            "buffer_count",
            "buffer_size",
            "max_in_cpu",
            "fast_init",
            "pipeline_read",
            "pipeline_write",
        }
        for key in all_keys():
            last = key.rpartition(".")[2]
            if not key.startswith(f"{section}.") or last == "device":
                continue
            # The optimizer's path may name the place of the parameters too (conf/zero/stage3_nvme.yaml).
            if device is Device.none or (device is Device.cpu and last in nvme_only):
                yield key, reason, f"{section}.device"
    optimizer = cfg.zero.offload_optimizer
    if optimizer.device is Device.cpu and cfg.zero.stage != 3:
        yield "zero.offload_optimizer.ratio", tr("zero.stage is {stage}", stage=cfg.zero.stage), "zero.stage"
    if not optimizer.super_offload:
        reason = tr("{section}.super_offload is false", section="zero.offload_optimizer")
        yield "zero.offload_optimizer.cpuadam_cores_perc", reason, "zero.offload_optimizer.super_offload"
    zenflow = cfg.zero.zenflow
    for key in all_keys():
        if key.startswith("zero.zenflow.") and not key.endswith(".enabled") and not zenflow.enabled:
            yield key, tr("{section}.enabled is false", section="zero.zenflow"), "zero.zenflow.enabled"
    if zenflow.enabled and not zenflow.overlap_step:
        reason = tr("zero.zenflow.overlap_step is false")
        yield "zero.zenflow.pt_reserved_cores_perc", reason, "zero.zenflow.overlap_step"
    if Device.nvme not in (cfg.zero.offload_optimizer.device, cfg.zero.offload_param.device):
        for key in all_keys():
            if key.startswith("zero.aio."):
                yield key, tr("nothing is offloaded to nvme"), "zero.offload_optimizer.device"
