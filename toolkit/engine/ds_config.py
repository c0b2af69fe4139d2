"""A run's DeepSpeed JSON, and for each of its values where it comes from. Pure: imports neither torch nor deepspeed.

Two dictionaries say which key of the schema owns which DeepSpeed key: `SAME` for values that pass unchanged,
`DERIVED` for the others. Import (ds_import) reads the same tables backwards, so both directions cannot drift apart.
"""

import json
from dataclasses import dataclass, field, fields
from typing import Any

from toolkit.config.checks import accumulation
from toolkit.config.checks_track import enabled_trackers
from toolkit.config.layout import layout_of
from toolkit.config.ops import with_optimizer
from toolkit.config.optimizers import SOMETIMES_READ
from toolkit.config.places import value_of
from toolkit.config.schema import (
    ActivationCheckpointingConfig,
    AioConfig,
    CommsLoggerConfig,
    Device,
    Dtype,
    FlopsProfilerConfig,
    OffloadOptimizerConfig,
    OffloadParamConfig,
    OptimizerName,
    PrecisionConfig,
    RunConfig,
    ZenFlowConfig,
    ZeroConfig,
)
from toolkit.config.tensor import partition_config
from toolkit.config.unread import STAGE3_KEYS, SUPER_OFFLOAD_KEYS
from toolkit.engine.ds_keys import check_extra
from toolkit.engine.ds_optimizer import write_optimizer
from toolkit.engine.ds_scheduler import write_scheduler
from toolkit.messages import tr

# DeepSpeed prints its own progress line every so many steps, and its default was 10 in older versions.
SILENT = 2_000_000_000


def _names(kind: type, *without: str) -> tuple[str, ...]:
    return tuple(item.name for item in fields(kind) if item.name not in without)


# DeepSpeed section -> (schema section, the names that both share)
SECTIONS: dict[str, tuple[str, tuple[str, ...]]] = {
    "zero_optimization": ("zero", _names(ZeroConfig, "offload_optimizer", "offload_param", "zenflow", "aio")),
    "zero_optimization.offload_optimizer": ("zero.offload_optimizer", _names(OffloadOptimizerConfig)),
    "zero_optimization.offload_param": ("zero.offload_param", _names(OffloadParamConfig)),
    "zero_optimization.zenflow": ("zero.zenflow", _names(ZenFlowConfig, "enabled")),
    "aio": ("zero.aio", _names(AioConfig)),
    "fp16": ("precision", _names(PrecisionConfig, "dtype", "tf32")),
    "optimizer.params": ("optim", ("lr", "weight_decay", *SOMETIMES_READ)),
    "activation_checkpointing": ("train.activation_checkpointing", _names(ActivationCheckpointingConfig, "enabled")),
    "flops_profiler": ("profile.flops", _names(FlopsProfilerConfig)),
    "comms_logger": ("profile.comms", _names(CommsLoggerConfig)),
}
SAME: dict[str, str] = {
    "train_batch_size": "batch.global_size",
    "train_micro_batch_size_per_gpu": "batch.micro_per_gpu",
    "gradient_clipping": "train.gradient_clipping",
    "wall_clock_breakdown": "profile.wall_clock_breakdown",
    "memory_breakdown": "profile.memory_breakdown",
    "dump_state": "profile.dump_state",
    "optimizer.params.torch_adam": "optim.torch",
    "compile.deepcompile": "compile.deepcompile",
    "sequence_parallel_size": "parallel.sequence",
    "tensor_parallel.autotp_size": "parallel.tensor",
} | {f"{theirs}.{name}": f"{ours}.{name}" for theirs, (ours, names) in SECTIONS.items() for name in names}
DERIVED: dict[str, str] = {
    "gradient_accumulation_steps": "batch.global_size",
    "fp16.enabled": "precision.dtype",
    "bf16.enabled": "precision.dtype",
    "tensor_parallel.partition_config.use_default_specs": "parallel.tensor",
    "tensor_parallel.partition_config.layer_specs": "parallel.tensor",
    "optimizer.type": "optim.name",
    "optimizer.params.adam_w_mode": "optim.name",
    "optimizer.params.fused": "optim.torch",
    "optimizer.params.muon_lr": "optim.lr",
    "zero_optimization.zenflow.select_strategy": "zero.zenflow.enabled",
    "scheduler.type": "schedule.name",
    "scheduler.params.warmup_min_lr": "schedule.warmup_min_ratio",
    "scheduler.params.warmup_max_lr": "optim.lr",
    "scheduler.params.warmup_num_steps": "schedule.warmup_steps",
    "scheduler.params.warmup_type": "schedule.warmup_type",
    "scheduler.params.total_num_steps": "train.max_steps",
    "scheduler.params.warmup_min_ratio": "schedule.warmup_min_ratio",
    "scheduler.params.cos_min_ratio": "schedule.min_lr_ratio",
}
# DeepSpeed's monitors are never on: trackers of our own do their work, whatever a JSON asks for.
MONITORS: dict[str, str] = {
    "tensorboard.enabled": "track.tensorboard.enabled",
    "tensorboard.output_path": "track.tensorboard.dir",
    "tensorboard.job_name": "track.tensorboard.dir",
    "csv_monitor.enabled": "track.csv.enabled",
    "csv_monitor.output_path": "track.csv.enabled",
    "csv_monitor.job_name": "track.csv.enabled",
    "wandb.enabled": "track.wandb.enabled",
    "wandb.project": "track.wandb.project",
    "wandb.group": "track.wandb.group",
    "wandb.team": "track.wandb.entity",
}
OWNED: dict[str, str] = SAME | DERIVED | MONITORS


