"""The optimizer in DeepSpeed's JSON. Imports neither torch nor deepspeed."""

from typing import Any, Protocol

from toolkit.config.optimizers import OPTIMIZERS, is_client, is_grouped
from toolkit.config.schema import Device, RunConfig
from toolkit.messages import tr


class Sink(Protocol):
    """A ds_config.DsConfig."""

    missing: list[str]

    def put(self, key: str, value: Any, why: str) -> None:
        """Set a dotted DeepSpeed key."""


def write_optimizer(ds: Sink, cfg: RunConfig, reason: str) -> None:
    """Name the optimizer and its settings, or say what a JSON cannot.

    Args:
        ds: gets it.
        cfg: the run; `optim.torch` is true or false.
        reason: why it is that, where it was auto; else "".
    """
    optim, kind = cfg.optim, OPTIMIZERS[cfg.optim.name]
    # torch's Adam, and what DeepSpeed makes by name, are on its list of tested ones, offloaded too.
    if cfg.zero.stage and (is_client(optim) or not kind.is_known):
        ds.put("zero_allow_untested_optimizer", True, "= true: DeepSpeed has not tested its ZeRO with optim.name")
    if is_client(optim) and cfg.zero.offload_optimizer.device is not Device.none:
        ds.put("zero_force_ds_cpu_optimizer", False, "= false: optim.name is offloaded, and not DeepSpeed's own")
    if is_grouped(optim):
        ds.missing.append(
            tr(
                "Parameter groups (optim.decay, optim.layer_lr_decay, optim.adam_lr) are left out: a JSON has one rate "
                "and one weight decay. Pass groups to deepspeed.initialize as model_parameters."
            )
        )
    if not kind.ds_type:
        ds.missing.append(
            tr(
                "The optimizer is left out: DeepSpeed has no name for {name}. Pass one to deepspeed.initialize as "
                "optimizer.",
                name=optim.name.value,
            )
        )
        return
    ds.put("optimizer.type", kind.ds_type, "optim.name")
    for name in ("lr", *kind.reads, "weight_decay"):
        value = getattr(optim, name)
        if name != "adam_lr" or value:
            _param(ds, name, list(value) if isinstance(value, list) else value, f"optim.{name}")
    if kind.takes_adam and not cfg.zero.zenflow.enabled:  # which hands all to PyTorch's AdamW too
        if kind.is_adam:  # DeepSpeed reads type "Adam" as AdamW unless adam_w_mode is false
            _param(ds, "adam_w_mode", kind.ds_type == "AdamW", "optim.name")
        why = tr("= optim.torch: auto, {reason}", reason=reason) if reason else "optim.torch"
        _param(ds, "torch_adam", optim.torch, why)
        if kind.is_adam and optim.torch:  # else PyTorch takes one parameter after the other, ten times as slow on CPUs
            _param(ds, "fused", True, why)


def _param(ds: Sink, name: str, value: Any, why: str) -> None:
    ds.put(f"optimizer.params.{name}", value, why)
