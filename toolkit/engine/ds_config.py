"""A run's DeepSpeed JSON, and the origin of each of its values. Imports neither torch nor deepspeed.

Two dictionaries map DeepSpeed keys to the schema's: `SAME` for values that are copied, `DERIVED` for values that are
computed. Import (ds_import) reads the same tables in the other direction, so that the two cannot drift apart.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from toolkit import messages
from toolkit.config import dotted_keys, mesh, native_ops, rule_tables, schema
from toolkit.messages import ConfigError, tr

# DeepSpeed prints its own progress line every so many steps, and its default was 10 in older versions.
SILENT = 2_000_000_000


def _shared_names(section: str, *without: str) -> tuple[str, tuple[str, ...]]:
    """Return a section of the schema, and the names that it has in common with DeepSpeed's section."""
    defaults: Any = dotted_keys.get_value(schema.RunConfig(), section)
    return section, tuple(item.name for item in fields(defaults) if item.name not in without)


# DeepSpeed section -> (schema section, the names in both)
SECTIONS: dict[str, tuple[str, tuple[str, ...]]] = {
    "zero_optimization": _shared_names("zero", "offload_optimizer", "offload_param", "zenflow", "aio"),
    "zero_optimization.offload_optimizer": _shared_names("zero.offload_optimizer"),
    "zero_optimization.offload_param": _shared_names("zero.offload_param"),
    "zero_optimization.zenflow": _shared_names("zero.zenflow", "enabled"),
    "aio": _shared_names("zero.aio"),
    "fp16": _shared_names("precision", "dtype", "optimizer_states", "communication_dtype", "tf32", "fp8"),
    "optimizer.params": ("optim", ("lr", "weight_decay", *rule_tables.SOMETIMES_READ)),
    "activation_checkpointing": _shared_names("train.activation_checkpointing", "enabled"),
    "flops_profiler": _shared_names("profile.flops"),
    "comms_logger": _shared_names("profile.comms"),
}
SAME: dict[str, str] = {
    "train_batch_size": "batch.global_size",
    "train_micro_batch_size_per_gpu": "batch.micro_per_gpu",
    "gradient_clipping": "train.gradient_clipping",
    "communication_data_type": "precision.communication_dtype",
    "wall_clock_breakdown": "profile.wall_clock_breakdown",
    "memory_breakdown": "profile.memory_breakdown",
    "dump_state": "profile.dump_state",
    "optimizer.params.torch_adam": "optim.torch",
    "compile.deepcompile": "compile.deepcompile",
    "sequence_parallel_size": "parallel.sequence",
    "tensor_parallel.autotp_size": "parallel.tensor",
} | {f"{theirs}.{name}": f"{ours}.{name}" for theirs, (ours, names) in SECTIONS.items() for name in names}
DERIVED: dict[str, str] = {
    "seq_parallel_communication_data_type": "precision.communication_dtype",
    "gradient_accumulation_steps": "batch.global_size",
    "fp16.enabled": "precision.dtype",
    "bf16.enabled": "precision.dtype",
    "bf16.bf16_master_weights_and_grads": "precision.optimizer_states",
    "bf16.bf16_optimizer_states": "precision.optimizer_states",
    "torch_autocast.enabled": "precision.dtype",
    "torch_autocast.dtype": "precision.dtype",
    "torch_autocast.lower_precision_safe_modules": "precision.dtype",
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
# DeepSpeed's monitors are never on: a JSON that turns one on turns on the toolkit's tracker instead.
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
"""DeepSpeed keys whose values the schema owns -> its key for each."""


@dataclass(kw_only=True, slots=True)
class DsConfig:
    """A DeepSpeed JSON, with the origin of each value."""

    values: dict[str, Any] = field(default_factory=dict)
    """The nested dictionary: plain JSON values, nothing left to DeepSpeed's defaults, no "auto", no null."""
    why: dict[str, str] = field(default_factory=dict)
    """Dotted DeepSpeed key -> the schema key that holds the value, or "= formula"."""
    missing: list[str] = field(default_factory=list)
    """Sentences about settings that JSON cannot express, for users of `export-config`; training has them all the same.
    """

    def put(self, key: str, value: Any, why: str) -> None:
        """Set a DeepSpeed key whose dots nest it: `zero_optimization.stage` is `stage` of the section."""
        dotted_keys.set_leaf(self.values, key, value)
        self.why[key] = why

    def omit(self, template: str, /, **values: object) -> None:
        """Add a sentence to `missing`."""
        self.missing.append(messages.tr(template, **values))


def tensor_ranks(values: Mapping[str, Any]) -> int:
    """Return the number of tensor-parallel ranks of a DeepSpeed JSON."""
    return int(values.get("tensor_parallel", {}).get("autotp_size", 1))


def read_key(cfg: schema.RunConfig, key: str) -> Any:
    """Return the value of a dotted schema key: of an enum its plain string, of a list a copy."""
    value = dotted_keys.get_value(cfg, key)
    if isinstance(value, list):
        return list(value)
    return getattr(value, "value", value)


def check_ds_config(cfg: schema.RunConfig, world_size: int | None) -> None:
    """Raise ConfigError where no DeepSpeed JSON can be made of a config that a run has yet to settle (train/settle.py).
    `world_size` None: the fewest ranks that its layout needs.
    """
    cfg = mesh.with_micro_batch(cfg)
    build_ds_config(cfg, world_size or mesh.model_ranks(cfg), cfg.train.max_steps or None)


def build_ds_config(cfg: schema.RunConfig, world_size: int, total_steps: int | None = None) -> DsConfig:
    """Return a run's settings as DeepSpeed's JSON. ConfigError if ds_extra or the batch sizes are wrong.

    `total_steps`: optimizer steps of the run. If it is None and `train.max_steps` is 0, a scheduler that depends on it
    is omitted, with a sentence in `missing`.
    """
    if cfg.ds_extra:
        from toolkit.engine.ds_keys import check_extra

        check_extra(cfg.ds_extra, OWNED)
    cfg, reason = native_ops.resolve_optimizer(cfg)  # of a config that no run has settled, as in export-config
    ds = DsConfig()
    _write_batch(ds, cfg, world_size)
    _write_precision(ds, cfg)
    _write_zero(ds, cfg)
    _write_optimizer(ds, cfg, reason)
    _write_scheduler(ds, cfg, total_steps or cfg.train.max_steps or None)
    if cfg.train.activation_checkpointing.enabled:
        # 0 stands for DeepSpeed's null; it is read only with contiguous_memory_optimization.
        unset = () if cfg.train.activation_checkpointing.number_checkpoints else ("number_checkpoints",)
        _copy_section(ds, cfg, "activation_checkpointing", *unset)
    if cfg.parallel.tensor > 1:
        _copy_keys(ds, cfg, "tensor_parallel.autotp_size")
        from toolkit.config.tensor_split import partition_config

        for name, value in partition_config().items():
            ds.put(f"tensor_parallel.partition_config.{name}", value, tr("= how parameters of these names are split"))
    if cfg.compile.deepcompile:
        _copy_keys(ds, cfg, "compile.deepcompile")
    if cfg.profile.flops.enabled:
        _copy_section(ds, cfg, "flops_profiler", *(() if cfg.profile.flops.output_file else ("output_file",)))
    if cfg.profile.comms.enabled:
        _copy_section(ds, cfg, "comms_logger")
    _copy_keys(ds, cfg, "wall_clock_breakdown", "memory_breakdown", "dump_state")
    if cfg.precision.fp8 is not schema.Fp8.none:
        ds.omit("precision.fp8 = {fp8} is omitted: layers of the model multiply in FP8.", fp8=cfg.precision.fp8.value)
    if trackers := cfg.track.enabled:
        ds.omit(
            "The trackers ({names}) are omitted: they write through their own clients, not through "
            "DeepSpeed's monitors, which stay off.",
            names=", ".join(trackers),
        )
    for key, value in dotted_keys.leaves(cfg.ds_extra):
        ds.put(key, value, f"ds_extra.{key}")
    sums_in = ds.values["data_types"]["grad_accum_dtype"]
    if rule_tables.has_bf16_states(cfg) and cfg.zero.stage == 1 and sums_in != "bf16":
        # DeepSpeed 0.19.8 then takes its BF16_Optimizer (engine.py, _do_optimizer_sanity_check), whose states are fp32.
        raise ConfigError(
            "ds_extra.data_types.grad_accum_dtype = {dtype}: zero.stage = 1 with precision.optimizer_states = bf16 "
            "sums gradients in bf16. Leave it out, or use zero=stage2.",
            dtype=sums_in,
        )
    return ds


def limit_reduce_bucket(values: dict[str, Any], trained: int) -> dict[str, Any]:
    """Return the JSON with a `reduce_bucket_size` of at most `trained`, the number of trained elements on a rank.
    DeepSpeed 0.19.8 allocates the bucket in full, 1 GB in bf16 by default, even for LoRA's few megabytes
    (runtime/zero/stage_1_and_2.py, stage3.py).
    """
    zero = values["zero_optimization"]
    if zero.get("reduce_bucket_size", 0) <= trained:
        return values
    return {**values, "zero_optimization": {**zero, "reduce_bucket_size": trained}}


def count_sequence_parts(values: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON with `train_batch_size` times the ranks that share a sequence, if layers are split over ranks
    too: DeepSpeed 0.19.8 then ignores sequence_parallel_size, and checks the batch size without it (runtime/config.py).
    """
    parts = values.get("sequence_parallel_size", 1) if "tensor_parallel" in values else 1
    return {**values, "train_batch_size": values["train_batch_size"] * parts} if parts > 1 else values


def without_optimizer(values: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON without optimizer and scheduler, for an engine that only runs forward passes."""
    zero = {name: value for name, value in values["zero_optimization"].items() if name != "offload_optimizer"}
    remaining = {name: value for name, value in values.items() if name not in ("optimizer", "scheduler")}
    return {**remaining, "zero_optimization": zero}


def for_split_stage(values: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON for a pipeline stage whose layers layouts/tensor.py has split already, without `tensor_parallel`.
    Ranks send full hidden states to the next stage: gathering them from parts fails on gloo (0.19.8, runtime/utils.py).
    """
    remaining = {name: value for name, value in values.items() if name != "tensor_parallel"}
    return {**remaining, "pipeline": {"pipe_partitioned": False, "grad_partitioned": False}}


def with_flops_file(values: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the JSON with `folder`/flops.txt as the FLOPs profiler's file, unless it names another."""
    if "flops_profiler" not in values:
        return values
    return {**values, "flops_profiler": {"output_file": str(folder / "flops.txt"), **values["flops_profiler"]}}


def _copy_keys(ds: DsConfig, cfg: schema.RunConfig, *keys: str) -> None:
    """Copy the values of DeepSpeed keys that are in `SAME`."""
    for key in keys:
        ds.put(key, read_key(cfg, SAME[key]), SAME[key])


def _copy_section(ds: DsConfig, cfg: schema.RunConfig, section: str, *without: str) -> None:
    """Copy the values of a DeepSpeed section that is in `SECTIONS`, except for the names `without`."""
    ours, names = SECTIONS[section]
    for name in names:
        if name not in without:
            ds.put(f"{section}.{name}", read_key(cfg, f"{ours}.{name}"), f"{ours}.{name}")


def _write_batch(ds: DsConfig, cfg: schema.RunConfig, world_size: int) -> None:
    """Write batch sizes, accumulation and clipping."""
    accumulation_steps = mesh.accumulation(cfg, world_size)  # raises if the micro-batch size is not known yet
    _copy_keys(ds, cfg, "train_batch_size", "train_micro_batch_size_per_gpu")
    why = tr(
        "= batch.global_size {size} / (batch.micro_per_gpu {micro} x {ranks} ranks)",
        size=cfg.batch.global_size,
        micro=cfg.batch.micro_per_gpu,
        ranks=mesh.mesh_of(cfg, world_size).data_ranks,
    )
    ds.put("gradient_accumulation_steps", accumulation_steps, why)
    if cfg.parallel.sequence > 1:
        # DeepSpeed 0.19.8 divides the ranks by it to check the batch size (runtime/config.py). Without an mpu or a mesh
        # it still divides states and averages gradients over all ranks.
        _copy_keys(ds, cfg, "sequence_parallel_size")
    # Always written: DeepSpeed's default changed from no clipping to 1.0 in 2026.
    ds.put("gradient_clipping", float(cfg.train.gradient_clipping), "train.gradient_clipping")
    why = tr("= {steps}: DeepSpeed's own progress lines are off, see train.log_every", steps=SILENT)
    ds.put("steps_per_print", SILENT, why)


def _write_precision(ds: DsConfig, cfg: schema.RunConfig) -> None:
    """Write the types of weights, states, accumulated and sent gradients."""
    ds.put("fp16.enabled", cfg.precision.dtype is schema.Dtype.fp16, "precision.dtype")
    ds.put("bf16.enabled", cfg.precision.dtype is schema.Dtype.bf16, "precision.dtype")
    if cfg.precision.dtype is schema.Dtype.fp16:
        _copy_section(ds, cfg, "fp16")
    if rule_tables.has_bf16_states(cfg):
        for name in ("bf16_master_weights_and_grads", "bf16_optimizer_states"):
            ds.put(f"bf16.{name}", True, "precision.optimizer_states")
        ds.omit(
            "Stochastic rounding is omitted: DeepSpeed's Adam rounds states in bf16 to nearest, which loses small "
            "updates. Pass an optimizer that rounds stochastically to deepspeed.initialize."
        )
    ds.put("data_types.grad_accum_dtype", *_choose_accumulation_dtype(cfg))
    if cfg.precision.communication_dtype is not schema.CommunicationDtype.auto:
        key = "communication_data_type"
        if cfg.parallel.sequence > 1:  # which has its own key, with fp32 as default (deepspeed 0.19.8, engine.py)
            key = f"seq_parallel_{key}"
        ds.put(key, cfg.precision.communication_dtype.value, "precision.communication_dtype")


def _choose_accumulation_dtype(cfg: schema.RunConfig) -> tuple[str, str]:
    """Return the type in which the gradients of micro-batches are summed, and its origin: a key of the schema, or "="
    and the reason. For DeepSpeed 0.19.8.

    bf16 keeps 8 bits, so sums over many micro-batches lose small gradients: fp32 is used wherever DeepSpeed supports
    it, in stages 1 (by its BF16_Optimizer), 2 and 3. Stage 0 raises "unsupported mix" unless both types are equal.
    Stages 1 and 2 with an offloaded optimizer sum in host buffers of the model's type, whatever is set here. fp16
    gradients are scaled so that small ones survive, and checked for overflow: they stay fp16. Optimizer
    states in bf16 take gradients in bf16: with fp32, stage 1 would use BF16_Optimizer, which keeps its states in fp32.
    """
    dtype, stage = cfg.precision.dtype, cfg.zero.stage
    offloaded = cfg.zero.offload_optimizer.device is not schema.Device.none
    if rule_tables.has_bf16_states(cfg):
        return ("bf16", "precision.optimizer_states")
    if dtype is schema.Dtype.bf16 and (stage == 3 or (stage in (1, 2) and not offloaded)):
        return ("fp32", tr("= fp32: bf16 sums lose small gradients, and stage {stage} can add up in fp32", stage=stage))
    reason = tr(
        "= precision.dtype {dtype}: stage {stage} adds up in the model's own type", dtype=dtype.value, stage=stage
    )
    return (dtype.value, reason)


def _write_zero(ds: DsConfig, cfg: schema.RunConfig) -> None:
    """Write ZeRO's section, without the keys that DeepSpeed does not read at this stage or with these devices."""
    zero = cfg.zero
    ds.put("zero_optimization.stage", zero.stage, "zero.stage")
    if zero.stage == 0:
        return
    only_stage3 = () if zero.stage == 3 else rule_tables.expand("zero.sub_group_size zero.stage3_* zero.zero_*")
    _copy_section(ds, cfg, "zero_optimization", "stage", *(key.removeprefix("zero.") for key in only_stage3))
    if zero.stage == 3 and cfg.optim.name is schema.OptimizerName.muon:
        ds.put("zero_optimization.reduce_scatter", False, tr("= false: Muon needs whole gradients"))
    for name, offload in (("offload_optimizer", zero.offload_optimizer), ("offload_param", zero.offload_param)):
        if offload.device is not schema.Device.none:
            unread: tuple[str, ...] = () if offload.device is schema.Device.nvme else ("nvme_path",)
            unread += () if zero.offload_optimizer.super_offload else ("super_offload", "cpuadam_cores_perc")
            _copy_section(ds, cfg, f"zero_optimization.{name}", *unread)
    if schema.Device.nvme in (zero.offload_optimizer.device, zero.offload_param.device):
        _copy_section(ds, cfg, "aio")
    if zero.zenflow.enabled:
        _copy_section(ds, cfg, "zero_optimization.zenflow")
        # The other strategy counts epochs by DeepSpeed's own data loader, which is not used.
        ds.put("zero_optimization.zenflow.select_strategy", "step", "zero.zenflow.enabled")


def _write_optimizer(ds: DsConfig, cfg: schema.RunConfig, reason: str) -> None:
    """Write the optimizer, or omit it if DeepSpeed has no name for it. `reason`: why `optim.torch` = auto became what
    it is, "" if it was not auto.
    """
    optim, traits, section = cfg.optim, rule_tables.OPTIMIZERS[cfg.optim.name], "optimizer.params."
    # PyTorch's Adam, and what DeepSpeed makes by name, are on its list of tested optimizers, offloaded ones too.
    is_ours = rule_tables.is_client(optim) or rule_tables.has_bf16_states(cfg)
    if cfg.zero.stage and (is_ours or not traits.is_known):
        why = tr("= true: DeepSpeed has not tested its ZeRO with optim.name")
        ds.put("zero_allow_untested_optimizer", True, why)
    if rule_tables.is_client(optim) and cfg.zero.offload_optimizer.device is not schema.Device.none:
        why = tr("= false: optim.name is offloaded, and not DeepSpeed's own")
        ds.put("zero_force_ds_cpu_optimizer", False, why)
    if rule_tables.is_grouped(optim):
        ds.omit(
            "Parameter groups ({keys}) are omitted: a JSON has one rate and one weight decay. Pass groups to "
            "deepspeed.initialize as model_parameters.",
            keys=", ".join(rule_tables.GROUPING),
        )
    if not traits.ds_type:
        ds.omit(
            "The optimizer is omitted: DeepSpeed has no name for {name}. Pass one to "
            "deepspeed.initialize as optimizer.",
            name=optim.name.value,
        )
        return
    ds.put("optimizer.type", traits.ds_type, "optim.name")
    for name in ("lr", *traits.reads, "weight_decay"):
        value = getattr(optim, name)
        if name != "adam_lr" or value:  # adam_lr = 0 stands for lr
            ds.put(section + name, list(value) if isinstance(value, list) else value, f"optim.{name}")
    if traits.takes_adam and not cfg.zero.zenflow.enabled:  # which hands all to PyTorch's AdamW too
        if traits.is_adam:  # DeepSpeed reads type "Adam" as AdamW unless adam_w_mode is false
            ds.put(section + "adam_w_mode", traits.ds_type == "AdamW", "optim.name")
        why = tr("= optim.torch: auto, {reason}", reason=reason) if reason else "optim.torch"
        ds.put(section + "torch_adam", optim.torch, why)
        if traits.is_adam and optim.torch:  # else PyTorch takes parameter after parameter, ten times as slow on CPUs
            ds.put(section + "fused", True, why)


SCHEDULERS = {
    schema.ScheduleName.constant: "WarmupLR",
    schema.ScheduleName.linear: "WarmupDecayLR",
    schema.ScheduleName.cosine: "WarmupCosineLR",
}


def ratio_of_steps(ratio: float, total_steps: int) -> int:
    """Return a ratio of some steps, rounded up. 0.07 x 100, 7.000000000000001 in floating point, is 7 steps, not 8."""
    return math.ceil(round(ratio * total_steps, 6))


def warmup_steps(cfg: schema.RunConfig, total_steps: int) -> int:
    """Return the optimizer steps of the warm-up: `warmup_steps`, or `warmup_ratio` of `total_steps`, rounded up."""
    ratio = cfg.schedule.warmup_ratio
    return ratio_of_steps(ratio, total_steps) if ratio else cfg.schedule.warmup_steps


def warmup_start_ratio(schedule: schema.ScheduleConfig, steps: int) -> float:
    """Return the first learning rate of a warm-up of `steps` steps, as a fraction of the peak rate."""
    ratio = schedule.warmup_min_ratio
    return ratio if ratio >= 0 else 1.0 / max(2, steps)  # DeepSpeed warms up for 2 steps at least


def _write_scheduler(ds: DsConfig, cfg: schema.RunConfig, total_steps: int | None) -> None:
    """Write the scheduler of DeepSpeed that is equal to train/schedule.py's, or omit it if there is none."""
    schedule = cfg.schedule
    if schedule.name not in SCHEDULERS:
        ds.omit(
            "The scheduler is omitted: schedule.name = {name} has no equal in DeepSpeed. A plain "
            "deepspeed.initialize keeps the learning rate constant.",
            name=schedule.name.value,
        )
        return
    constant = schedule.name is schema.ScheduleName.constant
    if total_steps is None and (not constant or schedule.warmup_ratio):
        ds.omit(
            "The scheduler is omitted, because it depends on the number of steps, which comes from the "
            "data: give train.max_steps, or total_steps=N to `toolkit export-config`, to have it in "
            "the file."
        )
        return
    steps = warmup_steps(cfg, total_steps or 0)  # of None only a constant rate comes here, without a ratio
    if steps == 0:
        if not constant:  # Without warm-up a constant rate needs no scheduler.
            ds.omit(
                "The scheduler is omitted: schedule.name = {name} without warm-up has no equal in "
                "DeepSpeed, whose schedulers warm up for at least 2 steps. A plain "
                "deepspeed.initialize keeps the learning rate constant.",
                name=schedule.name.value,
            )
        return
    _write_scheduler_parameters(ds, cfg, steps, total_steps)


def _write_scheduler_parameters(ds: DsConfig, cfg: schema.RunConfig, steps: int, total_steps: int | None) -> None:
    """Write name and parameters of a scheduler in `SCHEDULERS`. `steps`: of the warm-up; `total_steps`: of the run,
    which only a constant rate goes without.
    """
    schedule, params = cfg.schedule, "scheduler.params."
    start_ratio = warmup_start_ratio(schedule, steps)
    why = f"= schedule.warmup_min_ratio {start_ratio}"
    if schedule.warmup_min_ratio < 0:
        why = tr("= 1 / {steps} steps of warm-up", steps=round(1 / start_ratio))
    ds.put("scheduler.type", SCHEDULERS[schedule.name], "schedule.name")
    if schedule.name is schema.ScheduleName.cosine:
        ds.put(params + "warmup_min_ratio", start_ratio, why)
        if start_ratio:
            ds.omit(
                "DeepSpeed's WarmupCosineLR takes the first step at a learning rate of 0, whatever "
                "warmup_min_ratio is; in a run of the toolkit it is {rate}. All other steps are equal.",
                rate=f"{start_ratio * cfg.optim.lr:.3g}",
            )
        ds.put(params + "cos_min_ratio", schedule.min_lr_ratio, "schedule.min_lr_ratio")
    else:
        ds.put(params + "warmup_min_lr", start_ratio * cfg.optim.lr, f"{why} x optim.lr {cfg.optim.lr}")
        ds.put(params + "warmup_max_lr", cfg.optim.lr, "optim.lr")
    if schedule.name is schema.ScheduleName.linear and start_ratio:
        ds.omit(
            "DeepSpeed's WarmupDecayLR ends at the learning rate of its first step, {rate}; in a run of the "
            "toolkit the learning rate falls to 0. The steps of the warm-up are equal.",
            rate=f"{start_ratio * cfg.optim.lr:.3g}",
        )
    why = "schedule.warmup_steps"
    if ratio := schedule.warmup_ratio:
        why = tr("= schedule.warmup_ratio {ratio} x {steps} steps, rounded up", ratio=ratio, steps=total_steps)
    ds.put(params + "warmup_num_steps", steps, why)
    ds.put(params + "warmup_type", schedule.warmup_type.value, "schedule.warmup_type")
    if schedule.name is not schema.ScheduleName.constant:
        why = "train.max_steps"
        if total_steps != cfg.train.max_steps:
            why = tr("= train.epochs {epochs} x steps of one pass over the data", epochs=cfg.train.epochs)
        ds.put(params + "total_num_steps", total_steps, why)