@dataclass(kw_only=True, slots=True)
class DsConfig:
    """What DeepSpeed receives, and why."""

    values: dict[str, Any] = field(default_factory=dict)
    """The nested dictionary: JSON-able, nothing left to DeepSpeed's defaults, no "auto", no null."""
    why: dict[str, str] = field(default_factory=dict)
    """Dotted DeepSpeed key -> the schema key that holds the value, or "= formula"."""
    missing: list[str] = field(default_factory=list)
    """Sentences about what this JSON cannot say to another program; our own training does it all the same."""

    def put(self, key: str, value: Any, why: str) -> None:
        """Set a dotted DeepSpeed key."""
        section = self.values
        *parents, name = key.split(".")
        for parent in parents:
            section = section.setdefault(parent, {})
        section[name] = value
        self.why[key] = why


def read_key(cfg: RunConfig, key: str) -> Any:
    """Return the value of a dotted schema key, with enums as their plain strings."""
    value = value_of(cfg, key)
    return getattr(value, "value", list(value) if isinstance(value, list) else value)


def build_ds_config(cfg: RunConfig, world_size: int, total_steps: int | None = None) -> DsConfig:
    """Write a run's settings as DeepSpeed's JSON.

    Args:
        cfg: the run.
        world_size: ranks over all nodes.
        total_steps: optimizer steps of the whole run; None takes `train.max_steps`, and where that is 0 too and the
            scheduler depends on it, the scheduler section is left out and `missing` says so.

    Raises:
        ConfigError: the batch cannot be divided, or ds_extra holds an unknown or owned key.
    """
    check_extra(cfg.ds_extra, OWNED)
    cfg, reason = with_optimizer(cfg)
    ds = DsConfig()
    _batch(ds, cfg, world_size)
    _precision(ds, cfg)
    _zero(ds, cfg)
    write_optimizer(ds, cfg, reason)
    write_scheduler(ds, cfg, total_steps or cfg.train.max_steps or None)
    if cfg.train.activation_checkpointing.enabled:
        _copy(ds, cfg, "activation_checkpointing")
        # 0 stands for DeepSpeed's null; it is read only with contiguous_memory_optimization.
        _drop(ds, "activation_checkpointing.number_checkpoints", 0)
    if cfg.parallel.tensor > 1:
        _same(ds, cfg, "tensor_parallel.autotp_size")
        for name, value in partition_config().items():
            ds.put(f"tensor_parallel.partition_config.{name}", value, "= how parameters of these names are split")
    if cfg.compile.deepcompile:
        _same(ds, cfg, "compile.deepcompile")
    _observers(ds, cfg)
    for key, value in leaves(cfg.ds_extra):
        ds.put(key, value, f"ds_extra.{key}")
    return ds


