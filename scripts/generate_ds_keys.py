#!/usr/bin/env python3
"""Write toolkit/engine/ds_keys.json from the installed DeepSpeed; look at `git diff` after."""

import argparse
import inspect
import json
from pathlib import Path
from typing import Any, get_args

import deepspeed as ds
import torch
from deepspeed.comm.config import CommsLoggerConfig
from deepspeed.profiling.config import DeepSpeedFlopsProfilerConfig
from deepspeed.runtime import config, lr_schedules
from deepspeed.runtime.activation_checkpointing.config import ACT_CHKPT_DEFAULT
from deepspeed.runtime.swap_tensor.aio_config import AIO_DEFAULT_DICT

TARGET = Path(__file__).parents[1] / "toolkit" / "engine" / "ds_keys.json"


class _Spy(dict[str, Any]):
    """An empty section that notes in its attributes which keys DeepSpeed looks for."""

    def get(self, key: str, default: Any = None) -> Any:
        child = vars(self).setdefault(key, _Spy() if isinstance(default, dict) else None)
        return default if child is None else child

    def __contains__(self, key: object) -> bool:
        return bool(vars(self).setdefault(str(key), None))

    def keys(self) -> Any:
        return self

    def plain(self) -> dict[str, Any] | None:
        return {key: child if child is None else child.plain() for key, child in vars(self).items()} or None


def _fields(model: Any, renamed: dict[str, str], prefix: str = "") -> dict[str, Any]:
    """Return the keys of a pydantic model; its deprecated and second spellings go to `renamed`."""
    keys = {}
    for name, field in model.model_fields.items():
        extra, key = field.json_schema_extra or {}, field.alias or name
        if extra.get("deprecated") or key != name:
            renamed[prefix + name] = prefix + extra.get("new_param", key)
        if not extra.get("deprecated"):
            inner = [kind for kind in (field.annotation, *get_args(field.annotation)) if hasattr(kind, "model_fields")]
            keys[key] = _fields(inner[0], renamed, f"{prefix}{key}.") if inner else None
    return keys


def _parameters(*kinds: Any) -> dict[str, None]:
    own = ("params", "model_params", "optimizer", "adamw_mode", "last_batch_iteration")
    return {name: None for kind in kinds for name in inspect.signature(kind).parameters if name not in own}


def key_table() -> str:
    """Return the file's text for the installed DeepSpeed."""
    read, top, flops, renamed = (
        config.DeepSpeedConfig.__new__(config.DeepSpeedConfig),
        _Spy(),
        _Spy(),
        {"bfloat16": "bf16"},
    )
    read._initialize_params(top)
    DeepSpeedFlopsProfilerConfig.__new__(DeepSpeedFlopsProfilerConfig)._initialize(flops)
    parts = {"zero_optimization": read.zero_config, "fp16": read.float16_config, "bf16": read.bfloat16_config}
    parts |= {"compile": read.compile_config, "hybrid_engine": read.hybrid_engine, "comms_logger": CommsLoggerConfig()}
    adam = _parameters(ds.ops.adam.FusedAdam, ds.ops.adam.DeepSpeedCPUAdam, torch.optim.AdamW)
    muon = ("momentum", "ns_method", "muon_lr", "adam_lr", "per_head_muon")
    others = _parameters(torch.optim.SGD, torch.optim.Adagrad, torch.optim.Adafactor)
    rates = _parameters(lr_schedules.WarmupLR, lr_schedules.WarmupDecayLR, lr_schedules.WarmupCosineLR)
    keys = {**(top.plain() or {}), **dict.fromkeys(("sequence_parallel_size", "vocabulary_size"))}
    keys |= _fields(type(read.monitor_config), renamed)
    keys |= {name: _fields(type(part), renamed, f"{name}.") for name, part in parts.items()}
    keys |= {
        "activation_checkpointing": dict.fromkeys(ACT_CHKPT_DEFAULT),
        "aio": dict.fromkeys(AIO_DEFAULT_DICT),
        "flops_profiler": flops.plain(),
        "optimizer": {
            "type": None,
            "legacy_fusion": None,
            "params": {**adam, "torch_adam": None, **dict.fromkeys(muon), **others},
        },
        "scheduler": {"type": None, "params": rates},
        "timers": {"throughput": _fields(type(read.timers_config), renamed, "timers.throughput.")},
        "torch_autocast": dict.fromkeys(("enabled", "dtype", "lower_precision_safe_modules")),
    }
    removed = (
        *config._REMOVED_TOP_LEVEL_CONFIG_KEYS,
        *(f"zero_optimization.{k}" for k in config._REMOVED_ZERO_CONFIG_KEYS),
    )
    keys = {name: children for name, children in keys.items() if name not in (*removed, *renamed)}
    renamed = {old: renamed.get(new, new) for old, new in renamed.items()}
    table = {"deepspeed": ds.__version__, "keys": keys, "renamed": renamed, "removed": removed}
    return json.dumps(table, indent=1) + "\n"


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    TARGET.write_text(key_table(), encoding="utf-8")
