"""Rules about what goes beyond ZeRO's stages: ZeRO++, ZenFlow, SuperOffload, DeepCompile; see docs/zero.md."""

import shutil
from collections.abc import Iterator

from toolkit.config.load import LoadedConfig
from toolkit.config.mesh import mesh_of
from toolkit.config.schema import AUTO, Device, Dtype, OnBadStep, OptimizerName, RunConfig, get_value
from toolkit.errors import ConfigError
from toolkit.messages import tr

_GPU_ONLY = ("zero.zero_quantized_weights", "zero.zero_quantized_gradients", "zero.offload_optimizer.super_offload")


def check_zero(loaded: LoadedConfig) -> Iterator[ConfigError]:
    """Apply the rules that need neither ranks nor machine.

    Yields:
        What does not hold.
    """
    cfg, zero = loaded.cfg, loaded.cfg.zero
    for key, value in (
        ("zero.zenflow.topk_ratio", zero.zenflow.topk_ratio),
        ("zero.offload_optimizer.cpuadam_cores_perc", zero.offload_optimizer.cpuadam_cores_perc),
    ):
        if not 0 < value < 1:
            yield loaded.error(key, tr("{key} = {value} must be above 0 and below 1.", key=key, value=value))
    key, number = "zero.zenflow.pt_reserved_cores_perc", zero.zenflow.pt_reserved_cores_perc
    if not 0 <= number <= 1:
        yield loaded.error(key, tr("{key} = {value} must be from 0 to 1.", key=key, value=number))
    if zero.zero_hpz_partition_size > 1:
        wanted = {"zero.offload_param.device=none": _holds_weights(cfg)}
        yield from _require(loaded, "zero.zero_hpz_partition_size", wanted)
    if zero.zero_quantized_gradients:
        # 0.19.8, csrc/quantization/pt_binding.cpp: ds_swizzle_quant reads whatever it gets as __half.
        wanted = {
            "precision=fp16": cfg.precision.dtype is Dtype.fp16,
            "zero.reduce_scatter=true": zero.reduce_scatter,
        }
        yield from _require(loaded, "zero.zero_quantized_gradients", wanted)
    if cfg.compile.deepcompile:
        yield from _deepcompile(loaded)
    if zero.offload_optimizer.super_offload:
        yield from _super_offload(loaded)
    if zero.zenflow.enabled:
        yield from _zenflow(loaded)


def check_ranks(loaded: LoadedConfig, world_size: int) -> Iterator[ConfigError]:
    """Apply the rules that need the number of ranks.

    Yields:
        What does not hold.
    """
    cfg = loaded.cfg
    key, size = "zero.zero_hpz_partition_size", cfg.zero.zero_hpz_partition_size
    if world_size % size:
        yield loaded.error(
            key,
            tr("{key} = {value} must divide the {ranks} ranks of the run.", key=key, value=size, ranks=world_size),
        )
    batch = cfg.batch
    is_known = batch.micro_per_gpu != AUTO
    ranks = mesh_of(cfg, world_size).data_ranks
    if cfg.zero.zenflow.enabled and is_known and batch.global_size != batch.micro_per_gpu * ranks:
        yield loaded.error(
            "zero.zenflow.enabled",
            tr(
                "zero.zenflow.enabled = true makes an update of every micro-batch, so a step has to have one: "
                "batch.global_size = {size} must be batch.micro_per_gpu ({micro}) x {ranks} ranks. Leave more steps "
                "together with zero.zenflow.update_interval.",
                size=batch.global_size,
                micro=batch.micro_per_gpu,
                ranks=ranks,
            ),
        )


def check_zero_here(loaded: LoadedConfig) -> Iterator[ConfigError]:
    """Apply the rules about this machine.

    Yields:
        What does not hold.
    """
    for key in _GPU_ONLY:
        if get_value(loaded.cfg, key) and shutil.which("nvidia-smi") is None:
            yield loaded.error(
                key, tr("{key} = true needs NVIDIA GPUs, and there are none here. Set it to false.", key=key)
            )


def updates_early(cfg: RunConfig) -> str:
    """Return the key by which weights change while gradients still come, before a step can be judged; "" if none."""
    if cfg.zero.zenflow.enabled:
        return "zero.zenflow.enabled"
    if cfg.zero.offload_optimizer.super_offload and not cfg.train.gradient_clipping:
        return "zero.offload_optimizer.super_offload"
    return ""


def _holds_weights(cfg: RunConfig) -> bool:
    return cfg.zero.offload_param.device is Device.none