def leaves(section: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Return (dotted key, value) of everything below `section` that is no non-empty dictionary."""
    found: list[tuple[str, Any]] = []
    for name, value in section.items():
        if isinstance(value, dict) and value:
            found += leaves(value, f"{prefix}{name}.")
        else:
            found.append((prefix + name, value))
    return found


def explain(ds: DsConfig, where: dict[str, str]) -> str:
    """Return a table: each DeepSpeed key, its value, the schema key or formula and the place that set it.

    Args:
        ds: from build_ds_config.
        where: schema key -> "file:line" or "command line", from config.load.
    """
    rows = []
    for key, value in leaves(ds.values):
        why = ds.why[key]
        rows.append((key, json.dumps(value), why if why.startswith("=") else f"{why}  ({_place(why, where)})"))
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    return "\n".join(f"{key:<{widths[0]}}  {value:<{widths[1]}}  {why}" for key, value, why in rows)


def _place(key: str, where: dict[str, str]) -> str:
    while key:
        if key in where:
            return where[key]
        key = key.rpartition(".")[0]
    return tr("schema default")


def _same(ds: DsConfig, cfg: RunConfig, *keys: str) -> None:
    for key in keys:
        ds.put(key, read_key(cfg, SAME[key]), SAME[key])


def _copy(ds: DsConfig, cfg: RunConfig, section: str, *without: str) -> None:
    _same(ds, cfg, *(f"{section}.{name}" for name in SECTIONS[section][1] if name not in without))


def _drop(ds: DsConfig, key: str, unset: object) -> None:
    """Take a key out again when its value is the schema's word for "not given"."""
    *parents, name = key.split(".")
    section = ds.values
    for parent in parents:
        section = section[parent]
    if section[name] == unset:
        del section[name], ds.why[key]


def _batch(ds: DsConfig, cfg: RunConfig, world_size: int) -> None:
    times = accumulation(cfg, world_size)  # first: it tells of a micro-batch that is no number yet
    _same(ds, cfg, "train_batch_size", "train_micro_batch_size_per_gpu")
    ds.put(
        "gradient_accumulation_steps",
        times,
        f"= batch.global_size {cfg.batch.global_size} / "
        f"(batch.micro_per_gpu {cfg.batch.micro_per_gpu} x {layout_of(cfg, world_size).data_ranks} ranks)",
    )
    if cfg.parallel.sequence > 1:
        # From it DeepSpeed 0.19.8 learns how many ranks have rows of their own (runtime/config.py); as no mpu and no
        # mesh comes with it, it divides states and averages gradients over all ranks, as without it.
        _same(ds, cfg, "sequence_parallel_size")
    # Always written: what DeepSpeed does without it changed from no clipping to 1.0 in 2026.
    ds.put("gradient_clipping", float(cfg.train.gradient_clipping), "train.gradient_clipping")
    ds.put("steps_per_print", SILENT, f"= {SILENT}: DeepSpeed's own progress lines are off, see train.log_every")


def _precision(ds: DsConfig, cfg: RunConfig) -> None:
    dtype = cfg.precision.dtype
    ds.put("fp16.enabled", dtype is Dtype.fp16, "precision.dtype")
    ds.put("bf16.enabled", dtype is Dtype.bf16, "precision.dtype")
    if dtype is Dtype.fp16:
        _copy(ds, cfg, "fp16")
    ds.put("data_types.grad_accum_dtype", *_accumulation_dtype(cfg))


def _accumulation_dtype(cfg: RunConfig) -> tuple[str, str]:
    """Return the type in which micro-batches' gradients are added up, and why (read in DeepSpeed 0.19.8).

    bf16 keeps 8 bits, so sums over many micro-batches lose the small ones; fp32 is right wherever DeepSpeed can:
    stages 1 (it then takes its BF16_Optimizer), 2 and 3. Stage 0 raises "unsupported mix" unless both types agree.
    Stages 1 and 2 with an offloaded optimizer add up in host buffers of the model's type, whatever is asked here.
    fp16 gradients are scaled against loss of small values and checked for overflow, and stay fp16.
    """
    dtype, stage = cfg.precision.dtype, cfg.zero.stage
    offloaded = cfg.zero.offload_optimizer.device is not Device.none
    if dtype is Dtype.bf16 and (stage == 3 or (stage in (1, 2) and not offloaded)):
        return ("fp32", f"= fp32: bf16 sums lose small gradients, and stage {stage} can add up in fp32")
    return (dtype.value, f"= precision.dtype {dtype.value}: stage {stage} adds up in the model's own type")


def _zero(ds: DsConfig, cfg: RunConfig) -> None:
    zero = cfg.zero
    if zero.stage == 0:
        _same(ds, cfg, "zero_optimization.stage")
        return
    _copy(ds, cfg, "zero_optimization", *(() if zero.stage == 3 else STAGE3_KEYS))
    if zero.stage == 3 and cfg.optim.name is OptimizerName.muon:
        ds.put("zero_optimization.reduce_scatter", False, "= false: Muon needs whole gradients")
    for name, offload in (("offload_optimizer", zero.offload_optimizer), ("offload_param", zero.offload_param)):
        if offload.device is not Device.none:
            path = () if offload.device is Device.nvme else ("nvme_path",)
            _copy(
                ds,
                cfg,
                f"zero_optimization.{name}",
                *path,
                *(() if zero.offload_optimizer.super_offload else SUPER_OFFLOAD_KEYS),
            )
    if Device.nvme in (zero.offload_optimizer.device, zero.offload_param.device):
        _copy(ds, cfg, "aio")
    if zero.zenflow.enabled:
        _copy(ds, cfg, "zero_optimization.zenflow")
        # Its other strategy counts epochs by a data loader that the engine does not have here.
        ds.put("zero_optimization.zenflow.select_strategy", "step", "zero.zenflow.enabled")


def _observers(ds: DsConfig, cfg: RunConfig) -> None:
    """Measuring tools; a section that is off is left out."""
    for section in ("flops_profiler", "comms_logger"):
        if read_key(cfg, f"{SECTIONS[section][0]}.enabled"):
            _copy(ds, cfg, section)
    if "flops_profiler" in ds.values:
        _drop(ds, "flops_profiler.output_file", "")
    _same(ds, cfg, "wall_clock_breakdown", "memory_breakdown", "dump_state")
    if trackers := enabled_trackers(cfg):
        ds.missing.append(
            tr(
                "The trackers ({names}) are left out: they write through their own clients, not through DeepSpeed's "
                "monitors, which stay off.",
                names=", ".join(trackers),
            )
        )
