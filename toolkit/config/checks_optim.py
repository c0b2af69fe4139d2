"""Rules about `optim`: what goes together with which ZeRO stage, offloading and tuning; what is not read. No torch."""

import importlib.util
from collections.abc import Iterator

from toolkit.config.load import LoadedConfig
from toolkit.config.rule_tables import GROUPING, OPTIMIZERS, SOMETIMES_READ
from toolkit.config.schema import Device, OptimizerName, RunConfig, ScheduleName, TuningMethod, get_value
from toolkit.errors import ConfigError
from toolkit.messages import tr


def unread_optim(cfg: RunConfig) -> Iterator[tuple[str, str, str]]:
    """Yield the settings of `optim` that its optimizer does not read, why, and the key that decided it."""
    reason = tr("optim.name is {name}", name=cfg.optim.name.value)
    for name in SOMETIMES_READ:
        if name not in OPTIMIZERS[cfg.optim.name].reads:
            yield f"optim.{name}", reason, "optim.name"
    if not cfg.optim.weight_decay:
        yield "optim.decay", tr("optim.weight_decay is 0"), "optim.weight_decay"


def check_optim(loaded: LoadedConfig) -> Iterator[ConfigError]:
    """Apply the rules.

    Yields:
        What does not hold.
    """
    optim, stage = loaded.cfg.optim, loaded.cfg.zero.stage
    if not 0 <= optim.momentum < 1:
        key, number = "optim.momentum", optim.momentum
        yield loaded.error(key, tr("{key} = {value} must be from 0 to below 1.", key=key, value=number))
    if not 0 < optim.layer_lr_decay <= 1:
        key, number = "optim.layer_lr_decay", optim.layer_lr_decay
        yield loaded.error(key, tr("{key} = {value} must be above 0 and at most 1.", key=key, value=number))
    elif optim.layer_lr_decay != 1 and loaded.cfg.tuning.method in (TuningMethod.ptuning_v2, TuningMethod.prompt):
        yield loaded.error(
            "optim.layer_lr_decay",
            tr(
                "optim.layer_lr_decay = {value} needs layers to train, and tuning.method = {method} trains none.",
                value=optim.layer_lr_decay,
                method=loaded.cfg.tuning.method.value,
            ),
        )
    yield from _check_together(loaded)
    if OPTIMIZERS[optim.name].needs_whole and stage:
        yield loaded.error("optim.name", _whole(optim.name, stage))
    if optim.name is OptimizerName.muon:
        yield from _check_muon(loaded)
    yield from _check_stable(loaded)


def _check_stable(loaded: LoadedConfig) -> Iterator[ConfigError]:
    """A wsd schedule has to have room for warm-up and decay."""
    schedule = loaded.cfg.schedule
    steps = loaded.cfg.train.max_steps
    if steps and schedule.name is ScheduleName.wsd and schedule.warmup_steps + schedule.decay_steps > steps:
        yield loaded.error(
            "schedule.decay_steps",
            tr(
                "schedule.warmup_steps = {warmup} and schedule.decay_steps = {decay} are more together than "
                "train.max_steps = {steps}.",
                warmup=schedule.warmup_steps,
                decay=schedule.decay_steps,
                steps=steps,
            ),
        )


def _check_together(loaded: LoadedConfig) -> Iterator[ConfigError]:
    """What has not been tried together, and would go wrong in silence if it did."""
    cfg, zero = loaded.cfg, loaded.cfg.zero
    changed = [key for key in GROUPING if get_value(cfg, key) != get_value(RunConfig(), key)]
    key = changed[0] if changed else "optim.name"
    others = {
        "parallel.pipeline": cfg.parallel.pipeline > 1,
        "zero.zenflow.enabled": zero.zenflow.enabled,
        "zero.offload_optimizer.super_offload": zero.offload_optimizer.super_offload,
    }
    if cfg.optim.name is OptimizerName.muon:
        others |= {
            "parallel.tensor": cfg.parallel.tensor > 1,
            "parallel.sequence": cfg.parallel.sequence > 1,
            "zero.zero_hpz_partition_size": zero.zero_hpz_partition_size > 1,
        }
    elif not changed and cfg.optim.name is not OptimizerName.adamw_8bit:
        return
    for other, is_on in others.items():
        if is_on:
            yield loaded.error(
                key,
                tr(
                    "{key} = {value} and {other} = {theirs} do not go together: untested. Leave one of them out.",
                    key=key,
                    value=getattr(get_value(cfg, key), "value", get_value(cfg, key)),
                    other=other,
                    theirs=str(get_value(cfg, other)).lower(),
                ),
            )


def _whole(name: OptimizerName, stage: int) -> str:
    """Return why an optimizer does not go together with ZeRO; measured, see docs/optimizers.md."""
    if name is OptimizerName.adafactor:
        return tr(
            "optim.name = adafactor and zero.stage = {stage} do not go together: it factors matrices, and ZeRO "
            "hands it flat pieces of them, from which every stage and number of ranks computes something else. Use "
            "zero=stage0, or optim=adamw_8bit.",
            stage=stage,
        )
    return tr(
        "optim.name = {name} and zero.stage = {stage} do not go together: DeepSpeed builds it anew, and the schedule "
        "and parameter groups are lost. Use zero=stage0, or optim=adamw.",
        name=name.value,
        stage=stage,
    )


def _check_muon(loaded: LoadedConfig) -> Iterator[ConfigError]:
    cfg = loaded.cfg
    if cfg.tuning.method in (TuningMethod.ptuning_v2, TuningMethod.prompt):
        yield loaded.error(
            "optim.name",
            tr(
                "optim.name = muon needs matrices of layers to train, and tuning.method = {method} trains none. Use "
                "optim=adamw.",
                method=cfg.tuning.method.value,
            ),
        )
    if cfg.train.gradient_clipping:
        yield loaded.error(
            "train.gradient_clipping",
            tr(
                "train.gradient_clipping = {value} and optim.name = muon do not go together: under most ZeRO stages "
                "DeepSpeed would clip Muon's updates, which all have the same size, to next to nothing. Set "
                "train.gradient_clipping=0.",
                value=cfg.train.gradient_clipping,
            ),
        )
    if Device.nvme in (cfg.zero.offload_optimizer.device, cfg.zero.offload_param.device):
        yield loaded.error(
            "optim.name",
            tr("optim.name = muon and offloading to NVMe are untested together. Offload to cpu, or use optim=adamw."),
        )


def check_optim_here(loaded: LoadedConfig) -> Iterator[ConfigError]:
    """Apply the rule about this machine.

    Yields:
        What does not hold.
    """
    if loaded.cfg.optim.name is OptimizerName.adamw_8bit and importlib.util.find_spec("bitsandbytes") is None:
        yield loaded.error(
            "optim.name",
            tr(
                "optim.name = adamw_8bit needs the package bitsandbytes, which is not installed:  pip install "
                "bitsandbytes"
            ),
        )