def _deepcompile(loaded: LoadedConfig) -> Iterator[ConfigError]:
    """Its graph has gathers and reductions of its own (0.19.8, compile/init_z3.py), which know none of these."""
    cfg, key = loaded.cfg, "compile.deepcompile"
    yield from _require(
        loaded,
        key,
        {
            "zero.zero_hpz_partition_size=1": cfg.zero.zero_hpz_partition_size == 1,
            "zero.zero_quantized_weights=false": not cfg.zero.zero_quantized_weights,
            "zero.zero_quantized_gradients=false": not cfg.zero.zero_quantized_gradients,
            "zero.offload_param.device=cpu": cfg.zero.offload_param.device is not Device.nvme,
            "zero.offload_optimizer.super_offload=false": not cfg.zero.offload_optimizer.super_offload,
            "zero.zenflow.enabled=false": not cfg.zero.zenflow.enabled,
        },
    )


def _super_offload(loaded: LoadedConfig) -> Iterator[ConfigError]:
    """Its process has a DeepSpeedCPUAdam that knows AdamW only (0.19.8, superoffload_utils.py)."""
    cfg, key = loaded.cfg, "zero.offload_optimizer.super_offload"
    yield from _require(
        loaded,
        key,
        {
            "zero.stage=3": cfg.zero.stage == 3,
            "zero.offload_optimizer.device=cpu": cfg.zero.offload_optimizer.device is Device.cpu,
            # Without clipping it updates before the loss scale is divided out (0.19.8, superoffload_stage3.py).
            "precision=bf16": cfg.precision.dtype is not Dtype.fp16 or cfg.train.gradient_clipping > 0,
            **_adamw(cfg),
            **_judged_late(cfg),
        },
    )


def _zenflow(loaded: LoadedConfig) -> Iterator[ConfigError]:
    cfg, key, zenflow = loaded.cfg, "zero.zenflow.enabled", loaded.cfg.zero.zenflow
    if cfg.zero.stage == 3:
        yield loaded.error(
            key,
            tr(
                "zero.zenflow.enabled = true and zero.stage = 3 do not go together: ZenFlow turns whole weights before "
                "it splits them, and here they are split as they are read. Use zero.stage=2."
            ),
        )
    yield from _require(
        loaded,
        key,
        {
            "zero.stage=2": cfg.zero.stage != 0,
            "zero.offload_optimizer.device=cpu": cfg.zero.offload_optimizer.device is Device.cpu,
            "zero.reduce_scatter=true": cfg.zero.reduce_scatter,
            "zero.contiguous_gradients=true": cfg.zero.contiguous_gradients,
            "zero.overlap_comm=true": cfg.zero.overlap_comm or not zenflow.offload,
            "precision=bf16": cfg.precision.dtype is not Dtype.fp16,  # selected gradients keep the loss scale
            **_adamw(cfg),
            **_judged_late(cfg),
        },
    )
    if zenflow.select_interval % zenflow.update_interval:
        yield loaded.error(
            "zero.zenflow.select_interval",
            tr(
                "zero.zenflow.select_interval = {select} must be a multiple of zero.zenflow.update_interval = "
                "{update}.",
                select=zenflow.select_interval,
                update=zenflow.update_interval,
            ),
        )


def _adamw(cfg: RunConfig) -> dict[str, bool]:
    return {"optim.name=adamw": cfg.optim.name is OptimizerName.adamw, "optim.torch=false": cfg.optim.torch is not True}


def _judged_late(cfg: RunConfig) -> dict[str, bool]:
    """What cannot be where weights change before a step is judged, and what cannot be where states are not saved."""
    wanted = {"run.max_restarts=0": cfg.run.max_restarts == 0, "plan.auto=false": not cfg.plan.auto}
    if updates_early(cfg):
        wanted |= {
            "train.rehearse=false": not cfg.train.rehearse,
            "train.on_bad_step=stop": cfg.train.on_bad_step is OnBadStep.stop,
            "train.max_grad_norm_ratio=0": cfg.train.max_grad_norm_ratio == 0,
            "batch.micro_per_gpu=1": cfg.batch.micro_per_gpu != AUTO,
        }
    else:
        wanted["train.on_bad_step=skip"] = cfg.train.on_bad_step is not OnBadStep.rewind
    return wanted


def _require(loaded: LoadedConfig, key: str, wanted: dict[str, bool]) -> Iterator[ConfigError]:
    """What a setting needs of the others; all of them work in data parallelism only."""
    parallel = loaded.cfg.parallel
    names = ("tensor", "sequence", "pipeline")
    wanted = wanted | {f"parallel.{name}=1": getattr(parallel, name) == 1 for name in names}
    missing = [word for word, is_so in wanted.items() if not is_so]
    if missing:
        yield loaded.error(
            key,
            tr(
                "{key} = {value} cannot be with the other settings; docs/zero.md says why. Add {words}, or leave it "
                "out.",
                key=key,
                value=str(get_value(loaded.cfg, key)).lower(),
                words=" ".join(missing),
            ),
        )
